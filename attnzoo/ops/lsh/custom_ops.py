"""Custom operators of LSH attention, so that ``torch.compile`` sees one call per pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.ops.lsh.asymmetric_plan import plan_rounds
from attnzoo.ops.lsh.block_softmax import (
    EMPTY_LSE,
    HIDDEN,
    BlockPlan,
    block_attention,
    block_attention_backward,
)
from attnzoo.ops.lsh.cpu.lsh import CppTensors
from attnzoo.ops.lsh.options import LSHInputs, LSHOptions
from attnzoo.ops.lsh.shared_qk_plan import (
    default_bucket_factors,
    draw_rotations,
    plan_chunks,
    same_memory,
)
from attnzoo.ops.lsh.voronoi_hashing import HashRounds
from attnzoo.ops.lsh.work_items import (
    KEYS,
    QUERIES,
    WorkItem,
    WorkItemTensors,
    split_work,
    to_rows,
)
from attnzoo.runtime.kernel_calls import (
    autocast_disabled,
    check_reverse_mode,
    differentiable_op,
    empty_huge_pages,
)

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


# -- blocks in PyTorch, U key heads of a work item -------------------------------------------------


class BlockwiseTensors:
    """Queries, keys and values of a work item as rows, and its blocks.

    Args:
        item: The work item.
        inputs: Inputs of the call.

    Attributes:
        q: Scaled queries, ``[U G T + 1, D]``; the last row is padding.
        k: Keys, ``[U S, D]``; of unit length in the shared form.
        v: Values, ``[U S, E]``.
        norm: Norms of the keys in the shared form, ``[U S, 1]``.
    """

    def __init__(self, item: WorkItem, inputs: LSHInputs) -> None:
        x, shared_qk = inputs, inputs.options.shared_qk
        self.scale = x.scale
        self.bias = None if x.bias is None else item.pair_bias(x.bias, x.q, x.k)
        one_tensor = shared_qk and same_memory(x.q, x.k)
        q, self.v = item.gather(x.q, QUERIES), item.gather(x.v, KEYS).flatten(0, 2)
        k = q if one_tensor else item.gather(x.k, KEYS)
        self.plan = plan_blocks(item, x, q, k[:, 0])
        _, self.groups, self.length, _ = q.shape
        self.q = to_rows(q)
        self.k = self.q[:-1] if one_tensor else k.flatten(0, 2)
        self.norm: Tensor | None = None
        if shared_qk:
            norm = torch.linalg.vector_norm(self.k, dim=1, keepdim=True)
            self.norm = norm.square_().add_(1e-6 * self.k.shape[1]).sqrt_()
            self.k = torch.div(self.k, self.norm, out=empty_huge_pages(self.k, self.k.shape))
        if x.scale != 1:
            self.q.mul_(x.scale)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Attend; in the shared form, a query that sees no other key attends to its own."""
        out, lse = block_attention(self.q, self.k, self.v, self.plan, self.bias)
        queries, keys = self._self_attending(lse)
        out[queries] = self.v[keys]
        return out[:-1], lse[:-1]

    def backward(
        self, d_out: Tensor, delta: Tensor, lse: Tensor, d_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v; see :class:`WorkItemTensors`."""
        queries, keys = self._self_attending(lse)
        d_own = d_out[queries]
        d_out[queries] = 0
        inputs = (self.q, self.k, self.v, self.plan.batches, self.bias, d_bias)
        dq, dk, dv = block_attention_backward(d_out, delta, lse, *inputs)
        dv.index_add_(0, keys, d_own)
        if self.norm is not None:  # the gradient of k / norm
            along_k = (self.k * dk).sum(1, keepdim=True)
            dk.addcmul_(self.k, along_k, value=-1).div_(self.norm)
        return dq[:-1].mul_(self.scale) if self.scale != 1 else dq[:-1], dk, dv

    def _self_attending(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query rows without other keys, and the rows of their own keys."""
        empty = (lse[:-1, 0] <= EMPTY_LSE / 2) & (self.norm is not None)
        queries = empty.nonzero()[:, 0]
        keys = queries // (self.groups * self.length) * self.length + queries % self.length
        if self.bias is not None:  # it may hide a query's own key too
            own = self.bias.query_offsets[queries] + self.bias.key_offsets[keys]
            visible = self.bias.values.take(own) > HIDDEN
            queries, keys = queries[visible], keys[visible]
        return queries, keys


def plan_blocks(item: WorkItem, inputs: LSHInputs, q: Tensor, k: Tensor) -> BlockPlan:
    """Hash queries ``[U, G, T, D]`` and keys ``[U, S, D]``, and return the blocks."""
    q, k, options, seed = q.float(), k.float(), inputs.options, tuple(inputs.seed.tolist())
    if not options.shared_qk:
        return plan_rounds(HashRounds(q, k, options, item.level, seed))
    length, size = k.shape[1:]
    chunk_size = min(options.chunk_size, length)
    factors = inputs.bucket_factors or default_bucket_factors(length, chunk_size)
    rotations = inputs.rotations
    if rotations is None:
        heads = item.key_heads
        rotations = draw_rotations(heads, size, options.num_hashes, factors, seed)
    rotations = rotations.to(k)[item.heads]
    rotations = rotations.repeat(k.shape[0] // len(rotations), 1, 1, 1)
    return plan_chunks(q, k, rotations, factors, chunk_size=chunk_size, causal=options.causal)


run_torch = lsh_operator("torch", BlockwiseTensors)
run_cpp = lsh_operator("cpp", CppTensors)
