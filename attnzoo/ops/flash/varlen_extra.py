"""Torch's varlen kernel, and a few keys outside the window of its queries, on CUDA.

The kernel returns its log-sum-exp, by which :mod:`attnzoo.ops.window.extra_keys` adds the keys.
Other letters: X extra keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.masks import Window
from attnzoo.ops.flash.varlen_kernel import (
    Sequences,
    call_varlen_attn,
    call_varlen_attn_backward,
    pack,
    unpack,
)
from attnzoo.ops.window.extra_keys import extra_key_gradients, merge_extra_keys
from attnzoo.runtime.kernel_calls import check_reverse_mode, first_derivative_only

OP = "attention to a window and extra keys by impl='varlen'"
INSTEAD = "another impl"


def outside_window(
    positions: Tensor,
    valid: Tensor,
    queries: int,
    *,
    window: Window,
    causal: bool,
    offset: int = 0,
    dilation: int = 1,
) -> Tensor:
    """Return which keys each query sees only because they are extra keys, ``[1 or B, T, X]``.

    Args:
        positions: Of the extra keys, ``[1 or B, X]``.
        valid: Which of them exist, ``[1 or B, X]`` bool.
        queries: T.
        window: Keys before and after a query that it sees, in steps of ``dilation`` tokens.
        causal: Whether later keys are masked.
        offset: Position of query 0.
        dilation: Tokens between neighbouring keys of the window.
    """
    query = torch.arange(queries, device=positions.device)[:, None] + offset
    distance = query - positions[:, None]
    before, after = (side * dilation for side in window)
    in_window = (distance <= before) & (distance >= -after) & (distance % dilation == 0)
    seen = valid[:, None] & ~in_window
    return seen & (distance >= 0) if causal else seen


def attend_with_extra_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: Sequences,
    window: Window,
    scale: float,
    *,
    extra_k: Tensor,
    extra_v: Tensor,
    seen: Tensor,
) -> Tensor:
    """Return attention to the window and to extra keys, ``[B, H, T, D]``.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``.
        v: Values, ``[B, Hkv, S, D]``.
        found: The sequences of the rows.
        window: As :func:`attnzoo.ops.flash.varlen.kernel_window` returns it.
        scale: Multiplies the products.
        extra_k: The extra keys, ``[B, Hkv, X, D]``, which may be among ``k`` too. A query of no
            sequence gets zeros if it sees none of them.
        extra_v: Their values.
        seen: Which of them each query sees, from :func:`outside_window`.
    """
    check_reverse_mode(OP, q, k, v, extra_k, extra_v, instead=INSTEAD)
    out: Tensor = _Merged.apply(  # type: ignore[no-untyped-call]
        q, k, v, extra_k, extra_v, seen, (found, window, scale)
    )
    return out


class _Merged(torch.autograd.Function):
    """See :func:`attend_with_extra_keys`; the options are sequences, window and scale."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extra_k: Tensor,
        extra_v: Tensor,
        seen: Tensor,
        options: tuple[Sequences, Window, float],
    ) -> Tensor:
        found, window, scale = options
        batch, queries = q.shape[0], q.shape[2]
        rows = pack(q, found.q_indices), pack(k, found.k_indices), pack(v, found.k_indices)
        out, lse = call_varlen_attn(*rows, found, window, scale, return_lse=True)
        out = unpack(out, found.q_indices, batch, queries)
        none = torch.finfo(lse.dtype).min / 8
        lse = unpack(lse.mT.unsqueeze(2), found.q_indices, batch, queries, fill=none).squeeze(3)
        merged, total = merge_extra_keys(out, lse, q, extra_k, extra_v, seen, scale)
        out = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, extra_k, extra_v, seen, out, total)
        ctx.options = options
        return out

    @staticmethod
    @first_derivative_only(OP, INSTEAD)
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, extra_k, extra_v, seen, out, lse = ctx.saved_tensors
        found, window, scale = ctx.options
        packed = [pack(x, found.q_indices) for x in (d_out, q, out)]
        keys, values = pack(k, found.k_indices), pack(v, found.k_indices)
        rows_lse = pack(lse.unsqueeze(3), found.q_indices).squeeze(2).mT.contiguous()
        grads = call_varlen_attn_backward(
            *(packed[0], packed[1], keys, values, packed[2], rows_lse, found, window, scale)
        )
        dq = unpack(grads[0], found.q_indices, q.shape[0], q.shape[2])
        dk, dv = (unpack(x, found.k_indices, k.shape[0], k.shape[2]) for x in grads[1:])
        delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(3)
        dq_extra, *d_extra = extra_key_gradients(
            d_out, delta, lse, q, extra_k, extra_v, seen, scale
        )
        return (dq + dq_extra).to(q.dtype), dk, dv, *d_extra, None, None
