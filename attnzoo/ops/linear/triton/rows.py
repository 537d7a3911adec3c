"""Device functions that load the rows of a chunk.

Letters: C tokens of the chunk; W columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.ops.linear.triton.parts import (
    apply_feature_map,
    load_rows,
    materialize,
    row_max_and_ties,
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
