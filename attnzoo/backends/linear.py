"""Linear attention: a feature map in place of the softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attnzoo.backends.parts.recurrent import FeatureMapBackend, FeatureMapBackendConfig
from attnzoo.contract.backend import Presets, register


@dataclass(frozen=True, kw_only=True)
class LinearConfig(FeatureMapBackendConfig):
    """Options of linear attention (arXiv:2006.16236)."""


@register("linear")
class LinearBackend(FeatureMapBackend):
    """A feature map in place of the softmax: linear time, and a state of fixed size."""

    config_class = LinearConfig
    capabilities = replace(FeatureMapBackend.capabilities, cross_attention=True)
    presets: ClassVar[Presets] = {
        "short": ({}, {"feature_map": "hedgehog"}, {"feature_map": "hedgehog", "window": 32}),
        "long": ({}, {"feature_map": "hedgehog", "window": 32}),
        # without pretrained softmax weights to imitate, plain products learn to recall best
        "from_scratch": ({"feature_map": "identity", "normalize": False},),
    }
