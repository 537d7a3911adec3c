"""Decay in the kernels of linear attention: what is left of a token when another reads it.

Row i reads key j with the weight exp(sum of the log decays of the tokens j + 1 .. i). A border
between packed sequences is a token that forgets everything.

SCALAR: one decay per token; VECTOR: one per key channel. With P_i, the sum of the log decays of a
chunk after its first token through token i, the weight is exp(P_i) exp(-P_j): one product of rows
that decay since the first token and keys that have yet to decay to it. The decay of the first token
itself belongs to the state, which arrives decayed: so the gates that a chunk has to do with are
those of the tokens after each of its own, "ahead".

exp(-P) must stay a float32. So chunks are walked whole while no P in them falls below -MILDEST.
From the first chunk on where one does, the rest of the span is walked in windows: as many tokens as
are mild together. Every weight is exact, however strong a gate, and weak gates cost nothing. Where
a window ends depends on the gates before, not on later ones.

Letters: C tokens in a chunk; BX, BU columns in a block, powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.triton.linear_parts import LOG2_E, column_sums, load_rows, product

FORGOTTEN: tl.constexpr = tl.constexpr(-1e4)  # exp of it is zero in every type
MILDEST: tl.constexpr = tl.constexpr(80.0)  # 2^80 leaves room for what it multiplies


@triton.jit
def borders(segment_ids, first, key, inside):
    """Number the parts that borders between packed sequences divide the tokens ``inside`` into.

    Returns each token's part, ``[C]``, and the last; 0 is what goes on from before the chunk. The
    first token of a row begins no new part.
    """
    token = first + key
    now = tl.load(segment_ids + token, mask=inside, other=0)
    before = tl.load(segment_ids + tl.maximum(token - 1, 0), mask=inside, other=0)
    begins = (inside & (now != before)).to(tl.int32)
    return tl.cumsum(begins, 0), tl.sum(begins, 0)


@triton.jit
def first_decay(log_decay, column, DECAY: tl.constexpr, COLUMNS: tl.constexpr):
    """Return what the first token of a span leaves of the state, one number or ``[columns]``."""
    if DECAY == "none":
        gate = 0.0
    elif DECAY == "scalar":
        gate = tl.load(log_decay).to(tl.float32)
    else:
        gate = tl.load(log_decay + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    return tl.exp2(tl.maximum(gate, FORGOTTEN) * LOG2_E)


@triton.jit
def scalar_gates(log_decay, token_stride, key, count):
    """Load log2 of the decay of each token, ``[C]``; past ``count`` nothing decays."""
    gates = tl.load(log_decay + key * token_stride, mask=key < count, other=0.0)
    return tl.maximum(gates.to(tl.float32), FORGOTTEN).to(tl.float64) * LOG2_E


@triton.jit
def scalar_decay(
    log_decay, token_stride, key, count, edge, REVERSE: tl.constexpr, WINDOWS: tl.constexpr
):  # fmt: skip
    """Return what is left of a chunk's tokens since its first one.

    With WINDOWS, of the mild rows from the first one on, REVERSE from the one before ``edge`` back;
    else of the whole chunk, or, where that is not mild or ``edge`` is 0, of no row of it.

    Returns:
        ``[C]``, what is left since the first token, and its inverse, zero for rows that are left
        out; what is left from the first token to the first after all; which rows are in; and with
        WINDOWS where they end, REVERSE begin, else whether that is all.
    """
    C: tl.constexpr = key.shape[0]
    own = scalar_gates(log_decay, token_stride, key, count)
    ahead = scalar_gates(log_decay + token_stride, token_stride, key, count - 1)
    low, high = edge * 0, edge * 0 + C
    if WINDOWS:
        if REVERSE:
            high = edge
            sums = tl.cumsum(tl.where(key < high - 1, ahead, 0.0), 0, reverse=True)
            rows = tl.sum(((key < high) & (sums >= -MILDEST)).to(tl.int32), 0)
            low = high - tl.maximum(rows, 1)
        else:
            sums = tl.cumsum(tl.where(key > 0, own, 0.0), 0)
            high = tl.maximum(tl.sum((sums >= -MILDEST).to(tl.int32), 0), 1)
    window = (key >= low) & (key < high)
    total = tl.sum(tl.where(window, ahead, 0.0), 0)
    reached = low if REVERSE else high
    if not WINDOWS:
        mild = (edge > 0) & (total >= -MILDEST)
        window = window & mild
        total = tl.where(mild, total, 0.0)
        reached = mild.to(tl.int32)
    sums = tl.cumsum(tl.where(window & (key > low), own, 0.0), 0)
    near = sums.to(tl.float32)
    rest = ((sums - near) / LOG2_E).to(tl.float32)  # what rounding took: the power multiplies it
    since = tl.where(window, tl.exp2(near) * (1 + rest), 0.0)
    until = tl.where(window, tl.exp2(-near) * (1 - rest), 0.0)
    return since, until, tl.exp2(total.to(tl.float32)), window, reached


@triton.jit
def through(gates, which, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return for every row a the sum of the rows b of gates for which ``which[a, b]``.

    A product with ones costs less than a running sum across threads; nothing cancels in it.
    """
    total = tl.zeros(gates.shape, tl.float32)
    return product(which.to(tl.float32), gates, total, OPERAND, PRECISION, "right")


