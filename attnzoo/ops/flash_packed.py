"""Padded or packed rows without a mask: their real tokens, one sequence after the other.

A mask makes torch's attention leave its fastest kernels, and takes O(T S) of memory. Without the
padding the sequences lie end to end, as ``torch.nn.attention.varlen`` takes them, and nothing is
computed for tokens that are not there.
Letters: B batch, H query heads, Hkv key heads, T tokens, D key size, E value size, N real tokens.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.masks import AttentionMask


class Packed(NamedTuple):
    """Where the real tokens of a batch are."""

    places: Tensor  # [N], in the rows laid end to end
    borders: Tensor  # where each sequence begins, and N; int32
    longest: int


def packing_reasons(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> list[str]:
    """Say why rows cannot go to the kernel for sequences end to end; empty if they can."""
    reasons = []
    if mask.padding is None and mask.segment_ids is None:
        reasons.append("nothing is padded or packed")
    if mask.window is not None or mask.function is not None:
        reasons.append("the mask has more than padding and packing")
    if q.shape[2] != k.shape[2] or not isinstance(mask.q_offset, int) or mask.q_offset != 0:
        reasons.append("queries and keys are not the same tokens")
    if q.dtype not in (torch.float16, torch.bfloat16) or q.dtype != v.dtype:
        reasons.append(f"q is {q.dtype}, and the kernel takes 16 bits")
    if q.shape[3] != v.shape[3] or q.shape[3] > 256 or q.shape[3] % 8:
        reasons.append("head sizes differ, are above 256 or no multiple of 8")
    if q.device.type != "cuda":
        reasons.append(f"the kernel runs on CUDA, and q is on {q.device.type}")
    if torch.compiler.is_compiling():
        reasons.append("how many tokens are real is not known while compiling")
    return reasons


def pack(mask: AttentionMask, batch: int, tokens: int, device: torch.device) -> Packed:
    """Find the real tokens and the borders between sequences; waits for the device."""
    rows = torch.arange(batch, device=device)[:, None].expand(batch, tokens).flatten()
    keep = torch.ones_like(rows, dtype=torch.bool)
    if mask.padding is not None:
        keep = mask.padding.expand(batch, tokens).flatten()
    index = keep.nonzero().squeeze(1)
    begins = rows[index].diff(prepend=rows.new_full((1,), -1)) != 0
    if mask.segment_ids is not None:
        ids = mask.segment_ids.expand(batch, tokens).flatten()[index]
        begins |= ids.diff(prepend=ids[:1]) != 0
    starts = begins.nonzero().squeeze(1)
    borders = torch.cat([starts, starts.new_full((1,), len(index))])
    longest = int(borders.diff().max()) if len(starts) else 0
    return Packed(index, borders.int(), longest)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """Attend within each sequence; ``[B, H, T, E]``, zeros where a token is padding.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        mask: Causal or not, padding, packing.
        scale: Multiplies the products.
    """
    batch, _, tokens, _ = q.shape
    packed = pack(mask, batch, tokens, q.device)
    out = q.new_zeros(batch * tokens, q.shape[1], v.shape[3])
    if packed.longest:
        q, k, v = (x.transpose(1, 2).flatten(0, 1)[packed.places] for x in (q, k, v))
        out = out.index_copy(0, packed.places, end_to_end(q, k, v, packed, mask.causal, scale))
    return out.view(batch, tokens, *out.shape[1:]).transpose(1, 2)


def end_to_end(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, causal: bool, scale: float
) -> Tensor:
    """Attend within sequences laid end to end, ``[N, H, D]``; torch's arguments have changed."""
    from torch.nn.attention import varlen

    takes = signature(varlen.varlen_attn).parameters
    options: dict[str, Any] = {}
    if "window_size" in takes:
        options["window_size"] = (-1, 0) if causal else (-1, -1)
    else:
        options["is_causal"] = causal
    if "scale" in takes:
        options["scale"] = scale
    else:
        q = q * (scale * q.shape[2] ** 0.5)
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in takes:
            options["enable_gqa"] = True
        else:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    borders, longest = packed.borders, packed.longest
    out = varlen.varlen_attn(q, k, v, borders, borders, longest, longest, **options)
    assert isinstance(out, Tensor)  # and nothing beside it, for nothing was asked for
    return out
