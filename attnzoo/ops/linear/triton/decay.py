"""Device functions for the decay of linear attention inside a chunk.

Query i sees key j with weight exp(P_i - P_j), where P_i is the sum of the log decays of the chunk's
tokens up to i, token i included. Exponents are in base 2.

"scalar" (one decay per token): scores are multiplied by the weights. No weight exceeds 1, so any
decay is exact.

"vector" (one per key channel): the weights cannot be applied to scores, which sum over channels.
Queries are multiplied by exp(P_i - A) and keys by exp(A - P_j), with the anchor A = P in the middle
of the chunk, so that the scores are one product; P starts with the chunk's second token here. An
anchor is an integer: multiplication by a power of two is exact, so rounding does not depend on
later tokens. A factor may reach 2^MAX_EXPONENT. If the decay between the anchor and an end of the
chunk is stronger in any channel, the chunk is processed in windows of up to 16 tokens instead, or
shorter windows if the decay is too strong for 16. The next chunk is processed as a whole again.

Letters: C tokens of a chunk; W columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.ops.linear.triton.parts import (
    LOG2_E,
    collapse_repeated,
    load_rows,
)
from attnzoo.runtime.triton_products import dot_add

LOG_ZERO: tl.constexpr = tl.constexpr(-110.0)  # natural logarithm; exp of it is 0 in float32
MAX_EXPONENT: tl.constexpr = tl.constexpr(80.0)  # 2^80 times a feature stays finite
SKIP: tl.constexpr = tl.constexpr(1e30)  # exp2 of its negative, plus any P, is 0


# -- one decay per token ---------------------------------------------------------------------------


@triton.jit
def load_scalar_gates(log_decay, token_stride, token, count):
    """Load the log decay of each token, ``[C]``, float64; 0 from token ``count`` on."""
    gates = tl.load(log_decay + token * token_stride, mask=token < count, other=0.0)
    return tl.maximum(gates.to(tl.float32), LOG_ZERO).to(tl.float64) * LOG2_E


@triton.jit
def split_float64(x):
    """Return a float64 tensor as the sum of two float32 tensors."""
    high = x.to(tl.float32)
    return high, (x - high).to(tl.float32)


@triton.jit
def exp2_float64(x):
    """Return ``2^x`` for float64 x, in float32; the rounding of x is corrected to first order."""
    high, low = split_float64(x)
    return tl.exp2(high) * (1 + low / LOG2_E)


@triton.jit
def scalar_decay(log_decay, token_stride, token, count):
    """Return the decays of a chunk with one decay per token.

    Returns:
        P, ``[C]``, as the sum of two float32 numbers; exp(P), from before the chunk to each token;
        exp(P_last - P), from each token to the chunk's last one; and exp(P_last).
    """
    gates = load_scalar_gates(log_decay, token_stride, token, count)
    cumulative, total = tl.cumsum(gates, 0), tl.sum(gates, 0)
    high, low = split_float64(cumulative)
    to_end = exp2_float64(total - cumulative)
    return high, low, exp2_float64(cumulative), to_end, exp2_float64(total)


@triton.jit
def pair_decay(high, low, mask, REVERSE: tl.constexpr, OPERAND: tl.constexpr):
    """Return ``exp(P_i - P_j)``, ``[C, C]``, 0 where ``mask`` is false.

    Rows are queries and columns are keys; REVERSE exchanges them. With float32 operands, the parts
    of P are subtracted separately, so strong decays earlier in the chunk cost no precision. With
    bfloat16 operands they cost less than the rounding of the scores, because the magnitude of P is
    at most that of 64 LOG_ZERO.
    """
    if REVERSE:
        difference = high[None, :] - high[:, None]
    else:
        difference = high[:, None] - high[None, :]
    if tl.float32 == OPERAND:
        if REVERSE:
            difference += low[None, :] - low[:, None]
        else:
            difference += low[:, None] - low[None, :]
    return tl.exp2(tl.where(mask, difference, -SKIP))


# -- one decay per key channel ---------------------------------------------------------------------


@triton.jit
def matmul_cumsum(gates, mask, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``mask @ gates``: for each row the sum of the rows of gates that the mask selects.

    With a triangular mask this is a cumulative sum, and costs less than one across threads.
    """
    acc = tl.zeros(gates.shape, tl.float32)
    return dot_add(mask.to(tl.float32), gates, acc, OPERAND, PRECISION, "right")


@triton.jit
def load_vector_gates(log_decay, token_stride, token, column, mask, COLUMNS: tl.constexpr):
    """Load the log decays, ``[C, W]``; 0 for tokens that are not in ``mask``."""
    gates = load_rows(log_decay, token, token_stride, column, mask, COLUMNS)
    return tl.maximum(gates.to(tl.float32), LOG_ZERO) * LOG2_E


