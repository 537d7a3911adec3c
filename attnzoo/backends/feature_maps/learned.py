"""Feature maps with weights: each head learns its own map."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor, nn

from attnzoo.backends.feature_maps.base import FeatureMap, register_feature_map
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.ops.features.functional import (
    hedgehog,
    learned_exp,
    learned_linear,
    learned_squared_relu,
)
from attnzoo.ops.features.random_features import random_projection


class LearnedMap(FeatureMap):
    """Base class of maps whose queries and keys have weights of their own.

    Attributes:
        compute: Maps queries or keys, given weights; the scale is learned.
        per_entry: Features per entry of a head.
    """

    learned = True
    compute: ClassVar[Callable[..., Tensor]]
    per_entry: ClassVar[int] = 1

    @property
    def size(self) -> int:
        """F."""
        return self.per_entry * self.geometry.head_dim

    def queries(self, q: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries; their weights come first in each pair of ``fused_weights``."""
        return type(self).compute(q, *(getattr(self, name) for name in self.fused_weights[::2]))

    def keys(self, k: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map keys."""
        return type(self).compute(k, *(getattr(self, name) for name in self.fused_weights[1::2]))


@register_feature_map("hedgehog")
class HedgehogMap(LearnedMap):
    r"""Hedgehog (arXiv:2402.04347): :math:`\mathrm{softmax}(Wx)` and :math:`\mathrm{softmax}(-Wx)`.

    2 D features, not negative; learned, W = I + R per head, with separate weights for queries and
    keys. The parameter is R: training starts at the identity, weight decay pulls towards it, and
    16-bit weights hold changes smaller than the gap of 2^-7 (bfloat16) or 2^-10 (float16) between 1
    and the next number.
    """

    fused = "hedgehog"
    compute: ClassVar[Callable[..., Tensor]] = staticmethod(hedgehog)
    per_entry = 2
    fused_weights: ClassVar[tuple[str, ...]] = ("query_residual", "key_residual")

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        size = geometry.head_dim
        self.query_residual = nn.Parameter(torch.empty(geometry.num_heads, size, size))
        self.key_residual = nn.Parameter(torch.empty(geometry.num_key_heads, size, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the identity."""
        for weight in self.parameters():
            nn.init.zeros_(weight)


@register_feature_map("learned_linear")
class LearnedLinearMap(HedgehogMap):
    r"""The linear layer of Hedgehog (arXiv:2402.04347) without its softmax: :math:`Wx`.

    D features, of any sign; learned, W = I + R per head, with separate weights for queries and
    keys, initialised to the identity.
    """

    signed = True
    fused = "learned_linear"
    compute = staticmethod(learned_linear)
    per_entry = 1


@register_feature_map("hedgehog_exp")
class HedgehogExpMap(LearnedMap):
    r"""The exponential form of Hedgehog (arXiv:2402.04347): :math:`\exp(\min(Wx + b, 30))`.

    ``num_features`` features, 256 by default, positive; learned, W and b per head. W is initialised
    to orthogonal directions that are drawn from the seed and the indices of layer and key head. A
    key head and the query heads that share it start with equal rows, so that equal queries and keys
    weigh most. See :func:`~attnzoo.ops.features.functional.learned_exp`.
    """

    fused = "hedgehog_exp"
    compute: ClassVar[Callable[..., Tensor]] = staticmethod(learned_exp)
    fused_weights: ClassVar[tuple[str, ...]] = (
        "query_weight",
        "key_weight",
        "query_bias",
        "key_bias",
    )
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
        """Draw the directions, on the CPU and equal on all ranks; biases are zero."""
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
            groups = len(self.query_weight) // len(drawn)
            self.query_weight.copy_(repeat(drawn, "h f d -> (h g) f d", g=groups))
        nn.init.zeros_(self.query_bias)
        nn.init.zeros_(self.key_bias)

    @property
    def size(self) -> int:
        """F."""
        return self.option("num_features")


@register_feature_map("squared_relu")
class SquaredReluMap(HedgehogExpMap):
    r"""Squares of rectified linear features: :math:`\max(Wx + b, 0)^2` plus a floor.

    ``num_features`` features, 256 by default, positive; W and b as in ``hedgehog_exp``. The
    function is that of Primer's feed-forward layers (arXiv:2109.08668). See
    :func:`~attnzoo.ops.features.functional.learned_squared_relu`.
    """

    compute = staticmethod(learned_squared_relu)
