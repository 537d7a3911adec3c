r"""FAVOR+ attention that sees all keys, without its features ever being written to memory.

Computes :math:`o_t = \phi(q_t) S / (\phi(q_t) z + \epsilon)` with
:math:`S = \sum_j \phi(k_j) v_j^T` and :math:`z = \sum_j \phi(k_j)`. Features are made piece by
piece, used while they are in the cache, and made again for the backward pass. The stabiliser of the
keys is each feature's largest exponent so far; the sums are rescaled when it grows.
Time O((T + S) M (D + E)), memory beyond the results O(M E) on a CPU; elsewhere in one piece.
Source: Choromanski et al., 2021, arXiv:2009.14794.
Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D head size, E value size,
M features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnzoo.ops.random_features import NOTHING, exponents, exponents_backward, pieces, scaled


def favor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    scale: float,
    real: Tensor | None = None,
    eps: float = 1e-30,
) -> Tensor:
    """Attend to all keys through positive random features.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, S, E]``.
        projection: ``[M, D]``; no gradient flows to it.
        scale: s, which multiplies query-key products in softmax attention.
        real: ``[B, S]``, false where a key is padding.
        eps: Added to the sum of weights, so that rows without a key give zeros.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``. Sums are in float32, or float64 for float64 inputs.
    """
    weight = scaled(projection.to(torch.promote_types(projection.dtype, v.dtype)), scale)
    heads = k.shape[1]
    rows = q.reshape(q.shape[0], heads, -1, q.shape[3])  # the heads of a group below each other
    gone = None if real is None else ~real[:, None, :, None].expand(k.shape[0], heads, -1, 1)
    out: Tensor = _Favor.apply(rows, k, v, weight, scale, gone, eps)  # type: ignore[no-untyped-call]
    return out.view(*q.shape[:3], -1)


def _query_features(q: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    """Return a piece's features, ``[..., rows, M]``; their sum per row is a factor that cancels."""
    products = torch.matmul(q, weight.T).add_(shift)
    return torch.softmax(products, -1, out=products)


class _Favor(torch.autograd.Function):
    """Keys first, then queries; the backward pass the other way round."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        scale: float,
        gone: Tensor | None,
        eps: float,
    ) -> Tensor:
        (batch, heads), (size, wide) = k.shape[:2], (weight.shape[0], weight.dtype)
        shift = weight.new_full((batch, heads, 1, size), NOTHING)
        kv = weight.new_zeros(batch, heads, size, v.shape[-1])
        z = weight.new_zeros(batch, heads, size, 1)
        for (x, y, hidden), (top, sums, total) in pieces(size, (k, v, gone), (shift, kv, z)):
            features = exponents(x.to(wide), weight, scale)
            if hidden is not None:
                features.masked_fill_(hidden, -torch.inf)
            now = torch.maximum(top, features.amax(-2, keepdim=True))
            faded = (top - now).exp_().mT
            features.sub_(now).exp_()
            sums.mul_(faded).add_(features.mT @ y.to(wide))
            total.mul_(faded).add_(features.sum(-2).unsqueeze(-1))
            top.copy_(now)
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        for (x, rows), (top, sums, total) in pieces(size, (q, out), (shift, kv, z)):
            features = _query_features(x.to(wide), weight, top)
            rows.copy_((features @ sums).div_((features @ total).add_(eps)))
        ctx.save_for_backward(q, k, v, weight, gone, shift, kv, z)
        ctx.scale, ctx.eps = scale, eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weight, gone, shift, kv, z = ctx.saved_tensors
        size, wide = weight.shape[0], weight.dtype
        d_q, d_k, d_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        d_kv, d_z = torch.zeros_like(kv), torch.zeros_like(z)
        for (x, g, room), (top, sums, total, d_sums, d_total) in pieces(
            size, (q, grad, d_q), (shift, kv, z, d_kv, d_z)
        ):
            features = _query_features(x.to(wide), weight, top)
            inverse = (features @ total).add_(ctx.eps).reciprocal_()
            d_rows = g.to(wide) * inverse
            d_features = d_rows @ sums.mT
            # Not from the output, which may have been rounded to 16 bits
            d_row = (features * d_features).sum(-1, keepdim=True).mul_(inverse).neg_()
            d_features.addcmul_(d_row, total.mT)
            d_sums.add_(features.mT @ d_rows)
            d_total.add_(features.mT @ d_row)
            room.copy_(torch._softmax_backward_data(d_features, features, -1, wide) @ weight)
        for (x, y, hidden, room_k, room_v), (top, d_sums, d_total) in pieces(
            size, (k, v, gone, d_k, d_v), (shift, d_kv, d_z)
        ):
            x = x.to(wide)
            features = exponents(x, weight, ctx.scale)
            if hidden is not None:
                features.masked_fill_(hidden, -torch.inf)
            features.sub_(top).exp_()
            room_v.copy_(features @ d_sums)
            d_exponents = (y.to(wide) @ d_sums.mT).add_(d_total.mT).mul_(features)
            room_k.copy_(exponents_backward(d_exponents, x, weight, ctx.scale))
        return d_q, d_k, d_v, None, None, None, None
