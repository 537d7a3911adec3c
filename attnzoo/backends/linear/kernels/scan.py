"""Triton kernel of causal linear attention: the output and all gradients, by scans over chunks.

All five modes run the same recurrence over chunks of C tokens. With tokens a and b of one chunk,
decay weights w and a state S in registers:

    result_a = sum over b of w_ab (x_a y_b) u_b + x_a S,    then  S += sum over b of y_b u_b^T

    MODE       direction  x    y    u    S            result
    "out"      forward    q    k    v    state        out, divided by q z + eps if NORMALIZE
    "shared"   forward    q    k    v    state        delta, and 1 / denominator
    "dq"       forward    do   v    k    state        dq
    "dv"       reverse    k    q    do   d state      dv
    "dk"       reverse    v    do   q    d state      dk, and the gradient of the log decay

q and k are features. Only inputs, results and one state per split pass through memory.

If NORMALIZE, do is divided by the denominator, and dq and dk subtract delta from the weights x y:
delta_a = sum(do_a * out_a) / denominator_a, as in the backward pass of FlashAttention. For the
feature map "exp" without NORMALIZE, delta is sum(do_a * out_a): the gradient of a query's maximum.

x and y have all their columns. u, S and the result are divided into tiles of columns, one per
program, because a state must fit into registers.

No product of two tiles is transposed to be an operand of a third one, because some compilers for
Hopper compile that wrongly. No accumulator is read before its last product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.backends.linear.kernels.chunk import process_chunk
from attnzoo.backends.linear.kernels.decay import load_first_decay
from attnzoo.backends.linear.kernels.parts import load_tile, store_tile

WINDOW: tl.constexpr = tl.constexpr(16)  # C of windows, for strong decay


# Scan over the chunks of a split: see above.           (arXiv:2006.16236, 2307.08621, 2312.06635)
#
# grid     (B * Hkv * N * tiles): one program processes one split of one key head and one tile of u;
#          the tiles of a split have consecutive indices, so that the cache serves x and y
# reads    q [B, H, T, D], do [B, H, T, E], k [B, Hkv, T, D], v [B, Hkv, T, E], any strides and
#          float dtypes; the state at the start of each split, or its gradient at the end,
#          [B, Hkv, N, D, E] and [B, Hkv, N, D], float32
# writes   "out"     result [B, T, H, E]; kv_last, z_last: the state after the last token
#          "shared"  result: delta per tile, [tiles, B, H, T]; inv_denom [B, H, T]; for MAP "exp"
#                    row_maxima [2, B, H, T]: largest exponents, and how many entries equal them
#          "dq"      result [B, T, H, D]; if DECAY_GRAD, q_dq: q * dq summed over the queries of a
#                    key head, [tiles, B, Hkv, T], or [B, Hkv, T, D] for a vector decay
#          "dv"      result [B, T, Hkv, E]; kv_last: the gradient of the first state
#          "dk"      result [B, T, Hkv, D]; z_last: the gradient of its z; if DECAY_GRAD,
#                    d_log_decay, shaped like q_dq, from dg_t = dg_(t+1) + q_t dq_t - k_t dk_t,
#                    which starts from <S, dS> at the end of the split (S is kv_ends, z_ends)
# scale    multiplies results unless NORMALIZE; gradients of states do not include it
# memory   reads and writes each tensor of the mode once
# limits   D, E <= 256; C a power of two; split_size a multiple of C
# oracle   linear_attention(impl="reference") and autograd, on a GPU and with TRITON_INTERPRET=1
@triton.jit(do_not_specialize=["tokens", "num_splits"])
def scan_kernel(
    q, k, v, d_out, result, log_decay, segment_ids, padding_mask,
    kv_states, z_states, kv_last, z_last, kv_ends, z_ends,
    inv_denom, delta, row_maxima, q_dq, d_log_decay,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, o_batch, o_head, gate_batch, gate_head,
    tokens, split_size, num_splits, scale, map_scale, eps,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, o_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BU: tl.constexpr, TILES: tl.constexpr, MODE: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, DECAY_GRAD: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Process one split; see above."""
    REVERSE: tl.constexpr = (MODE == "dv") or (MODE == "dk")
    CONTRACT_D: tl.constexpr = (MODE != "dq") and (MODE != "dk")  # x and y are queries and keys
    X_SIZE: tl.constexpr = D if CONTRACT_D else E
    U_SIZE: tl.constexpr = E if CONTRACT_D else D
    tile = tl.program_id(0) % TILES
    split_index = (tl.program_id(0) // TILES).to(tl.int64)
    n, bh = split_index % num_splits, split_index // num_splits
    num_key_heads = tl.num_programs(0).to(tl.int64) // (TILES * num_splits)  # B * Hkv
    b, h = bh // key_heads, bh % key_heads
    heads = key_heads * G
    q += b * q_batch + h * G * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    d_out += b * o_batch + h * G * o_head
    log_decay += b * gate_batch + h * gate_head
    segment_ids += b * tokens
    padding_mask += b * tokens
    first_row = (b * heads + h * G) * tokens
    inv_denom, delta, row_maxima = inv_denom + first_row, delta + first_row, row_maxima + first_row
    num_rows = num_key_heads * G * tokens
    if REVERSE:
        result += (b * tokens * key_heads + h) * U_SIZE
    elif MODE == "shared":
        result += first_row
    else:
        result += (b * tokens * heads + h * G) * U_SIZE
    x_column, u_column = tl.arange(0, BX), tile * BU + tl.arange(0, BU)
    qk_column = x_column if CONTRACT_D else u_column  # columns of queries, keys and vector decay
    if CONTRACT_D:
        tile_offsets = x_column[:, None] * E + u_column[None, :]
    else:
        tile_offsets = u_column[None, :] * E + x_column[:, None]
    state = load_tile(
        kv_states + split_index * D * E, tile_offsets, x_column, u_column, X_SIZE, U_SIZE
    )
    z = tl.load(z_states + split_index * D + qk_column, mask=qk_column < D, other=0.0)
    split_start = (n * split_size).to(tl.int32)
    split_end = tl.minimum(split_start + split_size, tokens)
    chunks = (split_end - split_start + C - 1) // C
    first_decay = load_first_decay(
        log_decay + split_start.to(tl.int64) * gate_token, qk_column, DECAY, D
    )
    if DECAY == "vector":
        first_decay_tile = first_decay[:, None] if CONTRACT_D else first_decay[None, :]
    else:
        first_decay_tile = first_decay
    suffix_sum = 0.0
    if DECAY_GRAD and MODE == "dk":
        end_state = load_tile(
            kv_ends + split_index * D * E, tile_offsets, x_column, u_column, X_SIZE, U_SIZE
        )
        z_end = tl.load(z_ends + split_index * D + qk_column, mask=qk_column < D, other=0.0)
        suffix_sum = tl.sum(end_state * state, 0) + z_end * z  # <S, dS> at the end of the split
        if DECAY == "scalar":
            suffix_sum = tl.sum(suffix_sum, 0)
        suffix_sum *= scale
    if DECAY != "none" and not REVERSE:
        state *= first_decay_tile
        z *= first_decay
    whole_chunks = tl.zeros((), tl.int32)  # chunks before the first that cannot be factored
    edge = whole_chunks + 1
    for i in range(chunks):
        chunk_start = split_start + ((chunks - 1 - i) if REVERSE else i) * C
        state, z, suffix_sum, edge = process_chunk(
            state, z, suffix_sum, edge, chunk_start, split_end, q, k, v, d_out, result, log_decay,
            segment_ids, padding_mask, inv_denom, delta, row_maxima, q_dq, d_log_decay, q_head,
            o_head, tokens, heads, num_rows, tile, bh, x_column, u_column, scale, map_scale, eps,
            q_token, k_token, v_token, o_token, gate_token, key_heads, D, E, G, C, BX, BU, MODE,
            MAP, DECAY, NORMALIZE, PACKED, PADDED, DECAY_GRAD, OPERAND, PRECISION, False,
        )  # fmt: skip
        whole_chunks += edge
    if DECAY != "none":
        if REVERSE:
            position = tl.minimum(split_start + (chunks - whole_chunks) * C, split_end)
        else:
            position = split_start + whole_chunks * C
        while (position > split_start) if REVERSE else (position < split_end):
            chunk_start = tl.maximum(position - WINDOW, split_start) if REVERSE else position
            edge = position - chunk_start
            state, z, suffix_sum, edge = process_chunk(
                state, z, suffix_sum, edge, chunk_start, split_end, q, k, v, d_out, result,
                log_decay, segment_ids, padding_mask, inv_denom, delta, row_maxima, q_dq,
                d_log_decay, q_head, o_head, tokens, heads, num_rows, tile, bh, x_column, u_column,
                scale, map_scale, eps, q_token, k_token, v_token, o_token, gate_token, key_heads, D,
                E, G, WINDOW, BX, BU, MODE, MAP, DECAY, NORMALIZE, PACKED, PADDED, DECAY_GRAD,
                OPERAND, PRECISION, True,
            )  # fmt: skip
            position = chunk_start + edge
    if DECAY != "none" and REVERSE:
        state *= first_decay_tile
        z *= first_decay
    is_last = n == 0 if REVERSE else n == num_splits - 1
    if is_last and (MODE == "out" or MODE == "dv"):
        store_tile(kv_last + bh * D * E, state, tile_offsets, x_column, u_column, X_SIZE, U_SIZE)
    if is_last and (MODE == "dk" or (MODE == "out" and tile == 0)):
        tl.store(z_last + bh * D + qk_column, z, mask=qk_column < D)
