r"""Gated recurrences that are more than a decay: mLSTM, RWKV-6 and the full-matrix gate.

- :func:`mlstm_attention`: exponential input gates, stabilised.
- :func:`rwkv6_attention`: the query reads the state before its own token enters it.
- :func:`recurrent_mlstm_attention`, :func:`recurrent_rwkv6_attention`: the same, token by token.
- :func:`matrix_gated_attention`: one decay per pair of key and value channels.

A decay per head, token or key channel needs none of them:
:func:`attnzoo.ops.linear.api.linear_attention` takes it as ``log_decay``. All are causal.

mLSTM and RWKV-6 compute one token by the step that decoding takes, an op of its own in the registry
of implementations: ``mlstm_step`` and ``rwkv6_step``.
Letters: B batch, H heads, Hkv key heads, G = H / Hkv, T tokens, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import LOG_ZERO, SequenceShard
from attnzoo.contract.implementation import (
    Implementation,
    register_implementation,
    select,
    select_if_supported,
)
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import fill_padding, padding_if_any
from attnzoo.contract.states import (
    AttentionOutput,
    LinearState,
    MatrixState,
    StabilizedState,
)
from attnzoo.contract.validation import (
    check_mask_fields,
    check_qkv,
    check_shape,
    check_shard,
    check_size,
    empty_output,
    is_empty_call,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import widen
from attnzoo.ops.gated.context_parallel import (
    matrix_state_from_earlier_ranks,
    stabilized_state_from_earlier_ranks,
)
from attnzoo.ops.gated.matrix_gate import (
    MatrixGateInputs,
    run_torch,
    state_of_tokens,
    total_log_decay,
)
from attnzoo.ops.gated.mlstm import run_mlstm, run_mlstm_step
from attnzoo.ops.gated.reference import run_reference
from attnzoo.ops.gated.rwkv6 import run_rwkv6, run_rwkv6_step
from attnzoo.ops.gated.sums import chunk_sums, op_sums, sums_triton_reasons, triton_sums
from attnzoo.ops.linear.api import recurrent_linear_attention
from attnzoo.ops.linear.common import StepGate, empty_state, state_dtype
from attnzoo.ops.linear.context_parallel import state_from_earlier_ranks
from attnzoo.ops.linear.cpu.linear import cpp_reasons
from attnzoo.ops.linear.gated_step import (
    GatedInputs,
    GatedResult,
    gated_cpp_reasons,
    gated_triton_reasons,
    gated_triton_verdict,
    run_gated_step_cpp,
    run_gated_step_triton,
    run_gated_steps,
)
from attnzoo.ops.linear.triton.verdicts import kernel_verdict
from attnzoo.ops.linear.validation import check_is_log_decay, check_state


def mlstm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_forget: Tensor,
    log_input: Tensor,
    mask: AttentionMask | None = None,
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
        impl: As in ``linear_attention``.
        state: Sums over the earlier tokens.
        return_state: Whether to return the state after the last token.
        chunk_size: As in ``linear_attention``.
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
    x = _mlstm_inputs(
        *("mlstm_attention", q, k, v, log_forget, log_input, mask, state, chunk_size, shard),
        reuse_state,
    )
    return _attend("mlstm_attention", "mlstm_step", x, impl, return_state)


def recurrent_mlstm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_forget: Tensor,
    log_input: Tensor,
    mask: AttentionMask | None = None,
    impl: str = "auto",
    state: StabilizedState | None = None,
    return_state: bool = False,
    shard: SequenceShard | None = None,
    reuse_state: bool = False,
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
    x = _mlstm_inputs(*(op, q, k, v, log_forget, log_input, mask, state, None, shard, reuse_state))
    return _attend(op, "mlstm_step", x, impl, return_state)


def _mlstm_inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor,
    log_input: Tensor,
    mask: AttentionMask | None,
    state: StabilizedState | None,
    chunk_size: int | None,
    shard: SequenceShard | None,
    reuse_state: bool,
) -> GatedInputs:
    """Return the checked inputs of mLSTM, cleared at padding."""
    mask = _check(op, StabilizedState, q, k, v, mask, state, shard)
    for name, x in (("log_forget", log_forget), ("log_input", log_input)):
        check_shape(name, x, tuple(k.shape[:3]), "B, Hkv, T", q.device)
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)
    # The error of 16-bit sums over gates would grow with the number of tokens
    k, v, log_forget = (fill_padding(x, mask.padding) for x in (k, v, widen(log_forget)))
    log_input = fill_padding(widen(log_input), mask.padding, LOG_ZERO)
    if shard is not None:
        state = stabilized_state_from_earlier_ranks(k, v, log_forget, log_input, shard)
    if state is None:
        kv, z = empty_state(q, k, v)
        state = StabilizedState(kv, z, z.new_zeros(k.shape[:2]))
    sums, gate = LinearState(state.kv, state.k), StepGate(None, log_input, state.m)
    return GatedInputs(
        *(q, k, v, log_forget, sums, gate),
        segment_ids=mask.segment_ids,
        chunk_size=chunk_size,
        reuse_state=reuse_state,
    )


def rwkv6_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    bonus: Tensor,
    mask: AttentionMask | None = None,
    normalize: bool = False,
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
        impl: As in ``linear_attention``.
        state: Sums over the earlier tokens, including the last one, as in ``linear_attention``.
        return_state: Whether to return the state after the last token.
        chunk_size: As in ``linear_attention``.
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
    x = _rwkv6_inputs(
        *("rwkv6_attention", q, k, v, log_decay, bonus, mask, normalize, state, chunk_size, eps),
        *(shard, reuse_state),
    )
    return _attend("rwkv6_attention", "rwkv6_step", x, impl, return_state)


def recurrent_rwkv6_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    bonus: Tensor,
    mask: AttentionMask | None = None,
    normalize: bool = False,
    impl: str = "auto",
    state: LinearState | None = None,
    return_state: bool = False,
    eps: float = 1e-6,
    shard: SequenceShard | None = None,
    reuse_state: bool = False,
) -> AttentionOutput:
    """Compute :func:`rwkv6_attention` token by token; arguments and results as there.

    Raises:
        ValueError: Shapes, dtypes or options are not supported; the message says which are.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 10, 8)
        >>> log_decay, bonus = -torch.rand(1, 4, 10, 8), torch.rand(4, 8)
        >>> steps = attnzoo.ops.recurrent_rwkv6_attention(q, k, v, log_decay=log_decay, bonus=bonus)
        >>> steps.out.shape
        torch.Size([1, 4, 10, 8])
    """
    op = "recurrent_rwkv6_attention"
    x = _rwkv6_inputs(
        *(op, q, k, v, log_decay, bonus, mask, normalize, state, None, eps, shard, reuse_state)
    )
    return _attend(op, "rwkv6_step", x, impl, return_state)


def _rwkv6_inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    mask: AttentionMask | None,
    normalize: bool,
    state: LinearState | None,
    chunk_size: int | None,
    eps: float,
    shard: SequenceShard | None,
    reuse_state: bool,
) -> GatedInputs:
    """Return the checked inputs of RWKV-6, cleared at padding."""
    mask = _check(op, LinearState, q, k, v, mask, state, shard)
    check_shape("bonus", bonus, (k.shape[1], k.shape[3]), "Hkv, D", q.device)
    _check_decay_of_channels(log_decay, k)
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)
    k, v, log_decay = (fill_padding(x, mask.padding) for x in (k, v, widen(log_decay)))
    if shard is not None:
        state = state_from_earlier_ranks(k, v, log_decay, shard)
    if state is None:
        state = empty_state(q, k, v)
    return GatedInputs(
        *(q, k, v, log_decay, state, StepGate(bonus), normalize, eps),
        segment_ids=mask.segment_ids,
        chunk_size=chunk_size,
        reuse_state=reuse_state,
    )


def _attend(op: str, step: str, x: GatedInputs, impl: str, return_state: bool) -> AttentionOutput:
    """Run the step if the call is one token that a step supports, else the op."""
    found = select_if_supported(step, x, impl) if x.q.shape[2] == 1 and x.q.shape[0] else None
    chosen, choice = found or select(op, x, impl)
    out, last, m = chosen.run(x)
    if not return_state:
        return AttentionOutput(out, None, None, choice)
    state = last if m is None else StabilizedState(last.kv, last.k, m)
    return AttentionOutput(out, state, None, choice)


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
    mask = _check("matrix_gated_attention", MatrixState, q, k, v, mask, state, shard)
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
    chosen, choice = select("matrix_gated_attention", call, impl)
    if is_empty_call(q, k):
        out, last = empty_output(q, k, v), call.state
    else:
        out, last = chosen.run(call)
    return AttentionOutput(out, last if return_state else None, None, choice)


def _check(
    op: str,
    kind: type[LinearState] | type[StabilizedState] | type[MatrixState],
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
        check_state(kind, state, k, v)
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


def _check_decay_of_channels(log_decay: Tensor, k: Tensor) -> None:
    """Raise ``UnsupportedError`` if log decays are not one per key channel, or above 0."""
    check_shape("log_decay", log_decay, tuple(k.shape), "B, Hkv, T, D", k.device)
    check_is_log_decay(log_decay, k.shape[2])


# -- implementations -------------------------------------------------------------------------------


def _triton_verdict(x: GatedInputs) -> tuple[str, str]:
    """The check of the window hybrid covers sums without a division."""
    has_ones = x.normalize or x.gate.m is not None
    return kernel_verdict("hybrid" if has_ones else "linear", x.log_decay, x.k, x.v)


def _cpp_reasons(x: GatedInputs) -> list[str]:
    return cpp_reasons(chunk_size=x.chunk_size)


def _register_chunks(name: str, run: Callable[..., GatedResult]) -> None:
    """Register the implementations of an op in chunks, and the reference token by token."""
    op, recurrent = f"{name}_attention", f"recurrent_{name}_attention"
    register_implementation(
        Implementation(
            op=op,
            name="triton",
            devices=("cuda",),
            interpreted_on=("cpu",),
            run=partial(run, sums=triton_sums),
            reasons=sums_triton_reasons,
            form="chunk form",
            automatic="compiled for this GPU",
            verdict=_triton_verdict,
        ),
        Implementation(
            op=op,
            name="cpp",
            devices=("cpu",),
            run=partial(run, sums=partial(chunk_sums, impl="cpp")),
            reasons=_cpp_reasons,
            form="chunk form",
            automatic="compiled for this CPU",
        ),
        Implementation(
            op=op,
            name="torch",
            run=partial(run, sums=partial(chunk_sums, impl="torch")),
            form="chunk form",
            automatic="runs on every device",
        ),
        Implementation(
            op=op,
            name="reference",
            form="chunk form",
            run=partial(run, sums=partial(chunk_sums, impl="reference")),
        ),
        Implementation(
            op=recurrent,
            name="reference",
            run=partial(run, sums=partial(_recurrent_sums, impl="reference")),
        ),
    )


def _register_steps(name: str, run_step: Callable[[GatedInputs], GatedResult]) -> None:
    """Register the implementations of one token, and token by token."""
    recurrent = f"recurrent_{name}_attention"
    for step in (
        Implementation(
            op=f"{name}_step",
            name="triton",
            devices=("cuda",),
            interpreted_on=("cpu",),
            run=run_gated_step_triton,
            reasons=gated_triton_reasons,
            form="one token",
            automatic="compiled for this GPU",
            verdict=gated_triton_verdict,
        ),
        Implementation(
            op=f"{name}_step",
            name="cpp",
            devices=("cpu",),
            run=run_gated_step_cpp,
            reasons=gated_cpp_reasons,
            form="one token",
            automatic="compiled for this CPU",
        ),
        Implementation(
            op=f"{name}_step",
            name="torch",
            run=run_step,
            form="one token",
            automatic="runs on every device",
        ),
    ):
        steps = replace(
            step,
            op=recurrent,
            run=partial(run_gated_steps, step=step.run),
            form="token by token",
        )
        register_implementation(step, steps)


_recurrent_sums = partial(op_sums, op=recurrent_linear_attention)
_register_chunks("mlstm", run_mlstm)
_register_chunks("rwkv6", run_rwkv6)
_register_steps("mlstm", run_mlstm_step)
_register_steps("rwkv6", run_rwkv6_step)
register_implementation(
    Implementation(
        op="matrix_gated_attention",
        name="torch",
        run=run_torch,
        form="token by token",
        automatic="runs on every device",
    ),
    Implementation(
        op="matrix_gated_attention", name="reference", form="token by token", run=run_reference
    ),
)
