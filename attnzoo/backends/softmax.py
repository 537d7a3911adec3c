"""Softmax attention, dense: the reference that every other backend is measured against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attnzoo.backends.base import AttentionBackend, register
from attnzoo.backends.config import BackendConfig
from attnzoo.backends.inputs import AttentionInputs
from attnzoo.errors import ConfigError
from attnzoo.masks import AttentionMask
from attnzoo.ops.softmax import softmax_attention
from attnzoo.state import AttentionOutput, KVState


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(BackendConfig):
    """Settings of dense softmax attention (arXiv:1706.03762)."""

    impl: Literal["auto", "reference"] = "auto"
    # w: a causal query sees the w latest keys, its own included; otherwise w keys to either side
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

    @property
    def window(self) -> int | None:
        """The window asked for in the options."""
        window: int | None = getattr(self.config, "window", None)
        return window

    @property
    def keeps_all_keys(self) -> bool:
        """Only a window lets earlier keys go."""
        return self.window is None

    def extend(self, inputs: AttentionInputs) -> tuple[AttentionInputs, KVState | None]:
        """Put the keys of the state before the new ones, narrow the mask, and say what to keep."""
        k, v, mask = inputs.k, inputs.v, inputs.mask
        real = mask.padding
        if inputs.state is not None:
            past: KVState = inputs.state
            if real is None:
                real = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
            k, v = torch.cat([past.k, k], 2), torch.cat([past.v, v], 2)
            real = torch.cat([past.real, real], 1)
            mask = replace(mask, padding=real, q_offset=past.k.shape[2])
        if self.window is not None:
            before, after = (self.window - 1, 0) if mask.causal else (self.window, self.window)
            mask = mask.with_window((before, after), inputs.q.shape[2], k.shape[2])
        state = self._kept(k, v, real, mask) if inputs.return_state else None
        return inputs._replace(k=k, v=v, mask=mask, state=None), state

    def _kept(self, k: Tensor, v: Tensor, real: Tensor | None, mask: AttentionMask) -> KVState:
        if real is None:
            real = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
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

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Compute every score and weigh the values with their softmax."""
        inputs, state = self.extend(inputs)
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
        return output._replace(state=state)
