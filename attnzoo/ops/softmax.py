r"""Softmax attention, written out: the oracle of every exact implementation.

Computes :math:`o_i = \sum_j a_{ij} v_j`, :math:`a_{ij} = \mathrm{softmax}_j(s\, q_i \cdot k_j)`.
Time and memory O(T S). Source: Vaswani et al., 2017, arXiv:1706.03762.
Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.state import AttentionOutput


def sink_column(sinks: Tensor, batch: int, heads: int, length: int) -> Tensor:
    """Bring sinks, ``[H]`` or ``[B, H, T, 1]``, to the scores of one more key, ``[B, H, T, 1]``."""
    column = sinks if sinks.ndim == 4 else sinks.view(1, heads, 1, 1)
    return column.expand(batch, heads, length, 1)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> AttentionOutput:
    """Attend with a materialised score matrix, in float32 or wider inside.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``; every group of H / Hkv query heads shares one.
        v: Values, ``[B, Hkv, S, E]``.
        scale: Multiplies the products; ``None`` means ``D ** -0.5``.
        mask: True where a key is seen, broadcastable to ``[B, H, T, S]``; a row that sees nothing
            gives zeros.
        bias: Added to the scores, broadcastable to ``[B, H, T, S]``.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        sinks: A logit per head, ``[H]``, or per head and query, ``[B, H, T, 1]``, that takes part
            in the softmax and carries no value.
        dropout: Probability with which a weight is dropped.

    Returns:
        ``out`` as ``[B, H, T, E]`` and ``weights`` as ``[B, H, T, S]``, in the dtype of ``v``.
    """
    batch, heads, length, size = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = size**-0.5 if scale is None else scale
    # the heads of a group stand below each other; q may be a transposed view
    grouped = q.to(wide).reshape(batch, k.shape[1], -1, size)
    scores = (grouped @ k.to(wide).transpose(2, 3)).view(batch, heads, length, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    sees = None
    if mask is not None:
        sees = mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~(mask | ~sees), -torch.inf)
    if sinks is not None:
        column = sink_column(sinks.to(wide), batch, heads, length)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    if sees is not None:
        weights = weights.masked_fill(~sees, 0)
    weights = torch.dropout(weights, dropout, train=dropout > 0)
    out = weights.view(batch, k.shape[1], -1, k.shape[2]) @ v.to(wide)
    return AttentionOutput(
        out.view(batch, heads, length, -1).to(v.dtype), weights=weights.to(v.dtype)
    )
