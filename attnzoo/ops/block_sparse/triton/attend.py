"""Triton kernels of block-sparse attention by query: the output, and the gradient of the queries.

One program computes rows that share a selection: the queries of a query block, and the query heads
that select together. It reads its keys in tiles of slots. A slot is an index into the concatenation
of the sinks, the window and the selected blocks, so a tile may contain the end of one part and the
start of the next, and a block may be smaller than a tile.

Other letters: M query blocks, K selected blocks, A heads with a selection of their own, Y = H / A,
Q queries of a query block, R = Q Y rows that share a selection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.runtime.triton_products import dot_add

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def row_lengths(lengths, counts, b, tokens, keys, RAGGED: tl.constexpr):
    """Return the number of real keys of a row, and the index of its first real query."""
    if RAGGED:
        length = tl.load(lengths + b).to(tl.int32)
        first_query = tokens - tl.load(counts + b).to(tl.int32)
    else:
        length, first_query = keys, 0 * keys
    return length, first_query


@triton.jit
def first_query_block(start, tokens, Q: tl.constexpr):
    """Return the index of the query block that contains position ``start``, at least ``-tokens``.

    Triton rounds quotients toward 0, so a multiple of Q makes the dividend non-negative.
    """
    return (start + tokens * Q) // Q - tokens


@triton.jit
def near_range(first, length, window, BLOCK: tl.constexpr, Q: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the begin and the end of the windows of query blocks that start at ``first``."""
    if CAUSAL:
        begin, end = first - window + 1, first + Q
    else:
        begin, end = first - window, first + Q + window
        end = (tl.maximum(end, 0) + BLOCK - 1) // BLOCK * BLOCK
    return tl.maximum(begin, 0) // BLOCK * BLOCK, tl.minimum(end, length)


