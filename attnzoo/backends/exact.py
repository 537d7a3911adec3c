"""Base of the backends that compute softmax attention exactly: masks, windows and the KV state.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.backends.base import AttentionBackend
from attnzoo.backends.config import BackendConfig, check_num_sinks, sinks_shard_reasons
from attnzoo.backends.inputs import AttentionInputs
from attnzoo.errors import ConfigError
from attnzoo.kernels.context_parallel import SequenceShard, with_neighbours
from attnzoo.masks import AttentionMask, Window
from attnzoo.state import AttentionOutput, KVState


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

    window: int | None = None
    num_sinks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"{type(self).__name__}.window must be at least 1 token, got {self.window}; "
                "leave it out to see every key"
            )
        check_num_sinks(self, self.num_sinks, self.window)


class ExactBackend(AttentionBackend):
    """Exact softmax attention with every kind of mask, its own window, and a KV state."""

    config: ExactConfig
    exact = True
    cross_attention = True
    windowed = True
    arbitrary_mask = True
    additive_bias = True
    sinks = True
    dropout = True
    recurrent = True
    context_parallel = True
    state_from_keys = True

    @property
    def window(self) -> int | None:
        """The window of the options."""
        return self.config.window

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
        padded = inputs.mask.padding is not None
        inputs = _prepend_state(inputs)
        query_order: Tensor | None = None
        if self.window is not None:
            lengths = inputs.q.shape[2], inputs.k.shape[2]
            if padded and _can_reorder(inputs):
                query_order, inputs = _move_padding_first(inputs)
            window = self._window_of(inputs, self.window)
            mask = inputs.mask.with_window(window, *lengths, self.config.num_sinks)
            inputs = inputs._replace(mask=mask)
        output = self.compute(inputs)
        if query_order is not None:
            out = _reorder_tokens(output.out, query_order.argsort(1))
            output = output._replace(out=out, weights=None)
        if inputs.shard is not None:
            output = output._replace(out=output.out[:, :, -inputs.shard.length :], weights=None)
        return output._replace(state=_new_state(inputs) if inputs.return_state else None)

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


def _prepend_state(inputs: AttentionInputs) -> AttentionInputs:
    """Put the keys and values of the state before the new ones."""
    if inputs.state is None:
        return inputs
    past: KVState = inputs.state
    return inputs._replace(
        k=torch.cat([past.k, inputs.k], 2),
        v=torch.cat([past.v, inputs.v], 2),
        mask=replace(
            inputs.mask,
            padding=torch.cat([past.real, _padding_mask(inputs)], 1),
            q_offset=past.k.shape[2],
        ),
        state=None,
    )


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


def _move_padding_first(inputs: AttentionInputs) -> tuple[Tensor, AttentionInputs]:
    """Move all padding to the front, so that a window of w keys holds w real ones.

    Returns:
        The new order of the queries, ``[B, T]``, and the inputs in that order.
    """
    query_mask = inputs.mask.query_padding(inputs.q.shape[2], inputs.k.shape[2])
    assert query_mask is not None
    padding_mask, ids = _padding_mask(inputs), inputs.mask.segment_ids
    queries = query_mask.int().argsort(dim=1, stable=True)
    keys = padding_mask.int().argsort(dim=1, stable=True)
    mask = replace(
        inputs.mask,
        padding=torch.take_along_dim(padding_mask, keys, 1),
        segment_ids=None if ids is None else torch.take_along_dim(ids, keys, 1),
    )
    q, k, v = (
        _reorder_tokens(x, order)
        for x, order in ((inputs.q, queries), (inputs.k, keys), (inputs.v, keys))
    )
    return queries, inputs._replace(q=q, k=k, v=v, mask=mask)


def _reorder_tokens(x: Tensor, order: Tensor) -> Tensor:
    """Gather the tokens of ``[B, H, T, D]`` in another order, ``[B, T]``."""
    return torch.take_along_dim(x, order[:, None, :, None], 2)


def _new_state(inputs: AttentionInputs) -> KVState:
    """Return the keys and values that a later call needs."""
    k, v, mask, padding_mask = inputs.k, inputs.v, inputs.mask, _padding_mask(inputs)
    if mask.segment_ids is not None:  # the next tokens belong to the last segment
        padding_mask = padding_mask & (mask.segment_ids == mask.segment_ids[:, -1:])
    first = 0 if mask.window is None else max(k.shape[2] - mask.window[0], 0)
    if mask.function is not None or first <= mask.num_sinks:
        return KVState(k, v, padding_mask)
    state = KVState(k[:, :, first:], v[:, :, first:], padding_mask[:, first:])
    if not mask.num_sinks:
        return state
    # The first tokens before the window stay the first real keys of the state
    is_sink = AttentionMask(padding=padding_mask, num_sinks=mask.num_sinks).sinks(
        k.shape[2], k.device
    )
    is_sink = is_sink[:, :first]
    columns = is_sink.int().argsort(dim=1, descending=True, stable=True)[:, : mask.num_sinks]
    old_k, old_v = (_reorder_tokens(x, columns) for x in (k, v))
    return KVState(
        torch.cat([old_k, state.k], 2),
        torch.cat([old_v, state.v], 2),
        torch.cat([is_sink.gather(1, columns), state.real], 1),
    )
