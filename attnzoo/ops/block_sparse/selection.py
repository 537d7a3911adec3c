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
from torch import Tensor

from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.block_sparse.options import SelectionOptions, SparseCall, SparseOptions

NO_BLOCK = 2**30  # in place of a block, after the selected ones
MAX_SCORES = 2**21  # computed at a time
FEW_SCORES = 2**19  # that stay in the L2 cache
MEAN = SelectionOptions("mean", None, False)  # how index keys are summarized


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
