r"""RWKV-6: each query reads the state before its own token enters it; causal."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, LinearState
from attnzoo.contract.validation import check_is_log_decay, check_shape
from attnzoo.ops.gated.common import (
    attend_at_slots,
    check_gated,
    last_tokens,
    run_gated_step,
)
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.common import (
    LinearInputs,
    StepGate,
)
from attnzoo.ops.linear.context_parallel import state_from_earlier_ranks
from attnzoo.runtime.kernel_calls import state_dtype, widen


def rwkv6_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    bonus: Tensor,
    sequences: Sequences | None = None,
    normalize: bool = False,
    impl: str = "auto",
    state: LinearState | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
    eps: float = 1e-6,
    shard: SequenceShard | None = None,
    reuse_state: bool = False,
    slots: Tensor | None = None,
) -> AttentionOutput:
    r"""Compute the recurrence of RWKV-6: each query reads the state before its own token enters it.

    Computes :math:`o_t = q_t S_{t-1} + (q_t \cdot u k_t)\, v_t` with
    :math:`S_t = e^{g_t} S_{t-1} + k_t v_t^T`; normalised, divided by the same sum over the keys.
    It runs linear attention with keys, values and decays shifted right by one token, so it takes no
    quotient and nothing overflows. Its cost is that of
    :func:`attnzoo.ops.linear.api.linear_attention`.
    Source: RWKV-6, Peng et al., 2024, arXiv:2404.05892.

    Args:
        q: Queries after the feature map, ``[B, H, T, D]``.
        k: Keys after the feature map, ``[B, Hkv, T, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: g, ``[B, Hkv, T, D]``, at most 0: decay of the state when token t enters it.
        bonus: u, ``[Hkv, D]``; not negative with ``normalize``.
        sequences: As in ``linear_attention``.
        normalize: Divide by the sum of weights plus ``eps``.
        impl: As in ``linear_attention``.
        state: Sums over the earlier tokens, including the last one, as in ``linear_attention``.
        return_state: Whether to return the state after the last token.
        chunk_size: As in ``linear_attention``.
        eps: Added to the sum of weights.
        shard: This rank's part of sequences that several ranks hold; not together with ``state``.
        reuse_state: As in ``linear_attention``.
        slots: As in ``linear_attention``.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; also ``state`` and ``impl``.

    Raises:
        ValueError: Shapes, dtypes or options are not supported; the message says which are.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 8)
        >>> log_decay = torch.nn.functional.logsigmoid(torch.randn(1, 4, 1000, 8))
        >>> bonus = torch.rand(4, 8)
        >>> attnzoo.ops.rwkv6_attention(q, k, v, log_decay=log_decay, bonus=bonus).out.shape
        torch.Size([1, 4, 1000, 8])
    """
    check_gated("rwkv6_attention", LinearState, q, k, v, sequences, slots, state, shard)
    check_shape("bonus", bonus, (k.shape[1], k.shape[3]), "Hkv, D", q.device)
    check_shape("log_decay", log_decay, tuple(k.shape), "B, Hkv, T, D", k.device)
    check_is_log_decay(log_decay, k.shape[2])
    log_decay = widen(log_decay)
    if shard is not None:
        state = state_from_earlier_ranks(k, v, log_decay, shard, sequences)
    x = LinearInputs(
        *(q, k, v, log_decay, state, True, normalize, 1.0, eps, chunk_size, "identity", 1.0),
        sequences=sequences,
        return_state=return_state,
        reuse_state=reuse_state and not torch.is_grad_enabled(),
        slots=slots,
    )
    if token := run_gated_step(x, StepGate(bonus), impl):
        out, last, choice = token
        return AttentionOutput(out, LinearState(*last) if return_state else None, None, choice)
    attend = partial(_attend, x, bonus, impl)
    found = attend(state) if slots is None else attend_at_slots(attend, state, slots)
    return found if return_state else found._replace(state=None)


def _attend(
    x: LinearInputs, bonus: Tensor, impl: str, state: LinearState | None
) -> AttentionOutput:
    """Compute all tokens by linear attention to the tokens before each, and add its own."""
    q, k, v, log_decay, sequences, tokens = x.q, x.k, x.v, x.log_decay, x.sequences, x.k.shape[2]
    assert log_decay is not None
    if sequences is not None and (inside := sequences.inside(tokens)) is not None:
        q, k, v, log_decay = (torch.where(inside[:, None], y, 0) for y in (q, k, v, log_decay))
    dtype = state_dtype(q, k, v)  # 16-bit sums of weights would grow wrong
    q, k, values = (y.to(dtype) for y in (q, k, v))
    if x.normalize:  # the output of one more value channel, of ones, is the sum of weights
        values = F.pad(values, (0, 1), value=1.0)
        if state is not None:
            state = LinearState(torch.cat([state.kv, state.k.unsqueeze(-1)], -1), state.k)
    k_before, v_before, decay_before = (
        F.pad(y[:, :, :-1], (0, 0, min(tokens, 1), 0)) for y in (k, values, log_decay)
    )
    if sequences is not None:  # a row begins with zeros already
        first = sequences.is_first(tokens)[:, None]
        k_before, decay_before = (torch.where(first, 0, y) for y in (k_before, decay_before))
    found = linear_attention(
        *(q, k_before, v_before),
        sequences=sequences,
        log_decay=decay_before,
        impl=impl,
        state=state,
        return_state=True,
        chunk_size=x.chunk_size,
    )
    assert found.state is not None
    kv, z = found.state
    own_k = bonus.to(dtype).unsqueeze(1) * k
    queries = q.unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, T, D]
    weight = (queries * own_k.unsqueeze(2)).sum(-1, keepdim=True)
    out = found.out + (weight * values.unsqueeze(2)).flatten(1, 2)
    if tokens:  # the last token, which the shift leaves out
        key, value, decay = (last_tokens(y, sequences) for y in (k, values, log_decay))
        decay = decay.to(dtype).exp()
        kv = kv * decay.unsqueeze(-1) + key.unsqueeze(-1) * value.unsqueeze(2)
        z = z * decay + key
    if x.normalize:
        out, kv = out[..., :-1] / (out[..., -1:] + x.eps), kv[..., :-1]
    return found._replace(out=out.to(v.dtype), state=LinearState(kv, z))
