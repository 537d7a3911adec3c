r"""Feature maps: what queries and keys pass through so that attention gets linear in length.

A map :math:`\phi` replaces the kernel of softmax, :math:`\exp(s\, q \cdot k)`, by
:math:`\phi(q) \cdot \phi(k)`. Where that is not negative, a normalised output is a weighted mean of
the values; of the maps here, only :func:`random_fourier` may fall below. They compute in float32,
or in float64 when given it: the sums that follow run over thousands of keys.
Letters: B batch, H heads, T tokens, D head size, M random frequencies.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.room import joined

# Added to relu so that no row vanishes: a row of zeros has no normaliser and no gradient. The value
# is that of the ReLU kernel in Performer's own code (arXiv:2009.14794).
RELU_FLOOR = 1e-3

# Largest exponent of a key's feature. exp(30) is 1e13: beside it, smaller features are lost to
# float32 rounding from exp(13) down, and 1e7 such keys times values of 1e5 times 256 features still
# sum to 3e27, far below float32's 3e38. Without it, a single exponent of 89 gives infinity.
EXP_BOUND = 30.0

SHORTEST = 1e-6  # rows below this length are not brought to length 1: what is zero stays zero


def widen(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or as it is when it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def elu_plus_one(x: Tensor) -> Tensor:
    r"""Return :math:`\mathrm{elu}(x) + 1`: x + 1 where positive, exp(x) where not; no scale.

    Source: Katharopoulos et al., 2020, arXiv:2006.16236.

    Args:
        x: Queries or keys, ``[..., D]``.

    Returns:
        ``[..., D]``, float32 or wider.
    """
    # max(x, 0) + exp(min(x, 0)) would not round to 0 for x below -17, as this does in float32, but
    # takes 2.7 times as long; a row is lost only when all its entries are that low.
    return F.elu(widen(x)).add_(1)


def identity(x: Tensor) -> Tensor:
    """Map x to itself; products have any sign, and are not to be divided by their sum.

    Models trained from scratch have it: RetNet (arXiv:2307.08621), GLA (arXiv:2312.06635), Mamba-2
    (arXiv:2405.21060).

    Args:
        x: ``[..., D]``.

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
        ``[..., D]``, float32 or wider.
    """
    return F.relu(widen(x)) + RELU_FLOOR


def exp_queries(q: Tensor, scale: float) -> Tensor:
    r"""Return :math:`\exp(\sqrt{s}\, q_d - m)`, where m is the row's largest exponent.

    The products of these features are :math:`\sum_d \exp(\sqrt{s}\,(q_d + k_d))`: to lowest order,
    the part that depends on query and key together is :math:`s\, q \cdot k`. Subtracting m keeps
    the features within 1; it is one factor per row, which a normalised output does not have.
    Source: the kernel of Nahshan et al., 2024, arXiv:2311.13541, without its fitted moments.

    Args:
        q: Queries, ``[..., D]``.
        scale: s, which multiplies query-key products in softmax attention.

    Returns:
        ``[..., D]``, between 0 and 1, float32 or wider.
    """
    exponent = widen(q) * math.sqrt(scale)
    return (exponent - exponent.amax(-1, keepdim=True)).exp_()


def exp_keys(k: Tensor, scale: float) -> Tensor:
    r"""Return :math:`\exp(\min(\sqrt{s}\, k_d, 30))`; see :func:`exp_queries`.

    A key's maximum cannot be subtracted, for it weighs the key against other keys. The exponent is
    bounded by :data:`EXP_BOUND` instead; beyond the bound a feature stays as it is and passes no
    gradient.

    Args:
        k: Keys, ``[..., D]``.
        scale: s, as for the queries.

    Returns:
        ``[..., D]``, at most exp(30), float32 or wider.
    """
    return (widen(k) * math.sqrt(scale)).clamp(max=EXP_BOUND).exp_()


def softmax(x: Tensor) -> Tensor:
    """Return the softmax over a row's entries: features that sum to 1; no scale.

    Source: Shen et al., 2018, arXiv:1812.01243, who take it so for queries; for keys they take it
    over the tokens, which no causal form could.

    Args:
        x: Queries or keys, ``[..., D]``.

    Returns:
        ``[..., D]``, float32 or wider.
    """
    return widen(x).softmax(-1)


def cosine(x: Tensor, positions: Tensor, length: int) -> Tensor:
    r"""Return the features of :func:`relu` times the cosine and the sine of their position's angle.

    At position p the angle is :math:`\pi p / 2M`, so a product of features is that of relu times
    :math:`\cos(\pi (i - j) / 2M)`: near keys weigh more. Positions from M on count as M - 1, so no
    angle reaches a right one and no feature is negative; among such tokens the weights are relu's.
    Source: cosFormer, Qin et al., 2022, arXiv:2202.08791.

    Args:
        x: Queries or keys, ``[B, H, T, D]``.
        positions: Where each token stands in its sequence, from 0, ``[B, T]``.
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

    The exponential's Taylor polynomial of order 2, at least 1/2 everywhere. With
    :math:`x' = \sqrt{s}\, x`, the features are 1, :math:`x'`, :math:`x'^2_i / \sqrt 2` and, as a
    product and its mirror image are one, :math:`x'_i x'_j` for i < j only. In float32 the sum of
    the products loses its sign where :math:`s |q| |k|` passes about 3,000.
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
    r"""Return :math:`r_i r_{i-j}` for all i and j from 1 to nu, where r is relu(x) after relu(-x).

    Deterministic and without parameters; indices go round. Few features of a row are not zero, so
    that rows overlap little: a query that shares none with any key has weights of zero alone.
    Source: DPFP, Schlag et al., 2021, arXiv:2102.11174.

    Args:
        x: Queries or keys, ``[..., D]``.
        nu: How far a partner may lie, from 1 to 2 D - 1.

    Returns:
        ``[..., 2 D nu]``, not negative, float32 or wider.
    """
    x = widen(x)
    parts = torch.cat([x.relu(), (-x).relu()], -1)
    return torch.cat([parts * parts.roll(j, -1) for j in range(1, nu + 1)], -1)


