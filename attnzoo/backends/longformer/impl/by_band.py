"""Longformer attention in PyTorch operations: heads of one band together, blocks of queries.

On a CPU blocks are computed one after another, and recomputed in the backward pass; on a GPU,
under ``torch.compile`` and with dropout, in one batch.
Letters: B batch, H query heads, T tokens, E value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backends.local.blockwise_cpu import LocalOptions, blockwise_local_attention
from attnzoo.backends.local.pattern import Band, GlobalIndices
from attnzoo.backends.longformer.impl.batched_blocks import batched_local_attention
from attnzoo.backends.longformer.impl.call import LongformerCall
from attnzoo.backends.longformer.impl.dense import dense_query_blocks
from attnzoo.backends.longformer.impl.global_rows import attend_local_and_global


def run_torch(x: LongformerCall) -> Tensor:
    """Compute a call by bands, or densely if there are fewer queries than keys."""
    if x.has_fewer_queries:
        return dense_query_blocks(x)
    return attend_local_and_global(x, _attend_by_band)


def _attend_by_band(
    x: LongformerCall, key_mask: Tensor | None, indices: GlobalIndices | None
) -> Tensor:
    """Compute all rows as local ones, the heads of one band together."""
    heads_by_band = x.pattern.heads_by_band()
    if indices is not None:
        indices = GlobalIndices(*(t.expand(len(x.q), -1) for t in indices))
    blockwise = x.q.device.type == "cpu" and x.dropout == 0 and not torch.compiler.is_compiling()
    outs: list[Tensor] = []
    for band, heads in heads_by_band.items():
        options = LocalOptions(
            band=_clip_band(band, x.q.shape[2]),
            causal=x.pattern.causal,
            scale=x.scale,
            key_mask=key_mask,
            global_indices=indices,
            segment_ids=x.segment_ids,
        )
        q, k, v, bias = x.q, x.k, x.v, x.bias
        if len(heads_by_band) > 1:
            q, k, v = _select_heads(x, heads)
            bias = None if bias is None else bias[:, torch.tensor(heads, device=q.device)]
        if blockwise:
            outs.append(blockwise_local_attention(q, k, v, options, bias)[0])
        else:
            outs.append(batched_local_attention(q, k, v, options, bias, x.dropout))
    if len(outs) == 1:
        return outs[0]
    order = torch.tensor([head for heads in heads_by_band.values() for head in heads])
    return torch.cat(outs, 1).index_select(1, order.argsort().to(x.q.device))


def _clip_band(band: Band, length: int) -> Band:
    """Return the part of a band that a sequence of this length contains."""
    farthest = max(length - 1, 0) // band.dilation
    return Band(min(band.before, farthest), min(band.after, farthest), band.dilation)


def _select_heads(x: LongformerCall, heads: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return some query heads with their keys and values, which whole groups still share."""
    groups = x.q.shape[1] // x.k.shape[1]
    key_heads = [head // groups for head in heads]
    unique = sorted(set(key_heads))
    if heads == [key * groups + g for key in unique for g in range(groups)]:
        key_heads = unique
    q_index, k_index = (torch.tensor(index, device=x.q.device) for index in (heads, key_heads))
    return x.q[:, q_index], x.k[:, k_index], x.v[:, k_index]
