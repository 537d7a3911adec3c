"""The band of a sliding window, cut into blocks: each block of queries beside the keys it can see.

Turns local attention of reach w over T tokens into T / block small dense problems, so that time and
memory are O(T w). Letters: B batch, H heads, T tokens, N blocks, W keys beside a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.masks import AttentionMask, Window


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
