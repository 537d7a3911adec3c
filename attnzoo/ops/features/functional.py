r"""Feature maps as functions: the kernels that replace softmax's in linear attention.

A feature map :math:`\phi` replaces the kernel :math:`\exp(s\, q \cdot k)` by :math:`\phi(q) \cdot
\phi(k)`. If these products are not negative, a normalised output is a weighted mean of the values.
All maps here have such products, except :func:`identity` and :func:`random_fourier`. They compute
in float32, or float64 for float64 inputs, because the sums that follow run over thousands of keys.
Other letters: M random frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.runtime.kernel_calls import map_token_blocks, widen

# Added to relu, because a row of zeros has no normaliser and no gradient. The value is that of the
# ReLU kernel in Performer's code (arXiv:2009.14794).
RELU_FLOOR = 1e-3

# Largest exponent of a key's feature. exp(30) is 1e13: next to it, features below exp(13) are lost
# to float32 rounding, and 1e7 such keys times values of 1e5 times 256 features still sum to 3e27,
# far below float32's 3e38. Without a bound, one exponent of 89 gives infinity.
EXP_BOUND = 30.0

MIN_NORM = 1e-6  # a smaller norm of a row is replaced by it, so that rows of zeros stay zero


def elu_plus_one(x: Tensor) -> Tensor:
    r"""Return :math:`\mathrm{elu}(x) + 1`: x + 1 where x is positive, else exp(x).

    The scale is not used.
    Source: Katharopoulos et al., 2020, arXiv:2006.16236.

    Args:
        x: Queries or keys, ``[..., D]``.

    Returns:
        ``[..., D]``, not negative, float32 or wider.
    """
    # In float32 this rounds to 0 for x below -17. max(x, 0) + exp(min(x, 0)) does not, but takes
    # 2.7 times as long; a row is lost only if all its entries are that low.
    return F.elu(widen(x)).add_(1)


def identity(x: Tensor) -> Tensor:
    """Return x: plain products of queries and keys, of any sign, not to be normalised.

    Models that are trained from scratch use it: RetNet (arXiv:2307.08621), GLA (arXiv:2312.06635),
    Mamba-2 (arXiv:2405.21060).

    Args:
        x: Queries or keys, ``[..., D]``.

    Returns:
        ``[..., D]``.
    """
    return x


def relu(x: Tensor) -> Tensor:
    r"""Return :math:`\max(x, 0)` plus :data:`RELU_FLOOR`.

    Source: the ReLU kernel of Choromanski et al., 2021, arXiv:2009.14794.

    Args:
        x: Queries or keys, ``[..., D]``.

    Returns:
        ``[..., D]``, positive, float32 or wider.
    """
    return F.relu(widen(x)) + RELU_FLOOR


def exp_queries(q: Tensor, scale: float) -> Tensor:
    r"""Return :math:`\exp(\sqrt{s}\, q_d - m)`, where m is the row's largest exponent.

    The products of these features with :func:`exp_keys` are
    :math:`\sum_d \exp(\sqrt{s}\,(q_d + k_d))`. To lowest order, the part that depends on both query
    and key is :math:`s\, q \cdot k`. Subtracting m bounds the features by 1; it is a factor per
    row, which cancels in normalised outputs.
    Source: the kernel of Nahshan et al., 2024, arXiv:2311.13541, without its fitted moments.

    Args:
        q: Queries, ``[..., D]``.
        scale: s, which multiplies query-key products in softmax attention.

    Returns:
        ``[..., D]``, from 0 to 1, float32 or wider.
    """
    exponent = widen(q) * math.sqrt(scale)
    return (exponent - exponent.amax(-1, keepdim=True)).exp_()


def exp_keys(k: Tensor, scale: float) -> Tensor:
    r"""Return :math:`\exp(\min(\sqrt{s}\, k_d, 30))`; see :func:`exp_queries`.

    The maximum of a key cannot be subtracted, because it is the key's weight relative to other
    keys. The exponent is clamped at :data:`EXP_BOUND` instead, beyond which the gradient is 0.

    Args:
        k: Keys, ``[..., D]``.
        scale: s, as for the queries.

    Returns:
        ``[..., D]``, at most exp(30), float32 or wider.
    """
    return (widen(k) * math.sqrt(scale)).clamp(max=EXP_BOUND).exp_()


def softmax(x: Tensor) -> Tensor:
    """Return the softmax over the entries of each row: features that sum to 1.

    The scale is not used.
    Source: Shen et al., 2018, arXiv:1812.01243, for queries. They take the softmax of keys over the
    tokens, which has no causal form.

    Args:
        x: Queries or keys, ``[..., D]``.

    Returns:
        ``[..., D]``, not negative, float32 or wider.
    """
    return widen(x).softmax(-1)


def cosine(x: Tensor, positions: Tensor, length: int) -> Tensor:
    r"""Return relu features reweighted by position, as in cosFormer.

    The features of :func:`relu` are multiplied by the cosine and the sine of
    :math:`\pi p / 2M` at position p, so a product of features is that of relu times
    :math:`\cos(\pi (i - j) / 2M)`: nearer keys weigh more. Positions from M on count as M - 1, so
    all angles are below a right angle and no feature is negative; between such tokens the weights
    are relu's.
    Source: cosFormer, Qin et al., 2022, arXiv:2202.08791.

    Args:
        x: Queries or keys, ``[B, H, T, D]``.
        positions: Position of each token in its sequence, from 0, ``[B, T]``.
        length: M, in tokens.

    Returns:
        ``[B, H, T, 2 D]``, not negative, float32 or wider.
    """
    features = relu(x)
    angle = positions.clamp(max=length - 1).to(features.dtype) * (math.pi / (2 * length))
    angle = angle[:, None, :, None]
    return torch.cat([features * angle.cos(), features * angle.sin()], -1)


def taylor(x: Tensor, scale: float) -> Tensor:
    r"""Return features whose products are :math:`1 + s\, q \cdot k + (s\, q \cdot k)^2 / 2`.

    This is the Taylor polynomial of the exponential, of order 2; it is at least 1/2. With
    :math:`x' = \sqrt{s}\, x`, the features are 1, :math:`x'_i`, :math:`x'^2_i / \sqrt 2` and
    :math:`x'_i x'_j` for i < j, because the product is symmetric. In float32 the sum of the
    products loses its sign if :math:`s |q| |k|` exceeds about 3,000.
    Source: Based, Arora et al., 2024, arXiv:2402.18668; Zhang et al., 2023, arXiv:2312.04927.

    Args:
        x: Queries or keys, ``[..., D]``.
        scale: s, which multiplies query-key products in softmax attention.

    Returns:
        ``[..., 1 + D + D (D + 1) / 2]``, of any sign, float32 or wider.
    """
    x = widen(x) * math.sqrt(scale)
    pairs = [x[..., i : i + 1] * x[..., i + 1 :] for i in range(x.shape[-1] - 1)]
    return torch.cat([torch.ones_like(x[..., :1]), x, x * x * math.sqrt(0.5), *pairs], -1)


def dpfp(x: Tensor, nu: int) -> Tensor:
    r"""Return the deterministic parameter-free projection :math:`r_i r_{i-j}`, for j from 1 to nu.

    r is the concatenation of relu(x) and relu(-x), with cyclic indices. Few features of a row are
    not zero, so rows overlap little. A query that shares no feature with any key has only weights
    of zero.
    Source: DPFP, Schlag et al., 2021, arXiv:2102.11174.

    Args:
        x: Queries or keys, ``[..., D]``.
        nu: The largest offset j, from 1 to 2 D - 1.

    Returns:
        ``[..., 2 D nu]``, not negative, float32 or wider.
    """
    x = widen(x)
    r = torch.cat([x.relu(), (-x).relu()], -1)
    return torch.cat([r * r.roll(j, -1) for j in range(1, nu + 1)], -1)


def random_fourier(x: Tensor, frequencies: Tensor) -> Tensor:
    r"""Return random Fourier features: :math:`\sqrt{e / M}` times cosines and sines of projections.

    The projections are :math:`w_m \cdot x / |x|`. For normally distributed frequencies, the
    expected product is :math:`\exp(\hat q \cdot \hat k)` of the normalised rows. The length of a
    row, and the scale with it, is dropped, which bounds the variance. A product of features is
    between -e and e, while the estimated kernel is at least 1/e: a normalised output is a sum of
    values whose weights sum to 1, but some may be negative.
    Source: random feature attention, Peng et al., 2021, arXiv:2103.02143.

    Args:
        x: Queries or keys, ``[..., D]``.
        frequencies: w, ``[M, D]``; has no gradient.

    Returns:
        ``[..., 2 M]``, of any sign, float32 or wider.
    """
    x = F.normalize(widen(x), dim=-1, eps=MIN_NORM)
    angles = x @ frequencies.to(x.dtype).T
    return torch.cat([angles.cos(), angles.sin()], -1) * math.sqrt(math.e / frequencies.shape[0])


def hedgehog(x: Tensor, residual: Tensor) -> Tensor:
    r"""Return :math:`\mathrm{softmax}(Wx)` concatenated with :math:`\mathrm{softmax}(-Wx)`.

    Each head learns :math:`W = I + R`. The scale is not used.
    Source: Hedgehog, Zhang et al., 2024, arXiv:2402.04347, in the form of LoLCATs
    (arXiv:2410.10254), which multiplies from the right: its matrix is :math:`I + R^T`.

    Args:
        x: Queries or keys, ``[B, H, T, D]``.
        residual: R, ``[H, D, D]``.

    Returns:
        ``[B, H, T, 2 D]``, each half summing to 1, float32 or wider.
    """

    def features(x: Tensor) -> Tensor:
        y = _affine(x, residual)
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)

    return map_token_blocks(features, x, residual)


def learned_exp(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""Return :math:`\exp(\min(Wx + b, 30))`: any number of features, the rows of W.

    Unlike :func:`hedgehog`, the features of a row have no fixed sum: a key may weigh more than
    others for every query, and a query may scale the weight of its keys outside a window. The bound
    is that of :func:`exp_keys`. The scale is not used.
    Source: the first form of Hedgehog, Zhang et al., 2024, arXiv:2402.04347. If the rows of W are
    normally distributed, these are the features of
    :mod:`attnzoo.ops.features.random_features` without their norms.

    Args:
        x: Queries or keys, ``[B, H, T, D]``.
        weight: W, ``[H, F, D]``.
        bias: b, ``[H, F]``.

    Returns:
        ``[B, H, T, F]``, positive, at most exp(30), float32 or wider.
    """
    return _linear_features(x, weight, bias).clamp(max=EXP_BOUND).exp()


