"""Process one chunk of :func:`attnzoo.backends.linear.kernels.scan.scan_kernel`, in every mode.

The module docstring of ``scan`` defines the modes, and x, y, u and S in each of them.

Letters: C tokens of the chunk; BX columns of x and y; BU columns of a tile of u.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.backends.linear.kernels.decay import (
    factor_scalar_decay,
    factor_vector_decay,
    matmul_cumsum,
    number_segments,
)
from attnzoo.backends.linear.kernels.parts import (
    apply_feature_map,
    dot_add,
    feature_map_backward,
    load_rows,
    materialize,
    matrix_vector,
    row_max_and_ties,
    store_rows,
    weighted_column_sums,
)


@triton.jit
def load_query_features(
    q, row_maxima, token, token_stride, column, in_bounds, map_scale,
    MAP: tl.constexpr, FULL_ROWS: tl.constexpr, D: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Return queries, their features, and per row the largest exponent and its number of ties.

    Without FULL_ROWS, the block has some columns only, and the maxima come from ``row_maxima``.
    """
    raw = load_rows(q, token, token_stride, column, in_bounds, D)
    row_max, ties = tl.zeros(token.shape, tl.float32), tl.full(token.shape, 1.0, tl.float32)
    phi = raw
    if MAP == "exp":
        if FULL_ROWS:
            row_max, ties = row_max_and_ties(raw.to(tl.float32), column, map_scale, D)
        else:
            row_max = tl.load(row_maxima + token, mask=in_bounds, other=0.0)
    if MAP != "identity":
        phi = apply_feature_map(raw.to(tl.float32), row_max, column, map_scale, MAP, "queries", D)
        phi = materialize(phi.to(OPERAND))
    return raw, phi.to(OPERAND), row_max, ties


