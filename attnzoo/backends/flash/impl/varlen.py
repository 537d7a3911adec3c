"""Fused attention without a mask, by torch's kernel for sequences of varied lengths, on CUDA.

A mask rules out torch's fastest kernels and takes O(T S) memory. ``torch.nn.attention.varlen``
takes the real tokens of all sequences one after another instead, with a sliding window, and aligns
queries that continue a sequence with its last keys. It computes nothing for padding.
Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size, N real
tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.backends.flash.impl.call import FlashCall
from attnzoo.backends.validation import empty_output, is_empty_call
from attnzoo.kernels.trust import why_busy
from attnzoo.masks import AttentionMask, Window

UNLIMITED = -1  # of a window's side, for the kernel


class Sequences(NamedTuple):
    """The sequences of a batch, one after another; each ends with its queries' own keys."""

    q_indices: Tensor | None  # [N of queries], into the flattened rows; None means all tokens
    k_indices: Tensor | None  # the same for keys
    cu_seqlens_q: Tensor  # int32: cumulative numbers of queries, from 0 on
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int


def auto_reasons(x: FlashCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider the kernel for this call."""
    mask, queries, keys = x.mask, x.q.shape[2], x.k.shape[2]
    if x.q.device.type != "cuda":
        return [f"the kernel runs on CUDA, and q is on {x.q.device.type}"]
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
    if mask.num_sinks:
        reasons.append("the first tokens are attended to outside the window too")
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
        if busy := why_busy(x.q.device):
            reasons.append(f"the number of real tokens is unknown while {busy}")
        elif mask.window is not None and _has_gaps(mask):
            reasons.append("padding inside a sequence counts in its window")
    return reasons


def device_reasons(device: torch.device) -> list[str]:
    """Return why the kernel does not run on a device."""
    if device.type != "cuda":
        return [f"the kernel runs on CUDA, and q is on {device.type}"]
    if torch.cuda.get_device_capability(device) < (8, 0):
        return ["the kernel needs compute capability 8.0"]
    return []


def _has_gaps(mask: AttentionMask) -> bool:
    """Return whether padding lies between real tokens of a row; synchronises with the device."""
    if mask.padding is None:
        return False
    starts = mask.padding[:, 0].int() + (mask.padding[:, 1:] & ~mask.padding[:, :-1]).sum(1)
    return int(starts.max()) > 1


def run_varlen(x: FlashCall) -> Tensor:
    """Return attention within each sequence, ``[B, H, T, E]``; zeros where a query is padding."""
    if is_empty_call(x.q, x.k):
        return empty_output(x.q, x.k, x.v)
    x = _without_later_keys(x)
    mask, (batch, heads, queries, _) = x.mask, x.q.shape
    found = sequences(mask, batch, queries, x.k.shape[2], x.q.device)
    rows = batch * queries
    out = x.q.new_zeros(rows, heads, x.v.shape[3])
    if found.max_q:
        q, k, v = (y.transpose(1, 2).flatten(0, 1) for y in (x.q, x.k, x.v))
        if found.q_indices is not None:
            q = q[found.q_indices]
        if found.k_indices is not None:
            k, v = k[found.k_indices], v[found.k_indices]
        computed = call_varlen_attn(q, k, v, found, kernel_window(mask, found), x.scale)
        if found.q_indices is not None:
            out = out.index_copy(0, found.q_indices, computed)
        else:
            out = computed
    return out.view(batch, queries, heads, -1).transpose(1, 2)


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


def sequences(
    mask: AttentionMask, batch: int, queries: int, keys: int, device: torch.device
) -> Sequences:
    """Return the sequences of a batch whose queries are the last of its keys.

    Synchronises with the device if rows are padded or packed. Keys of sequences without queries are
    left out.
    """
    if mask.padding is None and mask.segment_ids is None:
        steps = torch.arange(batch + 1, dtype=torch.int32, device=device)
        return Sequences(None, None, steps * queries, steps * keys, queries, keys)
    token = torch.arange(batch * keys, device=device)
    if mask.padding is not None:
        token = token[mask.padding.expand(batch, keys).flatten()]
    row, position = token // keys, token % keys
    begins = row.diff(prepend=row.new_full((1,), -1)) != 0
    if mask.segment_ids is not None:
        ids = mask.segment_ids.expand(batch, keys).flatten()[token]
        begins |= ids.diff(prepend=ids[:1]) != 0
    sequence = begins.cumsum(0) - 1
    is_query = position >= keys - queries
    none = sequence.new_zeros(batch * keys)  # there are not more sequences
    counts = torch.stack(
        [none.index_add(0, sequence, y.long()) for y in (is_query, torch.ones_like(is_query))]
    )
    has_queries = counts[0] > 0
    counts = counts[:, has_queries]
    kept = has_queries[sequence]
    starts = F.pad(counts.cumsum(1), (1, 0)).int()
    longest = counts.amax(1).tolist() if counts.shape[1] else [0, 0]
    q_indices = (row * queries + position - (keys - queries))[is_query]
    return Sequences(q_indices, token[kept], starts[0], starts[1], *longest)


# -- the kernel, whose arguments differ between torch versions -------------------------------------


@cache
def _parameters() -> frozenset[str]:
    from torch.nn.attention import varlen

    return frozenset(signature(varlen.varlen_attn).parameters)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _accepts(name: str) -> bool:
    return name in _parameters()


def accepts_window() -> bool:
    """Return whether the kernel of this torch version has sliding windows."""
    accepts: bool = _accepts("window_size")
    return accepts


def call_varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, found: Sequences, window: Window, scale: float
) -> Tensor:
    """Call ``varlen_attn`` on ``[N, H, D]``, with the keys that a query sees on either side."""
    from torch.nn.attention import varlen

    options: dict[str, Any] = {}
    if _accepts("window_size"):
        options["window_size"] = window
    else:
        options["is_causal"] = window[1] == 0
    if _accepts("scale"):
        options["scale"] = scale
    else:
        q = q * (scale * q.shape[2] ** 0.5)
    if q.shape[1] != k.shape[1]:
        if _accepts("enable_gqa"):
            options["enable_gqa"] = True
        else:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    lengths = found.cu_seqlens_q, found.cu_seqlens_k, found.max_q, found.max_k
    out = varlen.varlen_attn(q, k, v, *lengths, **options)
    assert isinstance(out, Tensor)
    return out
