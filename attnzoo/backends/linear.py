"""Linear attention: a feature map in place of the softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnzoo.backends.parts.recurrent import FeatureMapBackend, FeatureMapBackendConfig
from attnzoo.contract.backend import register


@dataclass(frozen=True, kw_only=True)
class LinearConfig(FeatureMapBackendConfig):
    """Options of linear attention (arXiv:2006.16236)."""


@register("linear")
class LinearBackend(FeatureMapBackend):
    """A feature map in place of the softmax: linear time, and a state of fixed size."""

    config_class = LinearConfig
    capabilities = replace(FeatureMapBackend.capabilities, cross_attention=True)
