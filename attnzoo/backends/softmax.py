"""Softmax attention, dense: the reference that every other backend is measured against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.backends.base import AttentionBackend, register
from attnzoo.backends.config import BackendConfig
from attnzoo.backends.inputs import AttentionInputs
from attnzoo.errors import ConfigError
from attnzoo.ops.context_parallel import Shard, with_neighbours
from attnzoo.ops.softmax import softmax_attention
from attnzoo.state import AttentionOutput, KVState


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(BackendConfig):
    """Settings of dense softmax attention (arXiv:1706.03762)."""

    impl: Literal["auto", "reference"] = "auto"
    # w: a causal query sees the w latest keys, its own included; otherwise w keys to either side.
    # Padding does not count, wherever it stands.
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self)


def check_window(config: BackendConfig) -> None:
    """Refuse a window that is not positive."""
    window = getattr(config, "window", None)
    if window is not None and window < 1:
        raise ConfigError(
            f"{type(config).__name__}.window must be at least 1 token, got {window}; "
            "leave it out to see every key"
        )


class ExactBackend(AttentionBackend):
    """What the exact backends share: masks of every kind, a window of their own, keys as state."""

    exact = True
    cross_attention = True
    windowed = True
    arbitrary_mask = True
    additive_bias = True
    sinks = True
    dropout = True
    recurrent = True
    context_parallel = True

    @property
    def window(self) -> int | None:
        """The window asked for in the options."""
        window: int | None = getattr(self.config, "window", None)
        return window

    @property
    def keeps_all_keys(self) -> bool:
        """Only a window lets earlier keys go."""
        return self.window is None

    def compute(self, inputs: AttentionInputs) -> AttentionOutput:
        """Attend to all the given keys, those from a state included."""
        raise NotImplementedError

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Say why these inputs cannot run, all reasons at once."""
        reasons = super().unsupported_reasons(inputs)
        windowed = self.window is not None or inputs.mask.window is not None
        if inputs.shard is not None and windowed and not inputs.mask.causal:
            reasons.append(
                "the rows lie on several processes, and a window to both sides is given "
                "(longformer has one)"
            )
        return reasons

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Attend to the keys of the state and to the new ones."""
        if inputs.shard is not None:
            inputs = self._with_other_keys(inputs, inputs.shard)
        padded = inputs.mask.padding is not None
        inputs = _with_past(inputs)
        order: tuple[Tensor, Tensor] | None = None
        if self.window is not None:
            lengths = inputs.q.shape[2], inputs.k.shape[2]
            order = _padding_first(inputs) if padded else None
            if order is not None:
                inputs = _reordered(inputs, *order)
            reach = (self.window - 1, 0) if inputs.mask.causal else (self.window, self.window)
            inputs = inputs._replace(mask=inputs.mask.with_window(reach, *lengths))
        output = self.compute(inputs)
        if order is not None:
            output = AttentionOutput(_take(output.out, order[0].argsort(1)))
        if inputs.shard is not None:
            output = AttentionOutput(output.out[:, :, -inputs.shard.length :])
        return output._replace(state=_kept(inputs) if inputs.return_state else None)

    def _with_other_keys(self, inputs: AttentionInputs, shard: Shard) -> AttentionInputs:
        """Put the keys that lie on other processes before the share's own."""
        whole, mask = (shard.size - 1) * shard.length, inputs.mask
        if mask.causal:
            windows = [self.window, None if mask.window is None else mask.window[0]]
            reach = shard.reach(min((w for w in windows if w is not None), default=whole))
            held, _ = shard.beside(reach)
            k, v = with_neighbours((inputs.k, inputs.v), shard, reach)
            mask = shard.mask(mask, before=held)
            if reach < whole:  # a band of as many queries takes O(T w), fewer queries O(T^2)
                return inputs._replace(q=F.pad(inputs.q, (0, 0, held, 0)), k=k, v=v, mask=mask)
            return inputs._replace(k=k, v=v, mask=replace(mask, q_offset=held))
        before, after = shard.beside(whole, whole)
        k, v = with_neighbours((inputs.k, inputs.v), shard, whole, whole)

        def own_last(x: Tensor, dim: int) -> Tensor:
            """Bring keys into the order that masks expect: the last ones are the queries' own."""
            left, own, right = x.split([before, shard.length, after], dim)
            return torch.cat([left, right, own], dim)

        padding = None if shard.padding is None else own_last(shard.padding, 1)
        mask = replace(mask, padding=padding, q_offset=whole)
        return inputs._replace(k=own_last(k, 2), v=own_last(v, 2), mask=mask)


