"""One token of the delta rule in C++, without gradients: decoding.

Letters: B batch, H heads, Hkv key heads, D key size, E value size.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from attnzoo.contract.states import DeltaState
from attnzoo.ops.delta.common import NORM_EPS, DeltaInputs, Result
from attnzoo.runtime import cpp
from attnzoo.runtime.derivatives import is_plain_call


class Step(ctypes.Structure):
    """The arguments of the C++ function; ``Step`` of ``delta.cpp``."""

    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads batch heads groups key_size value_size decays "
            "q_row q_head k_row k_head v_row v_head beta_row beta_head decay_row decay_head",
        ),
        *cpp.fields(ctypes.c_double, "scale eps"),
        *cpp.fields(ctypes.c_void_p, "q k v beta log_decay state out last_state slots"),
    ]


def is_step(x: DeltaInputs) -> bool:
    """Return whether :func:`run_step` computes a call: one token, and no gradients."""
    if x.k.shape[2] != 1 or type(x.v) is not Tensor:
        return False
    return is_plain_call(x.q, x.k, x.v, x.beta, x.log_decay, *(x.state or ()))


def run_step(x: DeltaInputs, source: cpp.Source, type_name: str) -> Result:
    """Run the kernel on one token, in the place of the state if ``x.reuse_state``.

    It normalises queries and keys if ``x.normalize``.
    """
    kv, slots = x.first_state().kv.contiguous(), x.slots
    if slots is not None:  # the kernel writes the next states of some sequences only
        kv = kv if x.reuse_state else kv.clone()
        slots = slots.to(torch.int64).contiguous()
    last = kv if x.reuse_state or slots is not None else torch.empty_like(kv)
    dtype, batch = kv.dtype, x.q.shape[0]
    q, k, v = (_rows(t, dtype) for t in (x.q, x.k, x.v))
    beta, log_decay = _cast(x.beta, dtype), x.log_decay
    _, heads, size, columns = kv.shape
    decay_steps, decays = (0, 0), 0
    if log_decay is not None:
        log_decay = _rows(log_decay, dtype) if log_decay.dim() == 4 else _cast(log_decay, dtype)
        decays = size if log_decay.dim() == 4 else 1
        steps = log_decay.stride()
        decay_steps = (0, steps[0]) if len(steps) == 1 else (steps[0], steps[1])
    out = v.new_empty(batch, q.shape[1], 1, columns)
    task = Step(
        *(torch.get_num_threads(), batch, heads, q.shape[1] // heads, size, columns, decays),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *beta.stride()[:2], *decay_steps),
        *(x.scale, NORM_EPS if x.normalize else -1.0),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), beta.data_ptr()),
        None if log_decay is None else log_decay.data_ptr(),
        *(kv.data_ptr(), out.data_ptr(), last.data_ptr()),
        None if slots is None else slots.data_ptr(),
    )
    getattr(cpp.load(source), f"delta_step_{type_name}")(task)
    return _cast(out, x.v.dtype), DeltaState(last)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in a dtype, with contiguous rows."""
    x = _cast(x, dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in a dtype; a call of ``to`` that changes nothing is 3% of a step."""
    return x if x.dtype == dtype else x.to(dtype)
