"""Custom operators of block-sparse attention, so that ``torch.compile`` sees one call per pass.

Other letters: M query blocks, K selected blocks, A heads with a selection of their own.
"""

from __future__ import annotations

from collections.abc import Callable
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
    SparseStep,
)
from attnzoo.ops.block_sparse.selection import (
    MAX_SCORES,
    count_key_blocks,
    count_query_blocks,
    select_blocks,
)
from attnzoo.ops.block_sparse.triton import run as triton
from attnzoo.runtime.autocast import autocast_disabled
from attnzoo.runtime.derivatives import check_reverse_mode, refuse_derivative
from attnzoo.runtime.memory import register_buffer_bytes, simd_bytes

Select = Callable[[SparseCall], Tensor]
Forward = Callable[[SparseTensors], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass
class SparseOperators:
    """The custom operators of one implementation."""

    select: Any
    forward: Any
    backward: Any

    def run(self, call: SparseCall) -> Tensor:
        """Select blocks and attend to them, ``[B, H, T, E]`` in the dtype of the values."""
        x = call
        check_reverse_mode("block_sparse_attention", x.q, x.k, x.v)
        with autocast_disabled(x.q.device):
            options = [int(option) for option in x.options]
            selected = self.select(
                (x.q if x.index_q is None else x.index_q).detach(),
                x.k.detach(),
                x.summary,
                x.lengths,
                x.counts,
                x.leader,
                x.scale,
                options,
                *x.selection,
            )
            masks = x.lengths, x.counts
            out: Tensor = self.forward(x.q, x.k, x.v, selected, *masks, x.scale, options)[0]
        return out


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
    forward_op = _forward_operator(f"attnzoo::block_sparse_forward_{name}", forward)
    backward_op = _backward_operator(f"attnzoo::block_sparse_backward_{name}", backward)

    def run_backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        gradients = backward_op(d_out, out, lse, *tensors, ctx.scale, ctx.options)
        return (*gradients, *[None] * 5)

    forward_op.register_autograd(run_backward, setup_context=_setup_context)
    refuse_derivative(backward_op, "block_sparse_attention")
    return SparseOperators(select_op, forward_op, backward_op)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.options = inputs
    ctx.save_for_backward(*tensors, *output)


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
    register_buffer_bytes(select)(_selection_bytes)
    return select


def _fake_selection(q: Tensor, k: Tensor, *others: Any) -> Tensor:
    options, score, _, per_key_head = others[-4:]
    sizes = SparseOptions.from_ints(options)
    heads = k.shape[1] if per_key_head or score == "indexer" else q.shape[1]
    query_blocks = count_query_blocks(q.shape[2], sizes.query_block)
    kept = min(sizes.top_k, count_key_blocks(k.shape[2], sizes))
    return q.new_empty(q.shape[0], heads, query_blocks, kept, dtype=torch.int32)


def _forward_operator(name: str, run: Forward) -> Any:
    """Define the operator of the output ``[B, H, T, E]`` and log-sum-exp ``[B, H, T, 1]``."""

    @torch.library.custom_op(name, mutates_args=())
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

    forward.register_fake(_fake_forward)
    register_buffer_bytes(forward)(_forward_bytes)
    return forward


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=v.dtype)
    return out, q.new_empty(*q.shape[:3], 1, dtype=dtype)


def _backward_operator(name: str, run: Backward) -> Any:
    """Define the operator of the gradients of q, k and v."""

    @torch.library.custom_op(name, mutates_args=())
    def backward(
        d_out: Tensor,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selected: Tensor,
        lengths: Tensor | None,
        counts: Tensor | None,
        scale: float,
        options: list[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes = SparseOptions.from_ints(options)
        x = SparseTensors(q, k, v, selected, lengths, counts, scale, sizes)
        with autocast_disabled(q.device):
            gradients = run(x, d_out, out, lse)
        dq, dk, dv = (g.to(y.dtype) for g, y in zip(gradients, (q, k, v), strict=True))
        return dq, dk, dv

    backward.register_fake(_fake_backward)
    register_buffer_bytes(backward)(_backward_bytes)
    return backward


def _fake_backward(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


def _selection_bytes(q: Tensor, k: Tensor, *others: Any) -> int:
    options, _, coverage, _ = others[-4:]
    if coverage is None:
        return 0  # the kernel scores a few blocks at a time
    sizes = SparseOptions.from_ints(options)
    blocks = count_key_blocks(k.shape[2], sizes)
    scores = q.shape[0] * q.shape[1] * count_query_blocks(q.shape[2], sizes.query_block) * blocks
    return 2 * min(scores, MAX_SCORES) * torch.float32.itemsize  # and their sums, or masked


def _forward_bytes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    dtype = torch.promote_types(q.dtype, torch.float32)
    written = out.numel()  # in v's type only when the rows are freed
    converted = written * (dtype.itemsize - v.dtype.itemsize)
    return simd_bytes(dtype, q, k, k, v) + converted  # keys by row and by column


def _backward_bytes(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> int:
    read = simd_bytes(lse.dtype, d_out, q, k, k, v, v)
    return read + (simd_bytes(lse.dtype, q, k, v) if q.dtype != lse.dtype else 0)


TORCH = sparse_operators("torch", select_blocks, gather.forward, gather.backward)
CPP = sparse_operators(
    "cpp", partial(select_blocks, best=cpp.best_blocks), cpp.forward, cpp.backward
)
TRITON = sparse_operators("triton", triton.select, triton.forward, triton.backward)


@torch.library.custom_op("attnzoo::block_sparse_triton_step", mutates_args=())
def block_sparse_triton_step(
    q: Tensor,
    index_q: Tensor | None,
    k: Tensor,
    v: Tensor,
    recent_k: Tensor,
    recent_v: Tensor,
    length: Tensor,
    summary: Tensor,
    leader: Tensor,
    scale: float,
    options: list[int],
    score: str,
    coverage: float | None,
    per_key_head: bool,
) -> Tensor:
    """Return the output of one token, ``[B, H, 1, E]``; see :class:`BlockSparseState`."""
    return triton.attend_step(
        (q, index_q, k, v, recent_k, recent_v, length, summary, leader),
        SparseOptions.from_ints(options),
        SelectionOptions(score, coverage, per_key_head),
        scale,
    )


@block_sparse_triton_step.register_fake
def _(q: Tensor, index_q: Tensor | None, k: Tensor, v: Tensor, *states_and_options: Any) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])


@torch.no_grad()
def triton_step(step: SparseStep) -> Tensor:
    """Return the output of one token, as :func:`step.attend_step` does, by Triton kernels."""
    call, state = step
    out: Tensor = block_sparse_triton_step(
        *(call.q, call.index_q, state.k, state.v, state.recent_k, state.recent_v),
        *(state.length, state.summary, state.leader, call.scale),
        [int(option) for option in call.options],
        *call.selection,
    )
    return out
