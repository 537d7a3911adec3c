"""Causal linear attention on a GPU as custom operators of torch, with fake tensors and autograd.

``torch.compile`` traces the operators without graph breaks. Launches do not synchronise with the
device, so CUDA graphs can capture them.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.ops.linear.triton.launch import KernelLauncher, LinearTensors, empty_rows
from attnzoo.runtime.derivatives import refuse_derivative


@torch.library.custom_op("attnzoo::linear_triton", mutates_args=())
def linear_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    segment_ids: Tensor | None,
    padding_mask: Tensor | None,
    feature_map: str,
    map_scale: float,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
    split_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the two sums of the state after the last token.

    Args:
        q: Queries before the feature map, ``[B, H, T, D]``.
        k: Keys before the feature map, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: ``[Hkv]``, ``[B, Hkv, T]`` or ``[B, Hkv, T, D]``, or ``None``.
        kv: The state before the first token, ``[B, Hkv, D, E]``, float32.
        z: Its sum of keys, ``[B, Hkv, D]``, float32.
        segment_ids: ``[B, T]`` integers: segments of packed sequences, or ``None``.
        padding_mask: ``[B, T]`` bool, true at real tokens, or ``None``.
        feature_map: A map of ``FIXED`` in :mod:`attnzoo.ops.features.functional`.
        map_scale: Multiplies the exponents of ``"exp"``.
        scale: Multiplies the features of the queries.
        normalize: Whether to divide by the sum of weights.
        eps: Added to the sum of weights.
        chunk_size: C, in tokens; 0 takes it from the config table.
        split_size: Tokens per split; 0 derives it from the number of heads and processors.
    """
    tensors = LinearTensors(q, k, v, log_decay, kv, z, segment_ids, padding_mask)
    launcher = KernelLauncher(
        tensors, feature_map, map_scale, scale, normalize, eps, chunk_size, split_size
    )
    return launcher.forward()


@torch.library.custom_op("attnzoo::linear_triton_backward", mutates_args=())
def linear_triton_backward(
    d_out: Tensor,
    d_kv: Tensor,
    d_z: Tensor,
    kv_last: Tensor,
    z_last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    segment_ids: Tensor | None,
    padding_mask: Tensor | None,
    feature_map: str,
    map_scale: float,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
    split_size: int,
    needs_decay_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log_decay (empty if not needed), kv and z."""
    tensors = LinearTensors(q, k, v, log_decay, kv, z, segment_ids, padding_mask)
    options = (feature_map, map_scale, scale, normalize, eps, chunk_size, split_size)
    launcher = KernelLauncher(tensors, *options, needs_decay_grad)
    return launcher.backward(d_out, d_kv, d_z, (kv_last, z_last))


@linear_triton.register_fake
def _linear_triton_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, kv: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    out = empty_rows(v, q.shape[1], v.shape[3]).transpose(1, 2)
    return out, kv.new_empty(kv.shape), z.new_empty(z.shape)


@linear_triton_backward.register_fake
def _linear_triton_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    q, k, v, log_decay, kv, z = args[5:11]
    d_log = q.new_empty(0) if not args[-1] else log_decay.new_empty(log_decay.shape)
    rows = (empty_rows(x, x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v))
    return *rows, d_log, kv.new_empty(kv.shape), z.new_empty(z.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:], *inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
    needs_decay_grad = ctx.needs_input_grad[3]
    grads = linear_triton_backward(
        d_out, d_kv, d_z, *ctx.saved_tensors, *ctx.options, needs_decay_grad
    )
    needed = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *needed, None, None, *(None for _ in ctx.options)


linear_triton.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(linear_triton_backward, "linear_attention")


# -- sums without a division -----------------------------------------------------------------------


@torch.library.custom_op("attnzoo::linear_sums_triton", mutates_args=())
def linear_sums_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    segment_ids: Tensor | None,
    chunk_size: int,
    split_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weighted sums of values, ``[B, H, T, E]``, and of ones, ``[B, H, T]``, and the state.

    For callers that do the division themselves. The arguments are those of :func:`linear_triton`,
    with features of queries and keys.
    """
    tensors = LinearTensors(q, k, v, log_decay, kv, z, segment_ids, None)
    launcher = KernelLauncher(tensors, "identity", 1.0, 1.0, False, 0.0, chunk_size, split_size)
    out, weights, *last = launcher.forward_sums()
    return out.transpose(1, 2), weights, last[0], last[1]


@torch.library.custom_op("attnzoo::linear_sums_triton_backward", mutates_args=())
def linear_sums_triton_backward(
    d_out: Tensor,
    d_weights: Tensor,
    d_kv: Tensor,
    d_z: Tensor,
    kv_last: Tensor,
    z_last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    segment_ids: Tensor | None,
    chunk_size: int,
    split_size: int,
    needs_decay_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log_decay (empty if not needed), kv and z."""
    tensors = LinearTensors(q, k, v, log_decay, kv, z, segment_ids, None)
    launcher = KernelLauncher(
        tensors, "identity", 1.0, 1.0, True, 0.0, chunk_size, split_size, needs_decay_grad
    )
    dq, dk, dv = (empty_rows(x, x.shape[1], x.shape[3]) for x in (q, k, v))
    rest = launcher.backward_sums((dq, dk, dv), d_out, -d_weights, (d_kv, d_z), (kv_last, z_last))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), *rest


@linear_sums_triton.register_fake
def _linear_sums_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, kv: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    out = empty_rows(v, q.shape[1], v.shape[3], torch.float32).transpose(1, 2)
    return out, z.new_empty(q.shape[:3]), kv.new_empty(kv.shape), z.new_empty(z.shape)


@linear_sums_triton_backward.register_fake
def _linear_sums_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    q, k, v, log_decay, kv, z = args[6:12]
    d_log = q.new_empty(0) if not args[-1] else log_decay.new_empty(log_decay.shape)
    rows = (empty_rows(x, x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v))
    return *rows, d_log, kv.new_empty(kv.shape), z.new_empty(z.shape)


def _setup_sums_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[2:], *inputs[:7])
    ctx.options = inputs[7:]


def _sums_backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
    needs_decay_grad = ctx.needs_input_grad[3]
    grads = linear_sums_triton_backward(
        *d_outputs, *ctx.saved_tensors, *ctx.options, needs_decay_grad
    )
    needed = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *needed, None, *(None for _ in ctx.options)


linear_sums_triton.register_autograd(_sums_backward, setup_context=_setup_sums_context)
refuse_derivative(linear_sums_triton_backward, "linear_attention")
