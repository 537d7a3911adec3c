"""Triton kernels that select key blocks: summaries of keys, pooled queries, scores and top K.

No score is written to memory. A program streams over the summaries of a key head and keeps the best
blocks of its rows, sorted, in registers.

Other letters: C keys of a block, M query blocks, N key blocks, K selected blocks, A heads with a
selection of their own, F = A / Hkv, Y = H / A, Q queries of a query block, Z numbers per summary
(D, or 2 D in two halves).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.ops.block_sparse.triton.attend import (
    LOG2_E,
    first_query_block,
    near_range,
    row_lengths,
)
from attnzoo.runtime.triton_products import dot_add

NONE: tl.constexpr = tl.constexpr(2**30)  # fills a list after its selected blocks
LEAST: tl.constexpr = tl.constexpr(-(2**63))  # below the rank of every block


# Summaries: mean, mean and variance, or largest and smallest of the keys of each block
#
# grid     (B * Hkv * tiles of BN blocks)
# reads    k [B, Hkv, S, D], any strides and float dtype; reads it twice for variances
# writes   summary [B, Hkv, N, Z], float32; 0 for blocks without keys
@triton.jit(do_not_specialize=["keys", "blocks"])
def summary_kernel(
    k, lengths, counts, summary, k_batch, k_head, k_token, tokens, keys, blocks,
    key_heads: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, SCORE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Summarize a tile of blocks; see above."""
    tiles = (blocks + BN - 1) // BN
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // key_heads, bh % key_heads
    length, _ = row_lengths(lengths, counts, b, tokens, keys, RAGGED)
    block, column = tile * BN + tl.arange(0, BN), tl.arange(0, BD)
    row = k + b * k_batch + h * k_head + (keys - length).to(tl.int64) * k_token
    inside = (block < blocks)[:, None] & (column < D)[None, :]
    place = (bh * blocks + block)[:, None] * (D if SCORE == "mean" else 2 * D) + column[None, :]
    first = tl.zeros((BN, BD), tl.float32)
    second = tl.zeros((BN, BD), tl.float32)
    if SCORE == "bounds":
        first -= float("inf")
        second += float("inf")
    for i in range(BLOCK):
        at = block * BLOCK + i
        mask = inside & (at < length)[:, None]
        rows = row + at.to(tl.int64)[:, None] * k_token + column[None, :]
        key = tl.load(rows, mask=mask, other=0.0).to(tl.float32)
        if SCORE == "bounds":
            first = tl.maximum(first, tl.where(mask, key, float("-inf")))
            second = tl.minimum(second, tl.where(mask, key, float("inf")))
        else:
            first += key
    count = tl.minimum(tl.maximum(length - block * BLOCK, 0), BLOCK)[:, None]
    if SCORE == "bounds":
        first = tl.where(count > 0, first, 0.0)
        second = tl.where(count > 0, second, 0.0)
    else:
        divisor = tl.maximum(count, 1).to(tl.float32)
        first = first / divisor
        if SCORE == "moments":
            for i in range(BLOCK):
                at = block * BLOCK + i
                mask = inside & (at < length)[:, None]
                rows = row + at.to(tl.int64)[:, None] * k_token + column[None, :]
                key = tl.load(rows, mask=mask, other=0.0).to(tl.float32)
                difference = tl.where(mask, key - first, 0.0)
                second += difference * difference
            second = second / divisor
    tl.store(summary + place, first, mask=inside)
    if SCORE != "mean":
        tl.store(summary + place + D, second, mask=inside)


