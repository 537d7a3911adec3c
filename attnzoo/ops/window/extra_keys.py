r"""Softmax over a window and a few more keys, from the output and log-sum-exp of the window.

With the window's output :math:`o_w` and log-sum-exp :math:`l_w`, and those of the extra keys,
:math:`o_e` and :math:`l_e`, one softmax over both is

.. math:: l = \log(e^{l_w} + e^{l_e}), \qquad o = e^{l_w - l} o_w + e^{l_e - l} o_e.

The backward pass of the window needs no gradient of :math:`l_w`: it computes weights as :math:`e^{s
- l}`, and gradients of scores from them and from o. Given l and o of both parts, it returns the
gradients of this softmax by the tensors of the window. Time and memory O(T X). Other letters: g = H
/ Hkv, X extra keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_extra_keys(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the softmax over the window and the extra keys, and its log-sum-exp.

    Args:
        out: Output of the window, ``[B, H, T, E]``.
        lse: Its log-sum-exp, ``[B, H, T]``, float32 or wider.
        q: Queries, ``[B, H, T, D]``.
        k: The extra keys, ``[B, Hkv, X, D]``.
        v: Their values, ``[B, Hkv, X, E]``.
        seen: Which of them each query sees, ``[1 or B, T, X]`` bool; false at keys of its window.
        scale: Multiplies the products.
    """
    scores = _scores(q, k, seen, scale)
    total = torch.logaddexp(lse, scores.logsumexp(4).flatten(1, 2))
    weights = _weights(scores, total, seen)
    extra_out = (weights @ v.to(weights.dtype).unsqueeze(2)).flatten(1, 2)
    return (lse - total).exp().unsqueeze(3) * out + extra_out, total


def extra_key_gradients(
    d_out: Tensor,
    delta: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the extra keys' scores by q, and by their keys and values.

    Args:
        d_out: Gradient of the output of :func:`merge_extra_keys`.
        delta: Sum of output times its gradient, minus the gradient of the log-sum-exp,
            ``[B, H, T]``.
        lse: The log-sum-exp.
        q: As there, and so are the rest.
        k: The extra keys.
        v: Their values.
        seen: Which of them each query sees.
        scale: Multiplies the products.
    """
    scores = _scores(q, k, seen, scale)
    shape, wide = scores.shape[:4], scores.dtype
    weights = _weights(scores, lse, seen)
    d_rows = d_out.to(wide).reshape(*shape, -1)
    d_weights = d_rows @ v.to(wide).unsqueeze(2).mT
    d_scores = weights * (d_weights - delta.view(*shape, 1)) * scale
    dq = (d_scores @ k.to(wide).unsqueeze(2)).flatten(1, 2)
    dk = (d_scores.mT @ q.to(wide).reshape(*shape, -1)).sum(2)
    dv = (weights.mT @ d_rows).sum(2)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return the scores of the extra keys, ``[B, Hkv, g, T, X]``, float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide).unflatten(1, (k.shape[1], -1)) * scale
    scores = queries @ k.to(wide).unsqueeze(2).mT
    masked: Tensor = scores.masked_fill(~seen[:, None, None], torch.finfo(wide).min / 8)
    return masked


def _weights(scores: Tensor, lse: Tensor, seen: Tensor) -> Tensor:
    """Return the softmax weights of the extra keys, given the log-sum-exp of all keys."""
    weights: Tensor = (scores - lse.view(*scores.shape[:4], 1)).exp() * seen[:, None, None]
    return weights