def learned_squared_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""Return :math:`\max(Wx + b, 0)^2` plus :data:`RELU_FLOOR`: any number of features.

    The scale is not used. Source of squared ReLU: Primer, So et al., 2021, arXiv:2109.08668.

    Args:
        x: Queries or keys, ``[B, H, T, D]``.
        weight: W, ``[H, F, D]``.
        bias: b, ``[H, F]``.

    Returns:
        ``[B, H, T, F]``, positive, float32 or wider.
    """
    return F.relu(_linear_features(x, weight, bias)).square() + RELU_FLOOR


def _linear_features(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return Wx + b, ``[B, H, T, F]``, float32 or wider."""
    x = widen(x)
    if x.shape[2] == 1:
        return _one_token_product(x, weight.to(x.dtype), bias.to(x.dtype))
    # b is one more column of W: its gradient is part of a product; a sum takes twice as long
    rows = torch.cat([weight, bias.unsqueeze(-1)], -1).to(x.dtype)
    return F.pad(x, (0, 1), value=1.0) @ rows.transpose(1, 2)


def learned_linear(x: Tensor, residual: Tensor) -> Tensor:
    r"""Return :math:`(I + R)x`, features of any sign. The scale is not used.

    Args:
        x: Queries or keys, ``[B, H, T, D]``.
        residual: R, ``[H, D, D]``.

    Returns:
        ``[B, H, T, D]``, float32 or wider.
    """
    return _affine(x, residual)


