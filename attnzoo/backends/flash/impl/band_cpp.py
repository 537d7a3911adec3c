"""Causal attention, padding, packed rows and sliding windows in C++, on CPUs.

The kernel skips blocks of keys that no query of a block sees, and needs no mask in memory.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attnzoo.backends.flash.impl.call import FlashCall
from attnzoo.backends.local.band_cpp import band_attention_cpp, band_cpp_reasons
from attnzoo.backends.local.blockwise_cpu import LocalOptions
from attnzoo.backends.local.pattern import Band
from attnzoo.backends.local.sinks import split_sinks
from attnzoo.backends.validation import empty_output, is_empty_call
from attnzoo.kernels.derivatives import is_transformed

FEW_QUERIES = 8  # with a window; the kernel computes 32 queries at a time
FEW_QUERIES_OF_ALL_KEYS = 63  # without a window
FEW_PRODUCTS = 2**23  # multiply-adds, below which starting the kernel takes longer than they do


def skip_cpp(x: FlashCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider the kernel for this call."""
    batch, heads, queries, _ = x.q.shape
    if is_transformed():
        return ["forward-mode differentiation or a transform of torch.func is active"]
    if queries <= (FEW_QUERIES_OF_ALL_KEYS if x.mask.window is None else FEW_QUERIES):
        return [f"there are {queries} queries, and it computes many at a time"]
    if x.mask.window is not None:
        return []
    if not x.mask.causal and x.mask.is_plain:
        return ["without causality or a mask PyTorch's kernels are as fast"]
    products = batch * heads * queries * x.k.shape[2] * (x.q.shape[3] + x.v.shape[3])
    if products < FEW_PRODUCTS:
        return ["the call is small, and PyTorch's kernels start faster"]
    return []


def cpp_reasons(x: FlashCall) -> list[str]:
    """Return every reason why the kernel does not support this call."""
    mask = x.mask
    reasons = band_cpp_reasons(x.q.device) + x.band_kernel_reasons()
    if mask.num_sinks and mask.segment_ids is not None:
        reasons.append("the first tokens of each of several segments are attended to")
    return reasons


def run_cpp(x: FlashCall) -> Tensor:
    """Compute a call; without a sliding window, the band has all keys."""
    mask, keys = x.mask, x.k.shape[2]
    assert isinstance(mask.q_offset, int)
    if is_empty_call(x.q, x.k):
        return empty_output(x.q, x.k, x.v)
    before, after = (min(side, keys) for side in mask.window or (keys, keys))
    band = Band(before, 0 if mask.causal else after, 1)
    options = LocalOptions(band, mask.causal, x.scale, mask.padding, segment_ids=mask.segment_ids)
    if mask.num_sinks:
        sinks = split_sinks(mask, keys, x.k.device)
        options = replace(options, key_mask=sinks.others, global_indices=sinks.indices)
    return band_attention_cpp(x.q, x.k, x.v, options, mask.q_offset)[0].to(x.v.dtype)
