"""Longformer attention by blocks of queries, the heads of one band together.

In C++ on CPUs. In PyTorch operations, blocks are computed one after another on a CPU, and
recomputed in the backward pass; on a GPU, under ``torch.compile`` and with dropout, in one batch.
Fewer queries than keys, as in decoding with a KV cache, and padding inside of the mask's window are
computed densely. Other letters: N
blocks, C queries of a block, W keys of a block's band, G global keys, w window, d dilation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.masks import AttentionMask, Window
from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.longformer.call import LongformerCall
from attnzoo.ops.longformer.global_rows import attend_local_and_global
from attnzoo.ops.softmax.sdpa import sdpa
from attnzoo.ops.window.band import MIN_BLOCK, band_blocks, band_mask
from attnzoo.ops.window.blockwise_cpu import LocalOptions, blockwise_local_attention
from attnzoo.ops.window.cpu.band import band_attention_cpp, band_cpp_reasons
from attnzoo.ops.window.pattern import Band, GlobalIndices, gather_bias

QUERY_BLOCK = 256  # C, where the mask is no band
GAPS = "padding inside a sequence counts in the mask's window"

# Computes some heads, which have the same band, [B, H, T, E], given q, k, v, options and a bias
AttendBand = Callable[[Tensor, Tensor, Tensor, LocalOptions, Tensor | None], Tensor]


def run_torch(x: LongformerCall) -> Tensor:
    """Compute a call by bands, or densely if its mask is no band."""
    if x.is_dense:
        return _dense_query_blocks(x)
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
    if x.window is not None:
        reasons.append(GAPS)
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
    if x.global_tokens is None:
        return _softmax(x, x.q, x.k, x.v, mask & allowed)
    is_global = x.global_tokens.is_global
    mask = (mask | is_global[:, None, None, :]) & allowed
    local_rows = _softmax(x, x.q, x.k, x.v, mask)
    q, k, v = x.global_qkv
    if x.global_tokens.q is not None:
        q = q.index_select(2, positions)
    global_rows = _softmax(x, q, k, v, allowed)
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


# -- one batch of blocks ---------------------------------------------------------------------------


def batched_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: LocalOptions,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention within a band and to global keys.

    Each block of C queries with the W keys of its band is a small dense problem, to which the
    global keys are added. Torch's ``scaled_dot_product_attention`` computes all of them in one
    call. Time O(T (w + G) D); memory O(T (w + G)) for the mask, and what torch's kernel saves.

    Args:
        q: Queries, ``[B, H, T, D]``; all heads have the same band.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        options: Band, scale and masks. A query that sees no key gives zeros.
        bias: Added to the scores, ``[1 or B, H, 1 or T, T]``.
        dropout: Probability of dropping a weight.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``.
    """
    batch, heads, tokens, _ = q.shape
    step = min(options.band.dilation, tokens)
    phases = [_split_phases(x, step) for x in (q, k, v)]
    length = phases[0].shape[2]  # T / d, rounded up
    window: Window = (min(options.band.before, length - 1), min(options.band.after, length - 1))
    block = max(sum(window), MIN_BLOCK)
    queries, keys, values = band_blocks(*phases, block=block, window=window)
    mask = band_mask(
        length, block=block, window=window, mask=_phase_mask(options, step, q), device=q.device
    )
    mask = mask.repeat(len(queries) // len(mask), 1, 1, 1)  # [B d N, 1, C, W]
    if options.global_indices is not None:
        copies, index = len(queries) // batch, options.global_indices.positions
        keys, values = (
            torch.cat([gather_tokens(x, index).repeat_interleave(copies, 0), in_band], 2)
            for x, in_band in ((k, keys), (v, values))
        )
        mask = torch.cat([_global_mask(options, step, length, block, batch), mask], 3)
    if bias is not None:
        bias = _block_bias(bias, options, step, length, block, window, batch)
    out = sdpa(
        queries, keys, values, scale=options.scale, mask=mask, bias=bias, dropout=dropout
    )  # [B d N, H, C, E]
    out = out.view(batch, step, -1, heads, block, v.shape[3]).permute(0, 3, 2, 4, 1, 5)
    out = out.reshape(batch, heads, -1, step, v.shape[3])[:, :, :length]
    return out.flatten(2, 3)[:, :, :tokens]


def _split_phases(x: Tensor, step: int) -> Tensor:
    """Make every d-th token a row of its own, ``[B d, H, T / d, D]``: a dilated band is plain."""
    if step == 1:
        return x
    batch, heads, length, size = x.shape
    x = F.pad(x, (0, 0, 0, -length % step)).reshape(batch, heads, -1, step, size)
    return x.permute(0, 3, 1, 2, 4).flatten(0, 1)


def _phase_mask(options: LocalOptions, step: int, q: Tensor) -> AttentionMask:
    """Return the key mask and the segments of the phases; the end of a short phase is masked."""
    batch, _, length, _ = q.shape
    missing = -length % step

    def split(x: Tensor) -> Tensor:  # [B, T] -> [B d, T / d]
        x = F.pad(x, (0, missing)).expand(batch, -1)
        return x.reshape(batch, -1, step).transpose(1, 2).flatten(0, 1)

    key_mask, ids = options.key_mask, options.segment_ids
    if key_mask is None and missing:
        key_mask = torch.ones(1, length, dtype=torch.bool, device=q.device)
    return AttentionMask(
        padding=None if key_mask is None else split(key_mask),
        segment_ids=None if ids is None else split(ids),
    )


def _global_mask(options: LocalOptions, step: int, length: int, block: int, batch: int) -> Tensor:
    """Return the mask of the global keys, ``[B d N, 1, C, G]`` bool, true where seen."""
    assert options.global_indices is not None
    positions, valid = options.global_indices
    blocks = -(-length // block)
    mask = valid[:, None, None, None, :].expand(batch, step, blocks, block, -1)
    if options.causal:
        device = positions.device
        query = torch.arange(blocks * block, device=device) * step
        query = query + torch.arange(step, device=device)[:, None]
        query = query.view(1, step, blocks, block, 1)
        mask = mask & (positions[:, None, None, None, :] <= query)
    return mask.reshape(batch * step * blocks, 1, block, -1)


def _block_bias(
    bias: Tensor,
    options: LocalOptions,
    step: int,
    length: int,
    block: int,
    window: Window,
    batch: int,
) -> Tensor:
    """Gather the bias of every block from ``[1 or B, H, 1 or T, T]``.

    Returns:
        ``[B d N, H, 1 or C, G + W]``; arbitrary at keys outside the sequence, which are masked.
    """
    blocks, device, last = -(-length // block), bias.device, bias.shape[3] - 1
    first = block * torch.arange(blocks, device=device)[:, None]
    phase = torch.arange(step, device=device)[:, None, None]

    def positions(begin: int, end: int) -> Tensor:  # [d, N, ...]
        return (phase + step * (first + torch.arange(begin, end, device=device))).clamp(0, last)

    keys = positions(-window[0], block + window[1])[:, :, None, :]
    queries = positions(0, block)
    queries = queries[..., None] if bias.shape[2] > 1 else queries.new_zeros(1, 1, 1, 1)
    found = bias[:, :, queries, keys].expand(batch, *[-1] * 5)  # [B, H, d, N, 1 or C, W]
    if options.global_indices is not None:
        of_globals = gather_bias(bias, None, options.global_indices.positions)[
            :, :, queries[..., 0]
        ]
        of_globals = of_globals.expand(*found.shape[:4], -1, -1)  # [B, H, d, N, 1 or C, G]
        found = torch.cat([of_globals, found], 5)
    return found.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