@triton.jit
def load_key_features(
    k, token, token_stride, column, in_bounds, map_scale,
    MAP: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Return keys and their features; the features of padding tokens are 0 if PADDED."""
    raw = load_rows(k, token, token_stride, column, in_bounds, D)
    phi = raw
    if MAP != "identity":
        zeros = tl.zeros(token.shape, tl.float32)
        phi = apply_feature_map(raw.to(tl.float32), zeros, column, map_scale, MAP, "keys", D)
        if PADDED:
            phi = tl.where(in_bounds[:, None], phi, 0.0)
        phi = materialize(phi.to(OPERAND))
    return raw, phi.to(OPERAND)


@triton.jit
def load_d_out(
    d_out, inv_denom, token, token_stride, column, in_bounds,
    NORMALIZE: tl.constexpr, E: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the output over the denominator, rounded the same in every mode."""
    rows = load_rows(d_out, token, token_stride, column, in_bounds, E)
    if NORMALIZE:
        rows = rows.to(tl.float32) * tl.load(inv_denom + token, mask=in_bounds, other=0.0)[:, None]
    return rows.to(OPERAND)


@triton.jit
def process_chunk(
    state, z, suffix_sum, edge, chunk_start, split_end,
    q, k, v, d_out, result, log_decay, segment_ids, padding_mask,
    inv_denom, delta, row_maxima, q_dq, d_log_decay,
    q_head, o_head, tokens, heads, num_rows, tile, bh, x_column, u_column, scale, map_scale, eps,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, o_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BU: tl.constexpr, MODE: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, DECAY_GRAD: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """Process the chunk that starts at token ``chunk_start``, and return the state after it.

    Pointers refer to the batch row and key head of the program.

    Without WINDOWS, the whole chunk is processed, unless ``edge`` is 0 or its decay is too strong
    to be factored: then nothing is written, the state does not change, and the returned edge is 0.
    With WINDOWS, rows up to the returned edge are processed; REVERSE, rows from the returned edge
    to ``edge``.

    Returns:
        The state and its z; the suffix sum of the gradient of the log decay; and the edge.
    """
    REVERSE: tl.constexpr = (MODE == "dv") or (MODE == "dk")
    CONTRACT_D: tl.constexpr = (MODE != "dq") and (MODE != "dk")  # x and y are queries and keys
    SCALAR: tl.constexpr = DECAY == "scalar"
    VECTOR: tl.constexpr = DECAY == "vector"
    DIVIDE: tl.constexpr = NORMALIZE and CONTRACT_D and not REVERSE
    SUBTRACT_DELTA: tl.constexpr = NORMALIZE and not CONTRACT_D
    CANCELS: tl.constexpr = (MODE == "shared") or SUBTRACT_DELTA or (DECAY_GRAD and not CONTRACT_D)
    EXACT_STATE: tl.constexpr = "right" if CANCELS else ""
    WEIGHT_SIDES: tl.constexpr = "both" if VECTOR and not CONTRACT_D else "left"
    EXACT_SCORES: tl.constexpr = WEIGHT_SIDES if CANCELS else ""
    HAS_DECAY: tl.constexpr = VECTOR or SCALAR
    EXACT_UPDATE: tl.constexpr = "right" if DECAY_GRAD and (not CONTRACT_D) and HAS_DECAY else ""
    EXACT_KEY_SUM: tl.constexpr = "right" if SCALAR else ""  # for z
    qk_column = x_column if CONTRACT_D else u_column  # columns of queries, keys and vector decay
    v_column = u_column if CONTRACT_D else x_column  # columns of values and outputs
    base = chunk_start.to(tl.int64)
    token = tl.arange(0, C)
    in_bounds = token < split_end - chunk_start
    valid = in_bounds
    if PADDED:
        valid = valid & (tl.load(padding_mask + base + token, mask=in_bounds, other=0) != 0)
    if REVERSE:
        score_mask = token[:, None] <= token[None, :]
    else:
        score_mask = token[:, None] >= token[None, :]
    store_mask = in_bounds  # rows to write
    token_weights = tl.full((C,), 1.0, tl.float32)  # of each token in the state
    if VECTOR:
        cumulative, state_decay, in_window, edge = factor_vector_decay(
            log_decay + base * gate_token, gate_token, token, qk_column, split_end - chunk_start,
            edge, D, CONTRACT_D, REVERSE, WINDOWS, OPERAND, PRECISION,
        )  # fmt: skip
        q_decay, k_decay = tl.exp2(cumulative), tl.exp2(-cumulative)
        mask_rows = WINDOWS or edge == 0  # some rows are excluded
        state_decay_tile = state_decay[:, None] if CONTRACT_D else state_decay[None, :]
        store_mask = store_mask & in_window
    if SCALAR:
        q_decay, k_decay, state_decay, in_window, edge = factor_scalar_decay(
            log_decay + base * gate_token,
            gate_token,
            token,
            split_end - chunk_start,
            edge,
            REVERSE,
            WINDOWS,
        )
        store_mask = store_mask & in_window
        token_weights *= q_decay if REVERSE else k_decay
    if PACKED:
        segment, last_segment = number_segments(segment_ids, chunk_start, token, store_mask)
        score_mask = score_mask & (segment[:, None] == segment[None, :])
        in_first, in_last = (segment == 0).to(tl.float32), (segment == last_segment).to(tl.float32)
        one_segment = (last_segment == 0).to(tl.float32)  # 1 if no segment starts in the chunk
        token_weights *= in_first if REVERSE else in_last

    # Keys and values are y and u in forward modes, and x and the rows of the result in reverse
    k_raw, k_phi = load_key_features(
        k + base * k_token, token, k_token, qk_column, valid, map_scale, MAP, PADDED, D, OPERAND
    )
    v_rows = load_rows(v + base * v_token, token, v_token, v_column, valid, E).to(OPERAND)
    if REVERSE:
        if HAS_DECAY:
            state *= state_decay_tile if VECTOR else state_decay
            z *= state_decay
        x = k_phi if CONTRACT_D else v_rows
        if VECTOR and CONTRACT_D:
            x = materialize((x * k_decay).to(OPERAND))
        acc = tl.zeros((C, BU), tl.float32)
        acc = dot_add(x, state, acc, OPERAND, PRECISION, EXACT_STATE)
        if not CONTRACT_D:
            acc += z[None, :]
        if PACKED:
            acc *= in_last[:, None]
            state *= one_segment
            z *= one_segment
    if MODE == "dq" and DECAY_GRAD:
        q_dq_rows = tl.zeros((C, BU) if VECTOR else (C,), tl.float32)

    for g in range(G):
        offset = g * tokens + base
        q_raw, q_phi, row_max, ties = load_query_features(
            q + g * q_head + base * q_token, row_maxima + offset, token, q_token, qk_column,
            in_bounds, map_scale, MAP, CONTRACT_D, D, OPERAND,
        )  # fmt: skip
        if CONTRACT_D and not REVERSE:
            x, y, u = q_phi, k_phi, v_rows
        else:
            d_out_rows = load_d_out(
                d_out + g * o_head + base * o_token, inv_denom + offset, token, o_token, v_column,
                in_bounds, NORMALIZE, E, OPERAND,
            )  # fmt: skip
            if CONTRACT_D:
                y, u = q_phi, d_out_rows
            elif REVERSE:
                y, u = d_out_rows, q_phi
            else:
                x, y, u = d_out_rows, v_rows, k_phi
        if SUBTRACT_DELTA:
            delta_rows = tl.load(delta + offset + token, mask=in_bounds, other=0.0)
        if VECTOR and CONTRACT_D:
            if REVERSE:
                y = materialize((y * q_decay).to(OPERAND))
            else:
                x = materialize((x * q_decay).to(OPERAND))
                y = materialize((y * k_decay).to(OPERAND))
            if mask_rows:
                y = tl.where(in_window[:, None], y, 0.0).to(OPERAND)
        if VECTOR and not CONTRACT_D:
            u = u.to(tl.float32) * (q_decay if REVERSE else k_decay)
            if mask_rows:
                u = tl.where(in_window[:, None], u, 0.0)

        scores = tl.zeros((C, C), tl.float32)
        scores = dot_add(x, tl.trans(y), scores, OPERAND, PRECISION, "")
        if SUBTRACT_DELTA:
            scores -= delta_rows[None, :] if REVERSE else delta_rows[:, None]
        if SCALAR:
            scores *= (q_decay if REVERSE else k_decay)[None, :]
        scores = tl.where(score_mask, scores, 0.0)
        if not REVERSE:
            acc = tl.zeros((C, BU), tl.float32)
            acc = dot_add(x, state, acc, OPERAND, PRECISION, EXACT_STATE)
            if SUBTRACT_DELTA:
                acc -= delta_rows[:, None] * z[None, :]
            if PACKED:
                acc *= in_first[:, None]
        acc = dot_add(scores, u, acc, OPERAND, PRECISION, EXACT_SCORES)
        if not REVERSE:
            if VECTOR and not CONTRACT_D:
                acc *= q_decay
            if SCALAR:
                acc *= q_decay[:, None]
        if DIVIDE:
            from_state = matrix_vector(x, z, OPERAND, PRECISION)
            denominator = tl.sum(scores, 1) + (from_state * in_first if PACKED else from_state)
            reciprocal = 1 / ((denominator * q_decay if SCALAR else denominator) + eps)
            acc *= reciprocal[:, None]
        if not NORMALIZE and not REVERSE:
            acc *= scale

        if MODE == "out":
            store_rows(
                result + g * E + base * heads * E, acc, token, heads * E, u_column, store_mask, E
            )
        if MODE == "shared":
            d_out_rows = load_rows(
                d_out + g * o_head + base * o_token, token, o_token, u_column, in_bounds, E
            ).to(tl.float32)
            if NORMALIZE:
                d_out_rows = (d_out_rows * reciprocal[:, None]).to(OPERAND).to(tl.float32)
                tl.store(inv_denom + offset + token, reciprocal, mask=store_mask)
            if MAP == "exp":
                tl.store(row_maxima + offset + token, row_max, mask=store_mask)
                tl.store(row_maxima + num_rows + offset + token, ties, mask=store_mask)
            tl.store(
                result + tile * num_rows + offset + token,
                tl.sum(acc * d_out_rows, 1),
                mask=store_mask,
            )
        if MODE == "dq":
            if DECAY_GRAD:
                contribution = q_phi.to(tl.float32) * acc
                q_dq_rows += contribution if VECTOR else tl.sum(contribution, 1)
            d_max = row_max
            if MAP == "exp":  # sum of q dq over the row: the gradient of its maximum
                d_max = tl.load(delta + offset + token, mask=in_bounds, other=0.0)
                d_max = d_max * eps if NORMALIZE else d_max
                d_max /= tl.load(row_maxima + num_rows + offset + token, mask=in_bounds, other=1.0)
            acc = feature_map_backward(
                acc, q_raw.to(tl.float32), row_max, d_max, map_scale, MAP, "queries"
            )
            store_rows(
                result + g * D + base * heads * D, acc, token, heads * D, u_column, store_mask, D
            )
        if REVERSE:
            if SCALAR or PACKED:
                u = u.to(tl.float32) * token_weights[:, None]
            state = dot_add(tl.trans(y), u, state, OPERAND, PRECISION, EXACT_UPDATE)
            if SUBTRACT_DELTA:
                z -= weighted_column_sums(u, delta_rows, False, OPERAND, PRECISION, "both")

    if REVERSE:
        if VECTOR and not CONTRACT_D:
            acc *= k_decay
        if SCALAR:
            acc *= k_decay[:, None]
        if not NORMALIZE:
            acc *= scale
    else:
        if CONTRACT_D:
            y, u = k_phi, v_rows
        else:
            y, u = v_rows, k_phi
        if VECTOR and CONTRACT_D:
            y = (y * k_decay).to(OPERAND)
            if mask_rows:
                y = tl.where(in_window[:, None], y, 0.0).to(OPERAND)
        if VECTOR and not CONTRACT_D:
            u = u.to(tl.float32) * k_decay
            if mask_rows:
                u = tl.where(in_window[:, None], u, 0.0)
        if PACKED:
            state *= one_segment
            z *= one_segment
        if SCALAR or PACKED:
            u = u.to(tl.float32) * token_weights[:, None]
        state = dot_add(tl.trans(y), u, state, OPERAND, PRECISION, EXACT_UPDATE)
        if CONTRACT_D:
            if NORMALIZE or tile == 0:
                z += weighted_column_sums(
                    y, tl.where(valid, token_weights, 0.0), True, OPERAND, PRECISION, EXACT_KEY_SUM
                )
        elif SUBTRACT_DELTA:
            z += weighted_column_sums(
                u, tl.where(valid, 1.0, 0.0), False, OPERAND, PRECISION, "left"
            )
        if HAS_DECAY:
            state *= state_decay_tile if VECTOR else state_decay
            z *= state_decay
    if MODE == "dq" and DECAY_GRAD:
        if VECTOR:
            store_rows(
                q_dq + (bh * tokens + base) * D, q_dq_rows, token, D, u_column, store_mask, D
            )
        else:
            tl.store(
                q_dq + tile * num_rows // G + bh * tokens + base + token, q_dq_rows, mask=store_mask
            )
    if MODE == "dv":
        store_rows(
            result + base * key_heads * E, acc, token, key_heads * E, u_column, store_mask, E
        )
    if MODE == "dk":
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
                suffix_sum += weighted_column_sums(
                    difference, tl.full((C,), 1.0, tl.float32), False, OPERAND, PRECISION, "left"
                )
            else:
                offset = tile * num_rows // G + bh * tokens + base + token
                difference = tl.load(q_dq + offset, mask=store_mask, other=0.0) - tl.sum(
                    contribution, 1
                )
                difference = tl.where(store_mask, difference, 0.0)
                tl.store(
                    d_log_decay + offset,
                    tl.cumsum(difference, 0, reverse=True) + suffix_sum,
                    mask=store_mask,
                )
                suffix_sum += tl.sum(difference, 0)
        zeros = tl.zeros((C,), tl.float32)
        acc = feature_map_backward(acc, k_raw.to(tl.float32), zeros, zeros, map_scale, MAP, "keys")
        acc = tl.where(valid[:, None], acc, 0.0)
        store_rows(
            result + base * key_heads * D, acc, token, key_heads * D, u_column, store_mask, D
        )
    return state, z, suffix_sum, edge
