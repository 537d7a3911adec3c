"""One decoded token in Triton: score the summaries, attend in parts, add the parts.

At most three launches. Other letters: N key blocks, K selected blocks, A heads with a selection of
their own, F = A / Hkv, Y = H / A, O old keys, R recent keys, C keys of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.ops.block_sparse.triton.attend import LOG2_E, load_heads, near_range
from attnzoo.ops.block_sparse.triton.launch import KernelOptions
from attnzoo.ops.block_sparse.triton.selection import (
    LEAST,
    NONE,
    add_weights,
    block_ranks,
    merge_ranks,
    rank_blocks,
    rank_weights,
    score_tile,
    second_queries,
)
from attnzoo.ops.block_sparse.triton.selection_launch import TILE_BLOCKS
from attnzoo.runtime.triton_products import (
    block_size,
    contiguous_rows,
    device_context,
    dot_add,
    operand_precision,
)

SPLIT_BLOCKS = 512  # blocks that one program scores; more where MOST_RANKS limits the splits
MOST_RANKS = 2048  # ranks of all splits of a list, which each attending program sorts
PART_SLOTS = 128  # keys that one program attends to
TILE_SLOTS = {64: 64, 128: 64, 256: 32}  # per tile, by head size; half if operands are float32


# Ranks: the best blocks of a part, and the sum of the weights of all blocks of the part
#
# grid     (B * Hkv * SPLITS): one program per part of the blocks of a key head
# reads    q [B, H, 1, D] or of an indexer [B, HEADS, 1, D + 1]; leader, contiguous, [B, H, D] or
#          [B, HEADS, D + 1], which replaces q after the first token of a query block;
#          summary [B, Hkv, N, Z], float32
# writes   ranks [B, A, SPLITS, KP], int64; sums [B, A, SPLITS, 2], the largest logarithm to base 2
#          and the sum relative to it, with COVERAGE
@triton.jit(do_not_specialize=["blocks", "blocks_per_split", "window", "num_sinks"])
def rank_kernel(
    q, leader, summary, lengths, ranks, sums, q_batch, q_head, blocks, blocks_per_split, window,
    num_sinks, scale,
    key_heads: tl.constexpr, F: tl.constexpr, Y: tl.constexpr, HEADS: tl.constexpr,
    Q: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, KP: tl.constexpr, SPLITS: tl.constexpr, SCORE: tl.constexpr,
    COVERAGE: tl.constexpr, LEADER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rank the blocks of one part; see above."""
    split, bh = tl.program_id(0) % SPLITS, (tl.program_id(0) // SPLITS).to(tl.int64)
    b, h = bh // key_heads, bh % key_heads
    length = tl.load(lengths + b).to(tl.int32)
    first = (length - 1) // Q * Q
    begin, _ = near_range(first, length, window, BLOCK, Q, True)
    row, column = tl.arange(0, BM), tl.arange(0, BD)
    written = row < F
    heads: tl.constexpr = HEADS if SCORE == "indexer" else key_heads * F * Y
    size: tl.constexpr = D + 1 if SCORE == "indexer" else D
    source, source_head = q + b * q_batch, q_head
    if LEADER:  # noqa: SIM102 (a constant)
        if first < length - 1:
            source, source_head = leader + b * heads * size, size
    rows = source + row.to(tl.int64) * 0
    query = tl.zeros((BM, BD), tl.float32)
    if SCORE != "indexer":
        mask = written[:, None] & (column < D)[None, :]
        for y in range(Y):
            head = ((h * F + row) * Y + y) * source_head
            query += tl.load(source + head[:, None] + column[None, :], mask=mask, other=0.0)
        query, other = second_queries(query / Y, scale, SCORE)
    else:
        other = query
    width: tl.constexpr = D if SCORE == "mean" or SCORE == "indexer" else 2 * D
    least, low = num_sinks // BLOCK, split * blocks_per_split
    stop = tl.minimum(tl.minimum(begin // BLOCK, blocks), low + blocks_per_split)
    best = tl.full((BM, KP), LEAST, tl.int64)
    largest, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    for base in range(tl.maximum(least, low), stop, BN):
        block = base + tl.arange(0, BN)
        exists = block < stop
        scores = score_tile(
            query, other, rows, written, source_head, summary + bh * blocks * width, block,
            exists, column, HEADS, D, BM, BN, SCORE, PRECISION,
        )  # fmt: skip
        is_candidate = exists[None, :] & written[:, None]
        if COVERAGE:
            largest, total = add_weights(scores, is_candidate, largest, total, scale)
        rank = block_ranks(scores, block[None, :], is_candidate)
        better = rank > tl.min(best, 1)[:, None]
        if tl.max(tl.max(better.to(tl.int32), 1), 0) > 0:
            best = merge_ranks(best, rank, KP)
    place = (bh * F + row) * SPLITS + split
    tl.store(ranks + place[:, None] * KP + tl.arange(0, KP)[None, :], best, mask=written[:, None])
    if COVERAGE:
        tl.store(sums + place * 2, largest, mask=written)
        tl.store(sums + place * 2 + 1, total, mask=written)


@triton.jit
def selected_blocks(
    ranks, sums, which, kept, coverage, scale,
    KP: tl.constexpr, SPLITS: tl.constexpr, COVERAGE: tl.constexpr,
):  # fmt: skip
    """Return the selected blocks ``[KP]`` of a list from the ranks of its parts, then ``NONE``."""
    at = tl.arange(0, SPLITS * KP)[None, :]
    best = tl.topk(tl.load(ranks + which * SPLITS * KP + at), KP)  # descending
    taken = tl.arange(0, KP)[None, :] < kept
    if COVERAGE:
        part = (which * SPLITS + tl.arange(0, SPLITS)) * 2
        largest, totals = tl.load(sums + part)[None, :], tl.load(sums + part + 1)[None, :]
        top = tl.max(largest, 1)
        finite = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(totals * tl.exp2(largest - finite[:, None]), 1)
        weights = rank_weights(best, top, total, scale)
        taken = taken & (tl.cumsum(weights, 1) - weights < coverage)
    return tl.reshape(tl.where(taken, rank_blocks(best), NONE), (KP,))


# Attention of one token to a part of its slots: the first tokens, the window, the selected blocks
#
# grid     (B * A * PARTS): one program per part of the slots of the rows that share a selection
# reads    q [B, H, 1, D]; old and recent keys and values, [B, Hkv, O or R, D or E], any strides
# writes   sums [B, H, PARTS, E + 2], float32: of weights times values, the largest score to base 2,
#          and the sum of weights; or out [B, H, E], if there is one part
# memory   reads the keys and values of each slot once
@triton.jit(do_not_specialize=["old", "recent", "kept", "window", "num_sinks", "slots_per_part"])
def attend_step_kernel(
    q, old_k, old_v, recent_k, recent_v, lengths, ranks, weight_sums, sums, out,
    q_batch, q_head, old_k_batch, old_k_head, old_k_token, old_v_batch, old_v_head, old_v_token,
    recent_k_batch, recent_k_head, recent_k_token, recent_v_batch, recent_v_head, recent_v_token,
    old, recent, kept, window, num_sinks, slots_per_part, scale, weight_scale, coverage,
    lists: tl.constexpr, lists_per_key_head: tl.constexpr, Y: tl.constexpr, Q: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, KP: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, ONE_LIST: tl.constexpr, COVERAGE: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the slots; see above."""
    part, which = tl.program_id(0) % PARTS, (tl.program_id(0) // PARTS).to(tl.int64)
    b, a = which // lists, which % lists
    length = tl.load(lengths + b).to(tl.int32)
    begin, end = near_range((length - 1) // Q * Q, length, window, BLOCK, Q, True)
    of_list = b if ONE_LIST else which
    blocks = selected_blocks(ranks, weight_sums, of_list, kept, coverage, weight_scale,
                             KP, SPLITS, COVERAGE)  # fmt: skip
    row = tl.arange(0, BM)
    heads, real = a * Y + row, row < Y
    d_column, e_column = tl.arange(0, BD), tl.arange(0, BE)
    queries = load_heads(q, b * q_batch, 0 * row, heads, q_head, 0, d_column, real, D)
    h = a // lists_per_key_head
    old_k += b * old_k_batch + h * old_k_head
    old_v += b * old_v_batch + h * old_v_head
    recent_k += b * recent_k_batch + h * recent_k_head
    recent_v += b * recent_v_batch + h * recent_v_head
    near_keys = tl.maximum(end - begin, 0)
    slots = num_sinks + near_keys + kept * BLOCK
    best = tl.full((BM,), float("-inf"), tl.float32)
    total, acc = tl.zeros((BM,), tl.float32), tl.zeros((BM, BE), tl.float32)
    index = tl.arange(0, KP)
    low = part * slots_per_part
    for base in range(low, tl.minimum(low + slots_per_part, slots), BN):
        slot = base + tl.arange(0, BN)
        near, far = slot - num_sinks, slot - num_sinks - near_keys
        is_far = (far >= 0) & (slot < slots)
        found = (far // BLOCK)[:, None] == index[None, :]
        block = tl.sum(tl.where(found, blocks[None, :], 0), 1)
        is_far = is_far & (block != NONE)
        position = tl.where(near < 0, slot, begin + near)
        position = tl.where(far < 0, position, block * BLOCK + far % BLOCK)
        exists = (near < 0) | ((position >= num_sinks) & ((far < 0) | is_far))
        exists = exists & (position < length)
        at = (position + (old + recent - length)).to(tl.int64)
        is_old = exists & (at < old)
        is_recent = exists & (at >= old)
        at_recent = at - old
        d_mask, e_mask = (d_column < D)[None, :], (e_column < E)[None, :]
        key = tl.load(old_k + at[:, None] * old_k_token + d_column[None, :],
                      mask=is_old[:, None] & d_mask, other=0.0)  # fmt: skip
        key += tl.load(recent_k + at_recent[:, None] * recent_k_token + d_column[None, :],
                       mask=is_recent[:, None] & d_mask, other=0.0)  # fmt: skip
        value = tl.load(old_v + at[:, None] * old_v_token + e_column[None, :],
                        mask=is_old[:, None] & e_mask, other=0.0)  # fmt: skip
        value += tl.load(recent_v + at_recent[:, None] * recent_v_token + e_column[None, :],
                         mask=is_recent[:, None] & e_mask, other=0.0)  # fmt: skip
        scores = tl.zeros((BM, BN), tl.float32)
        scores = dot_add(queries, tl.trans(key), scores, OPERAND, PRECISION, "") * (scale * LOG2_E)
        scores = tl.where(exists[None, :], scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - finite[:, None])
        decay = tl.exp2(best - finite)
        total = total * decay + tl.sum(weights, 1)
        acc = dot_add(weights, value, acc * decay[:, None], OPERAND, PRECISION, "left")
        best = new
    mask = real[:, None] & (e_column < E)[None, :]
    of_head = b * lists * Y + heads
    if PARTS == 1:
        acc = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + of_head[:, None] * E + e_column[None, :], acc, mask=mask)
    else:
        place = (of_head * PARTS + part) * (E + 2)
        tl.store(sums + place[:, None] + e_column[None, :], acc, mask=mask)
        tl.store(sums + place + E, best, mask=real)
        tl.store(sums + place + E + 1, total, mask=real)


# Sum of the parts: out = sum of sums exp2(best - largest) / sum of totals exp2(best - largest)
#
# grid     (B * H)
# reads    sums [B, H, PARTS, E + 2]
# writes   out [B, H, E]
@triton.jit
def add_parts_kernel(sums, out, E: tl.constexpr, BE: tl.constexpr, PARTS: tl.constexpr):
    """Add the parts of one head; see above."""
    head = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, PARTS), tl.arange(0, BE)
    place = (head * PARTS + part) * (E + 2)
    best, total = tl.load(sums + place + E), tl.load(sums + place + E + 1)
    mask = (column < E)[None, :]
    rows = tl.load(sums + place[:, None] + column[None, :], mask=mask, other=0.0)
    factor = tl.exp2(best - tl.max(best, 0))  # one is finite, because the token attends to itself
    acc = tl.sum(rows * factor[:, None], 0) / tl.sum(total * factor, 0)
    tl.store(out + head * E + column, acc.to(out.dtype.element_ty), mask=column < E)


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
