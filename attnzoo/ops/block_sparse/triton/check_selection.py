"""Check of the Triton kernels that select key blocks or decode a token, against torch and float64.

Where all scores are exact and many are equal, the selection must be that of torch. Otherwise near
scores may be ordered differently: the j-th best of the selected blocks may have a lower score than
the j-th best block by twice what scores may err.

Letters: B batch, M query blocks, N key blocks, K selected blocks, A heads with a selection of their
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.ops.block_sparse.custom_ops import triton_step
from attnzoo.ops.block_sparse.options import (
    BlockSparseState,
    SelectionOptions,
    SparseCall,
    SparseStep,
)
from attnzoo.ops.block_sparse.selection import (
    MEAN,
    Candidates,
    candidates,
    index_scores,
    pool_queries,
    query_features,
    select_blocks,
    summarize,
)
from attnzoo.ops.block_sparse.step import attend_step as torch_step
from attnzoo.ops.block_sparse.triton.run import select
from attnzoo.ops.linear.triton.check import compute_twice, wrong_result

ROUNDING = 2.0**-11  # of operands, tf32
COUNTED = 1e-3  # of the weight: rounding decides whether a block near the coverage is selected
STEP_COVERAGE = 0.7123  # which no sum of a few equal weights is near
RECENT = 7  # keys that the state of a decoded token keeps apart


class Scores(NamedTuple):
    """Scores of all blocks, the largest sum of their terms' magnitudes, and the candidates."""

    scores: Tensor  # [B, A, M, N]
    magnitude: float
    allowed: Tensor  # [B or 1, 1, M, N]


def scores_of(call: SparseCall, dtype: torch.dtype) -> Scores:
    """Return the scores of a call, computed in ``dtype``."""
    converted = {
        name: x.to(dtype)
        for name in ("q", "k", "leader", "summary", "index_q")
        if (x := getattr(call, name)) is not None
    }
    call = call._replace(**converted)
    queries, first = pool_queries(call.with_selecting_queries())
    found: Candidates = candidates(call, first)
    if call.selection.score == "indexer":
        assert call.summary is not None
        scores = index_scores(queries, call.summary)[:, None]
        magnitude = index_scores(queries.abs(), call.summary.abs()).max().item()
    else:
        summary = summarize(call.k, call.lengths, call.options, call.selection)
        if call.selection.per_key_head:
            queries = queries.unflatten(1, (call.k.shape[1], -1)).mean(2)
        features = query_features(queries, call.scale, call.selection.score)
        features = features.unflatten(1, (call.k.shape[1], -1))
        scores = (features @ summary[:, :, None].mT).flatten(1, 2)
        magnitude = (features.abs() @ summary[:, :, None].mT.abs()).max().item()
    return Scores(scores, magnitude, found.mask(scores.shape[3])[:, None])


def wrong_selection(call: SparseCall, case: str) -> Iterator[str]:
    """Yield a message for each error in the selection of a call."""
    first, second = compute_twice(lambda: {"selected": select(call)})
    selected = first["selected"]
    if not torch.equal(selected, second["selected"]):
        yield f"the selection differs between two equal calls in {case}"
    if selected.numel() == 0:
        return
    exact, plain = scores_of(call, torch.float64), scores_of(call, torch.float32)
    if call.selection.score == "indexer":
        selected = selected[:, :1]
    blocks = exact.scores.shape[3]
    chosen = torch.zeros(*exact.scores.shape[:3], blocks + 1, dtype=torch.int32)
    chosen = chosen.to(selected.device).scatter_add(
        3, selected.clamp(0, blocks).long(), torch.ones_like(selected)
    )
    if int(chosen[..., :blocks].max()) > 1 or bool((selected < 0).any()):
        yield f"a block is selected twice, or does not exist, in {case}"
        return
    mask = chosen[..., :blocks] > 0
    if bool((mask & ~exact.allowed).any()):
        yield f"a block is selected that is no candidate in {case}"
        return
    scores = exact.scores.masked_fill(~exact.allowed, -torch.inf)
    best = scores.sort(3, descending=True).values
    taken = scores.masked_fill(~mask, -torch.inf).sort(3, descending=True).values
    both = (best > -torch.inf) & (taken > -torch.inf)
    lost = torch.where(both, best - taken, 0).max().item()
    error = (plain.scores - exact.scores).masked_fill(~exact.allowed, 0).abs().max().item()
    allowed = 2 * (2 * error + ROUNDING * exact.magnitude)
    if not lost <= allowed:
        yield f"scores of selected blocks are lower by {lost:.2g} (allowed {allowed:.2g}) in {case}"
    yield from _wrong_counts(call, scores, mask, allowed, case)