def _with_past(inputs: AttentionInputs) -> AttentionInputs:
    """Put the keys of the state before the new ones."""
    if inputs.state is None:
        return inputs
    past: KVState = inputs.state
    real = torch.cat([past.real, _real(inputs)], 1)
    return inputs._replace(
        k=torch.cat([past.k, inputs.k], 2),
        v=torch.cat([past.v, inputs.v], 2),
        mask=replace(inputs.mask, padding=real, q_offset=past.k.shape[2]),
        state=None,
    )


def _real(inputs: AttentionInputs) -> Tensor:
    """Return which keys are real, ``[B, S]`` bool."""
    batch, _, length, _ = inputs.k.shape
    if inputs.mask.padding is not None:
        return inputs.mask.padding.expand(batch, length)
    return torch.ones(batch, length, dtype=torch.bool, device=inputs.k.device)


def _padding_first(inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
    """Return the order of queries ``[B, T]`` and keys ``[B, S]`` that puts all padding in front.

    In that order the w latest keys are real ones, wherever padding stood, as without padding.
    ``None`` when something is given for the places as they are.
    """
    real = inputs.mask.query_padding(inputs.q.shape[2], inputs.k.shape[2])
    sinks_by_query = inputs.sinks is not None and inputs.sinks.ndim == 4
    fixed = sinks_by_query or inputs.bias is not None or inputs.mask.function is not None
    if real is None or fixed:
        return None
    return real.int().argsort(dim=1, stable=True), _real(inputs).int().argsort(dim=1, stable=True)


def _reordered(inputs: AttentionInputs, queries: Tensor, keys: Tensor) -> AttentionInputs:
    """Bring queries, keys and all that belongs to them into another order."""
    ids = inputs.mask.segment_ids
    mask = replace(
        inputs.mask,
        padding=torch.take_along_dim(_real(inputs), keys, 1),
        segment_ids=None if ids is None else torch.take_along_dim(ids, keys, 1),
    )
    q, k, v = _take(inputs.q, queries), _take(inputs.k, keys), _take(inputs.v, keys)
    return inputs._replace(q=q, k=k, v=v, mask=mask)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Bring ``[B, H, T, D]`` into another order of tokens."""
    return torch.take_along_dim(x, order[:, None, :, None], 2)


def _kept(inputs: AttentionInputs) -> KVState:
    """Return what a later call needs of these keys and values."""
    k, v, mask, real = inputs.k, inputs.v, inputs.mask, _real(inputs)
    if mask.segment_ids is not None:  # what comes next belongs to the last segment
        real = real & (mask.segment_ids == mask.segment_ids[:, -1:])
    if mask.window is not None and mask.function is None:
        first = max(k.shape[2] - mask.window[0], 0)
        k, v, real = k[:, :, first:], v[:, :, first:], real[:, first:]
    return KVState(k, v, real)


@register("softmax")
class SoftmaxBackend(ExactBackend):
    """Dense softmax attention: takes everything, returns weights, quadratic in memory."""

    config_class = SoftmaxConfig
    impls: ClassVar[tuple[str, ...]] = ("reference",)
    packing = True
    softcap = True

    def compute(self, inputs: AttentionInputs) -> AttentionOutput:
        """Compute every score and weigh the values with their softmax."""
        q, k = inputs.q, inputs.k
        output = softmax_attention(
            q,
            k,
            inputs.v,
            scale=inputs.scale,
            mask=inputs.mask.dense(q.shape[2], k.shape[2], q.device),
            bias=inputs.bias,
            softcap=inputs.softcap,
            sinks=inputs.sinks,
            dropout=inputs.dropout,
        )
        self.record("reference", "the only one")
        return output
