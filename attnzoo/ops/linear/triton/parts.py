"""Device functions shared by the Triton kernels: products, loads, stores and feature maps."""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.runtime.triton_products import INTERPRETED, dot_add

EXP_BOUND: tl.constexpr = tl.constexpr(30.0)  # as in ops/features/functional.py
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
RELU_FLOOR: tl.constexpr = tl.constexpr(1e-3)


# -- products --------------------------------------------------------------------------------------


@triton.jit
def collapse_repeated(x, axis: tl.constexpr):
    """Return one column (axis 1) or row (axis 0) of a tile in which all of them are equal."""
    return tl.max(x, axis)


@triton.jit
def matrix_vector(x, z, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``x @ z`` for a float32 vector z, as a product with 16 equal columns.

    Chunks of fewer than 64 tokens use a plain sum: the narrow product would make the compiler
    distribute every product of the chunk over too few warps.
    """
    C: tl.constexpr = x.shape[0]
    if C < 64 or tl.float32 == OPERAND:
        return tl.sum(x.to(tl.float32) * z[None, :], 1)
    repeated = tl.broadcast_to(z[:, None], (z.shape[0], 16))
    acc = dot_add(x, repeated, tl.zeros((C, 16), tl.float32), OPERAND, PRECISION, "right")
    return collapse_repeated(acc, 1)


@triton.jit
def weighted_column_sums(
    x, weights, OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr
):
    """Return ``weights @ x`` for ``x [C, columns]``, as a product with 16 equal rows.

    The product costs less than a reduction across threads.

    Args:
        x: Rows to add up, ``[C, columns]``.
        weights: One weight per row, ``[C]``.
        OPERAND: Dtype of the factors.
        PRECISION: Input precision of float32 products.
        EXACT: Which of x (``"left"``) and weights (``"right"``) is not rounded.
    """
    C: tl.constexpr = x.shape[0]
    if C < 32 or tl.float32 == OPERAND:
        return tl.sum(x.to(tl.float32) * weights[:, None], 0)
    repeated = tl.broadcast_to(weights[None, :], (16, C))
    flipped: tl.constexpr = "right" if EXACT == "left" else "left" if EXACT == "right" else EXACT
    acc = tl.zeros((16, x.shape[1]), tl.float32)
    return collapse_repeated(dot_add(repeated, x, acc, OPERAND, PRECISION, flipped), 0)


@triton.jit
def materialize(x):
    """Return ``x`` through an opaque instruction, so that the compiler computes it only once.

    Without it, the compiler recomputes the feature map for each product that needs ``x`` in another
    register layout.
    """
    if INTERPRETED:
        return x
    if x.dtype.primitive_bitwidth == 32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 1)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)


# -- loads -----------------------------------------------------------------------------------------


@triton.jit
def mask_if(mask, condition):
    """Return a mask where a scalar condition holds, and false elsewhere.

    ``mask & condition`` is no block of bools in the interpreter: Triton 3.9 refuses it as a mask.
    """
    return tl.where(condition, mask, False)


@triton.jit
def rows_mask(column, in_bounds, COLUMNS: tl.constexpr):
    """Return the mask of ``[C, columns]``; columns are masked only if the block is padded."""
    mask = in_bounds[:, None]
    if ((column.shape[0] - 1) & COLUMNS) != 0:
        mask = mask & (column < COLUMNS)[None, :]
    return mask


@triton.jit
def load_rows(x, token, token_stride, column, in_bounds, COLUMNS: tl.constexpr):
    """Load ``[C, columns]``; rows not ``in_bounds`` and padding columns are zeros."""
    offsets = token[:, None] * token_stride + column[None, :]
    return tl.load(x + offsets, mask=rows_mask(column, in_bounds, COLUMNS), other=0.0)


@triton.jit
def store_rows(x, value, token, token_stride, column, in_bounds, COLUMNS: tl.constexpr):
    """Store ``[C, columns]``, except rows not ``in_bounds`` and padding columns."""
    offsets = token[:, None] * token_stride + column[None, :]
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=rows_mask(column, in_bounds, COLUMNS))


@triton.jit
def load_tile(x, offsets, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile of a state; padding rows and columns are zeros."""
    if (((row.shape[0] - 1) & ROWS) | ((column.shape[0] - 1) & COLUMNS)) == 0:
        return tl.load(x + offsets)
    return tl.load(x + offsets, mask=(row < ROWS)[:, None] & (column < COLUMNS)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, offsets, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a tile of a state, except its padding rows and columns."""
    if (((row.shape[0] - 1) & ROWS) | ((column.shape[0] - 1) & COLUMNS)) == 0:
        tl.store(x + offsets, value)
    else:
        tl.store(x + offsets, value, mask=(row < ROWS)[:, None] & (column < COLUMNS)[None, :])


# -- feature maps ----------------------------------------------------------------------------------


@triton.jit
def fast_exp(x):
    """Return ``exp(x)``; subnormal results are flushed to zero.

    This takes one multiplication and one instruction; ``tl.exp`` takes five to keep subnormals.
    """
    return tl.exp2(x * LOG2_E)


@triton.jit
def row_max_and_ties(x, column, map_scale, COLUMNS: tl.constexpr):
    """Return the largest exponent of each row, and how many entries of the row equal it."""
    x = tl.where((column < COLUMNS)[None, :], x * map_scale, -float("inf"))
    row_max = tl.max(x, 1)
    return row_max, tl.sum((x == row_max[:, None]).to(tl.float32), 1)


@triton.jit
def apply_feature_map(
    x, row_max, column, map_scale, MAP: tl.constexpr, INPUT: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the features of ``x [C, columns]``, float32; padding columns are zeros.

    ``INPUT`` is ``"queries"`` or ``"keys"``. For ``"exp"``, queries subtract the maximum of
    their row, and keys are clamped to ``EXP_BOUND``.
    """
    if MAP == "elu+1":
        x = tl.maximum(x, 0.0) + fast_exp(tl.minimum(x, 0.0))
    elif MAP == "relu":
        x = tl.maximum(x, 0.0) + RELU_FLOOR
    elif MAP == "exp":
        x = x * map_scale
        x = fast_exp(x - row_max[:, None] if INPUT == "queries" else tl.minimum(x, EXP_BOUND))
    else:
        tl.static_assert(MAP == "identity", "a map without a function in parts.py")
    if ((column.shape[0] - 1) & COLUMNS) != 0:
        x = tl.where((column < COLUMNS)[None, :], x, 0.0)
    return x


@triton.jit
def feature_map_backward(
    d_phi, x, row_max, d_max, map_scale, MAP: tl.constexpr, INPUT: tl.constexpr
):
    """Return the gradient for ``x`` of :func:`apply_feature_map`; float32.

    ``d_max`` is the gradient of each row's maximum, divided by the number of entries that equal it.
    """
    if MAP == "elu+1":
        d_phi = d_phi * fast_exp(tl.minimum(x, 0.0))
    elif MAP == "relu":
        d_phi = tl.where(x > 0, d_phi, 0.0)
    elif MAP == "exp":
        x = x * map_scale
        if INPUT == "queries":
            d_phi = d_phi * fast_exp(x - row_max[:, None])
            d_phi = tl.where(x == row_max[:, None], d_phi - d_max[:, None], d_phi)
        else:
            d_phi = tl.where(x <= EXP_BOUND, d_phi * fast_exp(tl.minimum(x, EXP_BOUND)), 0.0)
        d_phi = d_phi * map_scale
    else:
        tl.static_assert(MAP == "identity", "a map without a derivative in parts.py")
    return d_phi