def _affine(x: Tensor, residual: Tensor) -> Tensor:
    """Return :math:`(I + R)x` of each head, float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    residual = residual.to(x.dtype)
    one_token = x.shape[2] == 1
    return x + (_one_token_product(x, residual) if one_token else x @ residual.transpose(1, 2))


def _one_token_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return Wx or Wx + b of one token per row, ``[B, H, 1, F]``.

    ``x @ weight.transpose(1, 2)`` would copy W for each of the B rows.
    """
    rows, columns = x.squeeze(2).transpose(0, 1), weight.transpose(1, 2)
    if bias is None:
        y = torch.bmm(rows, columns)
    else:
        y = torch.baddbmm(bias.unsqueeze(1), rows, columns)
    return y.transpose(0, 1).unsqueeze(2)


# -- maps that linear attention applies itself -----------------------------------------------------


class FixedMap(NamedTuple):
    """A map without weights, in torch, and the names of its functions in C++.

    ``runtime/cpp/feature_maps.h`` has these, and ``ops/linear/triton/parts.py`` those of Triton.
    """

    queries: Callable[..., Tensor]
    keys: Callable[..., Tensor]
    cpp: tuple[str, str]  # of queries and of keys
    takes_scale: bool = False


class LearnedMap(NamedTuple):
    """A map with weights: its function of inputs, weights and, if it has one, the bias."""

    function: Callable[..., Tensor]
    cpp: str  # the function of Wx + b
    is_residual: bool  # whether the matrix is the identity plus the weights
    has_bias: bool
    features: int = 1  # per row of the matrix


