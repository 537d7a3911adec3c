"""What the kernels of linear attention are made of: products, feature maps, loads, decays.

Letters: C tokens in a chunk; BX, BU columns in a block, powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.triton.interpreter import interpreted

EXP_BOUND: tl.constexpr = tl.constexpr(30.0)  # as in ops.feature_maps
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
RELU_FLOOR: tl.constexpr = tl.constexpr(1e-3)
INTERPRETED: tl.constexpr = tl.constexpr(interpreted())


# -- products --------------------------------------------------------------------------------------
#
# Operands are bfloat16 for bfloat16 inputs and float32 for all others (tf32 for float16 inputs:
# its mantissa with the range of float32, which features and sums need). Sums are float32.
# SPLIT names the side, "left", "right" or "both", that is float32 and must not be rounded to an
# operand: it is taken as the sum of two, which leaves an error of 2**-17. Where gradients of a
# normalised output nearly cancel (values with a mean), rounding errors would be all that is left.


@triton.jit
def rounded(x, OPERAND: tl.constexpr):
    """Round to what products take."""
    x = x.to(OPERAND)
    if INTERPRETED:  # whose product takes the bits of a bfloat16 for an integer
        x = x.to(tl.float32)
    return x


@triton.jit
def product(a, b, total, OPERAND: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr):
    """Add ``a @ b`` to ``total``; see above."""
    if tl.float32 == OPERAND:
        finer: tl.constexpr = PRECISION if SPLIT == "" else "tf32x3"
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=finer)
    left, right = rounded(a, OPERAND), rounded(b, OPERAND)
    total = tl.dot(left, right, total)
    if SPLIT == "left" or SPLIT == "both":
        total = tl.dot(rounded(a - left.to(tl.float32), OPERAND), right, total)
    if SPLIT == "right" or SPLIT == "both":
        total = tl.dot(left, rounded(b - right.to(tl.float32), OPERAND), total)
    return total


@triton.jit
def alike(x, axis: tl.constexpr):
    """Return one of the columns (axis 1) or rows (axis 0), which are all the same."""
    return tl.max(x, axis)


@triton.jit
def row_sums_of(x, z, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``x @ z`` for a vector z of float32: a product with 16 columns, all alike.

    With few rows it would have the compiler give all products of the chunk to the same few warps.
    """
    C: tl.constexpr = x.shape[0]
    if C < 64 or tl.float32 == OPERAND:
        return tl.sum(x.to(tl.float32) * z[None, :], 1)
    columns = tl.broadcast_to(z[:, None], (z.shape[0], 16))
    total = product(x, columns, tl.zeros((C, 16), tl.float32), OPERAND, PRECISION, "right")
    return alike(total, 1)


