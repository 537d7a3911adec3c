"""Softmax within a band in C++, on CPUs: sliding windows, or all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.ops.flash.call import FlashCall
from attnzoo.ops.window.cpu.band import band_attention_cpp, band_cpp_reasons
from attnzoo.runtime.kernel_calls import is_transformed

FEW_QUERIES = 8  # with a window; the kernel computes 32 queries at a time
FEW_QUERIES_OF_ALL_KEYS = 63  # without a window
# Multiply-adds, B H T S (D + E), from which on PyTorch's kernels were never faster on AVX-512
MIN_CAUSAL_PRODUCTS = 2**24  # 128 tokens with 8 heads of 64
MIN_MASKED_PRODUCTS = 2**25  # bidirectional, with padding or segments
EXPORTING = "the choice would fix the lengths that the exported program accepts"


def skip_cpp(x: FlashCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider the kernel for this call."""
    queries = x.q.shape[2]
    if is_transformed():
        return ["forward-mode differentiation or a transform of torch.func is active"]
    if torch.compiler.is_exporting():  # comparing lengths would fix those that a program accepts
        return [EXPORTING] if x.mask.window is None else []
    if queries <= (FEW_QUERIES_OF_ALL_KEYS if x.mask.window is None else FEW_QUERIES):
        return [f"there are {queries} queries, and it computes many at a time"]
    if x.mask.window is None:
        return _skip_all_keys(x)
    return []


def _skip_all_keys(x: FlashCall) -> list[str]:
    """Return why PyTorch's kernels are as fast, or support more, without a window."""
    mask = x.mask
    if not mask.causal and mask.is_plain:
        return ["without causality or a mask PyTorch's kernels are as fast"]
    batch, heads, queries, size = x.q.shape
    products = batch * heads * queries * x.k.shape[2] * (size + x.v.shape[3])
    least = MIN_CAUSAL_PRODUCTS if mask.causal else MIN_MASKED_PRODUCTS
    if x.q.dtype in (torch.bfloat16, torch.float16) and _has_amx():
        return [f"this CPU multiplies matrices in {x.q.dtype}, which PyTorch's kernels use"]
    if products < least:
        return ["the call is small, and PyTorch's kernels start faster"]
    if not _has_avx512():
        return ["without a window it is faster on CPUs with AVX-512 only"]
    if not torch.backends.cuda.flash_sdp_enabled():
        return ["torch.nn.attention.sdpa_kernel excludes flash kernels"]
    return []


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def cpp_reasons(x: FlashCall) -> list[str]:
    """Return every reason why the kernel does not support this call."""
    mask = x.mask
    reasons = band_cpp_reasons()
    reasons += x.band_kernel_reasons()
    if mask.num_sinks and mask.segment_ids is not None:
        reasons.append("the first tokens of each of several segments are attended to")
    return reasons


def run_cpp(x: FlashCall) -> Tensor:
    """Compute a call with a sliding window, or with all keys."""
    assert isinstance(x.mask.q_offset, int)
    return band_attention_cpp(x.q, x.k, x.v, x.band_options(), x.mask.q_offset)[0].to(x.v.dtype)
