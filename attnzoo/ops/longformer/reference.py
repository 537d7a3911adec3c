"""Longformer attention with the whole score matrix, as the formula says: time and memory O(T S)."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor

from attnzoo.ops.longformer.call import LongformerCall


def run_reference(x: LongformerCall) -> Tensor:
    """Return the output, ``[B, H, T, E]``; distances are counted in real tokens."""
    batch, _, keys, _ = x.k.shape
    device = x.q.device
    key_padding = torch.ones(batch, keys, dtype=torch.bool, device=device)
    if x.padding_mask is not None:
        key_padding = x.padding_mask.expand(batch, keys)
    queries = x.q_offset + torch.arange(x.q.shape[2], device=device)

    def compare(t: Tensor) -> tuple[Tensor, Tensor]:  # [B, S] -> [B, 1, T, 1] and [B, 1, 1, S]
        return rearrange(t[:, queries], "b t -> b 1 t 1"), rearrange(t, "b s -> b 1 1 s")

    of_query, of_key = compare(key_padding.cumsum(1) - 1)
    distance = of_query - of_key
    of_query, of_key = compare(key_padding)
    allowed = of_query & of_key
    if x.pattern.causal:
        allowed = allowed & (distance >= 0)
    if x.segment_ids is not None:
        of_query, of_key = compare(x.segment_ids)
        allowed = allowed & (of_query == of_key)
    windows = [
        (-after * step <= distance) & (distance <= before * step) & (distance % step == 0)
        for before, after, step in x.pattern.bands
    ]
    window = torch.cat(windows, 1)  # [B, H, T, S]
    if x.window is not None:  # of the mask: it counts padding too
        apart = queries[:, None] - torch.arange(keys, device=device)
        window = window & (-x.window[1] <= apart) & (apart <= x.window[0])
    if x.global_tokens is None:
        return _softmax_attention(x, x.q, x.k, x.v, window & allowed)
    of_query, of_key = compare(x.global_tokens.is_global.expand(batch, keys))
    local_rows = _softmax_attention(x, x.q, x.k, x.v, (window | of_key) & allowed)
    q, k, v = x.global_qkv
    if x.global_tokens.q is not None:  # those of all keys
        q = q[:, :, queries]
    global_rows = _softmax_attention(x, q, k, v, allowed)
    return torch.where(of_query, global_rows, local_rows)


def _softmax_attention(x: LongformerCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax attention under a mask, in float32 or wider; an empty row gives zeros."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys, values = (repeat(t.to(wide), "b h s d -> b (h g) s d", g=groups) for t in (k, v))
    scores = q.to(wide) @ keys.mT * x.scale
    if x.bias is not None:
        scores = scores + x.bias
        mask = mask & (scores > -torch.inf)  # a bias of -inf hides keys
    sees_any = mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~mask, -torch.inf).masked_fill(~sees_any, 0)
    weights = torch.softmax(scores, -1)
    weights = torch.dropout(weights.masked_fill(~sees_any, 0), x.dropout, train=x.dropout > 0)
    return (weights @ values).to(v.dtype)
