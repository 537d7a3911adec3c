"""Softmax attention inside a window on a GPU, as custom operators of torch with autograd.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.contract.masks import Window
from attnzoo.ops.window.triton.window import (
    window_kernel,
    window_key_gradient_kernel,
    window_query_gradient_kernel,
)
from attnzoo.runtime.derivatives import refuse_derivative
from attnzoo.runtime.triton_products import (
    block_size,
    contiguous_rows,
    device_context,
    operand_precision,
)

LARGEST = 256  # key and value size


def launch_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor | None,
    window: Window,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, T, H, E]`` in ``dtype``, and the log-sum-exp.

    ``window`` is the number of keys that a query sees before and after its own, and ``ids`` the
    sequence of each token, ``[B, T]`` int32, negative for tokens of none.
    """
    out, lse = _outputs(q, v, dtype)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    blocks, given, constants = _launch_options(q, k, v, ids, window, scale)
    with device_context(q.device):
        window_kernel[(blocks, q.shape[0] * q.shape[1])](
            q, k, v, out, lse, given, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            **constants,
        )  # fmt: skip
    return out, lse


def launch_window_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ids: Tensor | None,
    window: Window,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v as ``[B, T, heads, size]``.

    ``d_out`` is ``[B, H, T, E]``; ``out`` and ``lse`` are what :func:`launch_window` returned.
    """
    dq, dk, dv = (_empty_rows(x, x.shape[3]) for x in (q, k, v))
    delta = torch.empty_like(lse)
    q, k, v, d_out = (contiguous_rows(x) for x in (q, k, v, d_out))
    blocks, given, constants = _launch_options(q, k, v, ids, window, scale)
    strides = [s for x in (q, k, v, d_out) for s in x.stride()[:3]]
    with device_context(q.device):
        window_query_gradient_kernel[(blocks, q.shape[0] * q.shape[1])](
            q, k, v, d_out, d_lse, out, lse, dq, delta, given, *strides, **constants
        )
        window_key_gradient_kernel[(blocks, k.shape[0] * k.shape[1])](
            q, k, v, d_out, lse, delta, dk, dv, given, *strides, **constants
        )
    return dq, dk, dv


@torch.library.custom_op("attnzoo::window_triton", mutates_args=())
def window_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor | None,
    before: int,
    after: int,
    scale: float,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention inside a window, and the log-sum-exp of its scores.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        ids: The sequence of each token, ``[B, T]`` int32: queries see keys of their own. Outputs of
            tokens with negative ids are zeros. ``None``: each row is one sequence.
        before: Keys before a query's own that it sees.
        after: Keys after it.
        scale: Multiplies query-key products.
        wide: Whether the output is float32; else it has the dtype of ``v``.

    Returns:
        ``[B, H, T, E]`` and ``[B, H, T]`` float32. For a query that sees no key they are 0 and
        -1e30.
    """
    dtype = torch.float32 if wide else v.dtype
    out, lse = launch_window(q, k, v, ids, (before, after), scale, dtype)
    return out.transpose(1, 2), lse


@torch.library.custom_op("attnzoo::window_triton_backward", mutates_args=())
def window_triton_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ids: Tensor | None,
    before: int,
    after: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; ``out`` and ``lse`` are the forward results."""
    rows = out.transpose(1, 2).contiguous()
    grads = launch_window_backward(
        d_out, d_lse.contiguous(), q, k, v, rows, lse, ids, (before, after), scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _empty_rows(like: Tensor, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor ``[B, T, heads, size]``, the layout of the output projection."""
    return like.new_empty(like.shape[0], like.shape[2], like.shape[1], size, dtype=dtype)


def _outputs(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _empty_rows(q, v.shape[3], dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


def _launch_options(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, window: Window, scale: float
) -> tuple[int, Tensor, dict[str, Any]]:
    """Return the number of blocks, the ids, and the arguments that all kernels take."""
    float32_operands, precision = operand_precision(q, k, v)
    d, e, tokens = q.shape[3], v.shape[3], q.shape[2]
    block = 32 if max(d, e) > 128 or float32_operands else 64
    constants = {
        "tokens": tokens,
        "before": min(window[0], tokens),
        "after": min(window[1], tokens),
        "scale": scale,
        "heads": q.shape[1],
        "D": d,
        "E": e,
        "G": q.shape[1] // k.shape[1],
        "BD": block_size(d),
        "BE": block_size(e),
        "BLOCK": block,
        "IDS": ids is not None,
        "OPERAND": tl.float32 if float32_operands else tl.bfloat16,
        "PRECISION": precision,
        "num_warps": 4,
        "num_stages": 2,
    }
    given = q.new_empty(1, dtype=torch.int32) if ids is None else ids.contiguous()
    return triton.cdiv(tokens, block), given, constants


@window_triton.register_fake
def _window_triton_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out, lse = _outputs(q, v, torch.float32 if options[-1] else v.dtype)
    return out.transpose(1, 2), lse


@window_triton_backward.register_fake
def _window_triton_backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty_rows(x, x.shape[3]).transpose(1, 2) for x in args[2:5])
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])
    ctx.options = inputs[4:7]


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = window_triton_backward(d_out, d_lse, *ctx.saved_tensors, *ctx.options)
    needed = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *needed, *[None] * 5


window_triton.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(window_triton_backward, "softmax attention inside a window")
