r"""Sliding-window attention block by block, with its own backward pass; for CPUs.

Each block of C queries attends to the keys of its band and to the global keys: a small dense
softmax whose scores stay in cache. The backward pass computes them again, so that memory is O(T D)
and time O(T (w + C + G) D). A band needs a mask only at the two corners of each block. A dilated
band is a plain one over every d-th token. Source: Beltagy et al., 2020, arXiv:2004.05150. Other
letters: N = B Hkv rows, n rows of a chunk, g query heads of a row, C queries of a block, W keys of
a band, G global keys, d dilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.window.pattern import Band, GlobalIndices, gather_bias
from attnzoo.runtime.kernel_calls import (
    check_not_mapped,
    check_reverse_mode,
    empty_huge_pages,
    first_derivative_only,
)

BLOCK = 64  # C: 32 to 64 measured fastest; longer blocks compute more masked scores
MAX_SCORES = 2**19  # computed at a time: 2 MB of float32, which fit into the L2 cache


@dataclass(frozen=True)
class LocalOptions:
    """The options of one call: band, scale and masks."""

    band: Band
    causal: bool
    scale: float
    key_mask: Tensor | None = None  # [B, T] bool: keys that the band may see; None means all
    global_indices: GlobalIndices | None = None  # of the global keys
    segment_ids: Tensor | None = None  # [B, T] integers: the band sees the query's segment only
    return_lse: bool = False
    bias_hides_keys: bool = False  # it is -inf somewhere


def blockwise_local_attention(
    q: Tensor, k: Tensor, v: Tensor, options: LocalOptions, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention within a band and to global keys.

    Args:
        q: Queries, ``[B, H, T, D]``; all heads have the same band.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        options: Band, scale and masks. The output of a query that sees no key is arbitrary but
            finite.
        bias: Added to the scores, ``[1 or B, H, 1 or T, T]``; read within the band only. A query
            whose bias is -inf at every key that it sees gives zeros.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``, and the log-sum-exp of each query's scores,
        ``[B, H, T, 1]`` in float32 or wider, which is empty unless the options ask for it.
    """
    check_reverse_mode("sliding-window attention", q, k, v, bias)
    check_not_mapped("sliding-window attention", q, k, v, bias)
    batch, heads, length, size = q.shape
    rows = batch * k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    k_global = v_global = global_bias = None
    if bias is not None:
        bias = bias.to(wide)
        if bool(bias.isneginf().any()):
            bias, options = _finite_bias(bias), replace(options, bias_hides_keys=True)
    if options.global_indices is not None:
        index = options.global_indices.positions
        k_global, v_global = (
            gather_tokens(x, index).to(wide).reshape(rows, -1, x.shape[3]) for x in (k, v)
        )
        if bias is not None:
            global_bias = gather_bias(bias, None, index)
            global_bias = global_bias.reshape(rows, -1, *global_bias.shape[2:])
    if bias is not None:
        bias = bias.unflatten(1, (k.shape[1], -1))  # [1 or B, Hkv, g, 1 or T, T]
    out, lse = _BlockwiseLocalAttention.apply(  # type: ignore[no-untyped-call]
        q.to(wide).reshape(rows, -1, length, size),
        k.to(wide).reshape(rows, length, size),
        v.to(wide).reshape(rows, length, -1),
        k_global,
        v_global,
        bias,
        global_bias,
        options,
        batch == 1,
    )
    lse = lse.view(batch, heads, length, 1) if options.return_lse else lse
    return out.view(batch, heads, length, -1).to(v.dtype), lse


