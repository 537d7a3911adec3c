"""Sliding-window attention through torch's FlexAttention, on CUDA.

The band and the global keys are a function of positions, from which torch compiles a kernel; which
blocks of keys a block of queries meets is worked out block by block, so nothing of T x T is built.
Source: Beltagy et al., 2020, arXiv:2004.05150; Dong et al., 2024, arXiv:2412.05496.
Letters: B batch, H query heads, Hkv key heads, T tokens, N blocks, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.longformer_pattern import Pattern

BLOCK = 128  # tokens: the block of FlexAttention's own masks
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


NO_BIAS = "a bias is given, which its kernel does not add"


def flex_reasons(q: Tensor, dropout: float) -> list[str]:
    """Say why FlexAttention cannot run this call; empty if it can."""
    reasons = []
    if q.device.type != "cuda":
        reasons.append(
            f"the inputs are on {q.device.type}, where FlexAttention has no backward pass "
            "(it is used on cuda only)"
        )
    elif find_spec("triton") is None:
        reasons.append("triton, which it is compiled with, is not installed")
    if q.dtype == torch.float64:
        reasons.append("the inputs are float64, which its kernels do not take")
    if dropout > 0:
        reasons.append(f"attention dropout of {dropout} is given, which it does not have")
    return reasons


def mask_function(
    pattern: Pattern, seen: Tensor, is_global: Tensor, segments: Tensor | None
) -> MaskFunction:
    """Return the function of (row, head, query, key) that says what is seen.

    A query that would see nothing sees its own key, so that no row of the softmax is empty.

    Args:
        pattern: The band of each head.
        seen: Keys that the band may see, ``[B, T]`` bool.
        is_global: Keys that every query sees, ``[B, T]`` bool.
        segments: Only keys of the query's own are seen, ``[B, T]`` integers.
    """
    before, after, dilation = torch.tensor(pattern.bands, device=seen.device).unbind(1)
    causal = pattern.causal

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance, step = query - key, dilation[head]
        near = (distance <= before[head] * step) & (distance >= -after[head] * step)
        near = near & (distance % step == 0) & seen[row, key]
        if segments is not None:
            near = near & (segments[row, query] == segments[row, key])
        everywhere = is_global[row, key]
        if causal:
            everywhere = everywhere & (distance >= 0)
        return near | everywhere | (distance == 0)

    return sees


def block_map(pattern: Pattern, is_global: Tensor) -> Tensor:
    """Say which blocks of keys a block of queries may meet, ``[B, H, N, N]`` bool; none is missed.

    Args:
        pattern: The band of each head.
        is_global: Keys that every query sees, ``[B, T]`` bool.
    """
    length, device = is_global.shape[1], is_global.device
    blocks = -(-length // BLOCK)
    number = torch.arange(blocks, device=device)
    nearest = (number[:, None] - number) * BLOCK - BLOCK + 1  # least distance, query minus key
    reach = torch.tensor([(b.before * b.dilation, b.after * b.dilation) for b in pattern.bands])
    before, after = reach.to(device)[:, :, None, None].unbind(1)
    met = (nearest <= before) & (nearest + 2 * BLOCK - 2 >= -after)  # [H, N, N]
    held = F.pad(is_global, (0, blocks * BLOCK - length)).view(-1, blocks, BLOCK).any(2)
    held = held[:, None, None, :]
    if pattern.causal:
        held = held & (number[:, None] >= number)
    return met | held


@cache
def _compiled() -> Any:
    """Compile FlexAttention on first use: without that, it builds the whole square."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    scale: float,
    seen: Tensor | None,
    is_global: Tensor | None,
    segments: Tensor | None,
) -> Tensor:
    """Attend within each head's band and to the global keys.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        pattern: The band of each head.
        scale: Multiplies the products.
        seen: Keys that the band may see, ``[B, T]`` bool; ``None`` when all.
        is_global: Keys that every query sees, ``[B, T]`` bool; ``None`` when none.
        segments: Only keys of the query's own are seen, ``[B, T]`` integers.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    batch, heads, length, _ = q.shape
    every = torch.ones(batch, length, dtype=torch.bool, device=q.device)
    seen = every if seen is None else seen.expand(batch, length)
    is_global = ~every if is_global is None else is_global.expand(batch, length)
    segments = None if segments is None else segments.expand(batch, length)
    met = block_map(pattern, is_global)
    mask = BlockMask.from_kv_blocks(
        met.sum(3).to(torch.int32),
        met.int().argsort(dim=3, descending=True, stable=True).to(torch.int32),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_function(pattern, seen, is_global, segments),
        seq_lengths=(length, length),
    )
    plain = torch.compiler.is_compiling() or q.device.type != "cuda"
    attend = flex_attention if plain else _compiled()
    out: Tensor = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=k.shape[1] != heads)
    return out
