"""One token of mLSTM or RWKV-6 without gradients, in C++ or Triton: decoding.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.states import LinearState
from attnzoo.contract.validation import empty_output, is_empty_call
from attnzoo.ops.features.functional import widen
from attnzoo.ops.linear.common import LinearInputs, StepGate, state_dtype
from attnzoo.ops.linear.cpu.linear_step import kernel_reasons, run_step_cpp
from attnzoo.ops.linear.triton.run import triton_reasons
from attnzoo.ops.linear.triton.verdicts import kernel_verdict

# The output, the next state, and the next m of mLSTM
GatedResult = tuple[Tensor, LinearState, Tensor | None]


class GatedInputs(NamedTuple):
    """Inputs of mLSTM or RWKV-6, checked; keys, values and gates are cleared at padding."""

    q: Tensor  # features, [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    log_decay: Tensor  # mLSTM, [B, Hkv, T]; RWKV-6, [B, Hkv, T, D]
    state: LinearState  # sums over the earlier tokens
    gate: StepGate  # log_input of mLSTM is that of all tokens, [B, Hkv, T]
    normalize: bool = False  # whether RWKV-6 divides by the sum of weights
    eps: float = 0.0  # added to that sum
    segment_ids: Tensor | None = None  # [B, T]
    chunk_size: int | None = None
    reuse_state: bool = False  # whether the next state, m included, may overwrite the given one

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors of the call but for the values."""
        return (self.q, self.k, self.log_decay, *self.state, *self.gate)


def gated_cpp_reasons(x: GatedInputs) -> list[str]:
    """Return why :func:`run_gated_step_cpp` does not compute a call."""
    return _state_reasons(x) or kernel_reasons(x.v, *x.tensors())


def gated_triton_reasons(x: GatedInputs) -> list[str]:
    """Return why :func:`run_gated_step_triton` does not compute a call."""
    reasons = _state_reasons(x) + triton_reasons(x.q, x.k, x.v)
    tensors = (x.v, *x.tensors())
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in tensors):
        reasons.append("the kernel of one token has no derivative")
    return reasons


def gated_triton_verdict(x: GatedInputs) -> tuple[str, str]:
    """Return ``kernel_verdict`` of the kernels of linear attention for a call."""
    return kernel_verdict("linear", x.log_decay, x.k, x.v)


def _state_reasons(x: GatedInputs) -> list[str]:
    """Return whether the state has another dtype than the sums."""
    dtype = state_dtype(x.q, x.k, x.v)
    state = (*x.state, x.gate.m)
    if all(y is None or y.dtype == dtype for y in state):
        return []
    return [f"the state is {x.state.kv.dtype} (the sums are {dtype})"]


def run_gated_step_cpp(x: GatedInputs) -> GatedResult:
    """Run the C++ kernel."""
    y, gate = _step_of(x)
    out, last = run_step_cpp(y, gate)
    return out, last, gate.m


def run_gated_step_triton(x: GatedInputs) -> GatedResult:
    """Run the Triton kernel."""
    from attnzoo.ops.linear.triton.step import linear_triton_step_

    y, gate = _step_of(x)
    kv, z = y.state
    if not y.reuse_state:
        kv, z = (t.clone(memory_format=torch.contiguous_format) for t in y.state)
    options = ("identity", 1.0, 1.0, y.normalize, y.eps)
    out = linear_triton_step_(y.q, y.k, y.v, y.log_decay, kv, z, None, *options, *gate)
    return out, y.state if y.reuse_state else LinearState(kv, z), gate.m


def _step_of(x: GatedInputs) -> tuple[LinearInputs, StepGate]:
    """Return the inputs of the kernels, and gates of one token, of which they overwrite ``m``."""
    dtype, (bonus, log_input, m) = x.state.kv.dtype, x.gate
    reuse = x.reuse_state and not torch.is_grad_enabled()
    reuse = reuse and all(y is None or y.is_contiguous() for y in (*x.state, m))
    if bonus is not None:
        bonus = bonus.to(dtype).contiguous()
    if log_input is not None:
        log_input = log_input[:, :, 0].to(dtype).contiguous()
    if m is not None and not reuse:
        m = m.clone(memory_format=torch.contiguous_format)
    y = LinearInputs(
        *(x.q, x.k, x.v, x.log_decay, x.state, None, None, True, x.normalize, 1.0, x.eps, None),
        *("identity", 1.0),
        reuse_state=reuse,
    )
    return y, StepGate(bonus, log_input, m)


def run_gated_steps(x: GatedInputs, step: Callable[[GatedInputs], GatedResult]) -> GatedResult:
    """Compute all tokens, one step after another, with the implementation of one token."""
    outs, state, m = [], x.state, x.gate.m
    bonus = None if x.gate.bonus is None else widen(x.gate.bonus)  # its gradient sums all tokens
    if is_empty_call(x.q, x.k):
        return empty_output(x.q, x.k, x.v), state, m
    for t in range(x.k.shape[2]):
        if x.segment_ids is not None and t > 0:
            kept = x.segment_ids[:, t - 1] == x.segment_ids[:, t]
            state = LinearState(*(_reset(y, kept) for y in state))
            m = None if m is None else _reset(m, kept)
        now = slice(t, t + 1)
        log_input = None if x.gate.log_input is None else x.gate.log_input[:, :, now]
        q, k, v, log_decay = (y[:, :, now] for y in (x.q, x.k, x.v, x.log_decay))
        gate = StepGate(bonus, log_input, m)
        out, state, m = step(
            x._replace(q=q, k=k, v=v, log_decay=log_decay, state=state, gate=gate, segment_ids=None)
        )
        outs.append(out)
    return torch.cat(outs, 2), state, m


def _reset(x: Tensor, kept: Tensor) -> Tensor:
    """Set a part of the state to zero in the rows ``[B]`` that are not kept."""
    return x * kept.view(-1, *(1,) * (x.dim() - 1)).to(x.dtype)