# Pooled queries: the query that represents a query block, as a mean over the heads that select
# together; in a causal layer the block's first query, otherwise the mean of its real queries
#
# grid     (B * A * tiles of BM query blocks)
# writes   pooled [B, A, M, D], float32
@triton.jit(do_not_specialize=["tokens", "keys", "query_blocks"])
def pool_kernel(
    q, leader, lengths, counts, pooled, q_batch, q_head, q_token, tokens, keys, query_blocks,
    lists: tl.constexpr, Y: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, CAUSAL: tl.constexpr, LEADER: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Pool the queries of a tile of query blocks; see above."""
    tiles = (query_blocks + BM - 1) // BM
    tile, which = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, a = which // lists, which % lists
    length, first_query = row_lengths(lengths, counts, b, tokens, keys, RAGGED)
    start = length - tokens
    m, column = tile * BM + tl.arange(0, BM), tl.arange(0, BD)
    index = (first_query_block(start, tokens, Q) + m) * Q - start  # of the first query
    written = (m < query_blocks)[:, None] & (column < D)[None, :]
    total = tl.zeros((BM, BD), tl.float32)
    for y in range(Y):
        head = a * Y + y
        row = q + b * q_batch + head * q_head + column[None, :]
        if CAUSAL:
            at = tl.minimum(tl.maximum(index, 0), tokens - 1).to(tl.int64)
            query = tl.load(row + at[:, None] * q_token, mask=written, other=0.0).to(tl.float32)
            if LEADER:
                of_head = leader + (b * lists * Y + head) * D + column
                earlier = tl.load(of_head, mask=column < D, other=0.0).to(tl.float32)
                query = tl.where((index < first_query)[:, None], earlier[None, :], query)
            total += query
        else:
            queries = tl.zeros((BM, BD), tl.float32)
            count = tl.zeros((BM,), tl.float32)
            for i in range(Q):
                at = index + i
                real = (at >= first_query) & (at >= 0) & (at < tokens)
                rows = row + at.to(tl.int64)[:, None] * q_token
                queries += tl.load(rows, mask=written & real[:, None], other=0.0).to(tl.float32)
                count += real.to(tl.float32)
            total += queries / tl.maximum(count, 1.0)[:, None]
    place = (which * query_blocks + m)[:, None] * D + column[None, :]
    tl.store(pooled + place, total / Y, mask=written)


@triton.jit
def block_ranks(scores, block, is_candidate):
    """Return integers that order blocks by score.

    Of two blocks with equal scores, the earlier one has the larger integer.
    """
    scores = tl.where(scores == 0, 0.0, scores)  # -0 equals 0
    bits = scores.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = (bits.to(tl.int64) << 32) | (-block + NONE).to(tl.int64)
    return tl.where(is_candidate, rank, LEAST)


@triton.jit
def rank_scores(rank):
    """Return the scores from which ranks were computed."""
    bits = (rank >> 32).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rank_blocks(rank):
    """Return the blocks of ranks, int32; ``NONE`` for the rank ``LEAST``."""
    return (-(rank & 0xFFFFFFFF) + NONE).to(tl.int32)


@triton.jit
def merge_ranks(best, rank, KP: tl.constexpr):
    """Return the KP largest of the ascending ``best [BM, KP]`` and of ``rank [BM, BN]``, ascending.

    The elementwise maximum of an ascending and a descending list is bitonic.
    """
    return tl.bitonic_merge(tl.maximum(best, tl.topk(rank, KP)))


@triton.jit
def load_summaries(x, block, mask, column, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load ``SIZE`` numbers of some summaries, each ``WIDTH`` long."""
    offset = block.to(tl.int64)[:, None] * WIDTH + column[None, :]
    return tl.load(x + offset, mask=mask[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def second_queries(query, scale, SCORE: tl.constexpr):
    """Return the factors of the first and the second half of a summary; see ``query_features``."""
    other = query
    if SCORE == "moments":
        scaled = query * scale
        other = scaled * scaled * (0.5 / scale)
    if SCORE == "bounds":
        other = tl.minimum(query, 0.0)
        query = tl.maximum(query, 0.0)
    return query, other


@triton.jit
def score_tile(
    query, other, rows, written, q_head, summary, block, exists, column,
    HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SCORE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores ``[BM, BN]`` of blocks; with an indexer, ``rows`` points to its queries."""
    width: tl.constexpr = D if SCORE == "mean" or SCORE == "indexer" else 2 * D
    scores = tl.zeros((BM, BN), tl.float32)
    part = tl.trans(load_summaries(summary, block, exists, column, D, width))
    if SCORE == "indexer":
        for i in range(HEADS):
            at = rows[:, None] + i * q_head
            own_mask = written[:, None] & (column < D)[None, :]
            own = tl.load(at + column[None, :], mask=own_mask, other=0.0).to(tl.float32)
            weight = tl.load(at + D, mask=written[:, None], other=0.0).to(tl.float32)
            products = tl.zeros((BM, BN), tl.float32)
            products = dot_add(own, part, products, tl.float32, PRECISION, "")
            scores += weight * tl.maximum(products, 0.0)
    else:
        scores = dot_add(query, part, scores, tl.float32, PRECISION, "")
    if width > D:
        part = tl.trans(load_summaries(summary + D, block, exists, column, D, width))
        scores = dot_add(other, part, scores, tl.float32, PRECISION, "")
    return scores


@triton.jit
def add_weights(scores, is_candidate, largest, total, scale):
    """Add weights to the sum of each row, relative to the largest; logarithms are to base 2."""
    logs = tl.where(is_candidate, scores * (scale * LOG2_E), float("-inf"))
    new = tl.maximum(largest, tl.max(logs, 1))
    finite = tl.where(new == float("-inf"), 0.0, new)
    total = total * tl.exp2(largest - finite) + tl.sum(tl.exp2(logs - finite[:, None]), 1)
    return new, total


@triton.jit
def rank_weights(rank, largest, total, scale):
    """Return the share of each ranked block in the total weight; 0 for the rank ``LEAST``."""
    logs = largest + tl.log2(tl.where(total > 0, total, 1.0))
    logs = rank_scores(rank) * (scale * LOG2_E) - logs[:, None]
    return tl.where(rank > LEAST, tl.exp2(logs), 0.0)


# Selection: the K best blocks of each row, or with COVERAGE the fewest of them that cover a share
# of the weight
#
# grid     (B * Hkv * tiles of BM rows): a row is a query block of one of the F heads of a key head
# reads    q [B, A, M, D], any strides and float dtype; of an indexer [B, HEADS, M, D + 1],
#          with the weights of its heads; summary [B, Hkv, N, Z], float32
# writes   selected [B, A, M, K], int32, sorted; NONE after the last block
# memory   reads the summaries of the candidates once per program
# limits   D <= 256, K <= KP <= BN
# oracle   select_blocks, on a GPU and with TRITON_INTERPRET=1
@triton.jit(
    do_not_specialize=["tokens", "keys", "query_blocks", "blocks", "kept", "window", "num_sinks"]
)
def select_kernel(
    q, summary, lengths, counts, selected, q_batch, q_head, q_token,
    tokens, keys, query_blocks, blocks, kept, window, num_sinks, scale, coverage,
    key_heads: tl.constexpr, F: tl.constexpr, HEADS: tl.constexpr, Q: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KP: tl.constexpr, SCORE: tl.constexpr, COVERAGE: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Select the blocks of one tile of rows; see above."""
    tiles = (query_blocks * F + BM - 1) // BM
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // key_heads, bh % key_heads
    length, _ = row_lengths(lengths, counts, b, tokens, keys, RAGGED)
    row = tile * BM + tl.arange(0, BM)
    m, head = row // F, h * F + row % F
    written = m < query_blocks
    first = (first_query_block(length - tokens, tokens, Q) + m) * Q
    begin, end = near_range(first, length, window, BLOCK, Q, CAUSAL)
    begin, least = begin // BLOCK, num_sinks // BLOCK
    if CAUSAL:
        late, stop = blocks, tl.max(tl.where(written, begin, 0), 0)
    else:
        late, stop = (end + BLOCK - 1) // BLOCK, (length + BLOCK - 1) // BLOCK
    stop = tl.minimum(stop, blocks)
    column = tl.arange(0, BD)
    width: tl.constexpr = D if SCORE == "mean" or SCORE == "indexer" else 2 * D
    row_mask = written[:, None] & (column < D)[None, :]
    rows = q + b * q_batch + head.to(tl.int64) * q_head + m.to(tl.int64) * q_token
    if SCORE != "indexer":
        query = tl.load(rows[:, None] + column[None, :], mask=row_mask, other=0.0).to(tl.float32)
        query, other = second_queries(query, scale, SCORE)
    else:
        query, other = rows, rows  # unused
    of_head = summary + bh * blocks * width
    best = tl.full((BM, KP), LEAST, tl.int64)
    if COVERAGE:
        largest, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    for base in range(least, stop, BN):
        block = base + tl.arange(0, BN)
        exists = block < stop
        scores = score_tile(
            query, other, rows, written, q_head, of_head, block, exists, column,
            HEADS, D, BM, BN, SCORE, PRECISION,
        )  # fmt: skip
        if CAUSAL:
            is_candidate = block[None, :] < begin[:, None]
        else:
            is_candidate = (block[None, :] < begin[:, None]) | (block[None, :] >= late[:, None])
            is_candidate = is_candidate & exists[None, :]
        rank = block_ranks(scores, block[None, :], is_candidate)
        if COVERAGE:
            largest, total = add_weights(scores, is_candidate, largest, total, scale)
        better = rank > tl.min(best, 1)[:, None]
        if tl.max(tl.max(better.to(tl.int32), 1), 0) > 0:
            best = merge_ranks(best, rank, KP)
    taken = tl.arange(0, KP)[None, :] >= KP - kept
    if COVERAGE:
        weights = rank_weights(best, largest, total, scale)
        taken = taken & (tl.cumsum(weights, 1, reverse=True) - weights < coverage)
    found = tl.sort(tl.where(taken, rank_blocks(best), NONE))
    place = ((b * key_heads * F + head) * query_blocks + m)[:, None] * kept
    slot = tl.arange(0, KP)[None, :]
    tl.store(selected + place + slot, found, mask=written[:, None] & (slot < kept))
