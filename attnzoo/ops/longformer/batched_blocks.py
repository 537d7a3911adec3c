"""Sliding-window attention as one batch of blocks, for GPUs, ``torch.compile`` and dropout.

Each block of C queries with the W keys of its band is a small dense problem, to which the global
keys are added. Torch's ``scaled_dot_product_attention`` computes all of them in one call.
Time O(T (w + G) D); memory O(T (w + G)) for the mask, and what torch's kernel saves.
Source: Beltagy et al., 2020, arXiv:2004.05150.
Letters: B batch, H query heads, Hkv key heads, T tokens, N blocks, C queries of a block, W keys of
a block's band, G global keys, w window, d dilation, D key size, E value size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.masks import AttentionMask, Window
from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.softmax.sdpa import sdpa
from attnzoo.ops.window.band import MIN_BLOCK, band_blocks, band_mask
from attnzoo.ops.window.blockwise_cpu import LocalOptions
from attnzoo.ops.window.pattern import gather_bias


def batched_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: LocalOptions,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention within a band and to global keys.

    Args:
        q: Queries, ``[B, H, T, D]``; all heads have the same band.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        options: Band, scale and masks. A query that sees no key gives zeros.
        bias: Added to the scores, ``[1 or B, H, 1 or T, T]``.
        dropout: Probability of dropping a weight.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``.
    """
    batch, heads, tokens, _ = q.shape
    step = min(options.band.dilation, tokens)
    phases = [_split_phases(x, step) for x in (q, k, v)]
    length = phases[0].shape[2]  # T / d, rounded up
    window: Window = (min(options.band.before, length - 1), min(options.band.after, length - 1))
    block = max(sum(window), MIN_BLOCK)
    queries, keys, values = band_blocks(*phases, block=block, window=window)
    mask = band_mask(
        length, block=block, window=window, mask=_phase_mask(options, step, q), device=q.device
    )
    mask = mask.repeat(len(queries) // len(mask), 1, 1, 1)  # [B d N, 1, C, W]
    if options.global_indices is not None:
        copies, index = len(queries) // batch, options.global_indices.positions
        keys, values = (
            torch.cat([gather_tokens(x, index).repeat_interleave(copies, 0), in_band], 2)
            for x, in_band in ((k, keys), (v, values))
        )
        mask = torch.cat([_global_mask(options, step, length, block, batch), mask], 3)
    if bias is not None:
        bias = _block_bias(bias, options, step, length, block, window, batch)
    out = sdpa(
        queries, keys, values, scale=options.scale, mask=mask, bias=bias, dropout=dropout
    )  # [B d N, H, C, E]
    out = out.view(batch, step, -1, heads, block, v.shape[3]).permute(0, 3, 2, 4, 1, 5)
    out = out.reshape(batch, heads, -1, step, v.shape[3])[:, :, :length]
    return out.flatten(2, 3)[:, :, :tokens]


def _split_phases(x: Tensor, step: int) -> Tensor:
    """Make every d-th token a row of its own, ``[B d, H, T / d, D]``: a dilated band is plain."""
    if step == 1:
        return x
    batch, heads, length, size = x.shape
    x = F.pad(x, (0, 0, 0, -length % step)).reshape(batch, heads, -1, step, size)
    return x.permute(0, 3, 1, 2, 4).flatten(0, 1)


def _phase_mask(options: LocalOptions, step: int, q: Tensor) -> AttentionMask:
    """Return the key mask and the segments of the phases; the end of a short phase is masked."""
    batch, _, length, _ = q.shape
    missing = -length % step

    def split(x: Tensor) -> Tensor:  # [B, T] -> [B d, T / d]
        x = F.pad(x, (0, missing)).expand(batch, -1)
        return x.reshape(batch, -1, step).transpose(1, 2).flatten(0, 1)

    key_mask, ids = options.key_mask, options.segment_ids
    if key_mask is None and missing:
        key_mask = torch.ones(1, length, dtype=torch.bool, device=q.device)
    return AttentionMask(
        padding=None if key_mask is None else split(key_mask),
        segment_ids=None if ids is None else split(ids),
    )


def _global_mask(options: LocalOptions, step: int, length: int, block: int, batch: int) -> Tensor:
    """Return the mask of the global keys, ``[B d N, 1, C, G]`` bool, true where seen."""
    assert options.global_indices is not None
    positions, valid = options.global_indices
    blocks = -(-length // block)
    mask = valid[:, None, None, None, :].expand(batch, step, blocks, block, -1)
    if options.causal:
        device = positions.device
        query = torch.arange(blocks * block, device=device) * step
        query = query + torch.arange(step, device=device)[:, None]
        query = query.view(1, step, blocks, block, 1)
        mask = mask & (positions[:, None, None, None, :] <= query)
    return mask.reshape(batch * step * blocks, 1, block, -1)


def _block_bias(
    bias: Tensor,
    options: LocalOptions,
    step: int,
    length: int,
    block: int,
    window: Window,
    batch: int,
) -> Tensor:
    """Gather the bias of every block from ``[1 or B, H, 1 or T, T]``.

    Returns:
        ``[B d N, H, 1 or C, G + W]``; arbitrary at keys outside the sequence, which are masked.
    """
    blocks, device, last = -(-length // block), bias.device, bias.shape[3] - 1
    first = block * torch.arange(blocks, device=device)[:, None]
    phase = torch.arange(step, device=device)[:, None, None]

    def positions(begin: int, end: int) -> Tensor:  # [d, N, ...]
        return (phase + step * (first + torch.arange(begin, end, device=device))).clamp(0, last)

    keys = positions(-window[0], block + window[1])[:, :, None, :]
    queries = positions(0, block)
    queries = queries[..., None] if bias.shape[2] > 1 else queries.new_zeros(1, 1, 1, 1)
    found = bias[:, :, queries, keys].expand(batch, *[-1] * 5)  # [B, H, d, N, 1 or C, W]
    if options.global_indices is not None:
        of_globals = gather_bias(bias, None, options.global_indices.positions)[
            :, :, queries[..., 0]
        ]
        of_globals = of_globals.expand(*found.shape[:4], -1, -1)  # [B, H, d, N, 1 or C, G]
        found = torch.cat([of_globals, found], 5)
    return found.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