@triton.jit
def column_sums(
    x, weights, OF_ROWS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Return the sums of ``[C, columns]`` over its rows, each row times its weight.

    A product with 16 columns, all alike, costs less than a sum across threads. ``OF_ROWS`` says
    whether the result is to scale rows of a state, or columns; ``SPLIT`` which of x and weights
    must not be rounded, ``"left"``, ``"right"`` or ``"both"``, in this order.
    """
    C: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    if C < 32 or tl.float32 == OPERAND:
        return tl.sum(x.to(tl.float32) * weights[:, None], 0)
    if OF_ROWS:
        ones = tl.broadcast_to(weights[:, None], (C, 16))
        total = tl.zeros((W, 16), tl.float32)
        return alike(product(tl.trans(x), ones, total, OPERAND, PRECISION, SPLIT), 1)
    ones = tl.broadcast_to(weights[None, :], (16, C))
    other: tl.constexpr = "right" if SPLIT == "left" else "left" if SPLIT == "right" else SPLIT
    total = tl.zeros((16, W), tl.float32)
    return alike(product(ones, x, total, OPERAND, PRECISION, other), 0)


@triton.jit
def pinned(x):
    """Return ``x``, which the compiler then computes once.

    Where two products want a tile in different registers, it would map features twice.
    """
    if INTERPRETED:
        return x
    if x.dtype.primitive_bitwidth == 32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 1)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)


# -- loads -----------------------------------------------------------------------------------------


@triton.jit
def rows_mask(column, inside, COLUMNS: tl.constexpr):
    """Tell which of ``[C, columns]`` are there; a full block needs no mask of its columns."""
    mask = inside[:, None]
    if ((column.shape[0] - 1) & COLUMNS) != 0:
        mask = mask & (column < COLUMNS)[None, :]
    return mask


@triton.jit
def load_rows(x, token, token_stride, column, inside, COLUMNS: tl.constexpr):
    """Load ``[C, columns]``; zeros where a token is not ``inside``, and in the padding."""
    at = token[:, None] * token_stride + column[None, :]
    return tl.load(x + at, mask=rows_mask(column, inside, COLUMNS), other=0.0)


@triton.jit
def store_rows(x, value, token, token_stride, column, inside, COLUMNS: tl.constexpr):
    """Store ``[C, columns]``, but for what is not there."""
    at = token[:, None] * token_stride + column[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=rows_mask(column, inside, COLUMNS))


@triton.jit
def load_tile(x, at, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile of a state; zeros in the padding."""
    if (((row.shape[0] - 1) & ROWS) | ((column.shape[0] - 1) & COLUMNS)) == 0:
        return tl.load(x + at)
    return tl.load(x + at, mask=(row < ROWS)[:, None] & (column < COLUMNS)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, at, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a tile of a state, but for its padding."""
    if (((row.shape[0] - 1) & ROWS) | ((column.shape[0] - 1) & COLUMNS)) == 0:
        tl.store(x + at, value)
    else:
        tl.store(x + at, value, mask=(row < ROWS)[:, None] & (column < COLUMNS)[None, :])


# -- feature maps ----------------------------------------------------------------------------------


@triton.jit
def power(x):
    """Return e to the power of x; what is too small for a normal number becomes zero.

    One instruction and a product, where ``tl.exp`` takes five for numbers that nobody would miss.
    """
    return tl.exp2(x * LOG2_E)


@triton.jit
def largest(x, column, map_scale, COLUMNS: tl.constexpr):
    """Return each row's largest exponent, and how many entries tie for it."""
    x = tl.where((column < COLUMNS)[None, :], x * map_scale, -float("inf"))
    top = tl.max(x, 1)
    return top, tl.sum((x == top[:, None]).to(tl.float32), 1)


@triton.jit
def features(x, top, column, map_scale, MAP: tl.constexpr, OF: tl.constexpr, COLUMNS: tl.constexpr):
    """Map ``[C, columns]``, float32; padding columns become zeros."""
    if MAP == "elu+1":
        x = tl.maximum(x, 0.0) + power(tl.minimum(x, 0.0))
    if MAP == "relu":
        x = tl.maximum(x, 0.0) + RELU_FLOOR
    if MAP == "exp":
        x = x * map_scale
        x = power(x - top[:, None] if OF == "queries" else tl.minimum(x, EXP_BOUND))
    if ((column.shape[0] - 1) & COLUMNS) != 0:
        x = tl.where((column < COLUMNS)[None, :], x, 0.0)
    return x


@triton.jit
def features_backward(d_phi, x, top, share, map_scale, MAP: tl.constexpr, OF: tl.constexpr):
    """Take the gradient of :func:`features` back to ``x``, both float32.

    ``share`` is what the row's largest exponent gets for having been subtracted, already divided
    among those that tie.
    """
    if MAP == "elu+1":
        d_phi = d_phi * power(tl.minimum(x, 0.0))
    if MAP == "relu":
        d_phi = tl.where(x > 0, d_phi, 0.0)
    if MAP == "exp":
        x = x * map_scale
        if OF == "queries":
            d_phi = d_phi * power(x - top[:, None])
            d_phi = tl.where(x == top[:, None], d_phi - share[:, None], d_phi)
        else:
            d_phi = tl.where(x <= EXP_BOUND, d_phi * power(tl.minimum(x, EXP_BOUND)), 0.0)
        d_phi = d_phi * map_scale
    return d_phi
