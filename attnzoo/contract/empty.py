"""Attention over an empty batch or an empty sequence.

A missing batch entry or token is replaced by one of zeros, which is removed from the output. Every
backend thus returns an empty output and a valid state, no kernel gets an empty tensor, and all
parameters get zero gradients, which data-parallel training expects on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput


def attend_to_nothing(
    attend: Callable[[AttentionInputs], AttentionOutput], inputs: AttentionInputs
) -> AttentionOutput:
    """Run ``attend`` with an empty batch, no queries or no keys.

    Without keys the output is zeros, and the state does not change.
    """
    (batch, _, length, _), keys = inputs.q.shape, inputs.k.shape[2]
    rows, queries, tokens = (int(size == 0) for size in (batch, length, keys))

    def fill(x: Tensor, more: int) -> Tensor:  # [B, H, T, D]
        return F.pad(x, (0, 0, 0, more, 0, 0, 0, rows))

    state, hidden = inputs.state, inputs.hidden_states
    if state is not None and rows:
        state = type(state)(*(x.new_zeros(1, *x.shape[1:]) for x in state))
    filled = inputs._replace(
        q=fill(inputs.q, queries),
        k=fill(inputs.k, tokens),
        v=fill(inputs.v, tokens),
        mask=_fill_mask(inputs.mask, inputs.k, rows, tokens),
        state=state,
        hidden_states=None if hidden is None else F.pad(hidden, (0, 0, 0, tokens, 0, rows)),
        bias=_unless_empty(inputs.bias),
        sinks=_unless_empty(inputs.sinks),
    )
    out, state, weights, impl = attend(filled)
    if state is not None:
        state = type(state)(*(x[:batch] for x in state))
    if tokens and inputs.return_state and inputs.state is not None:
        state = inputs.state
    if weights is not None:
        weights = weights[:batch, :, :length, :keys]
    out = out[:batch, :, :length]
    for x in (inputs.bias, inputs.sinks):  # those left out have gradients too
        if x is not None and x.numel() == 0:
            out = out + x.sum().to(out.dtype)
    return AttentionOutput(out, state, weights, impl)


def _fill_mask(mask: AttentionMask, k: Tensor, rows: int, tokens: int) -> AttentionMask:
    """Return the mask with the added batch entry and the added key, which is padding."""
    padding, ids = mask.padding, None if tokens else mask.segment_ids
    if padding is None and tokens:
        padding = torch.ones(k.shape[0], 0, dtype=torch.bool, device=k.device)
    if padding is not None:
        padding = F.pad(padding, (0, tokens, 0, rows if len(padding) == 0 else 0))
    if ids is not None and len(ids) == 0:
        ids = F.pad(ids, (0, 0, 0, rows))
    return replace(mask, padding=padding, segment_ids=ids, function=None)


def _unless_empty(x: Tensor | None) -> Tensor | None:
    return None if x is None or x.numel() == 0 else x
