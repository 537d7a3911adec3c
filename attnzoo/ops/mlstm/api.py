r"""mLSTM: linear attention with exponential input gates, causal, in chunks or token by token.

One token is computed by the step that decoding takes, an op of its own in the registry of
implementations: ``mlstm_step``.
Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, LinearState, StabilizedState
from attnzoo.contract.validation import check_shape, check_size
from attnzoo.ops.features.functional import widen
from attnzoo.ops.linear.common import StepGate
from attnzoo.ops.linear.gated_step import GatedInputs, check_gated, run_gated
from attnzoo.ops.linear.sums import register_reduction
from attnzoo.ops.mlstm.context_parallel import state_from_earlier_ranks
from attnzoo.ops.mlstm.torch import run, run_step


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
        state = state_from_earlier_ranks(k, v, log_forget, log_input, shard, sequences)
    return GatedInputs(
        *(q, k, v, log_forget, None if state is None else LinearState(state.kv, state.k)),
        StepGate(None, log_input, None if state is None else state.m),
        sequences=sequences,
        return_state=return_state,
        chunk_size=chunk_size,
        reuse_state=reuse_state,
        slots=slots,
    )


def _attend(op: str, x: GatedInputs, impl: str) -> AttentionOutput:
    out, last, m, choice = run_gated(op, "mlstm_step", x, impl)
    state = None
    if x.return_state:
        assert last is not None
        assert m is not None
        state = StabilizedState(last.kv, last.k, m)
    return AttentionOutput(out, state, None, choice)


register_reduction("mlstm", run, run_step)
