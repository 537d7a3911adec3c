"""The inputs of one call of fused softmax attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.masks import AttentionMask


class FlashCall(NamedTuple):
    """The inputs of one call, as in :func:`attnzoo.backends.flash.op.flash_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask
    scale: float
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
