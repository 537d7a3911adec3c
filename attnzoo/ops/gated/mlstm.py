r"""mLSTM: linear attention with exponential input gates, causal."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.context_parallel import (
    LOG_ZERO,
    SequenceShard,
    clear_finished_sequences,
    gather_from_earlier_ranks,
    log_decay_across_shard,
    reset_new_sequences,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, LinearState, StabilizedState
from attnzoo.contract.validation import check_shape
from attnzoo.ops.gated.common import (
    LOWEST_STABILIZER,
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
from attnzoo.ops.linear.torch import LOWEST_LOG_DECAY
from attnzoo.runtime.kernel_calls import state_dtype, widen


def mlstm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_forget: Tensor,
    log_input: Tensor,
    sequences: Sequences | None = None,
    impl: str = "auto",
    state: StabilizedState | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
    shard: SequenceShard | None = None,
    reuse_state: bool = False,
    slots: Tensor | None = None,
) -> AttentionOutput:
    r"""Compute the mLSTM cell of xLSTM: linear attention with exponential input gates.

    Computes :math:`C_t = f_t C_{t-1} + e^{i_t} k_t v_t^T`,
    :math:`n_t = f_t n_{t-1} + e^{i_t} k_t` and
    :math:`o_t = q_t C_t / \max(|q_t n_t|, 1)`. The sums are stored divided by :math:`e^{m_t}` with
    the stabiliser :math:`m_t = \max(\log f_t + m_{t-1}, i_t)`, :math:`m_0 = 0`; the denominator is
    then :math:`\max(|q_t n_t|, e^{-m_t})`. Relative to m, decays and weights are at most 1, so this
    is linear attention with one more value channel, of ones, for the denominator. Its cost is that
    of :func:`attnzoo.ops.linear.api.linear_attention`.
    Source: xLSTM, Beck et al., 2024, arXiv:2405.04517.

    Args:
        q: Queries after the feature map, ``[B, H, T, D]``.
        k: Keys after the feature map, ``[B, Hkv, T, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, T, E]``.
        log_forget: log f, ``[B, Hkv, T]``, at most 0.
        log_input: i, ``[B, Hkv, T]``, of any size.
        sequences: As in ``linear_attention``.
        impl: As in ``linear_attention``.
        state: Sums over the earlier tokens.
        return_state: Whether to return the state after the last token.
        chunk_size: As in ``linear_attention``.
        shard: This rank's part of sequences that several ranks hold; not together with ``state``.
        reuse_state: As in ``linear_attention``.
        slots: As in ``linear_attention``.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; also ``state`` and ``impl``.

    Raises:
        ValueError: Shapes, dtypes or options are not supported; the message says which are.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 8)
        >>> forget, write = torch.randn(2, 1, 4, 1000)
        >>> log_forget = torch.nn.functional.logsigmoid(forget)
        >>> attnzoo.ops.mlstm_attention(q, k, v, log_forget=log_forget, log_input=write).out.shape
        torch.Size([1, 4, 1000, 8])
    """
    check_gated("mlstm_attention", StabilizedState, q, k, v, sequences, slots, state, shard)
    for name, gate in (("log_forget", log_forget), ("log_input", log_input)):
        check_shape(name, gate, tuple(k.shape[:3]), "B, Hkv, T", q.device)
    # The error of 16-bit sums over gates would grow with the number of tokens
    log_forget, log_input = widen(log_forget), widen(log_input)
    if shard is not None:
        state = _state_from_earlier_ranks(k, v, log_forget, log_input, shard, sequences)
    sums, m = (None, None) if state is None else (LinearState(state.kv, state.k), state.m)
    x = LinearInputs(
        *(q, k, v, log_forget, sums, True, False, 1.0, 0.0, chunk_size, "identity", 1.0),
        sequences=sequences,
        return_state=return_state,
        reuse_state=reuse_state and not torch.is_grad_enabled(),
        slots=slots,
    )
    if token := run_gated_step(x, StepGate(None, log_input, m), impl):
        out, last, choice = token
        return AttentionOutput(out, StabilizedState(*last) if return_state else None, None, choice)
    attend = partial(_attend, q, k, v, log_forget, log_input, sequences, impl, chunk_size)
    found = attend(state) if slots is None else attend_at_slots(attend, state, slots)
    return found if return_state else found._replace(state=None)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor,
    log_input: Tensor,
    sequences: Sequences | None,
    impl: str,
    chunk_size: int | None,
    state: StabilizedState | None,
) -> AttentionOutput:
    """Compute all tokens by linear attention, relative to the stabiliser."""
    before = None if state is None else state.m.double()
    gates, m, last_m = _relative_gates(log_forget, log_input, sequences, before)
    sums = None
    if state is not None:  # one more value channel, of ones, for the denominator
        sums = LinearState(torch.cat([state.kv, state.k.unsqueeze(-1)], -1), state.k)
    dtype = state_dtype(q, k, v)  # 16-bit sums of weights would grow wrong
    found = linear_attention(
        q.to(dtype),
        k * gates[1].unsqueeze(-1),
        F.pad(v.to(dtype), (0, 1), value=1.0),
        sequences=sequences,
        log_decay=gates[0],
        impl=impl,
        state=sums,
        return_state=True,
        chunk_size=chunk_size,
    )
    lower_bound = (-m.clamp(min=LOWEST_STABILIZER)).exp().to(found.out.dtype)
    lower_bound = lower_bound.repeat_interleave(q.shape[1] // k.shape[1], 1)
    out = found.out[..., :-1] / torch.maximum(found.out[..., -1:].abs(), lower_bound.unsqueeze(-1))
    assert found.state is not None
    kv, z = found.state
    rounded_m = last_m.to(z.dtype)
    rounding = (last_m - rounded_m).exp().to(z.dtype).unsqueeze(-1)
    last = StabilizedState(kv[..., :-1] * rounding.unsqueeze(-1), z * rounding, rounded_m)
    return found._replace(out=out.to(v.dtype), state=last)


def _relative_gates(
    log_forget: Tensor, log_input: Tensor, sequences: Sequences | None, before: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Return log decays and weights relative to m, m of all tokens, and m after each sequence.

    ``before`` is m before each sequence; ``None`` means 0. m is float64: rounded by its size,
    decays would differ, and those above 0 be clamped, which adds up over a long memory.
    """
    tokens, count = log_input.shape[2], len(log_input) if sequences is None else sequences.count
    if before is None:
        before = log_input.new_zeros(count, log_input.shape[1], dtype=torch.float64)
    start = before.unsqueeze(2)
    first = torch.arange(tokens, device=log_input.device) == 0
    if sequences is not None:
        if (inside := sequences.inside(tokens)) is not None:
            log_forget, log_input = (torch.where(inside, x, 0) for x in (log_forget, log_input))
        first = sequences.is_first(tokens)
        start = F.pad(before, (0, 0, 0, 1))[sequences.index(tokens)].T.unsqueeze(0)
    m = stabilizer(log_forget, log_input, first, start)
    m_before = torch.where(first, start, F.pad(m[:, :, :-1], (min(tokens, 1), 0)))
    log_decay = log_forget + (m_before - m)
    log_decay = log_decay - log_decay.detach().clamp(min=0)  # above 0 only by rounding
    gates = log_decay.to(log_forget.dtype), (log_input - m).exp().to(log_input.dtype)
    if not tokens:
        return gates, m, before
    last = last_tokens(m.unsqueeze(3), sequences).squeeze(2)
    if sequences is not None:
        last = torch.where((sequences.lengths == 0)[:, None], before, last)
    return gates, m, last


