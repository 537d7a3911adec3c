"""Triton kernels of block-sparse attention by key: the gradients of keys and values.

Three kernels compute the contributions of three kinds of pairs: queries with the sinks, with the
blocks that they select, and with their windows. All queries may attend to one key, so each program
of the first two kernels sums a part of the queries and writes a partial sum; the third kernel adds
the partial sums in a fixed order. There are no atomic operations, so equal inputs give bitwise
equal results.

Other letters: N key blocks, M query blocks, A heads with a selection of their own, Y = H / A, Q
queries of a query block, R = Q Y rows that share a selection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.ops.block_sparse.triton.attend import (
    LOG2_E,
    first_query_block,
    load_heads,
    near_range,
    row_lengths,
)
from attnzoo.runtime.triton_products import dot_add


@triton.jit
def load_keys(x, at, exists, x_token, column, SIZE: tl.constexpr):
    """Load the keys or values at some positions, 0 where they do not exist."""
    offset = at.to(tl.int64)[:, None] * x_token + column[None, :]
    return tl.load(x + offset, mask=exists[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def add_rows(
    key, value, d_key, d_value, q, d_out, lse, delta, token, head, real, seen, number,
    q_row, q_head, q_token, d_row, d_head, d_token, tokens, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contributions of BM rows to the gradients of a tile of keys, without the scale.

    ``seen [BN, BM]`` is whether a row attends to a key, and ``number`` the index of the batch
    row's first element in ``lse`` and ``delta``.
    """
    d_column, e_column = tl.arange(0, BD), tl.arange(0, BE)
    query = load_heads(q, q_row, token, head, q_head, q_token, d_column, real, D)
    d_rows = load_heads(d_out, d_row, token, head, d_head, d_token, e_column, real, E)
    index = number + head.to(tl.int64) * tokens + token
    logs = tl.load(lse + index, mask=real, other=float("inf")) * LOG2_E
    deltas = tl.load(delta + index, mask=real, other=0.0)
    scores = tl.zeros(seen.shape, tl.float32)
    scores = dot_add(key, tl.trans(query), scores, OPERAND, PRECISION, "") * (scale * LOG2_E)
    weights = tl.where(seen, tl.exp2(scores - logs[None, :]), 0.0)
    d_weights = tl.zeros(seen.shape, tl.float32)
    d_weights = dot_add(value, tl.trans(d_rows), d_weights, OPERAND, PRECISION, "")
    d_scores = weights * (d_weights - deltas[None, :])
    d_value = dot_add(weights, d_rows, d_value, OPERAND, PRECISION, "left")
    d_key = dot_add(d_scores, query, d_key, OPERAND, PRECISION, "left")
    return d_key, d_value


