"""Feature maps without weights.

Letters: B batch, H heads, T tokens, D head size, F features.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.backends.feature_maps import FEATURE_MAPS, FeatureMap, SameMap, register_feature_map
from attnzoo.ops.feature_maps import (
    cosine,
    dpfp,
    elu_plus_one,
    exp_keys,
    exp_queries,
    identity,
    random_fourier,
    relu,
    softmax,
    taylor,
)
from attnzoo.ops.random_features import random_projection

register_feature_map("elu+1")(elu_plus_one)
register_feature_map("relu")(relu)
register_feature_map("identity")(identity)
for name in ("elu+1", "relu", "identity"):
    FEATURE_MAPS[name].fused = name
FEATURE_MAPS["identity"].signed = True


@register_feature_map("exp")
class ExpMap(FeatureMap):
    """The exponential of every entry, with the layer's scale; see :func:`exp_queries`."""

    fused = "exp"

    def queries(self, q: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries, each row divided by its largest feature."""
        return exp_queries(q, scale)

    def keys(self, k: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map keys, bounded."""
        return exp_keys(k, scale)


register_feature_map("softmax")(softmax)


@register_feature_map("cosine")
class CosineMap(SameMap):
    """Relu, with nearer keys weighing more by a cosine of the distance; see :func:`cosine`.

    ``max_length`` is M, by default the model's longest; real tokens count, and a state goes on.
    """

    positional = True
    options: ClassVar = {"max_length": None}

    @property
    def length(self) -> int | None:
        """M, in tokens."""
        return self.given["max_length"] or self.geometry.max_length

    @property
    def size(self) -> int:
        """F, a cosine and a sine per entry."""
        return 2 * self.geometry.head_dim

    def layer_reasons(self) -> list[str]:
        """Say why this map cannot serve its layer, all at once."""
        reasons = []
        if self.geometry.cross_attention:
            reasons.append(
                "feature map 'cosine' weighs by the distance between query and key, and those of "
                "a cross-attention layer have none (every other map does without)"
            )
        if self.length is None:
            reasons.append(
                "feature map 'cosine' needs the length over which it fades, and the model does "
                "not say how long its sequences get (give max_length, in tokens)"
            )
        return reasons

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries or keys."""
        assert positions is not None
        assert self.length is not None
        return cosine(x, positions, self.length)


@register_feature_map("taylor")
class TaylorMap(SameMap):
    """The exponential's Taylor polynomial of order 2, with the layer's scale; :func:`taylor`."""

    @property
    def size(self) -> int:
        """F, of orders 0, 1 and 2."""
        size = self.geometry.head_dim
        return 1 + size + size * (size + 1) // 2

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries or keys."""
        return taylor(x, scale)


@register_feature_map("dpfp")
class DPFPMap(SameMap):
    """Products of neighbouring entries, of both signs; see :func:`dpfp`."""

    options: ClassVar = {"nu": 1}

    @property
    def size(self) -> int:
        """F, two features per entry and neighbour."""
        return 2 * self.geometry.head_dim * self.option("nu")

    def layer_reasons(self) -> list[str]:
        """Say why this map cannot serve its layer, all at once."""
        nu, most = self.option("nu"), 2 * self.geometry.head_dim - 1
        if nu <= most:
            return []
        return [f"nu is {nu}, and an entry has only {most} neighbours"]

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries or keys."""
        return dpfp(x, self.option("nu"))


@register_feature_map("random")
class RandomMap(SameMap):
    """Random Fourier features of queries and keys of length 1; see :func:`random_fourier`.

    The frequencies, one draw for all heads of a layer, are a persistent buffer drawn from the seed
    and the layer's number. Weights below zero are left as they are: a bound would put another wrong
    weight in their place. With 256 features of 64 entries, the weight of a key that points against
    the query, the smallest, lies 2.7 standard deviations above zero (1 in 400 is below).
    """

    options: ClassVar = {"num_features": 256, "seed": 0}
    frequencies: Tensor  # [M, D], half as many as features

    @classmethod
    def option_reason(cls, name: str, value: int) -> str:
        """Say what is wrong with an option's value."""
        odd = name == "num_features" and value % 2
        return "must be even, for every frequency has a cosine and a sine" if odd else ""

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        self.register_buffer("frequencies", torch.empty(self.size // 2, geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the frequencies: on the CPU, equal on every rank."""
        rows, size = self.frequencies.shape
        seed = (self.option("seed"), self.geometry.layer)
        with torch.no_grad():
            self.frequencies.copy_(random_projection(rows, size, seed=seed))

    @property
    def size(self) -> int:
        """F, two per frequency."""
        return self.option("num_features")

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries or keys; the scale goes with their lengths."""
        return random_fourier(x, self.frequencies)
