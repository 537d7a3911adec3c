"""Feature maps with weights: a map of every head, learned.

Letters: B batch, H heads, T tokens, D head size, F features.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.backends.feature_maps import FeatureMap, register_feature_map
from attnzoo.ops.feature_maps import hedgehog, hedgehog_joint, learned_exp, learned_relu
from attnzoo.ops.random_features import random_projection


@register_feature_map("hedgehog")
class HedgehogMap(FeatureMap):
    """Two softmaxes over a learned map of every head; queries and keys have maps of their own.

    Kept is what a map differs from the identity by. So training starts at the identity, weight
    decay pulls towards it, and 16-bit weights can hold changes smaller than the gap of 2^-7
    (bfloat16) or 2^-10 (float16) between one and the next number above it.
    """

    learned = True

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        size = geometry.head_dim
        self.query_residual = nn.Parameter(torch.empty(geometry.num_heads, size, size))
        self.key_residual = nn.Parameter(torch.empty(geometry.num_key_heads, size, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at the identity."""
        for weight in self.parameters():
            nn.init.zeros_(weight)

    @property
    def size(self) -> int:
        """F, two features per entry."""
        return 2 * self.geometry.head_dim

    def queries(self, q: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries; the scale is part of what is learned."""
        return hedgehog(q, self.query_residual)

    def keys(self, k: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map keys; the scale is part of what is learned."""
        return hedgehog(k, self.key_residual)


@register_feature_map("hedgehog_joint")
class HedgehogJointMap(HedgehogMap):
    """One softmax over both signs of a learned affine map; see :func:`hedgehog_joint`."""

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        self.query_bias = nn.Parameter(torch.empty(geometry.num_heads, geometry.head_dim))
        self.key_bias = nn.Parameter(torch.empty(geometry.num_key_heads, geometry.head_dim))
        self.reset_parameters()

    def queries(self, q: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries; the scale is part of what is learned."""
        return self.mapped(q, self.query_residual, self.query_bias)

    def keys(self, k: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map keys; the scale is part of what is learned."""
        return self.mapped(k, self.key_residual, self.key_bias)

    def mapped(self, x: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        """Map queries or keys with their weights."""
        return hedgehog_joint(x, residual, bias)


@register_feature_map("t2r")
class T2RMap(HedgehogJointMap):
    """Relu of a learned affine map of every head, from the identity on; :func:`learned_relu`."""

    @property
    def size(self) -> int:
        """F, one feature per entry."""
        return self.geometry.head_dim

    def mapped(self, x: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        """Map queries or keys with their weights."""
        return learned_relu(x, residual, bias)


@register_feature_map("hedgehog_exp")
class HedgehogExpMap(FeatureMap):
    """Exponentials of a learned affine map of every head, to any number of features.

    See :func:`learned_exp`. Starts at orthogonal directions, drawn from the seed and the numbers of
    layer and key head, the same for a key head and the query heads that share it: equal rows of
    queries and keys then weigh most.
    """

    learned = True
    options: ClassVar = {"num_features": 256, "seed": 0}

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        heads, key_heads = geometry.num_heads, geometry.num_key_heads
        self.query_weight = nn.Parameter(torch.empty(heads, self.size, geometry.head_dim))
        self.query_bias = nn.Parameter(torch.empty(heads, self.size))
        self.key_weight = nn.Parameter(torch.empty(key_heads, self.size, geometry.head_dim))
        self.key_bias = nn.Parameter(torch.empty(key_heads, self.size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the directions, on the CPU, equal on every rank; no biases."""
        seed, layer = self.option("seed"), self.geometry.layer
        shape = self.size, self.geometry.head_dim
        with torch.no_grad():
            drawn = torch.stack(
                [
                    F.normalize(random_projection(*shape, seed=(seed, layer, head)), dim=-1)
                    for head in range(len(self.key_weight))
                ]
            )
            self.key_weight.copy_(drawn)
            self.query_weight.copy_(
                drawn.repeat_interleave(len(self.query_weight) // len(drawn), 0)
            )
        nn.init.zeros_(self.query_bias)
        nn.init.zeros_(self.key_bias)

    @property
    def size(self) -> int:
        """F."""
        return self.option("num_features")

    def queries(self, q: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries; the scale is part of what is learned."""
        return learned_exp(q, self.query_weight, self.query_bias)

    def keys(self, k: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map keys; the scale is part of what is learned."""
        return learned_exp(k, self.key_weight, self.key_bias)
