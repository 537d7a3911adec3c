"""The built-in feature maps: without weights, and learned by each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor, nn

from attnzoo.backends.feature_maps.base import (
    FEATURE_MAPS,
    FeatureMap,
    SameMap,
    register_feature_map,
)
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.ops.features.functional import (
    cosine,
    dpfp,
    elu_plus_one,
    exp_keys,
    exp_queries,
    hedgehog,
    identity,
    learned_exp,
    learned_linear,
    learned_squared_relu,
    random_fourier,
    relu,
    softmax,
    taylor,
)
from attnzoo.ops.features.random_features import random_projection

# Functions of one tensor: D features each, not learned, not positional
register_feature_map("elu+1")(elu_plus_one)  # arXiv:2006.16236
register_feature_map("relu")(relu)  # arXiv:2009.14794
register_feature_map("identity")(identity)  # arXiv:2307.08621; signed
register_feature_map("softmax")(softmax)  # arXiv:1812.01243
FEATURE_MAPS["identity"].signed = True


@register_feature_map("exp")
class ExpMap(FeatureMap):
    r"""Exponential (arXiv:2311.13541): :math:`\exp(\sqrt{s}\, x_d)` with the layer's scale s.

    D features, not negative, not learned. See
    :func:`~attnzoo.ops.features.functional.exp_queries`.
    """

    fused = "exp"

    def queries(self, q: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries, each row divided by its largest feature."""
        return exp_queries(q, scale)

    def keys(self, k: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map keys; the exponent is clamped."""
        return exp_keys(k, scale)


@register_feature_map("cosine")
class CosineMap(SameMap):
    r"""cosFormer (arXiv:2202.08791): relu, reweighted by :math:`\cos(\pi (i - j) / 2M)`.

    2 D features, not negative, positional, not learned. ``max_length`` is M, by default the model's
    maximum length. Positions count real tokens, and continue from a state. See
    :func:`~attnzoo.ops.features.functional.cosine`.
    """

    positional = True
    options: ClassVar = {"max_length": None}

    @property
    def length(self) -> int | None:
        """M, in tokens."""
        return self.option("max_length") or self.geometry.max_length

    @property
    def size(self) -> int:
        """F, a cosine and a sine per entry."""
        return 2 * self.geometry.head_dim

    def layer_reasons(self) -> list[str]:
        """Return every reason why this map does not support its layer."""
        reasons = []
        if self.geometry.cross_attention:
            reasons.append(
                "feature map 'cosine' depends on the distance between query and key, which "
                "cross-attention does not define (use another feature map)"
            )
        if self.length is None:
            reasons.append(
                "feature map 'cosine' needs a maximum length, and the model's config has none "
                "(set max_length, in tokens)"
            )
        return reasons

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries or keys."""
        assert positions is not None
        assert self.length is not None
        return cosine(x, positions, self.length)


@register_feature_map("taylor")
class TaylorMap(SameMap):
    r"""Based (arXiv:2402.18668): the kernel :math:`1 + s\, q \cdot k + (s\, q \cdot k)^2 / 2`.

    1 + D + D (D + 1) / 2 features of any sign, whose products are positive; not learned. See
    :func:`~attnzoo.ops.features.functional.taylor`.
    """

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
    r"""DPFP (arXiv:2102.11174): products :math:`r_i r_{i-j}` of relu(x) and relu(-x).

    2 D nu features, with nu = 1 by default; not negative, not learned. See
    :func:`~attnzoo.ops.features.functional.dpfp`.
    """

    options: ClassVar = {"nu": 1}

    @property
    def size(self) -> int:
        """F, two features per entry and offset."""
        return 2 * self.geometry.head_dim * self.option("nu")

    def layer_reasons(self) -> list[str]:
        """Return every reason why this map does not support its layer."""
        nu, largest = self.option("nu"), 2 * self.geometry.head_dim - 1
        if nu <= largest:
            return []
        return [f"nu is {nu} (at most {largest} for heads of size {self.geometry.head_dim})"]

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries or keys."""
        return dpfp(x, self.option("nu"))


@register_feature_map("random")
class RandomMap(SameMap):
    r"""Random feature attention (arXiv:2103.02143): cosines and sines of :math:`w_m \cdot x / |x|`.

    ``num_features`` features, 256 by default, of any sign; their products may be negative too. Not
    learned: all heads of a layer share the frequencies w, a persistent buffer that is drawn from
    the seed and the layer's index. Negative weights are kept, because a clamp would replace them by
    other wrong weights. With 256 features of 64 entries, the smallest weight, that of a key
    opposite to the query, is 2.7 standard deviations above zero (1 in 400 is negative). See
    :func:`~attnzoo.ops.features.functional.random_fourier`.
    """

    options: ClassVar = {"num_features": 256, "seed": 0}
    frequencies: Tensor  # [M, D], half as many as features

    @classmethod
    def option_reason(cls, name: str, value: int) -> str:
        """Return why an option's value is invalid, or ``""``."""
        is_odd = name == "num_features" and value % 2
        return "must be even, for every frequency has a cosine and a sine" if is_odd else ""

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        self.register_buffer("frequencies", torch.empty(self.size // 2, geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the frequencies, on the CPU and equal on all ranks."""
        rows, size = self.frequencies.shape
        seed = (self.option("seed"), self.geometry.layer)
        with torch.no_grad():
            self.frequencies.copy_(random_projection(rows, size, seed=seed))

    @property
    def size(self) -> int:
        """F, two per frequency."""
        return self.option("num_features")

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries or keys; rows are normalised, so the scale is not used."""
        return random_fourier(x, self.frequencies)


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
