r"""Attention within a sliding window and to a few global tokens.

A query sees the keys of its head's window, at steps of the head's dilation, and all global keys;
a global token sees everything. With :math:`A_i` the keys that token i sees, none of them twice,
:math:`o_i = \sum_{j \in A_i} a_{ij} v_j`, where :math:`a_{ij}` is the softmax of
:math:`s\, q_i \cdot k_j` over :math:`A_i`.
Global tokens may have queries of their own, and keys and values that they alone see.
Where attention is causal, no token sees a later one, global or not.
Padding does not count: windows and distances are over real tokens, wherever padding stands.
A bias that depends on positions is added to the scores of what is seen.
Time O(T (w + G) D), memory O(T D).
Source: Beltagy et al., 2020, arXiv:2004.05150.
Letters: B batch, H query heads, Hkv key heads, T tokens, D key size, E value size, w window,
d dilation, G global tokens.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.errors import UnsupportedError, did_you_mean
from attnzoo.masks import AttentionMask, Window
from attnzoo.ops.flash import flash_attention
from attnzoo.ops.longformer_blocks import blocks_attention
from attnzoo.ops.longformer_flex import NO_BIAS, flex_local, flex_reasons
from attnzoo.ops.longformer_pattern import (
    Band,
    Globals,
    Pattern,
    PerHead,
    bias_at,
    find_globals,
    take,
    whole_bias,
)
from attnzoo.ops.longformer_state import PIECE
from attnzoo.ops.longformer_walk import Plan, walk_attention
from attnzoo.ops.softmax import softmax_attention

IMPLS = ("reference", "torch", "flex")


class GlobalTokens(NamedTuple):
    """Which tokens are global, and what their attention is computed from."""

    where: Tensor  # [B, T] bool
    most: int | None = None  # a bound on their number in a row; without it the device is asked
    q: Tensor | None = None  # [B, H, T, D]: queries of the global tokens; only those are read
    k: Tensor | None = None  # [B, Hkv, T, D]: what those queries meet
    v: Tensor | None = None  # [B, Hkv, T, E]


class _Call(NamedTuple):
    """The arguments of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern
    scale: float
    real: Tensor | None  # [B, T] bool: false at padding
    tokens: GlobalTokens | None
    segments: Tensor | None  # [B, T] integers
    dropout: float
    bias: Tensor | None  # [1 or B, H, 1 or T, S]
    offset: int | Tensor  # position of the first query


def longformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: PerHead,
    dilation: PerHead = 1,
    causal: bool = False,
    scale: float | None = None,
    padding: Tensor | None = None,
    global_tokens: Tensor | GlobalTokens | None = None,
    segment_ids: Tensor | None = None,
    limit: Window | None = None,
    bias: Tensor | None = None,
    offset: int | Tensor | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Attend within a sliding window and to global tokens.

    Args:
        q: Queries, ``[B, H, T, D]``; where causal, they may be fewer than the keys.
        k: Keys, ``[B, Hkv, S, D]``; every group of H / Hkv query heads shares one.
        v: Values, ``[B, Hkv, S, E]``.
        window: w, for all heads or for each: keys to either side; or, where causal, the number of
            keys seen, the query's own included.
        dilation: d, for all heads or for each: only every d-th key is seen, as far as w d
            (w d - d where causal).
        causal: Whether nothing later than the query is seen.
        scale: Multiplies the products; ``None`` means ``D ** -0.5``.
        padding: ``[B, S]`` bool, true where a token is real; other queries give zeros.
        global_tokens: ``[B, S]`` bool, true where a token is global; or :class:`GlobalTokens`.
        segment_ids: ``[B, S]`` integers, for packed rows without global tokens: a token sees its
            own segment only.
        limit: Tokens before and after the query beyond which no head sees.
        bias: Added to the scores, broadcastable to ``[B, H, T, S]``, and read where a query sees a
            key; one for all queries, such as ALiBi's, is read as it is.
        offset: Position of the first query; ``None`` has the queries last. Fewer than the keys
            attend densely to what their windows reach.
        dropout: Probability with which a weight is dropped.
        impl: ``"reference"``, ``"torch"``, ``"flex"``, or ``"auto"`` (see :func:`choose_impl`).

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``.

    Raises:
        ConfigError: A window or dilation is not positive, or a list has not one for each head.
        UnsupportedError: ``impl`` is unknown or cannot run these inputs, with its reasons.
    """
    pattern = Pattern.of(window, dilation, heads=q.shape[1], causal=causal, limit=limit)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    tokens = GlobalTokens(global_tokens) if isinstance(global_tokens, Tensor) else global_tokens
    if tokens is not None and padding is not None:
        tokens = tokens._replace(where=tokens.where & padding)
    if impl == "auto":
        impl, _ = choose_impl(q)
    if tokens is not None and segment_ids is not None:
        raise UnsupportedError(
            "global tokens are given together with segment_ids, which it cannot follow; run the "
            "sequences as rows of a batch"
        )
    if bias is not None:
        bias = whole_bias(bias, q.shape[1], k.shape[2])
    few = q.shape[2] != k.shape[2]
    if few and not causal:
        raise UnsupportedError(
            f"{q.shape[2]} queries and {k.shape[2]} keys are given (fewer queries go with "
            "causal=True, where each has its place; else as many are needed)"
        )
    first = (k.shape[2] - q.shape[2]) if offset is None else offset
    call = _Call(q, k, v, pattern, scale, padding, tokens, segment_ids, dropout, bias, first)
    if few and impl in ("reference", "torch"):
        return _few(call)
    if impl == "reference":
        return _reference(call)
    if impl == "torch":
        return _fast(call, flex=False)
    if impl == "flex":
        reasons = flex_reasons(q, dropout) + [NO_BIAS] * (bias is not None)
        if reasons:
            raise UnsupportedError(
                f"impl 'flex' cannot run this call: {'; '.join(reasons)}. "
                "Use impl='torch', or 'auto' to have one picked."
            )
        return _fast(call, flex=True)
    raise UnsupportedError(
        f"longformer has no impl {impl!r}.{did_you_mean(impl, IMPLS)} "
        f"It has auto, {', '.join(IMPLS)}."
    )


def choose_impl(q: Tensor) -> tuple[str, str]:
    """Pick the implementation for ``impl="auto"`` and say why."""
    if q.device.type == "cuda":
        return "torch", "blocks in one fused call; 'flex' compiles a kernel first, so it is named"
    return "torch", f"blocks of the band, on {q.device.type}"


# -- dense ---------------------------------------------------------------------------------------


def _reference(x: _Call) -> Tensor:
    """Build every mask whole: time and memory O(T S). Distances are over ranks of real tokens."""
    batch, _, length, _ = x.k.shape
    every = torch.ones(batch, length, dtype=torch.bool, device=x.q.device)
    real = every if x.real is None else x.real.expand(batch, length)
    rank = real.cumsum(1) - 1
    here = x.offset + torch.arange(x.q.shape[2], device=x.q.device)

    def of_queries(t: Tensor) -> Tensor:  # [B, S] -> [B, 1, T, 1]
        return t.index_select(1, here)[:, None, :, None]

    distance = of_queries(rank) - rank[:, None, None, :]
    allowed = real[:, None, None, :] & of_queries(real)
    if x.pattern.causal:
        allowed = allowed & (distance >= 0)
    if x.segments is not None:
        allowed = allowed & (of_queries(x.segments) == x.segments[:, None, None, :])
    sees, dropout = x.pattern.within(distance), x.dropout
    if x.tokens is None:
        return softmax_attention(
            x.q, x.k, x.v, scale=x.scale, mask=sees & allowed, bias=x.bias, dropout=dropout
        ).out
    where = x.tokens.where
    sees = (sees | where[:, None, None, :]) & allowed
    attend = partial(softmax_attention, scale=x.scale, bias=x.bias, dropout=dropout)
    local, rows = attend(x.q, x.k, x.v, mask=sees).out, attend(*_own(x), mask=allowed).out
    return torch.where(of_queries(where), rows, local)


def _few(x: _Call) -> Tensor:
    """Attend densely, a piece of the queries at a time, to all that their windows reach."""
    outs = []
    for start in range(0, x.q.shape[2], PIECE):
        q, bias, first = x.q[:, :, start : start + PIECE], x.bias, x.offset + start
        if bias is not None and bias.shape[2] > 1:
            bias = bias[:, :, start : start + PIECE]
        k, v, low = x.k, x.v, 0
        if isinstance(first, int) and x.real is None and x.tokens is None and x.segments is None:
            low = max(first - x.pattern.reach, 0)
            at = slice(low, first + q.shape[2])
            k, v = k[:, :, at], v[:, :, at]
            bias = None if bias is None else bias[..., at]
        outs.append(_reference(x._replace(q=q, k=k, v=v, bias=bias, offset=first - low)))
    return torch.cat(outs, 2)


def _own(x: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values for the rows of global tokens."""
    assert x.tokens is not None
    _, _, q, k, v = x.tokens
    return x.q if q is None else q, x.k if k is None else k, x.v if v is None else v


# -- blocks of the band --------------------------------------------------------------------------


def _fast(x: _Call, *, flex: bool) -> Tensor:
    """Compute local rows by bands and global rows densely."""
    order = None if x.real is None else _padding_last(x.real)
    if order is not None:
        x = _reordered(x, order)
    places = None if x.tokens is None else find_globals(x.tokens.where, x.tokens.most)
    seen = x.real
    if x.tokens is not None and places is not None:  # global keys are not seen a second time
        seen = ~x.tokens.where if seen is None else seen & ~x.tokens.where
    if flex:
        where = None if x.tokens is None else x.tokens.where
        out = flex_local(
            x.q,
            x.k,
            x.v,
            x.pattern,
            scale=x.scale,
            seen=seen,
            is_global=where,
            segments=x.segments,
        )
    else:
        out = _banded(x, seen, places)
    if places is not None:
        out = _with_global_rows(x, out, places)
    if x.real is not None:
        out = out.masked_fill(~x.real[:, None, :, None], 0)
    return out if order is None else take(out, order.argsort(1))


