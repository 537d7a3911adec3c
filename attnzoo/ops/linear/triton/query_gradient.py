"""Triton kernel of the gradient of the queries of causal linear attention, by a scan over chunks.

With the gradient do of the output, and w, S as in :mod:`attnzoo.ops.linear.triton.out`:

    dq_i = sum over j <= i of w_ij (do_i v_j - delta_i) k_j + w_i (S do_i - delta_i z)

If normalised, do is divided by the denominator, with DIVIDE in this kernel and otherwise before it;
without normalisation, delta is 0. Values and do have all their columns; keys, S (stored transposed)
and dq are divided into tiles of columns.
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
from attnzoo.ops.linear.triton.out import CHUNKS_PER_RUN, WINDOW
from attnzoo.ops.linear.triton.parts import (
    feature_map_backward,
    load_rows,
    mask_if,
    store_rows,
    weighted_column_sums,
)
from attnzoo.ops.linear.triton.rows import (
    as_int64,
    load_d_out,
    load_key_features,
    load_query_features,
    load_state,
    locate_program,
)
from attnzoo.runtime.triton_products import dot_add


@triton.jit
def query_gradient_chunk(
    state, z, run, start, end, inputs, statistics, outputs, strides, place, columns, numbers,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, o_token: tl.constexpr,
    gate_token: tl.constexpr, D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    DIVIDE: tl.constexpr, DECAY_GRAD: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Process tokens ``start`` to ``end``, at most C, and return the state after them, and run.

    CHECK and ``run`` as in ``out_chunk``.
    """
    q, k, v, d_out, log_decay = inputs
    inv_denom, delta, row_maxima = statistics
    result, q_dq = outputs
    q_head, o_head = strides
    tokens, heads, num_rows, tile, bh = place
    x_column, u_column = columns
    scale, map_scale, eps = numbers
    CANCELS: tl.constexpr = NORMALIZE or DECAY_GRAD
    WEIGHT_SIDES: tl.constexpr = "both" if DECAY == "vector" else "left"
    EXACT_STATE: tl.constexpr = "right" if CANCELS else ""
    EXACT_SCORES: tl.constexpr = WEIGHT_SIDES if CANCELS else ""
    EXACT_UPDATE: tl.constexpr = "right" if DECAY_GRAD and DECAY != "none" else ""
    base = start.to(tl.int64)
    token = tl.arange(0, C)
    in_bounds = token < end - start
    store_mask = in_bounds
    mask = token[:, None] >= token[None, :]
    if DECAY == "vector":
        q_decay, k_decay, to_anchor, from_anchor, run = vector_decay(
            log_decay + base * gate_token, gate_token, token, u_column, end - start,
            run, D, OPERAND, PRECISION, CHECK, True, True,
        )  # fmt: skip
        if CHECK:
            store_mask = mask_if(store_mask, run > 0)
        state *= to_anchor[None, :]
        z *= to_anchor
    if DECAY == "scalar":
        high, low, q_weights, k_weights, state_weight = scalar_decay(
            log_decay + base * gate_token, gate_token, token, end - start
        )
    k_raw, keys = load_key_features(
        k + base * k_token, token, k_token, u_column, in_bounds, map_scale, MAP, D, OPERAND
    )
    values = load_rows(v + base * v_token, token, v_token, x_column, in_bounds, E).to(OPERAND)
    if DECAY == "vector":
        keys = keys.to(tl.float32) * k_decay
    if DECAY == "scalar":
        decay = pair_decay(high, low, mask, False, OPERAND)
    if DECAY_GRAD:
        q_dq_rows = tl.zeros((C, keys.shape[1]) if DECAY == "vector" else (C,), tl.float32)
    for g in range(G):
        offset = g * tokens + base
        d_rows = load_d_out(
            d_out + g * o_head + base * o_token, inv_denom + offset, token, o_token, x_column,
            in_bounds, DIVIDE, E, OPERAND,
        )  # fmt: skip
        acc = tl.zeros((C, keys.shape[1]), tl.float32)
        acc = dot_add(d_rows, state, acc, OPERAND, PRECISION, EXACT_STATE)
        scores = tl.zeros((C, C), tl.float32)
        scores = dot_add(d_rows, tl.trans(values), scores, OPERAND, PRECISION, "")
        if NORMALIZE:
            delta_rows = tl.load(delta + offset + token, mask=in_bounds, other=0.0)
            acc -= delta_rows[:, None] * z[None, :]
            scores -= delta_rows[:, None]
        if DECAY == "scalar":
            acc *= q_weights[:, None]
        if DECAY == "scalar":
            scores *= decay
        else:
            scores = tl.where(mask, scores, 0.0)
        acc = dot_add(scores, keys, acc, OPERAND, PRECISION, EXACT_SCORES)
        if DECAY == "vector":
            acc *= q_decay
        if not NORMALIZE:
            acc *= scale
        q_raw, queries, row_max, ties = load_query_features(
            q + g * q_head + base * q_token, row_maxima + offset, token, q_token, u_column,
            in_bounds, map_scale, MAP, False, D, OPERAND,
        )  # fmt: skip
        if DECAY_GRAD:
            contribution = queries.to(tl.float32) * acc
            q_dq_rows += contribution if DECAY == "vector" else tl.sum(contribution, 1)
        d_max = row_max
        if MAP == "exp":  # sum of q dq over the row: the gradient of its maximum
            d_max = tl.load(delta + offset + token, mask=in_bounds, other=0.0)
            d_max = d_max * eps if NORMALIZE else d_max
            d_max /= tl.load(row_maxima + num_rows + offset + token, mask=in_bounds, other=1.0)
        acc = feature_map_backward(
            acc, q_raw.to(tl.float32), row_max, d_max, map_scale, MAP, "queries"
        )
        rows = result + g * D + base * heads * D
        store_rows(rows, acc, token, heads * D, u_column, store_mask, D)

    if DECAY == "scalar":
        state *= state_weight
        z *= state_weight
        keys = keys.to(tl.float32) * k_weights[:, None]
    state = dot_add(tl.trans(values), keys, state, OPERAND, PRECISION, EXACT_UPDATE)
    if NORMALIZE:
        weights = tl.where(in_bounds, 1.0, 0.0)
        z += weighted_column_sums(keys, weights, OPERAND, PRECISION, "left")
    if DECAY == "vector":
        state *= from_anchor[None, :]
        z *= from_anchor
    if DECAY_GRAD:
        if DECAY == "vector":
            rows = q_dq + (bh * tokens + base) * D
            store_rows(rows, q_dq_rows, token, D, u_column, store_mask, D)
        else:
            rows = q_dq + tile * num_rows // G + bh * tokens + base
            tl.store(rows + token, q_dq_rows, mask=store_mask)
    return state, z, run


