"""Base of the backends that compute softmax attention exactly: masks, windows and the KV state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import (
    BackendConfig,
    Geometry,
    check_num_sinks,
    sinks_shard_reasons,
)
from attnzoo.contract.context_parallel import SequenceShard, with_neighbours
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.masks import AttentionMask, Window
from attnzoo.contract.padding import gather_tokens, padding_first
from attnzoo.contract.states import AttentionOutput, KVState
from attnzoo.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class ExactConfig(BackendConfig):
    """Settings of exact softmax attention.

    Attributes:
        window: w. A causal query sees its own key and the w - 1 keys before it; otherwise w keys
            on either side. Padding is not counted. ``None`` means all keys.
        num_sinks: Number of leading tokens of each sequence that queries attend to outside the
            window too, also outside a window of the model (arXiv:2309.17453). Keys keep their
            positions.
    """

    smallest: ClassVar[Mapping[str, str]] = {"window": "1 token"}
    window: int | None = None
    num_sinks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_num_sinks(self, self.num_sinks, self.window)


class ExactBackend(AttentionBackend):
    """Exact softmax attention with every kind of mask, its own window, and a KV state."""

    config: ExactConfig
    capabilities = Capabilities(
        exact=True,
        cross_attention=True,
        windowed=True,
        arbitrary_mask=True,
        additive_bias=True,
        sinks=True,
        dropout=True,
        recurrent=True,
        state_from_keys=True,
        context_parallel=True,
    )

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        self.window: int | None = self.config.window

    @property
    def keeps_all_keys(self) -> bool:
        """Whether decoding needs all earlier keys: without a window, or for a position bias."""
        return self.window is None or self.geometry.position_bias

    def layer_reasons(self) -> list[str]:
        """Return every reason why this backend does not support its layer."""
        reasons = super().layer_reasons()
        if self.window is not None and self.geometry.cross_attention:
            reasons.append(
                "the layer is cross-attention, where queries have no position among the keys, so "
                f"window={self.window} is undefined (leave window out for this layer)"
            )
        if self.config.num_sinks and self.geometry.position_bias and self.geometry.window:
            reasons.append(
                "the layer adds a position bias and has a sliding window, whose cache drops the "
                f"first tokens, which num_sinks={self.config.num_sinks} needs (leave num_sinks out)"
            )
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Return every reason why these inputs are unsupported."""
        reasons = super().unsupported_reasons(inputs)
        windowed = self.window is not None or inputs.mask.window is not None
        if inputs.shard is not None and windowed and not inputs.mask.causal:
            reasons.append(
                "a bidirectional window is unsupported under context parallelism (longformer "
                "supports it)"
            )
        return reasons

    def shard_reasons(self) -> list[str]:
        """Return every reason why this layer does not support context parallelism."""
        return super().shard_reasons() + sinks_shard_reasons(self.config.num_sinks)

    def compute(self, inputs: AttentionInputs) -> AttentionOutput:
        """Compute attention to all given keys, those of a state included."""
        raise NotImplementedError

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Attend to the keys of the state and to the new keys."""
        if inputs.shard is not None:
            inputs = self._gather_keys(inputs, inputs.shard)
        if self.window is None and inputs.state is None and not inputs.return_state:
            return self._own_queries(self.compute(inputs), inputs.shard)
        padded, places = inputs.mask.padding is not None, None
        inputs, positions, length = _with_state(inputs)
        reach = self._reach(inputs)
        if self.window is not None and _windows_differ(inputs, positions, padded=padded):
            inputs = inputs._replace(mask=self._dense_mask(inputs, positions, self.window))
        elif self.window is not None:
            if padded and _can_reorder(inputs):
                places, inputs, positions = _move_padding_first(inputs, positions)
            lengths = inputs.q.shape[2], inputs.k.shape[2]
            window, num_sinks = self._window_of(inputs, self.window), self.config.num_sinks
            mask = inputs.mask.with_window(window, *lengths, num_sinks)
            inputs = inputs._replace(mask=mask)
        output = self.compute(inputs)
        if places is not None:
            out = gather_tokens(output.out, places)
            output = output._replace(out=out, weights=None)
        output = self._own_queries(output, inputs.shard)
        if inputs.return_state:
            keys = _in_last_segment(KVState(inputs.k, inputs.v, positions, length), inputs.mask)
            if self.window is not None and padded and places is None:
                keys = _with_padding_first(keys)
            state = _latest_keys(keys, reach, self.config.num_sinks)
            output = output._replace(state=state)
        return output

    @staticmethod
    def _own_queries(output: AttentionOutput, shard: SequenceShard | None) -> AttentionOutput:
        """Return the output of this rank's queries."""
        if shard is None:
            return output
        return output._replace(out=output.out[:, :, -shard.length :], weights=None)

    def _reach(self, inputs: AttentionInputs) -> int | None:
        """Return how many keys before its own a query sees, ``None`` if all."""
        reach = None if inputs.mask.window is None else inputs.mask.window[0]
        if self.window is None:
            return reach
        own = self._window_of(inputs, self.window)[0]
        return own if reach is None else min(own, reach)

    def _dense_mask(self, inputs: AttentionInputs, positions: Tensor, size: int) -> AttentionMask:
        """Return a dense mask with this window, of real tokens, and the model's, of positions.

        Takes O(T S) memory.
        """
        mask, device = inputs.mask, inputs.k.device
        queries, keys = inputs.q.shape[2], inputs.k.shape[2]
        own = torch.arange(queries, device=device) + mask.q_offset  # the key of each query
        real = positions >= 0
        rank = real.cumsum(1)
        before, after = self._window_of(inputs, size)
        distance = rank.index_select(1, own)[:, :, None] - rank[:, None, :]
        visible = (distance <= before) & (distance >= -after)
        if mask.window is not None:
            distance = positions.index_select(1, own)[:, :, None] - positions[:, None, :]
            before, after = mask.window
            visible &= (distance <= before) & (distance >= -after)
        if self.config.num_sinks:
            sinks = replace(mask, num_sinks=self.config.num_sinks, padding=real)
            visible |= sinks.sinks(keys, device)[:, None, :]
        rest = replace(mask, window=None).dense(queries, keys, device)
        visible = visible[:, None] if rest is None else visible[:, None] & rest
        name = "a window over padding"
        return replace(mask, window=None, function=lambda: visible, function_name=name)

    def _window_of(self, inputs: AttentionInputs, size: int) -> Window:
        """Return the keys before and after a query that a window of ``size`` contains.

        A causal layer counts the query's own key, also where a 4-D mask gives the causality.
        """
        if inputs.mask.causal:
            return size - 1, 0
        is_4d = inputs.mask.function is not None or inputs.bias is not None
        reach = size - 1 if is_4d and self.geometry.causal else size
        return reach, reach

    def _gather_keys(self, inputs: AttentionInputs, shard: SequenceShard) -> AttentionInputs:
        """Add the keys of other processes that the queries of this shard see."""
        others, mask = (shard.size - 1) * shard.length, inputs.mask
        if mask.causal:
            windows = [self.window, None if mask.window is None else mask.window[0]]
            reach = shard.reach(min((w for w in windows if w is not None), default=others))
            before, _ = shard.available(reach)
            k, v = with_neighbours((inputs.k, inputs.v), shard, reach)
            mask = shard.mask(mask, before=before)
            if reach < others:  # as many queries as keys make a band, O(T w) instead of O(T^2)
                return inputs._replace(q=F.pad(inputs.q, (0, 0, before, 0)), k=k, v=v, mask=mask)
            return inputs._replace(k=k, v=v, mask=replace(mask, q_offset=before))
        before, after = shard.available(others, others)
        k, v = with_neighbours((inputs.k, inputs.v), shard, others, others)

        def move_own_last(x: Tensor, dim: int) -> Tensor:  # as masks expect the queries' own keys
            left, own, right = x.split([before, shard.length, after], dim)
            return torch.cat([left, right, own], dim)

        padding = None if shard.padding is None else move_own_last(shard.padding, 1)
        mask = replace(mask, padding=padding, q_offset=others)
        return inputs._replace(k=move_own_last(k, 2), v=move_own_last(v, 2), mask=mask)


