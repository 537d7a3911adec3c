r"""Gated recurrences that are more than a decay: mLSTM, RWKV-6 and the full-matrix gate.

- :func:`mlstm_attention`: exponential input gates, stabilised.
- :func:`rwkv6_attention`: the query reads the state before its own token enters it.
- :func:`matrix_gated_attention`: one decay per pair of key and value channels.

A decay per head, token or key channel needs none of them:
:func:`attnzoo.ops.linear.api.linear_attention` takes it as ``log_decay``. All three are causal.
Letters: B batch, H heads, Hkv key heads, G = H / Hkv, T tokens, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.context_parallel import LOG_ZERO, SequenceShard
from attnzoo.contract.implementation import Implementation, select
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import fill_padding, padding_if_any
from attnzoo.contract.states import (
    AttentionOutput,
    ImplChoice,
    LinearState,
    MatrixState,
    StabilizedState,
)
from attnzoo.contract.validation import (
    check_mask_fields,
    check_qkv,
    check_shape,
    check_shard,
    empty_output,
    is_empty_call,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import widen
from attnzoo.ops.gated.context_parallel import (
    matrix_state_from_earlier_ranks,
    stabilized_state_from_earlier_ranks,
)
from attnzoo.ops.gated.linear_call import IMPLEMENTATIONS as IMPLEMENTATIONS
from attnzoo.ops.gated.linear_call import LinearCall, divide, select_linear
from attnzoo.ops.gated.matrix_gate import (
    MatrixGateInputs,
    MatrixGateResult,
    run_torch,
    state_of_tokens,
    total_log_decay,
)
from attnzoo.ops.gated.mlstm import (
    LOWEST_STABILIZER,
    segment_starts,
    stabilizer,
)
from attnzoo.ops.gated.reference import run_reference
from attnzoo.ops.gated.rwkv6 import add_last_token, shift_right
from attnzoo.ops.linear.api import GatedResult, StepGate, gated_step
from attnzoo.ops.linear.common import empty_state, state_dtype
from attnzoo.ops.linear.context_parallel import state_from_earlier_ranks
from attnzoo.ops.linear.validation import check_is_log_decay, check_state


def mlstm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_forget: Tensor,
    log_input: Tensor,
    mask: AttentionMask | None = None,
    form: str = "chunk",
    impl: str = "auto",
    state: StabilizedState | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
    shard: SequenceShard | None = None,
    reuse_state: bool = False,
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
        mask: Padding and segments; ``None`` means neither. Padding tokens do not change the state.
            Packed segments do not see each other: ``state`` belongs to the first segment, and the
            returned state to the last.
        form: As in ``linear_attention``, like ``chunk_size``.
        impl: As in ``linear_attention``.
        state: Sums over the earlier tokens.
        return_state: Whether to return the state after the last token.
        chunk_size: See ``form``.
        shard: This rank's part of sequences that several ranks hold; not together with ``state``.
        reuse_state: As in ``linear_attention``.

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
    mask = _check("mlstm_attention", q, k, v, mask, state, shard)
    for name, x in (("log_forget", log_forget), ("log_input", log_input)):
        check_shape(name, x, tuple(k.shape[:3]), "B, Hkv, T", q.device)
    # The error of 16-bit sums over gates would grow with the number of tokens
    k, v, log_forget = (fill_padding(x, mask.padding) for x in (k, v, widen(log_forget)))
    log_input = fill_padding(widen(log_input), mask.padding, LOG_ZERO)
    values = v.to(torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32))
    if shard is not None:
        state = stabilized_state_from_earlier_ranks(k, values, log_forget, log_input, shard)
    if state is None:
        kv, z = empty_state(q, k, values)
        state = StabilizedState(kv, z, z.new_zeros(k.shape[:2]))
    refusal = ""
    if q.shape[2] == 1:
        gate, options = StepGate(None, log_input[:, :, 0], state.m), (False, 0.0, impl, reuse_state)
        earlier = LinearState(*state[:2])
        step, refusal = gated_step(q, k, v, log_forget, earlier, gate, *options)
        if step is not None:
            return _step_output(step, form, return_state)
    starts = None if mask.segment_ids is None else segment_starts(mask.segment_ids)[:, None]
    m = stabilizer(log_forget, log_input, state.m, starts)
    m_before = torch.cat([state.m.to(m.dtype).unsqueeze(2), m[:, :, :-1]], 2)[:, :, : m.shape[2]]
    log_decay = log_forget + (m_before - m)
    # Above 0 only by rounding and at the first token of a segment
    log_decay = log_decay - log_decay.detach().clamp(min=0)
    call = LinearCall(
        q,
        k * (log_input - m).exp().unsqueeze(-1),
        F.pad(values, (0, 1), value=1.0),
        log_decay,
        LinearState(torch.cat([state.kv, state.k.unsqueeze(-1)], -1), state.k),
        *(mask.segment_ids, form, chunk_size, return_state, True, v.dtype),
    )
    chosen, choice = select_linear("mlstm_attention", call, impl)
    out, last, *_ = chosen.run(call)
    lower_bound = (-m.clamp(min=LOWEST_STABILIZER)).exp()
    lower_bound = lower_bound.repeat_interleave(q.shape[1] // k.shape[1], 1)
    denominator = torch.maximum(out[..., -1:].abs(), lower_bound.unsqueeze(-1))
    out = divide(out[..., :-1], denominator, chosen.name, call)
    if last is not None:
        m_last = m[:, :, -1] if m.shape[2] else state.m
        last = StabilizedState(last.kv[..., :-1], last.k, m_last)
    return AttentionOutput(out.to(v.dtype), last, None, _with_form(choice, form, refusal))


def rwkv6_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    bonus: Tensor,
    mask: AttentionMask | None = None,
    normalize: bool = False,
    form: str = "chunk",
    impl: str = "auto",
    state: LinearState | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
    eps: float = 1e-6,
    shard: SequenceShard | None = None,
    reuse_state: bool = False,
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
        mask: Padding and segments, as in :func:`mlstm_attention`.
        normalize: Divide by the sum of weights plus ``eps``.
        form: As in ``linear_attention``, like ``chunk_size``.
        impl: As in ``linear_attention``.
        state: Sums over the earlier tokens, including the last one, as in ``linear_attention``.
        return_state: Whether to return the state after the last token.
        chunk_size: See ``form``.
        eps: Added to the sum of weights.
        shard: This rank's part of sequences that several ranks hold; not together with ``state``.
        reuse_state: As in ``linear_attention``.

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
    mask = _check("rwkv6_attention", q, k, v, mask, state, shard)
    check_shape("bonus", bonus, (k.shape[1], k.shape[3]), "Hkv, D", q.device)
    _check_decay_of_channels(log_decay, k)
    k, v, log_decay = (fill_padding(x, mask.padding) for x in (k, v, widen(log_decay)))
    values = v.to(torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32))
    if shard is not None:
        state = state_from_earlier_ranks(k, values, log_decay, shard)
    if state is None:
        state = empty_state(q, k, values)
    gate = StepGate(bonus)
    step, refusal = gated_step(q, k, v, log_decay, state, gate, normalize, eps, impl, reuse_state)
    if step is not None:
        return _step_output(step, form, return_state)
    kv, z = state
    if normalize:  # the output of one more value channel, of ones, is the sum of weights
        values = F.pad(values, (0, 1), value=1.0)
        kv = torch.cat([kv, z.unsqueeze(-1)], -1)
    k_before, v_before, decay_before = (shift_right(x) for x in (k, values, log_decay))
    if mask.segment_ids is not None:
        starts = segment_starts(mask.segment_ids)[:, None, :, None]
        k_before, decay_before = (x.masked_fill(starts, 0) for x in (k_before, decay_before))
    call = LinearCall(
        q,
        k_before,
        v_before,
        decay_before,
        LinearState(kv, z),
        *(mask.segment_ids, form, chunk_size, return_state, normalize, v.dtype),
    )
    chosen, choice = select_linear("rwkv6_attention", call, impl)
    from_state, last, *_ = chosen.run(call)
    grouped = q.unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, T, D]
    products = grouped * (bonus.to(k.dtype).unsqueeze(1) * k).unsqueeze(2)
    weight = products.sum(-1, keepdim=True, dtype=values.dtype)
    out = from_state + (weight * values.unsqueeze(2)).flatten(1, 2)
    if normalize:
        out = divide(out[..., :-1], out[..., -1:] + eps, chosen.name, call)
    if last is not None:
        last = add_last_token(last, k, values, log_decay, normalized=normalize)
    return AttentionOutput(out.to(v.dtype), last, None, _with_form(choice, form, refusal))


def matrix_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Callable[[int, int], Tensor],
    value_weights: Tensor | None = None,
    mask: AttentionMask | None = None,
    normalize: bool = False,
    impl: str = "auto",
    state: MatrixState | None = None,
    return_state: bool = False,
    eps: float = 1e-6,
    shard: SequenceShard | None = None,
) -> AttentionOutput:
    r"""Compute linear attention with one decay per pair of key and value channels.

    Computes :math:`S_t = e^{G_t} \odot S_{t-1} + k_t v_t^T` and :math:`o_t = q_t S_t` with a matrix
    :math:`G_t`; normalised, each value channel is divided by the same sum with ones for values. No
    chunk form exists for such a gate, so prefill and training run token by token too. Time
    O(T D E) in T steps; the backward pass stores the state of every step, O(T D E) of memory.
    Source: the general gate of Yang et al., 2024, arXiv:2312.06635, table 1; Mao, 2022,
    arXiv:2210.04243.

    Args:
        q: Queries after the feature map, ``[B, H, T, D]``.
        k: Keys after the feature map, ``[B, Hkv, T, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: ``log_decay(start, stop)`` returns G of these tokens, ``[B, Hkv, n, D, E]``, at
            most 0. It is a function because G of all tokens would take T matrices per head.
        value_weights: w, ``[B, Hkv, T, E]``: the weight of a token in each value channel, by which
            its value is multiplied, and its ones if normalised; all 1 when ``None``.
        mask: Padding and segments, as in :func:`mlstm_attention`.
        normalize: Divide by the sum of weights plus ``eps``.
        impl: ``"torch"``, ``"reference"`` or ``"auto"``.
        state: Sums over the earlier tokens.
        return_state: Whether to return the state after the last token.
        eps: Added to the sum of weights.
        shard: This rank's part of sequences that several ranks hold, in place of ``state``. Its
            tokens are computed twice: first for the state that they leave to later ranks.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; also ``state`` and ``impl``.

    Raises:
        ValueError: Shapes, dtypes or options are not supported; the message says which are.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 100, 8)
        >>> log_decays = -torch.rand(1, 4, 100, 8, 8)
        >>> decay = lambda start, stop: log_decays[:, :, start:stop]
        >>> attnzoo.ops.matrix_gated_attention(q, k, v, log_decay=decay).out.shape
        torch.Size([1, 4, 100, 8])
    """
    mask = _check("matrix_gated_attention", q, k, v, mask, state, shard)
    if value_weights is not None:
        check_shape("value_weights", value_weights, tuple(v.shape), "B, Hkv, T, E", q.device)
        value_weights = fill_padding(value_weights, mask.padding)
    k, v = (fill_padding(x, mask.padding) for x in (k, v))
    dtype = state_dtype(q, k, v)
    if state is None:
        empty = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=dtype, device=v.device)
        state = MatrixState(empty, empty)
    state = MatrixState(*(x.to(dtype) for x in state))
    call = MatrixGateInputs(
        q, k, v, log_decay, state, mask.padding, mask.segment_ids, normalize, eps, value_weights
    )
    if shard is not None:
        total = total_log_decay(call)
        earlier = matrix_state_from_earlier_ranks(state_of_tokens(call), total, shard)
        call = call._replace(state=MatrixState(*(x.to(dtype) for x in earlier)))
    chosen, choice = select("matrix_gated_attention", MATRIX_IMPLEMENTATIONS, call, impl)
    if is_empty_call(q, k):
        out, last = empty_output(q, k, v), call.state
    else:
        out, last = chosen.run(call)
    choice = _with_form(choice, "recurrent")
    return AttentionOutput(out, last if return_state else None, None, choice)


STATES = {
    "mlstm_attention": StabilizedState,
    "rwkv6_attention": LinearState,
    "matrix_gated_attention": MatrixState,
}


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None,
    state: LinearState | StabilizedState | MatrixState | None,
    shard: SequenceShard | None,
) -> AttentionMask:
    """Return the mask, or raise ``UnsupportedError`` if the op does not support the inputs."""
    check_qkv(q, k, v, mask)
    check_shard(shard, state)
    if state is not None:
        check_state(STATES[op], state, k, v)
    if mask is not None and not mask.causal:
        raise UnsupportedError(
            f"{op} is causal, got a mask that is not; pass AttentionMask(causal=True), or None."
        )
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"{op} needs queries and keys of the same tokens, got {q.shape[2]} queries and "
            f"{k.shape[2]} keys; pass earlier tokens as state=."
        )
    mask = AttentionMask(causal=True) if mask is None else mask
    check_mask_fields(op, mask, "segment_ids")
    padding = padding_if_any(mask.padding)
    return AttentionMask(causal=True, padding=padding, segment_ids=mask.segment_ids)


def _step_output(step: GatedResult, form: str, return_state: bool) -> AttentionOutput:
    """Return the output of one decoded token."""
    out, (kv, z), m, choice = step
    state = LinearState(kv, z) if m is None else StabilizedState(kv, z, m)
    return AttentionOutput(out, state if return_state else None, None, _with_form(choice, form))


def _with_form(choice: ImplChoice, form: str, refusal: str = "") -> ImplChoice:
    """Return a choice whose reason names the form, and why a kernel of one token is skipped."""
    reasons = (f"{form} form", choice.reason, refusal)
    return ImplChoice(choice.impl, "; ".join(filter(None, reasons)))


# -- implementations -------------------------------------------------------------------------------


MATRIX_IMPLEMENTATIONS: tuple[Implementation[MatrixGateInputs, MatrixGateResult], ...] = (
    Implementation(name="torch", run=run_torch, automatic="runs on every device"),
    Implementation(name="reference", run=run_reference),
)


def _check_decay_of_channels(log_decay: Tensor, k: Tensor) -> None:
    """Raise ``UnsupportedError`` if log decays are not one per key channel, or above 0."""
    check_shape("log_decay", log_decay, tuple(k.shape), "B, Hkv, T, D", k.device)
    check_is_log_decay(log_decay, k.shape[2])
