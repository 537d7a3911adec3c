r"""RWKV-6: each query reads the state before its own token enters it; causal.

One token is computed by the step that decoding takes, an op of its own in the registry of
implementations: ``rwkv6_step``.
Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, LinearState
from attnzoo.contract.validation import check_shape, check_size
from attnzoo.ops.features.functional import widen
from attnzoo.ops.linear.common import StepGate
from attnzoo.ops.linear.context_parallel import state_from_earlier_ranks
from attnzoo.ops.linear.gated_step import GatedInputs, check_gated, run_gated
from attnzoo.ops.linear.sums import register_reduction
from attnzoo.ops.linear.validation import check_is_log_decay
from attnzoo.ops.rwkv6.torch import run, run_step


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
    x = _inputs(
        *("rwkv6_attention", q, k, v, log_decay, bonus, sequences, normalize, state, return_state),
        *(chunk_size, eps, shard, reuse_state, slots),
    )
    return _attend("rwkv6_attention", x, impl)


def recurrent_rwkv6_attention(
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
    eps: float = 1e-6,
    shard: SequenceShard | None = None,
    reuse_state: bool = False,
    slots: Tensor | None = None,
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
    x = _inputs(
        *(op, q, k, v, log_decay, bonus, sequences, normalize, state, return_state),
        *(None, eps, shard, reuse_state, slots),
    )
    return _attend(op, x, impl)


def _inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    sequences: Sequences | None,
    normalize: bool,
    state: LinearState | None,
    return_state: bool,
    chunk_size: int | None,
    eps: float,
    shard: SequenceShard | None,
    reuse_state: bool,
    slots: Tensor | None,
) -> GatedInputs:
    """Return the checked inputs of a call."""
    check_gated(op, LinearState, q, k, v, sequences, slots, state, shard)
    check_shape("bonus", bonus, (k.shape[1], k.shape[3]), "Hkv, D", q.device)
    check_shape("log_decay", log_decay, tuple(k.shape), "B, Hkv, T, D", k.device)
    check_is_log_decay(log_decay, k.shape[2])
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)
    log_decay = widen(log_decay)
    if shard is not None:
        state = state_from_earlier_ranks(k, v, log_decay, shard, sequences)
    return GatedInputs(
        *(q, k, v, log_decay, state, StepGate(bonus), normalize, eps),
        sequences=sequences,
        return_state=return_state,
        chunk_size=chunk_size,
        reuse_state=reuse_state,
        slots=slots,
    )


def _attend(op: str, x: GatedInputs, impl: str) -> AttentionOutput:
    out, last, _, choice = run_gated(op, "rwkv6_step", x, impl)
    return AttentionOutput(out, last if x.return_state else None, None, choice)


register_reduction("rwkv6", run, run_step)
