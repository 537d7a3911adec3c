"""One token of mLSTM or RWKV-6 without gradients, in C++ or Triton: decoding.

Letters: B batch, H heads, Hkv key heads, D key size, E value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.states import ImplChoice, LinearState
from attnzoo.ops.linear.common import LinearInputs, StepGate, state_dtype
from attnzoo.ops.linear.cpu.linear_step import run_step, supports_step
from attnzoo.ops.linear.triton.run import triton_reasons
from attnzoo.ops.linear.triton.verdicts import kernel_verdict

ON_GPU = ("cuda",)
COMPILED = {"cpp": "one token, compiled for this CPU", "triton": "one token, compiled for this GPU"}


# The output, the next state, the next m, and the implementation
GatedResult = tuple[Tensor, LinearState, Tensor | None, ImplChoice]


def gated_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: LinearState,
    gate: StepGate,
    normalize: bool,
    eps: float,
    impl: str,
    reuse_state: bool,
) -> tuple[GatedResult | None, str]:
    """Return the output ``[B, H, 1, E]``, the next state, the next ``m``, and the implementation.

    ``None`` if no kernel supports the call with this ``impl``. If one does, but has not passed a
    check on the device, the second result says so.

    Args:
        q: Features of the query, ``[B, H, 1, D]``.
        k: Features of the key, ``[B, Hkv, 1, D]``.
        v: Value, ``[B, Hkv, 1, E]``.
        log_decay: ``[B, Hkv, 1]`` with mLSTM, ``[B, Hkv, 1, D]`` with RWKV-6.
        state: Sums over the earlier tokens.
        gate: Tensors of mLSTM or RWKV-6.
        normalize: Whether RWKV-6 divides by the sum of weights.
        eps: Added to that sum.
        impl: As in ``linear_attention``.
        reuse_state: Whether the next state, ``m`` included, may overwrite the given one.
    """
    if q.shape[2] != 1 or not q.shape[0]:
        return None, ""
    dtype = state_dtype(q, k, v)
    if any(x is not None and x.dtype != dtype for x in (*state, gate.m)):
        return None, ""
    bonus, log_input, m = (None if x is None else x.to(dtype).contiguous() for x in gate)
    reuse_state = reuse_state and not torch.is_grad_enabled()
    reuse_state = reuse_state and all(
        x is None or x.is_contiguous() for x in (state.kv, state.k, gate.m)
    )
    x = LinearInputs(
        *(q, k, v, log_decay, state, None, None, True, "recurrent", normalize, 1.0, eps, None),
        *("identity", 1.0),
        reuse_state=reuse_state,
    )
    found, reason = _implementation(x, StepGate(bonus, log_input, m), impl)
    if not found:
        return None, reason
    if m is not None and not reuse_state:
        m = m.clone()
    gate = StepGate(bonus, log_input, m)
    out, last = run_step(x, gate) if found == "cpp" else _run_triton(x, gate)
    return (out, last, m, ImplChoice(found, reason)), ""


def _implementation(x: LinearInputs, gate: StepGate, impl: str) -> tuple[str, str]:
    """Return the implementation of a call and why, or "" and why the kernels are skipped."""
    device, on_request = x.q.device.type, impl == "triton"
    if impl in ("auto", "cpp") and device not in ON_GPU:
        return ("cpp", COMPILED["cpp"]) if supports_step(x, gate) else ("", "")
    if not on_request and not (impl == "auto" and device in ON_GPU):
        return "", ""
    tensors = (x.q, x.k, x.v, x.log_decay, *x.state, *gate)
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in tensors):
        return "", ""
    if triton_reasons(x.q, x.k, x.v, form=x.form):
        return "", ""
    if on_request:
        return "triton", "named in the options"
    refusal, status = kernel_verdict("linear", x.log_decay, x.k, x.v)
    if refusal:
        return "", f"triton is skipped: {refusal}"
    return "triton", f"{COMPILED['triton']}; {status}"


def _run_triton(x: LinearInputs, gate: StepGate) -> tuple[Tensor, LinearState]:
    from attnzoo.ops.linear.triton.step import linear_triton_step_

    kv, z = (
        x.state
        if x.reuse_state
        else (y.clone(memory_format=torch.contiguous_format) for y in x.state)
    )
    options = ("identity", 1.0, 1.0, x.normalize, x.eps)
    out = linear_triton_step_(x.q, x.k, x.v, x.log_decay, kv, z, None, *options, *gate)
    return out, x.state if x.reuse_state else LinearState(kv, z)
