"""Sliding-window attention as one batch of blocks, for GPUs, ``torch.compile`` and dropout.

Each block of C queries and the W keys that its band can reach are a small dense problem of their
own, to which the global keys are added; torch's ``scaled_dot_product_attention`` takes all of them
in one call. Time O(T (w + G) D); memory O(T (w + G)) for the mask, and what torch's kernel keeps.
Source: Beltagy et al., 2020, arXiv:2004.05150.
Letters: B batch, H query heads, Hkv key heads, T tokens, N blocks, C tokens of a block, W keys
beside a block, G global keys, d dilation, D key size, E value size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.masks import AttentionMask, Window
from attnzoo.ops.flash import flash_attention
from attnzoo.ops.longformer_pattern import bias_at, take
from attnzoo.ops.longformer_walk import Plan
from attnzoo.ops.window import SHORTEST, band_blocks, band_mask


def blocks_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0, bias: Tensor | None = None
) -> Tensor:
    """Attend within a band and to global keys.

    Args:
        q: Queries, ``[B, H, T, D]``; all heads have the plan's band.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        plan: What is seen; a query that sees nothing gives zeros.
        dropout: Probability with which a weight is dropped.
        bias: Added to the scores, ``[1 or B, H, 1 or T, T]``.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``.
    """
    batch, heads, whole, _ = q.shape
    step = min(plan.band.dilation, whole)
    # every d-th token is a row of its own: [B d, H, T, D], for a T shorter by d
    parts = [_apart(x, step) for x in (q, k, v)]
    length = parts[0].shape[2]
    window: Window = (min(plan.band.before, length - 1), min(plan.band.after, length - 1))
    block = max(sum(window), SHORTEST)
    queries, keys, values = band_blocks(*parts, block=block, window=window)
    mask = band_mask(
        length,
        block=block,
        window=window,
        mask=_kept(plan, step, q),
        device=q.device,
    )
    mask = mask.repeat(len(queries) // len(mask), 1, 1, 1)  # [B d N, 1, C, W]
    if plan.places is not None:
        copies = len(queries) // batch
        keys, values = (
            torch.cat([take(x, plan.places.place).repeat_interleave(copies, 0), beside], 2)
            for x, beside in ((k, keys), (v, values))
        )
        mask = torch.cat([_global_mask(plan, step, length, block, batch), mask], 3)
    if bias is not None:
        bias = _beside(bias, plan, step, length, block, window, batch)
    out = flash_attention(
        queries,
        keys,
        values,
        mask=AttentionMask(function=lambda: mask),
        scale=plan.scale,
        bias=bias,
        dropout=dropout,
        impl="sdpa",
    )  # [B d N, H, C, E]
    out = out.view(batch, step, -1, heads, block, v.shape[3]).permute(0, 3, 2, 4, 1, 5)
    out = out.reshape(batch, heads, -1, step, v.shape[3])[:, :, :length]
    return out.flatten(2, 3)[:, :, :whole]


def _apart(x: Tensor, step: int) -> Tensor:
    """Put every ``step``-th token into a row of its own, ``[B d, H, T / d, D]``."""
    if step == 1:
        return x
    batch, heads, length, size = x.shape
    x = F.pad(x, (0, 0, 0, -length % step)).reshape(batch, heads, -1, step, size)
    return x.permute(0, 3, 1, 2, 4).flatten(0, 1)


def _kept(plan: Plan, step: int, q: Tensor) -> AttentionMask:
    """Return which keys the band may see; what pads the last step is not seen."""
    batch, _, length, _ = q.shape
    missing = -length % step

    def apart(x: Tensor) -> Tensor:  # [B, T] -> [B d, T / d]
        x = F.pad(x, (0, missing)).expand(batch, -1)
        return x.reshape(batch, -1, step).transpose(1, 2).flatten(0, 1)

    seen, ids = plan.seen, plan.segments
    if seen is None and missing:
        seen = torch.ones(1, length, dtype=torch.bool, device=q.device)
    return AttentionMask(
        padding=None if seen is None else apart(seen),
        segment_ids=None if ids is None else apart(ids),
    )


def _global_mask(plan: Plan, step: int, length: int, block: int, batch: int) -> Tensor:
    """Say which global keys each query sees, ``[B d N, 1, C, G]``."""
    assert plan.places is not None
    place, valid = plan.places
    blocks = -(-length // block)
    seen = valid[:, None, None, None, :].expand(batch, step, blocks, block, -1)
    if plan.causal:
        device = place.device
        position = torch.arange(blocks * block, device=device) * step
        position = position + torch.arange(step, device=device)[:, None]
        position = position.view(1, step, blocks, block, 1)
        seen = seen & (place[:, None, None, None, :] <= position)
    return seen.reshape(batch * step * blocks, 1, block, -1)


def _beside(
    bias: Tensor, plan: Plan, step: int, length: int, block: int, window: Window, batch: int
) -> Tensor:
    """Return what of a bias ``[1 or B, H, 1 or T, T]`` blocks meet, ``[B d N, H, 1 or C, G + W]``.

    Beyond the ends of the sequence it is something, of keys that are not seen.
    """
    blocks, device, last = -(-length // block), bias.device, bias.shape[3] - 1
    first = block * torch.arange(blocks, device=device)[:, None]
    phase = torch.arange(step, device=device)[:, None, None]

    def places(begin: int, end: int) -> Tensor:  # [d, N, ...]
        return (phase + step * (first + torch.arange(begin, end, device=device))).clamp(0, last)

    keys, queries = places(-window[0], block + window[1])[:, :, None, :], places(0, block)
    queries = queries[..., None] if bias.shape[2] > 1 else queries.new_zeros(1, 1, 1, 1)
    found = bias[:, :, queries, keys].expand(batch, *[-1] * 5)  # [B, H, d, N, 1 or C, W]
    if plan.places is not None:
        of_globals = bias_at(bias, None, plan.places.place)[:, :, queries[..., 0]]
        of_globals = of_globals.expand(*found.shape[:4], -1, -1)  # [B, H, d, N, 1 or C, G]
        found = torch.cat([of_globals, found], 5)
    return found.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
