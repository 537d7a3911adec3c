"""Triton kernel of the output of causal linear attention, by a scan over chunks.

With tokens i and j of one chunk, decay weights w and a state S in registers:

    out_i = sum over j <= i of w_ij (q_i k_j) v_j + w_i q_i S
    S     = decay S + sum of w_j k_j v_j^T

q and k are features. Only inputs and results are in global memory. Queries
and keys have all their columns; values, S and the output are divided into tiles of columns, one per
program, because a state must fit into registers.

No product of two tiles is transposed to be an operand of a third one, because some compilers for
Hopper compile that wrongly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.ops.linear.triton.configs import autotuned
from attnzoo.ops.linear.triton.decay import (
    pair_decay,
    scalar_decay,
    vector_decay,
    window_length,
)
from attnzoo.ops.linear.triton.parts import (
    load_rows,
    mask_if,
    materialize,
    matrix_vector,
    store_rows,
    store_tile,
    weighted_column_sums,
)
from attnzoo.ops.linear.triton.rows import (
    as_int64,
    load_key_features,
    load_query_features,
    load_state,
    locate_program,
)
from attnzoo.runtime.triton_products import dot_add

WINDOW: tl.constexpr = tl.constexpr(16)  # tokens of a window, for strong decays per channel
CHUNKS_PER_RUN: tl.constexpr = tl.constexpr(8)  # chunks between two checks for strong decays


@triton.jit
def out_chunk(
    state, z, run, start, end, inputs, outputs, strides, place, columns, numbers,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, o_token: tl.constexpr,
    gate_token: tl.constexpr, D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    STATISTICS: tl.constexpr, MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Process tokens ``start`` to ``end``, at most C, and return the state after them, and run.

    CHECK: nothing is written and the state does not change if ``run`` is 0, or if the decay is too
    strong for one chunk; then 0 is returned as ``run``.
    """
    q, k, v, d_out, log_decay = inputs
    result, inv_denom, row_maxima = outputs
    q_head, o_head = strides
    tokens, heads, num_rows, tile = place
    x_column, u_column = columns
    scale, map_scale, eps = numbers
    EXACT_STATE: tl.constexpr = "right" if STATISTICS else ""
    EXACT_SCORES: tl.constexpr = "left" if STATISTICS else ""
    EXACT_KEY_SUM: tl.constexpr = "right" if DECAY == "scalar" else ""
    base = start.to(tl.int64)
    token = tl.arange(0, C)
    in_bounds = token < end - start
    store_mask = in_bounds  # rows to write
    mask = token[:, None] >= token[None, :]
    k_weights = tl.full((C,), 1.0, tl.float32)  # of each row in the state
    if DECAY == "vector":
        q_decay, k_decay, to_anchor, from_anchor, run = vector_decay(
            log_decay + base * gate_token, gate_token, token, x_column, end - start,
            run, D, OPERAND, PRECISION, CHECK, True, False,
        )  # fmt: skip
        if CHECK:
            store_mask = mask_if(store_mask, run > 0)
        state *= to_anchor[:, None]
        z *= to_anchor
    if DECAY == "scalar":
        high, low, q_weights, k_weights, state_weight = scalar_decay(
            log_decay + base * gate_token, gate_token, token, end - start
        )
    k_raw, keys = load_key_features(
        k + base * k_token, token, k_token, x_column, in_bounds, map_scale, MAP, D, OPERAND
    )
    values = load_rows(v + base * v_token, token, v_token, u_column, in_bounds, E).to(OPERAND)
    if DECAY == "vector":
        keys = materialize((keys * k_decay).to(OPERAND))
    if DECAY == "scalar":
        decay = pair_decay(high, low, mask, False, OPERAND)
    for g in range(G):
        offset = g * tokens + base
        q_raw, queries, row_max, ties = load_query_features(
            q + g * q_head + base * q_token, row_maxima + offset, token, q_token, x_column,
            in_bounds, map_scale, MAP, True, D, OPERAND,
        )  # fmt: skip
        if DECAY == "vector":
            queries = materialize((queries * q_decay).to(OPERAND))
        acc = tl.zeros((C, values.shape[1]), tl.float32)
        acc = dot_add(queries, state, acc, OPERAND, PRECISION, EXACT_STATE)
        if DECAY == "scalar":
            acc *= q_weights[:, None]
        scores = tl.zeros((C, C), tl.float32)
        scores = dot_add(queries, tl.trans(keys), scores, OPERAND, PRECISION, "")
        if DECAY == "scalar":
            scores *= decay
        else:
            scores = tl.where(mask, scores, 0.0)
        acc = dot_add(scores, values, acc, OPERAND, PRECISION, EXACT_SCORES)
        if NORMALIZE:
            from_state = matrix_vector(queries, z, OPERAND, PRECISION)
            if DECAY == "scalar":
                from_state *= q_weights
            reciprocal = 1 / (tl.sum(scores, 1) + from_state + eps)
            acc *= reciprocal[:, None]
        else:
            acc *= scale
        if STATISTICS:
            rows = d_out + g * o_head + base * o_token
            d_rows = load_rows(rows, token, o_token, u_column, in_bounds, E).to(tl.float32)
            if NORMALIZE:
                d_rows = (d_rows * reciprocal[:, None]).to(OPERAND).to(tl.float32)
                tl.store(inv_denom + offset + token, reciprocal, mask=store_mask)
            if MAP == "exp":
                tl.store(row_maxima + offset + token, row_max, mask=store_mask)
                tl.store(row_maxima + num_rows + offset + token, ties, mask=store_mask)
            if tl.float32 == OPERAND:  # the gradient of z is a sum of deltas that may cancel
                delta = tl.sum(acc.to(tl.float64) * d_rows.to(tl.float64), 1)
            else:
                delta = tl.sum(acc * d_rows, 1)
            tl.store(result + tile * num_rows + offset + token, delta, mask=store_mask)
        else:
            rows = result + g * E + base * heads * E
            store_rows(rows, acc, token, heads * E, u_column, store_mask, E)

    if DECAY == "scalar":
        state *= state_weight
        z *= state_weight
        values = values.to(tl.float32) * k_weights[:, None]
    state = dot_add(tl.trans(keys), values, state, OPERAND, PRECISION, "")
    if NORMALIZE or tile == 0:
        weights = tl.where(in_bounds, k_weights, 0.0)
        z += weighted_column_sums(keys, weights, OPERAND, PRECISION, EXACT_KEY_SUM)
    if DECAY == "vector":
        state *= from_anchor[:, None]
        z *= from_anchor
    return state, z, run


