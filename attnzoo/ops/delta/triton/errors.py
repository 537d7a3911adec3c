"""Triton kernels of the prediction errors of the delta rule, and of their gradients.

With the values u = beta e, the delta rule is linear attention, which
:mod:`attnzoo.backends.linear.kernels` computes. The kernels here solve the system of the errors,

    e_t = v_t - A_t k_t S_0 - sum over j < t of L_tj u_j,        L_tj = k_t^T exp(P_t - P_j) k_j

with P the sums of log decays and A_t = exp(P_t). Inside a chunk, e = x + m (beta x): x is v minus
the prediction of the state before the chunk, and m, strictly lower triangular, solves
(I + L beta) m = -L. The gradient solves the transposed system from the last token to the first,
with the same m: w = z + m^T (beta z), where z is the gradient of u minus the part of later chunks.

Decays per channel multiply k token by token inside a chunk, so no factor exceeds 1, however strong
the decay is. As in :mod:`attnzoo.ops.linear.triton.out`, no product of two tiles is
transposed to be an operand of a third one.

A sequence is a row, or, with VARLEN, a part of the one row. The chunks of a row of sequences are
found as its splits are in :mod:`attnzoo.ops.linear.triton.splits`, with splits of C tokens.

Other letters: S sequences (B without VARLEN), T tokens of a row, N programs of a head: at least one
per chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.ops.linear.triton.decay import (
    load_vector_gates,
    pair_decay,
    scalar_decay,
)
from attnzoo.ops.linear.triton.parts import (
    load_rows,
    load_tile,
    materialize,
    store_rows,
)
from attnzoo.ops.linear.triton.splits import locate_split
from attnzoo.runtime.triton_products import dot_add


@triton.jit
def decayed_products(
    keys, log_decay, gate_token, token, column, count, D: tl.constexpr, C: tl.constexpr
):
    """Return L^T of a chunk with a decay per channel: row j, column i has L_ij, for j < i."""
    later = (token > 0) & (token < count)
    decay = tl.exp2(load_vector_gates(log_decay, gate_token, token, column, later, D))
    products = tl.zeros((C, C), tl.float32)
    decayed = tl.zeros(keys.shape, tl.float32)
    for i in range(C):
        row = tl.sum(tl.where((token == i)[:, None], decay, 0.0), 0)
        key = tl.sum(tl.where((token == i)[:, None], keys, 0.0), 0)
        decayed = decayed * row[None, :]
        products = tl.where(
            (token == i)[None, :], tl.sum(decayed * key[None, :], 1)[:, None], products
        )
        decayed = tl.where((token == i)[:, None], keys, decayed)
    return products


@triton.jit
def inverse_rows(tokens, C: tl.constexpr, VARLEN: tl.constexpr):
    """Return R, the rows of m of a head; in full rows, the last chunk has rows for C tokens."""
    return tokens if VARLEN else (tokens + C - 1) // C * C


# Inverse: m of every chunk; (I + L beta)^-1 is I + m beta.              (arXiv:2406.06484)
#
# grid     (B * Hkv * N): one program per chunk of a key head; some have none
# reads    k [B, Hkv, T, D], beta [B, Hkv, T], log decays; any strides and float dtypes
# writes   m [B, Hkv, R, C], float32: the rows of a chunk's square are at its tokens
# limits   D <= 256; C a power of two, at least 16
# oracle   delta_attention(impl="reference"), on a GPU and with TRITON_INTERPRET=1
@triton.jit(do_not_specialize=["tokens", "num_chunks", "num_sequences"])
def inverse_kernel(
    k, beta, log_decay, starts, lengths, boundary_sequences, m,
    k_batch, k_head, beta_batch, beta_head, gate_batch, gate_head,
    tokens, num_chunks, num_sequences,
    k_token: tl.constexpr, beta_token: tl.constexpr, gate_token: tl.constexpr,
    key_heads: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, VARLEN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Invert the system of one chunk by forward substitution; see above."""
    index = tl.program_id(0).to(tl.int64)
    n, bh = index % num_chunks, index // num_chunks
    b, h = bh // key_heads, bh % key_heads
    _, start, end, _, _ = locate_split(
        n, b, starts, lengths, boundary_sequences, tokens, C, num_chunks, num_sequences, VARLEN
    )
    if VARLEN:  # noqa: SIM102 (a constant)
        if start >= end:
            return
    base, count = start.to(tl.int64), end - start
    token, column = tl.arange(0, C), tl.arange(0, BD)
    in_bounds = token < count
    keys = load_rows(k + b * k_batch + h * k_head + base * k_token, token, k_token, column,
                     in_bounds, D)  # fmt: skip
    beta_row = beta + b * beta_batch + h * beta_head + base * beta_token
    strength = tl.load(beta_row + token * beta_token, mask=in_bounds, other=0.0).to(tl.float32)
    gates = log_decay + b * gate_batch + h * gate_head + base * gate_token
    mask = (token[:, None] < token[None, :]) & in_bounds[None, :]
    if DECAY == "vector":
        products = decayed_products(
            keys.to(tl.float32), gates, gate_token, token, column, count, D, C
        )
        products = tl.where(mask, products, 0.0)
    else:
        products = tl.zeros((C, C), tl.float32)
        products = dot_add(keys, tl.trans(keys), products, OPERAND, PRECISION, "")
        if DECAY == "scalar":
            high, low, _, _, _ = scalar_decay(gates, gate_token, token, count)
            products *= pair_decay(high, low, mask, True, OPERAND)
        else:
            products = tl.where(mask, products, 0.0)
    weights = products * strength[:, None]  # row j, column i: L_ij beta_j
    rows = -tl.trans(products)
    for i in range(1, C):
        weight = tl.sum(tl.where((token == i)[None, :], weights, 0.0), 1)
        update = tl.sum(weight[:, None] * rows, 0)
        rows = tl.where((token == i)[:, None], rows - update[None, :], rows)
    m += (bh * inverse_rows(tokens, C, VARLEN) + base) * C
    offsets = token[:, None] * C + token[None, :]
    if VARLEN:
        tl.store(m + offsets, rows, mask=in_bounds[:, None])
    else:
        tl.store(m + offsets, rows)


