"""Fused attention without a mask, by torch's varlen kernel, on CUDA.

A mask rules out torch's fastest kernels and takes O(T S) memory. ``torch.nn.attention.varlen``
takes the real tokens of all sequences one after another instead, with a sliding window, and aligns
queries that continue a sequence with its last keys. It computes nothing for padding. Other letters:
N real tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.contract.masks import AttentionMask, Window
from attnzoo.contract.padding import gather_tokens, has_gaps
from attnzoo.contract.validation import empty_output, is_empty_call
from attnzoo.ops.flash.call import FlashCall
from attnzoo.ops.flash.varlen_extra import attend_with_extra_keys, outside_window
from attnzoo.ops.flash.varlen_kernel import (
    UNLIMITED,
    Sequences,
    accepts_window,
    attend_sequences,
    backward_reason,
    returns_lse,
    sequences,
)
from attnzoo.ops.window.pattern import split_sinks


def auto_reasons(x: FlashCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider the kernel for this call."""
    mask, queries, keys = x.mask, x.q.shape[2], x.k.shape[2]
    if queries == 1 and mask.window is None:
        return ["one query needs no mask but that of its padding"]
    limited = mask.window is not None or mask.padding is not None or mask.segment_ids is not None
    if not limited and not (mask.causal and 1 < queries < keys):
        return ["without a mask PyTorch's kernels are as fast"]
    return []


def varlen_reasons(x: FlashCall) -> list[str]:
    """Return every reason why the kernel does not support this call."""
    mask, queries, keys = x.mask, x.q.shape[2], x.k.shape[2]
    reasons = device_reasons(x.q.device) + x.band_kernel_reasons()
    if mask.num_sinks and mask.window is not None:
        reasons += extra_keys_reasons(x.q.device)
        if mask.segment_ids is not None:
            reasons.append("each segment has first tokens of its own")
    if not mask.causal and queries != keys:
        reasons.append(f"there are {queries} queries and {keys} keys, and the mask is not causal")
    if mask.window is not None and not accepts_window():
        reasons.append(f"torch {torch.__version__} has no window for it")
    dtypes = {y.dtype for y in (x.q, x.k, x.v)}
    if len(dtypes) > 1 or x.q.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"q is {x.q.dtype}, and the kernel takes 16 bits")
    if x.q.shape[3] != x.v.shape[3] or x.q.shape[3] > 256 or x.q.shape[3] % 8:
        reasons.append("head sizes differ, are above 256 or no multiple of 8")
    if not reasons and (mask.padding is not None or mask.segment_ids is not None):
        if tracing := _tracing_reason(x.q.device):
            reasons.append(f"the number of real tokens is unknown while {tracing}")
        elif mask.window is not None and mask.padding is not None and has_gaps(mask.padding):
            reasons.append("padding inside a sequence counts in its window")
    return reasons


def extra_keys_reasons(device: torch.device) -> list[str]:
    """Return why the kernel does not support keys outside the window of a query."""
    reasons = []
    if not returns_lse():
        reasons.append(f"torch {torch.__version__} does not return its log-sum-exp")
    if reason := backward_reason():
        reasons.append(reason)
    if tracing := _tracing_reason(device):
        reasons.append(f"keys outside the window are not supported while {tracing}")
    return reasons


def _tracing_reason(device: torch.device) -> str:
    """Return why the values of tensors cannot be read now, or ``""``."""
    if torch.compiler.is_compiling():
        return "torch.compile traces"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is captured"
    return ""


def device_reasons(device: torch.device) -> list[str]:
    """Return why the kernel does not run on a device."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return ["the kernel needs compute capability 8.0"]
    return []


def run_varlen(x: FlashCall) -> Tensor:
    """Return attention within each sequence, ``[B, H, T, E]``; zeros where a query is padding."""
    if is_empty_call(x.q, x.k):
        return empty_output(x.q, x.k, x.v)
    x = _without_later_keys(x)
    mask, (batch, _, queries, _) = x.mask, x.q.shape
    found = sequences(mask, batch, queries, x.k.shape[2], x.q.device)
    window = kernel_window(mask, found)
    if not (mask.num_sinks and mask.window is not None and found.max_q):
        return attend_sequences(x.q, x.k, x.v, found, window, x.scale)
    k, v, seen = _first_keys(x)
    out = attend_with_extra_keys(
        x.q, x.k, x.v, found, window, x.scale, extra_k=k, extra_v=v, seen=seen
    )
    padding = mask.query_padding(queries, x.k.shape[2])
    return out if padding is None else out.masked_fill(~padding[:, None, :, None], 0)


def _first_keys(x: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first keys of each row and their values, and which of them each query sees."""
    assert x.mask.window is not None
    assert isinstance(x.mask.q_offset, int)
    keys = x.k.shape[2]
    positions, valid = split_sinks(x.mask, keys, x.q.device).indices
    columns = positions.expand(x.q.shape[0], -1)
    window = (min(x.mask.window[0], keys), min(x.mask.window[1], keys))
    seen = outside_window(
        positions,
        valid,
        x.q.shape[2],
        window=window,
        causal=x.mask.causal,
        offset=x.mask.q_offset,
    )
    return gather_tokens(x.k, columns), gather_tokens(x.v, columns), seen


def _without_later_keys(x: FlashCall) -> FlashCall:
    """Return the call without the keys after its last query, which only causal calls have."""
    assert isinstance(x.mask.q_offset, int)
    stop = x.mask.q_offset + x.q.shape[2]
    if stop == x.k.shape[2]:
        return x
    padding = None if x.mask.padding is None else x.mask.padding[:, :stop]
    mask = replace(x.mask, padding=padding)
    return x._replace(k=x.k[:, :, :stop], v=x.v[:, :, :stop], mask=mask)


def kernel_window(mask: AttentionMask, found: Sequences) -> Window:
    """Return the keys before and after a query that the kernel lets it see."""
    before, after = (UNLIMITED, UNLIMITED) if mask.window is None else mask.window
    longest = found.max_k - 1  # a wider window is none, and might exceed the kernel's integers
    before = UNLIMITED if before >= longest else before
    after = UNLIMITED if after >= longest else after
    return before, 0 if mask.causal else after
