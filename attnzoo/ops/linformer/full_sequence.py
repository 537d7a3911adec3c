"""Bidirectional Linformer: one projection of the full sequence, then fused softmax attention.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size,
L longest sequence, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.linformer.common import LinformerCall
from attnzoo.ops.linformer.rows import (
    attend_to_rows,
    compute_dtype,
    pool_matrix,
    row_bias,
    row_counts,
)


def run_torch(x: LinformerCall) -> Tensor:
    """Return the output, ``[B, H, T, E]``, in the dtype of :func:`compute_dtype`."""
    keys, device, padding_mask = x.k.shape[2], x.k.device, x.padding_mask
    counts = row_counts(padding_mask, keys, x.key_rows.shape[2], device) if x.pooling else None
    bias = None if counts is None else row_bias(counts)
    wide = torch.promote_types(x.q.dtype, torch.float32)
    means = None if counts is None else pool_matrix(counts, keys, wide)
    dtype = compute_dtype(x.q)
    row_k = project(x.k, x.key_rows, padding_mask, means).to(dtype)
    row_v = project(x.v, x.value_rows, padding_mask, means).to(dtype)
    if padding_mask is None and counts is not None and keys % counts.shape[1] == 0:
        bias = None  # all rows pool the same number of tokens
    return attend_to_rows(x.q, row_k, row_v, bias, scale=x.scale, dropout=x.dropout)


def project(x: Tensor, rows: Tensor, padding_mask: Tensor | None, means: Tensor | None) -> Tensor:
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
