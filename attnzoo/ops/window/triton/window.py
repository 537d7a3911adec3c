"""Triton kernels of softmax attention inside a window, with the log-sum-exp, and its gradients.

A query block reads only the key blocks of its band: time O(T w D), and no score in memory. With
P_ij = exp(s q_i k_j - lse_i) for keys j of the window, and the gradients do, dlse of both results:

    out_i = sum over j of P_ij v_j          delta_i = do_i out_i - dlse_i
    dS_ij = P_ij (do_i v_j - delta_i)       dq_i = s sum of dS_ij k_j,  dk_j = s sum of dS_ij q_i

In one row of sequences, ids are the sequence of each token, negative for tokens of none, which are
not read and get zeros.
Source: Dao et al., 2022, arXiv:2205.14135.
Letters: B batch, H heads, Hkv key heads, G = H / Hkv, T tokens, D key size, E value size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.runtime.triton_products import dot_add

NO_KEYS: tl.constexpr = tl.constexpr(-1e30)  # log-sum-exp of a query that sees no key
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def load_ids(ids, token, tokens, IDS: tl.constexpr):
    """Return the sequence of each token; -1 for tokens of none or outside of the row."""
    in_bounds = (token >= 0) & (token < tokens)
    if IDS:
        return tl.load(ids + token, mask=in_bounds, other=-1)
    return tl.where(in_bounds, 0, -1)


@triton.jit
def load_block(x, token, token_stride, column, of, COLUMNS: tl.constexpr):
    """Load ``[rows, columns]``; zeros where ``of`` is negative and in padding columns."""
    mask = (of >= 0)[:, None] & (column < COLUMNS)[None, :]
    offsets = token.to(tl.int64)[:, None] * token_stride + column[None, :]
    return tl.load(x + offsets, mask=mask, other=0.0)


@triton.jit
def store_block(x, value, token, token_stride, column, tokens, COLUMNS: tl.constexpr):
    """Store ``[rows, columns]``, except outside the row and padding columns."""
    mask = (token < tokens)[:, None] & (column < COLUMNS)[None, :]
    offsets = token.to(tl.int64)[:, None] * token_stride + column[None, :]
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def visible(query, key, of_query, of_key, before, after):
    """Return which keys each query sees, ``[queries, keys]``."""
    distance = query[:, None] - key[None, :]
    in_band = (distance <= before) & (distance >= -after)
    return in_band & (of_query[:, None] == of_key[None, :]) & (of_key >= 0)[None, :]


# Window, forward: see above.
#
# grid     (ceil(T / BLOCK), B * H): one program computes a block of queries of one head
# reads    q [B, H, T, D], k [B, Hkv, T, D], v [B, Hkv, T, E], any strides and float dtypes; with
#          IDS: ids [B, T], int32
# writes   out [B, T, H, E]; lse [B, H, T] float32, natural logarithm; NO_KEYS and zeros for a query
#          that sees no key
# limits   D, E <= 256
# oracle   a dense mask in float64, on a GPU and with TRITON_INTERPRET=1
@triton.jit(do_not_specialize=["tokens", "before", "after"])
def window_kernel(
    q, k, v, out, lse, ids,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    tokens, before, after, scale, heads,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BLOCK: tl.constexpr, IDS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of queries; see above."""
    start, bh = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    k += b * k_batch + h // G * k_head
    v += b * v_batch + h // G * v_head
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    query = start + tl.arange(0, BLOCK)
    ids += b * tokens
    of_query = load_ids(ids, query, tokens, IDS)
    rows = load_block(q + b * q_batch + h * q_head, query, q_token, d, of_query, D).to(OPERAND)
    maximum = tl.full((BLOCK,), NO_KEYS, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, BE), tl.float32)
    first = tl.maximum(start - before, 0)
    last = tl.minimum(start + BLOCK + after, tokens)
    for i in range((last - first + BLOCK - 1) // BLOCK):
        key = first + i * BLOCK + tl.arange(0, BLOCK)
        of_key = load_ids(ids, key, tokens, IDS)
        keys = load_block(k, key, k_token, d, of_key, D).to(OPERAND)
        values = load_block(v, key, v_token, e, of_key, E).to(OPERAND)
        scores = dot_add(
            rows, tl.trans(keys), tl.zeros((BLOCK, BLOCK), tl.float32), OPERAND, PRECISION, ""
        )
        mask = visible(query, key, of_query, of_key, before, after)
        scores = tl.where(mask, scores * (scale * LOG2_E), -float("inf"))
        largest = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - largest[:, None])
        correction = tl.exp2(maximum - largest)
        total = total * correction + tl.sum(weights, 1)
        acc = dot_add(weights, values, acc * correction[:, None], OPERAND, PRECISION, "")
        maximum = largest
    seen = total > 0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    log_sum = tl.where(seen, (maximum + tl.log2(tl.where(seen, total, 1.0))) / LOG2_E, NO_KEYS)
    rows_out = out + (b * tokens * heads + h) * E
    store_block(rows_out, acc, query, heads * E, e, tokens, E)
    tl.store(lse + bh * tokens + query, log_sum, mask=query < tokens)