class _Block:
    """A block of queries, ``start`` to ``stop``, and the keys of its band, ``low`` to ``high``."""

    def __init__(self, phase: _Phase, start: int) -> None:
        before, after, _ = phase.options.band
        self.phase = phase
        self.start, self.stop = start, min(start + BLOCK, phase.length)
        self.low, self.high = max(start - before, 0), min(self.stop + after, phase.length)
        # keys of the band that lie outside the sequence
        self.missing_left = self.low - (start - before)
        self.missing_right = self.stop + after - self.high

    def mask(self, scores: Tensor, rows: slice) -> None:
        """Mask the scores ``[n, g C, G + W]`` in place."""
        phase, size = self.phase, self.stop - self.start
        by_query = scores.view(len(scores), -1, size, scores.shape[2])
        left, right = size - self.missing_left, size - self.missing_right
        first = phase.num_global
        if left > 0:
            corner = phase.left_corner[:size, self.missing_left : size]
            by_query[..., first : first + left].add_(corner)
        if right > 0:
            by_query[..., by_query.shape[3] - right :].add_(phase.right_corner[:size, :right])
        if phase.key_bias is not None and phase.has_masked_keys(self.low, self.high):
            scores[..., first:].add_(phase.key_bias[rows, None, self.low : self.high])
        if phase.segment_ids is not None and phase.has_segment_start(self.low, self.high):
            ids = phase.segment_ids[rows]
            differ = ids[:, self.start : self.stop, None] != ids[:, None, self.low : self.high]
            by_query[..., first:].masked_fill_(differ[:, None], phase.mask_value)
        if phase.global_key_bias is not None:
            scores[..., :first].add_(phase.global_key_bias[rows, None])
        if phase.causal_positions is not None and phase.position(self.start) <= phase.last_global:
            queries = phase.position(torch.arange(self.start, self.stop, device=scores.device))
            future = phase.causal_positions[rows, None, None] > queries[:, None]
            by_query[..., :first].masked_fill_(future, phase.mask_value)

    def hidden_queries(self, scores: Tensor) -> Tensor | None:
        """Return which queries see no key, ``[n, g C, 1]``; ``None`` if the bias hides none."""
        if not self.phase.options.bias_hides_keys:
            return None
        return scores.amax(-1, keepdim=True) <= self.phase.mask_value / 2


