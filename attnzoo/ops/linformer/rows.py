"""The rows of Linformer: pooling and projection of tokens to rows, and softmax attention to rows.

The bidirectional form is one projection of the full sequence, and attention to its rows; the causal
form (:mod:`attnzoo.ops.linformer.causal_blocks`) shares the pooling and the attention.

Other letters: L longest sequence, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.linformer.common import LinformerCall


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products: on a CPU float32 or wider, as its 16-bit products lose digits.

    Rows are sums over many tokens, and their gradients over all queries.
    """
    return torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype


def row_counts(padding_mask: Tensor | None, tokens: int, rows: int, device: torch.device) -> Tensor:
    """Return the number of tokens that each row pools.

    Of n tokens, row j pools those from ``ceil(j n / R)`` on.

    Returns:
        ``[1 or B, R']``, integers, R' = min(R, S); zero for the rows that a shorter sequence does
        not use.
    """
    used = min(rows, tokens)
    if padding_mask is None:
        lengths = torch.full((1, 1), tokens, device=device)
    else:
        lengths = padding_mask.sum(1, keepdim=True)
    index = torch.arange(used + 1, device=device)
    filled = lengths.clamp(min=1, max=used)  # rows that pool at least one of n tokens
    starts = (index * lengths + filled - 1) // filled
    return starts.minimum(lengths).diff(dim=1)


def row_bias(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logarithm of the tokens per row, which is added to scores, ``[1 or B, 1, 1, R']``.

    The largest is 0, which keeps precision in 16 bits; softmax depends on differences only. Rows
    without a token get minus infinity. In a sequence without a token, all rows get 0: they are
    zeros, so the output is zero.
    """
    most = counts.amax(1, keepdim=True)
    bias = (counts.to(dtype) / most.clamp(min=1)).log()
    return bias.masked_fill(most == 0, 0.0)[:, None, None]


def pool_index(counts: Tensor, tokens: int) -> Tensor:
    """Return the row of each token, ``[1 or B, S]``; positions after the sequence get the last."""
    ends = counts.cumsum(1).contiguous()
    position = torch.arange(tokens, device=counts.device).expand(counts.shape[0], -1).contiguous()
    return torch.searchsorted(ends, position, right=True).clamp_(max=counts.shape[1] - 1)


def pool_matrix(counts: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix of mean pooling, ``[1 or B, 1, S, R']``; zero after the sequence."""
    index = pool_index(counts, tokens)
    weight = 1 / counts.gather(1, index).to(dtype).clamp(min=1)
    position = torch.arange(tokens, device=counts.device)
    weight = weight * (position < counts.sum(1, keepdim=True))
    matrix = weight.new_zeros(*index.shape, counts.shape[1])
    return matrix.scatter_(2, index.unsqueeze(2), weight.unsqueeze(2)).unsqueeze(1)


def attend_to_rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return softmax attention with the query heads of a group concatenated along the queries.

    Rows are not repeated for each query head, and the fused kernel gets as many query heads as key
    heads.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Rows of keys, ``[B, Hkv, R, D]``.
        v: Rows of values, ``[B, Hkv, R, E]``.
        bias: Added to the scores: ``[1 or B, 1, 1 or T, R]``.
        scale: Multiplies the products.
        dropout: Probability of dropping a weight.

    Returns:
        ``[B, H, T, E]`` in the dtype of the rows.
    """
    batch, heads, length, size = q.shape
    groups = heads // k.shape[1]
    q = q.reshape(batch, k.shape[1], groups * length, size).to(k.dtype)
    if bias is not None:
        bias = bias.to(k.dtype)
        if bias.shape[2] > 1:
            bias = bias.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    return out.reshape(batch, heads, length, -1)


def run_torch(x: LinformerCall) -> Tensor:
    """Return the bidirectional form, ``[B, H, T, E]``, in the dtype of :func:`compute_dtype`."""
    keys, device, padding_mask = x.k.shape[2], x.k.device, x.padding_mask
    counts = row_counts(padding_mask, keys, x.key_rows.shape[2], device) if x.pooling else None
    wide = torch.promote_types(x.q.dtype, torch.float32)
    bias = None if counts is None else row_bias(counts, wide)
    means = None if counts is None else pool_matrix(counts, keys, wide)
    dtype = compute_dtype(x.q)
    row_k = _project(x.k, x.key_rows, padding_mask, means).to(dtype)
    row_v = _project(x.v, x.value_rows, padding_mask, means).to(dtype)
    if padding_mask is None and counts is not None and keys % counts.shape[1] == 0:
        bias = None  # all rows pool the same number of tokens
    return attend_to_rows(x.q, row_k, row_v, bias, scale=x.scale, dropout=x.dropout)


def _project(x: Tensor, rows: Tensor, padding_mask: Tensor | None, means: Tensor | None) -> Tensor:
    """Project keys or values ``[B, Hkv, S, D]`` along the sequence to ``[B, Hkv, R', D]``.

    Args:
        x: Keys or values.
        rows: ``[1 or Hkv, L, R]``.
        padding_mask: ``[B, S]``, false at padding, which is moved to the end.
        means: From :func:`pool_matrix`, with pooling.
    """
    x = x.to(compute_dtype(x))
    if padding_mask is not None:
        is_padding, order = (~padding_mask).to(torch.uint8).sort(dim=1, stable=True)
        x = gather_tokens(x, order)
        x = x.masked_fill(is_padding.bool()[:, None, :, None], 0)
    weights = rows[:, : x.shape[2]].to(x.dtype)
    if means is None:
        return _sum_tokens(weights, x)
    means = means.to(x.dtype)
    weights = weights[:, :, : means.shape[3]]
    if padding_mask is None:
        return _sum_tokens(weights + means[0], x)
    return _sum_tokens(weights, x) + means.mT @ x  # means differ between sequences of the batch


def _sum_tokens(weights: Tensor, x: Tensor) -> Tensor:
    """Multiply ``[1 or Hkv, S, R]`` transposed with ``[B, Hkv, S, D]``."""
    batch, heads, tokens, size = x.shape
    if weights.shape[0] == 1:
        # One product for all heads, which models lay out next to each other in memory. For other
        # layouts, a copy costs less than a gradient of the weights for every head
        flat = weights[0].mT @ x.transpose(1, 2).reshape(batch, tokens, heads * size)
        return flat.view(batch, -1, heads, size).transpose(1, 2)
    return weights.mT @ x