@torch.no_grad()
def stabilizer(log_forget: Tensor, log_input: Tensor, first: Tensor, start: Tensor) -> Tensor:
    r"""Return :math:`m_t = \max(\log f_t + m_{t-1}, i_t)`, as an associative scan.

    The output of mLSTM does not depend on m, so it has no gradient. Each step is a function
    :math:`m \mapsto \max(a + m, b)`. Two such functions compose to one of the same kind, so log2(T)
    rounds compute all tokens, without a difference of two long sums.

    Args:
        log_forget: log f, ``[B, Hkv, T]``.
        log_input: i, ``[B, Hkv, T]``.
        first: The first tokens of sequences, ``[T]`` bool.
        start: m before those tokens, broadcastable to ``[B, Hkv, T]``.

    Returns:
        m in float64, ``[B, Hkv, T]``.
    """
    a, b = log_forget.double(), log_input.double()
    b = torch.where(first, torch.maximum(a + start, b), b)
    a = a.masked_fill(first, -torch.inf)
    offset = 1
    while offset < a.shape[2]:
        earlier_a = F.pad(a[:, :, :-offset], (offset, 0))
        earlier_b = F.pad(b[:, :, :-offset], (offset, 0), value=-torch.inf)
        a, b = earlier_a + a, torch.maximum(earlier_b + a, b)
        offset *= 2
    return b