@triton.jit
def slot_keys(slot, blocks, begin, near_keys, far_keys, num_sinks, length, BLOCK: tl.constexpr):
    """Return the positions of the keys in some slots, and whether they exist.

    ``blocks`` points to the selected blocks, of which ``far_keys`` keys are read. No key is
    returned twice: a key before ``num_sinks`` counts as a sink only, even if the window or a
    selected block contains it.
    """
    near = slot - num_sinks
    far = near - near_keys
    is_far = (far >= 0) & (far < far_keys)
    block = tl.load(blocks + far // BLOCK, mask=is_far, other=0)
    position = tl.where(near < 0, slot, begin + near)
    position = tl.where(far < 0, position, block * BLOCK + far % BLOCK)
    exists = (near < 0) | ((position >= num_sinks) & ((far < 0) | is_far))
    return position, exists & (position < length)


@triton.jit
def load_heads(x, row, token, head, x_head, x_token, column, mask, SIZE: tl.constexpr):
    """Load rows of ``[H, T, SIZE]`` at ``row``; heads and tokens are vectors or scalars."""
    offset = head.to(tl.int64) * x_head + token.to(tl.int64) * x_token
    return tl.load(
        x + row + offset[:, None] + column[None, :],
        mask=mask[:, None] & (column < SIZE)[None, :],
        other=0.0,
    )


# Forward: out of a row = softmax(scale q k^T) v over its slots, in one pass with a running maximum
#
# grid     (B * A * M * TILES): one program per tile of the R rows that share a selection
# reads    q [B, H, T, D], k [B, Hkv, S, D], v [B, Hkv, S, E], any strides and float dtypes;
#          selected [B, A, M, K] and the number of blocks in each list [B, A, M], int32
# writes   out [B, H, T, E]; lse [B, H, T], natural logarithm, float32; at padding, out is 0 and lse
#          infinity
# memory   reads the keys and values of each slot once per program
# limits   D, E <= 256; any R, in tiles of BM rows
# oracle   block_sparse_attention(impl="reference"), on a GPU and with TRITON_INTERPRET=1
#
# GRADIENT: dq = scale sum over slots of p (d_out v^T - delta) k, with p = exp(scale q k^T - lse)
@triton.jit(do_not_specialize=["tokens", "keys", "query_blocks", "kept", "window", "num_sinks"])
def attend_kernel(
    q, k, v, selected, blocks_of_list, lengths, counts, out, lse, d_out, delta,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    d_batch, d_head, d_token,
    tokens, keys, query_blocks, kept, window, num_sinks, scale,
    lists: tl.constexpr, lists_per_key_head: tl.constexpr, Y: tl.constexpr, Q: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, GRADIENT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of rows; see above."""
    index = tl.program_id(0)
    tile, which = index % TILES, (index // TILES).to(tl.int64)
    m, head = (which % query_blocks).to(tl.int32), which // query_blocks
    b, a = head // lists, head % lists
    length, first_query = row_lengths(lengths, counts, b, tokens, keys, RAGGED)
    start = length - tokens
    first = (first_query_block(start, tokens, Q) + m) * Q
    row = tile * BM + tl.arange(0, BM)
    position = first + row // Y
    token, heads = position - start, a * Y + row % Y
    written = (row < Q * Y) & (token >= 0) & (token < tokens)
    real = written & (token >= first_query)
    d_column, e_column = tl.arange(0, BD), tl.arange(0, BE)
    queries = load_heads(q, b * q_batch, token, heads, q_head, q_token, d_column, real, D)
    out_row = (b * lists * Y + heads) * tokens + token
    key_head = a // lists_per_key_head
    k += b * k_batch + key_head * k_head + (keys - length).to(tl.int64) * k_token
    v += b * v_batch + key_head * v_head + (keys - length).to(tl.int64) * v_token
    begin, end = near_range(first, length, window, BLOCK, Q, CAUSAL)
    near_keys = tl.maximum(end - begin, 0)
    far_keys = tl.load(blocks_of_list + which) * BLOCK
    blocks = selected + which * kept
    any_real = tl.max(real.to(tl.int32), 0)
    slots = (num_sinks + near_keys + far_keys) * any_real
    log_scale = scale * LOG2_E
    if GRADIENT:
        d_rows = load_heads(d_out, b * d_batch, token, heads, d_head, d_token, e_column, real, E)
        deltas = tl.load(delta + out_row, mask=real, other=0.0)
        logs = tl.load(lse + out_row, mask=real, other=float("inf")) * LOG2_E
        acc = tl.zeros((BM, BD), tl.float32)
    else:
        best = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, BE), tl.float32)
    for base in range(0, slots, BN):
        at, exists = slot_keys(
            base + tl.arange(0, BN), blocks, begin, near_keys, far_keys, num_sinks, length, BLOCK
        )
        offset = at.to(tl.int64)
        key_mask = exists[:, None] & (d_column < D)[None, :]
        value_mask = exists[:, None] & (e_column < E)[None, :]
        key = tl.load(k + offset[:, None] * k_token + d_column[None, :], key_mask, other=0.0)
        value = tl.load(v + offset[:, None] * v_token + e_column[None, :], value_mask, other=0.0)
        seen = real[:, None] & exists[None, :]
        if CAUSAL:
            seen = seen & (at[None, :] <= position[:, None])
        scores = tl.zeros((BM, BN), tl.float32)
        scores = dot_add(queries, tl.trans(key), scores, OPERAND, PRECISION, "") * log_scale
        scores = tl.where(seen, scores, float("-inf"))
        if GRADIENT:
            d_weights = tl.zeros((BM, BN), tl.float32)
            d_weights = dot_add(d_rows, tl.trans(value), d_weights, OPERAND, PRECISION, "")
            d_scores = tl.exp2(scores - logs[:, None]) * (d_weights - deltas[:, None])
            acc = dot_add(d_scores, key, acc, OPERAND, PRECISION, "left")
        else:
            new = tl.maximum(best, tl.max(scores, 1))
            finite = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - finite[:, None])
            decay = tl.exp2(best - finite)
            total = total * decay + tl.sum(weights, 1)
            acc = dot_add(weights, value, acc * decay[:, None], OPERAND, PRECISION, "left")
            best = new
    if GRADIENT:
        mask = written[:, None] & (d_column < D)[None, :]
        acc = (acc * scale).to(out.dtype.element_ty)
        tl.store(out + out_row[:, None] * D + d_column[None, :], acc, mask=mask)
    else:
        mask = written[:, None] & (e_column < E)[None, :]
        has_keys = total > 0
        divisor = tl.where(has_keys, total, 1.0)
        acc = (acc / divisor[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_row[:, None] * E + e_column[None, :], acc, mask=mask)
        logs = tl.where(has_keys, (best + tl.log2(divisor)) * LN_2, float("inf"))
        tl.store(lse + out_row, logs, mask=written)
