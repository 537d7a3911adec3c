"""Triton kernels that compute the state at the start of each split of a sequence.

With few heads, one program per head would leave most of a GPU idle. The sequence is then divided
into splits: :func:`split_sums_kernel` sums each split, :func:`split_scan_kernel` scans the sums,
and the kernels of the output and of the gradients process all splits in parallel. With many heads,
the sequence is one split and these kernels do not run.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size, N splits, C tokens of
a chunk, F decays per token (1 or D).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.ops.linear.triton.decay import (
    load_scalar_gates,
    load_vector_gates,
    number_segments,
)
from attnzoo.ops.linear.triton.parts import (
    load_rows,
    store_tile,
    weighted_column_sums,
)
from attnzoo.ops.linear.triton.rows import (
    as_int64,
    load_d_out,
    load_key_features,
    load_query_features,
)
from attnzoo.runtime.triton_products import dot_add


# Split sums: the sums of each split from a zero state.                       (arXiv:2006.16236)
#   forward    kv[n] = sum over tokens j of split n of w_j k_j v_j^T, z[n] = sum of w_j k_j;
#              w_j is the decay from token j to the end of the split
#   REVERSE    the gradient of the state at the start of the split: kv[n] = sum over i of
#              w_i q_i do_i^T, with do divided by the denominator, z[n] = -sum of w_i delta_i q_i;
#              w_i is the decay from the start of the split to token i
#
# grid     (B * Hkv * N * tiles): one program sums one split of one key head, for one tile of values
# reads    x (k; REVERSE: q) and y (v; REVERSE: do), any strides and float dtypes
# writes   kv_sums [B, Hkv, N, D, E], z_sums [B, Hkv, N, D], split_decays [B, Hkv, N, F], float32
# limits   D, E <= 256; C a power of two; split_size a multiple of C
# oracle   linear_attention(impl="reference"), on a GPU and with TRITON_INTERPRET=1
@triton.jit(do_not_specialize=["tokens", "num_splits"])
def split_sums_kernel(
    x, y, log_decay, segment_ids, padding_mask, inv_denom, delta, kv_sums, z_sums, split_decays,
    x_batch, x_head, y_batch, y_head, gate_batch, gate_head,
    tokens, split_size, num_splits, scale, map_scale,
    x_token: tl.constexpr, y_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BU: tl.constexpr, TILES: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    DIVIDE: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr, DECAY_GRAD: tl.constexpr,
    REVERSE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum one split; see above."""
    SCALAR: tl.constexpr = DECAY == "scalar"
    VECTOR: tl.constexpr = DECAY == "vector"
    HEADS: tl.constexpr = G if REVERSE else 1  # heads of x and y per key head
    EXACT_UPDATE: tl.constexpr = ("left" if VECTOR else "right") if DECAY_GRAD else ""
    tile = tl.program_id(0) % TILES
    split_index = (tl.program_id(0) // TILES).to(tl.int64)
    n, bh = split_index % num_splits, split_index // num_splits
    b, h = bh // key_heads, bh % key_heads
    x += b * x_batch + h * HEADS * x_head
    y += b * y_batch + h * HEADS * y_head
    log_decay += b * gate_batch + h * gate_head
    segment_ids += b * tokens
    padding_mask += b * tokens
    x_head, y_head = as_int64(x_head), as_int64(y_head)
    token = tl.arange(0, C)
    d, e = tl.arange(0, BX), tile * BU + tl.arange(0, BU)
    split_start = (n * split_size).to(tl.int32)
    split_end = tl.minimum(split_start + split_size, tokens)
    chunks = (split_end - split_start + C - 1) // C
    unused = n == 0 if REVERSE else n == num_splits - 1  # the sums of the last split in scan order
    chunks = tl.where(unused, 0, chunks)
    kv, z = tl.zeros((BX, BU), tl.float32), tl.zeros((BX,), tl.float32)
    split_decay = tl.full((BX,), 1.0, tl.float32)
    for i in range(chunks):
        chunk_start = split_start + ((chunks - 1 - i) if REVERSE else i) * C
        base = chunk_start.to(tl.int64)
        in_bounds = token < tokens - chunk_start
        if PADDED and not REVERSE:
            in_bounds = in_bounds & (
                tl.load(padding_mask + base + token, mask=in_bounds, other=0) != 0
            )
        token_weights = tl.full((C,), 1.0, tl.float32)
        if VECTOR:
            log_decays, in_split = log_decay + base * gate_token, token < split_end - chunk_start
            gates = load_vector_gates(log_decays, gate_token, token, d, in_split, D)
            if REVERSE:  # not a product, because x is transposed for another one
                token_decay = tl.exp2(tl.cumsum(gates, 0))
            else:
                later = (token < C - 1) & (token < split_end - chunk_start - 1)
                next_gates = load_vector_gates(
                    log_decays + gate_token, gate_token, token, d, later, D
                )
                token_decay = tl.exp2(tl.cumsum(next_gates, 0, reverse=True))
            state_decay = tl.exp2(
                weighted_column_sums(gates, token_weights, OPERAND, PRECISION, "left")
            )
        if SCALAR:
            gates = load_scalar_gates(
                log_decay + base * gate_token, gate_token, token, tokens - chunk_start
            )
            if REVERSE:
                token_weights = tl.exp2(tl.cumsum(gates, 0).to(tl.float32))
            else:  # a difference of cumulative sums would cancel
                next_gates = load_scalar_gates(
                    log_decay + (base + 1) * gate_token,
                    gate_token,
                    token,
                    split_end - chunk_start - 1,
                )
                next_gates = tl.where(token < C - 1, next_gates, 0.0)
                token_weights = tl.exp2(tl.cumsum(next_gates, 0, reverse=True).to(tl.float32))
            state_decay = tl.exp2(tl.sum(gates, 0).to(tl.float32))
        if PACKED:
            segment, last_segment = number_segments(
                segment_ids, chunk_start, token, token < tokens - chunk_start
            )
            one_segment = (last_segment == 0).to(tl.float32)
            token_weights *= ((segment == 0) if REVERSE else (segment == last_segment)).to(
                tl.float32
            )
            state_decay = state_decay * one_segment if VECTOR or SCALAR else one_segment
        if VECTOR or SCALAR or PACKED:
            kv *= state_decay[:, None] if VECTOR else state_decay
            z *= state_decay
            split_decay *= state_decay
        for g in range(HEADS):
            offset = (bh * HEADS + g) * tokens + base
            if REVERSE:
                raw, x_phi, row_max, ties = load_query_features(
                    x + g * x_head + base * x_token, x, token, x_token, d, in_bounds, map_scale,
                    MAP, True, D, OPERAND,
                )  # fmt: skip
                y_rows = load_d_out(
                    y + g * y_head + base * y_token,
                    inv_denom + offset,
                    token,
                    y_token,
                    e,
                    in_bounds,
                    DIVIDE,
                    E,
                    OPERAND,
                )
            else:
                raw, x_phi = load_key_features(
                    x + base * x_token,
                    token,
                    x_token,
                    d,
                    in_bounds,
                    map_scale,
                    MAP,
                    PADDED,
                    D,
                    OPERAND,
                )
                y_rows = load_rows(y + base * y_token, token, y_token, e, in_bounds, E).to(OPERAND)
            if VECTOR:
                x_phi = x_phi * token_decay
            if SCALAR or PACKED:
                y_rows = y_rows * token_weights[:, None]
            kv = dot_add(tl.trans(x_phi), y_rows, kv, OPERAND, PRECISION, EXACT_UPDATE)
            if REVERSE and NORMALIZE:
                delta_rows = tl.load(delta + offset + token, mask=in_bounds, other=0.0)
                z -= weighted_column_sums(
                    x_phi, delta_rows * token_weights, OPERAND, PRECISION, "both"
                )
            if not REVERSE:
                key_weights = tl.where(in_bounds, token_weights, 0.0)
                z += weighted_column_sums(x_phi, key_weights, OPERAND, PRECISION, "both")
    store_tile(kv_sums + split_index * D * E, kv, d[:, None] * E + e[None, :], d, e, D, E)
    if tile == 0:
        tl.store(z_sums + split_index * D + d, z, mask=d < D)
        if VECTOR:
            tl.store(split_decays + split_index * D + d, split_decay, mask=d < D)
        else:
            tl.store(split_decays + split_index + d, split_decay, mask=d < 1)


@triton.jit
def scan_block(
    sums, initial, split_decays, num_splits, bh, block,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Scan a block of elements of one key head's state ``[D, E]`` over the splits."""
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    in_bounds = offsets < D * E
    state = tl.load(initial + bh * D * E + offsets, mask=in_bounds, other=0.0)
    for i in range(num_splits):
        split_index = bh * num_splits + ((num_splits - 1 - i) if REVERSE else i)
        split_sum = tl.load(sums + split_index * D * E + offsets, mask=in_bounds, other=0.0)
        HAS_COLUMNS: tl.constexpr = 1 if F > 1 else 0
        split_decay = tl.load(
            split_decays + split_index * F + offsets // E * HAS_COLUMNS, mask=in_bounds, other=0.0
        )
        tl.store(sums + split_index * D * E + offsets, state, mask=in_bounds)
        state = state * split_decay + split_sum


# Split scan: an exclusive scan in place, which replaces the sums of each split by the state at its
# start, or, REVERSE, by the gradient of the state at its end.
#   state[n + 1] = split_decays[n] * state[n] + sums[n], state[0] = initial
#   REVERSE: end[n - 1] = split_decays[n] * end[n] + sums[n], end[N - 1] = initial
#
# grid     (B * Hkv, ceil(D * E / BLOCK) + ceil(D / BLOCK)): one program scans BLOCK elements of one
#          key head's state, or, the last ones, of its z
# reads    kv_first [B, Hkv, D, E], z_first [B, Hkv, D], split_decays [B, Hkv, N, F], float32
# writes   kv_sums [B, Hkv, N, D, E], z_sums [B, Hkv, N, D], float32, in place
# limits   none on D and E; splits are scanned sequentially
# oracle   linear_attention(impl="reference"), on a GPU and with TRITON_INTERPRET=1
@triton.jit(do_not_specialize=["num_splits"])
def split_scan_kernel(
    kv_sums, kv_first, z_sums, z_first, split_decays, num_splits,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Scan over the splits of one key head; see above."""
    KV_BLOCKS: tl.constexpr = (D * E + BLOCK - 1) // BLOCK
    bh, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if block < KV_BLOCKS:
        scan_block(kv_sums, kv_first, split_decays, num_splits, bh, block, D, E, F, BLOCK, REVERSE)
    else:
        block -= KV_BLOCKS
        scan_block(z_sums, z_first, split_decays, num_splits, bh, block, D, 1, F, BLOCK, REVERSE)
