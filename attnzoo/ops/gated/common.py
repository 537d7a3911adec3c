"""What gates with an op of their own share: checks, and one token of mLSTM and of RWKV-6.

That token is the step of decoding, an op of its own in the registry of implementations,
``gated_step``: O(D E).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.implementation import (
    CPP,
    TORCH,
    TRITON,
    Implementation,
    register_implementation,
    select_if_supported,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import (
    AttentionOutput,
    ImplChoice,
    LinearState,
    MatrixState,
    StabilizedState,
    check_slots,
    run_at_slots,
)
from attnzoo.contract.validation import check_qkv, check_sequences, check_shard
from attnzoo.errors import UnsupportedError
from attnzoo.ops.linear.common import LinearInputs, StepGate, check_state
from attnzoo.ops.linear.cpu.linear_step import kernel_reasons, run_step_cpp
from attnzoo.ops.linear.triton.run import triton_reasons
from attnzoo.runtime.gpu_verdicts import own_verdict
from attnzoo.runtime.kernel_calls import autocast_disabled, with_contiguous_states

LOWEST_STABILIZER = -87.0  # exp(87) is finite in float32

State = LinearState | StabilizedState | MatrixState
StepResult = tuple[Tensor, list[Tensor]]  # the output, and the next state with m of mLSTM


def check_gated(
    op: str,
    kind: type[State],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences | None,
    slots: Tensor | None,
    state: State | None,
    shard: SequenceShard | None,
) -> None:
    """Raise ``UnsupportedError`` if a causal op does not support the inputs."""
    check_qkv(q, k, v)
    check_shard(shard, state)
    batch = check_sequences(sequences, slots, q, k)
    if state is not None:
        check_state(kind, state, k, v, batch if slots is None else state[0].shape[0])
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"{op} needs queries and keys of the same tokens, got {q.shape[2]} queries and "
            f"{k.shape[2]} keys; pass earlier tokens as state=."
        )


def last_tokens(x: Tensor, sequences: Sequences | None) -> Tensor:
    """Return ``[B, H, T, X]`` at the last token of each sequence, ``[S, H, X]``; 0 if empty."""
    if sequences is None:
        return x[:, :, -1]
    found = x[0][:, sequences.ends.clamp(min=1) - 1].transpose(0, 1)
    return found.masked_fill((sequences.lengths == 0)[:, None, None], 0)


def attend_at_slots(
    attend: Callable[[Any], AttentionOutput], pool: Any, slots: Tensor
) -> AttentionOutput:
    """Return the output of one token of each sequence, with the next pool of states.

    Args:
        attend: Returns the output and the next states of rows from their states.
        pool: The states, a named tuple.
        slots: Row of each in the pool; -1 for a sequence without a token.
    """
    if not slots.shape[0]:
        return attend(type(pool)(*(x[:0] for x in pool)))._replace(state=pool)
    outputs = []

    def run(rows: list[Tensor]) -> tuple[Tensor, Any]:
        outputs.append(attend(type(pool)(*rows)))
        return outputs[0].out, outputs[0].state

    out, state = run_at_slots(run, pool, slots, in_place=False)
    return outputs[0]._replace(out=out, state=type(pool)(*state))


# -- one token of mLSTM or RWKV-6 ------------------------------------------------------------------


class GatedStep(NamedTuple):
    """One token of mLSTM or RWKV-6, checked; all tensors of the state have the dtype of the sums.

    ``log_input`` of the gate is that of the token, ``[B, Hkv, 1]``.
    """

    x: LinearInputs
    gate: StepGate

    @property
    def q(self) -> Tensor:
        """The query."""
        return self.x.q

    def state(self) -> list[Tensor]:
        """Return the tensors of the state, with m of mLSTM."""
        assert self.x.state is not None
        return [*self.x.state, *([] if self.gate.m is None else [self.gate.m])]


def run_gated_step(
    x: LinearInputs, gate: StepGate, impl: str
) -> tuple[Tensor, list[Tensor], ImplChoice] | None:
    """Return the output of one token, the next state with m, and the step; ``None`` if none can.

    Args:
        x: The call; its state may be ``None``, or of another dtype than the sums, as that of m.
        gate: That of the token, with m of the state.
        impl: As in ``linear_attention``.
    """
    if x.q.shape[2] != 1 or not x.q.shape[0] or x.sequences is not None:
        return None
    dtype = x.state_dtype
    if x.state is None:
        state = x.first_state()
        x = x._replace(state=state)
        if gate.log_input is not None:
            gate = gate._replace(m=state.k.new_zeros(state.k.shape[:2]))
    elif not all(y is None or y.dtype == dtype for y in (*x.state, gate.m)):
        state = LinearState(*(y.to(dtype) for y in x.state))
        x = x._replace(state=state, reuse_state=False)
        gate = gate._replace(m=None if gate.m is None else gate.m.to(dtype))
    step = GatedStep(x, gate)
    found = select_if_supported("gated_step", step, impl)
    if found is None:
        return None
    return *found[0].run(step), found[1]


def run_step_torch(step: GatedStep) -> StepResult:
    """Compute one token: a few operations of fixed shapes, which a CUDA graph can capture."""
    x, gate = step

    def run(rows: list[Tensor]) -> StepResult:
        kv, z, *m = rows
        here = x._replace(state=LinearState(kv, z), reuse_state=False)
        return _run_on_rows(GatedStep(here, gate._replace(m=m[0] if m else None)))

    with autocast_disabled(x.q.device):
        if x.slots is None:
            return _run_on_rows(step)
        return run_at_slots(run, step.state(), x.slots, in_place=x.reuse_state)


def _run_on_rows(step: GatedStep) -> StepResult:
    x, (bonus, log_input, m) = step
    assert x.log_decay is not None
    kv, z, *_ = step.state()
    dtype, log_decay, total = kv.dtype, x.log_decay, None
    q = x.q.to(dtype).unflatten(1, (x.k.shape[1], -1)).squeeze(3)  # [B, Hkv, G, D]
    k, v = x.k.to(dtype), x.v.to(dtype)
    if log_input is not None and m is not None:
        before = m.to(log_decay.dtype).unsqueeze(2)
        with torch.no_grad():
            m = torch.maximum(log_decay.double() + before, log_input.double())
            m = m.to(log_decay.dtype)
        log_decay = (log_decay + (before - m)).unsqueeze(3)  # above 0 by rounding, which cancels
        k = k * (log_input - m).exp().to(dtype).unsqueeze(3)
    decay = log_decay.to(dtype).exp()  # [B, Hkv, 1, 1 or D]
    if bonus is not None:  # the query reads the state before the token enters it
        weight = q @ (bonus.to(dtype).unsqueeze(1) * k).mT
        out = q @ kv + weight * v
        total = q @ z.unsqueeze(3) + weight + x.eps if x.normalize else None
        if log_decay.requires_grad:  # on which the output does not depend
            out = out + log_decay[:0].sum().to(dtype)
    if x.reuse_state:
        kv.mul_(decay.mT).addcmul_(k.mT, v), z.mul_(decay.squeeze(2)).add_(k.squeeze(2))
    else:
        kv, z = torch.addcmul(kv * decay.mT, k.mT, v), z * decay.squeeze(2) + k.squeeze(2)
    if m is not None:
        lowest = (-m.clamp(min=LOWEST_STABILIZER)).exp().to(dtype).unsqueeze(3)
        out, total = q @ kv, torch.maximum((q @ z.unsqueeze(3)).abs(), lowest)
    out = out if total is None else out / total
    out = out.flatten(1, 2).unsqueeze(2).to(x.v.dtype)
    return out, [kv, z] if m is None else [kv, z, m.squeeze(2)]


def _for_kernel(step: GatedStep, is_ready: Callable[[Tensor], bool]) -> GatedStep:
    """Return the inputs of a kernel, which overwrites m, and the state if it can be reused."""
    x, (bonus, log_input, m) = step
    states = step.state()
    if x.reuse_state and not all(map(is_ready, states)):
        x = x._replace(reuse_state=False)
    dtype = states[0].dtype
    bonus = None if bonus is None else bonus.to(dtype).contiguous()
    if log_input is not None:
        log_input = log_input[:, :, 0].to(dtype).contiguous()
    if m is not None and not x.reuse_state:
        m = m.clone(memory_format=torch.contiguous_format)
    return GatedStep(x, StepGate(bonus, log_input, m))


def _run_cpp(step: GatedStep) -> StepResult:
    x, gate = _for_kernel(step, lambda y: with_contiguous_states(y)[0] is y)
    out, last = run_step_cpp(x, gate)
    assert last is not None
    return out, [*last] if gate.m is None else [*last, gate.m]


def run_step_triton(step: GatedStep) -> StepResult:
    """Compute one token by the kernel of linear attention."""
    from attnzoo.ops.linear.triton.step import linear_triton_step_

    x, gate = _for_kernel(step, Tensor.is_contiguous)
    assert x.state is not None
    kv, z = x.state
    if x.slots is not None:
        check_slots(x.slots, len(kv))
    if not x.reuse_state:
        kv, z = (y.clone(memory_format=torch.contiguous_format) for y in x.state)
    options = ("identity", 1.0, 1.0, x.normalize, x.eps)
    out = linear_triton_step_(x.q, x.k, x.v, x.log_decay, kv, z, x.slots, *options, *gate)
    return out, [kv, z] if gate.m is None else [kv, z, gate.m]


def _cpp_reasons(step: GatedStep) -> list[str]:
    x, gate = step
    return kernel_reasons(x.v, x.q, x.k, x.log_decay, *(x.state or ()), *gate)


def _triton_reasons(step: GatedStep) -> list[str]:
    x, gate = step
    reasons = triton_reasons(x.q, x.k, x.v)
    tensors = (x.v, x.q, x.k, x.log_decay, *(x.state or ()), *gate)
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in tensors):
        reasons.append("the kernel of one token has no derivative")
    return reasons


def _triton_verdict(step: GatedStep) -> tuple[str, str]:
    return own_verdict(step.q.device, f"{'rwkv6' if step.gate.m is None else 'mlstm'}, one token")


register_implementation(
    Implementation(
        op="gated_step",
        **TRITON,
        run=run_step_triton,
        reasons=_triton_reasons,
        form="one token",
        verdict=_triton_verdict,
    ),
    Implementation(op="gated_step", **CPP, run=_run_cpp, reasons=_cpp_reasons, form="one token"),
    Implementation(op="gated_step", **TORCH, run=run_step_torch, form="one token"),
)
