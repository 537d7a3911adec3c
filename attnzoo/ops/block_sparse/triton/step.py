"""Triton kernels of one decoded token: score the summaries, attend in parts, add the parts.

Letters: B batch, H query heads, Hkv key heads, N key blocks, K selected blocks, A heads with a
selection of their own, F = A / Hkv, Y = H / A, D key size, E value size, C keys of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.ops.block_sparse.triton.attend import LOG2_E, load_heads, near_range
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
from attnzoo.runtime.triton_products import dot_add


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
