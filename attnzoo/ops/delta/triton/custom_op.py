"""The delta rule on a GPU as custom operators of torch, with fake tensors and autograd.

``torch.compile`` traces the operators without graph breaks. Launches do not synchronise with the
device, so CUDA graphs can capture them.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.ops.delta.triton.launch import DeltaLauncher
from attnzoo.ops.linear.triton.launch import empty_rows
from attnzoo.runtime.derivatives import refuse_derivative


@torch.library.custom_op("attnzoo::delta_triton", mutates_args=())
def delta_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]``, the last state, the errors e (float32) and u = beta e.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        beta: Write strengths, ``[B, Hkv, T]``.
        log_decay: ``[Hkv]``, ``[B, Hkv, T]`` or ``[B, Hkv, T, D]``, or ``None``.
        state: The state before the first token, ``[B, Hkv, D, E]``, float32.
        segment_ids: ``[B, T]``, of sequences packed into one row, or ``None``.
        scale: Multiplies q; not 0.
    """
    launcher = DeltaLauncher(k, v, beta, log_decay, state, segment_ids)
    errors, u = launcher.errors()
    out, last, _ = launcher.linear(q, u, scale, decay_grad=False).forward()
    return out, last, errors, u


@torch.library.custom_op("attnzoo::delta_triton_backward", mutates_args=())
def delta_triton_backward(
    d_out: Tensor,
    d_last: Tensor,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    segment_ids: Tensor | None,
    last: Tensor,
    errors: Tensor,
    u: Tensor,
    scale: float,
    needs_decay_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, beta, log_decay (empty if not needed) and state."""
    launcher = DeltaLauncher(k, u, beta, log_decay, state, segment_ids)
    return launcher.backward(d_out, d_last, q, errors, u, last, scale, needs_decay_grad)


@delta_triton.register_fake
def _delta_triton_fake(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    out = empty_rows(v, q.shape[1], v.shape[3]).transpose(1, 2)
    u = empty_rows(v, v.shape[1], v.shape[3]).transpose(1, 2)
    errors = empty_rows(v, v.shape[1], v.shape[3], torch.float32).transpose(1, 2)
    return out, state.new_empty(state.shape), errors, u


@delta_triton_backward.register_fake
def _delta_triton_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    q, k, beta, log_decay, state, _, _, _, u = args[2:11]
    d_log = q.new_empty(0) if not args[-1] else log_decay.new_empty(log_decay.shape)
    dv = empty_rows(u, u.shape[1], u.shape[3]).transpose(1, 2)
    dq, dk, d_beta, d_state = (x.new_empty(x.shape) for x in (q, k, beta, state))
    return dq, dk, dv, d_beta, d_log, d_state


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, beta, log_decay, state, segment_ids, scale = inputs
    ctx.save_for_backward(q, k, beta, log_decay, state, segment_ids, *output[1:])
    ctx.scale = scale


def _backward(ctx: Any, d_out: Tensor, d_last: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad
    grads = delta_triton_backward(d_out, d_last, *ctx.saved_tensors, ctx.scale, needed[4])
    return *(g if need else None for g, need in zip(grads, needed, strict=False)), None, None


delta_triton.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(delta_triton_backward, "delta_attention")
