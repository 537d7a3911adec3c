r"""Feature maps: what queries and keys pass through so that attention gets linear in length.

A map :math:`\phi` replaces the kernel of softmax, :math:`\exp(s\, q \cdot k)`, by
:math:`\phi(q) \cdot \phi(k)`. No map here is negative, so a normalised output is a weighted mean
of the values. They compute in float32, or in float64 when given it: the sums that follow run over
thousands of keys. Letters: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Added to relu so that no row vanishes: a row of zeros has no normaliser and no gradient. The value
# is that of the ReLU kernel in Performer's own code (arXiv:2009.14794).
RELU_FLOOR = 1e-3

# Largest exponent of a key's feature. exp(30) is 1e13: beside it, smaller features are lost to
# float32 rounding from exp(13) down, and 1e7 such keys times values of 1e5 times 256 features still
# sum to 3e27, far below float32's 3e38. Without it, a single exponent of 89 gives infinity.
EXP_BOUND = 30.0


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
    x = widen(x)
    x = x + x @ residual.to(x.dtype).transpose(1, 2)
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
