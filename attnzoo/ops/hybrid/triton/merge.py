"""Triton kernels that merge softmax inside a window with linear attention outside it.

With the window's output near and its log-sum-exp lse, the linear sums values and total, and the
logit f:

    out = (e^a near + e^f values) / (e^a + e^f total),    a = lse, or 0 if relative

    p = e^a / denominator,    r = e^f / denominator,    out = p near + r values

The first W tokens have no key outside their window, so the linear sums start at token W. They are
zeros for tokens of no sequence, whose output is then near, and whatever their logit is.

Other letters: N = T - W tokens with linear sums, W window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.runtime.triton_products import block_size, contiguous_rows, device_context

BLOCK = 32  # tokens per program


@triton.jit
def rows_of(token, token_stride, column, tokens, COLUMNS: tl.constexpr):
    """Return the offsets and the mask of ``[tokens, columns]``."""
    mask = (token < tokens)[:, None] & (column < COLUMNS)[None, :]
    return token.to(tl.int64)[:, None] * token_stride + column[None, :], mask


# Merge: see above.
#
# grid     (ceil(T / BLOCK), B * H)
# reads    near [B, T, H, E], lse [B, H, T], values [B, N, H, E], total [B, H, N], float32; logit
#          [B, H, T], any strides; COUNT 1: the linear sums are divided by the number of tokens
#          before the window; 2: by counts [B, T]
# writes   out [B, T, H, E]; p, r [B, H, T], float32
@triton.jit(do_not_specialize=["tokens", "first", "window"])
def merge_kernel(
    near, lse, values, total, logit, counts, out, near_weight, linear_weight,
    logit_batch, logit_head, logit_token, tokens, first, window, heads, min_weight,
    E: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr, RELATIVE: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Merge a block of tokens of one head; see above."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column, in_bounds = tl.arange(0, BE), token < tokens
    row = bh * tokens + token
    later, later_row = token - first, bh * (tokens - first) + token - first
    sums = tl.load(total + later_row, mask=in_bounds & (later >= 0), other=0.0)
    f = tl.load(
        logit + b * logit_batch + h * logit_head + token * logit_token, mask=in_bounds, other=0.0
    )
    if COUNT == 1:
        f -= tl.log(tl.maximum(token + 1 - window, 1).to(tl.float32))
    if COUNT == 2:
        f -= tl.log(tl.maximum(tl.load(counts + b * tokens + token, mask=in_bounds, other=1.0), 1))
    a = tl.zeros((BLOCK,), tl.float32)
    if not RELATIVE:
        a = tl.load(lse + row, mask=in_bounds, other=0.0)
    has_linear = sums > min_weight
    of_linear = f + tl.log(tl.where(has_linear, sums, 1.0))
    maximum = tl.where(has_linear, tl.maximum(a, of_linear), a)
    p, r = tl.exp(a - maximum), tl.where(has_linear, tl.exp(f - maximum), 0.0)
    denominator = p + r * sums
    p, r = p / denominator, r / denominator
    offsets, mask = rows_of(token, heads * E, column, tokens, E)
    base = (b * tokens * heads + h) * E
    near_rows = tl.load(near + base + offsets, mask=mask, other=0.0)
    linear_offsets, _ = rows_of(later, heads * E, column, tokens, E)
    linear_rows = tl.load(
        values + (b * (tokens - first) * heads + h) * E + linear_offsets,
        mask=mask & has_linear[:, None],
        other=0.0,
    )
    merged = p[:, None] * near_rows + r[:, None] * linear_rows
    tl.store(out + base + offsets, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(near_weight + row, p, mask=in_bounds)
    tl.store(linear_weight + row, r, mask=in_bounds)


# Gradients of the merge. The gradients of near and values are rounded to their dtype before they
# are summed, so that the sums cancel in the kernels that read them.
#
# writes   d_near [B, T, H, E], d_values [B, N, H, E]; d_lse, d_logit [B, H, T] and delta [B, H, N],
#          the negative gradient of total, float32
@triton.jit(do_not_specialize=["tokens", "first"])
def merge_backward_kernel(
    d_out, near, values, near_weight, linear_weight, d_near, d_values, d_lse, delta, d_logit,
    o_batch, o_head, o_token, tokens, first, heads,
    E: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr, RELATIVE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of tokens of one head; see above."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column, in_bounds = tl.arange(0, BE), token < tokens
    row = bh * tokens + token
    p = tl.load(near_weight + row, mask=in_bounds, other=0.0)[:, None]
    r = tl.load(linear_weight + row, mask=in_bounds, other=0.0)[:, None]
    offsets, mask = rows_of(token, heads * E, column, tokens, E)
    base = (b * tokens * heads + h) * E
    near_rows = tl.load(near + base + offsets, mask=mask, other=0.0)
    later, later_row = token - first, bh * (tokens - first) + token - first
    linear_offsets, _ = rows_of(later, heads * E, column, tokens, E)
    linear_offsets += (b * (tokens - first) * heads + h) * E
    has_linear = mask & (later >= 0)[:, None]
    linear_rows = tl.load(values + linear_offsets, mask=has_linear & (r > 0), other=0.0)
    merged = p * near_rows + r * linear_rows
    offsets_o, _ = rows_of(token, o_token, column, tokens, E)
    rows = tl.load(d_out + b * o_batch + h * o_head + offsets_o, mask=mask, other=0.0)
    rows = rows.to(tl.float32)
    of_near = (p * rows).to(d_near.dtype.element_ty)
    of_linear = (r * rows).to(d_values.dtype.element_ty)
    tl.store(d_near + base + offsets, of_near, mask=mask)
    tl.store(d_values + linear_offsets, of_linear, mask=has_linear)
    to_near = tl.sum(of_near.to(tl.float32) * (near_rows - merged), 1)
    tl.store(d_lse + row, to_near * 0.0 if RELATIVE else to_near, mask=in_bounds)
    shared = tl.sum(of_linear.to(tl.float32) * merged, 1)
    tl.store(delta + later_row, shared, mask=in_bounds & (later >= 0))
    tl.store(d_logit + row, -to_near, mask=in_bounds)


class MergeOptions(NamedTuple):
    """Options of one merge."""

    relative: bool  # whether f is relative to the window's log-sum-exp
    mean: bool  # whether the linear sums are divided by the number of keys
    window: int  # W, in tokens
    first: int  # first token with linear sums
    min_weight: float  # smallest total that counts


def merge(
    near: Tensor,
    lse: Tensor,
    values: Tensor,
    total: Tensor,
    logit: Tensor,
    counts: Tensor | None,
    options: MergeOptions,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the merged output ``[B, T, H, E]`` and the factors p and r, ``[B, H, T]``.

    Args:
        near: Output of the window, ``[B, T, H, E]`` float32.
        lse: Its log-sum-exp, ``[B, H, T]``.
        values: Linear sums of values, ``[B, N, H, E]`` float32.
        total: Linear sums of weights, ``[B, H, N]``.
        logit: f, expanded to ``[B, H, T]``.
        counts: Number of keys in the linear sums, ``[B, T]``; ``None``: all tokens before the
            window.
        options: See :class:`MergeOptions`.
        dtype: Dtype of the output.
    """
    batch, tokens, heads, e = near.shape
    out = torch.empty_like(near, dtype=dtype)
    p, r = torch.empty_like(lse), torch.empty_like(lse)
    unused = lse if counts is None else counts.to(torch.float32).contiguous()
    with device_context(near.device):
        merge_kernel[(triton.cdiv(tokens, BLOCK), batch * heads)](
            near, lse, values, total, logit, unused, out, p, r, *logit.stride(), tokens,
            options.first, options.window, heads, options.min_weight, E=e, BE=block_size(e),
            BLOCK=BLOCK, RELATIVE=options.relative,
            COUNT=int(options.mean) * (1 if counts is None else 2), num_warps=4,
        )  # fmt: skip
    return out, p, r


def merge_backward(
    d_out: Tensor,
    near: Tensor,
    values: Tensor,
    near_weight: Tensor,
    linear_weight: Tensor,
    options: MergeOptions,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of near, lse and values, delta, and the gradient of logit.

    ``d_out`` is ``[B, H, T, E]``; the gradients of ``near`` and ``values`` have their shape, in
    ``dtype``. Delta is the negative gradient of ``total``.
    """
    d_out = contiguous_rows(d_out)
    batch, tokens, heads, e = near.shape
    d_near, d_values = torch.empty_like(near, dtype=dtype), torch.empty_like(values, dtype=dtype)
    d_lse, d_logit = torch.empty_like(near_weight), torch.empty_like(near_weight)
    delta = near_weight.new_empty(batch, heads, values.shape[1])
    with device_context(near.device):
        merge_backward_kernel[(triton.cdiv(tokens, BLOCK), batch * heads)](
            d_out, near, values, near_weight, linear_weight, d_near, d_values, d_lse, delta,
            d_logit, *d_out.stride()[:3], tokens, options.first, heads,
            E=e, BE=block_size(e), BLOCK=BLOCK, RELATIVE=options.relative, num_warps=4,
        )  # fmt: skip
    return d_near, d_lse, d_values, delta, d_logit
