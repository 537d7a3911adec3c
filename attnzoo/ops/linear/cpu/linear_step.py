"""One token of linear attention in C++, without gradients: decoding.

Other letters: P states of a pool.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from attnzoo.contract.states import LinearState, refuse_slots
from attnzoo.ops.features.functional import FIXED, SCALED
from attnzoo.ops.linear.common import LinearInputs, Result, StepGate, map_inputs
from attnzoo.ops.linear.cpu.linear import MAP_NAMES, map_numbers
from attnzoo.runtime import cpp
from attnzoo.runtime.cpp.layout import Function
from attnzoo.runtime.kernel_calls import (
    DTYPE_NUMBERS,
    autocast_disabled,
    is_plain_call,
    with_contiguous_rows,
    with_contiguous_states,
)

STEPS = {torch.float32: "linear_step_float", torch.float64: "linear_step_double"}
NO_GATE = StepGate()
NOT_PLAIN = "the kernel of one token has no derivative, and is not traced"
NO_CHANNELS = "values have no channels"


class _Step(ctypes.Structure):
    """The arguments of the C++ functions; ``Step`` of ``linear_step.cpp``."""

    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads batch states heads groups key_size value_size decays normalize q_map k_map "
            "q_type k_type v_type decay_type "
            "q_row q_head k_row k_head v_row v_head decay_row decay_head kv_row z_row m_row",
        ),
        *cpp.fields(ctypes.c_double, "map_scale scale eps"),
        *cpp.fields(
            ctypes.c_void_p,
            "q k v log_decay kv z out next_kv next_z bonus log_input m next_m slots",
        ),
    ]


LINEAR_STEP = cpp.Source(
    Path(__file__).with_name("linear_step.cpp"),
    dict.fromkeys(STEPS.values(), Function((_Step,), ctypes.c_int64)) | MAP_NAMES,
)


def step_reasons(x: LinearInputs) -> list[str]:
    """Return why :func:`run_step_cpp` does not compute a call; an empty list if it does."""
    v, weights, state = x.v, x.map_weights or (), x.state or ()
    tensors = (x.q, x.k, v, x.log_decay, *state, *weights)
    if type(v) is not Tensor or not is_plain_call(*tensors):
        return [NOT_PLAIN]
    reason = cpp.unavailable_reason(LINEAR_STEP) if v.shape[3] else NO_CHANNELS
    return [reason] if reason else []


def kernel_reasons(v: Tensor, *others: Tensor | None) -> list[str]:
    """Return why the kernel does not read the values and other tensors of a gated call."""
    if type(v) is not Tensor or not is_plain_call(v, *others):
        return [NOT_PLAIN]
    reason = cpp.unavailable_reason(LINEAR_STEP) if v.shape[3] else NO_CHANNELS
    return [reason] if reason else []


def run_step_cpp(x: LinearInputs, gate: StepGate = NO_GATE) -> Result:
    """Compute one token from the state, in the place of the state if ``x.reuse_state``.

    The kernel computes the features, unless the map is learned. It overwrites ``gate.m``. With
    ``x.slots``, the state and ``gate.m`` are pools, ``[P, ...]``.

    Raises:
        UnsupportedError: A slot is no row of the pool.
    """
    if x.feature_map not in FIXED:
        with autocast_disabled(x.q.device):
            x = map_inputs(x)
    (q, k, v), log_decay = with_contiguous_rows(x.q, x.k, x.v), x.log_decay
    assert x.state is not None
    kv, z = with_contiguous_states(*x.state)
    slots = None if x.slots is None else x.slots.to(torch.int64).contiguous()
    in_place = x.reuse_state and kv is x.state.kv and z is x.state.k
    if not in_place:  # the next state has the strides of the one before
        kv, z = kv.contiguous(), z.contiguous()
    if slots is not None and not in_place:  # the kernel writes only the rows at slots
        kv, z, in_place = kv.clone(), z.clone(), True
    states, heads, size, columns = kv.shape
    decays, decay_type, decay_steps = 0, 0, (0, 0)
    if log_decay is not None:
        decays = size if log_decay.dim() == 4 else 1
        log_decay = with_contiguous_rows(log_decay)[0] if decays > 1 else log_decay
        decay_type, steps = DTYPE_NUMBERS[log_decay.dtype], log_decay.stride()
        decay_steps = (0, steps[0]) if len(steps) == 1 else (steps[0], steps[1])
    out = v.new_empty(len(v), q.shape[1], 1, columns)
    last = (kv, z) if in_place else (torch.empty_like(kv), torch.empty_like(z))
    q_steps, k_steps, v_steps = q.stride(), k.stride(), v.stride()
    task = _Step(
        *(torch.get_num_threads(), len(v), states, heads, q.shape[1] // heads, size, columns),
        decays,
        *(x.normalize, *map_numbers(LINEAR_STEP, x.feature_map)),
        *(DTYPE_NUMBERS[q.dtype], DTYPE_NUMBERS[k.dtype], DTYPE_NUMBERS[v.dtype], decay_type),
        *(q_steps[0], q_steps[1], k_steps[0], k_steps[1], v_steps[0], v_steps[1], *decay_steps),
        *(kv.stride(0), z.stride(0), 0 if gate.m is None else gate.m.stride(0)),
        *(x.feature_scale**0.5 if x.feature_map in SCALED else 1.0, x.scale, x.eps),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr()),
        None if log_decay is None else log_decay.data_ptr(),
        *(kv.data_ptr(), z.data_ptr(), out.data_ptr(), last[0].data_ptr(), last[1].data_ptr()),
        *(None if y is None else y.data_ptr() for y in (*gate, gate.m, slots)),
    )
    if getattr(cpp.load(LINEAR_STEP), STEPS[kv.dtype])(task):
        refuse_slots(slots, states)
    return out, LinearState(*last)
