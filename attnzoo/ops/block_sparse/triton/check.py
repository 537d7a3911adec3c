"""Check of the Triton kernels of block-sparse attention on a device, against torch and float64.

    python -m attnzoo.ops.block_sparse.triton.check none 128 plain cuda:0

As :mod:`attnzoo.ops.linear.triton.check`. For the output and its gradients, all implementations get
the same selected blocks, as near scores may be ordered differently in float64.

The kernels that select key blocks or decode a token are checked too. Where all scores are exact and
many are equal, the selection must be that of torch. Otherwise the j-th best of the selected blocks
may have a lower score than the j-th best block by twice what scores may err.

Other letters: Q queries of a query block, I heads of an indexer, P size of index queries and keys,
M query blocks, N key blocks, K selected blocks, A heads with a selection of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.ops.block_sparse.custom_ops import TORCH, TRITON, triton_step
from attnzoo.ops.block_sparse.gather import attend_step as torch_step
from attnzoo.ops.block_sparse.options import (
    BlockSparseState,
    SelectionOptions,
    SparseCall,
    SparseOptions,
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
from attnzoo.ops.block_sparse.triton.run import select
from attnzoo.ops.linear.triton.check import (
    compute_twice,
    nan_padded,
    wrong_result,
    wrong_results_by_name,
)
from attnzoo.runtime.verdicts import run_check

ROUNDING = 2.0**-11  # of operands, tf32
COUNTED = 1e-3  # of the weight: rounding decides whether a block near the coverage is selected
STEP_COVERAGE = 0.7123  # which no sum of a few equal weights is near
RECENT = 7  # keys that the state of a decoded token keeps apart

KINDS = ("plain", "shared", "any", "wide")
DEFAULTS = SparseOptions(True, 32, 4, 12, 8, 1)
NAMES = ("q", "k", "v")
SCORES = {"plain": "moments", "shared": "bounds", "any": "mean", "wide": "moments"}
INDEX_HEADS, INDEX_SIZE = 3, 8


@dataclass(frozen=True, kw_only=True)
class SparseCase:
    """One call; what differs between kinds makes the compiler generate other code."""

    d: int
    e: int
    dtype: torch.dtype = torch.bfloat16
    groups: int = 1
    options: SparseOptions = DEFAULTS
    score: str = "moments"
    coverage: float | None = None
    per_key_head: bool = False
    padded: bool = False
    B: int = 2
    Hkv: int = 3
    T: int = 300
    S: int = 0  # 0 means T

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.options._asdict().items())
        keys = f"{self.S or self.T} keys"
        return f"{self.T} queries of {self.d} and {self.e}, {keys}, {sizes} score={self.score}"


def cases(decay: str, size: int, kind: str, small: bool) -> Iterator[SparseCase]:
    """Yield the cases of a kind: causal and bidirectional, several blocks and parts.

    Args:
        decay: ``"none"``.
        size: Largest key and value size.
        kind: One of :data:`KINDS`.
        small: Whether the cases are for the interpreter.
    """
    assert decay == "none"
    case, tokens = SparseCase(d=size, e=size, score=SCORES[kind]), 300
    if small:
        case, tokens = replace(case, B=1, Hkv=1), 50
        case = replace(case, options=DEFAULTS._replace(window=5, top_k=3), T=tokens)
    options = case.options
    if kind == "shared":
        shared = options._replace(block_size=32, window=40, query_block=16, top_k=2)
        case = replace(case, options=shared, groups=2, per_key_head=True)
    if kind == "any":
        odd = options._replace(block_size=12, query_block=3, num_sinks=17, window=7)
        case = replace(case, d=size - 4, e=size - 24, options=odd, groups=3, padded=True)
        case = replace(case, coverage=0.7)
    if kind == "wide":
        case = replace(case, dtype=torch.float32, groups=2)
    yield case
    yield replace(case, options=case.options._replace(causal=False))
    if kind == "wide":
        yield replace(case, dtype=torch.float16, T=tokens // 2)
        yield replace(case, score="indexer", padded=True)
    if kind == "plain":
        yield replace(case, T=tokens // 3, S=tokens)
    if not small:
        yield replace(case, T=17, S=0)
        yield replace(case, T=2100, B=1)
    yield replace(case, T=1, S=0)


class Inputs:
    """Tensors of a case, and the weights of the sum whose gradients are compared."""

    def __init__(self, case: SparseCase, device: torch.device) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(0)  # on the CPU: the same on every device

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(case.dtype)

        keys = case.S or case.T
        q = draw(case.B, case.Hkv * case.groups, case.T, case.d)
        k, v = (draw(case.B, case.Hkv, keys, size) for size in (case.d, case.e))
        self.lengths = self.counts = None
        if case.padded:
            self.counts = case.T - torch.arange(case.B) * (case.T // 3) - case.T // 5
            self.lengths = self.counts + keys - case.T
        self.scale = case.d**-0.5
        selection = SelectionOptions(case.score, case.coverage, case.per_key_head)
        call = SparseCall(
            q, k, v, self.lengths, self.counts, None, None, self.scale, case.options, selection
        )
        if case.score == "indexer":
            index_q = draw(case.B, INDEX_HEADS, case.T, INDEX_SIZE + 1).float()
            index_k = draw(case.B, 1, keys, INDEX_SIZE).float()
            summary = summarize(index_k, self.lengths, case.options, MEAN)
            call = call._replace(index_q=index_q, summary=summary)
        self.selected = select_blocks(call).to(device)
        moved: dict[str, Any] = {
            name: x.to(device) if x.dtype == torch.int64 else nan_padded(x.to(device))
            for name, x in call._asdict().items()
            if isinstance(x, Tensor)
        }
        self.call = call._replace(**moved)
        self.tensors = [self.call.q, self.call.k, self.call.v]
        self.lengths, self.counts = self.call.lengths, self.call.counts
        self.weights = draw(*q.shape[:3], case.e).to(device)


OPERATORS = {"torch": TORCH, "triton": TRITON}


def results(x: Inputs, impl: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return output, log-sum-exp and gradients, by name."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in x.tensors]
    options = [int(option) for option in x.case.options]
    out, lse = OPERATORS[impl].forward(*leaves, x.selected, x.lengths, x.counts, x.scale, options)
    grads = torch.autograd.grad((out * x.weights.to(out.dtype)).sum(), leaves)
    found = {f"d_{name}": grad for name, grad in zip(NAMES, grads, strict=True)}
    lse = lse.detach().nan_to_num(nan=torch.nan, posinf=0.0)  # of padding
    return {"out": out.detach(), "lse": lse, **found}


def wrong_results(case: SparseCase, device: torch.device) -> Iterator[str]:
    """Yield a message for each error in the kernels' results of a case."""
    inputs = Inputs(case, device)
    yield from wrong_selection(inputs.call, str(case))
    yield from wrong_ties(inputs.call, str(case))
    yield from wrong_step(inputs.call, str(case))
    of_case = partial(results, inputs)
    yield from wrong_results_by_name(str(case), case.dtype, of_case, "torch")


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


if __name__ == "__main__":
    run_check(cases, wrong_results, *sys.argv[1:])
