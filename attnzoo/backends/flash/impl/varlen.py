"""Fused attention of padded or packed rows without a mask, by torch's kernel for varied lengths.

A mask rules out torch's fastest kernels and takes O(T S) memory. ``torch.nn.attention.varlen``
takes the real tokens of all sequences one after another instead, and computes nothing for padding.
Letters: B batch, H query heads, Hkv key heads, T tokens, D key size, E value size, N real tokens.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.masks import AttentionMask


class Unpadded(NamedTuple):
    """The real tokens of a batch, sequence after sequence."""

    indices: Tensor  # [N], into the flattened rows, [B * T]
    cu_seqlens: Tensor  # int32: cumulative sequence lengths, from 0 to N
    max_seqlen: int


def varlen_reasons(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> list[str]:
    """Return why the kernel for varied lengths does not support these rows."""
    reasons = []
    if mask.padding is None and mask.segment_ids is None:
        reasons.append("nothing is padded or packed")
    if mask.window is not None or mask.function is not None:
        reasons.append("the mask is more than causality, padding and packing")
    if q.shape[2] != k.shape[2] or not isinstance(mask.q_offset, int) or mask.q_offset != 0:
        reasons.append("queries and keys are not the same tokens")
    if q.dtype not in (torch.float16, torch.bfloat16) or q.dtype != v.dtype:
        reasons.append(f"q is {q.dtype}, and the kernel takes 16 bits")
    if q.shape[3] != v.shape[3] or q.shape[3] > 256 or q.shape[3] % 8:
        reasons.append("head sizes differ, are above 256 or no multiple of 8")
    if q.device.type != "cuda":
        reasons.append(f"the kernel runs on CUDA, and q is on {q.device.type}")
    if torch.compiler.is_compiling():
        reasons.append("the number of real tokens is unknown under torch.compile")
    return reasons


def unpad(mask: AttentionMask, batch: int, tokens: int, device: torch.device) -> Unpadded:
    """Return the real tokens and the sequence lengths; synchronises with the device."""
    rows = torch.arange(batch, device=device)[:, None].expand(batch, tokens).flatten()
    keep = torch.ones_like(rows, dtype=torch.bool)
    if mask.padding is not None:
        keep = mask.padding.expand(batch, tokens).flatten()
    indices = keep.nonzero().squeeze(1)
    begins = rows[indices].diff(prepend=rows.new_full((1,), -1)) != 0
    if mask.segment_ids is not None:
        ids = mask.segment_ids.expand(batch, tokens).flatten()[indices]
        begins |= ids.diff(prepend=ids[:1]) != 0
    starts = begins.nonzero().squeeze(1)
    cu_seqlens = torch.cat([starts, starts.new_full((1,), len(indices))])
    max_seqlen = int(cu_seqlens.diff().max()) if len(starts) else 0
    return Unpadded(indices, cu_seqlens.int(), max_seqlen)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """Return attention within each sequence, ``[B, H, T, E]``; zeros where a token is padding.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        mask: Causality, padding and segments.
        scale: Multiplies the products.
    """
    batch, _, tokens, _ = q.shape
    unpadded = unpad(mask, batch, tokens, q.device)
    indices = unpadded.indices
    out = q.new_zeros(batch * tokens, q.shape[1], v.shape[3])
    if unpadded.max_seqlen:
        q, k, v = (x.transpose(1, 2).flatten(0, 1)[indices] for x in (q, k, v))
        out = out.index_copy(0, indices, call_varlen_attn(q, k, v, unpadded, mask.causal, scale))
    return out.view(batch, tokens, *out.shape[1:]).transpose(1, 2)


def call_varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, unpadded: Unpadded, causal: bool, scale: float
) -> Tensor:
    """Call ``varlen_attn`` on ``[N, H, D]``, whose arguments differ between torch versions."""
    from torch.nn.attention import varlen

    parameters = signature(varlen.varlen_attn).parameters
    options: dict[str, Any] = {}
    if "window_size" in parameters:
        options["window_size"] = (-1, 0) if causal else (-1, -1)
    else:
        options["is_causal"] = causal
    if "scale" in parameters:
        options["scale"] = scale
    else:
        q = q * (scale * q.shape[2] ** 0.5)
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in parameters:
            options["enable_gqa"] = True
        else:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    lengths, longest = unpadded.cu_seqlens, unpadded.max_seqlen
    out = varlen.varlen_attn(q, k, v, lengths, lengths, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out
