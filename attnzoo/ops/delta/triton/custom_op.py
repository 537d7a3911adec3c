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
    state: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]``, the last state, the errors e (float32) and u = beta e.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        beta: Write strengths, ``[B, Hkv, T]``.
        log_decay: ``[Hkv]``, ``[B, Hkv, T]`` or ``[B, Hkv, T, D]``, or ``None``.
        state: The state before the first token, ``[S, Hkv, D, E]``, float32; ``None`` means zeros.
        starts: First token of each sequence of one row, ``[S]``; ``None``: rows are sequences.
        lengths: Tokens of each, ``[S]``.
        scale: Multiplies q; not 0.
        return_state: Whether to return the state; otherwise it has no elements.
    """
    launcher = DeltaLauncher(k, v, beta, log_decay, state, starts, lengths)
    errors, u = launcher.errors()
    linear = launcher.linear(q, u, scale, return_state=return_state, decay_grad=False)
    out, last, _ = linear.forward()
    return out, last, errors, u


@torch.library.custom_op("attnzoo::delta_triton_backward", mutates_args=())
def delta_triton_backward(
    d_out: Tensor,
    d_last: Tensor,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    last: Tensor,
    errors: Tensor,
    u: Tensor,
    scale: float,
    return_state: bool,
    needs_decay_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, beta, log_decay and state, the last two or empty ones."""
    launcher = DeltaLauncher(k, u, beta, log_decay, state, starts, lengths)
    options = (scale, return_state, needs_decay_grad)
    return launcher.backward(d_out, d_last, q, errors, u, last, *options)


@delta_triton.register_fake
def _delta_triton_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    return_state: bool,
) -> tuple[Tensor, ...]:
    out = empty_rows(v, q.shape[1], v.shape[3]).transpose(1, 2)
    u = empty_rows(v, v.shape[1], v.shape[3]).transpose(1, 2)
    errors = empty_rows(v, v.shape[1], v.shape[3], torch.float32).transpose(1, 2)
    count = k.shape[0] if starts is None else starts.shape[0]
    shape = (count, k.shape[1], k.shape[3], v.shape[3]) if return_state else (0,)
    return out, v.new_empty(shape, dtype=torch.float32), errors, u


@delta_triton_backward.register_fake
def _delta_triton_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    q, k, beta, log_decay, state, *_, u = args[2:12]
    d_log = q.new_empty(0) if not args[-1] else log_decay.new_empty(log_decay.shape)
    dv = empty_rows(u, u.shape[1], u.shape[3]).transpose(1, 2)
    dq, dk, d_beta = (x.new_empty(x.shape) for x in (q, k, beta))
    d_state = q.new_empty(0 if state is None else state.shape, dtype=torch.float32)
    return dq, dk, dv, d_beta, d_log, d_state


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, beta, log_decay, state, starts, lengths, *ctx.options = inputs
    ctx.save_for_backward(q, k, beta, log_decay, state, starts, lengths, *output[1:])


def _backward(ctx: Any, d_out: Tensor, d_last: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad
    grads = delta_triton_backward(d_out, d_last, *ctx.saved_tensors, *ctx.options, needed[4])
    wanted = [g if need else None for g, need in zip(grads, needed, strict=False)]
    return *wanted, None, None, None, None


delta_triton.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(delta_triton_backward, "delta_attention")
