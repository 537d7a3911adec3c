"""Memory of CPU tensors: huge pages, rows padded to SIMD vectors, rows for C++ kernels."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from mmap import PAGESIZE
from operator import mul

import torch
from torch import Tensor
from torch.autograd import forward_ad

HUGE_BYTES = 2**22  # smaller tensors use ordinary pages
MADV_HUGEPAGE = 14  # value in the C library
BLOCK_BYTES = 2**20  # size of the input of one block of tokens
MIN_BLOCKS = 9  # fewer are not worth it: the memory of temporaries up to 8 MB is reused anyway
LANES = 16  # float32 elements of the widest vector register


def empty_huge_pages(
    like: Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty tensor, in huge pages if it is large and Linux provides them on request.

    The system allocates the pages of large blocks on first use, which costs microseconds per page
    of 4 KiB, a sixth of the time of a forward pass over 16k tokens.
    """
    x = like.new_empty(shape, dtype=dtype or like.dtype)
    in_memory = x.device.type == "cpu" and type(x) is Tensor  # subclasses may have no data
    if in_memory and x.nbytes >= HUGE_BYTES and sys.platform == "linux":
        start = -(-x.data_ptr() // PAGESIZE) * PAGESIZE
        length = (x.data_ptr() + x.nbytes - start) // PAGESIZE * PAGESIZE
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_HUGEPAGE)
    return x


def pad_to_simd(x: Tensor) -> Tensor:
    """Return ``x`` with rows padded with zeros to a multiple of ``LANES``; rows are contiguous."""
    size = x.shape[-1]
    if size % LANES == 0:
        return x if x.stride(-1) == 1 else x.contiguous()
    padded = empty_huge_pages(x, (*x.shape[:-1], size + -size % LANES))
    padded[..., :size] = x
    padded[..., size:] = 0
    return padded


# What the names of a kernel's functions end with, by the dtype of the computation
TYPE_NAMES = {torch.float32: "float", torch.float64: "double"}

# The dtypes that a kernel reads and writes through ``rows.h``, with their value of Type there
DTYPE_NUMBERS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Rows(ctypes.Structure):
    """A tensor ``[B, H, T, X]`` with contiguous rows; ``Tensor`` of ``rows.h``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int64),
        ("steps", ctypes.c_int64 * 3),
    ]


def rows_of(*tensors: Tensor) -> list[Rows]:
    """Return the structs through which a kernel accesses tensors ``[B, H, T, X]``.

    They do not keep the tensors alive.
    """
    found = []
    for x in tensors:
        steps = (ctypes.c_int64 * 3)(*x.stride()[:3])
        found.append(Rows(x.data_ptr(), DTYPE_NUMBERS[x.dtype], steps))
    return found


def rows_in(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Return tensors in a dtype, with contiguous rows; the same ones where nothing changes."""
    found = []
    for x in tensors:
        x = x if x.dtype == dtype else x.to(dtype)
        found.append(x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous())
    return found


def is_plain_call(*tensors: Tensor | None) -> bool:
    """Return whether a kernel may read the tensors of a call by address.

    The call must not be compiled, transformed or recorded for a backward pass, and the numbers in
    memory must be the values: a view such as ``z.conj().imag`` is negated when it is read.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    records = torch.is_grad_enabled()
    for x in tensors:
        if x is None:
            continue
        if x.is_neg() or (records and x.requires_grad):
            return False
    return True


def with_contiguous_rows(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with contiguous rows: the given ones, or contiguous copies."""
    found = []
    for x in tensors:
        found.append(x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous())
    return found


def with_contiguous_states(*tensors: Tensor) -> list[Tensor]:
    """Return tensors whose states ``x[i]`` are contiguous: the given ones, or contiguous copies.

    States of a pool may have gaps between them, as in the pages of a cache.
    """
    found = []
    for x in tensors:
        is_dense = x.is_contiguous() or _is_dense(x.shape[1:], x.stride()[1:])
        found.append(x if is_dense else x.contiguous())
    return found


@lru_cache(maxsize=1024)
def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape is contiguous; ``x[0]`` would take microseconds."""
    sizes = accumulate(reversed(shape), mul, initial=1)
    steps = zip(reversed(shape), reversed(strides), sizes, strict=False)
    return all(step == size or count == 1 for count, step, size in steps)


def unpad(x: Tensor, size: int) -> Tensor:
    """Return the first ``size`` elements of every row; ``x`` itself if there are no others."""
    if x.shape[-1] == size:
        return x
    return empty_huge_pages(x, (*x.shape[:-1], size)).copy_(x[..., :size])


def cat_huge_pages(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return ``torch.cat`` of tensors of one dtype, in huge pages if none needs a gradient."""
    if not _may_write_in_place(tensors):
        return torch.cat(list(tensors), dim)
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return torch.cat(list(tensors), dim, out=empty_huge_pages(tensors[0], tuple(shape)))


def map_token_blocks(function: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
    """Return ``function(x)``, computed in blocks of tokens on a CPU if none needs a gradient.

    The temporaries of a block fit into the cache, and their memory is reused. The temporaries of
    all tokens need new pages of the system, which take most of the time of a feature map at 16k
    tokens.

    Args:
        function: Maps ``[B, H, N, D]`` to ``[B, H, N, F]``, each token by itself.
        x: ``[B, H, T, D]``.
        weights: Other tensors that the function reads.
    """
    length = x.shape[2]
    # Only 1: any other number would limit the lengths that an exported program takes
    if length == 1 or not _may_write_in_place([x, *weights]):
        return function(x)
    step = max(BLOCK_BYTES * length // max(x.nbytes, 1), 1)
    if MIN_BLOCKS * step > length:
        return function(x)
    out = None
    for start in range(0, length, step):
        block = function(x[:, :, start : start + step])
        if out is None:
            out = empty_huge_pages(block, (*block.shape[:2], length, block.shape[3]))
        out[:, :, start : start + step] = block
    assert out is not None
    return out


def _may_write_in_place(tensors: Sequence[Tensor]) -> bool:
    """Return whether operations on CPU tensors may write into memory that was allocated before."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    transformed = forward_ad._current_level >= 0
    return not (
        needs_grad
        or transformed
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or tensors[0].device.type != "cpu"
    )


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
