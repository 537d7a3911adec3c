r"""FAVOR+ attention without a causal mask, in which features are never written to memory.

Computes :math:`o_t = \phi(q_t) S / (\phi(q_t) z + \epsilon)` with :math:`S = \sum_j \phi(k_j)
v_j^T` and :math:`z = \sum_j \phi(k_j)`. Features are computed in blocks that stay in the cache, and
recomputed in the backward pass. Each feature of the keys is stabilised by its largest exponent so
far; the sums are rescaled when it grows, as in online softmax. Time O((T + S) M (D + E)), memory
beyond the results O(M E) on a CPU; other devices use one block. Source: Choromanski et al., 2021,
arXiv:2009.14794. Other letters: M features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import fill_padding
from attnzoo.contract.validation import (
    check_mask_fields,
    check_qkv,
    check_shape,
    empty_output,
    is_empty_call,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.random_features import LOG_ZERO, exponents, scale_projection
from attnzoo.runtime.kernel_calls import check_not_mapped, check_reverse_mode, first_derivative_only

BLOCK_SIZE = 2**16  # features of a block on a CPU: 256 KiB stay in the cache of a core
INSTEAD = "impl='reference' of the performer backend"  # for derivatives of derivatives


def favor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    scale: float,
    mask: AttentionMask | None = None,
    eps: float = 1e-30,
) -> Tensor:
    """Compute bidirectional attention through positive random features.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, S, E]``.
        projection: ``[M, D]``; has no gradient.
        scale: s, which multiplies query-key products in softmax attention.
        mask: Padding; ``None`` means none. Causal and packed calls use
            :func:`attnzoo.ops.linear.api.linear_attention` on features.
        eps: Added to the sum of weights, so that queries without a key return zeros.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``. The sums are float32, or float64 for float64 inputs.

    Raises:
        ValueError: Shapes, dtypes or the mask are not supported; the message says which are.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 8)
        >>> projection = torch.randn(256, 8)
        >>> attnzoo.ops.favor_attention(q, k, v, projection, scale=8**-0.5).shape
        torch.Size([1, 4, 1000, 8])
    """
    check_qkv(q, k, v, mask)
    check_shape("projection", projection, (len(projection), q.shape[3]), "M, D", q.device)
    if mask is not None and (mask.causal or mask.segment_ids is not None):
        raise UnsupportedError(
            "favor_attention supports only padding, got a causal mask or segments; use "
            "linear_attention on features, such as positive_queries and positive_keys."
        )
    if mask is not None:
        check_mask_fields("favor_attention", mask)
    check_reverse_mode("favor_attention", q, k, v, instead=INSTEAD)
    check_not_mapped("favor_attention", q, k, v, instead=INSTEAD)
    if is_empty_call(q, k):
        return empty_output(q, k, v)
    weight = scale_projection(projection.to(torch.promote_types(projection.dtype, v.dtype)), scale)
    heads, padding_mask = k.shape[1], None if mask is None else mask.padding
    k, v = (fill_padding(x, padding_mask) for x in (k, v))
    rows = q.reshape(q.shape[0], heads, -1, q.shape[3])  # [B, Hkv, G * T, D]
    is_padding = None
    if padding_mask is not None:
        is_padding = ~padding_mask[:, None, :, None].expand(k.shape[0], heads, -1, 1)
    options = (weight, scale, is_padding, eps)
    out: Tensor = _Favor.apply(rows, k, v, *options)  # type: ignore[no-untyped-call]
    return out.view(*q.shape[:3], -1)


def _query_features(q: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    """Return the features of a block, ``[..., rows, M]``, divided by the sum of each row.

    The sum is a factor that cancels.
    """
    exponent = torch.matmul(q, weight.T).add_(shift)
    return torch.softmax(exponent, -1, out=exponent)


def _split_blocks(
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


def _exponents_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Return the gradient of :func:`exponents` with respect to ``x``."""
    factor = grad.sum(-1, keepdim=True).mul_(-scale)
    return torch.matmul(grad, weight).addcmul_(x, factor)


class _Favor(torch.autograd.Function):
    """Sums over the keys, then outputs of the queries; the backward pass in reverse order."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        scale: float,
        is_padding: Tensor | None,
        eps: float,
    ) -> Tensor:
        (batch, heads), (size, wide) = k.shape[:2], (weight.shape[0], weight.dtype)
        shift = weight.new_full((batch, heads, 1, size), LOG_ZERO)
        kv = weight.new_zeros(batch, heads, size, v.shape[-1])
        z = weight.new_zeros(batch, heads, size, 1)
        for (keys, values, hidden), (maximum, kv_sum, z_sum) in _split_blocks(
            size, (k, v, is_padding), (shift, kv, z)
        ):
            features = exponents(keys.to(wide), weight, scale)
            if hidden is not None:
                features.masked_fill_(hidden, -torch.inf)
            new_maximum = torch.maximum(maximum, features.amax(-2, keepdim=True))
            rescale = (maximum - new_maximum).exp_().mT
            features.sub_(new_maximum).exp_()
            kv_sum.mul_(rescale).add_(features.mT @ values.to(wide))
            z_sum.mul_(rescale).add_(features.sum(-2).unsqueeze(-1))
            maximum.copy_(new_maximum)
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        for (queries, rows), (maximum, kv_sum, z_sum) in _split_blocks(
            size, (q, out), (shift, kv, z)
        ):
            features = _query_features(queries.to(wide), weight, maximum)
            rows.copy_((features @ kv_sum).div_((features @ z_sum).add_(eps)))
        ctx.save_for_backward(q, k, v, weight, is_padding, shift, kv, z)
        ctx.scale, ctx.eps = scale, eps
        return out

    @staticmethod
    @first_derivative_only("favor_attention", INSTEAD)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weight, is_padding, shift, kv, z = ctx.saved_tensors
        size, wide = weight.shape[0], weight.dtype
        d_q, d_k, d_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        d_kv, d_z = torch.zeros_like(kv), torch.zeros_like(z)
        for (queries, g, out), (maximum, kv_sum, z_sum, d_kv_sum, d_z_sum) in _split_blocks(
            size, (q, grad, d_q), (shift, kv, z, d_kv, d_z)
        ):
            features = _query_features(queries.to(wide), weight, maximum)
            inverse = (features @ z_sum).add_(ctx.eps).reciprocal_()
            d_numerator = g.to(wide) * inverse
            d_features = d_numerator @ kv_sum.mT
            # Not from the output, which may be rounded to 16 bits
            d_denominator = (features * d_features).sum(-1, keepdim=True).mul_(inverse).neg_()
            d_features.addcmul_(d_denominator, z_sum.mT)
            d_kv_sum.add_(features.mT @ d_numerator)
            d_z_sum.add_(features.mT @ d_denominator)
            d_exponents = torch._softmax_backward_data(d_features, features, -1, wide)
            out.copy_(d_exponents @ weight)
        for (keys, values, hidden, out_k, out_v), (maximum, d_kv_sum, d_z_sum) in _split_blocks(
            size, (k, v, is_padding, d_k, d_v), (shift, d_kv, d_z)
        ):
            keys = keys.to(wide)
            features = exponents(keys, weight, ctx.scale)
            if hidden is not None:
                features.masked_fill_(hidden, -torch.inf)
            features.sub_(maximum).exp_()
            out_v.copy_(features @ d_kv_sum)
            d_exponents = (values.to(wide) @ d_kv_sum.mT).add_(d_z_sum.mT).mul_(features)
            out_k.copy_(_exponents_backward(d_exponents, keys, weight, ctx.scale))
        return d_q, d_k, d_v, None, None, None, None
