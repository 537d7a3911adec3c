"""Device functions that find the sequence of a program, and load its state and its rows."""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.ops.linear.triton.parts import (
    apply_feature_map,
    load_rows,
    load_tile,
    materialize,
    row_max_and_ties,
)


@triton.jit
def locate_program(
    starts, lengths, tokens, num_sequences, key_heads: tl.constexpr, TILES: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Return the tile of a program, its row and key head, its sequence, and its begin and end.

    With VARLEN, the row has ``num_sequences`` sequences; else each row is one, and that is 1.
    """
    program = (tl.program_id(0) // TILES).to(tl.int64)
    bh = program // num_sequences
    if VARLEN:
        sequence = program % num_sequences
        begin = tl.load(starts + sequence).to(tl.int32)
        stop = begin + tl.load(lengths + sequence).to(tl.int32)
    else:
        sequence, begin = bh // key_heads, tl.zeros((), tl.int32)
        stop = begin + tokens
    return tl.program_id(0) % TILES, bh, sequence, begin, stop


@triton.jit
def load_state(
    kv, z, of_sequence, offsets, row, column, z_column, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_GIVEN: tl.constexpr,
):  # fmt: skip
    """Return a tile of a state or of its gradient, and z, at an end of a sequence.

    Args:
        kv: What is given for each sequence, ``[S, Hkv, D, E]``; zeros without IS_GIVEN.
        z: Its z, ``[S, Hkv, D]``.
        of_sequence: Index of the sequence and key head.
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
    if IS_GIVEN:
        tile = load_tile(kv + of_sequence * D * E, offsets, row, column, ROWS, COLUMNS)
        z_sums = tl.load(z + of_sequence * D + z_column, mask=z_column < D, other=0.0)
    else:
        tile, z_sums = tl.zeros(offsets.shape, tl.float32), tl.zeros(z_column.shape, tl.float32)
    return tile, z_sums


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
    MAP: tl.constexpr, D: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Return keys and their features; those of rows not ``in_bounds`` may be any finite numbers."""
    raw = load_rows(k, token, token_stride, column, in_bounds, D)
    phi = raw
    if MAP != "identity":
        zeros = tl.zeros(token.shape, tl.float32)
        phi = apply_feature_map(raw.to(tl.float32), zeros, column, map_scale, MAP, "keys", D)
        phi = materialize(phi.to(OPERAND))
    return raw, phi.to(OPERAND)


@triton.jit
def load_d_out(
    d_out, inv_denom, token, token_stride, column, in_bounds,
    NORMALIZE: tl.constexpr, E: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Return d_out divided by the denominator, rounded in the same way by all kernels."""
    rows = load_rows(d_out, token, token_stride, column, in_bounds, E)
    if NORMALIZE:
        rows = rows.to(tl.float32) * tl.load(inv_denom + token, mask=in_bounds, other=0.0)[:, None]
    return rows.to(OPERAND)


@triton.jit
def as_int64(x):
    """Return a stride as int64, because its product with the index of a head may exceed int32."""
    return tl.zeros((), tl.int64) + x