@triton.jit
def vector_gates(log_decay, token_stride, key, column, count, COLUMNS: tl.constexpr):
    """Load log2 of the decays, ``[C, columns]``; past ``count`` nothing decays."""
    gates = load_rows(log_decay, key, token_stride, column, key < count, COLUMNS)
    return tl.maximum(gates.to(tl.float32), FORGOTTEN) * LOG2_E


@triton.jit
def vector_decay(
    log_decay, token_stride, key, column, count, edge, COLUMNS: tl.constexpr,
    OF_ROWS: tl.constexpr, REVERSE: tl.constexpr, WINDOWS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return what :func:`scalar_decay` does, ``[C, columns]``.

    Returns:
        The sums P, to the base of 2; what is left from end to end, ``[columns]``; which rows are
        in: what is not must be made zero, where that is not all; and the edge, as there.
    """
    C: tl.constexpr = key.shape[0]
    # where a product would be the same in all warps; windows always are
    SHORT: tl.constexpr = WINDOWS or C < 32
    a, b = key[:, None], key[None, :]
    ahead = vector_gates(log_decay + token_stride, token_stride, key, column, count - 1, COLUMNS)
    own = ahead
    if SHORT:
        own = vector_gates(log_decay, token_stride, key, column, count, COLUMNS)
    low, high = edge * 0, edge * 0 + C
    if WINDOWS:
        if REVERSE:
            high = edge
            sums = tl.cumsum(tl.where(a < high - 1, ahead, 0.0), 0, reverse=True)
            rows = tl.sum(((key < high) & (tl.min(sums, 1) >= -MILDEST)).to(tl.int32), 0)
            low = high - tl.maximum(rows, 1)
        else:
            sums = tl.cumsum(tl.where(a > 0, own, 0.0), 0)
            high = tl.maximum(tl.sum((tl.min(sums, 1) >= -MILDEST).to(tl.int32), 0), 1)
    window = (key >= low) & (key < high)
    if SHORT:
        sums = tl.cumsum(tl.where(window[:, None] & (a > low), own, 0.0), 0)
        sums = tl.where(window[:, None], sums, 0.0)
    else:
        sums = through(ahead, b < a, OPERAND, PRECISION)
    total = column_sums(ahead, window.to(tl.float32), OF_ROWS, OPERAND, PRECISION, "left")
    reached = low if REVERSE else high
    if not WINDOWS:
        mild = (edge > 0) & (tl.min(total, 0) >= -MILDEST)
        window = window & mild
        total = tl.where(mild, total, 0.0)
        if not mild:
            sums *= 0.0  # whose exponentials are infinite
        reached = mild.to(tl.int32)
    return sums, tl.exp2(total), window, reached
