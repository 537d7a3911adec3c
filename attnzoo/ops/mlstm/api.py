r"""mLSTM: linear attention with exponential input gates, causal, in chunks or token by token.

One token is computed by the step that decoding takes, an op of its own in the registry of
implementations: ``mlstm_step``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.context_parallel import (
    LOG_ZERO,
    SequenceShard,
    accumulation_dtype,
    clear_finished_sequences,
    gather_from_earlier_ranks,
    log_decay_across_shard,
    reset_new_sequences,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, LinearState, StabilizedState
from attnzoo.contract.validation import check_shape, check_size
from attnzoo.ops.features.functional import widen
from attnzoo.ops.gated.common import GatedInputs, GatedResult, check_gated, run_gated
from attnzoo.ops.gated.sums import ComputeSums, SumsCall, register_reduction, wide_values
from attnzoo.ops.linear.common import LinearInputs, StepGate, state_dtype
from attnzoo.ops.linear.step import step
from attnzoo.ops.linear.torch import LOWEST_LOG_DECAY

LOWEST_STABILIZER = -87.0  # exp(87) is finite in float32


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
    x = _inputs(
        *("mlstm_attention", q, k, v, log_forget, log_input, sequences, state, return_state),
        *(chunk_size, shard, reuse_state, slots),
    )
    return _attend("mlstm_attention", x, impl)


def recurrent_mlstm_attention(
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
    shard: SequenceShard | None = None,
    reuse_state: bool = False,
    slots: Tensor | None = None,
) -> AttentionOutput:
    """Compute :func:`mlstm_attention` token by token; arguments and results as there.

    Raises:
        ValueError: Shapes, dtypes or options are not supported; the message says which are.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 10, 8)
        >>> gates = {"log_forget": -torch.rand(1, 4, 10), "log_input": torch.randn(1, 4, 10)}
        >>> attnzoo.ops.recurrent_mlstm_attention(q, k, v, **gates).out.shape
        torch.Size([1, 4, 10, 8])
    """
    op = "recurrent_mlstm_attention"
    x = _inputs(
        *(op, q, k, v, log_forget, log_input, sequences, state, return_state),
        *(None, shard, reuse_state, slots),
    )
    return _attend(op, x, impl)


def _inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor,
    log_input: Tensor,
    sequences: Sequences | None,
    state: StabilizedState | None,
    return_state: bool,
    chunk_size: int | None,
    shard: SequenceShard | None,
    reuse_state: bool,
    slots: Tensor | None,
) -> GatedInputs:
    """Return the checked inputs of a call."""
    check_gated(op, StabilizedState, q, k, v, sequences, slots, state, shard)
    for name, x in (("log_forget", log_forget), ("log_input", log_input)):
        check_shape(name, x, tuple(k.shape[:3]), "B, Hkv, T", q.device)
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)
    # The error of 16-bit sums over gates would grow with the number of tokens
    log_forget, log_input = widen(log_forget), widen(log_input)
    if shard is not None:
        state = _state_from_earlier_ranks(k, v, log_forget, log_input, shard, sequences)
    return GatedInputs(
        *(q, k, v, log_forget, None if state is None else LinearState(state.kv, state.k)),
        StepGate(None, log_input, None if state is None else state.m),
        sequences=sequences,
        return_state=return_state,
        chunk_size=chunk_size,
        reuse_state=reuse_state,
        slots=slots,
    )


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
    k, v = (x.to(accumulation_dtype(k, v)) for x in (k, v))
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


def _attend(op: str, x: GatedInputs, impl: str) -> AttentionOutput:
    out, last, m, choice = run_gated(op, "mlstm_step", x, impl)
    state = None
    if x.return_state:
        assert last is not None
        assert m is not None
        state = StabilizedState(last.kv, last.k, m)
    return AttentionOutput(out, state, None, choice)


# -- implementations -------------------------------------------------------------------------------


def _run(x: GatedInputs, *, sums: ComputeSums) -> GatedResult:
    """Compute all tokens by linear attention, relative to the stabiliser."""
    _, log_input, initial = x.gate
    assert log_input is not None
    log_forget, tokens = x.log_decay, x.places()
    if tokens.inside is not None:
        log_forget = torch.where(tokens.inside, log_forget, 0)
        log_input = torch.where(tokens.inside, log_input, 0)
    # Relative to m in float32, decays would be rounded by the size of m, and those above 0 clamped:
    # over a long memory this adds up
    before = None if initial is None else tokens.at_first(initial.double())
    m = stabilizer(log_forget, log_input, tokens.first, before)
    start = torch.zeros_like(m) if before is None else before
    m_before = torch.where(tokens.first, start, F.pad(m[:, :, :-1], (1, 0)))
    log_decay = log_forget + (m_before - m)
    log_decay = log_decay - log_decay.detach().clamp(min=0)  # above 0 only by rounding
    log_decay = log_decay.to(log_forget.dtype)
    weight = (log_input - m).exp().to(log_input.dtype)
    state = None
    if x.state is not None:
        kv, z = x.state
        state = LinearState(torch.cat([kv, z.unsqueeze(-1)], -1), z)
    call = SumsCall(
        x.q,
        x.k * weight.unsqueeze(-1),
        F.pad(wide_values(x), (0, 1), value=1.0),
        log_decay,
        *(state, x.sequences, x.return_state, x.chunk_size, True, x.v.dtype),
    )
    out, last, divide = sums(call)
    lower_bound = (-m.clamp(min=LOWEST_STABILIZER)).exp().to(out.dtype)
    lower_bound = lower_bound.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    denominator = torch.maximum(out[..., -1:].abs(), lower_bound.unsqueeze(-1))
    out = divide(out[..., :-1], denominator).to(x.v.dtype)
    if last is None:
        return out, None, None
    exact_m = tokens.last(m, initial)
    last_m = exact_m.to(last.k.dtype)
    rounding = (exact_m - last_m).exp().to(last.k.dtype).unsqueeze(-1)
    state = LinearState(last.kv[..., :-1] * rounding.unsqueeze(-1), last.k * rounding)
    return out, state, last_m


def _run_step(x: GatedInputs) -> GatedResult:
    """Compute one token: the step of linear attention, and a quotient."""
    _, log_input, initial = x.gate
    assert log_input is not None
    assert initial is not None
    dtype = state_dtype(x.q, x.k, x.v)
    forget, write = x.log_decay, log_input  # [B, Hkv, 1]
    before = initial.to(forget.dtype).unsqueeze(2)
    with torch.no_grad():
        m = torch.maximum(forget.double() + before, write.double()).to(forget.dtype)
    log_decay = forget + (before - m)  # above 0 by rounding, which cancels over many tokens
    key = x.k * (write - m).exp().unsqueeze(-1)
    assert x.state is not None
    state = LinearState(*(y.to(dtype) for y in x.state))
    inputs = (x.q, key, wide_values(x), log_decay, state, True, False, 1.0, 0.0, None)
    reuse = x.reuse_state and not torch.is_grad_enabled()
    out, last = step(LinearInputs(*inputs, "identity", 1.0, reuse_state=reuse))
    assert last is not None
    queries = x.q.to(dtype).unflatten(1, (x.k.shape[1], -1))  # [B, Hkv, G, 1, D]
    weight = (queries @ last.k[:, :, None, :, None]).flatten(1, 2)  # [B, H, 1, 1]
    lower_bound = (-m.clamp(min=LOWEST_STABILIZER)).exp()
    lower_bound = lower_bound.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    out = out / torch.maximum(weight.abs(), lower_bound.unsqueeze(-1))
    return out.to(x.v.dtype), last, m.squeeze(2)


@torch.no_grad()
def stabilizer(
    log_forget: Tensor, log_input: Tensor, first: Tensor, before: Tensor | None
) -> Tensor:
    r"""Return :math:`m_t = \max(\log f_t + m_{t-1}, i_t)`, ``[B, Hkv, T]``, as an associative scan.

    The output of mLSTM does not depend on m, so it has no gradient. Each step is a function
    :math:`m \mapsto \max(a + m, b)`. Two such functions compose to one of the same kind, so log2(T)
    rounds compute all tokens, without a difference of two long sums.

    Args:
        log_forget: log f, ``[B, Hkv, T]``.
        log_input: i, ``[B, Hkv, T]``.
        first: The first tokens of sequences, ``[T]`` bool.
        before: m before those tokens, ``[B, Hkv, T]``; ``None`` means 0.

    Returns:
        m in float64.
    """
    a, b = log_forget.double(), log_input.double()
    m = a if before is None else a + before
    b = torch.where(first, torch.maximum(m, b), b)
    a = a.masked_fill(first, -torch.inf)
    offset = 1
    while offset < a.shape[2]:
        earlier_a = F.pad(a[:, :, :-offset], (offset, 0))
        earlier_b = F.pad(b[:, :, :-offset], (offset, 0), value=-torch.inf)
        a, b = earlier_a + a, torch.maximum(earlier_b + a, b)
        offset *= 2
    return b


register_reduction("mlstm", _run, _run_step)
