"""Triton kernel of the gradients of keys and values of causal linear attention, by a reverse scan.

With dS, the gradient of the state, and w, delta as in the kernels of the output and of dq:

    dv_j = sum over i >= j of w_ij (k_j q_i) do_i + w_j k_j dS
    dk_j = sum over i >= j of w_ij (v_j do_i - delta_i) q_i + w_j (dS v_j + dz)
    dS   = decay dS + sum of w_i q_i do_i^T

OF is "values" or "keys". In both, rows of the result are tokens j; x are k or v, and y are q or do,
with all their columns; u are do or q, divided into tiles of columns like dS and the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.ops.linear.triton.configs import autotuned
from attnzoo.ops.linear.triton.decay import (
    matmul_cumsum,
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
    materialize,
    store_rows,
    store_tile,
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
def key_gradient_chunk(
    state, z, suffix_sum, run, start, end, inputs, statistics, outputs, strides, place, columns,
    numbers,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, o_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr, OF: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    DIVIDE: tl.constexpr, DECAY_GRAD: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Process tokens ``start`` to ``end``, at most C.

    CHECK and ``run`` as in ``out_chunk``.

    Returns:
        The gradient of the state before the tokens, and of its z; the suffix sum of the gradient of
        the log decay; and ``run``.
    """
    q, k, v, d_out, log_decay = inputs
    inv_denom, delta, row_maxima, q_dq = statistics
    result, d_log_decay = outputs
    q_head, o_head = strides
    tokens, num_rows, tile, bh = place
    x_column, u_column = columns
    scale, map_scale = numbers
    VALUES: tl.constexpr = OF == "values"
    VECTOR: tl.constexpr = DECAY == "vector"
    SUBTRACT_DELTA: tl.constexpr = NORMALIZE and not VALUES
    CANCELS: tl.constexpr = SUBTRACT_DELTA or (DECAY_GRAD and not VALUES)
    WEIGHT_SIDES: tl.constexpr = "both" if VECTOR and not VALUES else "left"
    EXACT_STATE: tl.constexpr = "right" if CANCELS else ""
    EXACT_SCORES: tl.constexpr = WEIGHT_SIDES if CANCELS else ""
    EXACT_UPDATE: tl.constexpr = "right" if DECAY_GRAD and (not VALUES) and DECAY != "none" else ""
    qk_column = x_column if VALUES else u_column  # columns of queries, keys and vector decay
    v_column = u_column if VALUES else x_column  # columns of values and outputs
    base = start.to(tl.int64)
    token = tl.arange(0, C)
    in_bounds = token < end - start
    store_mask = in_bounds
    mask = token[:, None] <= token[None, :]
    if VECTOR:
        q_decay, k_decay, to_anchor, from_anchor, run = vector_decay(
            log_decay + base * gate_token, gate_token, token, qk_column, end - start,
            run, D, OPERAND, PRECISION, CHECK, False, not VALUES,
        )  # fmt: skip
        if CHECK:
            store_mask = mask_if(store_mask, run > 0)
        state *= from_anchor[:, None] if VALUES else from_anchor[None, :]
        z *= from_anchor
    if DECAY == "scalar":
        high, low, q_weights, k_weights, state_weight = scalar_decay(
            log_decay + base * gate_token, gate_token, token, end - start
        )
    if VALUES:
        k_raw, x = load_key_features(
            k + base * k_token, token, k_token, x_column, in_bounds, map_scale, MAP, D, OPERAND
        )
        if VECTOR:
            x = materialize((x * k_decay).to(OPERAND))
    else:
        x = load_rows(v + base * v_token, token, v_token, x_column, in_bounds, E).to(OPERAND)
    acc = tl.zeros((C, u_column.shape[0]), tl.float32)
    acc = dot_add(x, state, acc, OPERAND, PRECISION, EXACT_STATE)
    if not VALUES:
        acc += z[None, :]
    if DECAY == "scalar":
        acc *= k_weights[:, None]
        state *= state_weight
        z *= state_weight
    if DECAY == "scalar":
        decay = pair_decay(high, low, mask, True, OPERAND)
    for g in range(G):
        offset = g * tokens + base
        q_raw, queries, row_max, ties = load_query_features(
            q + g * q_head + base * q_token, row_maxima + offset, token, q_token, qk_column,
            in_bounds, map_scale, MAP, VALUES, D, OPERAND,
        )  # fmt: skip
        d_rows = load_d_out(
            d_out + g * o_head + base * o_token, inv_denom + offset, token, o_token, v_column,
            in_bounds, DIVIDE, E, OPERAND,
        )  # fmt: skip
        if VALUES:
            if VECTOR:
                queries = materialize((queries * q_decay).to(OPERAND))
            y, u = queries, d_rows
        else:
            if VECTOR:
                queries = queries.to(tl.float32) * q_decay
            y, u = d_rows, queries
        scores = tl.zeros((C, C), tl.float32)
        scores = dot_add(x, tl.trans(y), scores, OPERAND, PRECISION, "")
        if SUBTRACT_DELTA:
            delta_rows = tl.load(delta + offset + token, mask=in_bounds, other=0.0)
            scores -= delta_rows[None, :]
        if DECAY == "scalar":
            scores *= decay
        else:
            scores = tl.where(mask, scores, 0.0)
        acc = dot_add(scores, u, acc, OPERAND, PRECISION, EXACT_SCORES)
        if DECAY == "scalar":
            u = u.to(tl.float32) * q_weights[:, None]
        state = dot_add(tl.trans(y), u, state, OPERAND, PRECISION, EXACT_UPDATE)
        if SUBTRACT_DELTA:
            z -= weighted_column_sums(u, delta_rows, OPERAND, PRECISION, "both")
    if VECTOR:
        state *= to_anchor[:, None] if VALUES else to_anchor[None, :]
        z *= to_anchor
        if not VALUES:
            acc *= k_decay
    if not NORMALIZE:
        acc *= scale

    if VALUES:
        rows = result + base * key_heads * E
        store_rows(rows, acc, token, key_heads * E, u_column, store_mask, E)
    else:
        k_raw, k_phi = load_key_features(
            k + base * k_token, token, k_token, u_column, in_bounds, map_scale, MAP, D, OPERAND
        )
        if DECAY_GRAD:
            contribution = k_phi.to(tl.float32) * acc
            if VECTOR:
                offset = (bh * tokens + base) * D
                difference = (
                    load_rows(q_dq + offset, token, D, u_column, store_mask, D) - contribution
                )
                difference = tl.where(store_mask[:, None], difference, 0.0)
                cumulative = (
                    matmul_cumsum(difference, token[:, None] <= token[None, :], OPERAND, PRECISION)
                    + suffix_sum[None, :]
                )
                store_rows(d_log_decay + offset, cumulative, token, D, u_column, store_mask, D)
                ones = tl.full((C,), 1.0, tl.float32)
                suffix_sum += weighted_column_sums(difference, ones, OPERAND, PRECISION, "left")
            else:
                offset = tile * num_rows // G + bh * tokens + base + token
                difference = tl.load(q_dq + offset, mask=store_mask, other=0.0) - tl.sum(
                    contribution, 1
                )
                difference = tl.where(store_mask, difference, 0.0)
                suffix = tl.cumsum(difference, 0, reverse=True) + suffix_sum
                tl.store(d_log_decay + offset, suffix, mask=store_mask)
                suffix_sum += tl.sum(difference, 0)
        zeros = tl.zeros((C,), tl.float32)
        acc = feature_map_backward(acc, k_raw.to(tl.float32), zeros, zeros, map_scale, MAP, "keys")
        rows = result + base * key_heads * D
        store_rows(rows, acc, token, key_heads * D, u_column, store_mask, D)
    return state, z, suffix_sum, run


