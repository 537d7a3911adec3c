"""The kernel that makes outputs and gradients of causal linear attention, one span at a time.

All four are the same walk over chunks of C tokens with a state in registers,

    result_a = sum over b of w_ab (x_a y_b) u_b + x_a S,    then  S += sum over b of y_b u_b^T,

and nothing but its inputs, its result and one state per span passes through memory:

    MODE       walks      x    y    u    S            result
    "out"      forward    q    k    v    state        out, divided by q z + eps if NORMALIZE
    "shared"   forward    q    k    v    state        do out / denominator, summed; 1 / denominator
    "dq"       forward    do   v    k    state        dq
    "dv"       back       k    q    do   its gradient dv
    "dk"       back       v    do   q    its gradient dk, and the gradient of the log decays

Where normalised, do comes divided by the denominator, and the weights of dq and dk are less what
the row's weights share, ("shared"). q and k come through the feature map. x and y are whole; u, S
and the result are cut into tiles of columns, one a program, for a state must fit the registers.

No product of two tiles is transposed to be an operand of a third, and no accumulator is read before
its last product: compilers for Hopper were seen to get the first wrong.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.triton.linear_chunk import walk_chunk
from attnzoo.kernels.triton.linear_decays import first_decay
from attnzoo.kernels.triton.linear_parts import load_tile, store_tile

WINDOW: tl.constexpr = tl.constexpr(16)  # tokens walked together where decays are strong


# Sweep: see the table above.                           (arXiv:2006.16236, 2307.08621, 2312.06635)
#
# grid     (B * Hkv * N * tiles): one program walks one span of one key head, for one tile of u; the
#          tiles of a span are neighbours, so that x and y come from memory once
# reads    q, do [B, H, T, D or E], k, v [B, Hkv, T, D or E] by strides, of any type; state or its
#          gradient where each span begins (or ends), [B, Hkv, N, D, E] and [B, Hkv, N, D]
# writes   "out"     result [B, T, H, E]; kv_last, z_last, the state after the last token
#          "shared"  result [tiles, B, H, T]; inverse [B, H, T]; tops [2, B, H, T] for MAP "exp"
#          "dq"      result [B, T, H, D]; products, if WANT_DECAY: q dq over a key head's queries,
#                    [tiles, B, Hkv, T], or [B, Hkv, T, D] for a vector
#          "dv"      result [B, T, Hkv, E]; kv_last, the gradient of the first state
#          "dk"      result [B, T, Hkv, D]; z_last; d_log_decay, if WANT_DECAY, as products, from
#                    dg_t = dg_(t+1) + q_t dq_t - k_t dk_t and <S, dS> at the end of the span, for
#                    which kv_ends and z_ends are the states there
# scale    multiplies results, where not normalized; gradients of states come without it
# memory   per token and head: what the mode reads and writes, once
# limits   D, E <= 256; C a power of two; span a multiple of C
# oracle   ops.linear, impl="reference", and autograd through it
@triton.jit(do_not_specialize=["tokens", "spans"])
def sweep_kernel(
    q, k, v, d_out, result, log_decay, segment_ids, real,
    kv_states, z_states, kv_last, z_last, kv_ends, z_ends,
    inverse, shared, tops, products, d_log_decay,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, o_batch, o_head, gate_batch, gate_head,
    tokens, span, spans, scale, map_scale, eps,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, o_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BU: tl.constexpr, TILES: tl.constexpr, MODE: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, WANT_DECAY: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk one span; see above."""
    REVERSE: tl.constexpr = (MODE == "dv") or (MODE == "dk")
    INNER: tl.constexpr = (MODE != "dq") and (MODE != "dk")  # keys and queries are x and y
    XS: tl.constexpr = D if INNER else E
    US: tl.constexpr = E if INNER else D
    tile = tl.program_id(0) % TILES
    place = (tl.program_id(0) // TILES).to(tl.int64)
    n, bh = place % spans, place // spans
    stacked = tl.num_programs(0).to(tl.int64) // (TILES * spans)  # B * Hkv
    b, h = bh // key_heads, bh % key_heads
    heads = key_heads * G
    q += b * q_batch + h * G * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    d_out += b * o_batch + h * G * o_head
    log_decay += b * gate_batch + h * gate_head
    segment_ids += b * tokens
    real += b * tokens
    rows = (b * heads + h * G) * tokens
    inverse, shared, tops = inverse + rows, shared + rows, tops + rows
    all_rows = stacked * G * tokens
    if REVERSE:
        result += (b * tokens * key_heads + h) * US
    elif MODE == "shared":
        result += rows
    else:
        result += (b * tokens * heads + h * G) * US
    xc, uc = tl.arange(0, BX), tile * BU + tl.arange(0, BU)
    gc = xc if INNER else uc  # columns of queries and keys, and of a decay per channel
    if INNER:
        at_tile = xc[:, None] * E + uc[None, :]
    else:
        at_tile = uc[None, :] * E + xc[:, None]
    state = load_tile(kv_states + place * D * E, at_tile, xc, uc, XS, US)
    z = tl.load(z_states + place * D + gc, mask=gc < D, other=0.0)
    start = (n * span).to(tl.int32)
    stop = tl.minimum(start + span, tokens)
    chunks = (stop - start + C - 1) // C
    enter = first_decay(log_decay + start.to(tl.int64) * gate_token, gc, DECAY, D)
    if DECAY == "vector":
        enters = enter[:, None] if INNER else enter[None, :]
    else:
        enters = enter
    crossing = 0.0
    if WANT_DECAY and MODE == "dk":
        ends = load_tile(kv_ends + place * D * E, at_tile, xc, uc, XS, US)
        z_end = tl.load(z_ends + place * D + gc, mask=gc < D, other=0.0)
        crossing = tl.sum(ends * state, 0) + z_end * z  # what passes the end of the span
        if DECAY == "scalar":
            crossing = tl.sum(crossing, 0)
        crossing *= scale
    if DECAY != "none" and not REVERSE:
        state *= enters
        z *= enter
    walked = tl.zeros((), tl.int32)  # chunks, until a decay is too strong for a whole one
    edge = walked + 1
    for i in range(chunks):
        first = start + ((chunks - 1 - i) if REVERSE else i) * C
        state, z, crossing, edge = walk_chunk(
            state, z, crossing, edge, first, stop, q, k, v, d_out, result, log_decay, segment_ids,
            real, inverse, shared, tops, products, d_log_decay, q_head, o_head, tokens, heads,
            all_rows, tile, bh, xc, uc, scale, map_scale, eps, q_token, k_token, v_token, o_token,
            gate_token, key_heads, D, E, G, C, BX, BU, MODE, MAP, DECAY, NORMALIZE, PACKED, PADDED,
            WANT_DECAY, OPERAND, PRECISION, False,
        )  # fmt: skip
        walked += edge
    if DECAY != "none":
        if REVERSE:
            at = tl.minimum(start + (chunks - walked) * C, stop)
        else:
            at = start + walked * C
        while (at > start) if REVERSE else (at < stop):
            first = tl.maximum(at - WINDOW, start) if REVERSE else at
            edge = at - first
            state, z, crossing, edge = walk_chunk(
                state, z, crossing, edge, first, stop, q, k, v, d_out, result, log_decay,
                segment_ids, real, inverse, shared, tops, products, d_log_decay, q_head,
                o_head, tokens, heads, all_rows, tile, bh, xc, uc, scale, map_scale, eps,
                q_token, k_token, v_token, o_token, gate_token, key_heads, D, E, G, WINDOW, BX,
                BU, MODE, MAP, DECAY, NORMALIZE, PACKED, PADDED, WANT_DECAY, OPERAND,
                PRECISION, True,
            )  # fmt: skip
            at = first + edge
    if DECAY != "none" and REVERSE:
        state *= enters
        z *= enter
    ends_here = n == 0 if REVERSE else n == spans - 1
    if ends_here and (MODE == "out" or MODE == "dv"):
        store_tile(kv_last + bh * D * E, state, at_tile, xc, uc, XS, US)
    if ends_here and (MODE == "dk" or (MODE == "out" and tile == 0)):
        tl.store(z_last + bh * D + gc, z, mask=gc < D)
