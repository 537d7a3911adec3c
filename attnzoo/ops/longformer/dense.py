"""Longformer attention of a few queries to many keys, dense in blocks of queries.

For decoding with a KV cache. Memory O(C S), and O(C (w + C)) where the window limits the keys.
Letters: B batch, H query heads, Hkv key heads, T queries, S keys, C queries of a block, w window,
D key size, E value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.ops.longformer.call import LongformerCall

QUERY_BLOCK = 256  # C


def dense_query_blocks(x: LongformerCall) -> Tensor:
    """Return the output, ``[B, H, T, E]``, computed for one block of queries after another."""
    only_window = x.padding_mask is None and x.global_tokens is None and x.segment_ids is None
    outs = []
    for start in range(0, x.q.shape[2], QUERY_BLOCK):
        q, bias, first = x.q[:, :, start : start + QUERY_BLOCK], x.bias, x.q_offset + start
        if bias is not None and bias.shape[2] > 1:
            bias = bias[:, :, start : start + QUERY_BLOCK]
        k, v, low = x.k, x.v, 0
        if isinstance(first, int) and only_window:
            low = max(first - x.pattern.tokens_before, 0)
            keys = slice(low, first + q.shape[2])
            k, v = k[:, :, keys], v[:, :, keys]
            bias = None if bias is None else bias[..., keys]
        outs.append(_dense_block(x._replace(q=q, k=k, v=v, bias=bias, q_offset=first - low)))
    return torch.cat(outs, 2)


def _dense_block(x: LongformerCall) -> Tensor:
    """Compute one block of queries under its whole mask."""
    batch, _, length, _ = x.k.shape
    real = torch.ones(batch, length, dtype=torch.bool, device=x.q.device)
    if x.padding_mask is not None:
        real = x.padding_mask.expand(batch, length)
    rank = real.cumsum(1) - 1  # position among the real tokens
    positions = x.q_offset + torch.arange(x.q.shape[2], device=x.q.device)

    def of_queries(t: Tensor) -> Tensor:  # [B, S] -> [B, 1, T, 1]
        return t.index_select(1, positions)[:, None, :, None]

    distance = of_queries(rank) - rank[:, None, None, :]
    allowed = real[:, None, None, :] & of_queries(real)
    if x.pattern.causal:
        allowed = allowed & (distance >= 0)
    if x.segment_ids is not None:
        allowed = allowed & (of_queries(x.segment_ids) == x.segment_ids[:, None, None, :])
    mask = x.pattern.mask(distance)
    if x.global_tokens is None:
        return _softmax(x, x.q, x.k, x.v, mask & allowed)
    is_global = x.global_tokens.is_global
    mask = (mask | is_global[:, None, None, :]) & allowed
    local_rows = _softmax(x, x.q, x.k, x.v, mask)
    global_rows = _softmax(x, *x.global_qkv, allowed)
    return torch.where(of_queries(is_global), global_rows, local_rows)


def _softmax(x: LongformerCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax attention under a mask, in float32 or wider; an empty row gives zeros."""
    batch, heads, length, size = q.shape
    key_heads, keys = k.shape[1:3]
    rows = heads // key_heads * length  # the query heads of a key head, one after another
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).reshape(batch, key_heads, rows, size)
    products = grouped @ k.to(wide).transpose(2, 3)
    scores = products.view(batch, heads, length, keys) * x.scale
    if x.bias is not None:
        scores = scores + x.bias
        mask = mask & (scores > -torch.inf)  # a bias of -inf hides keys
    sees_any = mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~mask, -torch.inf).masked_fill(~sees_any, 0)
    weights = torch.softmax(scores, -1)
    weights = torch.dropout(weights.masked_fill(~sees_any, 0), x.dropout, train=x.dropout > 0)
    out = weights.view(batch, key_heads, rows, keys) @ v.to(wide)
    return out.view(batch, heads, length, v.shape[3]).to(v.dtype)
