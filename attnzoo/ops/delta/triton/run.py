"""The delta rule in Triton: which calls the kernels support, and the call itself."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.states import DeltaState, check_slots, run_on_slots
from attnzoo.errors import UnsupportedError
from attnzoo.ops.delta.common import DeltaInputs, Result, normalized
from attnzoo.ops.linear.triton.run import round_features
from attnzoo.ops.linear.triton.run import triton_reasons as linear_reasons
from attnzoo.ops.linear.triton.verdicts import kernel_verdict
from attnzoo.runtime.kernel_calls import check_reverse_mode


def triton_reasons(x: DeltaInputs) -> list[str]:
    """Return every reason why the kernels do not support a call."""
    reasons = linear_reasons(x.q, x.k, x.v, chunk_size=x.chunk_size)
    return reasons


def triton_verdict(x: DeltaInputs) -> tuple[str, str]:
    """Return ``kernel_verdict`` of the kernels for a call."""
    return kernel_verdict("delta", x.log_decay, x.k, x.v)


def run_triton(x: DeltaInputs) -> Result:
    """Run the kernels of a sequence."""
    from attnzoo.ops.delta.triton.custom_op import delta_triton

    x = normalized(x)
    tensors = _tensors(x)
    check_reverse_mode("delta_attention", *tensors)
    if x.scale == 0 and _needs_grad(tensors):  # the backward pass divides by it
        raise UnsupportedError(
            "the backward pass of impl='triton' needs a scale other than 0, got 0; impl='torch' "
            "supports any."
        )
    bounds = (None, None) if x.sequences is None else (x.sequences.starts, x.sequences.lengths)
    out, last, _, _ = delta_triton(*tensors, *bounds, x.scale, x.return_state)
    return out, DeltaState(last) if x.return_state else None


def run_step_triton(x: DeltaInputs) -> Result:
    """Run the kernel of one token; with gradients, those of a sequence."""
    from attnzoo.ops.delta.triton.step import delta_triton_step, delta_triton_step_

    x = normalized(x)
    state = x.first_state()
    if x.slots is not None:
        check_slots(x.slots, state.kv.shape[0])
    if x.slots is not None and not state.kv.is_contiguous():
        return run_on_slots(x, run_step_triton)
    tensors = _tensors(x._replace(state=state))
    if _needs_grad(tensors):
        return run_on_slots(x, run_triton)
    check_reverse_mode("delta_attention", *tensors)
    if x.reuse_state and state.kv.is_contiguous():
        return delta_triton_step_(*tensors, x.slots, x.scale), state
    out, last = delta_triton_step(*tensors, x.slots, x.scale)
    return out, DeltaState(last)


def _tensors(x: DeltaInputs) -> tuple[Tensor | None, ...]:
    q, k = round_features(x.q, x.v), round_features(x.k, x.v)
    return q, k, x.v, x.beta, x.log_decay, None if x.state is None else x.state.kv


def _needs_grad(tensors: tuple[Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
