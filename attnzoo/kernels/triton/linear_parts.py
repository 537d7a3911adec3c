"""What the kernels of linear attention are made of: products, feature maps, loads, decays.

Letters: C tokens in a chunk; BX, BU columns in a block, powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.triton.interpreter import interpreted

FORGOTTEN: tl.constexpr = tl.constexpr(-1e4)  # exp of it is zero in every type
EXP_BOUND: tl.constexpr = tl.constexpr(30.0)  # as in ops.feature_maps
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
def largest(x, column, map_scale, COLUMNS: tl.constexpr):
    """Return each row's largest exponent, and how many entries tie for it."""
    x = tl.where((column < COLUMNS)[None, :], x * map_scale, -float("inf"))
    top = tl.max(x, 1)
    return top, tl.sum((x == top[:, None]).to(tl.float32), 1)


@triton.jit
def features(
    x, top, inside, column, map_scale, MAP: tl.constexpr, OF: tl.constexpr, COLUMNS: tl.constexpr
):
    """Map ``[C, columns]``, float32; tokens not ``inside`` and padding columns become zeros."""
    if MAP == "elu+1":
        x = tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
    if MAP == "relu":
        x = tl.maximum(x, 0.0) + RELU_FLOOR
    if MAP == "exp":
        x = x * map_scale
        x = tl.exp(x - top[:, None] if OF == "queries" else tl.minimum(x, EXP_BOUND))
    if MAP != "identity":
        x = tl.where(rows_mask(column, inside, COLUMNS), x, 0.0)
    return x


@triton.jit
def features_backward(d_phi, x, top, share, map_scale, MAP: tl.constexpr, OF: tl.constexpr):
    """Take the gradient of :func:`features` back to ``x``, both float32.

    ``share`` is what the row's largest exponent gets for having been subtracted, already divided
    among those that tie.
    """
    if MAP == "elu+1":
        d_phi = d_phi * tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    if MAP == "relu":
        d_phi = tl.where(x > 0, d_phi, 0.0)
    if MAP == "exp":
        x = x * map_scale
        if OF == "queries":
            d_phi = d_phi * tl.exp(x - top[:, None])
            d_phi = tl.where(x == top[:, None], d_phi - share[:, None], d_phi)
        else:
            d_phi = tl.where(x <= EXP_BOUND, d_phi * tl.exp(tl.minimum(x, EXP_BOUND)), 0.0)
        d_phi = d_phi * map_scale
    return d_phi


# -- decay -----------------------------------------------------------------------------------------
#
# Row i reads key j with the weight exp(sum of the log decays of the tokens j + 1 .. i). A border
# between packed sequences is a token that forgets everything.
#
# SCALAR (one decay per token): sums and their differences are float64, few as they are; nothing
# overflows, nothing cancels.
# VECTOR (one per key channel): blocks of 1, 2, 4 .. tokens are joined in pairs, as on the CPU
# (ops.linear_decay). What the second block reads in the first is a product of rows decayed from the
# border between them and keys decayed to it; all factors are at most one, however strong the gates.
# Each of the log2(C) joins is one product of all rows with all keys, of which the mask keeps the
# pairs that meet in this join.


@triton.jit
def forgets(segment_ids, token, tokens):
    """Tell which tokens begin another packed sequence; the first token never does."""
    inside = token < tokens
    now = tl.load(segment_ids + token, mask=inside, other=0)
    before = tl.load(segment_ids + tl.maximum(token - 1, 0), mask=inside, other=0)
    return inside & (now != before)