# Sinks: gradients of the first tokens, to which all queries attend, from a part of the queries
#
# grid     (B * Hkv * SPLITS * TILES): one program per tile of sinks and part of the queries
# writes   d_key [B, Hkv, SPLITS, num_sinks, D], d_value, float32, without the scale
@triton.jit(do_not_specialize=["tokens", "keys", "num_sinks", "rows_per_split"])
def sink_gradient_kernel(
    q, k, v, d_out, lse, delta, lengths, counts, d_key, d_value,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    d_batch, d_head, d_token, tokens, keys, num_sinks, rows_per_split, scale,
    key_heads: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    TILES: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up one part of the queries; see above."""
    index = tl.program_id(0)
    tile, part = index % TILES, index // TILES
    split, bh = part % SPLITS, (part // SPLITS).to(tl.int64)
    b, h = bh // key_heads, bh % key_heads
    length, first_query = row_lengths(lengths, counts, b, tokens, keys, RAGGED)
    start = length - tokens
    at = tile * BN + tl.arange(0, BN)
    exists = (at < num_sinks) & (at < length)
    d_column, e_column = tl.arange(0, BD), tl.arange(0, BE)
    shift = (keys - length).to(tl.int64)
    key = load_keys(
        k + b * k_batch + h * k_head + shift * k_token, at, exists, k_token, d_column, D
    )
    value = load_keys(
        v + b * v_batch + h * v_head + shift * v_token, at, exists, v_token, e_column, E
    )
    d_keys, d_values = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BE), tl.float32)
    last = tl.minimum((split + 1) * rows_per_split, tokens * G)
    for base in range(split * rows_per_split, last, BM):
        row = base + tl.arange(0, BM)
        token, head = row // G, h * G + row % G
        real = (row < last) & (token >= first_query)
        seen = exists[:, None] & real[None, :]
        if CAUSAL:
            seen = seen & (at[:, None] <= (start + token)[None, :])
        d_keys, d_values = add_rows(
            key, value, d_keys, d_values, q, d_out, lse, delta, token, head, real, seen,
            b * key_heads * G * tokens, b * q_batch, q_head, q_token, b * d_batch, d_head, d_token,
            tokens, scale, D, E, BD, BE, OPERAND, PRECISION,
        )  # fmt: skip
    sink = (part.to(tl.int64) * num_sinks + at)[:, None]
    stored = (at < num_sinks)[:, None]
    tl.store(d_key + sink * D + d_column[None, :], d_keys, mask=stored & (d_column < D)[None, :])
    tl.store(
        d_value + sink * E + e_column[None, :], d_values, mask=stored & (e_column < E)[None, :]
    )


# Selected blocks: gradients of a block's keys from a part of the selections of the block
#
# grid     (items * TILES): one program per tile of a block's keys and part of its selections
# reads    item_block [items]: the block of each item, b Hkv N + h N + j; first_item and first_pair
#          [B * Hkv * N + 1], the first item and selection of each block; pairs, the index
#          (b A + a) M + m of each selection, sorted by block. Spare items have no selections.
# writes   d_key [items, BLOCK, D], d_value [items, BLOCK, E], float32, without the scale
@triton.jit(do_not_specialize=["tokens", "keys", "query_blocks", "num_blocks", "num_sinks"])
def selection_gradient_kernel(
    q, k, v, d_out, lse, delta, lengths, counts, item_block, first_item, first_pair, pairs, d_key,
    d_value,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    d_batch, d_head, d_token, tokens, keys, query_blocks, num_blocks, num_sinks, scale,
    key_heads: tl.constexpr, lists: tl.constexpr, Y: tl.constexpr, Q: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
    RAGGED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up one part of the selections of a block; see above."""
    tile, item = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    which = tl.load(item_block + item).to(tl.int64)
    bh = which // num_blocks
    b, h = bh // key_heads, bh % key_heads
    length, first_query = row_lengths(lengths, counts, b, tokens, keys, RAGGED)
    start = length - tokens
    first_block = first_query_block(start, tokens, Q)
    in_block = tile * BN + tl.arange(0, BN)
    at = ((which % num_blocks) * BLOCK + in_block).to(tl.int32)
    exists = (in_block < BLOCK) & (at >= num_sinks) & (at < length)
    d_column, e_column = tl.arange(0, BD), tl.arange(0, BE)
    shift = (keys - length).to(tl.int64)
    key = load_keys(
        k + b * k_batch + h * k_head + shift * k_token, at, exists, k_token, d_column, D
    )
    value = load_keys(
        v + b * v_batch + h * v_head + shift * v_token, at, exists, v_token, e_column, E
    )
    d_keys, d_values = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BE), tl.float32)
    begin = tl.load(first_pair + which) + (item - tl.load(first_item + which)) * PAIRS
    end = tl.minimum(begin + PAIRS, tl.load(first_pair + which + 1))
    for base in range(0, ((end - begin) * Q * Y).to(tl.int32), BM):
        row = base + tl.arange(0, BM)
        pair = begin + row // (Q * Y)
        listed = pair < end
        where = tl.load(pairs + pair, mask=listed, other=0)
        a = (where // query_blocks % lists).to(tl.int32)
        position = (first_block + (where % query_blocks).to(tl.int32)) * Q + row % (Q * Y) // Y
        token, head = position - start, a * Y + row % Y
        real = listed & (token >= first_query) & (token < tokens)
        seen = exists[:, None] & real[None, :]
        d_keys, d_values = add_rows(
            key, value, d_keys, d_values, q, d_out, lse, delta, token, head, real, seen,
            b * lists * Y * tokens, b * q_batch, q_head, q_token, b * d_batch, d_head, d_token,
            tokens, scale, D, E, BD, BE, OPERAND, PRECISION,
        )  # fmt: skip
    stored = (in_block < BLOCK)[:, None]
    place = (item * BLOCK + in_block)[:, None]
    tl.store(d_key + place * D + d_column[None, :], d_keys, mask=stored & (d_column < D)[None, :])
    tl.store(
        d_value + place * E + e_column[None, :], d_values, mask=stored & (e_column < E)[None, :]
    )


# Windows: dk = scale sum over queries of p (d_out v^T - delta) q, dv = sum of p d_out, over the
# queries whose window contains the key; then the sums of the other two kernels are added
#
# grid     (B * Hkv * TILES): one program per tile of keys
# writes   dk [B, Hkv, S, D], dv [B, Hkv, S, E]; 0 at padding
# oracle   block_sparse_attention(impl="reference") and autograd
@triton.jit(do_not_specialize=["tokens", "keys", "num_blocks", "window", "num_sinks", "splits"])
def window_gradient_kernel(
    q, k, v, d_out, lse, delta, lengths, counts, sink_key, sink_value, first_item, block_key,
    block_value, dk, dv,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    d_batch, d_head, d_token, tokens, keys, num_blocks, window, num_sinks, splits, scale,
    key_heads: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of keys; see above."""
    tiles = (keys + BN - 1) // BN
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // key_heads, bh % key_heads
    length, first_query = row_lengths(lengths, counts, b, tokens, keys, RAGGED)
    start = length - tokens
    low = tile * BN
    at = low + tl.arange(0, BN)
    exists = at < length
    d_column, e_column = tl.arange(0, BD), tl.arange(0, BE)
    shift = (keys - length).to(tl.int64)
    key = load_keys(
        k + b * k_batch + h * k_head + shift * k_token, at, exists, k_token, d_column, D
    )
    value = load_keys(
        v + b * v_batch + h * v_head + shift * v_token, at, exists, v_token, e_column, E
    )
    d_keys, d_values = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BE), tl.float32)
    reach = window + Q + BLOCK  # larger than the distance of a query from an end of its window
    earliest = low if CAUSAL else low - reach
    earliest = tl.maximum(earliest - start, first_query)
    latest = tl.minimum(tl.minimum(low + BN, length) + reach - start, tokens)
    base_block = first_query_block(start, tokens, Q)
    for base in range(earliest * G, latest * G, BM):
        row = base + tl.arange(0, BM)
        token, head = row // G, h * G + row % G
        real = token < latest
        position = start + token
        first = (base_block + (position - base_block * Q) // Q) * Q
        begin, end = near_range(first, length, window, BLOCK, Q, CAUSAL)
        seen = (at[:, None] >= begin[None, :]) & (at[:, None] < end[None, :])
        seen = seen & (exists & (at >= num_sinks))[:, None] & real[None, :]
        if CAUSAL:
            seen = seen & (at[:, None] <= position[None, :])
        d_keys, d_values = add_rows(
            key, value, d_keys, d_values, q, d_out, lse, delta, token, head, real, seen,
            b * key_heads * G * tokens, b * q_batch, q_head, q_token, b * d_batch, d_head, d_token,
            tokens, scale, D, E, BD, BE, OPERAND, PRECISION,
        )  # fmt: skip
    block = at // BLOCK
    known = exists & (block < num_blocks)
    of_block = first_item + bh * num_blocks + block
    item = tl.load(of_block, mask=known, other=0)
    count = tl.load(of_block + 1, mask=known, other=0) - item
    for i in range(tl.max(count, 0)):
        mask = i < count
        place = (item + i) * BLOCK + at % BLOCK
        d_keys += load_keys(block_key, place, mask, D, d_column, D)
        d_values += load_keys(block_value, place, mask, E, e_column, E)
    if low < num_sinks:
        mask = exists & (at < num_sinks)
        for split in range(splits):
            place = (bh * splits + split) * num_sinks + at
            d_keys += load_keys(sink_key, place, mask, D, d_column, D)
            d_values += load_keys(sink_value, place, mask, E, e_column, E)
    column = tl.where(exists, at + shift, at - length)  # padding comes first in a row
    place = (bh * keys + column)[:, None]
    stored = (at < keys)[:, None]
    d_keys = (d_keys * scale).to(dk.dtype.element_ty)
    tl.store(dk + place * D + d_column[None, :], d_keys, mask=stored & (d_column < D)[None, :])
    d_values = d_values.to(dv.dtype.element_ty)
    tl.store(dv + place * E + e_column[None, :], d_values, mask=stored & (e_column < E)[None, :])
