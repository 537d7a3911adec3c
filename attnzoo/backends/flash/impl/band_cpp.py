"""Sliding windows in C++, on CPUs: each query attends to the keys of its window only."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attnzoo.backends.flash.impl.call import FlashCall
from attnzoo.backends.local.band_cpp import band_attention_cpp, band_cpp_reasons
from attnzoo.backends.local.blockwise_cpu import LocalOptions
from attnzoo.backends.local.pattern import Band
from attnzoo.backends.local.sinks import split_sinks
from attnzoo.backends.validation import empty_output, is_empty_call

FEW_QUERIES = 8  # the kernel computes 32 queries at a time


def skip_cpp(x: FlashCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider the kernel for this call."""
    if x.mask.window is None:
        return ["without a sliding window PyTorch's kernels are as fast"]
    if x.q.shape[2] <= FEW_QUERIES:
        return [f"there are {x.q.shape[2]} queries, and it computes many at a time"]
    return []


def cpp_reasons(x: FlashCall) -> list[str]:
    """Return every reason why the kernel does not support this call."""
    mask = x.mask
    reasons = band_cpp_reasons(x.q.device)
    if mask.window is None:
        reasons.append("there is no sliding window")
    reasons += x.band_kernel_reasons()
    if mask.num_sinks and mask.segment_ids is not None:
        reasons.append("the first tokens of each of several segments are attended to")
    return reasons


def run_cpp(x: FlashCall) -> Tensor:
    """Compute a call with a sliding window."""
    mask = x.mask
    assert mask.window is not None
    assert isinstance(mask.q_offset, int)
    if is_empty_call(x.q, x.k):
        return empty_output(x.q, x.k, x.v)
    before, after = (min(side, x.k.shape[2]) for side in mask.window)
    band = Band(before, 0 if mask.causal else after, 1)
    options = LocalOptions(band, mask.causal, x.scale, mask.padding, segment_ids=mask.segment_ids)
    if mask.num_sinks:
        sinks = split_sinks(mask, x.k.shape[2], x.k.device)
        options = replace(options, key_mask=sinks.others, global_indices=sinks.indices)
    return band_attention_cpp(x.q, x.k, x.v, options, mask.q_offset)[0].to(x.v.dtype)
