"""Linear attention: the softmax replaced by a feature map."""

from __future__ import annotations

from dataclasses import dataclass

from attnzoo.backends.base import register
from attnzoo.backends.recurrent import RecurrentBackend, RecurrentConfig


@dataclass(frozen=True, kw_only=True)
class LinearConfig(RecurrentConfig):
    """Settings of linear attention (arXiv:2006.16236)."""


@register("linear")
class LinearBackend(RecurrentBackend):
    """Softmax replaced by a feature map, so time grows as T and decoding memory not at all."""

    config_class = LinearConfig
    cross_attention = True
