"""Block-sparse attention in Triton, for NVIDIA GPUs: ``impl="triton"``.

PyTorch selects the blocks; the kernels attend to them. See ``kernels/``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from attnzoo.backends.block_sparse.impl.gather import SparseTensors
from attnzoo.backends.block_sparse.impl.options import SparseCall
from attnzoo.backends.block_sparse.impl.selection import count_key_blocks
from attnzoo.backends.linear.impl.triton import triton_reasons as linear_reasons
from attnzoo.backends.linear.impl.triton_trust import trust

if TYPE_CHECKING:
    from attnzoo.backends.block_sparse.kernels.launch import SparseLauncher


def triton_reasons(call: SparseCall) -> list[str]:
    """Return every reason why the kernels do not support a call."""
    return linear_reasons(call.q, call.k, call.v)


def triton_trust_reasons(call: SparseCall) -> tuple[tuple[str, ...], str]:
    """Return why ``impl="auto"`` does not trust the kernels, or what ``describe`` says of them."""
    return trust("block_sparse", None, call.k, call.v)


def forward(x: SparseTensors) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the log-sum-exp ``[B, H, T, 1]``."""
    return launcher(x).forward()


def backward(
    x: SparseTensors, d_out: Tensor, delta: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; see :func:`gather.backward`."""
    return launcher(x).backward(d_out, delta, lse)


def launcher(x: SparseTensors) -> SparseLauncher:
    """Return the launcher of the kernels of a call; imports Triton."""
    from attnzoo.backends.block_sparse.kernels.launch import KernelOptions, SparseLauncher

    options = KernelOptions(
        causal=x.options.causal,
        window=x.options.window,
        num_sinks=x.options.num_sinks,
        block_size=x.options.block_size,
        query_block=x.options.query_block,
        num_blocks=count_key_blocks(x.k.shape[2], x.options),
        scale=float(x.scale),
    )
    return SparseLauncher(x.q, x.k, x.v, x.selected, x.lengths, x.counts, options)
