"""Check of the Triton kernels of block-sparse attention on a device, against torch and float64.

    python -m attnzoo.ops.block_sparse.triton.check none 128 plain cuda:0

As :mod:`attnzoo.ops.linear.triton.check`. All implementations get the same selected blocks, as
near scores may be ordered differently in float64. The selection has a check of its own, in
:mod:`attnzoo.ops.block_sparse.triton.check_selection`.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size,
Q queries of a query block, I heads of an indexer, P size of index queries and keys.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnzoo.ops.block_sparse.custom_ops import TORCH, TRITON
from attnzoo.ops.block_sparse.options import (
    SelectionOptions,
    SparseCall,
    SparseOptions,
)
from attnzoo.ops.block_sparse.selection import MEAN, select_blocks, summarize
from attnzoo.ops.block_sparse.triton.check_selection import (
    wrong_selection,
    wrong_step,
    wrong_ties,
)
from attnzoo.ops.linear.triton.check import nan_padded, wrong_results_by_name
from attnzoo.runtime.verdicts import run_check

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


if __name__ == "__main__":
    run_check(cases, wrong_results, *sys.argv[1:])
