"""Softmax attention with the whole score matrix, in float32 or wider."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SoftmaxCall(NamedTuple):
    """The inputs of one call, as in :func:`attnzoo.ops.softmax.api.softmax_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Tensor | None
    bias: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float


def run_reference(x: SoftmaxCall) -> tuple[Tensor, Tensor]:
    """Return the output, ``[B, H, T, E]``, and the weights, ``[B, H, T, S]``."""
    q, k, v, mask, sinks = x.q, x.k, x.v, x.mask, x.sinks
    batch, heads, length, size = q.shape
    key_heads, keys = k.shape[1:3]
    rows = heads // key_heads * length  # the query heads of a key head, one after another
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).reshape(batch, key_heads, rows, size)  # q may be a transposed view
    products = grouped @ k.to(wide).transpose(2, 3)
    scores = products.view(batch, heads, length, keys) * x.scale
    if x.softcap is not None:
        scores = x.softcap * torch.tanh(scores / x.softcap)
    if x.bias is not None:
        scores = scores + x.bias.to(wide)
    sees_any = None
    if mask is not None:
        sees_any = mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~(mask | ~sees_any), -torch.inf)
    if x.bias is not None and sinks is None:  # a bias of -inf hides keys as a mask does
        hidden = scores.isneginf().all(-1, keepdim=True)
        scores = scores.masked_fill(hidden, 0)
        sees_any = ~hidden if sees_any is None else sees_any & ~hidden
    if sinks is not None:
        logits = sinks.to(wide)
        logits = logits if logits.ndim == 4 else logits.view(1, heads, 1, 1)
        logits = logits.expand(batch, heads, length, 1)
        weights = torch.softmax(torch.cat([scores, logits], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    if sees_any is not None:
        weights = weights.masked_fill(~sees_any, 0)
    weights = torch.dropout(weights, x.dropout, train=x.dropout > 0)
    out = weights.view(batch, key_heads, rows, keys) @ v.to(wide)
    out = out.view(batch, heads, length, v.shape[3])
    return out.to(v.dtype), weights.to(v.dtype)
