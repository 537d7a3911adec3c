"""Longformer attention without global tokens by torch's kernel for varied lengths, on CUDA.

The heads of one band are one call of a sliding window. Global tokens would need the gradient of the
log-sum-exp of a window, which the kernel does not return.
Letters: B batch, H query heads, T queries.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.backends.flash.op import FlashCall, run_varlen, trust_varlen, varlen_reasons
from attnzoo.backends.local.blockwise_cpu import LocalOptions
from attnzoo.backends.longformer.impl.by_band import run_by_band
from attnzoo.backends.longformer.impl.call import LongformerCall
from attnzoo.masks import AttentionMask


def reasons(x: LongformerCall) -> list[str]:
    """Return every reason why the kernel does not support a call."""
    found = []
    if x.global_tokens is not None:
        found.append("global tokens are given, whose keys its kernel does not add to a window")
    if any(band.dilation > 1 for band in x.pattern.bands):
        found.append("a window is dilated")
    if x.has_fewer_queries and x.padding_mask is not None:
        found.append(f"there are {x.q.shape[2]} queries, {x.k.shape[2]} keys, and padding")
    # Padding is moved to the end of the rows first
    mask = AttentionMask(
        causal=x.pattern.causal, window=(1, 1), segment_ids=x.segment_ids, q_offset=x.q_offset
    )
    return found + varlen_reasons(_flash_call(x, mask))


def trust(x: LongformerCall) -> tuple[tuple[str, ...], str]:
    """Return why ``impl="auto"`` does not trust the kernel; and how it was checked, if it does."""
    return trust_varlen(_flash_call(x, AttentionMask()))


def auto_reasons(x: LongformerCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider the kernel for a call."""
    if x.q.device.type != "cuda":
        return [f"the kernel runs on CUDA, and q is on {x.q.device.type}"]
    return []


def _flash_call(x: LongformerCall, mask: AttentionMask) -> FlashCall:
    return FlashCall(x.q, x.k, x.v, mask, x.scale, x.bias, dropout=x.dropout)


def run_by_varlen(x: LongformerCall) -> Tensor:
    """Compute a call by bands."""
    return run_by_band(x, _attend)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: LocalOptions,
    bias: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Return attention within a band, ``[B, H, T, E]``."""
    assert bias is None
    mask = AttentionMask(
        causal=options.causal,
        window=(options.band.before, options.band.after),
        padding=options.key_mask,
        segment_ids=options.segment_ids,
        q_offset=offset,
    )
    return run_varlen(FlashCall(q, k, v, mask, options.scale))
