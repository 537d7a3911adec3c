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

from attnzoo.kernels.triton.linear_parts import (
    features,
    features_backward,
    largest,
    load_rows,
    load_tile,
    product,
    scalar_gates,
    scalar_pairs,
    scalar_spans,
    since_block,
    store_rows,
    store_tile,
    until_block_end,
    vector_gates,
    vector_scores,
    vector_sums,
)


@triton.jit
def query_features(
    q, tops, token, token_stride, column, inside, scale, map_scale,
    MAP: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Load queries and map them; ``tops`` has the largest exponents where rows are not whole."""
    raw = load_rows(q, token, token_stride, column, inside, D).to(tl.float32)
    top, ties = tl.zeros(token.shape, tl.float32), tl.full(token.shape, 1.0, tl.float32)
    if MAP == "exp":
        if WHOLE:
            top, ties = largest(raw, column, map_scale, D)
        else:
            top = tl.load(tops + token, mask=inside, other=0.0)
    mapped = features(raw, top, inside, column, map_scale, MAP, "queries", D)
    return raw, (mapped * scale).to(OPERAND), top, ties


@triton.jit
def key_features(
    k, token, token_stride, column, inside, map_scale,
    MAP: tl.constexpr, D: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Load keys and map them."""
    raw = load_rows(k, token, token_stride, column, inside, D)
    mapped = raw
    if MAP != "identity":
        nothing = tl.zeros(token.shape, tl.float32)
        mapped = features(raw.to(tl.float32), nothing, inside, column, map_scale, MAP, "keys", D)
    return raw, mapped.to(OPERAND)


@triton.jit
def divided(
    d_out, inverse, token, token_stride, column, inside,
    NORMALIZE: tl.constexpr, E: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Load gradients of the output, divided by the denominators; rounded alike in every mode."""
    rows = load_rows(d_out, token, token_stride, column, inside, E)
    if NORMALIZE:
        rows = rows.to(tl.float32) * tl.load(inverse + token, mask=inside, other=0.0)[:, None]
    return rows.to(OPERAND)


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
# memory   per token and head: what the mode reads and writes, once
# limits   D, E <= 256; C a power of two; span a multiple of C
# oracle   ops.linear, impl="reference", and autograd through it
@triton.jit(do_not_specialize=["tokens", "spans", "key_heads"])
def sweep_kernel(
    q, k, v, d_out, result, log_decay, segment_ids, real,
    kv_states, z_states, kv_last, z_last, kv_ends, z_ends,
    inverse, shared, tops, products, d_log_decay,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    o_batch, o_head, o_token, gate_batch, gate_head, gate_token,
    tokens, span, spans, key_heads, scale, map_scale, eps,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    BX: tl.constexpr, BU: tl.constexpr, TILES: tl.constexpr, MODE: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, WANT_DECAY: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk one span; see above."""
    REVERSE: tl.constexpr = (MODE == "dv") or (MODE == "dk")
    INNER: tl.constexpr = (MODE != "dq") and (MODE != "dk")  # keys and queries are x and y
    SCALAR: tl.constexpr = (DECAY == "scalar") or (PACKED and DECAY == "none")
    VECTOR: tl.constexpr = DECAY == "vector"
    DIVIDE: tl.constexpr = NORMALIZE and INNER and not REVERSE
    LESS: tl.constexpr = NORMALIZE and not INNER
    CANCELS: tl.constexpr = (MODE == "shared") or LESS or (WANT_DECAY and not INNER)
    FINE: tl.constexpr = "right" if CANCELS else ""
    ALONE: tl.constexpr = "both" if VECTOR and not INNER else "left"
    WEIGHTS: tl.constexpr = ALONE if CANCELS else ""
    EXACT: tl.constexpr = "right" if WANT_DECAY and (not INNER) and (VECTOR or SCALAR) else ""
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
    rows_at = (b * heads + h * G) * tokens  # of inverse, shared and tops
    if REVERSE:
        result += (b * tokens * key_heads + h) * US
    elif MODE != "shared":
        result += (b * tokens * heads + h * G) * US
    key = tl.arange(0, C)
    xc, uc = tl.arange(0, BX), tile * BU + tl.arange(0, BU)
    gc = xc if INNER else uc  # columns of queries and keys, and of a decay per channel
    if INNER:
        at_tile = xc[:, None] * E + uc[None, :]
    else:
        at_tile = uc[None, :] * E + xc[:, None]
    state = load_tile(kv_states + place * D * E, at_tile, xc, uc, XS, US)
    z = tl.load(z_states + place * D + gc, mask=gc < D, other=0.0)
    if WANT_DECAY and MODE == "dk":
        ends = load_tile(kv_ends + place * D * E, at_tile, xc, uc, XS, US)
        z_end = tl.load(z_ends + place * D + gc, mask=gc < D, other=0.0)
        crossing = tl.sum(ends * state, 0) + z_end * z  # what passes the end of the span
        if SCALAR:
            crossing = tl.sum(crossing, 0)
    start = (n * span).to(tl.int32)
    stop = tl.minimum(start + span, tokens)
    chunks = (stop - start + C - 1) // C
    if REVERSE:
        seen = key[:, None] <= key[None, :]
    else:
        seen = key[:, None] >= key[None, :]
    for i in range(chunks):
        first = start + ((chunks - 1 - i) if REVERSE else i) * C
        here = first.to(tl.int64)
        inside = key < tokens - first
        own = inside
        if PADDED:
            own = own & (tl.load(real + here + key, mask=inside, other=0) != 0)
        if VECTOR:
            gates = vector_gates(
                log_decay, gate_token, segment_ids, first, 0, key, gc, tokens, PACKED, D
            )
            later = vector_gates(
                log_decay, gate_token, segment_ids, first, 1, key, gc, tokens, PACKED, D
            )
            carry = tl.exp(tl.sum(gates, 0))
            reads, writes = since_block(gates, C), until_block_end(later, C)
        if SCALAR:
            gates = scalar_gates(
                log_decay, gate_token, segment_ids, first, key, tokens, DECAY, PACKED
            )
            sums, reads, writes, carry = scalar_spans(gates)
            if REVERSE:
                pairs = scalar_pairs(sums[None, :] - sums[:, None], seen)
            else:
                pairs = scalar_pairs(sums[:, None] - sums[None, :], seen)

        # Keys and values: y and u on the way forward, x and the rows of the result on the way back
        if INNER:
            raw, mapped = key_features(
                k + here * k_token, key, k_token, xc, own, map_scale, MAP, D, OPERAND
            )
            other = load_rows(v + here * v_token, key, v_token, uc, own, E).to(OPERAND)
        else:
            raw, mapped = key_features(
                k + here * k_token, key, k_token, uc, own, map_scale, MAP, D, OPERAND
            )
            other = load_rows(v + here * v_token, key, v_token, xc, own, E).to(OPERAND)
        if REVERSE:
            x = mapped if INNER else other
            total = tl.zeros((C, BU), tl.float32)
            if VECTOR and INNER:
                total = product(x * writes, state, total, OPERAND, PRECISION, FINE)
                state *= carry[:, None]
            else:
                total = product(x, state, total, OPERAND, PRECISION, FINE)
                if not INNER:
                    total += z[None, :]
                if VECTOR:
                    total *= writes
                    state *= carry[None, :]
                if SCALAR:
                    total *= writes[:, None]
                    state *= carry
            if VECTOR or SCALAR:
                z *= carry
        if MODE == "dq" and WANT_DECAY:
            both = tl.zeros((C, BU) if VECTOR else (C,), tl.float32)

        for g in range(G):
            at = rows_at + g * tokens + here
            if INNER and not REVERSE:
                q_raw, x, top, ties = query_features(
                    q + g * q_head + here * q_token,
                    tops + at, key, q_token, xc, inside, scale, map_scale,
                    MAP, True, D, OPERAND,
                )  # fmt: skip
                y, u = mapped, other
            elif INNER:
                q_raw, y, top, ties = query_features(
                    q + g * q_head + here * q_token,
                    tops + at, key, q_token, xc, inside, scale, map_scale,
                    MAP, True, D, OPERAND,
                )  # fmt: skip
                u = divided(
                    d_out + g * o_head + here * o_token,
                    inverse + at,
                    key,
                    o_token,
                    uc,
                    inside,
                    NORMALIZE,
                    E,
                    OPERAND,
                )
            else:
                q_raw, q_mapped, top, ties = query_features(
                    q + g * q_head + here * q_token, tops + at,
                    key, q_token, uc, inside, scale, map_scale,
                    MAP, False, D, OPERAND,
                )  # fmt: skip
                d_rows = divided(
                    d_out + g * o_head + here * o_token,
                    inverse + at,
                    key,
                    o_token,
                    xc,
                    inside,
                    NORMALIZE,
                    E,
                    OPERAND,
                )
                if REVERSE:
                    y, u = d_rows, q_mapped
                else:
                    x, y, u = d_rows, other, mapped
            if LESS:
                common = tl.load(shared + at + key, mask=inside, other=0.0)

            if VECTOR and INNER:
                scores = vector_scores(x, y, gates, later, LEVELS, REVERSE, OPERAND, PRECISION)
            else:
                scores = tl.zeros((C, C), tl.float32)
                scores = product(x, tl.trans(y), scores, OPERAND, PRECISION, "")
                if LESS:
                    scores -= common[None, :] if REVERSE else common[:, None]
                if SCALAR:
                    scores *= pairs
                elif not VECTOR:
                    scores = tl.where(seen, scores, 0.0)

            if not REVERSE:
                total = tl.zeros((C, BU), tl.float32)
                if VECTOR and INNER:
                    reading = x * reads
                    total = product(reading, state, total, OPERAND, PRECISION, FINE)
                else:
                    total = product(x, state, total, OPERAND, PRECISION, FINE)
                    if LESS:
                        total -= common[:, None] * z[None, :]
                    if VECTOR:
                        total *= reads
                    if SCALAR:
                        total *= reads[:, None]
            if VECTOR and not INNER:
                total = vector_sums(
                    scores, u, total, gates, later, LEVELS, REVERSE, OPERAND, PRECISION, WEIGHTS
                )
            else:
                total = product(scores, u, total, OPERAND, PRECISION, WEIGHTS)

            if DIVIDE:
                if VECTOR:
                    carried = tl.sum(reading * z[None, :], 1)
                else:
                    carried = tl.sum(x.to(tl.float32) * z[None, :], 1)
                if SCALAR:
                    carried *= reads
                divisor = 1 / (tl.sum(scores, 1) + carried + eps)
                total *= divisor[:, None]
            if MODE == "out":
                store_rows(result + g * E + here * heads * E, total, key, heads * E, uc, inside, E)
            if MODE == "shared":
                d_rows = load_rows(
                    d_out + g * o_head + here * o_token, key, o_token, uc, inside, E
                ).to(tl.float32)
                if NORMALIZE:
                    d_rows = (d_rows * divisor[:, None]).to(OPERAND).to(tl.float32)
                    tl.store(inverse + at + key, divisor, mask=inside)
                if MAP == "exp":
                    tl.store(tops + at + key, top, mask=inside)
                    tl.store(tops + stacked * G * tokens + at + key, ties, mask=inside)
                at += tile * stacked * G * tokens
                tl.store(result + at + key, tl.sum(total * d_rows, 1), mask=inside)
            if MODE == "dq":
                if WANT_DECAY:
                    each = q_mapped.to(tl.float32) * total
                    both += each if VECTOR else tl.sum(each, 1)
                share = top
                if MAP == "exp":  # q dq of the whole row: what the maximum gets
                    share = tl.load(shared + at + key, mask=inside, other=0.0)
                    share = share * eps if NORMALIZE else share
                    share /= tl.load(tops + stacked * G * tokens + at + key, mask=inside, other=1.0)
                total = features_backward(
                    total * scale, q_raw, top, share, map_scale, MAP, "queries"
                )
                store_rows(result + g * D + here * heads * D, total, key, heads * D, uc, inside, D)
            if REVERSE:
                if VECTOR and INNER:
                    y = (y * reads).to(OPERAND)
                weighed = u.to(tl.float32)
                if VECTOR and not INNER:
                    weighed = weighed * reads
                if SCALAR:
                    weighed = weighed * reads[:, None]
                state = product(tl.trans(y), weighed, state, OPERAND, PRECISION, EXACT)
                if LESS:
                    z -= tl.sum(weighed * common[:, None], 0)

        if not REVERSE:
            if INNER:
                y, u = mapped, other
                if VECTOR:
                    y = (y * writes).to(OPERAND)
                if SCALAR:
                    y = (y.to(tl.float32) * writes[:, None]).to(OPERAND)
                if VECTOR:
                    state *= carry[:, None]
                z = z * carry if VECTOR or SCALAR else z
                z += tl.sum(y.to(tl.float32), 0)
                weighed = u
            else:
                y, weighed = other, mapped.to(tl.float32)
                if VECTOR:
                    weighed = weighed * writes
                    state *= carry[None, :]
                if SCALAR:
                    weighed = weighed * writes[:, None]
                z = z * carry if VECTOR or SCALAR else z
                z += tl.sum(weighed, 0)
            if SCALAR:
                state *= carry
            state = product(tl.trans(y), weighed, state, OPERAND, PRECISION, EXACT)
            if MODE == "dq" and WANT_DECAY:
                if VECTOR:
                    store_rows(products + (bh * tokens + here) * D, both, key, D, uc, inside, D)
                else:
                    at = (tile * stacked + bh) * tokens + here + key
                    tl.store(products + at, both, mask=inside)
        if MODE == "dv":
            store_rows(result + here * key_heads * E, total, key, key_heads * E, uc, inside, E)
        if MODE == "dk":
            if WANT_DECAY:
                each = mapped.to(tl.float32) * total
                if VECTOR:
                    at = (bh * tokens + here) * D
                    change = load_rows(products + at, key, D, uc, inside, D) - each
                    change = tl.cumsum(change, 0, reverse=True) + crossing[None, :]
                    store_rows(d_log_decay + at, change, key, D, uc, inside, D)
                    crossing = tl.sum(tl.where((key == 0)[:, None], change, 0.0), 0)
                else:
                    at = (tile * stacked + bh) * tokens + here + key
                    change = tl.load(products + at, mask=inside, other=0.0) - tl.sum(each, 1)
                    change = tl.cumsum(change, 0, reverse=True) + crossing
                    tl.store(d_log_decay + at, change, mask=inside)
                    crossing = tl.sum(tl.where(key == 0, change, 0.0), 0)
            nothing = tl.zeros((C,), tl.float32)
            total = features_backward(
                total, raw.to(tl.float32), nothing, nothing, map_scale, MAP, "keys"
            )
            total = tl.where(own[:, None], total, 0.0)
            store_rows(result + here * key_heads * D, total, key, key_heads * D, uc, inside, D)
    ends_here = n == 0 if REVERSE else n == spans - 1
    if ends_here and (MODE == "out" or MODE == "dv"):
        store_tile(kv_last + bh * D * E, state, at_tile, xc, uc, XS, US)
    if ends_here and (MODE == "dk" or (MODE == "out" and tile == 0)):
        tl.store(z_last + bh * D + gc, z, mask=gc < D)