class _Phase:
    """The tokens p, p + d, p + 2 d, ...: a dilated band is a plain band over them."""

    def __init__(
        self, options: LocalOptions, first: int, length: int, rows: int, like: Tensor
    ) -> None:
        self.options, self.first = options, first
        step = options.band.dilation
        self.tokens = slice(first, None, step)
        self.length = -(-(length - first) // step)
        self.mask_value = _mask_value(like.dtype)
        square = torch.full((BLOCK, BLOCK), self.mask_value, dtype=like.dtype, device=like.device)
        self.left_corner, self.right_corner = square.tril(-1), square.triu(1)
        self.key_bias: Tensor | None = None
        if options.key_mask is not None:
            masked = ~options.key_mask[:, self.tokens]
            self.key_bias = self._mask_bias(masked, rows, like)
            self.masked_before = F.pad(masked.any(0).cumsum(0), (1, 0)).tolist()
        self.segment_ids: Tensor | None = None
        if options.segment_ids is not None:
            ids = options.segment_ids[:, self.tokens]
            self.segment_ids = ids.repeat_interleave(rows // len(ids), 0)
            starts = (ids[:, 1:] != ids[:, :-1]).any(0)
            self.starts_before = F.pad(starts.cumsum(0), (2, 0)).tolist()
        self.num_global = 0
        self.global_key_bias = self.causal_positions = None
        if options.global_indices is not None:
            positions, valid = options.global_indices
            self.num_global = positions.shape[1]
            if not bool(valid.all()):
                self.global_key_bias = self._mask_bias(~valid, rows, like)
            if options.causal:
                self.causal_positions = positions.repeat_interleave(rows // len(positions), 0)
                self.last_global = int(positions.max())

    def _mask_bias(self, masked: Tensor, rows: int, like: Tensor) -> Tensor:
        bias = torch.zeros(masked.shape, dtype=like.dtype, device=like.device)
        return bias.masked_fill_(masked, self.mask_value).repeat_interleave(rows // len(masked), 0)

    def select(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return views of this phase's tokens; every phase has all global keys and values."""
        q, k, v, k_global, v_global, bias, global_bias = tensors
        assert q is not None
        assert k is not None
        assert v is not None
        if bias is not None:
            bias = _query_rows(bias, self.tokens)[..., self.tokens]
        if global_bias is not None:
            global_bias = _query_rows(global_bias, self.tokens)
        qkv = q[:, :, self.tokens], k[:, self.tokens], v[:, self.tokens]
        return (*qkv, k_global, v_global, bias, global_bias)

    def position(self, index: Any) -> Any:
        """Return the position in the whole sequence of a token of this phase."""
        return self.first + index * self.options.band.dilation

    def has_masked_keys(self, low: int, high: int) -> bool:
        """Whether the key mask of any row masks one of these keys."""
        return bool(self.masked_before[high] > self.masked_before[low])

    def has_segment_start(self, low: int, high: int) -> bool:
        """Whether a segment of any row starts behind the first of these keys."""
        return bool(self.starts_before[high] > self.starts_before[low + 1])

    def blocks(self) -> Iterator[_Block]:
        """Yield the blocks in order."""
        return (_Block(self, start) for start in range(0, self.length, BLOCK))


def _phases(options: LocalOptions, q: Tensor) -> Iterator[_Phase]:
    """Yield the phases that have tokens."""
    rows, _, length, _ = q.shape
    count = min(options.band.dilation, length)
    return (_Phase(options, first, length, rows, q) for first in range(count))


def _row_chunks(q: Tensor, options: LocalOptions) -> Iterator[slice]:
    """Yield chunks of rows, for which the scores of one block fit into the cache."""
    rows, groups, length, _ = q.shape
    before, after, step = options.band
    keys = min(before + BLOCK + after, -(-length // step))
    keys += 0 if options.global_indices is None else options.global_indices.positions.shape[1]
    count = max(MAX_SCORES // (groups * BLOCK * keys), 1)
    return (slice(start, start + count) for start in range(0, rows, count))


def _empty_output(q: Tensor, size: int, one_row: bool) -> Tensor:
    """Return an empty output, ``[N, g, T, E]``.

    The output of a batch of one is stored as ``[T, N, g, E]``, so that the layer can join its heads
    without a copy.
    """
    rows, groups, length, _ = q.shape
    if one_row:
        return empty_huge_pages(q, (length, rows, groups, size)).permute(1, 2, 0, 3)
    return empty_huge_pages(q, (rows, groups, length, size))


class _BlockwiseLocalAttention(torch.autograd.Function):
    """Saves its inputs only: q ``[N, g, T, D]``, k, v, the global keys and values, the biases.

    The bias of the band is ``[1 or B, Hkv, g, 1 or T, T]``, that of the global keys
    ``[N, g, 1 or T, G]``. The last two arguments are the options and whether the batch has one row.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        """Compute the output block by block."""
        *tensors, options, one_row = args
        ctx.save_for_backward(*tensors)
        ctx.options = options
        q, _, v, *_ = tensors
        out = _empty_output(q, v.shape[2], one_row)
        lse: Tensor = out.new_empty((*q.shape[:3], 1) if options.return_lse else (0,))
        with torch.autocast(q.device.type, enabled=False):
            for phase in _phases(options, q):
                inputs, outputs = phase.select(tensors), out[:, :, phase.tokens]
                lses = lse[:, :, phase.tokens] if options.return_lse else None
                for rows in _row_chunks(q, options):
                    for block in phase.blocks():
                        _block_forward(inputs, outputs, lses, block, rows)
        return out, lse

    @staticmethod
    @first_derivative_only("sliding-window attention")
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the weights again, and the gradients, block by block."""
        tensors, options = ctx.saved_tensors, ctx.options
        q = tensors[0]
        needed = [x is not None for x in tensors[:5]] + list(ctx.needs_input_grad[5:7])
        grads = [
            x.new_zeros(x.shape) if need else None for x, need in zip(tensors, needed, strict=True)
        ]
        with torch.autocast(q.device.type, enabled=False):
            for phase in _phases(options, q):
                inputs, into = phase.select(tensors), phase.select(grads)
                grad_out = grad_outputs[0][:, :, phase.tokens]
                grad_lse = grad_outputs[1][:, :, phase.tokens] if options.return_lse else None
                for rows in _row_chunks(q, options):
                    for block in phase.blocks():
                        _block_backward(inputs, into, (grad_out, grad_lse), block, rows)
        return (*grads, None, None)


def _block_queries(q: Tensor, block: _Block, rows: slice) -> Tensor:
    """Return the queries of a block, ``[n, g C, D]``: a view if g is 1."""
    return q[rows, :, block.start : block.stop].flatten(1, 2)


def _block_scores(queries: Tensor, inputs: tuple[Any, ...], block: _Block, rows: slice) -> Tensor:
    """Return the masked scores of a block, ``[n, g C, G + W]``."""
    scale, (_, k, _, k_global, *_) = block.phase.options.scale, inputs

    def scaled_products(keys: Tensor) -> Tensor:
        scores = queries.new_empty(*queries.shape[:2], keys.shape[1])
        return scores.baddbmm_(queries, keys.mT, beta=0, alpha=scale)

    positions, band = slice(block.start, block.stop), slice(block.low, block.high)
    scores = scaled_products(k[rows, band])
    if k_global is not None:
        scores = torch.cat([scaled_products(k_global[rows]), scores], -1)
    _add_bias(scores, inputs, positions, band, rows)
    block.mask(scores, rows)
    return scores


def _block_forward(
    inputs: tuple[Any, ...], outputs: Tensor, lses: Tensor | None, block: _Block, rows: slice
) -> None:
    """Write the output of one block, and the log-sum-exp of its scores."""
    q, _, v, _, v_global, *_ = inputs
    scores = _block_scores(_block_queries(q, block, rows), inputs, block, rows)
    hidden, first = block.hidden_queries(scores), block.phase.num_global
    weights = torch.softmax(scores, -1)
    out_view = outputs[rows, :, block.start : block.stop]
    in_place = out_view.shape[1] == 1  # g is 1: the product is written to the output itself
    out = out_view[:, 0] if in_place else scores.new_empty(*scores.shape[:2], v.shape[2])
    out.baddbmm_(weights[..., first:], v[rows, block.low : block.high], beta=0)
    if v_global is not None:
        out.baddbmm_(weights[..., :first], v_global[rows])
    if hidden is not None:
        out.masked_fill_(hidden, 0)
    if not in_place:
        out_view.copy_(out.view_as(out_view))
    if lses is not None:
        lse_view = lses[rows, :, block.start : block.stop]
        # max(scores) - log(max(weights)): no second pass over the exponentials
        lse_view.copy_(scores.amax(-1).sub_(weights.amax(-1).log_()).view_as(lse_view))


def _block_backward(
    inputs: tuple[Any, ...],
    grads: tuple[Any, ...],
    grad_outputs: tuple[Tensor, Tensor | None],
    block: _Block,
    rows: slice,
) -> None:
    """Add the gradients of one block to those of all inputs."""
    q, k, v, k_global, v_global, *_ = inputs
    grad_q, grad_k, grad_v, grad_k_global, grad_v_global, *_ = grads
    queries = _block_queries(q, block, rows)
    scores = _block_scores(queries, inputs, block, rows)
    hidden, weights = block.hidden_queries(scores), torch.softmax(scores, -1)
    first, keys = block.phase.num_global, slice(block.low, block.high)

    def flatten_heads(x: Tensor) -> Tensor:  # [n, g C, ...]
        return x[rows, :, block.start : block.stop].reshape(*queries.shape[:2], -1).contiguous()

    grad_out = flatten_heads(grad_outputs[0])
    if hidden is not None:
        grad_out = grad_out.masked_fill(hidden, 0)
    grad_v[rows, keys].add_(torch.bmm(weights[..., first:].mT, grad_out))
    grad_scores = torch.bmm(grad_out, v[rows, keys].mT)
    if v_global is not None:
        grad_v_global[rows].add_(torch.bmm(weights[..., :first].mT, grad_out))
        grad_scores = torch.cat([torch.bmm(grad_out, v_global[rows].mT), grad_scores], -1)
    # softmax: dS = P dP - P sum(P dP), plus P times the gradient of the log-sum-exp
    grad_scores.mul_(weights)
    total = grad_scores.sum(-1, keepdim=True)
    if grad_outputs[1] is not None:
        total.sub_(flatten_heads(grad_outputs[1]))
    grad_scores.addcmul_(weights, total, value=-1)
    by_head = grad_scores.unflatten(1, (q.shape[1], -1))
    positions = slice(block.start, block.stop)
    _add_bias_gradients(by_head, grads, positions, keys, rows, q.shape[0])
    scale = block.phase.options.scale
    grad_queries = torch.bmm(grad_scores[..., first:], k[rows, keys])
    grad_k[rows, keys].add_(torch.bmm(grad_scores[..., first:].mT, queries), alpha=scale)
    if k_global is not None:
        grad_queries.baddbmm_(grad_scores[..., :first], k_global[rows])
        grad_k_global[rows].add_(torch.bmm(grad_scores[..., :first].mT, queries), alpha=scale)
    into = grad_q[rows, :, block.start : block.stop]
    into.copy_(grad_queries.mul_(scale).view_as(into))


def _mask_value(dtype: torch.dtype) -> float:
    """Return the score of a masked key: its weight is 0, and the sum of four is finite."""
    return torch.finfo(dtype).min / 8


def _finite_bias(bias: Tensor) -> Tensor:
    """Return a bias that masks keys where it is -inf; other numbers stay well above the mask's."""
    masked = _mask_value(bias.dtype)
    return bias.clamp_min(masked / 4).masked_fill(bias.isneginf(), masked)


def _query_rows(bias: Tensor, queries: slice) -> Tensor:
    """Return the rows of some queries of ``[..., 1 or T, S]``, where one row may serve them all."""
    return bias if bias.shape[-2] == 1 else bias[..., queries, :]


def _bias_index(bias: Tensor, count: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the index of each row in the bias ``[1 or B, Hkv, ...]``: batch and key head."""
    row = torch.arange(count, device=bias.device)[rows]
    return row // bias.shape[1] * (len(bias) > 1), row % bias.shape[1]


def _add_bias(
    scores: Tensor, inputs: tuple[Any, ...], queries: slice, band: slice, rows: slice
) -> None:
    """Add the biases to the scores ``[n, g C, G + W]`` of a block of queries and its band."""
    q, *_, bias, global_bias = inputs
    first = scores.shape[2] - (band.stop - band.start)  # G
    by_head = scores.view(len(scores), q.shape[1], -1, scores.shape[2])
    if bias is not None:
        in_band = _query_rows(bias, queries)[..., band]
        by_head[..., first:].add_(in_band[_bias_index(bias, q.shape[0], rows)])
    if global_bias is not None:
        by_head[..., :first].add_(_query_rows(global_bias[rows], queries))


def _add_bias_gradients(
    grad_scores: Tensor,
    grads: tuple[Any, ...],
    queries: slice,
    band: slice,
    rows: slice,
    count: int,
) -> None:
    """Add the gradients of the scores ``[n, g, C, G + W]`` to those of the biases."""
    *_, grad_bias, grad_global_bias = grads
    first = grad_scores.shape[3] - (band.stop - band.start)  # G
    if grad_bias is not None:
        into = _query_rows(grad_bias, queries)[..., band]
        part = grad_scores[..., first:]
        part = part.sum(2, keepdim=True) if into.shape[-2] == 1 else part
        into.index_put_(_bias_index(grad_bias, count, rows), part, accumulate=True)
    if grad_global_bias is not None:
        into = _query_rows(grad_global_bias, queries)
        part = grad_scores[..., :first]
        part = part.sum(2, keepdim=True) if into.shape[-2] == 1 else part
        into[rows].add_(part)
