"""Custom operators of block-sparse attention, so that ``torch.compile`` sees one call per pass.

Other letters: M query blocks, K selected blocks, A heads with a selection of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnzoo.ops.block_sparse import gather
from attnzoo.ops.block_sparse.cpu import block_sparse as cpp
from attnzoo.ops.block_sparse.gather import SparseTensors
from attnzoo.ops.block_sparse.options import (
    SelectionOptions,
    SparseCall,
    SparseOptions,
)
from attnzoo.ops.block_sparse.selection import (
    count_key_blocks,
    count_query_blocks,
    select_blocks,
)
from attnzoo.runtime.kernel_calls import autocast_disabled, check_reverse_mode, differentiable_op

Select = Callable[[SparseCall], Tensor]
Forward = Callable[[SparseTensors], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass
class SparseOperators:
    """The custom operators of one implementation."""

    select: Any
    forward: Any

    def run(self, call: SparseCall) -> Tensor:
        """Select blocks and attend to them, ``[B, H, T, E]`` in the dtype of the values."""
        x = call
        check_reverse_mode("block_sparse_attention", x.q, x.k, x.v)
        selected = self.selected(x)
        with autocast_disabled(x.q.device):
            options = list(map(int, x.options))
            masks = x.lengths, x.counts
            out: Tensor = self.forward(x.q, x.k, x.v, selected, *masks, x.scale, options)[0]
        return out

    def selected(self, x: SparseCall) -> Tensor:
        """Return the selected blocks, ``[B, A, M, K]``."""
        with autocast_disabled(x.q.device):
            blocks: Tensor = self.select(
                (x.q if x.index_q is None else x.index_q).detach(),
                x.k.detach(),
                x.summary,
                x.lengths,
                x.counts,
                x.leader,
                x.scale,
                list(map(int, x.options)),
                *x.selection,
            )
        return blocks


def sparse_operators(
    name: str, select: Select, forward: Forward, backward: Backward
) -> SparseOperators:
    """Define the custom operators of an implementation.

    Args:
        name: Ends the names of the operators.
        select: Returns the selected blocks; see :func:`select_blocks`.
        forward: Returns the output and the log-sum-exp.
        backward: Returns the gradients of q, k and v.
    """
    select_op = _select_operator(f"attnzoo::block_sparse_select_{name}", select)
    forward_op, _ = differentiable_op(
        f"attnzoo::block_sparse_{name}",
        _forward(forward),
        _backward(backward),
        fake=_fake_forward,
        op="block_sparse_attention",
    )
    return SparseOperators(select_op, forward_op)


def _select_operator(name: str, run: Select) -> Any:
    """Define the operator that returns the selected blocks, ``[B, A, M, K]``.

    With an indexer, ``q`` are its packed queries, and ``summary`` is that of its keys. Where there
    is a summary, ``k`` gives its shape only.
    """

    @torch.library.custom_op(name, mutates_args=())
    def select(
        q: Tensor,
        k: Tensor,
        summary: Tensor | None,
        lengths: Tensor | None,
        counts: Tensor | None,
        leader: Tensor | None,
        scale: float,
        options: list[int],
        score: str,
        coverage: float | None,
        per_key_head: bool,
    ) -> Tensor:
        sizes = SparseOptions.from_ints(options)
        selection = SelectionOptions(score, coverage, per_key_head)
        call = SparseCall(q, k, k, lengths, counts, leader, summary, scale, sizes, selection)
        with autocast_disabled(q.device):
            return run(call)

    select.register_fake(_fake_selection)
    return select


def _fake_selection(q: Tensor, k: Tensor, *others: Any) -> Tensor:
    options, score, _, per_key_head = others[-4:]
    sizes = SparseOptions.from_ints(options)
    heads = k.shape[1] if per_key_head or score == "indexer" else q.shape[1]
    query_blocks = count_query_blocks(q.shape[2], sizes.query_block)
    kept = min(sizes.top_k, count_key_blocks(k.shape[2], sizes))
    return q.new_empty(q.shape[0], heads, query_blocks, kept, dtype=torch.int32)


def _forward(run: Forward) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the forward pass: output ``[B, H, T, E]`` and log-sum-exp ``[B, H, T, 1]``."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selected: Tensor,
        lengths: Tensor | None,
        counts: Tensor | None,
        scale: float,
        options: list[int],
    ) -> tuple[Tensor, Tensor]:
        sizes = SparseOptions.from_ints(options)
        with autocast_disabled(q.device):
            out, lse = run(SparseTensors(q, k, v, selected, lengths, counts, scale, sizes))
        return out.to(v.dtype), lse

    return forward


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=v.dtype)
    return out, q.new_empty(*q.shape[:3], 1, dtype=dtype)


def _backward(run: Backward) -> Callable[..., list[Tensor | None]]:
    """Return the backward pass: the gradients of q, k and v, and none of three masks."""

    def backward(
        d_outs: Sequence[Tensor | None], saved: Sequence[Tensor], needed: list[bool], *inputs: Any
    ) -> list[Tensor | None]:
        x = SparseTensors._make((*inputs[:-1], SparseOptions.from_ints(inputs[-1])))
        out, lse = saved
        d_out = torch.zeros_like(out) if d_outs[0] is None else d_outs[0]
        with autocast_disabled(x.q.device):
            gradients = run(x, d_out, out, lse)
        found = (g.to(y.dtype) for g, y in zip(gradients, (x.q, x.k, x.v), strict=True))
        return [*found, None, None, None]

    return backward


TORCH = sparse_operators("torch", select_blocks, gather.forward, gather.backward)
CPP = sparse_operators(
    "cpp", partial(select_blocks, best=cpp.best_blocks), cpp.forward, cpp.backward
)
