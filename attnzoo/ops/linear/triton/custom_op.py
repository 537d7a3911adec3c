"""Causal linear attention on a GPU as custom operators of torch, with fake tensors and autograd.

``torch.compile`` traces the operators without graph breaks. Launches do not synchronise with the
device, so CUDA graphs can capture them.

The arguments of the operators are the fields of
:class:`attnzoo.ops.linear.triton.launch.LinearTensors` and
:class:`attnzoo.ops.linear.triton.launch.LinearOptions`, one after another.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch
from torch import Tensor

from attnzoo.ops.linear.triton.launch import (
    KernelLauncher,
    LinearOptions,
    LinearTensors,
    empty_rows,
    empty_states,
)
from attnzoo.runtime.kernel_calls import refuse_derivative

SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    float: "float",
    bool: "bool",
    int: "SymInt",
}


def _fields(kind: type) -> str:
    """Return the fields of a named tuple as arguments of an operator's schema."""
    return ", ".join(f"{SCHEMA_TYPES[hint]} {name}" for name, hint in get_type_hints(kind).items())


TENSORS, OPTIONS = len(LinearTensors._fields), len(LinearOptions._fields)
ARGUMENTS = f"{_fields(LinearTensors)}, {_fields(LinearOptions)}"
LAST = "Tensor d_kv, Tensor d_z, Tensor kv_last, Tensor z_last"  # the last state, its gradient
BACKWARD = f"{LAST}, {ARGUMENTS}, bool needs_decay_grad"
GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"  # of q, k, v, log_decay, kv and z


def _launcher(*args: Any, **changed: Any) -> KernelLauncher:
    """Return the launcher of a call with some options changed."""
    tensors, options = LinearTensors(*args[:TENSORS]), args[TENSORS : TENSORS + OPTIONS]
    others = args[TENSORS + OPTIONS :]
    return KernelLauncher(tensors, LinearOptions(*options)._replace(**changed), *others)


def _fake_states(*args: Any) -> tuple[Tensor, Tensor]:
    """Return tensors like the states after the sequences."""
    x, options = LinearTensors(*args[:TENSORS]), LinearOptions(*args[TENSORS:])
    if not options.return_state:
        return x.q.new_empty(0, dtype=torch.float32), x.q.new_empty(0, dtype=torch.float32)
    return empty_states(x.q, x.k, x.v, x.q.shape[0] if x.starts is None else x.starts.shape[0])


def _fake_gradients(*args: Any) -> tuple[Tensor, ...]:
    """Return tensors like the gradients; those of what is not given have no elements."""
    x, needs_decay_grad = LinearTensors(*args[:TENSORS]), args[-1]
    rows = (empty_rows(y, y.shape[1], y.shape[3]).transpose(1, 2) for y in x[:3])
    log_decay = x.q[0, 0, 0, :0] if x.log_decay is None or not needs_decay_grad else x.log_decay
    none = x.q.new_empty(0, dtype=torch.float32)
    state = (none if y is None else y for y in (x.kv, x.z))
    return *rows, *(y.new_empty(y.shape) for y in (log_decay, *state))


@torch.library.custom_op(
    "attnzoo::linear_triton", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)
def linear_triton(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the two sums of the state after each sequence."""
    return _launcher(*args).forward()


@torch.library.custom_op(
    "attnzoo::linear_triton_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, {BACKWARD}) -> {GRADIENTS}",
)
def linear_triton_backward(
    d_out: Tensor, d_kv: Tensor, d_z: Tensor, kv_last: Tensor, z_last: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, log_decay, kv and z, without elements if not needed."""
    return _launcher(*args).backward(d_out, d_kv, d_z, (kv_last, z_last))


@linear_triton.register_fake
def _linear_triton_fake(*args: Any) -> tuple[Tensor, ...]:
    q, _, v = args[:3]
    return empty_rows(v, q.shape[1], v.shape[3]).transpose(1, 2), *_fake_states(*args)


linear_triton_backward.register_fake(lambda *args: _fake_gradients(*args[5:]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[-2:], *inputs[:TENSORS])
    ctx.options = inputs[TENSORS:]


def _backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad
    saved = ctx.saved_tensors
    grads = linear_triton_backward(*d_outputs, *saved, *ctx.options, needed[3])
    wanted = [grad if need else None for grad, need in zip(grads, needed, strict=False)]
    return *wanted, *[None] * (len(needed) - len(wanted))


linear_triton.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(linear_triton_backward, "linear_attention")
