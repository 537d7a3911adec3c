r"""mLSTM as linear attention with one more value channel, of ones, and its step in torch.

Source: xLSTM, Beck et al., 2024, arXiv:2405.04517.
Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.states import LinearState
from attnzoo.ops.gated.sums import ComputeSums, SumsCall, wide_values
from attnzoo.ops.linear.common import LinearInputs, state_dtype
from attnzoo.ops.linear.gated_step import GatedInputs, GatedResult
from attnzoo.ops.linear.step import step

LOWEST_STABILIZER = -87.0  # exp(87) is finite in float32


def run_mlstm(x: GatedInputs, *, sums: ComputeSums) -> GatedResult:
    """Compute all tokens by linear attention, relative to the stabiliser."""
    _, log_input, initial = x.gate
    assert log_input is not None
    assert initial is not None
    starts = None if x.segment_ids is None else segment_starts(x.segment_ids)[:, None]
    m = stabilizer(x.log_decay, log_input, initial, starts)
    m_before = torch.cat([initial.to(m.dtype).unsqueeze(2), m[:, :, :-1]], 2)[:, :, : m.shape[2]]
    log_decay = x.log_decay + (m_before - m)
    # Above 0 only by rounding and at the first token of a segment
    log_decay = log_decay - log_decay.detach().clamp(min=0)
    kv, z = x.state
    call = SumsCall(
        x.q,
        x.k * (log_input - m).exp().unsqueeze(-1),
        F.pad(wide_values(x), (0, 1), value=1.0),
        log_decay,
        LinearState(torch.cat([kv, z.unsqueeze(-1)], -1), z),
        *(x.segment_ids, x.chunk_size, True, x.v.dtype),
    )
    out, last, divide = sums(call)
    lower_bound = (-m.clamp(min=LOWEST_STABILIZER)).exp()
    lower_bound = lower_bound.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    denominator = torch.maximum(out[..., -1:].abs(), lower_bound.unsqueeze(-1))
    out = divide(out[..., :-1], denominator).to(x.v.dtype)
    m_last = m[:, :, -1] if m.shape[2] else initial
    return out, LinearState(last.kv[..., :-1], last.k), m_last


def run_mlstm_step(x: GatedInputs) -> GatedResult:
    """Compute one token: the step of linear attention, and a quotient."""
    _, log_input, initial = x.gate
    assert log_input is not None
    assert initial is not None
    dtype = state_dtype(x.q, x.k, x.v)
    forget, write = x.log_decay, log_input  # [B, Hkv, 1]
    before = initial.to(forget.dtype).unsqueeze(2)
    with torch.no_grad():
        m = torch.maximum(forget.double() + before, write.double()).to(forget.dtype)
    log_decay = forget + (before - m)
    log_decay = log_decay - log_decay.detach().clamp(min=0)  # above 0 only by rounding
    key = x.k * (write - m).exp().unsqueeze(-1)
    state = LinearState(*(y.to(dtype) for y in x.state))
    inputs = (x.q, key, wide_values(x), log_decay, state, None, None, True, False, 1.0, 0.0, None)
    reuse = x.reuse_state and not torch.is_grad_enabled()
    out, last = step(LinearInputs(*inputs, "identity", 1.0, reuse_state=reuse))
    queries = x.q.to(dtype).unflatten(1, (x.k.shape[1], -1))  # [B, Hkv, G, 1, D]
    weight = (queries @ last.k[:, :, None, :, None]).flatten(1, 2)  # [B, H, 1, 1]
    lower_bound = (-m.clamp(min=LOWEST_STABILIZER)).exp()
    lower_bound = lower_bound.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    out = out / torch.maximum(weight.abs(), lower_bound.unsqueeze(-1))
    return out.to(x.v.dtype), last, m.squeeze(2)


@torch.no_grad()
def stabilizer(
    log_forget: Tensor, log_input: Tensor, initial: Tensor, starts: Tensor | None
) -> Tensor:
    r"""Return :math:`m_t = \max(\log f_t + m_{t-1}, i_t)`, ``[B, Hkv, T]``, as an associative scan.

    The output of mLSTM does not depend on m, so it has no gradient. Each step is a function
    :math:`m \mapsto \max(a + m, b)`. Two such functions compose to one of the same kind, so log2(T)
    rounds compute all tokens, without a difference of two long sums.

    Args:
        log_forget: log f, ``[B, Hkv, T]``.
        log_input: i, ``[B, Hkv, T]``.
        initial: m before the first token, ``[B, Hkv]``.
        starts: Where a packed segment starts, with m = 0 before it, ``[B, 1, T]`` bool.

    Returns:
        m in the dtype of ``log_forget``.
    """
    a, b = log_forget.double(), log_input.double()
    if starts is not None:
        b = torch.where(starts, torch.maximum(a, b), b)
        a = a.masked_fill(starts, -torch.inf)
    offset = 1
    while offset < a.shape[2]:
        earlier_a = F.pad(a[:, :, :-offset], (offset, 0))
        earlier_b = F.pad(b[:, :, :-offset], (offset, 0), value=-torch.inf)
        a, b = earlier_a + a, torch.maximum(earlier_b + a, b)
        offset *= 2
    return torch.maximum(initial.double().unsqueeze(2) + a, b).to(log_forget.dtype)


def segment_starts(segment_ids: Tensor) -> Tensor:
    """Return the tokens at which another segment starts, ``[B, T]`` bool; false at the first."""
    return F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