def _wrong_counts(
    call: SparseCall, scores: Tensor, mask: Tensor, error: float, case: str
) -> Iterator[str]:
    """Yield which rows select too few blocks, or too many."""
    count, available = mask.sum(3), (scores > -torch.inf).sum(3)
    needed = available.clamp(max=call.options.top_k)
    if call.selection.coverage is None:
        if not torch.equal(count, needed):
            yield f"rows select another number of blocks than there are in {case}"
        return
    scale = 1.0 if call.selection.score == "indexer" else call.scale
    weights = (scores * scale).softmax(3).nan_to_num(0)
    ordered = weights.sort(3, descending=True).values
    before = ordered.cumsum(3) - ordered
    slack = COUNTED + 2 * abs(scale) * error
    least, most = (
        ((before < call.selection.coverage + x) & (ordered > 0)).sum(3) for x in (-slack, slack)
    )
    if bool((count < torch.minimum(least, needed)).any() | (count > most).any()):
        yield f"the selected blocks do not have the share of the weight in {case}"


def wrong_ties(call: SparseCall, case: str) -> Iterator[str]:
    """Yield whether the selection differs from torch where scores are exact and many are equal."""
    generator = torch.Generator().manual_seed(1)

    def small(x: Tensor) -> Tensor:
        drawn = torch.randint(-1, 2, x.shape, generator=generator)
        return drawn.to(x.device, x.dtype)

    options = call.options._replace(block_size=8, query_block=min(call.options.query_block, 2))
    selection = SelectionOptions(call.selection.score, None, call.selection.per_key_head)
    if selection.score == "indexer":
        return
    call = call._replace(
        q=small(call.q), k=small(call.k), scale=1.0, options=options, selection=selection
    )
    if call.k.shape[2] >= options.block_size and not torch.equal(select(call), select_blocks(call)):
        yield f"of blocks with equal scores, others are selected than in torch in {case}"


def wrong_step(call: SparseCall, case: str) -> Iterator[str]:
    """Yield a message for each error in one decoded token, where scores are exact."""
    options, generator = call.options, torch.Generator().manual_seed(2)
    if not options.causal:
        return

    def small(x: Tensor) -> Tensor:
        drawn = torch.randint(-1, 2, x.shape, generator=generator)
        return drawn.to(x.device, x.dtype)

    options = options._replace(block_size=8)
    coverage = None if call.selection.coverage is None else STEP_COVERAGE
    selection = call.selection._replace(coverage=coverage)
    asking = call.with_selecting_queries().q[:, :, -1:]
    k, v, keys = small(call.k), call.v, call.k.shape[2]
    leader = small(asking[:, :, 0]) if options.query_block > 1 else asking[:, :, 0, :0]
    lengths = call.lengths
    if lengths is None:
        lengths = torch.full((k.shape[0],), keys, device=k.device)
    index_q = None if call.index_q is None else small(asking)
    summary = summarize(k, call.lengths, options, selection)
    if call.index_q is not None:
        index_k = small(k[:, :1, :, : asking.shape[3] - 1].float())
        summary = summarize(index_k, call.lengths, options, MEAN)
    old = max(0, keys - RECENT)
    state = BlockSparseState(
        *(k[:, :, :old], v[:, :, :old], k[:, :, old:], v[:, :, old:]),
        *(lengths, summary, leader, k[:, :1, :0]),
    )
    call = SparseCall(
        *(small(call.q[:, :, -1:]), k, v, None, None, None, None, 0.5, options, selection),
        index_q=index_q,
    )
    step = SparseStep(call, state)
    first, second = compute_twice(lambda: {"out": triton_step(step).to(v.dtype)})
    plain = torch_step(step).to(v.dtype)
    wide: dict[str, Any] = {
        name: x.double() for name, x in state._asdict().items() if x.is_floating_point()
    }
    asked: dict[str, Any] = {} if index_q is None else {"index_q": index_q.double()}
    wide_call = call._replace(q=call.q.double(), **asked)
    exact = torch_step(SparseStep(wide_call, state._replace(**wide)))
    yield from wrong_result("the token", case, v.dtype, first["out"], second["out"], plain, exact)