def _with_state(inputs: AttentionInputs) -> tuple[AttentionInputs, Tensor, Tensor]:
    """Put the keys and values of the state before the new ones.

    Returns:
        The inputs, the positions of all keys, ``[B, S]``, -1 at padding, and the number of tokens
        so far, ``[B]``.
    """
    past: KVState | None = inputs.state
    batch, new = inputs.k.shape[0], inputs.k.shape[2]
    tokens = torch.arange(new, device=inputs.k.device)
    padding = inputs.mask.padding
    if past is None:
        positions = tokens.repeat(batch, 1)
        if padding is not None:
            positions = torch.where(padding, positions, -1)
        return inputs, positions, tokens.new_full((batch,), new)
    positions = past.length[:, None] + tokens
    if padding is not None:
        positions = torch.where(padding, positions, -1)
    length, positions = past.length + new, torch.cat([past.positions, positions], 1)
    inputs = inputs._replace(
        k=torch.cat([past.k, inputs.k], 2),
        v=torch.cat([past.v, inputs.v], 2),
        bias=_columns(inputs.bias, positions, length),
        mask=replace(
            inputs.mask,
            padding=positions >= 0,
            q_offset=inputs.mask.q_offset + past.k.shape[2],
        ),
        state=None,
    )
    return inputs, positions, length


