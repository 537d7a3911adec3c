r"""RWKV-6: each query reads the state before its own token enters it; causal.

One token is computed by the step that decoding takes, an op of its own in the registry of
implementations: ``rwkv6_step``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, LinearState
from attnzoo.contract.validation import check_shape, check_size
from attnzoo.ops.features.functional import widen
from attnzoo.ops.gated.common import GatedInputs, GatedResult, Places, check_gated, run_gated
from attnzoo.ops.gated.sums import ComputeSums, SumsCall, register_reduction, wide_values
from attnzoo.ops.linear.common import StepGate, state_dtype
from attnzoo.ops.linear.context_parallel import state_from_earlier_ranks
from attnzoo.ops.linear.validation import check_is_log_decay


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


# -- implementations -------------------------------------------------------------------------------


def _run(x: GatedInputs, *, sums: ComputeSums) -> GatedResult:
    """Compute all tokens by linear attention to the tokens before each, and add its own."""
    tokens = x.places()
    if tokens.inside is not None:
        inside = tokens.inside[..., None]
        q, k, v, log_decay = (torch.where(inside, y, 0) for y in (x.q, x.k, x.v, x.log_decay))
        x = x._replace(q=q, k=k, v=v, log_decay=log_decay)
    k, log_decay, values, state = x.k, x.log_decay, wide_values(x), x.state
    if x.normalize:  # the output of one more value channel, of ones, is the sum of weights
        values = F.pad(values, (0, 1), value=1.0)
        if state is not None:
            state = LinearState(torch.cat([state.kv, state.k.unsqueeze(-1)], -1), state.k)
    k_before, v_before, decay_before = (_shift_right(y) for y in (k, values, log_decay))
    if x.sequences is not None:  # a row begins with zeros already
        first = tokens.first[..., None]
        k_before, decay_before = (torch.where(first, 0, y) for y in (k_before, decay_before))
    call = SumsCall(
        x.q,
        k_before,
        v_before,
        decay_before,
        *(state, x.sequences, x.return_state, x.chunk_size, x.normalize, x.v.dtype),
    )
    from_state, last, divide = sums(call)
    weight = _own_weight(x, values.dtype)
    out = from_state + (weight * values.unsqueeze(2)).flatten(1, 2)
    if x.normalize:
        out = divide(out[..., :-1], out[..., -1:] + x.eps)
    if last is not None:
        last = _add_last_token(last, k, values, log_decay, tokens, normalized=x.normalize)
    return out.to(x.v.dtype), last, None


def _run_step(x: GatedInputs) -> GatedResult:
    """Compute one token, which reads the state and then enters it."""
    dtype = state_dtype(x.q, x.k, x.v)
    assert x.state is not None
    kv, z = (y.to(dtype) for y in x.state)
    k, v = x.k.to(dtype), x.v.to(dtype)
    queries = x.q.to(dtype).unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, 1, D]
    assert x.gate.bonus is not None
    own_k = x.gate.bonus.to(dtype).unsqueeze(1) * k
    weight = (queries * own_k.unsqueeze(2)).sum(-1, keepdim=True)
    out = queries @ kv.unsqueeze(2) + weight * v.unsqueeze(2)
    if x.normalize:
        out = out / (queries @ z[:, :, None, :, None] + weight + x.eps)
    if x.log_decay.requires_grad:  # the state before the token does not depend on its decay
        out = out + x.log_decay[:0].sum().to(dtype)
    decay = x.log_decay.to(dtype).exp()
    if x.reuse_state and not torch.is_grad_enabled():
        kv.mul_(decay.mT).addcmul_(k.mT, v), z.mul_(decay.squeeze(2)).add_(k.squeeze(2))
    else:
        kv = torch.addcmul(kv * decay.mT, k.mT, v)
        z = z * decay.squeeze(2) + k.squeeze(2)
    return out.flatten(1, 2).to(x.v.dtype), LinearState(kv, z), None


def _own_weight(x: GatedInputs, dtype: torch.dtype) -> Tensor:
    """Return the weight of each token's own value, ``[B, Hkv, G, T, 1]``."""
    bonus, k = x.gate.bonus, x.k
    assert bonus is not None
    weighted = bonus.to(dtype).unsqueeze(1) * k.to(dtype)
    queries = x.q.to(dtype).unflatten(1, (k.shape[1], -1))
    weight: Tensor = (queries * weighted.unsqueeze(2)).sum(-1, keepdim=True)
    return weight


def _shift_right(x: Tensor) -> Tensor:
    """Return ``[B, H, T, X]`` shifted right by one token, with zeros for the first token."""
    return F.pad(x[:, :, :-1], (0, 0, 1, 0)) if x.shape[2] else x


def _add_last_token(
    state: LinearState,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    tokens: Places,
    *,
    normalized: bool,
) -> LinearState:
    """Return the state with the last token, which the shift leaves out.

    Args:
        state: Sums over the tokens before the last.
        k: ``[B, Hkv, T, D]``.
        v: ``[B, Hkv, T, E]``; ``[B, Hkv, T, E + 1]`` if normalised, with ones in the last channel.
        log_decay: ``[B, Hkv, T, D]``.
        tokens: The places of sequences among the tokens.
        normalized: Whether values and ``state.kv`` have the channel of ones, which is dropped.
    """
    kv, z = state
    if k.shape[2]:
        decay, key, value = tokens.last(log_decay).exp(), tokens.last(k), tokens.last(v)
        kv = kv * decay.unsqueeze(-1) + key.unsqueeze(-1) * value.unsqueeze(2)
        z = z * decay + key
    return LinearState(kv[..., :-1] if normalized else kv, z)


register_reduction("rwkv6", _run, _run_step)
