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
from collections.abc import Iterator
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from attnzoo.ops.features.functional import RELU_FLOOR, widen
from attnzoo.runtime.derivatives import check_not_mapped, check_reverse_mode, first_derivative_only

# Largest exponent of a key's feature if the maximum of all keys is unknown. exp(60) is 1e26: 1e7
# such keys times values of 1e4 sum to 1e37, within float32.
KEY_BOUND = 60.0

LOG_ZERO = -1e30  # largest exponent of no keys; finite, so that no difference of two is NaN

BLOCK_SIZE = 2**16  # features of a block on a CPU: 256 KiB stay in the cache of a core


def random_projection(
    num_features: int,
    size: int,
    *,
    seed: tuple[int, ...] = (0,),
    orthogonal: bool = True,
    hyperbolic: bool = False,
) -> Tensor:
    r"""Draw the rows :math:`w_m` of a random projection, equal on all machines and ranks.

    The global random state does not change. Orthogonal rows come in blocks of D from the QR
    decomposition of a normal matrix. Q is multiplied by the signs of R's diagonal, without which it
    is not uniform over the rotations. The lengths of the rows are those of independent normal
    vectors (chi with D degrees of freedom), so each row is normal and the estimate is unbiased; its
    variance is lower. Hyperbolic features use each row together with its negative, which lowers the
    variance further for queries and keys of similar direction.

    Args:
        num_features: M; even if hyperbolic.
        size: D.
        seed: Numbers that identify the draw, such as a seed, a layer index and a count.
        orthogonal: Whether the rows of a block are orthogonal.
        hyperbolic: Whether the second half are the negatives of the first.

    Returns:
        ``[M, D]``, float32, on the CPU.
    """
    # The CPU generator reads only 32 bits of its seed, so all numbers are hashed to 32 bits
    hashed = zlib.crc32(",".join(map(str, seed)).encode())
    generator = torch.Generator(device="cpu").manual_seed(hashed)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, size, generator=generator, dtype=torch.float64, device="cpu")

    drawn = num_features // 2 if hyperbolic else num_features
    rows = normal(drawn)
    if orthogonal:
        blocks = rearrange(normal(-(-drawn // size) * size), "(n r) d -> n r d", r=size)
        q, r = torch.linalg.qr(blocks)
        q = q * r.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
        directions = rearrange(q, "n d r -> (n r) d")[:drawn]
        rows = directions * rows.norm(dim=1, keepdim=True)
    if hyperbolic:
        rows = torch.cat([rows, -rows])
    return rows.float()


def key_shift(projection: Tensor, *, floor: float = 0.0) -> Tensor:
    r"""Return a shift of the features' exponents that is independent of the keys, for causal calls.

    :math:`w \cdot x - |x|^2 / 2 = |w|^2 / 2 - |w - x|^2 / 2 \le |w|^2 / 2`: every feature has an
    upper bound. If the bound is below :data:`KEY_BOUND`, the exponents of the feature are raised by
    the difference, because those of large keys are far below it and vanish in float32 at -87: at a
    squared length after scaling of 174, or 230 with D = 64, where the estimate is useless anyway.
    If the bound is above, exponents are clamped at :data:`KEY_BOUND`. Only a long key that points
    along w reaches it, which is rare in many dimensions.

    Args:
        projection: ``[M, D]``.
        floor: Added to the features. A floor is relative to their size, so nothing is raised.

    Returns:
        The shift, which is subtracted: ``[M]``, at most 0, float32 or wider.
    """
    shift = (widen(projection).square().sum(-1) / 2 - KEY_BOUND).clamp(max=0)
    return torch.zeros_like(shift) if floor else shift


def measured_shift(
    k: Tensor,
    projection: Tensor,
    *,
    scale: float,
    padding_mask: Tensor | None = None,
    floor: float = 0.0,
) -> Tensor:
    """Return each feature's largest exponent over all keys, so that no key overflows or vanishes.

    For bidirectional attention. The queries cancel the shift, so it has no gradient. With a floor,
    which is relative to the features, it is the largest projection of each head, as in the paper's
    code, and has a gradient.

    Args:
        k: Keys, ``[B, Hkv, S, D]``.
        projection: ``[M, D]``.
        scale: s, which multiplies query-key products in softmax attention.
        padding_mask: ``[B, S]`` bool, true at real keys.
        floor: Added to the features.

    Returns:
        ``[B, Hkv, 1, M]``, or ``[B, Hkv, 1, 1]`` with a floor; finite if there are no keys.
    """
    k, weight = widen(k if floor else k.detach()), scale_projection(projection, scale)
    values = (k @ weight.T).amax(-1, keepdim=True) if floor else exponents(k, weight, scale)
    if padding_mask is not None:
        values = values.masked_fill(~padding_mask[:, None, :, None], LOG_ZERO)
    if not k.shape[2]:
        return values.new_full((*k.shape[:2], 1, values.shape[3]), LOG_ZERO)
    return values.amax(2, keepdim=True)


def positive_keys(
    k: Tensor,
    projection: Tensor,
    shift: Tensor,
    *,
    scale: float,
    floor: float = 0.0,
    impl: str = "torch",
) -> Tensor:
    r"""Return the positive random features of keys, :math:`\phi_m(k) e^{-c_m}`, at most exp(60).

    Cost O(S M D).

    Args:
        k: Keys, ``[B, Hkv, S, D]``.
        projection: ``[M, D]``; has no gradient.
        shift: c, from :func:`key_shift` or :func:`measured_shift`.
        scale: s, which multiplies query-key products in softmax attention.
        floor: Added to every feature, as 1e-4 in the paper's code; biases outputs towards the mean.
        impl: ``"torch"``, with a backward pass of its own, or ``"reference"``.

    Returns:
        ``[B, Hkv, S, M]``, not negative, float32 or wider.
    """
    weight = scale_projection(projection, scale)
    if impl == "torch" and not floor and shift.dim() == 1 and not torch.compiler.is_compiling():
        check_reverse_mode("positive random features", k)
        check_not_mapped("positive random features", k)
        features: Tensor = _Keys.apply(k, weight, scale, shift)  # type: ignore[no-untyped-call]
        return features
    k = widen(k)
    norm = k.square().sum(-1, keepdim=True) * (scale / 2)
    return (k @ weight.T - norm - shift).clamp(max=KEY_BOUND).exp() + floor


def positive_queries(
    q: Tensor,
    projection: Tensor,
    shift: Tensor,
    *,
    scale: float,
    floor: float = 0.0,
    impl: str = "torch",
) -> Tensor:
    r"""Return the positive random features of queries, :math:`\phi_m(q) e^{c_m}` up to a factor.

    Each row is divided by its sum, so the features are one softmax; normalised outputs do not
    depend on this factor. With a floor, the factor is the exponential of the row's largest
    projection, as in the paper's code. Cost O(T M D).

    Args:
        q: Queries, ``[B, H, T, D]``.
        projection: ``[M, D]``; has no gradient.
        shift: c, the same as for the keys.
        scale: s, as for the keys.
        floor: As for the keys.
        impl: As for the keys.

    Returns:
        ``[B, H, T, M]``, not negative, float32 or wider.
    """
    weight = scale_projection(projection, scale)
    if impl == "torch" and not floor and shift.dim() == 1 and not torch.compiler.is_compiling():
        check_reverse_mode("positive random features", q)
        check_not_mapped("positive random features", q)
        features: Tensor = _Queries.apply(q, weight, shift)  # type: ignore[no-untyped-call]
        return features
    if shift.dim() == 4:
        shift = shift.repeat_interleave(q.shape[1] // shift.shape[1], 1)
    q = widen(q)
    projected = q @ weight.T + shift
    if not floor:
        return projected.softmax(-1)
    norm = q.square().sum(-1, keepdim=True) * (scale / 2)
    return (projected - norm - projected.amax(-1, keepdim=True)).exp() + floor


def scaled_queries(
    q: Tensor, projection: Tensor, shift: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    r"""Return the features of queries as in :func:`positive_queries`, and their log scale.

    The products of the features with those of :func:`positive_keys`, times the exponential of the
    log scale, estimate :math:`\exp(s\, q \cdot k)` without a factor per row.

    Args:
        q: Queries, ``[B, H, T, D]``.
        projection: ``[M, D]``.
        shift: c, from :func:`key_shift`, without a floor.
        scale: s, as for the keys.

    Returns:
        ``[B, H, T, M]`` and ``[B, H, T, 1]``, float32 or wider.
    """
    q = widen(q)
    exponent = q @ scale_projection(projection, scale).T + shift
    log_sum = exponent.logsumexp(-1, keepdim=True)
    norm = q.square().sum(-1, keepdim=True) * (scale / 2)
    return (exponent - log_sum).exp(), log_sum - norm - math.log(len(projection))


def relu_features(x: Tensor, projection: Tensor, *, scale: float) -> Tensor:
    r"""Return the features of Performer's ReLU kernel, :math:`\max(w_m \cdot x', 0)` plus a floor.

    The floor is :data:`~attnzoo.ops.features.functional.RELU_FLOOR`. This kernel
    does not estimate softmax.

    Args:
        x: Queries or keys, ``[..., D]``.
        projection: ``[M, D]``.
        scale: s, as in softmax attention.

    Returns:
        ``[..., M]``, positive, float32 or wider.
    """
    return (widen(x) @ scale_projection(projection, scale).T).relu() + RELU_FLOOR


def scale_projection(projection: Tensor, scale: float) -> Tensor:
    r"""Return the projection times :math:`\sqrt{s}`, float32 or wider."""
    return widen(projection) * math.sqrt(scale)


def split_blocks(
    features: int, tokens: tuple[Tensor | None, ...], shared: tuple[Tensor, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Split tensors into blocks of tokens whose features stay in a CPU's cache.

    Args:
        features: M, features of a token.
        tokens: Tensors ``[B, H, T, X]`` to be split, or ``None``.
        shared: Tensors ``[B, H, ...]`` that all tokens of a head share.

    Yields:
        Blocks ``[rows, X]`` of one head and its shared tensors; or, on other devices and for few
        tokens, everything at once with its batch and heads.
    """
    first = tokens[0]
    assert first is not None
    batch, heads, length, _ = first.shape
    if first.device.type != "cpu" or batch * heads * length * features <= BLOCK_SIZE:
        yield tokens, shared
        return
    step = max(1, BLOCK_SIZE * torch.get_num_threads() // features)
    for b in range(batch):
        for h in range(heads):
            of_head = tuple(x[b, h] for x in shared)
            for t in range(0, length, step):
                yield tuple(None if x is None else x[b, h, t : t + step] for x in tokens), of_head


class _Queries(torch.autograd.Function):
    """Softmax of the projection plus the shift, computed in place, block by block."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        features = weight.new_empty(*q.shape[:-1], weight.shape[0])
        shift = shift.expand(*q.shape[:2], 1, -1)
        for (x, out), (added,) in split_blocks(weight.shape[0], (q, features), (shift,)):
            torch.matmul(x.to(weight.dtype), weight.T, out=out)
            torch.softmax(out.add_(added), -1, out=out)
        ctx.save_for_backward(q, weight, features)
        return features

    @staticmethod
    @first_derivative_only("positive random features")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, weight, saved = ctx.saved_tensors
        d_q = q.new_empty(q.shape)
        for (out, g, features), _ in split_blocks(weight.shape[0], (d_q, grad, saved)):
            d_exponent = torch._softmax_backward_data(g, features, -1, weight.dtype)
            out.copy_(torch.matmul(d_exponent, weight))
        return d_q, None, None


class _Keys(torch.autograd.Function):
    """Exponential of :func:`exponents` minus the shift, computed in place, block by block."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, weight: Tensor, scale: float, shift: Tensor) -> Tensor:
        features = weight.new_empty(*k.shape[:-1], weight.shape[0])
        shift = shift.expand(*k.shape[:2], 1, -1)
        for (x, out), (subtracted,) in split_blocks(weight.shape[0], (k, features), (shift,)):
            exponents(x.to(weight.dtype), weight, scale, out).sub_(subtracted)
            out.clamp_(max=KEY_BOUND).exp_()
        ctx.save_for_backward(k, weight, features)
        ctx.scale = scale
        return features

    @staticmethod
    @first_derivative_only("positive random features")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        k, weight, saved = ctx.saved_tensors
        d_k, maximum = k.new_empty(k.shape), math.exp(KEY_BOUND) * (1 - 1e-6)
        for (out, x, g, features), _ in split_blocks(weight.shape[0], (d_k, k, grad, saved)):
            # the gradient of the clamp: 0 at and above the bound
            d_exponents = torch.ops.aten.hardtanh_backward(g * features, features, -1.0, maximum)
            out.copy_(exponents_backward(d_exponents, x.to(weight.dtype), weight, ctx.scale))
        return d_k, None, None, None


def exponents(x: Tensor, weight: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    r"""Return :math:`w_m \cdot x' - |x'|^2 / 2` of a block, ``[..., rows, M]``."""
    projected = torch.matmul(x, weight.T, out=out)
    return projected.sub_(x.square().sum(-1, keepdim=True), alpha=scale / 2)


def exponents_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Return the gradient of :func:`exponents` with respect to ``x``."""
    factor = grad.sum(-1, keepdim=True).mul_(-scale)
    return torch.matmul(grad, weight).addcmul_(x, factor)
