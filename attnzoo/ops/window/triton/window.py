"""Softmax attention inside a window on a GPU, with its log-sum-exp: kernels and custom operators.

A query block reads only the key blocks of its band: time O(T w D), and no score in memory. With
P_ij = exp(s q_i k_j - lse_i) for keys j of the window, and the gradients do, dlse of both results:

    out_i = sum over j of P_ij v_j          delta_i = do_i out_i - dlse_i
    dS_ij = P_ij (do_i v_j - delta_i)       dq_i = s sum of dS_ij k_j,  dk_j = s sum of dS_ij q_i

In one row of sequences, ids are the sequence of each token, negative for tokens of none, which are
not read and get zeros. Source: Dao et al., 2022, arXiv:2205.14135.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.contract.masks import Window
from attnzoo.runtime.kernel_calls import refuse_derivative
from attnzoo.runtime.triton_products import (
    block_size,
    contiguous_rows,
    device_context,
    dot_add,
    operand_precision,
)

LARGEST = 256  # key and value size

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


# -- launches and operators ------------------------------------------------------------------------


def launch_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor | None,
    window: Window,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, T, H, E]`` in ``dtype``, and the log-sum-exp.

    ``window`` is the number of keys that a query sees before and after its own, and ``ids`` the
    sequence of each token, ``[B, T]`` int32, negative for tokens of none.
    """
    out, lse = _outputs(q, v, dtype)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    blocks, given, constants = _launch_options(q, k, v, ids, window, scale)
    with device_context(q.device):
        window_kernel[(blocks, q.shape[0] * q.shape[1])](
            q, k, v, out, lse, given, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            **constants,
        )  # fmt: skip
    return out, lse


def launch_window_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ids: Tensor | None,
    window: Window,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v as ``[B, T, heads, size]``.

    ``d_out`` is ``[B, H, T, E]``; ``out`` and ``lse`` are what :func:`launch_window` returned.
    """
    dq, dk, dv = (_empty_rows(x, x.shape[3]) for x in (q, k, v))
    delta = torch.empty_like(lse)
    q, k, v, d_out = (contiguous_rows(x) for x in (q, k, v, d_out))
    blocks, given, constants = _launch_options(q, k, v, ids, window, scale)
    strides = [s for x in (q, k, v, d_out) for s in x.stride()[:3]]
    with device_context(q.device):
        window_query_gradient_kernel[(blocks, q.shape[0] * q.shape[1])](
            q, k, v, d_out, d_lse, out, lse, dq, delta, given, *strides, **constants
        )
        window_key_gradient_kernel[(blocks, k.shape[0] * k.shape[1])](
            q, k, v, d_out, lse, delta, dk, dv, given, *strides, **constants
        )
    return dq, dk, dv


@torch.library.custom_op("attnzoo::window_triton", mutates_args=())
def window_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor | None,
    before: int,
    after: int,
    scale: float,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention inside a window, and the log-sum-exp of its scores.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        ids: The sequence of each token, ``[B, T]`` int32: queries see keys of their own. Outputs of
            tokens with negative ids are zeros. ``None``: each row is one sequence.
        before: Keys before a query's own that it sees.
        after: Keys after it.
        scale: Multiplies query-key products.
        wide: Whether the output is float32; else it has the dtype of ``v``.

    Returns:
        ``[B, H, T, E]`` and ``[B, H, T]`` float32. For a query that sees no key they are 0 and
        -1e30.
    """
    dtype = torch.float32 if wide else v.dtype
    out, lse = launch_window(q, k, v, ids, (before, after), scale, dtype)
    return out.transpose(1, 2), lse


@torch.library.custom_op("attnzoo::window_triton_backward", mutates_args=())
def window_triton_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ids: Tensor | None,
    before: int,
    after: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; ``out`` and ``lse`` are the forward results."""
    rows = out.transpose(1, 2).contiguous()
    grads = launch_window_backward(
        d_out, d_lse.contiguous(), q, k, v, rows, lse, ids, (before, after), scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _empty_rows(like: Tensor, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor ``[B, T, heads, size]``, the layout of the output projection."""
    return like.new_empty(like.shape[0], like.shape[2], like.shape[1], size, dtype=dtype)


def _outputs(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _empty_rows(q, v.shape[3], dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


def _launch_options(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, window: Window, scale: float
) -> tuple[int, Tensor, dict[str, Any]]:
    """Return the number of blocks, the ids, and the arguments that all kernels take."""
    float32_operands, precision = operand_precision(q, k, v)
    d, e, tokens = q.shape[3], v.shape[3], q.shape[2]
    block = 32 if max(d, e) > 128 or float32_operands else 64
    constants = {
        "tokens": tokens,
        "before": min(window[0], tokens),
        "after": min(window[1], tokens),
        "scale": scale,
        "heads": q.shape[1],
        "D": d,
        "E": e,
        "G": q.shape[1] // k.shape[1],
        "BD": block_size(d),
        "BE": block_size(e),
        "BLOCK": block,
        "IDS": ids is not None,
        "OPERAND": tl.float32 if float32_operands else tl.bfloat16,
        "PRECISION": precision,
        "num_warps": 4,
        "num_stages": 2,
    }
    given = q.new_empty(1, dtype=torch.int32) if ids is None else ids.contiguous()
    return triton.cdiv(tokens, block), given, constants


@window_triton.register_fake
def _window_triton_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out, lse = _outputs(q, v, torch.float32 if options[-1] else v.dtype)
    return out.transpose(1, 2), lse


@window_triton_backward.register_fake
def _window_triton_backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty_rows(x, x.shape[3]).transpose(1, 2) for x in args[2:5])
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])
    ctx.options = inputs[4:7]


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = window_triton_backward(d_out, d_lse, *ctx.saved_tensors, *ctx.options)
    needed = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *needed, *[None] * 5


window_triton.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(window_triton_backward, "softmax attention inside a window")
