"""Causal linear attention on a GPU: the kernels as operators of torch, with fakes and gradients.

Both passes are custom operators: opaque to ``torch.compile``, without a graph break, and checked by
``torch.library.opcheck``. Launches neither wait for the device nor read from it, so that a CUDA
graph can hold them.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.kernels.triton.linear_launch import Call, Given


@torch.library.custom_op("attnzoo::linear_triton", mutates_args=())
def linear_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    segment_ids: Tensor | None,
    real: Tensor | None,
    feature_map: str,
    map_scale: float,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
    span: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the two sums of the state after the last token.

    Args:
        q: Queries before the feature map, ``[B, H, T, D]``, like ``k``; the last dimension dense.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: ``[Hkv]``, ``[B, Hkv, T]`` or ``[B, Hkv, T, D]``, or ``None``.
        kv: The state before the first token, ``[B, Hkv, D, E]``, float32.
        z: Its sum of keys, ``[B, Hkv, D]``, float32.
        segment_ids: ``[B, T]``, integer: sequences packed into a row.
        real: ``[B, T]`` bool, false where a token is padding.
        feature_map: ``"identity"``, ``"elu+1"``, ``"relu"`` or ``"exp"``.
        map_scale: Multiplies exponents of ``"exp"``.
        scale: Multiplies the features of the queries.
        normalize: Whether to divide by the sum of weights.
        eps: Added to that sum.
        chunk_size: C, in tokens; 0 lets the table choose.
        span: Tokens per span; 0 lets the device's size choose.
    """
    given = Given(q, k, v, log_decay, kv, z, segment_ids, real)
    call = Call(given, feature_map, map_scale, scale, normalize, eps, chunk_size, span)
    return call.forward()


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
    real: Tensor | None,
    feature_map: str,
    map_scale: float,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
    span: int,
    want_decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients for q, k, v, log_decay (empty if not wanted), kv and z."""
    given = Given(q, k, v, log_decay, kv, z, segment_ids, real)
    options = (feature_map, map_scale, scale, normalize, eps, chunk_size, span)
    call = Call(given, *options, want_decay)
    return call.backward(d_out, d_kv, d_z, (kv_last, z_last))


def _new_rows(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return room for ``[B, H, T, X]`` that lies in memory as the next product reads it."""
    batch, heads, tokens, size = shape
    return like.new_empty(batch, tokens, heads, size).transpose(1, 2)


@linear_triton.register_fake
def _linear_triton_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, kv: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    out = _new_rows(v, (*q.shape[:3], v.shape[3]))
    return out, kv.new_empty(kv.shape), z.new_empty(z.shape)


@linear_triton_backward.register_fake
def _linear_triton_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    q, k, v, log_decay, kv, z = args[5:11]
    d_log = q.new_empty(0) if not args[-1] else log_decay.new_empty(log_decay.shape)
    rows = (_new_rows(x, x.shape) for x in (q, k, v))
    return *rows, d_log, kv.new_empty(kv.shape), z.new_empty(z.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:], *inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
    want_decay = ctx.needs_input_grad[3]
    grads = linear_triton_backward(d_out, d_kv, d_z, *ctx.saved_tensors, *ctx.options, want_decay)
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None, *(None for _ in ctx.options)


linear_triton.register_autograd(_backward, setup_context=_setup_context)
