"""Inputs of one call of a backend: checks, zeroed padding, dropped keys, and no tokens at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import fill_padding, padding_if_any
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput

MASK_IN_BIAS = (
    "an additive mask is given to a causal layer, where causality and bias are indistinguishable "
    "in it (give the model a 2-D padding mask, or none)"
)


class AttentionInputs(NamedTuple):
    """All inputs of one call of a backend."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    mask: AttentionMask
    scale: float  # multiplies query-key products
    state: Any | None = None  # returned by this backend for the earlier tokens
    hidden_states: Tensor | None = None  # [B, S, M]: the input of the layer's key projection
    bias: Tensor | None = None  # added to the scores, broadcastable to [B, H, T, S]
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [H] or [B, H, T, 1]: logits in the softmax that have no value
    dropout: float = 0.0  # probability of dropping a single weight
    return_state: bool = False
    shard: SequenceShard | None = None  # this rank's part of the sequences, if ranks share them
    sequences: Sequences | None = None  # of the tokens, if they are one row of several sequences
    query_sequences: Sequences | None = None  # of the queries in cross-attention, in the same order
    slots: Tensor | None = None  # [B] int64: rows of the state, which is a pool; -1: no token
    reuse_state: bool = False  # whether the tensors of the state may be overwritten by the next one


def context_parallel_reasons(inputs: AttentionInputs, shard: SequenceShard) -> list[str]:
    """Return every reason why this call is unsupported under context parallelism."""
    mask, lengths = inputs.mask, (inputs.q.shape[2], inputs.k.shape[2])
    reasons = []
    if lengths != (shard.length, shard.length):
        reasons.append(
            f"{lengths[0]} queries and {lengths[1]} keys are given, but a shard has "
            f"{shard.length} tokens"
        )
    for given, what in (
        (
            inputs.state is not None or inputs.return_state,
            "a cache is given (call the model with use_cache=False)",
        ),
        (mask.function is not None, f"the mask is {mask.function_name or 'arbitrary'}"),
        (inputs.bias is not None, "an additive bias is given"),
        (
            (mask.padding is not None and shard.padding is None)
            or (mask.segment_ids is not None and shard.segment_ids is None),
            "padding or packing of the shard is given, but not of the full sequences (give "
            "attention_mask or position_ids with the batch)",
        ),
        (
            shard.segment_ids is not None and not mask.causal,
            "sequences are packed without a causal mask",
        ),
    ):
        if given:
            reasons.append(f"{what}, which context parallelism does not support")
    return reasons


def sequence_reasons(inputs: AttentionInputs, can: Capabilities) -> list[str]:
    """Return every reason why the sequences of one row, or slots of states, are unsupported."""
    mask, slots, rows = inputs.mask, inputs.slots, inputs.k.shape[0]
    reasons = []
    if not can.sequences or not can.recurrent:
        reasons.append("it takes rows of a batch, not sequences of one row or slots of states")
    for given, what in (
        (mask.padding is not None or mask.segment_ids is not None, "padding or segment_ids"),
        (inputs.shard is not None, "a shard"),
        (inputs.sequences is not None and slots is not None, "both"),
    ):
        if given:
            reasons.append(f"sequences or slots are given together with {what} (leave one out)")
    if inputs.sequences is not None and rows != 1:
        reasons.append(f"sequences are those of one row, and there are {rows}")
    if inputs.q.shape[0] == 0 or inputs.k.shape[2] == 0:
        reasons.append("sequences or slots are given, and there are no tokens")
    if slots is not None and (inputs.state is None or not inputs.return_state):
        reasons.append("slots are rows of a pool of states (pass state= and return_state=True)")
    return reasons


def weights_reasons(inputs: AttentionInputs) -> list[str]:
    """Return every reason why a call has no matrix of attention weights."""
    reasons = []
    if inputs.shard is not None:
        reasons.append(
            "attention weights are unavailable under context parallelism, where no rank has "
            "all of them (compute them on one process, or set output_attentions=False)"
        )
    if inputs.sequences is not None or inputs.slots is not None:
        reasons.append("attention weights are requested of sequences (run them as rows)")
    return reasons


def zero_padding(
    inputs: AttentionInputs, *, crossed: bool = False, exact: bool = False
) -> AttentionInputs:
    """Set queries, keys, values and hidden states to zero at padding, so that no NaN spreads.

    In cross-attention (``crossed``), padding is of the keys only, and queries stay as they are. An
    exact backend keeps finite queries, because a model may read the output at padding, as SigLIP
    does.
    """
    padding_mask = padding_if_any(inputs.mask.padding)
    if padding_mask is None:
        return inputs
    q, hidden = inputs.q, inputs.hidden_states
    query_mask = inputs.mask.query_padding(q.shape[2], inputs.k.shape[2])
    if query_mask is not None and not crossed:
        if exact:
            q = q.masked_fill(~query_mask[:, None, :, None] & ~q.isfinite(), 0)
        else:
            q = fill_padding(q, query_mask)
    if hidden is not None:
        hidden = fill_padding(hidden, padding_mask, token_dim=1)
    return inputs._replace(
        q=q,
        k=fill_padding(inputs.k, padding_mask),
        v=fill_padding(inputs.v, padding_mask),
        hidden_states=hidden,
    )


def drop_keys(inputs: AttentionInputs, p: float) -> tuple[AttentionInputs, Tensor]:
    r"""Drop each key of each row and key head with probability p, for all of its queries.

    The effective attention weights :math:`w_{ts}` of a mechanism, after normalisation, become
    :math:`w_{ts} m_s / (1 - p)`, with :math:`m_s = 0` for a dropped key and 1 otherwise:

    .. math:: o_t = \sum_s w_{ts} \frac{m_s}{1 - p} v_s, \qquad E[o_t] = \sum_s w_{ts} v_s.

    As in dropout of the weights, each weight is dropped with probability p and the expected output
    is exact; unlike there, the queries of a head, and the heads that share a key head, drop the
    same keys. Every mechanism is linear in the values, so the factors multiply the values. A state
    :math:`S_t = d_t S_{t-1} + \phi(k_t) v_t^T` lacks the products of dropped keys; its decay and
    its normaliser :math:`z_t` have all keys.

    Draws from torch's global generator, as :func:`torch.nn.functional.dropout` does.

    Returns:
        The inputs, and the factors :math:`m_s / (1 - p)`, ``[B, Hkv, S, 1]``.
    """
    v = inputs.v
    kept = torch.rand(*v.shape[:3], 1, dtype=torch.float32, device=v.device) >= p
    factors = kept.to(torch.promote_types(v.dtype, torch.float32)) * (1 / (1 - p) if p < 1 else 0.0)
    return inputs._replace(v=(v * factors).to(v.dtype)), factors


def attend_to_nothing(
    attend: Callable[[AttentionInputs], AttentionOutput], inputs: AttentionInputs
) -> AttentionOutput:
    """Run ``attend`` with an empty batch, no queries or no keys.

    A missing batch entry or token is replaced by one of zeros, which is removed from the output.
    Every backend thus returns an empty output and a valid state, no kernel gets an empty tensor,
    and all parameters get zero gradients, which data-parallel training expects on every rank.
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
