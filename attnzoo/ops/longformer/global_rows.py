"""The steps around windowed attention: padding to the end, and dense rows of global tokens.

Other letters: G global tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.contract.padding import gather_tokens, has_gaps
from attnzoo.ops.longformer.call import GlobalTokens, LongformerCall
from attnzoo.ops.softmax.sdpa import sdpa
from attnzoo.ops.window.pattern import GlobalIndices, gather_bias, global_indices

# Computes all rows as local ones, [B, H, T, E], given the keys that the windows may see, [B, T],
# and the global keys, which every row sees
LocalAttention = Callable[[LongformerCall, Tensor | None, GlobalIndices | None], Tensor]


def attend_local_and_global(x: LongformerCall, attend_local: LocalAttention) -> Tensor:
    """Return the output of as many queries as keys, ``[B, H, T, E]``; zeros at padding."""
    order = None if x.padding_mask is None else _padding_last_order(x.padding_mask)
    if order is not None:
        x = _reorder(x, order)
    tokens, key_mask, indices = x.global_tokens, x.padding_mask, None
    if tokens is not None:
        indices = global_indices(tokens.is_global, tokens.max_count)
        if indices is not None:  # windows do not see a global key a second time
            others = ~tokens.is_global
            key_mask = others if key_mask is None else key_mask & others
    out = attend_local(x, key_mask, indices)
    if indices is not None:
        out = _write_global_rows(x, out, indices)
    if x.padding_mask is not None:
        out = out.masked_fill(~x.padding_mask[:, None, :, None], 0)
    return out if order is None else gather_tokens(out, order.argsort(1))


def _padding_last_order(padding_mask: Tensor) -> Tensor | None:
    """Return the order ``[B, T]`` that moves padding to the end.

    Returns ``None`` if the real tokens of every row are contiguous. Under ``torch.compile`` it
    always returns an order, because the graph must not depend on the values of the mask.
    """
    if not has_gaps(padding_mask):
        return None
    return torch.argsort(padding_mask.int(), dim=1, descending=True, stable=True)


def _reorder(x: LongformerCall, order: Tensor) -> LongformerCall:
    """Return the call with its tokens in another order."""
    assert x.padding_mask is not None
    order = order.expand(x.q.shape[0], -1)

    def gather(t: Tensor) -> Tensor:
        return t.expand(order.shape).gather(1, order)

    tokens = x.global_tokens
    if tokens is not None:
        qkv = (None if t is None else gather_tokens(t, order) for t in tokens[2:])
        tokens = GlobalTokens(gather(tokens.is_global), tokens.max_count, *qkv)
    q, k, v = (gather_tokens(t, order) for t in (x.q, x.k, x.v))
    bias = x.bias
    if bias is not None:
        bias = gather_bias(bias, None if bias.shape[2] == 1 else order, order)
    return x._replace(
        q=q,
        k=k,
        v=v,
        padding_mask=gather(x.padding_mask),
        segment_ids=None if x.segment_ids is None else gather(x.segment_ids),
        global_tokens=tokens,
        bias=bias,
    )


def _write_global_rows(x: LongformerCall, out: Tensor, indices: GlobalIndices) -> Tensor:
    """Return the output with the rows of global tokens, which see all keys."""
    index, valid = (t.expand(x.q.shape[0], -1) for t in indices)
    q, k, v = x.global_qkv
    length = k.shape[2]
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool, device=q.device)
    if x.padding_mask is not None:
        mask = x.padding_mask[:, None, None, :]
    if x.pattern.causal:
        mask = mask & (torch.arange(length, device=q.device) <= index[:, None, :, None])
    mask = mask.expand(x.q.shape[0], 1, index.shape[1], length)
    bias = x.bias
    if bias is not None and bias.shape[2] > 1:
        bias = gather_bias(bias, index, None)
    queries = gather_tokens(q, index)
    rows = sdpa(queries, k, v, scale=x.scale, mask=mask, bias=bias, dropout=x.dropout)
    rows = torch.where(valid[:, None, :, None], rows.to(out.dtype), gather_tokens(out, index))
    return out.scatter(2, index[:, None, :, None].expand_as(rows), rows)
