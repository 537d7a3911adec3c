"""Sliding-window attention in blocks: each query block attends to the keys of its band.

Local attention with a window of w over T tokens becomes T / C dense problems, so that time and
memory are O(T w). Other letters: N blocks, C queries of a block, W keys that a block sees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.masks import AttentionMask, Window

MIN_BLOCK = 64  # C is the width of the band, but at least this


def band_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, block: int, window: Window
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the query blocks of ``[B, H, T, D]``, and the keys and values that each block sees.

    Query blocks are ``[B * N, H, C, D]``. Keys and values are ``[B * N, Hkv, W, D]`` with
    ``W = before + C + after``, and zeros outside the sequence.
    """
    batch, heads, length, size = q.shape
    end = -length % block
    before, after = window
    q = F.pad(q, (0, 0, 0, end)).reshape(batch, heads, -1, block, size)
    q = q.transpose(1, 2).flatten(0, 1)

    def key_blocks(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, before, after + end))
        views = padded.unfold(2, before + block + after, block)  # [B, Hkv, N, D, W]
        return views.permute(0, 2, 1, 4, 3).flatten(0, 1)

    return q, key_blocks(k), key_blocks(v)


def band_mask(
    length: int, *, block: int, window: Window, mask: AttentionMask, device: torch.device
) -> Tensor:
    """Return the mask of every query block, ``[N or B * N, 1, C, W]`` bool, true where seen."""
    before, after = window
    blocks = -(-length // block)
    queries = torch.arange(block, device=device)[:, None]
    keys = torch.arange(-before, block + after, device=device)
    distance = keys - queries
    in_band = (distance >= -before) & (distance <= after)
    position = keys + block * torch.arange(blocks, device=device)[:, None]  # [N, W]
    in_sequence = (position >= 0) & (position < length)
    seen = in_band & in_sequence[:, None, :]  # [N, C, W]
    position = position.clamp(0, length - 1)
    if mask.padding is not None:
        seen = seen & mask.padding[:, position][:, :, None, :]
    if mask.segment_ids is not None:
        ids = F.pad(mask.segment_ids, (0, blocks * block - length), value=-1)
        ids = ids.view(len(ids), blocks, block)
        seen = seen & (ids[:, :, :, None] == mask.segment_ids[:, position][:, :, None, :])
    return seen.reshape(-1, 1, block, len(keys))


def unblock(x: Tensor, batch: int, length: int) -> Tensor:
    """Join query blocks ``[B * N, H, C, E]`` to sequences, ``[B, H, T, E]``."""
    x = x.view(batch, -1, *x.shape[1:]).transpose(1, 2)
    return x.flatten(2, 3)[:, :, :length]


def band_softmax(
    q: Tensor, k: Tensor, v: Tensor, *, window: Window, scale: float, mask: AttentionMask
) -> tuple[Tensor, Tensor]:
    """Return attention within a band, in plain operations that run and compile on every device.

    Memory O(T w).

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        window: Keys that a query sees before and after its own.
        scale: Multiplies the products.
        mask: Padding and segments. The output of a query that sees no key is arbitrary but finite.

    Returns:
        ``[B, H, T, E]``, and the log-sum-exp of each query's scores, ``[B, H, T, 1]``, both in
        float32 or wider.
    """
    batch, _, length, _ = q.shape
    window = (min(window[0], length - 1), min(window[1], length - 1))
    block = max(sum(window), MIN_BLOCK)
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

    return unblock(out, batch, length), unblock(lse, batch, length)
