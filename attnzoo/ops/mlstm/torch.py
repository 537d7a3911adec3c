r"""mLSTM as linear attention with one more value channel, of ones, and its step in torch.

Source: xLSTM, Beck et al., 2024, arXiv:2405.04517.
Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.states import LinearState
from attnzoo.ops.linear.common import LinearInputs, state_dtype
from attnzoo.ops.linear.gated_step import GatedInputs, GatedResult
from attnzoo.ops.linear.step import step
from attnzoo.ops.linear.sums import ComputeSums, SumsCall, wide_values

LOWEST_STABILIZER = -87.0  # exp(87) is finite in float32


def run(x: GatedInputs, *, sums: ComputeSums) -> GatedResult:
    """Compute all tokens by linear attention, relative to the stabiliser."""
    _, log_input, initial = x.gate
    assert log_input is not None
    log_forget, tokens = x.log_decay, x.places()
    if tokens.inside is not None:
        log_forget = torch.where(tokens.inside, log_forget, 0)
        log_input = torch.where(tokens.inside, log_input, 0)
    before = None if initial is None else tokens.at_first(initial.to(log_forget.dtype))
    m = stabilizer(log_forget, log_input, tokens.first, before)
    start = torch.zeros_like(m) if before is None else before
    m_before = torch.where(tokens.first, start, F.pad(m[:, :, :-1], (1, 0)))
    log_decay = log_forget + (m_before - m)
    log_decay = log_decay - log_decay.detach().clamp(min=0)  # above 0 only by rounding
    state = None
    if x.state is not None:
        kv, z = x.state
        state = LinearState(torch.cat([kv, z.unsqueeze(-1)], -1), z)
    call = SumsCall(
        x.q,
        x.k * (log_input - m).exp().unsqueeze(-1),
        F.pad(wide_values(x), (0, 1), value=1.0),
        log_decay,
        *(state, x.sequences, x.return_state, x.chunk_size, True, x.v.dtype),
    )
    out, last, divide = sums(call)
    lower_bound = (-m.clamp(min=LOWEST_STABILIZER)).exp()
    lower_bound = lower_bound.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    denominator = torch.maximum(out[..., -1:].abs(), lower_bound.unsqueeze(-1))
    out = divide(out[..., :-1], denominator).to(x.v.dtype)
    if last is None:
        return out, None, None
    return out, LinearState(last.kv[..., :-1], last.k), tokens.last(m, initial)


def run_step(x: GatedInputs) -> GatedResult:
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
        m in the dtype of ``log_forget``.
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
    return b.to(log_forget.dtype)
