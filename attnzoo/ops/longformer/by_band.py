"""Longformer attention by blocks of queries, the heads of one band together.

In C++ on CPUs. In PyTorch operations, blocks are computed one after another on a CPU, and
recomputed in the backward pass; on a GPU, under ``torch.compile`` and with dropout, in one batch.
Letters: B batch, H query heads, T tokens, E value size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attnzoo.ops.longformer.batched_blocks import batched_local_attention
from attnzoo.ops.longformer.call import LongformerCall
from attnzoo.ops.longformer.dense import dense_query_blocks
from attnzoo.ops.longformer.global_rows import attend_local_and_global
from attnzoo.ops.window.blockwise_cpu import LocalOptions, blockwise_local_attention
from attnzoo.ops.window.cpu.band import band_attention_cpp, band_cpp_reasons
from attnzoo.ops.window.pattern import Band, GlobalIndices

# Computes some heads, which have the same band, [B, H, T, E], given q, k, v, options and a bias
AttendBand = Callable[[Tensor, Tensor, Tensor, LocalOptions, Tensor | None], Tensor]


def run_torch(x: LongformerCall) -> Tensor:
    """Compute a call by bands, or densely if there are fewer queries than keys."""
    if x.has_fewer_queries:
        return dense_query_blocks(x)
    blockwise = x.q.device.type == "cpu" and x.dropout == 0 and not torch.compiler.is_compiling()
    attend = _blockwise if blockwise else partial(batched_local_attention, dropout=x.dropout)
    return attend_local_and_global(x, partial(attend_by_band, attend=attend))


def cpp_reasons(x: LongformerCall) -> list[str]:
    """Return every reason why the C++ kernel does not support a call."""
    reasons = band_cpp_reasons()
    if x.bias is not None:
        reasons.append("a bias is given, which the kernel does not add")
    if x.dropout > 0:
        reasons.append(f"attention dropout of {x.dropout} is given")
    if x.has_fewer_queries:
        lengths = f"there are {x.q.shape[2]} queries and {x.k.shape[2]} keys"
        if x.padding_mask is not None:
            reasons.append(f"{lengths}, and padding")
        if x.global_tokens is not None:
            reasons.append(f"{lengths}, and global tokens")
        if not isinstance(x.q_offset, int):
            reasons.append(f"{lengths}, and the position of the first query is a tensor")
    return reasons


def skip_cpp(x: LongformerCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider the C++ kernel for a call."""
    return ["one token is one row of scores"] if x.q.shape[2] == 1 < x.k.shape[2] else []


def run_cpp(x: LongformerCall) -> Tensor:
    """Compute a call by bands in C++."""
    return run_by_band(x, _compiled)


def run_by_band(x: LongformerCall, attend: Callable[..., Tensor]) -> Tensor:
    """Compute a call by bands.

    Args:
        x: The call; without padding and global tokens if it has fewer queries than keys.
        attend: Computes the heads of one band as an ``AttendBand``; it also takes the position of
            the first query as ``offset``.
    """
    if x.has_fewer_queries:
        assert isinstance(x.q_offset, int)
        return attend_by_band(x, None, None, partial(attend, offset=x.q_offset))
    return attend_local_and_global(x, partial(attend_by_band, attend=attend))


def _compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: LocalOptions,
    bias: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    return band_attention_cpp(q, k, v, options, offset)[0].to(v.dtype)


def _blockwise(
    q: Tensor, k: Tensor, v: Tensor, options: LocalOptions, bias: Tensor | None
) -> Tensor:
    return blockwise_local_attention(q, k, v, options, bias)[0]


def attend_by_band(
    x: LongformerCall,
    key_mask: Tensor | None,
    indices: GlobalIndices | None,
    attend: AttendBand,
) -> Tensor:
    """Compute all rows as local ones, the heads of one band together."""
    heads_by_band = x.pattern.heads_by_band()
    if indices is not None:
        indices = GlobalIndices(*(t.expand(x.q.shape[0], -1) for t in indices))
    outs: list[Tensor] = []
    for band, heads in heads_by_band.items():
        options = LocalOptions(
            band=_clip_band(band, x.k.shape[2]),
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
        outs.append(attend(q, k, v, options, bias))
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
