r"""Score key blocks and select the best ones for each query block.

Each block of keys has a summary, from which a score is computed for one query:

- ``"mean"``: the product of the query and the mean key.
- ``"moments"``: the second-order estimate of the logarithm of the block's mean weight, from mean
  :math:`\mu` and variance :math:`\sigma^2` of each channel, with :math:`x = q` times the scale:

  .. math:: \log \frac{1}{C} \sum_s e^{x k_s} \approx x \mu + \frac{1}{2} \sum_d x_d^2 \sigma_d^2.

- ``"bounds"``: Quest's upper bound of all products,
  :math:`\sum_d \max(q_d \min_s k_{sd}, q_d \max_s k_{sd})`.
- ``"indexer"``: the score of a trained indexer, whose queries and summaries replace those of the
  layer (see :mod:`attnzoo.ops.block_sparse.index_keys`).

A query block is represented by one query: in a causal layer its first, so that later tokens change
no selection; otherwise the mean of its queries. Candidates are the blocks outside the window.
Source: Tang et al., 2024, arXiv:2406.10774 (bounds); Xu et al., 2025, arXiv:2503.16428 (coverage).
Other letters: C keys of a block, M query blocks, N key blocks, K selected blocks, A heads with a
selection of their own (H or Hkv), Z numbers per summary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.block_sparse.options import (
    BlockSparseState,
    SelectionOptions,
    SparseCall,
    SparseOptions,
)

NO_BLOCK = 2**30  # in place of a block, after the selected ones
MAX_SCORES = 2**21  # computed at a time
FEW_SCORES = 2**19  # that stay in the L2 cache
MEAN = SelectionOptions("mean", None, False)  # how index keys are summarized
MAX_RECENT = 256  # tokens that a state keeps apart; a multiple of this many are merged at a time


class Candidates(NamedTuple):
    """Blocks that a query block may select: below ``end``, or from ``begin`` on."""

    first: int  # block: earlier ones consist of the first tokens only
    end: Tensor  # [1 or B, M]
    begin: Tensor  # [1 or B, M]
    stop: Tensor | int  # [B, 1]: number of blocks of the row

    def mask(self, blocks: int) -> Tensor:
        """Return the candidates, ``[1 or B, M, N]`` bool."""
        block = torch.arange(blocks, device=self.end.device)
        stop = self.stop[..., None] if isinstance(self.stop, Tensor) else self.stop
        late = (block >= self.begin[..., None]) & (block < stop)
        early = (block < self.end[..., None]) & (block >= self.first)
        return early | (late & (block >= self.first))


def count_query_blocks(length: int, size: int) -> int:
    """Return M, the most query blocks of ``size`` queries that a call of T queries touches."""
    return length if size == 1 else (length + size - 2) // size + 1


def count_key_blocks(keys: int, options: SparseOptions) -> int:
    """Return N, the number of blocks with a summary."""
    size = options.block_size
    return keys // size if options.causal else -(-keys // size)


def first_positions(call: SparseCall) -> Tensor:
    """Return the position of the first query of each query block, ``[1 or B, M]``.

    The first query block may begin before the call.
    """
    size, length, device = call.options.query_block, call.q.shape[2], call.q.device
    if call.lengths is None:
        start = torch.tensor([[call.k.shape[2] - length]], device=device)
    else:
        start = (call.lengths - length)[:, None]
    blocks = count_query_blocks(length, size)
    return (start.div(size, rounding_mode="floor") + torch.arange(blocks, device=device)) * size


def pool_queries(call: SparseCall) -> tuple[Tensor, Tensor]:
    """Return the query that represents each query block, and the blocks' first positions.

    Returns:
        Queries ``[B, H, M, D]``, and positions ``[1 or B, M]``.
    """
    q, size, first = call.q, call.options.query_block, first_positions(call)
    if size == 1:
        return q, first
    length = q.shape[2]
    keys = call.k.shape[2] if call.lengths is None else call.lengths[:, None]
    index = first - (keys - length)  # [1 or B, M], of the block's first query in the call
    if not call.options.causal:
        return _mean_queries(call, index), first
    gathered = gather_tokens(q, index.clamp(0, length - 1))
    if call.leader is not None and call.leader.shape[2]:
        oldest = 0 if call.counts is None else length - call.counts[:, None]
        earlier = (index < oldest)[:, None, :, None]
        gathered = torch.where(earlier, call.leader.to(q.dtype)[:, :, None], gathered)
    return gathered, first


def _mean_queries(call: SparseCall, index: Tensor) -> Tensor:
    """Return the mean of the real queries of a query block, ``[B, H, M, D]``, at least float32."""
    q, size, length = call.q, call.options.query_block, call.q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    total = torch.zeros(*q.shape[:2], index.shape[1], q.shape[3], dtype=wide, device=q.device)
    count = torch.zeros_like(index)
    least = 0 if call.counts is None else (length - call.counts)[:, None]
    for i in range(size):
        at = index + i
        real = (at >= least) & (at >= 0) & (at < length)
        total = total + gather_tokens(q, at.clamp(0, length - 1)) * real[:, None, :, None]
        count = count + real
    return total / count.clamp(min=1)[:, None, :, None]


def summarize(
    k: Tensor, lengths: Tensor | None, options: SparseOptions, selection: SelectionOptions
) -> Tensor:
    """Return the summary of each block, ``[B, Hkv, N, Z]``, in float32 or wider.

    A causal layer has summaries of finished blocks; others also have one of a last, shorter block.

    Args:
        k: Keys, ``[B, Hkv, S, D]``, whose rows are aligned at their ends.
        lengths: Real keys of each row, ``[B]``; ``None`` means S.
        options: Sizes.
        selection: How blocks are scored.
    """
    size, keys = options.block_size, k.shape[2]
    blocks = count_key_blocks(keys, options)
    wide = torch.promote_types(k.dtype, torch.float32)
    position = torch.arange(blocks * size, device=k.device)[None]
    exists = position < (keys if lengths is None else lengths[:, None])
    if lengths is not None:
        index = (position + keys - lengths[:, None]).clamp(0, keys - 1)
        k = gather_tokens(k, index)
    elif blocks * size <= keys:
        k = k[:, :, : blocks * size]
    else:
        k = torch.nn.functional.pad(k, (0, 0, 0, blocks * size - keys))
    k = k.to(wide).unflatten(2, (blocks, size))
    real = exists.unflatten(1, (blocks, size))[:, None, :, :, None]
    whole = lengths is None and blocks * size <= keys
    if selection.score == "bounds":
        low = k if whole else k.masked_fill(~real, torch.inf)
        high = k if whole else k.masked_fill(~real, -torch.inf)
        bounds = torch.cat([high.amax(3), low.amin(3)], 3)
        return bounds if whole else bounds.masked_fill(~real.any(3), 0)
    if whole:
        step = max(1, FEW_SCORES // max(1, k.shape[0] * k.shape[1] * size * k.shape[4]))
        parts = [_moments(part, None, selection.score) for part in k.split(step, 2)]
        return torch.cat(parts, 2) if blocks else _moments(k, None, selection.score)
    return _moments(k, real, selection.score)


def _moments(k: Tensor, real: Tensor | None, score: str) -> Tensor:
    """Return the mean of blocks of keys ``[B, Hkv, N, C, D]``, and the variance if it is used."""
    count = k.shape[3] if real is None else real.sum(3).clamp(min=1)
    mean = (k if real is None else k * real).sum(3) / count
    if score == "mean":
        return mean
    squares = (k - mean[:, :, :, None]).square_()
    return torch.cat([mean, (squares if real is None else squares * real).sum(3) / count], 3)


def query_features(q: Tensor, scale: float, score: str) -> Tensor:
    """Return the features ``[..., Z]`` whose product with a summary is the score of a block."""
    if score == "bounds":
        q = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)
    if score == "moments":
        q = torch.cat([q, (q * scale).square() * (0.5 / scale)], -1)
    return q


def candidates(call: SparseCall, first: Tensor) -> Candidates:
    """Return the blocks outside the windows of query blocks that begin at ``first``."""
    options, size = call.options, call.options.block_size
    keys: Tensor | int = call.k.shape[2] if call.lengths is None else call.lengths[:, None]
    begin, end = options.near_range(first, keys)
    end = (end + size - 1).div(size, rounding_mode="floor")
    if options.causal:
        end = torch.full_like(end, NO_BLOCK)
    stop = (keys + size - 1) // size
    return Candidates(options.num_sinks // size, begin // size, end, stop)


# Queries, summaries, candidates and the call -> blocks; without coverage, in float32
Best = Callable[[Tensor, Tensor, Candidates, SparseCall], Tensor]


@torch.no_grad()
def select_blocks(call: SparseCall, best: Best | None = None) -> Tensor:
    """Return the selected blocks, ``[B, A, M, K]`` int32, sorted; ``NO_BLOCK`` fills the rest.

    Of equal scores, that of the earlier block wins.

    Args:
        call: The call.
        best: Scores and selects in float32, without ``coverage``; ``None`` runs PyTorch.
    """
    queries, first = pool_queries(call.with_selecting_queries())
    summary, indexed = call.summary, call.selection.score == "indexer"
    if summary is None:
        summary = summarize(call.k, call.lengths, call.options, call.selection)
    key_heads = summary.shape[1]
    if call.selection.per_key_head:
        queries = queries.to(summary.dtype).unflatten(1, (key_heads, -1)).mean(2)
    batch, heads, count, _ = queries.shape
    queries = queries.unflatten(1, (key_heads, -1))  # [B, Hkv, A / Hkv, M, D]
    selections = 1 if indexed else heads
    allowed = candidates(call, first)
    blocks, kept = summary.shape[2], min(call.options.top_k, summary.shape[2])
    selected = torch.full(
        (batch, selections, count, kept), NO_BLOCK, dtype=torch.int32, device=queries.device
    )
    if kept == 0:
        return for_key_heads(selected, call)
    if best is not None and call.selection.coverage is None and summary.dtype == torch.float32:
        return for_key_heads(best(queries, summary, allowed, call), call)
    step = max(1, MAX_SCORES // max(1, batch * heads * blocks))
    for start in range(0, count, step):
        rows = slice(start, start + step)
        part = allowed._replace(end=allowed.end[:, rows], begin=allowed.begin[:, rows])
        some = queries[:, :, :, rows].to(summary.dtype)
        if indexed:
            scores = index_scores(some[:, 0], summary)[:, None]
        else:
            features = query_features(some, call.scale, call.selection.score)
            scores = (features @ summary[:, :, None].mT).flatten(1, 2)
        selected[:, :, rows] = _best(scores, part, call, kept)
    return for_key_heads(selected, call)


def for_key_heads(selected: Tensor, call: SparseCall) -> Tensor:
    """Repeat the selection of an indexer for every key head."""
    if call.selection.score != "indexer":
        return selected
    return selected.repeat(1, call.k.shape[1], 1, 1)


def index_scores(queries: Tensor, summary: Tensor) -> Tensor:
    """Return the indexer's score of each block, ``[B, M, N]``.

    Args:
        queries: Index queries and the weights of their heads, ``[B, I, M, P + 1]``.
        summary: Mean index keys of blocks, ``[B, 1, N, P]``.
    """
    products = (queries[..., :-1] @ summary.mT).relu()  # [B, I, M, N]
    weights = queries[..., -1].transpose(1, 2)[:, :, None]  # [B, M, 1, I]
    return (weights @ products.transpose(1, 2)).squeeze(2)


def _best(scores: Tensor, allowed: Candidates, call: SparseCall, kept: int) -> Tensor:
    """Return the indices of the largest scores ``[B, A, M, N]`` among candidates, sorted."""
    is_candidate = allowed.mask(scores.shape[3])[:, None]
    scores = scores.masked_fill(~is_candidate, -torch.inf)
    values = scores.topk(kept, dim=3).values
    threshold = values[..., -1:]
    coverage = call.selection.coverage
    if coverage is not None:
        scale = 1.0 if call.selection.score == "indexer" else call.scale
        weights = (values * scale - (scores * scale).logsumexp(3, keepdim=True)).exp()
        before = weights.cumsum(3) - weights  # NaN without candidates
        needed = ((before < coverage) & (values > -torch.inf)).sum(3, keepdim=True)
        threshold = values.gather(3, (needed - 1).clamp(min=0))
        kept_rows = needed
    else:
        kept_rows = torch.full_like(threshold, kept, dtype=torch.long)
    above = scores > threshold
    ties = (scores == threshold) & is_candidate
    missing = kept_rows - above.sum(3, keepdim=True)
    chosen = above | (ties & (ties.cumsum(3) <= missing))
    block = torch.arange(scores.shape[3], dtype=torch.int32, device=scores.device)
    return torch.where(chosen, block, NO_BLOCK).topk(kept, dim=3, largest=False).values


# -- rows and states -------------------------------------------------------------------------------


def align_rows(
    call: SparseCall, mask: AttentionMask, state: BlockSparseState | None = None
) -> tuple[SparseCall, Tensor | None, Tensor | None]:
    """Move padding to the front of every row, after the keys of the state.

    Returns:
        The call, whose rows end with their last real token; the index of each of its queries in
        the call before, ``[B, T]``; and that of each key, ``[B, S]``, those of the state first.
        ``None`` means unchanged.
    """
    q, k, v = call.q, call.k, call.v
    batch, length = q.shape[0], q.shape[2]
    padding = _key_mask(q, k, mask)
    if state is None and padding is None:
        return call, None, None
    if padding is None:
        padding = torch.ones(batch, length, dtype=torch.bool, device=q.device)
    padding = padding.expand(batch, -1)
    if isinstance(mask.q_offset, int) and (state is not None or mask.q_offset == 0):
        query_mask = padding[:, :length]
    else:
        positions = torch.arange(length, device=q.device) + mask.q_offset
        query_mask = padding.index_select(1, positions)
    if state is not None:
        k = torch.cat([state.k, state.recent_k, k], 2)
        v = torch.cat([state.v, state.recent_v, v], 2)
        past = k.shape[2] - length
        position = torch.arange(past, device=k.device)
        real = position >= past - state.length[:, None]
        padding = torch.cat([real, padding], 1)
    if not torch.compiler.is_compiling() and bool(padding.all()):
        return call._replace(k=k, v=v), None, None
    keys = padding.int().argsort(dim=1, stable=True)
    order = query_mask.int().argsort(dim=1, stable=True)
    lengths, counts = padding.sum(1), query_mask.sum(1)
    k, v = (align_tokens(x, keys, lengths) for x in (k, v))
    if not torch.compiler.is_compiling():
        longest = max(int(lengths.max()), length)
        k, v = k[:, :, k.shape[2] - longest :], v[:, :, v.shape[2] - longest :]
    q = align_tokens(q, order, counts)
    return call._replace(q=q, k=k, v=v, lengths=lengths, counts=counts), order, keys


def _key_mask(q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor | None:
    """Return which keys exist, ``[1 or B, S]`` bool; ``None`` means all."""
    length, keys, offset = q.shape[2], k.shape[2], mask.q_offset
    if length == keys or (isinstance(offset, int) and offset == keys - length):
        return mask.padding
    exists = (torch.arange(keys, device=k.device) < offset + length)[None]  # of a static cache
    return exists if mask.padding is None else exists & mask.padding


def align_tokens(x: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """Reorder ``[B, H, T, D]`` by ``[B, T]``; tokens before the last ``counts`` become zeros."""
    x = gather_tokens(x, order)
    is_padding = torch.arange(x.shape[2], device=x.device) < x.shape[2] - counts[:, None]
    return x.masked_fill(is_padding[:, None, :, None], 0)


def restore_order(out: Tensor, order: Tensor | None) -> Tensor:
    """Move outputs ``[B, H, T, E]`` back to the places of their queries."""
    return out if order is None else gather_tokens(out, order.argsort(1))


def new_state(call: SparseCall, state: BlockSparseState | None) -> BlockSparseState:
    """Return the state after all keys of a call, ``state`` being the one before it."""
    k, v, size = call.k, call.v, call.options.block_size
    lengths = call.lengths
    if lengths is None:
        lengths = torch.full((k.shape[0],), k.shape[2], device=k.device)
    summary = call.summary
    if summary is None:
        summary = summarize(k, call.lengths, call.options, call.selection)
    finished = int(lengths.max()) // size if k.shape[0] else 0
    leader = _current_leader(call.with_selecting_queries(), lengths)
    empty = k[:, :, :0], v[:, :, :0]
    tail = k[:, :1, :0, :0] if call.tail is None else call.tail
    return BlockSparseState(
        k.contiguous(), v.contiguous(), *empty, lengths, summary[:, :, :finished], leader, tail
    )


def _current_leader(call: SparseCall, lengths: Tensor) -> Tensor:
    """Return the first query of the query block of the last token, ``[B, H, D]``."""
    q, size = call.q, call.options.query_block
    if size == 1 or not call.options.causal:
        return q.new_zeros(*q.shape[:2], 0)
    if not q.shape[2]:
        return q.new_zeros(*q.shape[:2], q.shape[3])
    pooled, first = pool_queries(call)
    block = ((lengths[:, None] - 1) // size - first[:, :1] // size).clamp(min=0)
    return gather_tokens(pooled, block)[:, :, 0]


def add_token(
    state: BlockSparseState,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    options: SparseOptions,
    selection: SelectionOptions,
    index_k: Tensor | None = None,
) -> BlockSparseState:
    """Return the state after one more real token in every row; copies the recent keys only.

    ``q`` is the query that scores blocks, and ``index_k`` the index key, ``[B, 1, 1, P]``.
    """
    recent_k = torch.cat([state.recent_k, k], 2)
    recent_v = torch.cat([state.recent_v, v], 2)
    old_k, old_v, length, size = state.k, state.v, state.length + 1, options.block_size
    finished = length % size == 0
    summary, tail = state.summary, state.tail
    if index_k is not None:
        latest = torch.cat([tail, index_k.to(tail.dtype)], 2)
        tail = latest[:, :, 1:]
    if bool(finished.any()):
        keys = recent_k[:, :, -size:] if index_k is None else latest
        if keys.shape[2] < size:
            keys = torch.cat([old_k[:, :, old_k.shape[2] + keys.shape[2] - size :], keys], 2)
        keys = F.pad(keys, (0, 0, size - keys.shape[2], 0))  # of rows that are shorter than a block
        given = selection if index_k is None else MEAN
        new = summarize(keys, None, options, given).to(summary.dtype)
        index = length // size - 1
        if bool((index == summary.shape[2]).all()):
            summary = torch.cat([summary, new], 2)
        else:
            if int(index.max()) >= summary.shape[2]:
                summary = F.pad(summary, (0, 0, 0, 1))
            index = torch.where(finished, index, -1)[:, None, None, None]
            column = torch.arange(summary.shape[2], device=k.device)[:, None]
            summary = torch.where(column == index, new, summary)
    leader = state.leader
    if leader.shape[2]:
        begins = (state.length % options.query_block == 0)[:, None, None]
        leader = torch.where(begins, q[:, :, 0], leader)
    if recent_k.shape[2] >= MAX_RECENT:
        old_k, old_v = torch.cat([old_k, recent_k], 2), torch.cat([old_v, recent_v], 2)
        recent_k, recent_v = recent_k[:, :, :0], recent_v[:, :, :0]
    return BlockSparseState(old_k, old_v, recent_k, recent_v, length, summary, leader, tail)
