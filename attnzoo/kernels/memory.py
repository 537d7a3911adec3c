"""Allocate large CPU tensors in huge pages, and pad rows to SIMD vectors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from mmap import PAGESIZE

import torch
from torch import Tensor
from torch.autograd import forward_ad

HUGE_BYTES = 2**22  # smaller tensors use ordinary pages
MADV_HUGEPAGE = 14  # of the C library
LANES = 16  # float32 numbers in the widest vector register


def empty_huge_pages(
    like: Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty tensor, in huge pages if it is large and Linux provides them on request.

    The system allocates large blocks on first use, which costs microseconds per page of 4 KiB: a
    sixth of a forward pass over 16k tokens.
    """
    x = like.new_empty(shape, dtype=dtype or like.dtype)
    if x.device.type == "cpu" and x.nbytes >= HUGE_BYTES and sys.platform == "linux":
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


def unpad(x: Tensor, size: int) -> Tensor:
    """Return the first ``size`` numbers of every row; ``x`` itself if there are no others."""
    if x.shape[-1] == size:
        return x
    return empty_huge_pages(x, (*x.shape[:-1], size)).copy_(x[..., :size])


def cat_huge_pages(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return ``torch.cat`` of tensors of one dtype, in huge pages if none needs a gradient."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    needs_grad = needs_grad or forward_ad._current_level >= 0
    if needs_grad or torch.compiler.is_compiling() or tensors[0].device.type != "cpu":
        return torch.cat(list(tensors), dim)
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return torch.cat(list(tensors), dim, out=empty_huge_pages(tensors[0], tuple(shape)))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