def _state_from_earlier_ranks(
    k: Tensor,
    v: Tensor,
    log_forget: Tensor,
    log_input: Tensor,
    shard: SequenceShard,
    sequences: Sequences | None,
) -> StabilizedState:
    """Return the state over the tokens of all earlier ranks.

    Args:
        k: This rank's keys after the feature map, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        log_forget: ``[B, Hkv, T]``, at most 0.
        log_input: ``[B, Hkv, T]``, of any size.
        shard: This rank's part of the sequences.
        sequences: Those of the tokens, if they are one row; the rows are in ``shard.layout``.

    Returns:
        The sums in float32 or wider, divided by ``exp(m)``.
    """
    log_weight = log_input.unsqueeze(3)
    if shard.layout is not None:  # padding has weight 0 and decays nothing
        is_real = shard.rows(torch.ones_like(log_weight)) > 0
        log_weight = shard.rows(log_weight).masked_fill(~is_real, LOG_ZERO)
        k, v, log_forget = (shard.rows(x) for x in (k, v, log_forget.unsqueeze(3)))
        log_forget = log_forget.squeeze(3)
    k, v = (x.to(state_dtype(k, k, v)) for x in (k, v))
    # Summed from the end, so that the largest weights come from short sums
    log_decay = log_forget.to(k.dtype).clamp(min=LOWEST_LOG_DECAY)
    reverse_sums = log_decay.flip(2).cumsum(2).flip(2).unsqueeze(3)
    later = F.pad(reverse_sums[:, :, 1:], (0, 0, 0, 1))
    log_state_decay = log_decay_across_shard(reverse_sums[:, :, 0], shard)
    log_weight = (later + log_weight.to(k.dtype)).clamp(min=LOG_ZERO)
    log_weight = clear_finished_sequences(log_weight, shard, LOG_ZERO)
    maximum = log_weight.detach().amax(2)  # [B, Hkv, 1]
    k = k * (log_weight - maximum.unsqueeze(2)).exp()
    sums = torch.cat([k.mT @ v, k.sum(2).unsqueeze(3)], 3)
    total, m = torch.zeros_like(sums), torch.zeros_like(maximum)
    for other, other_decay, other_m in gather_from_earlier_ranks(
        [sums, log_state_decay, maximum], shard
    ):
        new_m = torch.maximum(other_decay.detach() + m, other_m)
        decay, weight = (other_decay + m - new_m).exp(), (other_m - new_m).exp()
        total, m = total * decay.unsqueeze(3) + other * weight.unsqueeze(3), new_m
    total, m = (reset_new_sequences(x, shard) for x in (total, m.squeeze(2).detach()))
    return shard.states(StabilizedState(total[..., :-1], total[..., -1], m), sequences)