@triton.jit
def half_sums(gates, OPERAND: tl.constexpr, PRECISION: tl.constexpr, AS_PRODUCT: tl.constexpr):
    """Return the column sums of the first and of the second half of the rows, ``[W]`` each."""
    C: tl.constexpr = gates.shape[0]
    token = tl.arange(0, C)
    if not AS_PRODUCT or tl.float32 == OPERAND:
        second = (token >= C // 2)[:, None]
        return tl.sum(tl.where(second, 0.0, gates), 0), tl.sum(tl.where(second, gates, 0.0), 0)
    row = tl.arange(0, 16)[:, None]
    mask = (token[None, :] < C // 2) == (row < 8)
    acc = tl.zeros((16, gates.shape[1]), tl.float32)
    sums = dot_add(mask.to(tl.float32), gates, acc, OPERAND, PRECISION, "right")
    low = -SKIP
    first = collapse_repeated(tl.where(row < 8, sums, low), 0)
    return first, collapse_repeated(tl.where(row < 8, low, sums), 0)


@triton.jit
def vector_decay(
    log_decay, token_stride, token, column, count, run, COLUMNS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, CHECK: tl.constexpr, SKIP_KEYS: tl.constexpr,
    AS_PRODUCT: tl.constexpr,
):  # fmt: skip
    """Return the decays of a chunk with one decay per key channel.

    CHECK: if ``run`` is 0, or if a factor could overflow, then 0 is returned as ``run``, both
    decays of the state are 1, and the factor of keys (SKIP_KEYS; else of queries) is 0, so that the
    chunk does not change the state; the other factor may be infinite.

    AS_PRODUCT: sums over tokens are matrix products, which cost less than scans. A caller that
    transposes a factor for another product must not set it, because some compilers compile that
    wrongly.

    Returns:
        exp(P - A) of queries and exp(A - P) of keys, ``[C, W]``; the decays of the state from
        before the chunk to the anchor, and from there to the end of the chunk, ``[W]``; and run.
    """
    # All warps would repeat a product of fewer rows
    USE_PRODUCTS: tl.constexpr = AS_PRODUCT and token.shape[0] >= 32
    later = (token > 0) & (token < count)
    gates = load_vector_gates(log_decay, token_stride, token, column, later, COLUMNS)
    first_gate = tl.load(log_decay + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    first_gate = tl.maximum(first_gate, LOG_ZERO) * LOG2_E
    if USE_PRODUCTS:
        cumulative = matmul_cumsum(gates, token[:, None] >= token[None, :], OPERAND, PRECISION)
    else:
        cumulative = tl.cumsum(gates, 0)
    first, second = half_sums(gates, OPERAND, PRECISION, USE_PRODUCTS)
    anchor = tl.floor(first + 0.5)
    to_anchor, to_end = anchor + first_gate, first + second - anchor
    q_anchor, k_anchor = anchor, anchor
    if CHECK:
        weakest = tl.min(tl.minimum(first, second), 0)
        fits = (run > 0) & (weakest >= -MAX_EXPONENT)
        run = fits.to(tl.int32)
        if SKIP_KEYS:
            k_anchor = tl.where(fits, anchor, -SKIP)
        else:
            q_anchor = tl.where(fits, anchor, SKIP)
        to_anchor, to_end = tl.where(fits, to_anchor, 0.0), tl.where(fits, to_end, 0.0)
    q_decay = tl.exp2(cumulative - q_anchor[None, :])
    k_decay = tl.exp2(k_anchor[None, :] - cumulative)
    return q_decay, k_decay, tl.exp2(to_anchor), tl.exp2(to_end), run


@triton.jit
def window_length(
    log_decay, token_stride, start, end, column, COLUMNS: tl.constexpr, REVERSE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Return the length of the longest window, at least 1, of the tokens ``start`` to ``end``.

    The window begins at ``start``; with REVERSE, it ends at ``end``. There are at most C tokens.
    """
    token, count = tl.arange(0, C), end - start
    offset = start.to(tl.int64) * token_stride
    mask = token < count
    if not REVERSE:  # the decay of a window's first token is not inside it
        mask = mask & (token > 0)
    gates = load_vector_gates(log_decay + offset, token_stride, token, column, mask, COLUMNS)
    row = token[:, None]
    halves = tl.minimum(
        tl.sum(tl.where(row < C // 2, gates, 0.0), 0), tl.sum(tl.where(row < C // 2, 0.0, gates), 0)
    )
    if REVERSE:
        to_end = tl.cumsum(gates, 0, reverse=True) - gates
    else:
        to_end = tl.cumsum(gates, 0)
    close = (token < count) & (tl.min(to_end, 1) >= -MAX_EXPONENT)
    rows = tl.maximum(tl.sum(close.to(tl.int32), 0), 1)
    return tl.where(tl.min(halves, 0) >= -MAX_EXPONENT, count, rows).to(tl.int32)