def random_fourier(x: Tensor, frequencies: Tensor) -> Tensor:
    r"""Return :math:`\sqrt{e / M}` times the cosines and sines of :math:`w_m \cdot x / |x|`.

    With normal frequencies, the expectation of a product is :math:`\exp(\hat q \cdot \hat k)` for
    the rows brought to length 1: the length of a row, and with it the scale, is given up so that
    the variance is bounded. A product of features lies between -e and e and may be negative, while
    what it estimates is at least 1/e; a normalised output is then a sum of values whose weights
    sum to 1, but not all are positive.
    Source: random feature attention, Peng et al., 2021, arXiv:2103.02143.

    Args:
        x: Queries or keys, ``[..., D]``.
        frequencies: w, ``[M, D]``; no gradient flows to it.

    Returns:
        ``[..., 2 M]``, of any sign, float32 or wider.
    """
    x = F.normalize(widen(x), dim=-1, eps=SHORTEST)
    angles = x @ frequencies.to(x.dtype).T
    return torch.cat([angles.cos(), angles.sin()], -1) * math.sqrt(math.e / frequencies.shape[0])


def hedgehog(x: Tensor, residual: Tensor) -> Tensor:
    r"""Return :math:`\mathrm{softmax}(Wx)` followed by :math:`\mathrm{softmax}(-Wx)`, no scale.

    The learned map of each head is :math:`W = I + R`.
    Source: Zhang et al., 2024, arXiv:2402.04347, in the form of LoLCATs (arXiv:2410.10254), which
    multiplies from the right: its matrix is :math:`I + R^T` here.

    Args:
        x: Queries or keys, ``[B, H, T, D]``.
        residual: R, ``[H, D, D]``.

    Returns:
        ``[B, H, T, 2 D]``, each half summing to 1, float32 or wider.
    """
    x = _mapped(x, residual)
    return joined([x.softmax(-1), (-x).softmax(-1)], -1)


def hedgehog_joint(x: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
    r"""Return one softmax over :math:`2y` and :math:`-2y` together, where :math:`y = (I + R)x + b`.

    The other published form of :func:`hedgehog`, that of flash-linear-attention. Weights learned
    for one do not fit the other: here a row whose entries are all small is flat in both halves, and
    one large entry, of either sign, takes nearly everything.
    Source: Zhang et al., 2024, arXiv:2402.04347.

    Args:
        x: Queries or keys, ``[B, H, T, D]``.
        residual: R, ``[H, D, D]``.
        bias: b, ``[H, D]``.

    Returns:
        ``[B, H, T, 2 D]``, summing to 1, float32 or wider.
    """
    y = 2 * _mapped(x, residual, bias)
    return torch.cat([y, -y], -1).softmax(-1)


def learned_exp(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""Return :math:`\exp(\min(Wx + b, 30))`: as many features as W has rows, no scale.

    Unlike the softmaxes of :func:`hedgehog` it leaves each row its size: a key may weigh more than
    others whatever the query, and a query say how much its far keys weigh beside a window. Bounded
    as :func:`exp_keys` is.
    Source: the first form of Zhang et al., 2024, arXiv:2402.04347; with normal rows in W, the
    features of :mod:`attnzoo.ops.random_features` but for their norms.

    Args:
        x: Queries or keys, ``[B, H, T, D]``.
        weight: W, ``[H, F, D]``.
        bias: b, ``[H, F]``.

    Returns:
        ``[B, H, T, F]``, positive, at most exp(30), float32 or wider.
    """
    x = widen(x)
    # b as one more column: its gradient is then part of a product, a sum would take twice as long
    rows = torch.cat([weight, bias.unsqueeze(-1)], -1).to(x.dtype)
    y = F.pad(x, (0, 1), value=1.0) @ rows.transpose(1, 2)
    return y.clamp(max=EXP_BOUND).exp()


def learned_relu(x: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
    r"""Return :math:`\max((I + R)x + b, 0)` plus :data:`RELU_FLOOR`.

    Source: T2R, Kasai et al., 2021, arXiv:2103.13076, which has no floor.

    Args:
        x: Queries or keys, ``[B, H, T, D]``.
        residual: R, ``[H, D, D]``.
        bias: b, ``[H, D]``.

    Returns:
        ``[B, H, T, D]``, positive, float32 or wider.
    """
    return F.relu(_mapped(x, residual, bias)) + RELU_FLOOR


def _mapped(x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return :math:`(I + R)x + b` of each head, wide."""
    x = widen(x)
    y = x + x @ residual.to(x.dtype).transpose(1, 2)
    return y if bias is None else y + bias.to(x.dtype).unsqueeze(1)
