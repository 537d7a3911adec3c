"""The band of a sliding window, cut into blocks: each block of queries beside the keys it can see.

Turns local attention of reach w over T tokens into T / block small dense problems, so that time and
memory are O(T w). Letters: B batch, H heads, T tokens, N blocks, W keys beside a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.masks import AttentionMask, Window

SHORTEST = 64  # queries of a block are as many as the band is wide, but not fewer than this


def band_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, block: int, window: Window
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut ``[B, H, T, D]`` into blocks of queries, ``[B * N, H, block, D]``, and what they see.

    Keys and values come as ``[B * N, Hkv, W, D]`` with ``W = before + block + after``; what lies
    outside the sequence is zero.
    """
    batch, heads, length, size = q.shape
    after_end = -length % block
    before, after = window
    q = F.pad(q, (0, 0, 0, after_end)).reshape(batch, heads, -1, block, size)
    q = q.transpose(1, 2).flatten(0, 1)

    def beside(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, before, after + after_end))
        views = padded.unfold(2, before + block + after, block)  # [B, Hkv, N, D, W]
        return views.permute(0, 2, 1, 4, 3).flatten(0, 1)

    return q, beside(k), beside(v)


def band_mask(
    length: int, *, block: int, window: Window, mask: AttentionMask, device: torch.device
) -> Tensor:
    """Say which of its W keys each query of each block sees, ``[N or B * N, 1, block, W]`` bool."""
    before, after = window
    blocks = -(-length // block)
    queries = torch.arange(block, device=device)[:, None]
    keys = torch.arange(-before, block + after, device=device)
    distance = keys - queries
    within = (distance >= -before) & (distance <= after)
    position = keys + block * torch.arange(blocks, device=device)[:, None]  # [N, W]
    inside = (position >= 0) & (position < length)
    seen = within & inside[:, None, :]  # [N, block, W]
    position = position.clamp(0, length - 1)
    if mask.padding is not None:
        seen = seen & mask.padding[:, position][:, :, None, :]
    if mask.segment_ids is not None:
        own = F.pad(mask.segment_ids, (0, blocks * block - length), value=-1)
        own = own.view(len(own), blocks, block)
        seen = seen & (own[:, :, :, None] == mask.segment_ids[:, position][:, :, None, :])
    return seen.reshape(-1, 1, block, len(keys))


def band_softmax(
    q: Tensor, k: Tensor, v: Tensor, *, window: Window, scale: float, mask: AttentionMask
) -> tuple[Tensor, Tensor]:
    """Attend within a band, in plain operations that run and compile on every device.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        window: Positions that are seen before and after the query's own.
        scale: Multiplies the products.
        mask: Padding and segments; a query that sees nothing gets something finite.

    Returns:
        ``[B, H, T, E]``, and the logarithm of the sum of weights, ``[B, H, T, 1]``, both in float32
        or wider. Memory O(T w).
    """
    batch, heads, length, _ = q.shape
    window = (min(window[0], length - 1), min(window[1], length - 1))
    block = max(sum(window), SHORTEST)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries, keys, values = (x.to(wide) for x in band_blocks(q, k, v, block=block, window=window))
    seen = band_mask(length, block=block, window=window, mask=mask, device=q.device)
    seen = seen.repeat(len(queries) // len(seen), 1, 1, 1)
    grouped = queries.reshape(len(queries), k.shape[1], -1, q.shape[3]) * scale
    scores = (grouped @ keys.mT).view(*queries.shape[:3], -1)
    scores = scores.masked_fill(~seen, torch.finfo(wide).min / 8)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().view(len(queries), k.shape[1], -1, keys.shape[2])
    out = (weights @ values).view(*queries.shape[:3], -1)

    def whole(x: Tensor) -> Tensor:  # [B N, H, C, X] -> [B, H, T, X]
        x = x.view(batch, -1, heads, block, x.shape[3]).transpose(1, 2)
        return x.flatten(2, 3)[:, :, :length]

    return whole(out), whole(lse)