FIXED = {
    "identity": FixedMap(identity, identity, ("IDENTITY", "IDENTITY")),
    "elu+1": FixedMap(elu_plus_one, elu_plus_one, ("ELU_PLUS_ONE", "ELU_PLUS_ONE")),
    "relu": FixedMap(relu, relu, ("RELU", "RELU")),
    "exp": FixedMap(exp_queries, exp_keys, ("EXP_OF_QUERIES", "EXP"), takes_scale=True),
}
LEARNED = {
    "learned_linear": LearnedMap(learned_linear, "IDENTITY", True, False),
    "hedgehog": LearnedMap(hedgehog, "HEDGEHOG", True, False, 2),
    "hedgehog_exp": LearnedMap(learned_exp, "EXP", False, True),
}

NAMES = (*FIXED, *LEARNED)
SCALED = {name for name, fixed in FIXED.items() if fixed.takes_scale}  # kernels take its root


class MapWeights(NamedTuple):
    """Weights of a learned map: matrices ``[H, N, D]`` or residuals ``[H, D, D]``, and biases."""

    q: Tensor
    k: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None


def num_features(k: Tensor, name: str, weights: MapWeights | None) -> int:
    """Return the number of features of a key."""
    return k.shape[3] if weights is None else weights.k.shape[1] * LEARNED[name].features


def map_features(
    x: Tensor, name: str, scale: float, weights: MapWeights | None, *, of_keys: bool
) -> Tensor:
    """Return the features of queries or keys, ``[B, H, T, F]``, in torch."""
    if weights is not None:
        matrix, bias = (weights.k, weights.k_bias) if of_keys else (weights.q, weights.q_bias)
        function = LEARNED[name].function
        return function(x, matrix) if bias is None else function(x, matrix, bias)
    fixed = FIXED[name]
    function = fixed.keys if of_keys else fixed.queries
    return function(x, scale) if name in SCALED else function(x)
