r"""Softmax attention over sparse sets of keys, block by block, for both forms of LSH attention.

A :class:`BlockBatch` is a batch of small dense problems: blocks of queries, each with a window of
keys. The window may hold more keys than the queries attend to; a penalty masks the rest. A query
attends to its keys in several splits (the window, the first tokens, one per hash round), and the
partial results are merged as in flash decoding: :math:`o = \sum_r 2^{l_r - l} o_r` with
:math:`l = \log_2 \sum_r 2^{l_r}` and :math:`l_r` the log-sum-exp of split r. The backward pass
recomputes the scores from the inputs and :math:`l`, so nothing else is saved.

Time 4 C W D flops per block; memory beyond the results is that of one batch of blocks. Source:
arXiv:2001.04451 (hash rounds), arXiv:2205.14135 (backward pass by recomputation). Other letters: M
queries of all heads of a work item, S keys of all heads of a work item, n blocks, C queries of a
block, W keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.runtime.kernel_calls import empty_huge_pages

LOG2_E = 1 / math.log(2)  # exp2 takes 0.2 ns an element, exp 9 for scores far below the maximum
PENALTY_SCALE = 2.0**100  # multiplies the penalty, so that masked scores lie below all others
# Log-sum-exp of a query without keys: below any other, and finite, so that 0 * exp(x) is 0
EMPTY_LSE = -1e8
HIDDEN = -PENALTY_SCALE  # a bias of -inf, made finite: far below EMPTY_LSE


class BlockBatch(NamedTuple):
    """Blocks of queries with their keys; query indices are unique, except the padding row.

    Keys are stored as s strips, n / s consecutive blocks per strip. The blocks of a strip use
    windows of W keys at a fixed stride, so neighbours may share keys, which are gathered once.
    """

    query_rows: Tensor  # [n, C], rows of q; the last row of q is padding
    key_rows: Tensor  # [s, m], rows of k and v
    penalty: Tensor  # [n, W, C]: 0 where a query attends to a key, else 1/4 to 2; overwritten
    split: int = 0  # a query occurs at most once in the batches of one split

    @property
    def stride(self) -> int:
        """Number of keys between the windows of consecutive blocks of a strip."""
        (strips, length), (blocks, width, _) = self.key_rows.shape, self.penalty.shape
        steps = blocks // strips - 1
        return (length - width) // steps if steps else width

    def unfold_windows(self, x: Tensor) -> Tensor:
        """View values per key ``[s m, ...]`` as values per block ``[n, W, ...]``."""
        x, width = x.unflatten(0, self.key_rows.shape), self.penalty.shape[1]
        if len(x) == len(self.penalty):
            return x
        windows: Tensor = x.unfold(1, width, self.stride).flatten(0, 1)
        return windows.movedim(-1, 1)

    def fold_windows(self, x: Tensor) -> Tensor:
        """Sum values per block ``[n, W, D]`` by key, ``[s m, D]``."""
        stride, (strips, length) = self.stride, self.key_rows.shape
        if stride == x.shape[1]:
            return x.flatten(0, 1)
        blocks = x.unflatten(0, (strips, -1))  # [s, n / s, W, D]
        covered = stride * blocks.shape[1]
        last = (x.shape[1] - 1) // stride * stride  # its slice is shorter if W % stride > 0
        total = x.new_empty(strips, covered + last, x.shape[2])
        total[:, covered:] = 0
        for begin in range(0, x.shape[1], stride):
            part = blocks[:, :, begin : begin + stride]
            target = total[:, begin : begin + covered].unflatten(1, (-1, stride))[
                :, :, : part.shape[2]
            ]
            target.add_(part) if begin else target.copy_(part)
        return total[:, :length].flatten(0, 1)


class BlockPlan(NamedTuple):
    """All blocks of a work item."""

    num_partials: int  # partial results: the queries of all blocks, padding included
    num_splits: int
    batches: Iterator[BlockBatch]


class PairBias(NamedTuple):
    """An additive bias on scores, gathered for the pairs of each block."""

    values: Tensor  # the bias, flattened
    query_offsets: Tensor  # [M]: index of each query's row in values
    key_offsets: Tensor  # [S]: index of each key within such a row

    def indices(self, batch: BlockBatch) -> Tensor:
        """Return the indices into ``values`` of a batch's pairs, ``[n, W, C]``."""
        keys = batch.unfold_windows(self.key_offsets.take(batch.key_rows.flatten()))
        return keys[:, :, None] + self.query_offsets.take(batch.query_rows)[:, None]


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, bias: PairBias | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of all blocks.

    Each query of each block gives a partial result; those of one query are merged at the end.

    Args:
        q: Queries, scaled, ``[M, D]``; the last row is padding, and its result is undefined.
        k: Keys, ``[S, D]``.
        v: Values, ``[S, E]``.
        plan: Blocks.
        bias: Added to the scores.

    Returns:
        Output ``[M, E]`` and base-2 log-sum-exp ``[M, 1]``, in the dtype of the inputs.
    """
    partial_outs = empty_huge_pages(v, (plan.num_partials + 1, v.shape[1]))
    maxima, sums = v.new_empty(2, plan.num_partials + 1)
    partial_outs[0], maxima[0], sums[0] = 0, -math.inf, 1  # for splits without a given query
    index = torch.arange(plan.num_partials + 1, device=q.device)
    partials = index.new_zeros(plan.num_splits, q.shape[0])  # each query's partial result per split
    begin = 1
    for batch in plan.batches:
        rows, shape = batch.query_rows.flatten(), batch.query_rows.shape
        own = slice(begin, begin + len(rows))
        keys, its_bias = batch.unfold_windows(_rows(k, batch.key_rows)), _values(bias, batch)
        scores = _scores(_rows(q, rows, shape), keys, batch.penalty, its_bias)
        maximum = torch.amax(scores, 1, keepdim=True, out=maxima[own].view(shape[0], 1, -1))
        weights = scores.sub_(maximum).exp2_()
        torch.sum(weights, 1, out=sums[own].view(shape))
        values = batch.unfold_windows(_rows(v, batch.key_rows))
        _weighted_sums(weights, values, out=partial_outs[own].view(*shape, -1))
        partials[batch.split].index_copy_(0, rows, index[own])
        begin = own.stop
    logs = (sums.log2_() + maxima).take(partials)
    maximum = logs.amax(0)
    lse = logs.sub_(maximum).exp2_().sum(0).log2_().add_(maximum).clamp_min_(EMPTY_LSE)
    weights = maxima.take(partials).sub_(lse).exp2_().t().contiguous()
    index = partials.t().contiguous()
    out = F.embedding_bag(index, partial_outs, per_sample_weights=weights, mode="sum")
    return out, lse[:, None]


def block_attention_backward(
    d_out: Tensor,
    delta: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batches: Iterable[BlockBatch],
    bias: PairBias | None = None,
    d_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        d_out: Gradient of the output, ``[M, E]``.
        delta: Row sums of ``d_out * out``, ``[M, 1]``.
        lse: Log-sum-exp, ``[M, 1]``, as :func:`block_attention` returns it.
        q: Queries, as in :func:`block_attention`.
        k: Keys.
        v: Values.
        batches: The blocks of the plan.
        bias: Added to the scores.
        d_bias: The gradient of ``bias.values`` is added to it; ``None`` skips that gradient.
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for batch in batches:
        rows, shape = batch.query_rows.flatten(), batch.query_rows.shape
        key_rows = batch.key_rows.flatten()
        queries, keys = _rows(q, rows, shape), batch.unfold_windows(_rows(k, key_rows))
        weights = _scores(queries, keys, batch.penalty, _values(bias, batch))
        weights.sub_(_rows(lse, rows, shape).mT).exp2_()
        d_rows = _rows(d_out, rows, shape)
        dv.index_add_(0, key_rows, batch.fold_windows(torch.bmm(weights, d_rows)))
        d_scores = torch.bmm(batch.unfold_windows(_rows(v, key_rows)), d_rows.mT)
        d_scores.sub_(_rows(delta, rows, shape).mT).mul_(weights)
        dq.index_add_(0, rows, torch.bmm(d_scores.mT, keys).flatten(0, 1))
        dk.index_add_(0, key_rows, batch.fold_windows(torch.bmm(d_scores, queries)))
        if bias is not None and d_bias is not None:
            d_bias.index_add_(0, bias.indices(batch).flatten(), d_scores.flatten())
    return dq, dk, dv


def split_blocks(heads: int, blocks: int, max_blocks: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of heads and blocks that hold about ``max_blocks``: of one head or of several.

    Args:
        heads: Number of heads.
        blocks: Number of blocks of each head.
        max_blocks: Number of blocks per slice.
    """
    heads_per_slice = max(1, max_blocks // blocks)
    for head in range(0, heads, heads_per_slice):
        for begin in range(0, blocks, max(max_blocks, 1)):
            yield (
                slice(head, min(head + heads_per_slice, heads)),
                slice(begin, min(begin + max(max_blocks, 1), blocks)),
            )


def _values(bias: PairBias | None, batch: BlockBatch) -> Tensor | None:
    return None if bias is None else bias.values.take(bias.indices(batch))


def _scores(q: Tensor, k: Tensor, penalty: Tensor, bias: Tensor | None) -> Tensor:
    """Return base-2 scores ``[n, W, C]`` for keys ``[n, W, D]``; overwrites ``penalty``."""
    scores = penalty.to(q.dtype)
    if q.shape[2] == 1:  # as in _weighted_sums
        scores.mul_(-PENALTY_SCALE).addcmul_(k, q.mT, value=LOG2_E)
    else:
        scores.baddbmm_(k, q.mT, beta=-PENALTY_SCALE, alpha=LOG2_E)
    return scores if bias is None else scores.add_(bias, alpha=LOG2_E)


def _weighted_sums(weights: Tensor, values: Tensor, out: Tensor) -> None:
    """Write the sums of values ``[n, W, E]`` with weights ``[n, W, C]`` to ``out``, ``[n, C, E]``.

    For one value channel and n = 1, ``bmm`` calls another kernel than for n > 1, which rounds
    differently; n depends on later tokens.
    """
    if values.shape[2] == 1:
        torch.sum(weights * values, 1, out=out.squeeze(2))
    else:
        torch.bmm(weights.mT, values, out=out)


def _rows(x: Tensor, rows: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Gather rows of x, ``[rows, D]`` or ``[*shape, D]``."""
    found = x.index_select(0, rows if rows.ndim == 1 else rows.flatten())
    return found if shape is None else found.view(*shape, -1)
