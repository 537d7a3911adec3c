"""Longformer attention by blocks of queries, the heads of one band together.

In C++ on CPUs, by FlexAttention on GPUs, or in PyTorch operations, which compute fewer queries than
keys, as in decoding with a KV cache, and padding inside of the mask's window densely. Other
letters: C queries of a block, w window.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attnzoo.ops.longformer.call import LongformerCall
from attnzoo.ops.longformer.global_rows import attend_local_and_global
from attnzoo.ops.softmax.sdpa import sdpa
from attnzoo.ops.window import flex
from attnzoo.ops.window.band import LocalOptions, band_attention
from attnzoo.ops.window.cpu.band import band_attention_cpp, band_cpp_reasons
from attnzoo.ops.window.pattern import Band, GlobalIndices

QUERY_BLOCK = 256  # C, where the mask is no band
GAPS = "padding inside a sequence counts in the mask's window"

# Computes some heads, which have the same band, [B, H, T, E], given q, k, v, options and a bias
AttendBand = Callable[[Tensor, Tensor, Tensor, LocalOptions, Tensor | None], Tensor]


def run_torch(x: LongformerCall) -> Tensor:
    """Compute a call by bands, or densely if its mask is no band."""
    if x.is_dense:
        return _dense_query_blocks(x)
    return attend_local_and_global(x, partial(attend_by_band, attend=partial(_in_torch, x.dropout)))


def cpp_reasons(x: LongformerCall) -> list[str]:
    """Return every reason why the C++ kernel does not support a call."""
    reasons = band_cpp_reasons() + _band_reasons(x)
    if x.has_fewer_queries and not isinstance(x.q_offset, int):
        lengths = f"there are {x.q.shape[2]} queries and {x.k.shape[2]} keys"
        reasons.append(f"{lengths}, and the position of the first query is a tensor")
    return reasons


def flex_reasons(x: LongformerCall) -> list[str]:
    """Return every reason why FlexAttention does not support a call."""
    return flex.flex_reasons(x.q, x.k, x.v) + _band_reasons(x)


def _band_reasons(x: LongformerCall) -> list[str]:
    """Return why kernels that compute the plain softmax of a band do not support a call."""
    reasons = []
    if x.bias is not None:
        reasons.append("a bias is given, which the kernel does not add")
    if x.dropout > 0:
        reasons.append(f"attention dropout of {x.dropout} is given")
    if x.window is not None:
        reasons.append(GAPS)
    if x.has_fewer_queries:
        lengths = f"there are {x.q.shape[2]} queries and {x.k.shape[2]} keys"
        if x.padding_mask is not None:
            reasons.append(f"{lengths}, and padding")
        if x.global_tokens is not None:
            reasons.append(f"{lengths}, and global tokens")
    return reasons


def skip_kernel(x: LongformerCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider a kernel for a call."""
    return ["one token is one row of scores"] if x.q.shape[2] == 1 < x.k.shape[2] else []


def run_cpp(x: LongformerCall) -> Tensor:
    """Compute a call by bands in C++."""
    if x.has_fewer_queries:
        assert isinstance(x.q_offset, int)
        return attend_by_band(x, None, None, partial(_compiled, offset=x.q_offset))
    return attend_local_and_global(x, partial(attend_by_band, attend=_compiled))


def run_flex(x: LongformerCall) -> Tensor:
    """Compute a call by FlexAttention, the bands of all heads together."""
    if x.has_fewer_queries:
        return _attend_flex(x, None, None)
    return attend_local_and_global(x, _attend_flex)


def _attend_flex(
    x: LongformerCall, key_mask: Tensor | None, indices: GlobalIndices | None
) -> Tensor:
    bands, causal, ids = x.pattern.bands, x.pattern.causal, x.segment_ids
    options = LocalOptions(bands[0], causal, x.scale, key_mask, indices, ids)
    return flex.attend_flex(x.q, x.k, x.v, options, x.q_offset, bands=bands)[0]


def _in_torch(
    dropout: float, q: Tensor, k: Tensor, v: Tensor, options: LocalOptions, bias: Tensor | None
) -> Tensor:
    return band_attention(q, k, v, options, bias, dropout)[0]


def _compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: LocalOptions,
    bias: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    return band_attention_cpp(q, k, v, options, offset)[0].to(v.dtype)


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


# -- fewer queries than keys, or padding inside of the mask's window -------------------------------


def _dense_query_blocks(x: LongformerCall) -> Tensor:
    """Return the output, ``[B, H, T, E]``, computed for one block of queries after another.

    Memory O(C S), and O(C (w + C)) where the window limits the keys.
    """
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
    if x.window is not None:
        apart = positions[:, None] - torch.arange(length, device=x.q.device)
        mask = mask & (apart <= x.window[0]) & (apart >= -x.window[1])
    attend = partial(sdpa, scale=x.scale, bias=x.bias, dropout=x.dropout)
    if x.global_tokens is None:
        return attend(x.q, x.k, x.v, mask=mask & allowed)
    is_global = x.global_tokens.is_global
    mask = (mask | is_global[:, None, None, :]) & allowed
    local_rows = attend(x.q, x.k, x.v, mask=mask)
    q, k, v = x.global_qkv
    if x.global_tokens.q is not None:
        q = q.index_select(2, positions)
    global_rows = attend(q, k, v, mask=allowed)
    return torch.where(of_queries(is_global), global_rows, local_rows)
