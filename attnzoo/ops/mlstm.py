r"""mLSTM: linear attention whose tokens are weighed by an exponential, without overflow.

Computes :math:`C_t = f_t C_{t-1} + e^{i_t} k_t v_t^T`, :math:`n_t = f_t n_{t-1} + e^{i_t} k_t` and
:math:`o_t = q_t C_t / \max(|q_t n_t|, 1)`. The sums are held divided by :math:`e^{m_t}`, where
:math:`m_t = \max(\log f_t + m_{t-1}, i_t)` from 0 on; the denominator is then
:math:`\max(|q_t n_t|, e^{-m_t})`. Relative to m, decays and weights are at most 1, so it is the op
of :mod:`attnzoo.ops.linear` with a value of ones for the denominator. Cost as there.
Source: xLSTM, Beck et al., 2024, arXiv:2405.04517.
Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.context_parallel import Shard, earlier_stabilized
from attnzoo.ops.linear import linear_attention
from attnzoo.ops.linear_reference import empty_state
from attnzoo.state import AttentionOutput, LinearState, StabilizedState

NOTHING = -1e30  # the logarithm of no weight: finite, so that no difference of two is NaN
FAINTEST = -87.0  # exp(87) is still a number in float32


def mlstm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_forget: Tensor,
    log_input: Tensor,
    state: StabilizedState | None = None,
    return_state: bool = False,
    segment_ids: Tensor | None = None,
    shard: Shard | None = None,
    **options: Any,
) -> AttentionOutput:
    """Attend under exponential input gates; causal.

    Args:
        q: Queries after the feature map, ``[B, H, T, D]``.
        k: Keys after the feature map, ``[B, Hkv, T, D]``, zero in padding.
        v: Values, ``[B, Hkv, T, E]``.
        log_forget: log f, ``[B, Hkv, T]``, at most 0; 0 in padding.
        log_input: i, ``[B, Hkv, T]``, of any size; :data:`NOTHING` in padding.
        state: Sums over the earlier tokens.
        return_state: Whether to return the sums after the last token.
        segment_ids: ``[B, T]``: sequences packed into one row.
        shard: The share of the rows that these tokens are, in place of ``state``.
        **options: ``form``, ``impl`` and ``chunk_size``, as for ``linear_attention``.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; ``state`` where it was asked for.
    """
    values = v.to(torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32))
    if shard is not None:
        state = earlier_stabilized(k, values, log_forget, log_input, shard)
    if state is None:
        kv, z = empty_state(q, k, values)
        state = StabilizedState(kv, z, z.new_zeros(k.shape[:2]))
    begins = None
    if segment_ids is not None:
        begins = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))[:, None]
    m = stabilizer(log_forget, log_input, state.m, begins)
    before = torch.cat([state.m.to(m.dtype).unsqueeze(2), m[:, :, :-1]], 2)[:, :, : m.shape[2]]
    log_decay = log_forget + (before - m)
    log_decay = log_decay - log_decay.detach().clamp(min=0)  # rounding, and where a sequence begins
    kv = torch.cat([state.kv, state.k.unsqueeze(-1)], -1)
    out, last = linear_attention(
        q,
        k * (log_input - m).exp().unsqueeze(-1),
        F.pad(values, (0, 1), value=1.0),
        log_decay=log_decay,
        state=LinearState(kv, state.k),
        return_state=return_state,
        segment_ids=segment_ids,
        **options,
    )[:2]
    least = (-m.clamp(min=FAINTEST)).exp().repeat_interleave(q.shape[1] // k.shape[1], 1)
    out = out[..., :-1] / torch.maximum(out[..., -1:].abs(), least.unsqueeze(-1))
    if last is not None:
        top = m[:, :, -1] if m.shape[2] else state.m
        last = StabilizedState(last.kv[..., :-1], last.k, top)
    return AttentionOutput(out.to(v.dtype), last)


@torch.no_grad()
def stabilizer(
    log_forget: Tensor, log_input: Tensor, first: Tensor, begins: Tensor | None
) -> Tensor:
    r"""Return m of every token, ``[B, Hkv, T]``, in the dtype of the gates.

    The output does not depend on it, so it has no gradient. Each step is a function
    :math:`m \mapsto \max(a + m, b)`; two in a row are one of the same kind, so log2(T) rounds give
    all of them, without the difference of two long sums.

    Args:
        log_forget: ``[B, Hkv, T]``.
        log_input: ``[B, Hkv, T]``.
        first: m before the first token, ``[B, Hkv]``.
        begins: Where another packed sequence begins, with m = 0 before it, ``[B, 1, T]``.
    """
    a, b = log_forget.double(), log_input.double()
    if begins is not None:
        b = torch.where(begins, torch.maximum(a, b), b)
        a = a.masked_fill(begins, -torch.inf)
    span = 1
    while span < a.shape[2]:
        earlier_a = F.pad(a[:, :, :-span], (span, 0))
        earlier_b = F.pad(b[:, :, :-span], (span, 0), value=-torch.inf)
        a, b = earlier_a + a, torch.maximum(earlier_b + a, b)
        span *= 2
    return torch.maximum(first.double().unsqueeze(2) + a, b).to(log_forget.dtype)
