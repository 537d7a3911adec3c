"""Custom operators of block-sparse attention, so that ``torch.compile`` sees one call per pass.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size,
M query blocks, K selected blocks, A heads with a selection of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnzoo.ops.block_sparse import gather
from attnzoo.ops.block_sparse.cpu import block_sparse as cpp
from attnzoo.ops.block_sparse.gather import SparseTensors
from attnzoo.ops.block_sparse.options import (
    BlockSparseState,
    SelectionOptions,
    SparseCall,
    SparseOptions,
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

FORWARD: dict[str, Callable[[SparseTensors], tuple[Tensor, Tensor]]] = {
    "torch": gather.forward,
    "cpp": cpp.forward,
    "triton": triton.forward,
}
SELECT: dict[str, Callable[[SparseCall], Tensor]] = {
    "torch": select_blocks,
    "cpp": partial(select_blocks, best=cpp.best_blocks),
    "triton": triton.select,
}
BACKWARD: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "torch": gather.backward,
    "cpp": cpp.backward,
    "triton": triton.backward,
}


def sparse_attention(call: SparseCall, impl: str) -> Tensor:
    """Select blocks and attend to them, ``[B, H, T, E]`` in the dtype of the values.

    Args:
        call: Inputs of the call.
        impl: ``"torch"``, ``"cpp"`` or ``"triton"``.
    """
    x = call
    check_reverse_mode("block_sparse_attention", x.q, x.k, x.v)
    with autocast_disabled(x.q.device):
        options = [int(option) for option in x.options]
        selected = block_sparse_select(
            (x.q if x.index_q is None else x.index_q).detach(),
            x.k.detach(),
            x.summary,
            x.lengths,
            x.counts,
            x.leader,
            x.scale,
            options,
            *x.selection,
            impl,
        )
        out: Tensor = block_sparse_forward(
            x.q, x.k, x.v, selected, x.lengths, x.counts, x.scale, options, impl
        )[0]
    return out


@torch.library.custom_op("attnzoo::block_sparse_select", mutates_args=())
def block_sparse_select(
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
    impl: str,
) -> Tensor:
    """Return the selected blocks, ``[B, A, M, K]``; see :func:`select_blocks`.

    With an indexer, ``q`` are its packed queries, and ``summary`` is that of its keys. Where there
    is a summary, ``k`` gives its shape only.
    """
    sizes = SparseOptions.from_ints(options)
    selection = SelectionOptions(score, coverage, per_key_head)
    call = SparseCall(q, k, k, lengths, counts, leader, summary, scale, sizes, selection)
    with autocast_disabled(q.device):
        return SELECT[impl](call)


@block_sparse_select.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    *_, options, score, _, per_key_head, _ = rest
    sizes = SparseOptions.from_ints(options)
    heads = k.shape[1] if per_key_head or score == "indexer" else q.shape[1]
    query_blocks = count_query_blocks(q.shape[2], sizes.query_block)
    kept = min(sizes.top_k, count_key_blocks(k.shape[2], sizes))
    return q.new_empty(q.shape[0], heads, query_blocks, kept, dtype=torch.int32)


@torch.library.custom_op("attnzoo::block_sparse_forward", mutates_args=())
def block_sparse_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    lengths: Tensor | None,
    counts: Tensor | None,
    scale: float,
    options: list[int],
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the log-sum-exp ``[B, H, T, 1]``."""
    x = SparseTensors(q, k, v, selected, lengths, counts, scale, SparseOptions.from_ints(options))
    with autocast_disabled(q.device):
        out, lse = FORWARD[impl](x)
    return out.to(v.dtype), lse


@torch.library.custom_op("attnzoo::block_sparse_backward", mutates_args=())
def block_sparse_backward(
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
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    x = SparseTensors(q, k, v, selected, lengths, counts, scale, SparseOptions.from_ints(options))
    with autocast_disabled(q.device):
        gradients = BACKWARD[impl](x, d_out, out, lse)
    dq, dk, dv = (g.to(y.dtype) for g, y in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv


@block_sparse_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=v.dtype)
    return out, q.new_empty(*q.shape[:3], 1, dtype=dtype)


@block_sparse_backward.register_fake
def _(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


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
def triton_step(call: SparseCall, state: BlockSparseState) -> Tensor:
    """Return the output of one token, as :func:`step.attend_step` does, by Triton kernels.

    Args:
        call: Inputs of the call.
        state: State after the token.
    """
    out: Tensor = block_sparse_triton_step(
        call.q,
        call.index_q,
        state.k,
        state.v,
        state.recent_k,
        state.recent_v,
        state.length,
        state.summary,
        state.leader,
        call.scale,
        [int(option) for option in call.options],
        *call.selection,
    )
    return out


@register_buffer_bytes(block_sparse_select)
def _(q: Tensor, k: Tensor, *rest: Any) -> int:
    *_, options, _, coverage, _, _ = rest
    if coverage is None:
        return 0  # the kernel scores a few blocks at a time
    sizes = SparseOptions.from_ints(options)
    blocks = count_key_blocks(k.shape[2], sizes)
    scores = q.shape[0] * q.shape[1] * count_query_blocks(q.shape[2], sizes.query_block) * blocks
    return 2 * min(scores, MAX_SCORES) * torch.float32.itemsize  # and their sums, or masked


@register_buffer_bytes(block_sparse_forward)
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    if cpp.kernel_dtype(q, k, v) == torch.bfloat16:
        return cpp.padding_bytes([q, k, v], [out])
    dtype = torch.promote_types(q.dtype, torch.float32)
    written = out.numel()  # in v's type only when the rows are freed
    converted = written * (dtype.itemsize - v.dtype.itemsize)
    return simd_bytes(dtype, q, k, k, v) + converted  # keys by row and by column


@register_buffer_bytes(block_sparse_backward)
def _(d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    if cpp.kernel_dtype(q, k, v) == torch.bfloat16:
        return cpp.padding_bytes([d_out, out, q, k, v], [q, k, v])
    read = simd_bytes(lse.dtype, d_out, q, k, k, v, v)
    return read + (simd_bytes(lse.dtype, q, k, v) if q.dtype != lse.dtype else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.options, ctx.impl = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    options = ctx.scale, ctx.options, ctx.impl
    gradients = block_sparse_backward(d_out, out, lse, *tensors, *options)
    return (*gradients, *[None] * 6)


block_sparse_forward.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(block_sparse_backward, "block_sparse_attention")
