"""Device functions for the decay of linear attention inside a chunk.

Query i sees key j with weight exp(g_(j+1) + ... + g_i), where g are the log decays. Segment
boundaries are masks, not decays.

Decay is "scalar" (one per token) or "vector" (one per key channel). Let P_i be the sum of g over
the tokens of a chunk after its first one, up to token i. Then the weight is exp(P_i) exp(-P_j): one
product of decayed queries and decayed keys. The decay of the chunk's first token is applied to the
state before the chunk starts, so a chunk uses the gates of the token after each of its own
(``next_gates``).

exp(-P) overflows if P is too small. A chunk is therefore factored only if no P in it is below
-MAX_FACTORED_DECAY (base 2). From the first chunk on where this fails, the rest of the split is
processed in windows, each with as many tokens as can be factored together. All weights are exact
for any gate, and weak gates cost nothing extra. The end of a window depends on earlier gates only,
so later tokens do not change earlier results.

Letters: C tokens of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.backends.linear.kernels.parts import LOG2_E, dot_add, load_rows, weighted_column_sums

LOG_ZERO: tl.constexpr = tl.constexpr(-1e4)  # exp of it is 0 in every dtype
MAX_FACTORED_DECAY: tl.constexpr = tl.constexpr(80.0)  # base 2; 2^80 times a feature stays finite


@triton.jit
def number_segments(segment_ids, chunk_start, token, in_bounds):
    """Return the segment of each token relative to the chunk's start, ``[C]``, and the last one.

    Segment 0 continues from before the chunk. The first token of a row starts no new segment.
    """
    position = chunk_start + token
    current = tl.load(segment_ids + position, mask=in_bounds, other=0)
    previous = tl.load(segment_ids + tl.maximum(position - 1, 0), mask=in_bounds, other=0)
    starts = (in_bounds & (current != previous)).to(tl.int32)
    return tl.cumsum(starts, 0), tl.sum(starts, 0)


@triton.jit
def load_first_decay(log_decay, column, DECAY: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the decay of a split's first token, a number or ``[columns]``."""
    if DECAY == "none":
        gate = 0.0
    elif DECAY == "scalar":
        gate = tl.load(log_decay).to(tl.float32)
    else:
        gate = tl.load(log_decay + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    return tl.exp2(tl.maximum(gate, LOG_ZERO) * LOG2_E)


@triton.jit
def load_scalar_gates(log_decay, token_stride, token, count):
    """Load the base-2 log decay of each token, ``[C]``, float64; 0 from token ``count`` on."""
    gates = tl.load(log_decay + token * token_stride, mask=token < count, other=0.0)
    return tl.maximum(gates.to(tl.float32), LOG_ZERO).to(tl.float64) * LOG2_E


@triton.jit
def factor_scalar_decay(
    log_decay, token_stride, token, count, edge, REVERSE: tl.constexpr, WINDOWS: tl.constexpr
):  # fmt: skip
    """Return the factors exp(P) and exp(-P) of the decay in a chunk or a window.

    Without WINDOWS, all rows of the chunk are included if ``edge`` is 1 and the chunk can be
    factored, else none. With WINDOWS, the included rows are the longest window that can be
    factored: from the chunk's first row on, or, REVERSE, from row ``edge - 1`` back.

    Returns:
        exp(P) for queries and exp(-P) for keys, ``[C]``, 0 for excluded rows; the decay of the
        state from the first included token to the first token after the last one; which rows are
        included; and the new edge. That is whether all rows are included, or with WINDOWS the end
        of the window (REVERSE: its start).
    """
    C: tl.constexpr = token.shape[0]
    gates = load_scalar_gates(log_decay, token_stride, token, count)
    next_gates = load_scalar_gates(log_decay + token_stride, token_stride, token, count - 1)
    begin, end = edge * 0, edge * 0 + C
    if WINDOWS:
        if REVERSE:
            end = edge
            cumulative = tl.cumsum(tl.where(token < end - 1, next_gates, 0.0), 0, reverse=True)
            rows = tl.sum(((token < end) & (cumulative >= -MAX_FACTORED_DECAY)).to(tl.int32), 0)
            begin = end - tl.maximum(rows, 1)
        else:
            cumulative = tl.cumsum(tl.where(token > 0, gates, 0.0), 0)
            end = tl.maximum(tl.sum((cumulative >= -MAX_FACTORED_DECAY).to(tl.int32), 0), 1)
    in_window = (token >= begin) & (token < end)
    total = tl.sum(tl.where(in_window, next_gates, 0.0), 0)
    next_edge = begin if REVERSE else end
    if not WINDOWS:
        factorable = (edge > 0) & (total >= -MAX_FACTORED_DECAY)
        in_window = in_window & factorable
        total = tl.where(factorable, total, 0.0)
        next_edge = factorable.to(tl.int32)
    cumulative = tl.cumsum(tl.where(in_window & (token > begin), gates, 0.0), 0)
    log_q_decay = cumulative.to(tl.float32)
    residual = ((cumulative - log_q_decay) / LOG2_E).to(
        tl.float32
    )  # rounding error of the exponent, applied to first order
    q_decay = tl.where(in_window, tl.exp2(log_q_decay) * (1 + residual), 0.0)
    k_decay = tl.where(in_window, tl.exp2(-log_q_decay) * (1 - residual), 0.0)
    return q_decay, k_decay, tl.exp2(total.to(tl.float32)), in_window, next_edge


@triton.jit
def matmul_cumsum(gates, mask, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``mask @ gates``: for each row the sum of the rows of gates that the mask selects.

    With a triangular mask this is a cumulative sum, and costs less than one across threads.
    """
    acc = tl.zeros(gates.shape, tl.float32)
    return dot_add(mask.to(tl.float32), gates, acc, OPERAND, PRECISION, "right")


@triton.jit
def load_vector_gates(log_decay, token_stride, token, column, count, COLUMNS: tl.constexpr):
    """Load the base-2 log decays, ``[C, columns]``; 0 from token ``count`` on."""
    gates = load_rows(log_decay, token, token_stride, column, token < count, COLUMNS)
    return tl.maximum(gates.to(tl.float32), LOG_ZERO) * LOG2_E


@triton.jit
def factor_vector_decay(
    log_decay, token_stride, token, column, count, edge, COLUMNS: tl.constexpr,
    SCALES_ROWS: tl.constexpr, REVERSE: tl.constexpr, WINDOWS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the decay of a chunk or a window per channel; see :func:`factor_scalar_decay`.

    Returns:
        P in base 2, ``[C, columns]``; the decay of the state, ``[columns]``; which rows are
        included (the caller sets the others to 0); and the new edge.
    """
    C: tl.constexpr = token.shape[0]
    # A product of so few rows would be repeated by all warps
    USE_CUMSUM: tl.constexpr = WINDOWS or C < 32
    i, j = token[:, None], token[None, :]
    next_gates = load_vector_gates(
        log_decay + token_stride, token_stride, token, column, count - 1, COLUMNS
    )
    gates = next_gates
    if USE_CUMSUM:
        gates = load_vector_gates(log_decay, token_stride, token, column, count, COLUMNS)
    begin, end = edge * 0, edge * 0 + C
    if WINDOWS:
        if REVERSE:
            end = edge
            cumulative = tl.cumsum(tl.where(i < end - 1, next_gates, 0.0), 0, reverse=True)
            rows = tl.sum(
                ((token < end) & (tl.min(cumulative, 1) >= -MAX_FACTORED_DECAY)).to(tl.int32), 0
            )
            begin = end - tl.maximum(rows, 1)
        else:
            cumulative = tl.cumsum(tl.where(i > 0, gates, 0.0), 0)
            end = tl.maximum(
                tl.sum((tl.min(cumulative, 1) >= -MAX_FACTORED_DECAY).to(tl.int32), 0), 1
            )
    in_window = (token >= begin) & (token < end)
    if USE_CUMSUM:
        cumulative = tl.cumsum(tl.where(in_window[:, None] & (i > begin), gates, 0.0), 0)
        cumulative = tl.where(in_window[:, None], cumulative, 0.0)
    else:
        cumulative = matmul_cumsum(next_gates, j < i, OPERAND, PRECISION)
    total = weighted_column_sums(
        next_gates, in_window.to(tl.float32), SCALES_ROWS, OPERAND, PRECISION, "left"
    )
    next_edge = begin if REVERSE else end
    if not WINDOWS:
        factorable = (edge > 0) & (tl.min(total, 0) >= -MAX_FACTORED_DECAY)
        in_window = in_window & factorable
        total = tl.where(factorable, total, 0.0)
        if not factorable:
            cumulative *= 0.0  # exp2(-cumulative) would be infinite
        next_edge = factorable.to(tl.int32)
    return cumulative, tl.exp2(total), in_window, next_edge
