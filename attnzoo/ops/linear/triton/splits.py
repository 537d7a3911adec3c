"""Triton kernels that compute the state between the splits of a sequence, and where splits are.

With few heads, one program per head would leave most of a GPU idle. A sequence is then divided into
splits of ``split_size`` tokens: :func:`split_sums_kernel` sums splits, :func:`split_scan_kernel`
scans the sums, and the kernels of the output and of the gradients process all splits in parallel.
With many heads, each sequence is one split and these kernels do not run.

The first token of a split, unless it begins its sequence, is a boundary. Of the tokens from
``split_size (j + 1)`` to ``split_size (j + 2)``, at most one is a boundary, and j is the index of
the state there; so J is ``(T - 1) // split_size``, whatever the sequences are. The programs of a
head process the first split of each sequence, and then the split after each boundary. In a row of
sequences, ``boundary_sequences`` has the sequence that boundary j is in, if any; if it is in none,
the program returns at once.

Other letters: S sequences, J boundaries, F decays per token (1 or D).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.ops.linear.triton.decay import load_scalar_gates, load_vector_gates
from attnzoo.ops.linear.triton.parts import (
    load_rows,
    load_tile,
    mask_if,
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


@triton.jit
def locate_split(
    n, b, starts, lengths, boundary_sequences, tokens, split_size, num_splits, num_sequences,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Return where the split of program ``n`` of a head is.

    Args:
        n: From 0 to ``num_splits``.
        b: Row.
        starts: First token of each sequence, ``[S]``.
        lengths: Tokens of each sequence, ``[S]``.
        boundary_sequences: See above, ``[J]``.
        tokens: T.
        split_size: Tokens of a split that is not the last one.
        num_splits: Programs of a head.
        num_sequences: S, 1 in a full row.
        VARLEN: Whether the row has sequences; else each row is one.

    Returns:
        The index of its sequence, int64; its first token, and the token after its last, int32;
        whether it is the first split of the sequence, and the last. The split after a boundary that
        is in no sequence has no tokens.
    """
    is_first = n < num_sequences
    if VARLEN:
        boundary = n - num_sequences
        sequence = tl.load(boundary_sequences + boundary, mask=boundary >= 0, other=0)
        sequence = tl.where(is_first, n, sequence.to(tl.int64))
        first = tl.load(starts + sequence).to(tl.int32)
        sequence_end = first + tl.load(lengths + sequence).to(tl.int32)
        tokens_before = tl.maximum((boundary + 1) * split_size - first, 0).to(tl.int32)
        splits_before = tl.where(is_first, 0, (tokens_before + split_size - 1) // split_size)
        start = first + splits_before * split_size
        end = tl.minimum(start + split_size, sequence_end)
        is_last = end == sequence_end
        end = tl.where(is_first | (splits_before > 0), end, start)
    else:
        sequence = b
        start = (n * split_size).to(tl.int32)
        end = tl.minimum(start + split_size, tokens)
        is_last = n == num_splits - 1
    return sequence, start, end, is_first, is_last


@triton.jit
def locate_program(
    starts, lengths, boundary_sequences, tokens, split_size, num_splits, num_sequences,
    key_heads: tl.constexpr, TILES: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Return the tile, the row and key head, and the split of a program of all splits.

    The arguments and the split are those of :func:`locate_split`.
    """
    program = (tl.program_id(0) // TILES).to(tl.int64)
    n, bh = program % num_splits, program // num_splits
    sequence, start, end, is_first, is_last = locate_split(
        n, bh // key_heads, starts, lengths, boundary_sequences, tokens, split_size, num_splits,
        num_sequences, VARLEN,
    )  # fmt: skip
    return tl.program_id(0) % TILES, bh, sequence, start, end, is_first, is_last


@triton.jit
def load_state(
    kv_given, z_given, kv_boundaries, z_boundaries, of_sequence, of_boundary, is_given, offsets,
    row, column, z_column, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, IS_GIVEN: tl.constexpr,
):  # fmt: skip
    """Return a tile of a state or of its gradient, and z, at an end of a split.

    Args:
        kv_given: What is given for each sequence, ``[S, Hkv, D, E]``; zeros without IS_GIVEN.
        z_given: Its z, ``[S, Hkv, D]``.
        kv_boundaries: What is at the boundaries, ``[B, Hkv, J, D, E]``.
        z_boundaries: Its z, ``[B, Hkv, J, D]``.
        of_sequence: Index into the first two.
        of_boundary: Index into the others.
        is_given: Whether the end of the split is that of its sequence.
        offsets: Of the elements of the tile.
        row: Rows of the tile.
        column: Columns of the tile.
        z_column: Elements of z.
        D: Key size.
        E: Value size.
        ROWS: Rows of the state, D or E.
        COLUMNS: Columns of the state, E or D.
        IS_GIVEN: Whether anything is given.
    """
    kv_source, z_source = kv_boundaries + of_boundary * D * E, z_boundaries + of_boundary * D
    z_mask = z_column < D
    if IS_GIVEN:
        if is_given:
            kv_source, z_source = kv_given + of_sequence * D * E, z_given + of_sequence * D
        kv = load_tile(kv_source, offsets, row, column, ROWS, COLUMNS)
    else:  # masks, because branches with loads cost some kernels 6% more instructions
        mask = mask_if((row < ROWS)[:, None] & (column < COLUMNS)[None, :], not is_given)
        kv = tl.load(kv_source + offsets, mask=mask, other=0.0)
        z_mask = mask_if(z_mask, not is_given)
    z = tl.load(z_source + z_column, mask=z_mask, other=0.0)
    return kv, z


# Split sums: the sums of one split from a zero state.                        (arXiv:2006.16236)
#   forward    of the split before boundary n: kv[n] = sum over its tokens j of w_j k_j v_j^T,
#              z[n] = sum of w_j k_j; w_j is the decay from token j to the end of the split
#   REVERSE    of the split after it, the gradient of the state at its start: kv[n] = sum over i of
#              w_i q_i do_i^T, with do divided by the denominator, z[n] = -sum of w_i delta_i q_i;
#              w_i is the decay from the start of the split to token i
#
# grid     (B * Hkv * J * tiles): one program sums one split of one key head, for one tile of values
# reads    x (k; REVERSE: q) and y (v; REVERSE: do), any strides and float dtypes
# writes   kv_sums [B, Hkv, J, D, E], z_sums [B, Hkv, J, D], split_decays [B, Hkv, J, F], float32
# limits   D, E <= 256; C a power of two; split_size a multiple of C
# oracle   linear_attention(impl="reference"), on a GPU and with TRITON_INTERPRET=1
@triton.jit(do_not_specialize=["tokens", "num_splits", "num_sequences"])
def split_sums_kernel(
    x, y, log_decay, starts, lengths, boundary_sequences, inv_denom, delta,
    kv_sums, z_sums, split_decays,
    x_batch, x_head, y_batch, y_head, gate_batch, gate_head,
    tokens, split_size, num_splits, num_sequences, scale, map_scale,
    x_token: tl.constexpr, y_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BU: tl.constexpr, TILES: tl.constexpr,
    MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    DIVIDE: tl.constexpr, DECAY_GRAD: tl.constexpr, REVERSE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Sum one split; see above."""
    SCALAR: tl.constexpr = DECAY == "scalar"
    VECTOR: tl.constexpr = DECAY == "vector"
    HEADS: tl.constexpr = G if REVERSE else 1  # heads of x and y per key head
    EXACT_UPDATE: tl.constexpr = ("left" if VECTOR else "right") if DECAY_GRAD else ""
    tile = tl.program_id(0) % TILES
    index = (tl.program_id(0) // TILES).to(tl.int64)
    boundaries = num_splits - num_sequences
    bh, n = index // boundaries, index % boundaries + num_sequences
    b, h = bh // key_heads, bh % key_heads
    _, split_start, split_end, _, _ = locate_split(
        n, b, starts, lengths, boundary_sequences, tokens, split_size, num_splits, num_sequences,
        VARLEN,
    )  # fmt: skip
    if VARLEN and split_start >= split_end:
        return
    if not REVERSE:
        split_start, split_end = split_start - split_size, split_start
    x += b * x_batch + h * HEADS * x_head
    y += b * y_batch + h * HEADS * y_head
    log_decay += b * gate_batch + h * gate_head
    x_head, y_head = as_int64(x_head), as_int64(y_head)
    token = tl.arange(0, C)
    d, e = tl.arange(0, BX), tile * BU + tl.arange(0, BU)
    chunks = (split_end - split_start + C - 1) // C
    kv, z = tl.zeros((BX, BU), tl.float32), tl.zeros((BX,), tl.float32)
    split_decay = tl.full((BX,), 1.0, tl.float32)
    for i in range(chunks):
        chunk_start = split_start + ((chunks - 1 - i) if REVERSE else i) * C
        base = chunk_start.to(tl.int64)
        in_bounds = token < split_end - chunk_start
        token_weights = tl.full((C,), 1.0, tl.float32)
        if VECTOR:
            log_decays = log_decay + base * gate_token
            gates = load_vector_gates(log_decays, gate_token, token, d, in_bounds, D)
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
                log_decay + base * gate_token, gate_token, token, split_end - chunk_start
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
        if VECTOR or SCALAR:
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
                    D,
                    OPERAND,
                )
                y_rows = load_rows(y + base * y_token, token, y_token, e, in_bounds, E).to(OPERAND)
            if VECTOR:
                x_phi = x_phi * token_decay
            if SCALAR:
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
    store_tile(kv_sums + index * D * E, kv, d[:, None] * E + e[None, :], d, e, D, E)
    if tile == 0:
        tl.store(z_sums + index * D + d, z, mask=d < D)
        if VECTOR:
            tl.store(split_decays + index * D + d, split_decay, mask=d < D)
        else:
            tl.store(split_decays + index + d, split_decay, mask=d < 1)


@triton.jit
def scan_block(
    sums, given, split_decays, of_sequence, first_boundary, count, block,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
    IS_GIVEN: tl.constexpr,
):  # fmt: skip
    """Scan a block of elements of one key head's state ``[D, E]`` over ``count`` boundaries."""
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    in_bounds = offsets < D * E
    state = tl.zeros((BLOCK,), tl.float32)
    if IS_GIVEN:
        state = tl.load(given + of_sequence * D * E + offsets, mask=in_bounds, other=0.0)
    for i in range(count):
        index = first_boundary + ((count - 1 - i) if REVERSE else i)
        split_sum = tl.load(sums + index * D * E + offsets, mask=in_bounds, other=0.0)
        HAS_COLUMNS: tl.constexpr = 1 if F > 1 else 0
        split_decay = tl.load(
            split_decays + index * F + offsets // E * HAS_COLUMNS, mask=in_bounds, other=0.0
        )
        state = state * split_decay + split_sum
        tl.store(sums + index * D * E + offsets, state, mask=in_bounds)


# Split scan: a scan in place over the boundaries of each sequence, which replaces the sums of the
# split before each boundary by the state there, or, REVERSE, the sums of the split after it by the
# gradient of the state there.
#   state[n] = split_decays[n] * state[n - 1] + sums[n], state[-1] = given
#   REVERSE: state[n] = split_decays[n] * state[n + 1] + sums[n], state[J] = given
#
# grid     (B * Hkv, ceil(D * E / BLOCK) + ceil(D / BLOCK)): one program scans BLOCK elements of one
#          key head's state, or, the last ones, of its z. VARLEN: (Hkv * J, ...): one program per
#          boundary, of which those of the first boundary of a sequence scan it
# reads    kv_given [S, Hkv, D, E], z_given [S, Hkv, D] (zeros without IS_GIVEN),
#          split_decays [B, Hkv, J, F], float32
# writes   kv_sums [B, Hkv, J, D, E], z_sums [B, Hkv, J, D], float32, in place
# limits   none on D and E; splits are scanned sequentially
# oracle   linear_attention(impl="reference"), on a GPU and with TRITON_INTERPRET=1
@triton.jit(do_not_specialize=["tokens", "num_splits", "num_sequences"])
def split_scan_kernel(
    kv_sums, kv_given, z_sums, z_given, split_decays, starts, lengths, boundary_sequences,
    tokens, split_size, num_splits, num_sequences, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
    VARLEN: tl.constexpr, IS_GIVEN: tl.constexpr,
):  # fmt: skip
    """Scan over the boundaries of one sequence; see above."""
    KV_BLOCKS: tl.constexpr = (D * E + BLOCK - 1) // BLOCK
    of_sequence, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = num_splits - num_sequences
    first_boundary = of_sequence * count
    if VARLEN:
        boundary, h = of_sequence % count, of_sequence // count
        sequence, start, end, _, _ = locate_split(
            boundary + num_sequences, 0, starts, lengths, boundary_sequences, tokens, split_size,
            num_splits, num_sequences, VARLEN,
        )  # fmt: skip
        is_second = start - tl.load(starts + sequence).to(tl.int32) == split_size
        if (start >= end) | (not is_second):
            return
        of_sequence, first_boundary = sequence * key_heads + h, of_sequence
        count = (tl.load(lengths + sequence).to(tl.int32) - 1) // split_size
    if block < KV_BLOCKS:
        scan_block(
            kv_sums, kv_given, split_decays, of_sequence, first_boundary, count, block,
            D, E, F, BLOCK, REVERSE, IS_GIVEN,
        )  # fmt: skip
    else:
        scan_block(
            z_sums, z_given, split_decays, of_sequence, first_boundary, count, block - KV_BLOCKS,
            D, 1, F, BLOCK, REVERSE, IS_GIVEN,
        )  # fmt: skip
