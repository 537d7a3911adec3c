r"""Positive random features (FAVOR+): the softmax kernel as an expected inner product.

With :math:`x' = \sqrt{s}\, x` and rows :math:`w_m` drawn from a standard normal distribution,

.. math:: \phi_m(x) = \exp(w_m \cdot x' - |x'|^2 / 2), \qquad
          E[\phi_m(q)\, \phi_m(k)] = \exp(s\, q \cdot k),

so the mean over M features estimates the kernel, with an error that falls as 1 / M. In a normalised
output, a factor per query cancels, and so does a factor per feature that queries and keys apply
inversely. These factors are chosen here so that nothing overflows. Source: Choromanski et al.,
2021, arXiv:2009.14794. Other letters: M features.
"""

from __future__ import annotations

import math
import zlib

import torch
from einops import rearrange
from torch import Tensor

from attnzoo.runtime.kernel_calls import widen

# Largest exponent of a key's feature if the maximum of all keys is unknown. exp(60) is 1e26: 1e7
# such keys times values of 1e4 sum to 1e37, within float32.
KEY_BOUND = 60.0

LOG_ZERO = -1e30  # largest exponent of no keys; finite, so that no difference of two is NaN


def random_projection(num_features: int, size: int, *, seed: tuple[int, ...] = (0,)) -> Tensor:
    r"""Draw the rows :math:`w_m` of a random projection, equal on all machines and ranks.

    The global random state does not change. Orthogonal rows come in blocks of D from the QR
    decomposition of a normal matrix. Q is multiplied by the signs of R's diagonal, without which it
    is not uniform over the rotations. The lengths of the rows are those of independent normal
    vectors (chi with D degrees of freedom), so each row is normal and the estimate is unbiased; its
    variance is lower.

    Args:
        num_features: M.
        size: D.
        seed: Numbers that identify the draw, such as a seed and a layer index.

    Returns:
        ``[M, D]``, float32, on the CPU.
    """
    # The CPU generator reads only 32 bits of its seed, so all numbers are hashed to 32 bits
    hashed = zlib.crc32(",".join(map(str, seed)).encode())
    generator = torch.Generator(device="cpu").manual_seed(hashed)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, size, generator=generator, dtype=torch.float64, device="cpu")

    lengths = normal(num_features).norm(dim=1, keepdim=True)
    blocks = rearrange(normal(-(-num_features // size) * size), "(n r) d -> n r d", r=size)
    q, r = torch.linalg.qr(blocks)
    q = q * r.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
    directions: Tensor = rearrange(q, "n d r -> (n r) d")[:num_features]
    rows: Tensor = directions * lengths
    return rows.float()


def key_shift(projection: Tensor) -> Tensor:
    r"""Return a shift of the features' exponents that is independent of the keys, for causal calls.

    :math:`w \cdot x - |x|^2 / 2 = |w|^2 / 2 - |w - x|^2 / 2 \le |w|^2 / 2`: every feature has an
    upper bound. If the bound is below :data:`KEY_BOUND`, the exponents of the feature are raised by
    the difference, because those of large keys are far below it and vanish in float32 at -87: at a
    squared length after scaling of 174, or 230 with D = 64, where the estimate is useless anyway.
    If the bound is above, exponents are clamped at :data:`KEY_BOUND`. Only a long key that points
    along w reaches it, which is rare in many dimensions.

    Args:
        projection: ``[M, D]``.

    Returns:
        The shift, which is subtracted: ``[M]``, at most 0, float32 or wider.
    """
    return (widen(projection).square().sum(-1) / 2 - KEY_BOUND).clamp(max=0)


def measured_shift(
    k: Tensor,
    projection: Tensor,
    *,
    scale: float,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """Return each feature's largest exponent over all keys, so that no key overflows or vanishes.

    For bidirectional attention. The queries cancel the shift, so it has no gradient.

    Args:
        k: Keys, ``[B, Hkv, S, D]``.
        projection: ``[M, D]``.
        scale: s, which multiplies query-key products in softmax attention.
        padding_mask: ``[B, S]`` bool, true at real keys.

    Returns:
        ``[B, Hkv, 1, M]``; finite if there are no keys.
    """
    values = exponents(widen(k.detach()), scale_projection(projection, scale), scale)
    if padding_mask is not None:
        values = values.masked_fill(~padding_mask[:, None, :, None], LOG_ZERO)
    if not k.shape[2]:
        return values.new_full((*k.shape[:2], 1, values.shape[3]), LOG_ZERO)
    return values.amax(2, keepdim=True)


def positive_keys(k: Tensor, projection: Tensor, shift: Tensor, *, scale: float) -> Tensor:
    r"""Return the positive random features of keys, :math:`\phi_m(k) e^{-c_m}`, at most exp(60).

    Cost O(S M D).

    Args:
        k: Keys, ``[B, Hkv, S, D]``.
        projection: ``[M, D]``; has no gradient.
        shift: c, from :func:`key_shift` or :func:`measured_shift`.
        scale: s, which multiplies query-key products in softmax attention.

    Returns:
        ``[B, Hkv, S, M]``, not negative, float32 or wider.
    """
    features = exponents(widen(k), scale_projection(projection, scale), scale)
    return features.sub_(shift).clamp_(max=KEY_BOUND).exp_()


def positive_queries(q: Tensor, projection: Tensor, shift: Tensor, *, scale: float) -> Tensor:
    r"""Return the positive random features of queries, :math:`\phi_m(q) e^{c_m}` up to a factor.

    Each row is divided by its sum, so the features are one softmax; normalised outputs do not
    depend on this factor. Cost O(T M D).

    Args:
        q: Queries, ``[B, H, T, D]``.
        projection: ``[M, D]``; has no gradient.
        shift: c, the same as for the keys.
        scale: s, as for the keys.

    Returns:
        ``[B, H, T, M]``, not negative, float32 or wider.
    """
    if shift.dim() == 4:
        shift = shift.repeat_interleave(q.shape[1] // shift.shape[1], 1)
    return (widen(q) @ scale_projection(projection, scale).T).add_(shift).softmax(-1)


def scaled_queries(
    q: Tensor, projection: Tensor, shift: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    r"""Return the features of queries as in :func:`positive_queries`, and their log scale.

    The products of the features with those of :func:`positive_keys`, times the exponential of the
    log scale, estimate :math:`\exp(s\, q \cdot k)` without a factor per row.

    Args:
        q: Queries, ``[B, H, T, D]``.
        projection: ``[M, D]``.
        shift: c, from :func:`key_shift`.
        scale: s, as for the keys.

    Returns:
        ``[B, H, T, M]`` and ``[B, H, T, 1]``, float32 or wider.
    """
    q = widen(q)
    exponent = q @ scale_projection(projection, scale).T + shift
    log_sum = exponent.logsumexp(-1, keepdim=True)
    norm = q.square().sum(-1, keepdim=True) * (scale / 2)
    return (exponent - log_sum).exp(), log_sum - norm - math.log(len(projection))


def scale_projection(projection: Tensor, scale: float) -> Tensor:
    r"""Return the projection times :math:`\sqrt{s}`, float32 or wider."""
    return widen(projection) * math.sqrt(scale)


def exponents(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    r"""Return :math:`w_m \cdot x' - |x'|^2 / 2`, ``[..., M]``; ``weight`` has the root of s."""
    return (x @ weight.T).sub_(x.square().sum(-1, keepdim=True), alpha=scale / 2)
