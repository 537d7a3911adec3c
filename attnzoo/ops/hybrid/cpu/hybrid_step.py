"""One token of the window hybrid in C++, without gradients: decoding.

Other letters: W window.
"""

from __future__ import annotations

import ctypes
import operator
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attnzoo.contract.states import refuse_slots, wrong_slot
from attnzoo.errors import UnsupportedError, short_repr
from attnzoo.ops.features.functional import SCALED, map_features
from attnzoo.ops.hybrid.parts import HybridState, StepInputs, StepResult
from attnzoo.ops.linear.cpu.linear import MAP_NAMES, map_numbers
from attnzoo.runtime import cpp
from attnzoo.runtime.cpp.layout import Function
from attnzoo.runtime.kernel_calls import is_plain_call, rows_in, with_contiguous_states

WIDE = {  # of each dtype of keys, that of everything else
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
}


class _Step(ctypes.Structure):
    """The arguments of the C++ functions; ``Step`` of ``hybrid_step.cpp``."""

    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads batch states heads groups sinks window key_size value_size features decays "
            "counted relative q_map k_map",
        ),
        *cpp.fields(
            ctypes.c_int64,
            "q_row q_head k_row k_head v_row v_head fq_row fq_head fk_row fk_head "
            "decay_row decay_head weight_row weight_head "
            "keys_row values_row far_row kv_row z_row seen_row",
        ),
        *cpp.fields(ctypes.c_double, "scale map_scale"),
        *cpp.fields(
            ctypes.c_void_p,
            "q k v fq fk log_decay log_weight keys values far kv z seen slots "
            "out next_keys next_values next_far next_kv next_z next_seen",
        ),
    ]


FUNCTIONS = {dtype: f"hybrid_step_{str(dtype).removeprefix('torch.')}" for dtype in WIDE}
HYBRID_STEP = cpp.Source(
    Path(__file__).with_name("hybrid_step.cpp"),
    dict.fromkeys(FUNCTIONS.values(), Function((_Step,), ctypes.c_int64)) | MAP_NAMES,
)


def step_cpp_reasons(x: StepInputs) -> list[str]:
    """Return why :func:`hybrid_step_cpp` does not compute a call; an empty list if it does."""
    k, branch, state = x.k, x.branch, x.state
    wide = WIDE.get(k.dtype)
    tensors = [branch.log_weight, *state[1:5]]
    if branch.feature_map == "identity":
        tensors += [branch.q, branch.k]  # features
    if branch.log_decay is not None:
        tensors.append(branch.log_decay)
    fits = state.k.dtype == k.dtype
    for t in tensors:
        fits = fits and t.dtype == wide
    if not fits:
        return [f"keys are {k.dtype}, and the state or features do not have the types for it"]
    given = (x.q, k, x.v, branch.q, branch.k, state.k, *tensors, *(branch.map_weights or ()))
    if type(x.v) not in (Tensor, FakeTensor) or not is_plain_call(*given):
        return ["the kernel of one token has no derivative, and is not traced"]
    reason = cpp.unavailable_reason(HYBRID_STEP)
    return [reason] if reason else []


def hybrid_step_cpp(x: StepInputs) -> StepResult:
    """Compute one token; the next state overwrites the given one if it may, and is contiguous.

    The kernel computes the features, of maps without weights only. Keys may be bfloat16; the
    arithmetic is in float32, or in float64 for float64 tensors.

    Raises:
        UnsupportedError: A slot is no row of the pool, or a state has no number of tokens.
    """
    q, k, v, branch, state, scale, in_place, slots = x
    dtype, wide, name = v.dtype, WIDE[k.dtype], branch.feature_map
    fq, fk = branch.q, branch.k
    if branch.map_weights is not None:
        options = (name, branch.feature_scale, branch.map_weights)
        fq, fk = map_features(q, *options, of_keys=False), map_features(k, *options, of_keys=True)
        name = "identity"
    q, v, fq, fk = rows_in(wide, q, v, fq, fk)
    read = [q, *rows_in(k.dtype, k), v, fq, fk]
    old = with_contiguous_states(*state)
    in_place = in_place and all(map(operator.is_, old, state))
    if not in_place:  # the next state has the strides of the one before
        old = [*map(Tensor.contiguous, old)]
    if slots is not None:
        slots = slots.to(torch.int64).contiguous()
        if not in_place:  # the kernel writes some rows of the pool
            old, in_place = [y.clone() for y in old], True
    new = old if in_place else [*map(torch.empty_like, old)]
    after = state if new[0] is state.k else HybridState._make(new)
    (batch, queries), (states, heads, stored, size) = q.shape[:2], old[0].shape
    columns, (window, features) = old[1].shape[3], old[2].shape[2:]
    out = v.new_empty(batch, queries, 1, columns)
    if isinstance(v, FakeTensor):  # shapes without data, to count memory
        return out.to(dtype), after
    weight = branch.log_weight.expand(batch, queries, 1, 1)
    decay, decays = branch.log_decay, 0
    decay_steps: tuple[int, ...] = (0, 0)
    if decay is not None:
        decay = decay.contiguous()
        decays = features if decay.dim() == 4 else 1
        decay_steps = (0, 1) if decay.dim() == 1 else decay.stride()[:2]
    steps: list[int] = []
    for t in read:
        steps += t.stride()[:2]
    steps += *decay_steps, *weight.stride()[:2]
    for t in old:
        steps.append(t.stride(0))
    task = _Step(
        *(torch.get_num_threads(), batch, states, heads, queries // heads),
        *(stored - window, window),
        *(size, columns, features, decays, branch.mean, branch.relative),
        *map_numbers(HYBRID_STEP, name),
        *steps,
        *(scale, branch.feature_scale**0.5 if name in SCALED else 1.0),
        *map(Tensor.data_ptr, read),
        None if decay is None else decay.data_ptr(),
        *map(Tensor.data_ptr, (weight, *old)),
        None if slots is None else slots.data_ptr(),
        *map(Tensor.data_ptr, (out, *new)),
    )
    if getattr(cpp.load(HYBRID_STEP), FUNCTIONS[k.dtype])(task):
        refuse_state(slots, state)
    return (out if out.dtype == dtype else out.to(dtype)), after


def refuse_state(slots: Tensor | None, state: HybridState) -> NoReturn:
    """Raise ``UnsupportedError`` for slots outside of a pool, or a state without a count."""
    if slots is not None and wrong_slot(slots, len(state.seen)) is not None:
        refuse_slots(slots, len(state.seen))
    raise UnsupportedError(
        "state.seen must be the number of tokens so far of each state, got "
        f"{short_repr(state.seen.tolist())}; pass the state that the same op returned."
    )
