r"""Torch's kernel for varied lengths, and a few keys outside the window of its queries, on CUDA.

The kernel returns the output :math:`o_w` of each query over its window, and the log-sum-exp
:math:`l_w` of the scores. The extra keys are computed densely, which gives :math:`o_e` and
:math:`l_e`. One softmax over both is

.. math:: l = \log(e^{l_w} + e^{l_e}), \qquad o = e^{l_w - l} o_w + e^{l_e - l} o_e.

The kernel's backward pass computes the weights of the window as :math:`e^{s - l}`, and the
gradients of scores from them and from the output. It is given l and o, and therefore returns the
gradients of this softmax by the tensors of the window.
Time O(T (w + X) D), memory O(T (X + D)).
Letters: B batch, H query heads, Hkv key heads, g = H / Hkv, T queries, S keys, D head size, X extra
keys, N real tokens, w window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.flash.impl.varlen_kernel import (
    Sequences,
    call_varlen_attn,
    call_varlen_attn_backward,
    pack,
    unpack,
)
from attnzoo.kernels.derivatives import check_reverse_mode, first_derivative_only
from attnzoo.masks import Window

OP = "attention to a window and extra keys by impl='varlen'"
INSTEAD = "another impl"


class ExtraKeys(NamedTuple):
    """Keys that queries see besides those of their window."""

    k: Tensor  # [B, Hkv, X, D]
    v: Tensor  # [B, Hkv, X, D]
    seen: Tensor  # [1 or B, T, X] bool: false at keys of the query's window


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
    extra: ExtraKeys,
) -> Tensor:
    """Return attention to the window and to extra keys, ``[B, H, T, D]``.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``.
        v: Values, ``[B, Hkv, S, D]``.
        found: The sequences of the rows.
        window: As :func:`attnzoo.backends.flash.impl.varlen.kernel_window` returns it.
        scale: Multiplies the products.
        extra: The extra keys, which may be among ``k`` too. A query of no sequence gets zeros if it
            sees none of them.
    """
    check_reverse_mode(OP, q, k, v, extra.k, extra.v, instead=INSTEAD)
    out: Tensor = _Merged.apply(q, k, v, *extra, (found, window, scale))  # type: ignore[no-untyped-call]
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
        lse = unpack(lse.mT.unsqueeze(2), found.q_indices, batch, queries, fill=none)
        scores = _scores(q, extra_k, scale, seen)
        extra_lse = scores.logsumexp(4).flatten(1, 2).unsqueeze(3)
        total = torch.logaddexp(lse, extra_lse)
        weights = _weights(scores, total, seen)
        extra_out = (weights @ extra_v.to(weights.dtype).unsqueeze(2)).flatten(1, 2)
        out = ((lse - total).exp() * out + extra_out).to(q.dtype)
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
        rows_lse = pack(lse, found.q_indices).squeeze(2).mT.contiguous()
        grads = call_varlen_attn_backward(
            *(packed[0], packed[1], keys, values, packed[2], rows_lse, found, window, scale)
        )
        dq = unpack(grads[0], found.q_indices, len(q), q.shape[2])
        dk, dv = (unpack(x, found.k_indices, len(k), k.shape[2]) for x in grads[1:])
        d_scores, d_extra_v = _extra_gradients(d_out, q, extra_k, extra_v, seen, out, lse, scale)
        wide = d_scores.dtype
        dq_extra = (d_scores @ extra_k.to(wide).unsqueeze(2)).flatten(1, 2)
        queries = q.to(wide).view(*d_scores.shape[:4], -1)
        d_extra_k = (d_scores.mT @ queries).sum(2)
        dq = (dq + dq_extra).to(q.dtype)
        return dq, dk, dv, d_extra_k.to(k.dtype), d_extra_v.to(v.dtype), None, None


def _scores(q: Tensor, extra_k: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Return the scores of the extra keys, ``[B, Hkv, g, T, X]``, float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide).unflatten(1, (extra_k.shape[1], -1)) * scale
    scores = queries @ extra_k.to(wide).unsqueeze(2).mT
    masked: Tensor = scores.masked_fill(~seen[:, None, None], torch.finfo(wide).min / 8)
    return masked


def _weights(scores: Tensor, lse: Tensor, seen: Tensor) -> Tensor:
    """Return the softmax weights of the extra keys, given the log-sum-exp of all, [B, H, T, 1]."""
    weights: Tensor = (scores - lse.view(*scores.shape[:4], 1)).exp() * seen[:, None, None]
    return weights


def _extra_gradients(
    d_out: Tensor,
    q: Tensor,
    extra_k: Tensor,
    extra_v: Tensor,
    seen: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the products of queries and extra keys, and of extra values."""
    scores = _scores(q, extra_k, scale, seen)
    shape, wide = scores.shape[:4], scores.dtype
    weights = _weights(scores, lse, seen)
    d_rows = d_out.to(wide).reshape(*shape, -1)
    delta = (d_out.to(wide) * out.to(wide)).sum(3).view(*shape, 1)
    d_weights = d_rows @ extra_v.to(wide).unsqueeze(2).mT
    d_scores = weights * (d_weights - delta) * scale
    return d_scores, (weights.mT @ d_rows).sum(2)
