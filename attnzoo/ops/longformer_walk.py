r"""Sliding-window attention as a walk over blocks of queries, with its own backward; for CPUs.

Each block of C queries meets the stretch of keys that its band can reach, and the global keys:
one small dense softmax whose scores stay in cache and are computed again in the backward pass, so
that memory is O(T D) and time O(T (w + C + G) D). Only the two corners of a block that the band
cuts off are masked. A dilated band is one of plain steps over every d-th token.
Source: Beltagy et al., 2020, arXiv:2004.05150.
Letters: B batch, H query heads, Hkv key heads, N = B Hkv rows, g query heads of a row, T tokens,
C tokens of a block, W keys beside a block, G global keys, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnzoo.ops.longformer_pattern import Band, Globals, bias_at, take
from attnzoo.ops.room import room

BLOCK = 64  # C: 32 to 64 measured best; a longer block wastes more at the corners of the band
ROOM = 2**19  # scores at a time: 2 MB of float32, what an inner cache holds


@dataclass(frozen=True)
class Plan:
    """All of a call but its tensors of numbers."""

    band: Band
    causal: bool
    scale: float
    seen: Tensor | None = None  # [B, T] bool: keys that the band may see; None when all
    places: Globals | None = None  # of the global keys
    segments: Tensor | None = None  # [B, T] integers: only keys of the query's own are seen
    with_lse: bool = False  # whether the logarithm of the sum of weights is wanted too


def walk_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend within a band and to global keys.

    Args:
        q: Queries, ``[B, H, T, D]``; all heads have the plan's band.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        plan: What is seen. A query that sees nothing gets something finite.
        bias: Added to the scores, ``[1 or B, H, 1 or T, T]``; read in the band only.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``, and the logarithm of the sum of each query's
        weights, ``[B, H, T, 1]`` in float32 or wider, which is empty unless the plan asks for it.
    """
    batch, heads, length, size = q.shape
    rows = batch * k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    k_global = v_global = None
    if plan.places is not None:
        k_global, v_global = (
            take(x, plan.places.place).to(wide).reshape(rows, -1, x.shape[3]) for x in (k, v)
        )
    bias_global = None
    if bias is not None:
        if plan.places is not None:
            bias_global = bias_at(bias, None, plan.places.place).to(wide)
            bias_global = bias_global.reshape(rows, -1, *bias_global.shape[2:])
        bias = bias.to(wide).unflatten(1, (k.shape[1], -1))  # [1 or B, Hkv, g, 1 or T, T]
    out, lse = _Walk.apply(  # type: ignore[no-untyped-call]
        q.to(wide).reshape(rows, -1, length, size),
        k.to(wide).reshape(rows, length, size),
        v.to(wide).reshape(rows, length, -1),
        k_global,
        v_global,
        bias,
        bias_global,
        plan,
        batch == 1,
    )
    lse = lse.view(batch, heads, length, 1) if plan.with_lse else lse
    return out.view(batch, heads, length, -1).to(v.dtype), lse


class _Block:
    """A block of queries, the stretch of keys beside it, and what of the stretch is not seen."""

    def __init__(self, phase: _Phase, start: int) -> None:
        before, after, _ = phase.plan.band
        self.phase = phase
        self.start, self.stop = start, min(start + BLOCK, phase.length)
        self.low, self.high = max(start - before, 0), min(self.stop + after, phase.length)
        # columns that the ends of the sequence take from the stretch
        self.off_left = self.low - (start - before)
        self.off_right = self.stop + after - self.high

    def mask(self, scores: Tensor, rows: slice) -> None:
        """Take from the scores ``[n, g C, G + W]`` what is not seen, in place."""
        phase, size = self.phase, self.stop - self.start
        beside = scores.view(len(scores), -1, size, scores.shape[2])
        left, right = size - self.off_left, size - self.off_right
        first = phase.num_global
        if left > 0:
            corner = phase.corner_left[:size, self.off_left : size]
            beside[..., first : first + left].add_(corner)
        if right > 0:
            beside[..., beside.shape[3] - right :].add_(phase.corner_right[:size, :right])
        if phase.key_bias is not None and phase.hides(self.low, self.high):
            scores[..., first:].add_(phase.key_bias[rows, None, self.low : self.high])
        if phase.segments is not None and phase.parts[self.high] > phase.parts[self.low + 1]:
            ids = phase.segments[rows]
            others = ids[:, self.start : self.stop, None] != ids[:, None, self.low : self.high]
            beside[..., first:].masked_fill_(others[:, None], phase.hidden)
        if phase.global_bias is not None:
            scores[..., :first].add_(phase.global_bias[rows, None])
        if phase.late is not None and phase.position(self.start) <= phase.last:
            steps = torch.arange(self.start, self.stop, device=scores.device)
            later = phase.late[rows, None, None] > phase.position(steps)[:, None]
            beside[..., :first].masked_fill_(later, phase.hidden)