# Gradients of keys and values: see above.              (arXiv:2006.16236, 2307.08621, 2312.06635)
#
# grid     (B * Hkv * S * tiles): one program processes one sequence of one key head, one tile of u
# reads    q [B, H, T, D], do [B, H, T, E], k [B, Hkv, T, D], v [B, Hkv, T, E], any strides and
#          float dtypes; the gradient of the state after each sequence (RETURN_STATE; else zeros),
#          [S, Hkv, D, E] and [S, Hkv, D], float32; what out_kernel writes with STATISTICS
# writes   OF "values"  result [B, T, Hkv, E]; state_first (HAS_STATE): the gradient of the state
#                       before each sequence
#          OF "keys"    result [B, T, Hkv, D]; state_first: the gradient of its z; if DECAY_GRAD,
#                       d_log_decay, shaped like q_dq, from dg_t = dg_(t+1) + q_t dq_t - k_t dk_t,
#                       which starts from <S, dS> at the end of the sequence (S is kv_last, z_last)
# scale    multiplies results unless NORMALIZE; gradients of states do not include it
# memory   reads and writes each tensor once
# limits   D, E <= 256; C a power of two
# oracle   linear_attention(impl="reference") and autograd, on a GPU and with TRITON_INTERPRET=1
@autotuned("OF", "DIVIDE", "DECAY_GRAD")
@triton.jit(do_not_specialize=["tokens", "num_sequences"])
def key_gradient_kernel(
    q, k, v, d_out, result, log_decay, starts, lengths,
    kv_given, z_given, state_first, kv_last, z_last, inv_denom, delta, row_maxima, q_dq,
    d_log_decay,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, o_batch, o_head, gate_batch, gate_head,
    result_batch, tokens, num_sequences, scale, map_scale,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, o_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BU: tl.constexpr, TILES: tl.constexpr, OF: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    DIVIDE: tl.constexpr, DECAY_GRAD: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, VARLEN: tl.constexpr,
    HAS_STATE: tl.constexpr, RETURN_STATE: tl.constexpr,
):  # fmt: skip
    """Process one sequence; see above."""
    VALUES: tl.constexpr = OF == "values"
    X_SIZE: tl.constexpr = D if VALUES else E
    U_SIZE: tl.constexpr = E if VALUES else D
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
    statistics = (inv_denom + first_row, delta + first_row, row_maxima + first_row, q_dq)
    outputs = (result + b * result_batch + h * U_SIZE, d_log_decay)
    strides, place = (as_int64(q_head), as_int64(o_head)), (tokens, num_rows, tile, bh)
    x_column, u_column = tl.arange(0, BX), tile * BU + tl.arange(0, BU)
    columns, numbers = (x_column, u_column), (scale, map_scale)
    qk_column = x_column if VALUES else u_column
    if VALUES:
        offsets = x_column[:, None] * E + u_column[None, :]
    else:
        offsets = u_column[None, :] * E + x_column[:, None]
    of_sequence = sequence * key_heads + h
    state, z = load_state(
        kv_given, z_given, of_sequence, offsets, x_column, u_column, qk_column, D, E, X_SIZE,
        U_SIZE, RETURN_STATE,
    )  # fmt: skip
    suffix_sum = 0.0
    if DECAY_GRAD and not VALUES:
        end_state, z_end = load_state(
            kv_last, z_last, of_sequence, offsets, x_column, u_column, qk_column, D, E, X_SIZE,
            U_SIZE, RETURN_STATE,
        )  # fmt: skip
        suffix_sum = tl.sum(end_state * state, 0) + z_end * z  # <S, dS> at the end of the sequence
        if DECAY == "scalar":
            suffix_sum = tl.sum(suffix_sum, 0)
        suffix_sum *= scale
    if DECAY == "vector":
        position = stop  # tokens from here on are finished
        while position > begin:
            chunks = (position - begin + C - 1) // C
            first = tl.maximum(chunks - CHUNKS_PER_RUN, 0)
            run, whole = tl.full((), 1, tl.int32), tl.full((), 0, tl.int32)
            for i in range(chunks - first):
                state, z, suffix_sum, run = key_gradient_chunk(
                    state, z, suffix_sum, run, begin + (chunks - 1 - i) * C, position, inputs,
                    statistics, outputs, strides, place, columns, numbers, q_token, k_token,
                    v_token, o_token, gate_token, key_heads, D, E, G, C, OF, MAP, DECAY, NORMALIZE,
                    DIVIDE, DECAY_GRAD, OPERAND, PRECISION, True,
                )  # fmt: skip
                whole += run
            position = tl.minimum(begin + (chunks - whole) * C, position)
            windows_start = position
            if run == 0:
                windows_start = begin + (chunks - whole - 1) * C
            while position > windows_start:
                start = tl.maximum(position - WINDOW, windows_start)
                start = position - window_length(
                    inputs[4], gate_token, start, position, qk_column, D, True, WINDOW
                )
                state, z, suffix_sum, run = key_gradient_chunk(
                    state, z, suffix_sum, run, start, position, inputs, statistics, outputs,
                    strides, place, columns, numbers, q_token, k_token, v_token, o_token,
                    gate_token, key_heads, D, E, G, WINDOW, OF, MAP, DECAY, NORMALIZE, DIVIDE,
                    DECAY_GRAD, OPERAND, PRECISION, False,
                )  # fmt: skip
                position = start
    else:
        chunks = (stop - begin + C - 1) // C
        for i in range(chunks):
            state, z, suffix_sum, _ = key_gradient_chunk(
                state, z, suffix_sum, 0, begin + (chunks - 1 - i) * C, stop, inputs,
                statistics, outputs, strides, place, columns, numbers, q_token, k_token, v_token,
                o_token, gate_token, key_heads, D, E, G, C, OF, MAP, DECAY, NORMALIZE, DIVIDE,
                DECAY_GRAD, OPERAND, PRECISION, False,
            )  # fmt: skip
    if HAS_STATE:
        if VALUES:
            first = state_first + of_sequence * D * E
            store_tile(first, state, offsets, x_column, u_column, X_SIZE, U_SIZE)
        else:
            tl.store(state_first + of_sequence * D + qk_column, z, mask=qk_column < D)