def _columns(bias: Tensor | None, positions: Tensor, length: Tensor) -> Tensor | None:
    """Return the columns of a bias over all tokens so far that belong to the keys.

    Args:
        bias: ``[1 or B, 1 or H, 1 or T, N]``, or ``None``.
        positions: ``[B, S]``.
        length: Number of tokens so far, ``[B]``.

    Raises:
        UnsupportedError: The bias has fewer columns than tokens.
    """
    if bias is None:
        return None
    columns = bias.shape[-1]
    if not torch.compiler.is_compiling() and bool((length > columns).any()):
        raise UnsupportedError(
            f"a mask or bias over {columns} keys is given, but there are {int(length.max())} "
            "tokens so far, of which the cache keeps the latest; give columns for all tokens, or "
            "call the model with use_cache=False, or use a backend without a window"
        )
    batch, keys = positions.shape
    index = positions.clamp(min=0)[:, None, None, :]
    return bias.expand(batch, -1, -1, -1).gather(-1, index.expand(batch, *bias.shape[1:3], keys))


def _windows_differ(inputs: AttentionInputs, positions: Tensor, *, padded: bool) -> bool:
    """Return whether a window of real tokens and one of positions contain different keys.

    They do if padding lies between real tokens. It matters where both kinds of window apply, and
    where tokens cannot change places; there, reading it costs a device synchronisation.
    """
    two_windows = inputs.mask.window is not None and inputs.mask.padding is not None
    if not two_windows and (not padded or _can_reorder(inputs)):
        return False
    if torch.compiler.is_compiling():
        return True
    before = F.pad(positions.cummax(1).values, (1, -1), value=-1)  # the last real token
    return bool(((before >= 0) & (positions > before + 1)).any())


def _padding_mask(inputs: AttentionInputs) -> Tensor:
    """Return the padding mask of the keys, ``[B, S]`` bool."""
    batch, _, length, _ = inputs.k.shape
    if inputs.mask.padding is not None:
        return inputs.mask.padding.expand(batch, length)
    return torch.ones(batch, length, dtype=torch.bool, device=inputs.k.device)


def _can_reorder(inputs: AttentionInputs) -> bool:
    """Whether tokens can change places: nothing else is given per position of the row."""
    per_query_sinks = inputs.sinks is not None and inputs.sinks.ndim == 4
    per_position = per_query_sinks or inputs.bias is not None or inputs.mask.function is not None
    known = inputs.mask.query_padding(inputs.q.shape[2], inputs.k.shape[2]) is not None
    return known and not per_position


def _move_padding_first(
    inputs: AttentionInputs, positions: Tensor
) -> tuple[Tensor, AttentionInputs, Tensor]:
    """Move all padding to the front, so that a window of w keys holds w real ones.

    Returns:
        The new place of each query, ``[B, T]``, the inputs in the new order, and the positions.
    """
    query_mask = inputs.mask.query_padding(inputs.q.shape[2], inputs.k.shape[2])
    assert query_mask is not None
    padding_mask, ids = _padding_mask(inputs), inputs.mask.segment_ids
    queries, places = padding_first(query_mask)
    keys, _ = padding_first(padding_mask)
    mask = replace(
        inputs.mask,
        padding=padding_mask.gather(1, keys),
        segment_ids=None if ids is None else ids.expand(keys.shape).gather(1, keys),
    )
    q, k, v = (
        gather_tokens(x, order)
        for x, order in ((inputs.q, queries), (inputs.k, keys), (inputs.v, keys))
    )
    inputs = inputs._replace(q=q, k=k, v=v, mask=mask)
    return places, inputs, positions.gather(1, keys)


def _in_last_segment(keys: KVState, mask: AttentionMask) -> KVState:
    """Mark the keys outside of the last segment as padding: the next tokens do not see them."""
    ids = mask.segment_ids
    if ids is None:
        return keys
    return keys._replace(positions=torch.where(ids == ids[:, -1:], keys.positions, -1))


def _with_padding_first(keys: KVState) -> KVState:
    """Return keys with all padding at the front, so that the latest keys are real."""
    order, _ = padding_first(keys.real)
    k, v = (gather_tokens(x, order) for x in (keys.k, keys.v))
    return KVState(k, v, keys.positions.gather(1, order), keys.length)


def _latest_keys(keys: KVState, reach: int | None, num_sinks: int) -> KVState:
    """Return the keys that a later call needs.

    Args:
        keys: All keys.
        reach: How many keys before its own a query sees.
        num_sinks: Number of first real tokens to keep.
    """
    k, v, positions, length = keys
    first = 0 if reach is None else max(k.shape[2] - reach, 0)
    if first <= num_sinks:
        return KVState(k, v, positions, length)
    state = KVState(k[:, :, first:], v[:, :, first:], positions[:, first:], length)
    if not num_sinks:
        return state
    # The first tokens before the window stay the first real keys of the state
    real = AttentionMask(padding=positions >= 0, num_sinks=num_sinks)
    is_sink = real.sinks(k.shape[2], k.device)[:, :first]
    columns = is_sink.int().argsort(dim=1, descending=True, stable=True)[:, :num_sinks]
    old_k, old_v = (gather_tokens(x, columns) for x in (k, v))
    old = torch.where(is_sink, positions[:, :first], -1)
    return KVState(
        torch.cat([old_k, state.k], 2),
        torch.cat([old_v, state.v], 2),
        torch.cat([old.gather(1, columns), state.positions], 1),
        length,
    )