class _Phase:
    """The tokens p, p + d, p + 2 d, ...: a dilated band is a plain one over them."""

    def __init__(self, plan: Plan, first: int, length: int, rows: int, like: Tensor) -> None:
        self.plan, self.first = plan, first
        step = plan.band.dilation
        self.tokens = slice(first, None, step)
        self.length = -(-(length - first) // step)
        # So low that nothing is left of a score, and the sum of four is still finite.
        self.hidden = torch.finfo(like.dtype).min / 8
        square = torch.full((BLOCK, BLOCK), self.hidden, dtype=like.dtype, device=like.device)
        self.corner_left, self.corner_right = square.tril(-1), square.triu(1)
        self.key_bias: Tensor | None = None
        if plan.seen is not None:
            seen = plan.seen[:, self.tokens]
            self.key_bias = self._bias(~seen, rows, like)
            self.unseen = F.pad((~seen).any(0).cumsum(0), (1, 0)).tolist()
        self.segments: Tensor | None = None
        if plan.segments is not None:
            ids = plan.segments[:, self.tokens]
            self.segments = ids.repeat_interleave(rows // len(ids), 0)
            begins = (ids[:, 1:] != ids[:, :-1]).any(0)
            self.parts = F.pad(begins.cumsum(0), (2, 0)).tolist()  # begun before a place
        self.num_global = 0
        self.global_bias = self.late = None
        if plan.places is not None:
            place, valid = plan.places
            self.num_global = place.shape[1]
            if not bool(valid.all()):
                self.global_bias = self._bias(~valid, rows, like)
            if plan.causal:
                self.late = place.repeat_interleave(rows // len(place), 0)
                self.last = int(place.max())

    def _bias(self, hide: Tensor, rows: int, like: Tensor) -> Tensor:
        bias = torch.zeros(hide.shape, dtype=like.dtype, device=like.device)
        return bias.masked_fill_(hide, self.hidden).repeat_interleave(rows // len(hide), 0)

    def part(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the phase's own tokens; the global keys and values belong to every phase."""
        q, k, v, k_global, v_global, bias, bias_global = tensors
        assert q is not None
        assert k is not None
        assert v is not None
        if bias is not None:
            bias = _of_queries(bias, self.tokens)[..., self.tokens]
        if bias_global is not None:
            bias_global = _of_queries(bias_global, self.tokens)
        own = q[:, :, self.tokens], k[:, self.tokens], v[:, self.tokens]
        return (*own, k_global, v_global, bias, bias_global)

    def position(self, step: Any) -> Any:
        """Return where a token of this phase stands in the whole sequence."""
        return self.first + step * self.plan.band.dilation

    def hides(self, low: int, high: int) -> bool:
        """Whether any row must not see some of these keys."""
        return bool(self.unseen[high] > self.unseen[low])

    def blocks(self) -> Iterator[_Block]:
        """Yield the blocks in order."""
        return (_Block(self, start) for start in range(0, self.length, BLOCK))


def _phases(plan: Plan, q: Tensor) -> Iterator[_Phase]:
    """Yield the phases that have tokens."""
    rows, _, length, _ = q.shape
    return (
        _Phase(plan, first, length, rows, q) for first in range(min(plan.band.dilation, length))
    )


def _row_chunks(q: Tensor, plan: Plan) -> Iterator[slice]:
    """Cut the rows so that the scores of one block stay small."""
    rows, groups, length, _ = q.shape
    before, after, step = plan.band
    beside = min(before + BLOCK + after, -(-length // step))
    beside += 0 if plan.places is None else plan.places.place.shape[1]
    count = max(ROOM // (groups * BLOCK * beside), 1)
    return (slice(start, start + count) for start in range(0, rows, count))


def _empty_output(q: Tensor, size: int, one_row: bool) -> Tensor:
    """Return room for the output, ``[N, g, T, E]``; token after token where a batch is one row.

    So the layer behind it joins its heads without a copy.
    """
    rows, groups, length, _ = q.shape
    if one_row:
        return room(q, (length, rows, groups, size)).permute(1, 2, 0, 3)
    return room(q, (rows, groups, length, size))


class _Walk(torch.autograd.Function):
    """Keeps its inputs only: q ``[N, g, T, D]``, k, v, the global keys and values, the bias.

    The bias is ``[1 or B, Hkv, g, 1 or T, T]``, that of global keys ``[N, g, 1 or T, G]``. Behind
    them come the plan, and whether the batch is one row.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        """Walk over the blocks."""
        *tensors, plan, one_row = given
        ctx.save_for_backward(*tensors)
        ctx.plan = plan
        q, _, v, *_ = tensors
        out = _empty_output(q, v.shape[2], one_row)
        lse: Tensor = out.new_empty((*q.shape[:3], 1) if plan.with_lse else (0,))
        with torch.autocast(q.device.type, enabled=False):
            for phase in _phases(plan, q):
                inputs, outs = phase.part(tensors), out[:, :, phase.tokens]
                logs = lse[:, :, phase.tokens] if plan.with_lse else None
                for rows in _row_chunks(q, plan):
                    for block in phase.blocks():
                        _block_output(inputs, outs, logs, block, rows)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Walk again: weights are computed anew, a block at a time."""
        tensors, plan = ctx.saved_tensors, ctx.plan
        q = tensors[0]
        wanted = [x is not None for x in tensors[:5]] + list(ctx.needs_input_grad[5:7])
        grads = [
            x.new_zeros(x.shape) if want else None for x, want in zip(tensors, wanted, strict=True)
        ]
        with torch.autocast(q.device.type, enabled=False):
            for phase in _phases(plan, q):
                inputs, outs = phase.part(tensors), phase.part(grads)
                above = upstream[0][:, :, phase.tokens]
                logs = upstream[1][:, :, phase.tokens] if plan.with_lse else None
                for rows in _row_chunks(q, plan):
                    for block in phase.blocks():
                        _block_gradients(inputs, outs, (above, logs), block, rows)
        return (*grads, None, None)


def _of_queries(bias: Tensor, tokens: slice) -> Tensor:
    """Take the rows of some queries from ``[..., 1 or T, S]``, which one for all queries has."""
    return bias if bias.shape[-2] == 1 else bias[..., tokens, :]


def _owners(bias: Tensor, count: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Return row of the batch and key head of each row, in ``[1 or B, Hkv, ...]``."""
    row = torch.arange(count, device=bias.device)[rows]
    return row // bias.shape[1] * (len(bias) > 1), row % bias.shape[1]


def _add_bias(scores: Tensor, inputs: tuple[Any, ...], block: _Block, rows: slice) -> None:
    """Add the bias to the scores ``[n, g C, G + W]`` of a block."""
    q, *_, bias, bias_global = inputs
    queries, first = slice(block.start, block.stop), block.phase.num_global
    by_head = scores.view(len(scores), q.shape[1], -1, scores.shape[2])
    if bias is not None:
        beside = _of_queries(bias, queries)[..., block.low : block.high]
        by_head[..., first:].add_(beside[_owners(bias, len(q), rows)])
    if bias_global is not None:
        by_head[..., :first].add_(_of_queries(bias_global[rows], queries))


def _bias_gradients(
    change: Tensor, grads: tuple[Any, ...], block: _Block, rows: slice, count: int
) -> None:
    """Add the gradients of scores ``[n, g, C, G + W]`` to those of the bias."""
    *_, to_bias, to_bias_global = grads
    queries, first = slice(block.start, block.stop), block.phase.num_global
    for into, part in ((to_bias, change[..., first:]), (to_bias_global, change[..., :first])):
        if into is None:
            continue
        here = _of_queries(into, queries)
        part = part.sum(2, keepdim=True) if here.shape[-2] == 1 else part
        if into is to_bias:
            here = here[..., block.low : block.high]
            here.index_put_(_owners(into, count, rows), part, accumulate=True)
        else:
            here[rows].add_(part)


def _queries(q: Tensor, block: _Block, rows: slice) -> Tensor:
    """Return the queries of a block, ``[n, g C, D]``: a view, where keys are not shared."""
    return q[rows, :, block.start : block.stop].flatten(1, 2)


def _scores(queries: Tensor, inputs: tuple[Any, ...], block: _Block, rows: slice) -> Tensor:
    """Return the scores of a block, ``[n, g C, G + W]``."""
    scale, (_, k, _, k_global, *_) = block.phase.plan.scale, inputs

    def scaled(keys: Tensor) -> Tensor:
        scores = queries.new_empty(*queries.shape[:2], keys.shape[1])
        return scores.baddbmm_(queries, keys.mT, beta=0, alpha=scale)

    scores = scaled(k[rows, block.low : block.high])
    if k_global is not None:
        scores = torch.cat([scaled(k_global[rows]), scores], -1)
    _add_bias(scores, inputs, block, rows)
    block.mask(scores, rows)
    return scores


def _block_output(
    inputs: tuple[Any, ...], outs: Tensor, logs: Tensor | None, block: _Block, rows: slice
) -> None:
    """Write what the queries of one block get, and the logarithm of the sum of their weights."""
    q, _, v, _, v_global, *_ = inputs
    scores = _scores(_queries(q, block, rows), inputs, block, rows)
    weights, first = torch.softmax(scores, -1), block.phase.num_global
    here = outs[rows, :, block.start : block.stop]
    alone = here.shape[1] == 1  # a query head for each key head: straight to its place
    out = here[:, 0] if alone else scores.new_empty(*scores.shape[:2], v.shape[2])
    out.baddbmm_(weights[..., first:], v[rows, block.low : block.high], beta=0)
    if v_global is not None:
        out.baddbmm_(weights[..., :first], v_global[rows])
    if not alone:
        here.copy_(out.view_as(here))
    if logs is not None:
        here = logs[rows, :, block.start : block.stop]
        # from the weight of the highest score: exponentials are made once
        here.copy_(scores.amax(-1).sub_(weights.amax(-1).log_()).view_as(here))


def _block_gradients(
    inputs: tuple[Any, ...],
    grads: tuple[Any, ...],
    upstream: tuple[Tensor, Tensor | None],
    block: _Block,
    rows: slice,
) -> None:
    """Add what one block gives to the gradients of q, k, v and the global keys and values."""
    q, k, v, k_global, v_global, *_ = inputs
    to_q, to_k, to_v, to_k_global, to_v_global, *_ = grads
    queries = _queries(q, block, rows)
    weights = torch.softmax(_scores(queries, inputs, block, rows), -1)
    first, beside = block.phase.num_global, slice(block.low, block.high)

    def of_block(x: Tensor) -> Tensor:  # [n, g C, ...]
        return x[rows, :, block.start : block.stop].reshape(*queries.shape[:2], -1).contiguous()

    above = of_block(upstream[0])
    to_v[rows, beside].add_(torch.bmm(weights[..., first:].mT, above))
    change = torch.bmm(above, v[rows, beside].mT)
    if v_global is not None:
        to_v_global[rows].add_(torch.bmm(weights[..., :first].mT, above))
        change = torch.cat([torch.bmm(above, v_global[rows].mT), change], -1)
    # through the softmax: dS = P dP - P sum(P dP), and P where the logarithm of the sum counts
    change.mul_(weights)
    total = change.sum(-1, keepdim=True)
    if upstream[1] is not None:
        total.sub_(of_block(upstream[1]))
    change.addcmul_(weights, total, value=-1)
    _bias_gradients(change.unflatten(1, (q.shape[1], -1)), grads, block, rows, len(q))
    scale = block.phase.plan.scale
    of_queries = torch.bmm(change[..., first:], k[rows, beside])
    to_k[rows, beside].add_(torch.bmm(change[..., first:].mT, queries), alpha=scale)
    if k_global is not None:
        of_queries.baddbmm_(change[..., :first], k_global[rows])
        to_k_global[rows].add_(torch.bmm(change[..., :first].mT, queries), alpha=scale)
    here = to_q[rows, :, block.start : block.stop]
    here.copy_(of_queries.mul_(scale).view_as(here))