# Gradient of the queries: see above.
#
# grid     as window_kernel
# reads    also do [B, H, T, E] and dlse, lse [B, H, T]
# writes   dq [B, T, H, D]; delta [B, H, T], float32, which window_key_gradient_kernel reads
@triton.jit(do_not_specialize=["tokens", "before", "after"])
def window_query_gradient_kernel(
    q, k, v, d_out, d_lse, out, lse, dq, delta, ids,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    o_batch, o_head, o_token, tokens, before, after, scale, heads,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BLOCK: tl.constexpr, IDS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of queries; see above."""
    start, bh = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    k += b * k_batch + h // G * k_head
    v += b * v_batch + h // G * v_head
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    query = start + tl.arange(0, BLOCK)
    ids += b * tokens
    of_query = load_ids(ids, query, tokens, IDS)
    rows = load_block(q + b * q_batch + h * q_head, query, q_token, d, of_query, D).to(OPERAND)
    d_rows = load_block(d_out + b * o_batch + h * o_head, query, o_token, e, of_query, E)
    d_rows = d_rows.to(OPERAND)
    outs = load_block(out + (b * tokens * heads + h) * E, query, heads * E, e, of_query, E)
    in_bounds, row = query < tokens, bh * tokens + query
    delta_rows = tl.sum(d_rows.to(tl.float32) * outs.to(tl.float32), 1)
    delta_rows -= tl.load(d_lse + row, mask=in_bounds, other=0.0)
    tl.store(delta + row, delta_rows, mask=in_bounds)
    log_sum = tl.load(lse + row, mask=in_bounds, other=0.0) * LOG2_E
    acc = tl.zeros((BLOCK, BD), tl.float32)
    first = tl.maximum(start - before, 0)
    last = tl.minimum(start + BLOCK + after, tokens)
    for i in range((last - first + BLOCK - 1) // BLOCK):
        key = first + i * BLOCK + tl.arange(0, BLOCK)
        of_key = load_ids(ids, key, tokens, IDS)
        keys = load_block(k, key, k_token, d, of_key, D).to(OPERAND)
        values = load_block(v, key, v_token, e, of_key, E).to(OPERAND)
        mask = visible(query, key, of_query, of_key, before, after)
        zeros = tl.zeros((BLOCK, BLOCK), tl.float32)
        scores = dot_add(rows, tl.trans(keys), zeros, OPERAND, PRECISION, "")
        scores = scores * (scale * LOG2_E) - log_sum[:, None]
        weights = tl.exp2(tl.where(mask, scores, -float("inf")))
        d_weights = dot_add(d_rows, tl.trans(values), zeros, OPERAND, PRECISION, "")
        d_scores = weights * (d_weights - delta_rows[:, None])
        acc = dot_add(d_scores, keys, acc, OPERAND, PRECISION, "")
    store_block(dq + (b * tokens * heads + h) * D, acc * scale, query, heads * D, d, tokens, D)


# Gradients of keys and values: see above.
#
# grid     (ceil(T / BLOCK), B * Hkv): one program computes a block of keys of one key head
# writes   dk [B, T, Hkv, D], dv [B, T, Hkv, E]
@triton.jit(do_not_specialize=["tokens", "before", "after"])
def window_key_gradient_kernel(
    q, k, v, d_out, lse, delta, dk, dv, ids,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    o_batch, o_head, o_token, tokens, before, after, scale, heads,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BLOCK: tl.constexpr, IDS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of keys; see above."""
    start, bh = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    key_heads = heads // G
    b, h = bh // key_heads, bh % key_heads
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    key = start + tl.arange(0, BLOCK)
    ids += b * tokens
    of_key = load_ids(ids, key, tokens, IDS)
    keys = load_block(k + b * k_batch + h * k_head, key, k_token, d, of_key, D).to(OPERAND)
    values = load_block(v + b * v_batch + h * v_head, key, v_token, e, of_key, E).to(OPERAND)
    d_keys, d_values = tl.zeros((BLOCK, BD), tl.float32), tl.zeros((BLOCK, BE), tl.float32)
    first = tl.maximum(start - after, 0)
    last = tl.minimum(start + BLOCK + before, tokens)
    blocks = (last - first + BLOCK - 1) // BLOCK
    for i in range(blocks * G):
        head = h * G + i // blocks
        query = first + i % blocks * BLOCK + tl.arange(0, BLOCK)
        of_query = load_ids(ids, query, tokens, IDS)
        rows = load_block(q + b * q_batch + head * q_head, query, q_token, d, of_query, D)
        rows = rows.to(OPERAND)
        d_rows = load_block(d_out + b * o_batch + head * o_head, query, o_token, e, of_query, E)
        d_rows = d_rows.to(OPERAND)
        row, in_bounds = (b * heads + head) * tokens + query, query < tokens
        log_sum = tl.load(lse + row, mask=in_bounds, other=0.0) * LOG2_E
        delta_rows = tl.load(delta + row, mask=in_bounds, other=0.0)
        mask = visible(query, key, of_query, of_key, before, after)
        zeros = tl.zeros((BLOCK, BLOCK), tl.float32)
        scores = dot_add(keys, tl.trans(rows), zeros, OPERAND, PRECISION, "")
        scores = scores * (scale * LOG2_E) - log_sum[None, :]
        weights = tl.exp2(tl.where(tl.trans(mask), scores, -float("inf")))
        d_values = dot_add(weights, d_rows, d_values, OPERAND, PRECISION, "")
        d_weights = dot_add(values, tl.trans(d_rows), zeros, OPERAND, PRECISION, "")
        d_scores = weights * (d_weights - delta_rows[None, :])
        d_keys = dot_add(d_scores, rows, d_keys, OPERAND, PRECISION, "")
    rows_k, rows_v = dk + (b * tokens * key_heads + h) * D, dv + (b * tokens * key_heads + h) * E
    store_block(rows_k, d_keys * scale, key, key_heads * D, d, tokens, D)
    store_block(rows_v, d_values, key, key_heads * E, e, tokens, E)
