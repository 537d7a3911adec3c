"""Launch the Triton kernels of one decoded token of block-sparse attention: at most three.

Letters: B batch, H query heads, Hkv key heads, N key blocks, K selected blocks, A heads with a
selection of their own, O old keys, R recent keys, D key size, E value size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.ops.block_sparse.triton.launch import KernelOptions
from attnzoo.ops.block_sparse.triton.selection_launch import TILE_BLOCKS
from attnzoo.ops.block_sparse.triton.step import (
    add_parts_kernel,
    attend_step_kernel,
    rank_kernel,
)
from attnzoo.runtime.triton_products import (
    block_size,
    contiguous_rows,
    device_context,
    operand_precision,
)

SPLIT_BLOCKS = 512  # blocks that one program scores; more where MOST_RANKS limits the splits
MOST_RANKS = 2048  # ranks of all splits of a list, which each attending program sorts
PART_SLOTS = 128  # keys that one program attends to
TILE_SLOTS = {64: 64, 128: 64, 256: 32}  # per tile, by head size; half if operands are float32


class StepTensors(NamedTuple):
    """Inputs of one token; see ``BlockSparseState``, which contains the token."""

    q: Tensor  # [B, H, 1, D]
    index_q: Tensor | None  # [B, I, 1, P + 1]
    k: Tensor  # [B, Hkv, O, D]
    v: Tensor  # [B, Hkv, O, E]
    recent_k: Tensor  # [B, Hkv, R, D]
    recent_v: Tensor  # [B, Hkv, R, E]
    length: Tensor  # [B]
    summary: Tensor  # [B, Hkv or 1, N, Z], float32
    leader: Tensor  # [B, H, D] or [B, I, P + 1], or size 0


def split_blocks(blocks: int, sorted_blocks: int, split: int) -> tuple[int, int]:
    """Return the number of splits, a power of two, and the number of blocks per split."""
    most = max(1, MOST_RANKS // sorted_blocks)
    splits = min(most, triton.next_power_of_2(max(1, -(-blocks // split))))
    per_split = -(-max(blocks, 1) // splits)
    return splits, -(-per_split // TILE_BLOCKS) * TILE_BLOCKS


def launch_step(
    x: StepTensors,
    options: KernelOptions,
    *,
    near_slots: int,
    top_k: int,
    score: str,
    coverage: float | None,
    per_key_head: bool,
) -> Tensor:
    """Return the output of one token, ``[B, H, 1, E]``, in the dtype of the values.

    Args:
        x: Inputs.
        options: Sizes.
        near_slots: Maximum number of keys of a window.
        top_k: Maximum number of selected blocks.
        score: ``"mean"``, ``"moments"``, ``"bounds"`` or ``"indexer"``.
        coverage: Share of the estimated weight to cover; ``None`` selects ``top_k`` blocks.
        per_key_head: Whether the query heads of a key head share a selection.
    """
    indexed, (batch, heads, _, d) = score == "indexer", x.q.shape
    scoring_q = contiguous_rows(x.q if x.index_q is None else x.index_q)
    q, e = contiguous_rows(x.q), x.v.shape[3]
    tensors = [contiguous_rows(y) for y in (x.k, x.v, x.recent_k, x.recent_v)]
    summary, leader = x.summary.contiguous(), x.leader.to(scoring_q.dtype).contiguous()
    key_heads, blocks = x.v.shape[1], summary.shape[2]
    lists = key_heads if per_key_head or indexed else heads
    ranked = 1 if indexed else lists
    kept = min(top_k, blocks)
    sorted_blocks = max(2, triton.next_power_of_2(max(kept, 1)))
    splits, per_split = split_blocks(blocks, sorted_blocks, SPLIT_BLOCKS)
    size = scoring_q.shape[3] - indexed
    ranks = torch.empty(batch, ranked, splits, sorted_blocks, dtype=torch.int64, device=q.device)
    weight_sums = torch.empty(batch, ranked, splits, 2, dtype=torch.float32, device=q.device)
    most_slots = options.num_sinks + near_slots + kept * options.block_size
    parts = triton.next_power_of_2(max(1, -(-most_slots // PART_SLOTS)))
    wide, precision = operand_precision(q, x.k, x.v)
    tile = TILE_SLOTS[max(64, block_size(max(d, e)))] >> wide
    per_part = -(-most_slots // (parts * tile)) * tile
    sums = torch.empty(batch, heads, parts, e + 2, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, 1, e, dtype=x.v.dtype, device=q.device)
    rank_heads = summary.shape[1]
    shared = {
        "window": options.window,
        "num_sinks": options.num_sinks,
        "Q": options.query_block,
        "BLOCK": options.block_size,
        "KP": sorted_blocks,
        "SPLITS": splits,
        "COVERAGE": coverage is not None,
        "PRECISION": precision,
    }
    weight_scale = 1.0 if indexed else options.scale
    with device_context(q.device):
        rank_kernel[(batch * rank_heads * splits,)](
            scoring_q, leader if leader.numel() else scoring_q, summary, x.length, ranks,
            weight_sums, *scoring_q.stride()[:2], blocks=blocks, blocks_per_split=per_split,
            scale=weight_scale, key_heads=rank_heads, F=ranked // rank_heads,
            Y=1 if indexed else heads // lists, HEADS=scoring_q.shape[1], D=size,
            BD=block_size(size), BM=block_size(ranked // rank_heads),
            BN=max(min(TILE_BLOCKS, block_size(blocks)) >> (size > 128), sorted_blocks),
            SCORE=score, LEADER=leader.numel() > 0, **shared, num_warps=4, num_stages=1,
        )  # fmt: skip
        attend_step_kernel[(batch * lists * parts,)](
            q, *tensors, x.length, ranks, weight_sums, sums, out, *q.stride()[:2],
            *(stride for y in tensors for stride in y.stride()[:3]),
            old=x.k.shape[2], recent=x.recent_k.shape[2], kept=kept, slots_per_part=per_part,
            scale=options.scale, weight_scale=weight_scale,
            coverage=0.0 if coverage is None else coverage, lists=lists,
            lists_per_key_head=lists // key_heads, Y=heads // lists, D=d, E=e,
            BD=block_size(d), BE=block_size(e), BM=block_size(heads // lists), BN=tile,
            PARTS=parts, ONE_LIST=indexed, OPERAND=tl.float32 if wide else tl.bfloat16, **shared,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        if parts > 1:
            add_parts_kernel[(batch * heads,)](
                sums, out, E=e, BE=block_size(e), PARTS=parts, num_warps=4
            )  # fmt: skip
    return out
