r"""Bidirectional linear attention: sums over all keys, which every query multiplies.

:math:`o_t = q_t S / (q_t z + \epsilon)` with :math:`S = \sum_j k_j v_j^T`, :math:`z = \sum_j k_j`,
in O(D E) for each query and key. On CPUs, tokens are processed in chunks that fit into the cache;
only the results have length T, and both passes are custom operators, as in
:mod:`attnzoo.ops.linear.chunk`. On GPUs, where each chunk would be several launches, two
products compute all tokens. Letters are those of
:mod:`attnzoo.ops.linear.chunk_common`; S may differ from T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.states import LinearState
from attnzoo.ops.linear.chunk_common import (
    ChunkInputs,
    ChunkIterator,
    Sums,
    clone_contiguous,
    grouped,
)
from attnzoo.ops.linear.common import LinearInputs, Result
from attnzoo.runtime.autocast import autocast_disabled
from attnzoo.runtime.derivatives import check_reverse_mode, refuse_derivative
from attnzoo.runtime.memory import empty_huge_pages

TOKENS = 128  # per chunk


def run_bidirectional(x: LinearInputs) -> Result:
    """Compute a call in which tokens see all keys."""
    state = x.first_state()
    check_reverse_mode("linear_attention", x.q, x.k, x.v, *state)
    if takes_products(x.q.device):
        return _run_products(x, state)
    out, kv, z = bidirectional_linear(x.q, x.k, x.v, *state, x.scale, x.normalize, x.eps)
    return out, LinearState(kv, z)


def takes_products(device: torch.device) -> bool:
    """Return whether tokens are not divided into chunks on a device."""
    return device.type == "cuda"


def _run_products(x: LinearInputs, state: LinearState) -> Result:
    """Compute a call in two products, and two sums for the denominator.

    Factors have the dtype of the state: gradients of a normalised output nearly cancel, and the
    products of 16-bit factors would round the sums.
    """
    dtype, (kv, z) = state.kv.dtype, state
    k, v = x.k.to(dtype), x.v.to(dtype)
    kv, z = kv + k.mT @ v, z + k.sum(2)
    q = x.q.to(dtype).unflatten(1, (k.shape[1], -1)).flatten(2, 3) * x.scale  # [B, Hkv, G T, D]
    out = q @ kv
    if x.normalize:
        out = out / (q @ z.unsqueeze(-1) + x.eps)
    out = out.view(*x.q.shape[:3], v.shape[3]).to(x.v.dtype)
    return out, LinearState(kv, z)


@torch.library.custom_op("attnzoo::linear_bidirectional", mutates_args=())
def bidirectional_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    z: Tensor,
    scale: float,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the two sums, which include the given ones."""
    inputs = ChunkInputs(grouped(q, k), k, v, None, scale, TOKENS, kv.dtype)
    out = empty_huge_pages(v, (*inputs.q.shape[:-1], v.shape[-1]))
    kv, z = clone_contiguous(kv), clone_contiguous(z).unsqueeze(2)
    with autocast_disabled(q.device):
        for b, h in inputs.parts():
            chunks = ChunkIterator(inputs.part(b, h))
            sums = Sums(kv[b, h].flatten(0, 1), z[b, h].flatten(0, 1))
            for i in range(len(chunks.k)):
                sums.advance(chunks.load(chunks.k[i]), chunks.load(chunks.v[i]), None)
            for i, piece in enumerate(chunks.split(out[b, h])):
                rows = chunks.queries(i)
                divisor = _denominator(rows, sums.z, eps) if normalize else None
                chunks.store(piece, torch.bmm(rows, sums.kv), divisor)
    return out.flatten(1, 2), kv, z.squeeze(2)


@torch.library.custom_op("attnzoo::linear_bidirectional_backward", mutates_args=())
def bidirectional_linear_backward(
    d_out: Tensor,
    d_kv: Tensor,
    d_z: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    z: Tensor,
    scale: float,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the given sums; ``kv`` and ``z`` are the outputs."""
    inputs = ChunkInputs(grouped(q, k), k, v, None, scale, TOKENS, kv.dtype)
    d_out, z = grouped(d_out, k), z.unsqueeze(2)
    d_kv, d_z = clone_contiguous(d_kv), clone_contiguous(d_z).unsqueeze(2)
    dq, dk, dv = (empty_huge_pages(x, x.shape) for x in inputs[:3])
    with autocast_disabled(q.device):
        for b, h in inputs.parts():
            chunks = ChunkIterator(inputs.part(b, h))
            d_outs, dqs, dks, dvs = (chunks.split(x[b, h]) for x in (d_out, dq, dk, dv))
            sums = Sums(kv[b, h].flatten(0, 1), z[b, h].flatten(0, 1))
            d_sums = Sums(d_kv[b, h].flatten(0, 1), d_z[b, h].flatten(0, 1))
            for i, piece in enumerate(dqs):
                rows, d_out_rows = chunks.queries(i), chunks.load(d_outs[i], groups=chunks.groups)
                d_q = _queries_backward(rows, d_out_rows, sums, d_sums, eps if normalize else None)
                chunks.store(piece, d_q.mul_(scale))
            for i, piece in enumerate(dks):
                keys, values = chunks.load(chunks.k[i]), chunks.load(chunks.v[i])
                chunks.store(piece, torch.baddbmm(d_sums.z, values, d_sums.kv.mT))
                chunks.store(dvs[i], torch.bmm(keys, d_sums.kv))
    return dq.flatten(1, 2), dk, dv, d_kv, d_z.squeeze(2)


def _queries_backward(
    rows: Tensor, d_out_rows: Tensor, sums: Sums, d_sums: Sums, eps: float | None
) -> Tensor:
    """Return the gradient of a chunk's queries, and add the gradient of the sums to ``d_sums``."""
    if eps is not None:
        inverse = _denominator(rows, sums.z, eps).reciprocal_()
        d_out_rows = d_out_rows * inverse
    d_q = torch.bmm(d_out_rows, sums.kv.mT)
    d_sums.kv.baddbmm_(rows.mT, d_out_rows)
    if eps is not None:
        d_divisor = (rows * d_q).sum(-1, keepdim=True).mul_(inverse).neg_()
        d_q.addcmul_(d_divisor, sums.z)
        d_sums.z.add_((rows * d_divisor).sum(1, keepdim=True))
    return d_q


def _denominator(rows: Tensor, z: Tensor, eps: float) -> Tensor:
    return (rows * z).sum(-1, keepdim=True).add_(eps)


@bidirectional_linear.register_fake
def _bidirectional_linear_fake(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(*q.shape[:-1], v.shape[-1]), kv.new_empty(kv.shape), z.new_empty(z.shape)


@bidirectional_linear_backward.register_fake
def _bidirectional_linear_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in args[3:8])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1:])
    ctx.options = inputs[5:]


def _backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
    grads = bidirectional_linear_backward(d_out, d_kv, d_z, *ctx.saved_tensors, *ctx.options)
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, *(None for _ in ctx.options)


bidirectional_linear.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(bidirectional_linear_backward, "linear_attention")