# Gradient of the queries: see above.                   (arXiv:2006.16236, 2307.08621, 2312.06635)
#
# grid     (B * Hkv * S * tiles): one program processes one sequence of one key head, one tile of k
# reads    q [B, H, T, D], do [B, H, T, E], k [B, Hkv, T, D], v [B, Hkv, T, E], any strides and
#          float dtypes; the states that out_kernel reads; what it writes with STATISTICS
# writes   result [B, T, H, D]; if DECAY_GRAD, q_dq: q * dq summed over the queries of a key head,
#          [tiles, B, Hkv, T], or [B, Hkv, T, D] for a vector decay
# scale    multiplies results unless NORMALIZE
# memory   reads and writes each tensor once
# limits   D, E <= 256; C a power of two
# oracle   linear_attention(impl="reference") and autograd, on a GPU and with TRITON_INTERPRET=1
@autotuned("DIVIDE", "DECAY_GRAD")
@triton.jit(do_not_specialize=["tokens", "num_sequences"])
def query_gradient_kernel(
    q, k, v, d_out, result, log_decay, starts, lengths,
    kv_given, z_given, inv_denom, delta, row_maxima, q_dq,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, o_batch, o_head, gate_batch, gate_head,
    result_batch, tokens, num_sequences, scale, map_scale, eps,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, o_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BU: tl.constexpr, TILES: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    DIVIDE: tl.constexpr, DECAY_GRAD: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, VARLEN: tl.constexpr,
    HAS_STATE: tl.constexpr,
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
    inputs = (
        q + b * q_batch + h * G * q_head, k + b * k_batch + h * k_head,
        v + b * v_batch + h * v_head, d_out + b * o_batch + h * G * o_head,
        log_decay + b * gate_batch + h * gate_head,
    )  # fmt: skip
    statistics = (inv_denom + first_row, delta + first_row, row_maxima + first_row)
    outputs = (result + b * result_batch + h * G * D, q_dq)
    strides, place = (as_int64(q_head), as_int64(o_head)), (tokens, heads, num_rows, tile, bh)
    x_column, u_column = tl.arange(0, BX), tile * BU + tl.arange(0, BU)
    columns, numbers = (x_column, u_column), (scale, map_scale, eps)
    offsets = u_column[None, :] * E + x_column[:, None]
    of_sequence = sequence * key_heads + h
    state, z = load_state(
        kv_given, z_given, of_sequence, offsets, x_column, u_column, u_column, D, E, E, D, HAS_STATE
    )
    if DECAY == "vector":
        position = begin
        while position < stop:
            chunks = tl.minimum((stop - position + C - 1) // C, CHUNKS_PER_RUN)
            run, whole = tl.full((), 1, tl.int32), tl.full((), 0, tl.int32)
            for i in range(chunks):
                state, z, run = query_gradient_chunk(
                    state, z, run, position + i * C, stop, inputs, statistics, outputs,
                    strides, place, columns, numbers, q_token, k_token, v_token, o_token,
                    gate_token, D, E, G, C, MAP, DECAY, NORMALIZE, DIVIDE,
                    DECAY_GRAD, OPERAND, PRECISION, True,
                )  # fmt: skip
                whole += run
            position = tl.minimum(position + whole * C, stop)
            windows_end = position
            if run == 0:
                windows_end = tl.minimum(position + C, stop)
            while position < windows_end:
                end = tl.minimum(position + WINDOW, windows_end)
                end = position + window_length(
                    inputs[4], gate_token, position, end, u_column, D, False, WINDOW
                )
                state, z, run = query_gradient_chunk(
                    state, z, run, position, end, inputs, statistics, outputs, strides, place,
                    columns, numbers, q_token, k_token, v_token, o_token, gate_token, D, E, G,
                    WINDOW, MAP, DECAY, NORMALIZE, DIVIDE, DECAY_GRAD, OPERAND,
                    PRECISION, False,
                )  # fmt: skip
                position = end
    else:
        for i in range((stop - begin + C - 1) // C):
            state, z, _ = query_gradient_chunk(
                state, z, 0, begin + i * C, stop, inputs, statistics, outputs, strides,
                place, columns, numbers, q_token, k_token, v_token, o_token, gate_token, D, E, G,
                C, MAP, DECAY, NORMALIZE, DIVIDE, DECAY_GRAD, OPERAND, PRECISION,
                False,
            )  # fmt: skip