# Output: see above.                                    (arXiv:2006.16236, 2307.08621, 2312.06635)
#
# grid     (B * Hkv * S * tiles): one program processes one sequence of one key head and one tile
#          of values; tiles of a sequence have consecutive indices, so that the cache serves q and k
# reads    q [B, H, T, D], k [B, Hkv, T, D], v [B, Hkv, T, E], any strides and float dtypes; the
#          state before each sequence (HAS_STATE; else zeros), [S, Hkv, D, E] and [S, Hkv, D],
#          float32
# writes   result [B, T, H, E]; RETURN_STATE: kv_last, z_last, the state after each sequence;
#          STATISTICS, for the backward pass, instead: result, delta per tile, [tiles, B, H, T],
#          where delta_i = sum(do_i * out_i) / denominator_i as in FlashAttention (denominator 1
#          unless NORMALIZE); inv_denom [B, H, T]; for MAP "exp" row_maxima [2, B, H, T]: largest
#          exponents, and how many entries equal them
# scale    multiplies results unless NORMALIZE, which divides by q z + eps
# memory   reads and writes each tensor once
# limits   D, E <= 256; C a power of two
# oracle   linear_attention(impl="reference") and autograd, on a GPU and with TRITON_INTERPRET=1
@autotuned("STATISTICS")
@triton.jit(do_not_specialize=["tokens", "num_sequences"])
def out_kernel(
    q, k, v, d_out, result, log_decay, starts, lengths,
    kv_given, z_given, kv_last, z_last, inv_denom, row_maxima,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, o_batch, o_head, gate_batch, gate_head,
    tokens, num_sequences, scale, map_scale, eps,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, o_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BU: tl.constexpr, TILES: tl.constexpr, STATISTICS: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, VARLEN: tl.constexpr,
    HAS_STATE: tl.constexpr, RETURN_STATE: tl.constexpr,
):  # fmt: skip
    """Process one sequence; see above."""
    tile, bh, sequence, begin, stop = locate_program(
        starts, lengths, tokens, num_sequences, key_heads, TILES, VARLEN
    )
    num_key_heads = tl.num_programs(0).to(tl.int64) // (TILES * num_sequences)  # B * Hkv
    b, h = bh // key_heads, bh % key_heads
    heads = key_heads * G
    first_row = (b * heads + h * G) * tokens
    num_rows = num_key_heads * G * tokens
    result += first_row if STATISTICS else (b * tokens * heads + h * G) * E
    inputs = (
        q + b * q_batch + h * G * q_head, k + b * k_batch + h * k_head,
        v + b * v_batch + h * v_head, d_out + b * o_batch + h * G * o_head,
        log_decay + b * gate_batch + h * gate_head,
    )  # fmt: skip
    outputs = (result, inv_denom + first_row, row_maxima + first_row)
    strides, place = (as_int64(q_head), as_int64(o_head)), (tokens, heads, num_rows, tile)
    x_column, u_column = tl.arange(0, BX), tile * BU + tl.arange(0, BU)
    columns, numbers = (x_column, u_column), (scale, map_scale, eps)
    offsets = x_column[:, None] * E + u_column[None, :]
    of_sequence = sequence * key_heads + h
    state, z = load_state(
        kv_given, z_given, of_sequence, offsets, x_column, u_column, x_column, D, E, D, E, HAS_STATE
    )
    if DECAY == "vector":
        position = begin
        while position < stop:
            chunks = tl.minimum((stop - position + C - 1) // C, CHUNKS_PER_RUN)
            run, whole = tl.full((), 1, tl.int32), tl.full((), 0, tl.int32)
            for i in range(chunks):
                state, z, run = out_chunk(
                    state, z, run, position + i * C, stop, inputs, outputs, strides, place,
                    columns, numbers, q_token, k_token, v_token, o_token, gate_token, D, E, G, C,
                    STATISTICS, MAP, DECAY, NORMALIZE, OPERAND, PRECISION,
                    True,
                )  # fmt: skip
                whole += run
            position = tl.minimum(position + whole * C, stop)
            windows_end = position
            if run == 0:
                windows_end = tl.minimum(position + C, stop)
            while position < windows_end:
                end = tl.minimum(position + WINDOW, windows_end)
                end = position + window_length(
                    inputs[4], gate_token, position, end, x_column, D, False, WINDOW
                )
                state, z, run = out_chunk(
                    state, z, run, position, end, inputs, outputs, strides, place, columns,
                    numbers, q_token, k_token, v_token, o_token, gate_token, D, E, G, WINDOW,
                    STATISTICS, MAP, DECAY, NORMALIZE, OPERAND, PRECISION,
                    False,
                )  # fmt: skip
                position = end
    else:
        for i in range((stop - begin + C - 1) // C):
            state, z, _ = out_chunk(
                state, z, 0, begin + i * C, stop, inputs, outputs, strides, place,
                columns, numbers, q_token, k_token, v_token, o_token, gate_token, D, E, G, C,
                STATISTICS, MAP, DECAY, NORMALIZE, OPERAND, PRECISION,
                    False,
            )  # fmt: skip
    if RETURN_STATE:
        store_tile(kv_last + of_sequence * D * E, state, offsets, x_column, u_column, D, E)
        if tile == 0:
            tl.store(z_last + of_sequence * D + x_column, z, mask=x_column < D)
