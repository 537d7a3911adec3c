r"""Positive random features (FAVOR+): the kernel of softmax attention as an inner product.

With :math:`x' = \sqrt{s}\, x` and rows :math:`w_m` drawn from a standard normal distribution,

.. math:: \phi_m(x) = \exp(w_m \cdot x' - |x'|^2 / 2), \qquad
          E[\phi_m(q)\, \phi_m(k)] = \exp(s\, q \cdot k),

so the mean over M features estimates the kernel, with an error that falls as 1 / M. A normalised
output does not see a factor per query, nor one per feature that its query and key parts share; such
factors are chosen here so that nothing overflows.
Source: Choromanski et al., 2021, arXiv:2009.14794.
Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D head size, M features.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnzoo.ops.feature_maps import RELU_FLOOR, widen

# Largest exponent of a key's feature where it cannot be measured. exp(60) is 1e26: 1e7 such keys
# times values of 1e4 sum to 1e37, within float32.
KEY_BOUND = 60.0

NOTHING = -1e30  # the largest exponent of no keys: finite, so that nothing gets NaN

PIECE = 2**16  # floats that are worked on at a time on a CPU: 256 KiB stay in the cache of a core


def random_projection(
    num_features: int,
    size: int,
    *,
    seed: tuple[int, ...] = (0,),
    orthogonal: bool = True,
    hyperbolic: bool = False,
) -> Tensor:
    r"""Draw the rows :math:`w_m`, the same on every machine and rank; no global state is touched.

    Orthogonal rows come in blocks of D from the QR decomposition of a normal matrix, with the signs
    of R's diagonal given to Q: without that, Q is not uniform over the rotations. Their lengths are
    those of independent normal vectors (chi with D degrees of freedom), so each row alone is normal
    and the estimate stays unbiased, while its variance is lower. Hyperbolic features take every row
    together with its negative, which lowers it further where queries and keys point alike.

    Args:
        num_features: M; even when hyperbolic.
        size: D.
        seed: Numbers that name the draw, such as a seed, a layer and a count.
        orthogonal: Whether the rows of a block are orthogonal.
        hyperbolic: Whether the second half are the negatives of the first.

    Returns:
        ``[M, D]``, float32, on the CPU.
    """
    # The CPU generator reads 32 bits of its seed only, so all numbers are mixed into those
    mixed = zlib.crc32(",".join(map(str, seed)).encode())
    generator = torch.Generator(device="cpu").manual_seed(mixed)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, size, generator=generator, dtype=torch.float64, device="cpu")

    drawn = num_features // 2 if hyperbolic else num_features
    rows = normal(drawn)
    if orthogonal:
        blocks = normal(-(-drawn // size) * size).view(-1, size, size)
        q, r = torch.linalg.qr(blocks)
        q = q * r.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
        rows = q.mT.reshape(-1, size)[:drawn] * rows.norm(dim=1, keepdim=True)
    if hyperbolic:
        rows = torch.cat([rows, -rows])
    return rows.float()


def key_shift(projection: Tensor, *, floor: float = 0.0) -> Tensor:
    r"""Return what to subtract from each feature's exponent when later keys must not be looked at.

    :math:`w \cdot x - |x|^2 / 2 = |w|^2 / 2 - |w - x|^2 / 2 \le |w|^2 / 2`: every feature has a
    bound that no key exceeds. Where it is below :data:`KEY_BOUND`, the feature's exponents are
    raised by the difference, for those of large keys lie far below and vanish in float32 at -87:
    that takes a squared length after scaling of 174, and with D = 64 of 230, where the estimate has
    long lost its meaning. Where the bound is above, exponents are cut at :data:`KEY_BOUND`: a key
    gets there only if it is long and points along w, as in so many dimensions hardly one does.

    Args:
        projection: ``[M, D]``.
        floor: What is added to the features; beside it their height counts, and nothing is raised.

    Returns:
        ``[M]``, at most 0, float32 or wider.
    """
    raised = (widen(projection).square().sum(-1) / 2 - KEY_BOUND).clamp(max=0)
    return torch.zeros_like(raised) if floor else raised


def measured_shift(
    k: Tensor, projection: Tensor, *, scale: float, real: Tensor | None = None, floor: float = 0.0
) -> Tensor:
    """Return each feature's largest exponent over all keys: no key is too large or too small.

    For attention that sees all keys. Queries take it back, so no gradient flows through it. With a
    floor, where heights count, it is the largest projection of each head, as in the paper's code.

    Args:
        k: Keys, ``[B, Hkv, S, D]``.
        projection: ``[M, D]``.
        scale: s, which multiplies query-key products in softmax attention.
        real: ``[B, S]``, false where a key is padding.
        floor: What is added to the features.

    Returns:
        ``[B, Hkv, 1, M]``, or ``[B, Hkv, 1, 1]`` with a floor; finite where there are no keys.
    """
    k, weight = widen(k if floor else k.detach()), scaled(projection, scale)
    seen = (k @ weight.T).amax(-1, keepdim=True) if floor else exponents(k, weight, scale)
    if real is not None:
        seen = seen.masked_fill(~real[:, None, :, None], NOTHING)
    if not k.shape[2]:
        return seen.new_full((*k.shape[:2], 1, seen.shape[3]), NOTHING)
    return seen.amax(2, keepdim=True)


def positive_keys(
    k: Tensor,
    projection: Tensor,
    shift: Tensor,
    *,
    scale: float,
    floor: float = 0.0,
    impl: str = "torch",
) -> Tensor:
    r"""Return :math:`\phi_m(k) e^{-c_m}`, at most exp(60), plus a floor. Cost O(S M D).

    Args:
        k: Keys, ``[B, Hkv, S, D]``.
        projection: ``[M, D]``; no gradient flows to it.
        shift: c, from :func:`key_shift` or :func:`measured_shift`.
        scale: s, which multiplies query-key products in softmax attention.
        floor: Added to every feature: 1e-4 in the paper's code. Biases towards the mean value.
        impl: ``"torch"``, with a backward pass of its own, or ``"reference"``.

    Returns:
        ``[B, Hkv, S, M]``, not negative, float32 or wider.
    """
    weight = scaled(projection, scale)
    if impl == "torch" and not floor and shift.dim() == 1 and not torch.compiler.is_compiling():
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
    r"""Return :math:`\phi_m(q) e^{c_m}` over one number per row, plus a floor. Cost O(T M D).

    That number is the row's sum, in one fused pass: no normalised output depends on it, and no
    feature exceeds 1. With a floor it is the row's largest product, as in the paper's code.

    Args:
        q: Queries, ``[B, H, T, D]``.
        projection: ``[M, D]``; no gradient flows to it.
        shift: c, the one that the keys had.
        scale: s, as for the keys.
        floor: As for the keys.
        impl: As for the keys.

    Returns:
        ``[B, H, T, M]``, not negative, float32 or wider.
    """
    weight = scaled(projection, scale)
    if impl == "torch" and not floor and shift.dim() == 1 and not torch.compiler.is_compiling():
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
    r"""Return :math:`\phi_m(q) e^{c_m}` over the row's sum, and the logarithm of that sum over M.

    The products of the features with those of :func:`positive_keys`, times the exponential of the
    second result, estimate :math:`\exp(s\, q \cdot k)` itself, not just up to a factor per row.

    Args:
        q: Queries, ``[B, H, T, D]``.
        projection: ``[M, D]``.
        shift: c, from :func:`key_shift`, without a floor.
        scale: s, as for the keys.

    Returns:
        ``[B, H, T, M]`` and ``[B, H, T, 1]``, float32 or wider.
    """
    q = widen(q)
    exponent = q @ scaled(projection, scale).T + shift
    log_sum = exponent.logsumexp(-1, keepdim=True)
    norm = q.square().sum(-1, keepdim=True) * (scale / 2)
    return (exponent - log_sum).exp(), log_sum - norm - math.log(len(projection))


def relu_features(x: Tensor, projection: Tensor, *, scale: float) -> Tensor:
    r"""Return :math:`\max(w_m \cdot x', 0)` plus a floor: the paper's other kernel, not softmax's.

    Args:
        x: Queries or keys, ``[..., D]``.
        projection: ``[M, D]``.
        scale: s, as in softmax attention.

    Returns:
        ``[..., M]``, positive, float32 or wider.
    """
    return (widen(x) @ scaled(projection, scale).T).relu() + RELU_FLOOR


def scaled(projection: Tensor, scale: float) -> Tensor:
    """Return the projection, wide, with the scale in it."""
    return widen(projection) * math.sqrt(scale)


def pieces(
    features: int, along: tuple[Tensor | None, ...], fixed: tuple[Tensor, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Cut tensors alike along their tokens, where that keeps the work on them in a CPU's cache.

    Args:
        features: M; a piece makes ``[rows, M]`` of its tokens.
        along: ``[B, H, T, X]`` each, or ``None``.
        fixed: ``[B, H, ...]`` each: what all tokens of a head share.

    Yields:
        Pieces ``[rows, X]`` of one head and what they share; or everything at once, as it came.
    """
    first = along[0]
    assert first is not None
    batch, heads, tokens, _ = first.shape
    if first.device.type != "cpu" or batch * heads * tokens * features <= PIECE:
        yield along, fixed
        return
    step = max(1, PIECE * torch.get_num_threads() // features)
    for b in range(batch):
        for h in range(heads):
            shared = tuple(x[b, h] for x in fixed)
            for t in range(0, tokens, step):
                yield tuple(None if x is None else x[b, h, t : t + step] for x in along), shared


class _Queries(torch.autograd.Function):
    """Softmax of a projection, made piece by piece in its place."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        out = weight.new_empty(*q.shape[:-1], weight.shape[0])
        shift = shift.expand(*q.shape[:2], 1, -1)
        for (x, room), (added,) in pieces(weight.shape[0], (q, out), (shift,)):
            torch.matmul(x.to(weight.dtype), weight.T, out=room)
            torch.softmax(room.add_(added), -1, out=room)
        ctx.save_for_backward(q, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, weight, out = ctx.saved_tensors
        d_q = q.new_empty(q.shape)
        for (room, g, features), _ in pieces(weight.shape[0], (d_q, grad, out)):
            d_exponent = torch._softmax_backward_data(g, features, -1, weight.dtype)
            room.copy_(torch.matmul(d_exponent, weight))
        return d_q, None, None


class _Keys(torch.autograd.Function):
    """Exponential of a projection less half the squared length, made piece by piece."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, weight: Tensor, scale: float, shift: Tensor) -> Tensor:
        out = weight.new_empty(*k.shape[:-1], weight.shape[0])
        shift = shift.expand(*k.shape[:2], 1, -1)
        for (x, room), (less,) in pieces(weight.shape[0], (k, out), (shift,)):
            exponents(x.to(weight.dtype), weight, scale, room).sub_(less)
            room.clamp_(max=KEY_BOUND).exp_()
        ctx.save_for_backward(k, weight, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        k, weight, out = ctx.saved_tensors
        d_k, top = k.new_empty(k.shape), math.exp(KEY_BOUND) * (1 - 1e-6)
        for (room, x, g, features), _ in pieces(weight.shape[0], (d_k, k, grad, out)):
            d_exponents = torch.ops.aten.hardtanh_backward(g * features, features, -1.0, top)
            room.copy_(exponents_backward(d_exponents, x.to(weight.dtype), weight, ctx.scale))
        return d_k, None, None, None


def exponents(x: Tensor, weight: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    r"""Return :math:`w_m \cdot x' - |x'|^2 / 2` of a piece, ``[..., rows, M]``."""
    projected = torch.matmul(x, weight.T, out=out)
    return projected.sub_(x.square().sum(-1, keepdim=True), alpha=scale / 2)


def exponents_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Return the gradient of :func:`exponents` for ``x``."""
    pull = grad.sum(-1, keepdim=True).mul_(-scale)
    return torch.matmul(grad, weight).addcmul_(x, pull)