def _padding_last(real: Tensor) -> Tensor | None:
    """Return the order ``[B, T]`` that puts padding behind; ``None`` if real tokens stand together.

    What is traced always reorders, for a trace cannot depend on where padding stands.
    """
    if not torch.compiler.is_compiling():
        begins = real[:, 0].int() + (real[:, 1:] & ~real[:, :-1]).sum(1)
        if int(begins.max()) <= 1:
            return None
    return torch.argsort(real.int(), dim=1, descending=True, stable=True)


def _reordered(x: _Call, order: Tensor) -> _Call:
    """Bring all that belongs to tokens into another order."""
    assert x.real is not None
    order = order.expand(len(x.q), -1)
    tokens = x.tokens
    if tokens is not None:
        where = tokens.where.expand(order.shape).gather(1, order)
        own = (None if t is None else take(t, order) for t in tokens[2:])
        tokens = GlobalTokens(where, tokens.most, *own)
    q, k, v = (take(t, order) for t in (x.q, x.k, x.v))
    real = x.real.expand(order.shape).gather(1, order)
    ids = None if x.segments is None else x.segments.expand(order.shape).gather(1, order)
    bias = x.bias
    if bias is not None:
        bias = bias_at(bias, None if bias.shape[2] == 1 else order, order)
    return x._replace(q=q, k=k, v=v, real=real, tokens=tokens, segments=ids, bias=bias)


def _banded(x: _Call, seen: Tensor | None, places: Globals | None) -> Tensor:
    """Compute all rows as local ones, heads of one band together."""
    groups = x.pattern.groups()
    if places is not None:
        places = Globals(*(t.expand(len(x.q), -1) for t in places))
    walk = x.q.device.type == "cpu" and x.dropout == 0 and not torch.compiler.is_compiling()
    outs: list[Tensor] = []
    for band, heads in groups.items():
        plan = Plan(
            _within(band, x.q.shape[2]), x.pattern.causal, x.scale, seen, places, x.segments
        )
        some = len(groups) > 1
        q, k, v = _heads(x, heads) if some else (x.q, x.k, x.v)
        its = {}
        if x.bias is not None:
            its["bias"] = x.bias[:, torch.tensor(heads, device=q.device)] if some else x.bias
        outs.append(
            walk_attention(q, k, v, plan, **its)[0]
            if walk
            else blocks_attention(q, k, v, plan, x.dropout, **its)
        )
    if len(outs) == 1:
        return outs[0]
    order = torch.tensor([head for heads in groups.values() for head in heads])
    return torch.cat(outs, 1).index_select(1, order.argsort().to(x.q.device))


def _within(band: Band, length: int) -> Band:
    """Cut a band to what a sequence has: a larger window sees no more."""
    farthest = max(length - 1, 0) // band.dilation
    return Band(min(band.before, farthest), min(band.after, farthest), band.dilation)


def _heads(x: _Call, heads: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Take some query heads and their keys and values, shared in whole groups where possible."""
    groups = x.q.shape[1] // x.k.shape[1]
    keys = [head // groups for head in heads]
    whole = sorted(set(keys))
    if heads == [key * groups + g for key in whole for g in range(groups)]:
        keys = whole
    take_q, take_k = (torch.tensor(index, device=x.q.device) for index in (heads, keys))
    return x.q[:, take_q], x.k[:, take_k], x.v[:, take_k]


def _with_global_rows(x: _Call, out: Tensor, places: Globals) -> Tensor:
    """Put the rows of global tokens in their places: they see everything."""
    place, valid = (t.expand(len(x.q), -1) for t in places)
    q, k, v = _own(x)
    length = k.shape[2]
    sees = torch.ones(1, 1, 1, length, dtype=torch.bool, device=q.device)
    if x.real is not None:
        sees = x.real[:, None, None, :]
    if x.pattern.causal:
        sees = sees & (torch.arange(length, device=q.device) <= place[:, None, :, None])
    sees = sees.expand(len(x.q), 1, place.shape[1], length)
    bias = x.bias
    if bias is not None and bias.shape[2] > 1:
        bias = bias_at(bias, place, None)
    rows = flash_attention(
        take(q, place),
        k,
        v,
        mask=AttentionMask(function=lambda: sees),
        scale=x.scale,
        bias=bias,
        dropout=x.dropout,
        impl="sdpa",
    )
    rows = torch.where(valid[:, None, :, None], rows, take(out, place))
    where = place[:, None, :, None].expand_as(rows)
    return out.scatter(2, where, rows)