@triton.jit
def chunk_keys(
    k, log_decay, start, end, k_token, gate_token, column,
    D: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Return the keys of a chunk, decayed from its start and to its end, and the state's decay.

    The keys are ``[C, W]``. The decay is ``[W]`` or a scalar.
    """
    base = start.to(tl.int64)
    token = tl.arange(0, C)
    in_bounds = token < end - start
    keys = load_rows(k + base * k_token, token, k_token, column, in_bounds, D)
    k_from_start, k_to_end, state_decay = keys, keys, 1.0
    if DECAY == "vector":
        gates = log_decay + base * gate_token
        own = load_vector_gates(gates, gate_token, token, column, in_bounds, D)
        following = load_vector_gates(
            gates + gate_token, gate_token, token, column, token + 1 < end - start, D
        )
        k_from_start = (keys * tl.exp2(tl.cumsum(own, 0))).to(OPERAND)
        k_to_end = (keys * tl.exp2(tl.cumsum(following, 0, reverse=True))).to(OPERAND)
        state_decay = tl.exp2(tl.sum(own, 0))
    if DECAY == "scalar":
        _, _, from_start, to_end, state_decay = scalar_decay(
            log_decay + base * gate_token, gate_token, token, end - start
        )
        k_from_start = (k_from_start * from_start[:, None]).to(OPERAND)
        k_to_end = (k_to_end * to_end[:, None]).to(OPERAND)
    return materialize(k_from_start.to(OPERAND)), materialize(k_to_end.to(OPERAND)), state_decay


# Errors: e of every token, in chunks from the first to the last; REVERSE: w, from the last to the
# first, with R the negative gradient of the state after the chunk:
#
#     x = v - K_A S,      e = x + m (beta x),     S = decay S + K_to_end^T (beta e)
#     z = d_u - K_to_end R,   w = z + m^T (beta z),   R = decay R + K_A^T (beta w)
#
# grid     (S * Hkv * tiles): one program scans one tile of the values of a sequence's key head
# reads    k [B, Hkv, T, D], x: v or d_u [B, Hkv, T, E], beta, log decays, any strides and float
#          dtypes; m [B, Hkv, R, C], the state before the first token [S, Hkv, D, E] (zeros without
#          HAS_STATE), float32
# writes   errors: e or w, and written: beta times it, [B, T, Hkv, E]; not outside of sequences
# memory   reads and writes each tensor once
# limits   D, E <= 256; C a power of two, at least 16
# oracle   delta_attention(impl="reference") and autograd, on a GPU and with TRITON_INTERPRET=1
@triton.jit(do_not_specialize=["tokens"])
def errors_kernel(
    k, x, beta, log_decay, starts, lengths, m, first_state, errors, written,
    k_batch, k_head, x_batch, x_head, beta_batch, beta_head, gate_batch, gate_head, tokens,
    k_token: tl.constexpr, x_token: tl.constexpr, beta_token: tl.constexpr,
    gate_token: tl.constexpr, key_heads: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, TILES: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, VARLEN: tl.constexpr, REVERSE: tl.constexpr,
    HAS_STATE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan the chunks of one key head; see above."""
    tile, index = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    b, h = index // key_heads, index % key_heads
    first, stop = 0, tokens
    if VARLEN:
        first = tl.load(starts + b).to(tl.int32)
        stop = first + tl.load(lengths + b).to(tl.int32)
        if first >= stop:
            return
        b *= 0
    token, d_column = tl.arange(0, C), tl.arange(0, BD)
    column = tile * BE + tl.arange(0, BE)
    k += b * k_batch + h * k_head
    x += b * x_batch + h * x_head
    beta += b * beta_batch + h * beta_head
    log_decay += b * gate_batch + h * gate_head
    m += (b * key_heads + h) * inverse_rows(tokens, C, VARLEN) * C
    row = b * tokens * key_heads + h
    state = tl.zeros((BD, BE), tl.float32)
    if HAS_STATE and not REVERSE:
        offsets = d_column[:, None] * E + column[None, :]
        state += load_tile(first_state + index * D * E, offsets, d_column, column, D, E)
    num_chunks = (stop - first + C - 1) // C
    for step in range(num_chunks):
        n = num_chunks - 1 - step if REVERSE else step
        start = first + n * C
        base = start.to(tl.int64)
        end = tl.minimum(start + C, stop)
        in_bounds = token < end - start
        k_from_start, k_to_end, decay = chunk_keys(
            k, log_decay, start, end, k_token, gate_token, d_column, D, C, DECAY, OPERAND
        )
        rows = load_rows(x + base * x_token, token, x_token, column, in_bounds, E)
        strength = tl.load(beta + (base + token) * beta_token, mask=in_bounds, other=0.0)
        strength = strength.to(tl.float32)[:, None]
        predicted = tl.zeros((C, BE), tl.float32)
        from_state = k_to_end if REVERSE else k_from_start
        predicted = dot_add(from_state, state, predicted, OPERAND, PRECISION, "right")
        residual = rows.to(tl.float32) - predicted
        square = m + base * C
        if REVERSE:
            place, is_row = token[None, :] * C + token[:, None], in_bounds[None, :]
        else:
            place, is_row = token[:, None] * C + token[None, :], in_bounds[:, None]
        if VARLEN:
            inverse = tl.load(square + place, mask=is_row, other=0.0)
        else:
            inverse = tl.load(square + place)
        solved = dot_add(inverse, residual * strength, residual, OPERAND, PRECISION, "both")
        update = (solved * strength).to(written.dtype.element_ty)
        result = (base * key_heads + row) * E
        store_rows(errors + result, solved, token, key_heads * E, column, in_bounds, E)
        store_rows(written + result, update, token, key_heads * E, column, in_bounds, E)
        if DECAY == "vector":
            state *= decay[:, None]
        else:
            state *= decay
        to_state = k_from_start if REVERSE else k_to_end
        state = dot_add(tl.trans(to_state), update, state, OPERAND, PRECISION, "")
