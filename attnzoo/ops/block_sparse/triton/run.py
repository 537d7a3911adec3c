"""Block-sparse attention in Triton, for NVIDIA GPUs: ``impl="triton"``.

Kernels select the blocks and attend to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnzoo.ops.block_sparse.gather import SparseTensors, row_products
from attnzoo.ops.block_sparse.options import (
    SelectionOptions,
    SparseCall,
    SparseOptions,
)
from attnzoo.ops.block_sparse.selection import (
    count_key_blocks,
    count_query_blocks,
    for_key_heads,
    select_blocks,
)
from attnzoo.ops.linear.triton.run import triton_reasons as linear_reasons
from attnzoo.runtime.gpu_verdicts import own_verdict

if TYPE_CHECKING:
    from attnzoo.ops.block_sparse.triton.launch import KernelOptions, SparseLauncher
    from attnzoo.ops.block_sparse.triton.selection_launch import SelectionLauncher

MOST_BLOCKS = {128: 256, 256: 64}  # that the kernel sorts, by the largest size of keys


def triton_reasons(call: SparseCall) -> list[str]:
    """Return every reason why the kernels do not support a call."""
    return linear_reasons(call.q, call.k, call.v)


def triton_verdict(call: SparseCall) -> tuple[str, str]:
    """Return ``own_verdict`` of the kernels for a call."""
    return own_verdict(call.k.device, "block-sparse attention")


def selection_reason(call: SparseCall) -> str:
    """Return why torch selects the blocks of a call, or "" if a kernel does."""
    blocks = count_key_blocks(call.k.shape[2], call.options)
    return sorting_reason(call, min(call.options.top_k, blocks))


def sorting_reason(call: SparseCall, kept: int) -> str:
    """Return why torch selects ``kept`` blocks, or "" if a kernel does."""
    size = call.q.shape[3] if call.index_q is None else call.index_q.shape[3] - 1
    most = next((most for largest, most in MOST_BLOCKS.items() if size <= largest), 0)
    if kept > most:
        return f"torch selects {kept} blocks, as the kernel sorts at most {most} of this size"
    return ""


@torch.no_grad()
def select(call: SparseCall) -> Tensor:
    """Return the selected blocks, as :func:`select_blocks` does."""
    if selection_reason(call):
        return select_blocks(call)
    return for_key_heads(selection_launcher(call).select(), call)


@torch.no_grad()
def summarize(call: SparseCall) -> Tensor:
    """Return the summary of each block of keys, ``[B, Hkv, N, Z]``."""
    return selection_launcher(call).summarize()


def selection_launcher(call: SparseCall) -> SelectionLauncher:
    """Return the launcher of the kernels that select the blocks of a call; imports Triton."""
    from attnzoo.ops.block_sparse.triton.selection_launch import SelectionLauncher

    queries = call.with_selecting_queries().q
    return SelectionLauncher(
        queries,
        call.k,
        call.summary,
        call.lengths,
        call.counts,
        call.leader,
        kernel_options(call.options, call.k.shape[2], call.scale),
        query_blocks=count_query_blocks(queries.shape[2], call.options.query_block),
        top_k=call.options.top_k,
        **call.selection._asdict(),
    )


def kernel_options(options: SparseOptions, keys: int, scale: float) -> KernelOptions:
    """Return the sizes of a call of some keys as the kernels take them; imports Triton."""
    from attnzoo.ops.block_sparse.triton.launch import KernelOptions

    return KernelOptions(
        causal=options.causal,
        window=options.window,
        num_sinks=options.num_sinks,
        block_size=options.block_size,
        query_block=options.query_block,
        num_blocks=count_key_blocks(keys, options),
        scale=float(scale),
    )


def attend_step(
    tensors: tuple[Any, ...],
    options: SparseOptions,
    selection: SelectionOptions,
    scale: float,
) -> Tensor:
    """Return the output of one token from the tensors of ``StepTensors``; imports Triton."""
    from attnzoo.ops.block_sparse.triton.step import StepTensors, launch_step

    x = StepTensors(*tensors)
    return launch_step(
        x,
        kernel_options(options, x.k.shape[2] + x.recent_k.shape[2], scale),
        near_slots=options.near_slots,
        top_k=options.top_k,
        **selection._asdict(),
    )


def forward(x: SparseTensors) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the log-sum-exp ``[B, H, T, 1]``."""
    return launcher(x).forward()


def backward(
    x: SparseTensors, d_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; see :func:`gather.backward`."""
    return launcher(x).backward(d_out, row_products(d_out, out, lse.dtype), lse)


def launcher(x: SparseTensors) -> SparseLauncher:
    """Return the launcher of the kernels of a call; imports Triton."""
    from attnzoo.ops.block_sparse.triton.launch import SparseLauncher

    options = kernel_options(x.options, x.k.shape[2], x.scale)
    return SparseLauncher(x.q, x.k, x.v, x.selected, x.lengths, x.counts, options)
