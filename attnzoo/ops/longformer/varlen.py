"""Longformer attention by torch's varlen kernel, on CUDA.

The heads of one band are one call of a sliding window. The tokens of a dilated band are reordered:
token i of a row joins sequence i mod d, in which the window has no gaps. Global keys outside the
window of a query are extra keys, which enter the softmax through the log-sum-exp of the window.
Other letters: d dilation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.flash.api import (
    FlashCall,
    Sequences,
    attend_sequences,
    attend_with_extra_keys,
    extra_keys_reasons,
    kernel_window,
    outside_window,
    run_varlen,
    sequences,
    varlen_reasons,
    varlen_verdict,
)
from attnzoo.ops.longformer.by_band import GAPS, attend_by_band, run_by_band
from attnzoo.ops.longformer.call import LongformerCall
from attnzoo.ops.longformer.global_rows import attend_local_and_global
from attnzoo.ops.window.band import LocalOptions
from attnzoo.ops.window.pattern import GlobalIndices


def reasons(x: LongformerCall) -> list[str]:
    """Return every reason why the kernel does not support a call."""
    found = [] if x.window is None else [GAPS]
    if x.global_tokens is not None:
        found += extra_keys_reasons(x.q.device)
    if x.has_fewer_queries:
        lengths = f"there are {x.q.shape[2]} queries, {x.k.shape[2]} keys, and"
        if x.padding_mask is not None:
            found.append(f"{lengths} padding")
        if x.global_tokens is not None:
            found.append(f"{lengths} global tokens")
        if any(band.dilation > 1 for band in x.pattern.bands):
            found.append(f"{lengths} a dilated window")
    # Padding is moved to the end of the rows first
    mask = AttentionMask(
        causal=x.pattern.causal, window=(1, 1), segment_ids=x.segment_ids, q_offset=x.q_offset
    )
    return found + varlen_reasons(_flash_call(x, mask))


def verdict(x: LongformerCall) -> tuple[str, str]:
    """Return ``varlen_verdict`` for a call."""
    return varlen_verdict(_flash_call(x, AttentionMask()))


def _flash_call(x: LongformerCall, mask: AttentionMask) -> FlashCall:
    return FlashCall(x.q, x.k, x.v, mask, x.scale, x.bias, dropout=x.dropout)


def run_by_varlen(x: LongformerCall) -> Tensor:
    """Compute a call by bands."""
    if x.has_fewer_queries:
        return run_by_band(x, _attend)

    def attend_local(
        x: LongformerCall, key_mask: Tensor | None, indices: GlobalIndices | None
    ) -> Tensor:
        # Without global keys, whose places count, a window would have gaps
        return attend_by_band(x, x.padding_mask, indices, _attend)

    return attend_local_and_global(x, attend_local)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: LocalOptions,
    bias: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Return attention within a band and to global keys, ``[B, H, T, D]``."""
    assert bias is None
    band, indices = options.band, options.global_indices
    mask = AttentionMask(
        causal=options.causal,
        window=(band.before, band.after),
        padding=options.key_mask,
        segment_ids=options.segment_ids,
        q_offset=offset,
    )
    if band.dilation == 1 and indices is None:
        return run_varlen(FlashCall(q, k, v, mask, options.scale))
    found = _dilated_sequences(mask, q.shape[0], q.shape[2], band.dilation, q.device)
    window = kernel_window(mask, found)
    if indices is None or not found.max_q:
        return attend_sequences(q, k, v, found, window, options.scale)
    return attend_with_extra_keys(
        q,
        k,
        v,
        found,
        window,
        options.scale,
        extra_k=gather_tokens(k, indices.positions),
        extra_v=gather_tokens(v, indices.positions),
        seen=outside_window(
            indices.positions,
            indices.valid,
            q.shape[2],
            window=(band.before, band.after),
            causal=options.causal,
            dilation=band.dilation,
        ),
    )


def _dilated_sequences(
    mask: AttentionMask, batch: int, tokens: int, dilation: int, device: torch.device
) -> Sequences:
    """Return the sequences whose tokens are ``dilation`` apart; real tokens are contiguous.

    Synchronises with the device if rows are padded or packed.
    """
    if dilation == 1:
        return sequences(mask, batch, tokens, tokens, device)
    dilation = min(dilation, tokens)  # else there were sequences without tokens
    parts = range(dilation)
    order = torch.cat([torch.arange(part, tokens, dilation, device=device) for part in parts])
    if mask.padding is None and mask.segment_ids is None:
        index = (torch.arange(batch, device=device)[:, None] * tokens + order).flatten()
        number = torch.arange(batch * dilation + 1, device=device)  # of a sequence
        row, part = number // dilation, number % dilation
        starts = row * tokens + part * (tokens // dilation) + part.clamp(max=tokens % dilation)
        longest = -(-tokens // dilation)
        return Sequences(index, index, starts.int(), starts.int(), longest, longest)
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    ids = ids if mask.segment_ids is None else mask.segment_ids.long()
    padding = None if mask.padding is None else mask.padding.expand(batch, -1)[:, order]
    ids = ids.expand(batch, -1) * dilation + torch.arange(tokens, device=device) % dilation
    reordered = AttentionMask(padding=padding, segment_ids=ids[:, order])
    found = sequences(reordered, batch, tokens, tokens, device)
    assert found.q_indices is not None
    index = found.q_indices // tokens * tokens + order[found.q_indices % tokens]
    return found._replace(q_indices=index, k_indices=index)