@triton.jit
def scalar_gates(
    log_decay, token_stride, segment_ids, first, key, tokens,
    DECAY: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Load a log decay per token, ``[C]``, float64; past the end nothing decays."""
    gates = tl.zeros(key.shape, tl.float64)
    if DECAY == "scalar":
        log_decay += first.to(tl.int64) * token_stride
        loaded = tl.load(log_decay + key * token_stride, mask=key < tokens - first, other=0.0)
        gates = tl.maximum(loaded.to(tl.float32), FORGOTTEN).to(tl.float64)
    if PACKED:
        gates += tl.where(forgets(segment_ids, first + key, tokens), FORGOTTEN, 0.0).to(tl.float64)
    return gates


@triton.jit
def scalar_spans(gates):
    """Return the running sum, and what is left from the start, to the end, from end to end."""
    sums, total = tl.cumsum(gates, 0), tl.sum(gates, 0)
    reads = tl.exp(sums.to(tl.float32))
    writes = tl.exp(tl.minimum((total - sums).to(tl.float32), 0.0))
    return sums, reads, writes, tl.exp(total.to(tl.float32))


@triton.jit
def scalar_pairs(differences, seen):
    """Return the weights for sums of log decays; zero if not seen."""
    return tl.where(seen, tl.exp(tl.minimum(differences.to(tl.float32), 0.0)), 0.0)


@triton.jit
def vector_gates(
    log_decay, token_stride, segment_ids, first, ahead, key, column, tokens,
    PACKED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load log decays, ``[C, columns]``, float32, of tokens ``ahead`` of the chunk's.

    Past the end nothing decays.
    """
    inside = key < tokens - first - ahead
    log_decay += (first + ahead).to(tl.int64) * token_stride
    gates = load_rows(log_decay, key, token_stride, column, inside, COLUMNS)
    gates = tl.maximum(gates.to(tl.float32), FORGOTTEN)
    if PACKED:
        border = forgets(segment_ids, first + ahead + key, tokens)
        gates += tl.where(border, FORGOTTEN, 0.0)[:, None]
    return gates


@triton.jit
def since_block(gates, SIZE: tl.constexpr):
    """Return what is left from the start of a token's block through the token, ``[C, BD]``."""
    C: tl.constexpr = gates.shape[0]
    BD: tl.constexpr = gates.shape[1]
    if SIZE > 1:
        blocks = tl.cumsum(tl.reshape(gates, (C // SIZE, SIZE, BD)), 1)
        gates = tl.reshape(blocks, (C, BD))
    return tl.exp(gates)


@triton.jit
def until_block_end(next_gates, SIZE: tl.constexpr):
    """Return what is left past a token to the end of its block; given the next tokens' gates.

    Summed from the end, not taken as a difference, so that a gate of -1e4 spoils no other.
    """
    C: tl.constexpr = next_gates.shape[0]
    BD: tl.constexpr = next_gates.shape[1]
    place = tl.arange(0, C) % SIZE
    within = tl.where((place < SIZE - 1)[:, None], next_gates, 0.0)
    if SIZE > 1:
        blocks = tl.cumsum(tl.reshape(within, (C // SIZE, SIZE, BD)), 1, reverse=True)
        within = tl.reshape(blocks, (C, BD))
    return tl.exp(within)


@triton.jit
def joined(later, earlier, SIZE: tl.constexpr):
    """Tell which pairs meet when blocks of SIZE tokens are joined; the two broadcast."""
    return ((later // SIZE) % 2 == 1) & (later // SIZE == earlier // SIZE + 1)


@triton.jit
def vector_scores(
    x, y, gates, later, LEVELS: tl.constexpr, REVERSE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the decayed products of rows ``[C, BX]`` with each other, zero where not seen.

    Rows of x read those of y before them, or, REVERSE, are read by those of y after them.
    """
    C: tl.constexpr = x.shape[0]
    a, b = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    own = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    scores = tl.where(a == b, own[:, None], 0.0)
    for level in tl.static_range(LEVELS):
        since, until = since_block(gates, 2**level), until_block_end(later, 2**level)
        left = (x * (until if REVERSE else since)).to(OPERAND)
        right = (y * (since if REVERSE else until)).to(OPERAND)
        block = tl.zeros((C, C), tl.float32)
        block = product(left, tl.trans(right), block, OPERAND, PRECISION, "")
        meet = joined(b, a, 2**level) if REVERSE else joined(a, b, 2**level)
        scores += tl.where(meet, block, 0.0)
    return scores


@triton.jit
def vector_sums(
    scores, u, total, gates, later, LEVELS: tl.constexpr, REVERSE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Add to ``total`` the rows of u ``[C, BU]`` weighed by scores and by the decay between."""
    C: tl.constexpr = u.shape[0]
    BU: tl.constexpr = u.shape[1]
    a, b = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    own = tl.sum(tl.where(a == b, scores, 0.0), 1)
    total += own[:, None] * u.to(tl.float32)
    for level in tl.static_range(LEVELS):
        since, until = since_block(gates, 2**level), until_block_end(later, 2**level)
        right = u * (since if REVERSE else until)
        meet = joined(b, a, 2**level) if REVERSE else joined(a, b, 2**level)
        part = tl.zeros((C, BU), tl.float32)
        part = product(tl.where(meet, scores, 0.0), right, part, OPERAND, PRECISION, SPLIT)
        total += part * (until if REVERSE else since)
    return total
