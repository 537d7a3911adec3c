"""Biases of blockwise sliding-window attention: one of the band, one of the global keys.

Letters: B batch, H query heads, Hkv key heads, N = B Hkv rows, n rows of a chunk, g query heads of
a row, T tokens, S keys, C queries of a block, W keys of a block's band, G global keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mask_value(dtype: torch.dtype) -> float:
    """Return the score of a masked key: its weight is 0, and the sum of four is finite."""
    return torch.finfo(dtype).min / 8


def finite_bias(bias: Tensor) -> Tensor:
    """Return a bias that masks keys where it is -inf; other numbers stay well above the mask's."""
    masked = mask_value(bias.dtype)
    return bias.clamp_min(masked / 4).masked_fill(bias.isneginf(), masked)


def query_rows(bias: Tensor, queries: slice) -> Tensor:
    """Return the rows of some queries of ``[..., 1 or T, S]``, where one row may serve them all."""
    return bias if bias.shape[-2] == 1 else bias[..., queries, :]


def _bias_index(bias: Tensor, count: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the index of each row in the bias ``[1 or B, Hkv, ...]``: batch and key head."""
    row = torch.arange(count, device=bias.device)[rows]
    return row // bias.shape[1] * (len(bias) > 1), row % bias.shape[1]


def add_bias(
    scores: Tensor, inputs: tuple[Any, ...], queries: slice, band: slice, rows: slice
) -> None:
    """Add the biases to the scores ``[n, g C, G + W]`` of a block of queries and its band."""
    q, *_, bias, global_bias = inputs
    first = scores.shape[2] - (band.stop - band.start)  # G
    by_head = scores.view(len(scores), q.shape[1], -1, scores.shape[2])
    if bias is not None:
        in_band = query_rows(bias, queries)[..., band]
        by_head[..., first:].add_(in_band[_bias_index(bias, q.shape[0], rows)])
    if global_bias is not None:
        by_head[..., :first].add_(query_rows(global_bias[rows], queries))


def add_bias_gradients(
    grad_scores: Tensor,
    grads: tuple[Any, ...],
    queries: slice,
    band: slice,
    rows: slice,
    count: int,
) -> None:
    """Add the gradients of the scores ``[n, g, C, G + W]`` to those of the biases."""
    *_, grad_bias, grad_global_bias = grads
    first = grad_scores.shape[3] - (band.stop - band.start)  # G
    if grad_bias is not None:
        into = query_rows(grad_bias, queries)[..., band]
        part = grad_scores[..., first:]
        part = part.sum(2, keepdim=True) if into.shape[-2] == 1 else part
        into.index_put_(_bias_index(grad_bias, count, rows), part, accumulate=True)
    if grad_global_bias is not None:
        into = query_rows(grad_global_bias, queries)
        part = grad_scores[..., :first]
        part = part.sum(2, keepdim=True) if into.shape[-2] == 1 else part
        into[rows].add_(part)
