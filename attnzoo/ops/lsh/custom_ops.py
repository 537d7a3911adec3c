"""Custom operators of LSH attention, so that ``torch.compile`` sees one call per pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
from attnzoo.runtime.derivatives import check_reverse_mode, refuse_derivative
from attnzoo.runtime.memory import LANES, empty_huge_pages, register_buffer_bytes, simd_bytes

SORT_BYTES = 100, 43  # of the sort of hash rounds: per query and key of a round, as measured
# The tensors of a work item, and its two passes
TensorsOf = Callable[[WorkItem, LSHInputs], WorkItemTensors]


class LSHOperators(NamedTuple):
    """The custom operators of one implementation."""

    forward: Any
    backward: Any

    def run(self, inputs: LSHInputs) -> Tensor:
        """Compute LSH attention without a score matrix, ``[B, H, T, E]``."""
        x = inputs
        check_reverse_mode("LSH attention", x.q, x.k, x.v, x.bias)
        hashing = x.rotations, x.seed, x.bucket_factors, [int(option) for option in x.options]
        segments = x.query_segments, x.key_segments
        out: Tensor = self.forward(x.q, x.k, x.v, x.scale, *segments, *hashing, x.bias)[0]
        return out


def lsh_operators(name: str, tensors_of: TensorsOf) -> LSHOperators:
    """Define the custom operators of an implementation, whose names end in ``name``."""
    forward = _forward_operator(f"attnzoo::lsh_forward_{name}", tensors_of)
    backward = _backward_operator(f"attnzoo::lsh_backward_{name}", tensors_of)

    def run_backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Any, ...]:
        q, k, v, bias, *hashing, out, lse = ctx.saved_tensors
        options = (ctx.scale, *hashing, *ctx.options, bias, ctx.bias_needs_grad)
        *gradients, d_bias = backward(d_out, out, lse, q, k, v, *options)
        no_gradients = [None] * (1 + len(hashing) + len(ctx.options))
        return (*gradients, *no_gradients, d_bias if ctx.bias_needs_grad else None)

    forward.register_autograd(run_backward, setup_context=_setup_context)
    refuse_derivative(backward, "LSH attention")
    return LSHOperators(forward, backward)


def _inputs(*arguments: Any) -> LSHInputs:
    """Return the inputs from the arguments of an operator, which have the same order."""
    x = LSHInputs._make(arguments[: len(LSHInputs._fields)])
    return x._replace(options=LSHOptions.from_ints(arguments[9]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, query_segments, key_segments, rotations, seed, *ctx.options = inputs[:-1]
    bias = inputs[-1]
    ctx.bias_needs_grad = bias is not None and bias.requires_grad
    ctx.save_for_backward(q, k, v, bias, query_segments, key_segments, rotations, seed, *output)


def _forward_operator(name: str, tensors_of: TensorsOf) -> Any:
    """Define the operator of the output ``[B, H, T, E]`` and log-sum-exp ``[B, H, T, 1]``.

    The logarithm is to base 2.
    """

    @torch.library.custom_op(name, mutates_args=())
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
        hashing = (rotations, seed, bucket_factors, options)
        x = _inputs(q, k, v, scale, query_segments, key_segments, *hashing, bias)
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

    forward.register_fake(_fake_forward)
    register_buffer_bytes(forward)(_forward_bytes)
    return forward


def _backward_operator(name: str, tensors_of: TensorsOf) -> Any:
    """Define the operator of the gradients of q, k, v and bias (empty if not needed).

    It hashes again.
    """

    @torch.library.custom_op(name, mutates_args=())
    def backward(
        d_out: Tensor,
        out: Tensor,
        lse: Tensor,
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
        bias_needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        seed = seed.cpu()  # every work item reads it
        hashing = (rotations, seed, bucket_factors, options)
        x = _inputs(q, k, v, scale, query_segments, key_segments, *hashing, bias)
        dq, dk, dv = (_empty_tokens_first(y, y.shape[3], lse.dtype).zero_() for y in (q, k, v))
        d_bias = None
        if bias is not None and bias_needs_grad:
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
        bias_gradient = q.new_empty(0)
        if bias is not None and d_bias is not None:
            bias_gradient = d_bias.to(bias.dtype).view(bias.shape)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), bias_gradient

    backward.register_fake(_fake_backward)
    register_buffer_bytes(backward)(_backward_bytes)
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


def _fake_backward(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_fake_tokens_first(x, x.shape[3], x.dtype) for x in (q, k, v))
    bias, needs_grad = options[-2:]
    return dq, dk, dv, bias.new_empty(bias.shape) if needs_grad else q.new_empty(0)


def _forward_bytes(*arguments: Any) -> int:
    x = _inputs(*arguments)
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    written = x.q.shape[:3].numel() * x.v.shape[3]  # in v's type only when the rows are freed
    return _work_item_bytes(x, dtype) + written * (dtype.itemsize - x.v.dtype.itemsize)


def _backward_bytes(d_out: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> int:
    x, size = _inputs(*arguments), lse.dtype.itemsize
    gradients = sum(y.numel() * (size - y.dtype.itemsize) for y in (x.q, x.k, x.v))
    return _work_item_bytes(x, lse.dtype, backward=True) + gradients


def _work_item_bytes(inputs: LSHInputs, dtype: torch.dtype, *, backward: bool = False) -> int:
    """Return the bytes of the largest work item.

    The sort of its hash rounds, the padding of its rows and the kernel follow each other; the
    kernel has the padded rows and 3/8 of the sort's bytes.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    groups, most = q.shape[1] // k.shape[1], 0
    for item in split_work(inputs._replace(query_segments=None, key_segments=None)):
        units = k.shape[0] * len(range(*item.heads.indices(item.key_heads)))
        queries = units * groups * (item.level.end - item.level.begin)
        keys = units * item.level.keys
        rounds = inputs.options.num_hashes if item.level.pivot_keys else 0
        sort = rounds * (SORT_BYTES[0] * queries + SORT_BYTES[1] * keys)
        rows, padding, unpadded, gradients = 0, 0, 0, 0
        for x, count in ((q, queries), (k, keys), (v, keys)):
            is_view = count == x.shape[:3].numel() and x.dtype == dtype and x.is_contiguous()
            row, padded = count * x.shape[3] * dtype.itemsize, x.new_empty(count, x.shape[3])
            gradients += simd_bytes(dtype, padded)
            rows += 0 if is_view else row
            if x.shape[3] % LANES:
                padding += simd_bytes(dtype, padded)
                unpadded += 0 if is_view else row
        written = v.new_empty(queries, v.shape[3])  # the output, or its gradient
        kept = sort * 3 // 8
        kernel = rows - unpadded + padding + kept + simd_bytes(dtype, written)
        item_bytes = max(rows + max(sort, padding + kept), kernel + backward * gradients)
        most = max(most, item_bytes + backward * written.numel() * dtype.itemsize)
    return most


TORCH = lsh_operators("torch", BlockwiseTensors)
CPP = lsh_operators("cpp", CppTensors)
