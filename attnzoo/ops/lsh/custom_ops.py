"""Custom operators of LSH attention, so that ``torch.compile`` sees one call per pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.ops.lsh.blockwise import BlockwiseTensors
from attnzoo.ops.lsh.cpu.lsh import CppTensors
from attnzoo.ops.lsh.options import LSHInputs, LSHOptions
from attnzoo.ops.lsh.work_items import (
    QUERIES,
    WorkItem,
    WorkItemTensors,
    split_work,
    to_rows,
)
from attnzoo.runtime.autocast import autocast_disabled
from attnzoo.runtime.custom_ops import differentiable_op
from attnzoo.runtime.derivatives import check_reverse_mode
from attnzoo.runtime.memory import empty_huge_pages

# The tensors of a work item, and its two passes
TensorsOf = Callable[[WorkItem, LSHInputs], WorkItemTensors]


def lsh_operator(name: str, tensors_of: TensorsOf) -> Callable[[LSHInputs], Tensor]:
    """Define the custom operators of an implementation; ``name`` is a part of their names.

    Returns:
        A function that computes LSH attention without a score matrix, ``[B, H, T, E]``.
    """
    forward, _ = differentiable_op(
        f"attnzoo::lsh_{name}",
        _forward(tensors_of),
        _backward(tensors_of),
        fake=_fake_forward,
        save=lambda inputs, output: output,
        num_saved=2,
        op="LSH attention",
        fake_gradient=_fake_gradient,
    )

    def run(x: LSHInputs) -> Tensor:
        check_reverse_mode("LSH attention", x.q, x.k, x.v, x.bias)
        out: Tensor = forward(*x[:9], [int(option) for option in x.options], x.bias)[0]
        return out

    return run


def _forward(tensors_of: TensorsOf) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the forward pass: output ``[B, H, T, E]``, and log-sum-exp to base 2."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        query_segments: Tensor | None,
        key_segments: Tensor | None,
        rotations: Tensor | None,
        seed: Tensor,
        bucket_factors: list[int],
        options: list[int],
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        seed = seed.cpu()  # every work item reads it
        sizes = LSHOptions.from_ints(options)
        hashing = rotations, seed, bucket_factors, sizes
        x = LSHInputs(q, k, v, scale, query_segments, key_segments, *hashing, bias)
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = _empty_tokens_first(q, v.shape[3], dtype)
        lse = q.new_zeros(*q.shape[:3], 1, dtype=dtype)
        if query_segments is not None:  # no work item contains padding
            out.zero_()
        with autocast_disabled(q.device):
            for item in split_work(x):
                rows, logs = tensors_of(item, x).forward()
                item.scatter(rows, out)
                item.scatter(logs, lse)
                del rows, logs  # before the tensors of the next item are allocated
        return out.to(v.dtype), lse

    return forward


def _backward(tensors_of: TensorsOf) -> Callable[..., list[Tensor | None]]:
    """Return the backward pass, which hashes again; the bias has a gradient if needed."""

    def backward(
        d_outs: Sequence[Tensor | None], saved: Sequence[Tensor], needed: list[bool], *inputs: Any
    ) -> list[Tensor | None]:
        x = LSHInputs._make(inputs)
        x = x._replace(seed=x.seed.cpu(), options=LSHOptions.from_ints(inputs[9]))
        (out, lse), (q, k, v), bias = saved, x[:3], x.bias
        d_out = torch.zeros_like(out) if d_outs[0] is None else d_outs[0]
        dq, dk, dv = (_empty_tokens_first(y, y.shape[3], lse.dtype).zero_() for y in (q, k, v))
        d_bias = None
        if bias is not None and needed[-1]:
            d_bias = bias.new_zeros(bias.numel(), dtype=lse.dtype)
        delta = (d_out.to(lse.dtype) * out).sum(-1, keepdim=True)
        with autocast_disabled(q.device):
            for item in split_work(x):
                d_rows, sums, logs = (to_rows(item.gather(y, QUERIES)) for y in (d_out, delta, lse))
                tensors = tensors_of(item, x)
                gradients = tensors.backward(d_rows, sums, logs, d_bias)
                item.scatter(gradients[0], dq)
                item.scatter_add(gradients[1], dk)
                item.scatter_add(gradients[2], dv)
                del d_rows, sums, logs, tensors, gradients  # before those of the next
        if bias is not None and d_bias is not None:
            d_bias = d_bias.to(bias.dtype).view(bias.shape)
        return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 4, d_bias]

    return backward


def _empty_tokens_first(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return an empty ``[B, H, T, size]``, a view of ``[B, T, H, size]`` as projections give."""
    batch, heads, length, _ = like.shape
    return empty_huge_pages(like, (batch, length, heads, size), dtype).transpose(1, 2)


def _fake_tokens_first(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return a fake tensor with the strides of :func:`_empty_tokens_first`."""
    batch, heads, length, _ = like.shape
    return like.new_empty(batch, length, heads, size, dtype=dtype).transpose(1, 2)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return _fake_tokens_first(q, v.shape[3], v.dtype), q.new_empty(*q.shape[:3], 1, dtype=dtype)


def _fake_gradient(number: int, x: Tensor) -> Tensor:
    is_bias = number > 2
    return x.new_empty(x.shape) if is_bias else _fake_tokens_first(x, x.shape[3], x.dtype)


run_torch = lsh_operator("torch", BlockwiseTensors)
run_cpp = lsh_operator("cpp", CppTensors)
