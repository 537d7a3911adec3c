"""Fused softmax attention by torch's ``scaled_dot_product_attention``.

A call keeps the fastest kernel where it can: causality is a flag instead of a mask, and a sliding
window becomes blocks along the band. Other letters: C queries of a block, w window.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attnzoo.ops.flash.call import FlashCall
from attnzoo.ops.softmax.sdpa import KERNELS, fastest_kernel_first, grouped_sdpa, sdpa
from attnzoo.ops.window.band import MIN_BLOCK, band_attention

BLOCK = 1024  # C where many queries follow earlier keys


def run_sdpa(x: FlashCall) -> Tensor:
    """Compute a call in the form that keeps torch's fastest kernel."""
    length, keys = x.q.shape[2], x.k.shape[2]
    if _has_narrow_band(x):
        return band_attention(x.q, x.k, x.v, x.band_options(), dropout=x.dropout)[0]
    if _only_causal(x) and isinstance(x.mask.q_offset, int):
        is_causal = length > 1 and length == keys and x.mask.q_offset == 0
        if is_causal or x.mask.q_offset >= keys - 1:
            return grouped_sdpa(
                x.q, x.k, x.v, scale=x.scale, dropout=x.dropout, is_causal=is_causal
            )
    if _has_long_mask(x):
        return _query_blocks_sdpa(x)
    return sdpa(
        x.q,
        x.k,
        x.v,
        scale=x.scale,
        mask=x.mask.dense(length, keys, x.q.device),
        bias=x.bias,
        sinks=x.sinks,
        dropout=x.dropout,
    )


def kernel_name(x: FlashCall) -> str:
    """Return the name of the kernel that computes a call on a GPU."""
    plain = x.mask.is_plain and x.bias is None and x.sinks is None
    return sdpa_kernel_name(x.q, x.k, x.v, is_causal=x.mask.causal, masked=not plain)


def sdpa_kernel_name(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, masked: bool = False
) -> str:
    """Return the name of the kernel that torch selects for a call."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
    mask = q.new_zeros(1, 1, 1, 1).expand(1, 1, q.shape[2], k.shape[2]) if masked else None
    with fastest_kernel_first(q.device):
        choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal and not masked)
    return KERNELS[SDPBackend(choice)]


def _only_causal(x: FlashCall) -> bool:
    """Whether causality is all that limits attention, without a bias or sinks."""
    return x.mask.causal and x.mask.is_plain and x.bias is None and x.sinks is None


def _has_long_mask(x: FlashCall) -> bool:
    """Whether more than C causal queries follow earlier keys."""
    mask, length, keys = x.mask, x.q.shape[2], x.k.shape[2]
    describable = mask.causal and mask.function is None and x.bias is None and x.sinks is None
    follows = isinstance(mask.q_offset, int) and mask.q_offset == keys - length > 0
    return describable and follows and length > BLOCK


def _query_blocks_sdpa(x: FlashCall) -> Tensor:
    """Compute blocks of queries, each with the keys up to its end, so that masks are O(C S)."""
    first, outs = x.k.shape[2] - x.q.shape[2], []
    for start in range(0, x.q.shape[2], BLOCK):
        q = x.q[:, :, start : start + BLOCK]
        end = first + start + q.shape[2]
        padding, ids = (
            None if part is None else part[:, :end] for part in (x.mask.padding, x.mask.segment_ids)
        )
        mask = replace(x.mask, padding=padding, segment_ids=ids, q_offset=first + start)
        outs.append(run_sdpa(x._replace(q=q, k=x.k[:, :, :end], v=x.v[:, :, :end], mask=mask)))
    return torch.cat(outs, 2)


def _has_narrow_band(x: FlashCall) -> bool:
    """Whether a sliding window is so narrow that blocks along its band are faster."""
    mask, length = x.mask, x.q.shape[2]
    if mask.window is None or mask.function is not None or length != x.k.shape[2]:
        return False
    if mask.num_sinks and mask.segment_ids is not None:
        return False
    no_offset = isinstance(mask.q_offset, int) and mask.q_offset == 0
    width = mask.window[0] + (0 if mask.causal else mask.window[1])
    long_enough = length > 2 * max(width, MIN_BLOCK)
    return no_offset and x.bias is None and x.sinks is None and long_enough
