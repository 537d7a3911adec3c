"""Cut a sequence into spans, so that few heads fill a large chip: sums per span, and their scan.

With them every span knows the state that it begins with, and all are walked at once by
:mod:`attnzoo.kernels.triton.linear_sweep`. Where there are heads enough, a sequence is one span,
and none of this runs.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size, N spans, C tokens in a
chunk, F decays per token (1 or D).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.triton.linear_chunk import divided, key_features, query_features
from attnzoo.kernels.triton.linear_decays import borders, scalar_gates, through, vector_gates
from attnzoo.kernels.triton.linear_parts import column_sums, load_rows, product, store_tile


# Span sums: what the tokens of a span add to the state.                       (arXiv:2006.16236)
#   forward    S[n] = sum over the tokens j of span n of w_j k_j v_j^T, z[n] likewise of k_j;
#              w_j is what the decay leaves of token j at the end of the span
#   REVERSE    the gradient of the state: of w_i q_i do_i^T over all rows, do already divided by the
#              denominator, and of -w_i shared_i q_i; w_i is left from the span's start to token i
#
# grid     (B * Hkv * N * tiles): one program walks one span of one key head, for one tile of values
# reads    x (k, or q) and y (v, or do); of T tokens, by strides, any float type
# writes   kv [B, Hkv, N, D, E], z [B, Hkv, N, D], carry [B, Hkv, N, F]; float32
# limits   D, E <= 256; C a power of two; span a multiple of C
# oracle   ops.linear, impl="reference"
@triton.jit(do_not_specialize=["tokens", "spans"])
def span_sums_kernel(
    x, y, log_decay, segment_ids, real, inverse, shared, kv_sums, z_sums, carries,
    x_batch, x_head, y_batch, y_head, gate_batch, gate_head,
    tokens, span, spans, scale, map_scale,
    x_token: tl.constexpr, y_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BU: tl.constexpr, TILES: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr, PADDED: tl.constexpr, WANT_DECAY: tl.constexpr, REVERSE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum up one span; see above."""
    SCALAR: tl.constexpr = DECAY == "scalar"
    VECTOR: tl.constexpr = DECAY == "vector"
    HEADS: tl.constexpr = G if REVERSE else 1  # of x and y, for each key head
    EXACT: tl.constexpr = ("left" if VECTOR else "right") if WANT_DECAY else ""
    tile = tl.program_id(0) % TILES
    place = (tl.program_id(0) // TILES).to(tl.int64)
    n, bh = place % spans, place // spans
    b, h = bh // key_heads, bh % key_heads
    x += b * x_batch + h * HEADS * x_head
    y += b * y_batch + h * HEADS * y_head
    log_decay += b * gate_batch + h * gate_head
    segment_ids += b * tokens
    real += b * tokens
    key = tl.arange(0, C)
    d, e = tl.arange(0, BX), tile * BU + tl.arange(0, BU)
    start = (n * span).to(tl.int32)
    stop = tl.minimum(start + span, tokens)
    chunks = (stop - start + C - 1) // C
    unread = n == 0 if REVERSE else n == spans - 1  # nothing comes after the last span
    chunks = tl.where(unread, 0, chunks)
    kv, z = tl.zeros((BX, BU), tl.float32), tl.zeros((BX,), tl.float32)
    carried = tl.full((BX,), 1.0, tl.float32)
    if REVERSE:  # what is left from the start of a chunk to a token, or of a token at its end
        left_by = key[:, None] >= key[None, :]
    else:
        left_by = key[:, None] < key[None, :]
    for i in range(chunks):
        first = start + ((chunks - 1 - i) if REVERSE else i) * C
        here = first.to(tl.int64)
        inside = key < tokens - first
        if PADDED and not REVERSE:
            inside = inside & (tl.load(real + here + key, mask=inside, other=0) != 0)
        weights = tl.full((C,), 1.0, tl.float32)
        if VECTOR:
            log_decays = log_decay + here * gate_token
            gates = vector_gates(log_decays, gate_token, key, d, tokens - first, D)
            if C >= 32:
                left = tl.exp2(through(gates, left_by, OPERAND, PRECISION))
            elif REVERSE:
                left = tl.exp2(tl.cumsum(gates, 0))
            else:
                later = vector_gates(
                    log_decays + gate_token, gate_token, key, d, stop - first - 1, D
                )
                later = tl.where((key < C - 1)[:, None], later, 0.0)
                left = tl.exp2(tl.cumsum(later, 0, reverse=True))
            carry = tl.exp2(column_sums(gates, weights, True, OPERAND, PRECISION, "left"))
        if SCALAR:
            gates = scalar_gates(log_decay + here * gate_token, gate_token, key, tokens - first)
            if REVERSE:
                weights = tl.exp2(tl.cumsum(gates, 0).to(tl.float32))
            else:  # nothing is taken from the sum of all: that would cancel
                later = scalar_gates(
                    log_decay + (here + 1) * gate_token, gate_token, key, stop - first - 1
                )
                later = tl.where(key < C - 1, later, 0.0)
                weights = tl.exp2(tl.cumsum(later, 0, reverse=True).to(tl.float32))
            carry = tl.exp2(tl.sum(gates, 0).to(tl.float32))
        if PACKED:
            part, last_part = borders(segment_ids, first, key, key < tokens - first)
            joined = (last_part == 0).to(tl.float32)
            weights *= ((part == 0) if REVERSE else (part == last_part)).to(tl.float32)
            carry = carry * joined if VECTOR or SCALAR else joined
        if VECTOR or SCALAR or PACKED:
            kv *= carry[:, None] if VECTOR else carry
            z *= carry
            carried *= carry
        for g in range(HEADS):
            at = (bh * HEADS + g) * tokens + here
            if REVERSE:
                raw, xs, top, ties = query_features(
                    x + g * x_head + here * x_token, x, key, x_token, d, inside, map_scale,
                    MAP, True, D, OPERAND,
                )  # fmt: skip
                ys = divided(
                    y + g * y_head + here * y_token,
                    inverse + at,
                    key,
                    y_token,
                    e,
                    inside,
                    NORMALIZE,
                    E,
                    OPERAND,
                )
            else:
                raw, xs = key_features(
                    x + here * x_token, key, x_token, d, inside, map_scale, MAP, PADDED, D, OPERAND
                )
                ys = load_rows(y + here * y_token, key, y_token, e, inside, E).to(OPERAND)
            if VECTOR:
                xs = xs * left
            if SCALAR or PACKED:
                ys = ys * weights[:, None]
            kv = product(tl.trans(xs), ys, kv, OPERAND, PRECISION, EXACT)
            if REVERSE and NORMALIZE:
                common = tl.load(shared + at + key, mask=inside, other=0.0)
                z -= column_sums(xs, common * weights, True, OPERAND, PRECISION, "both")
            if not REVERSE:
                here_too = tl.where(inside, weights, 0.0)
                z += column_sums(xs, here_too, True, OPERAND, PRECISION, "both")
    store_tile(kv_sums + place * D * E, kv, d[:, None] * E + e[None, :], d, e, D, E)
    if tile == 0:
        tl.store(z_sums + place * D + d, z, mask=d < D)
        if VECTOR:
            tl.store(carries + place * D + d, carried, mask=d < D)
        else:
            tl.store(carries + place + d, carried, mask=d < 1)


# Span scan: turn what each span adds into the state at its start, or, REVERSE, into the gradient of
# the state at its end; in place.
#   state[n + 1] = carry[n] * state[n] + sums[n], state[0] given
#   REVERSE        end[n - 1] = carry[n] * end[n] + sums[n], end[N - 1] given
#
# grid     (B * Hkv, D * E / BLOCK)
# reads    given [B, Hkv, D, E], carry [B, Hkv, N, F], float32; also for z, with E = 1
# writes   sums [B, Hkv, N, D, E], float32, over what it reads
# oracle   ops.linear, impl="reference"
@triton.jit(do_not_specialize=["spans"])
def span_scan_kernel(
    sums, given, carries, spans,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Scan over the spans of one key head; see above."""
    bh, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    inside = at < D * E
    state = tl.load(given + bh * D * E + at, mask=inside, other=0.0)
    for i in range(spans):
        place = bh * spans + ((spans - 1 - i) if REVERSE else i)
        added = tl.load(sums + place * D * E + at, mask=inside, other=0.0)
        each: tl.constexpr = 1 if F > 1 else 0
        carry = tl.load(carries + place * F + at // E * each, mask=inside, other=0.0)
        tl.store(sums + place * D * E + at, state, mask=inside)
        state = state * carry + added
