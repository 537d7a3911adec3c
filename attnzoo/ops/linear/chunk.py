r"""Causal linear attention in chunks: dense inside a chunk, one state per key head between chunks.

The forward pass computes the chunks of a few heads in order, so that the working set stays in the
cache; only the results have length T. The backward pass saves only the inputs. It recomputes the
states forward, keeps every R-th one, and then runs backward through R chunks at a time, with R the
square root of the number of chunks. It thus has the state and its gradient together, computes every
product once, and takes the denominator and its gradient from products that it needs anyway, in
float32.

Both passes are custom operators, opaque to ``torch.compile``: no graph break, no unrolled loop.
Letters as in :mod:`attnzoo.ops.linear.chunk_common`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.states import LinearState
from attnzoo.ops.linear.chunk_common import (
    Chunk,
    ChunkInputs,
    ChunkIterator,
    Sums,
    clone_contiguous,
    grouped,
    pairs_backward,
    states_backwards,
)
from attnzoo.ops.linear.common import CHUNK_SIZE, LinearInputs, Result
from attnzoo.runtime.autocast import autocast_disabled
from attnzoo.runtime.derivatives import check_reverse_mode, refuse_derivative
from attnzoo.runtime.memory import empty_huge_pages


def run_chunks(x: LinearInputs) -> Result:
    """Compute a causal call chunk by chunk."""
    kv, z = x.first_state()
    check_reverse_mode("linear_attention", x.q, x.k, x.v, x.log_decay, kv, z)
    out, kv, z = linear_chunk(
        *(x.q, x.k, x.v, x.log_decay, kv, z),
        *(x.scale, x.normalize, x.eps, x.chunk_size or CHUNK_SIZE),
    )
    return out, LinearState(kv, z)


@torch.library.custom_op("attnzoo::linear_chunk", mutates_args=())
def linear_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the two sums of the state after the last token."""
    inputs = ChunkInputs(grouped(q, k), k, v, log_decay, scale, chunk_size, kv.dtype)
    out = empty_huge_pages(v, (*inputs.q.shape[:-1], v.shape[-1]))
    last_kv, last_z = clone_contiguous(kv), clone_contiguous(z).unsqueeze(2)
    with autocast_disabled(q.device):
        for b, h in inputs.parts():
            chunks = ChunkIterator(inputs.part(b, h))
            outs = chunks.split(out[b, h])
            sums = Sums(last_kv[b, h].flatten(0, 1), last_z[b, h].flatten(0, 1))
            for i in range(chunks.count):
                c = chunks.chunk(i)
                rows = torch.bmm(c.q_decayed, sums.kv).baddbmm_(c.scores, c.v)
                chunks.store(outs[i], rows, _denominator(c, sums.z, eps) if normalize else None)
                sums.advance(c.k_decayed, c.v, c.state_decay)
    return out.flatten(1, 2), last_kv, last_z.squeeze(2)


@torch.library.custom_op("attnzoo::linear_chunk_backward", mutates_args=())
def linear_chunk_backward(
    d_out: Tensor,
    d_kv: Tensor,
    d_z: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
    want_decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log_decay (empty without ``want_decay``), kv and z."""
    inputs = ChunkInputs(grouped(q, k), k, v, log_decay, scale, chunk_size, kv.dtype)
    d_out = grouped(d_out, k)
    d_kv, d_z = clone_contiguous(d_kv), clone_contiguous(d_z).unsqueeze(2)
    z = z.unsqueeze(2)
    dq, dk, dv = (empty_huge_pages(x, x.shape) for x in inputs[:3])
    d_log = _new_decay_gradient(k, kv.dtype, log_decay if want_decay else None)
    with autocast_disabled(q.device):
        for b, h in inputs.parts():
            chunks = ChunkIterator(inputs.part(b, h))
            d_outs, dqs, dks, dvs, d_logs = (
                chunks.split(x[b, h]) for x in (d_out, dq, dk, dv, d_log)
            )
            d_sums = Sums(d_kv[b, h].flatten(0, 1), d_z[b, h].flatten(0, 1))
            first = Sums(kv[b, h].flatten(0, 1), z[b, h].flatten(0, 1))
            for i, before in states_backwards(chunks.count, first, chunks.state_after):
                rows = chunks.load(d_outs[i], chunks.size(i), chunks.groups)
                c = chunks.chunk(i, for_backward=True)
                d_rows, d_keys, d_values, d_gates = _chunk_backward(
                    c, rows, before, d_sums, eps if normalize else None, want_decay
                )
                chunks.store(dqs[i], d_rows.mul_(scale) if scale != 1.0 else d_rows)
                chunks.store(dks[i], d_keys)
                chunks.store(dvs[i], d_values)
                if d_gates is not None:
                    chunks.store(d_logs[i], d_gates)
    return (
        dq.flatten(1, 2),
        dk,
        dv,
        _shaped(d_log, log_decay if want_decay else None),
        d_kv,
        d_z.squeeze(2),
    )


def _chunk_backward(
    c: Chunk,
    d_rows: Tensor,
    sums: Sums,
    d_sums: Sums,
    eps: float | None,
    want_decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return one chunk's gradients of q (scaled), k, v and the log decays.

    ``sums`` is the state before the chunk. ``d_sums`` is the gradient of the state after it, and is
    updated in place to the gradient of the state before it. ``eps`` is ``None`` without
    normalisation.
    """
    kv, z = sums
    d_kv, d_z = d_sums
    if eps is not None:
        inverse = _denominator(c, z, eps).reciprocal_()
        d_rows = d_rows * inverse  # gradient of the numerator
    d_scores = torch.bmm(d_rows, c.v.mT)
    d_q_decayed = torch.bmm(d_rows, kv.mT)
    d_sum = None
    if eps is not None:  # numerator times its gradient, from products that are computed anyway
        d_sum = (c.scores * d_scores).sum(-1, keepdim=True)
        d_sum.add_((c.q_decayed * d_q_decayed).sum(-1, keepdim=True)).mul_(inverse).neg_()
        d_scores.add_(d_sum)
        d_q_decayed.addcmul_(d_sum, z)
    d_k_decayed = torch.baddbmm(d_z, c.v, d_kv.mT)
    d_values = torch.bmm(c.scores.mT, d_rows).baddbmm_(c.k_decayed, d_kv)
    d_log_state = None
    if want_decay and c.state_decay is not None:
        d_log_state = c.state_decay * ((kv * d_kv).sum(-1).unsqueeze(1) + z * d_z)
    dq, dk, d_log = pairs_backward(c, d_scores, d_q_decayed, d_k_decayed, d_log_state)
    if c.state_decay is not None:
        d_kv.mul_(c.state_decay.mT)
        d_z.mul_(c.state_decay)
    d_kv.baddbmm_(c.q_decayed.mT, d_rows)
    if d_sum is not None:
        d_z.add_((c.q_decayed * d_sum).sum(1, keepdim=True))
    return dq, dk, d_values, d_log


def _denominator(c: Chunk, z: Tensor, eps: float) -> Tensor:
    """Return ``q_t z_t + eps`` of each row, ``[N, C * G, 1]``."""
    inside, from_state = c.scores.sum(-1, keepdim=True), (c.q_decayed * z).sum(-1, keepdim=True)
    return inside.add_(from_state).add_(eps)


def _new_decay_gradient(k: Tensor, dtype: torch.dtype, log_decay: Tensor | None) -> Tensor:
    """Return an empty tensor for the gradients of the log decays, ``[B, Hkv, T, F]``."""
    if log_decay is None:
        return k.new_empty(*k.shape[:3], 0)
    if log_decay.dim() == 4:
        return empty_huge_pages(log_decay, log_decay.shape)
    return k.new_empty(*k.shape[:3], 1, dtype=dtype)


def _shaped(d_log: Tensor, log_decay: Tensor | None) -> Tensor:
    """Return the gradients of the log decays in the shape and dtype of ``log_decay``."""
    if log_decay is None:
        return d_log.new_empty(0)
    if log_decay.dim() == 1:
        d_log = d_log.sum((0, 2, 3))
    return d_log.view(log_decay.shape).to(log_decay.dtype)


def chunk_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, kv: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of the shapes that the forward pass returns."""
    return v.new_empty(*q.shape[:-1], v.shape[-1]), kv.new_empty(kv.shape), z.new_empty(z.shape)


@linear_chunk_backward.register_fake
def _linear_chunk_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    q, k, v, log_decay, kv, z = args[3:9]
    want_decay = args[-1]
    like = (q, k, v, log_decay if want_decay else q.new_empty(0), kv, z)
    return tuple(x.new_empty(x.shape) for x in like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    want_decay = ctx.needs_input_grad[3]
    grads = linear_chunk_backward(d_out, d_kv, d_z, *saved, *ctx.options, want_decay)
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, *(None for _ in ctx.options)


def chunk_autograd(op: Any) -> None:
    """Give a custom operator with the arguments of :func:`linear_chunk` its backward pass."""
    op.register_autograd(_backward, setup_context=_setup_context)


linear_chunk.register_fake(chunk_fake)
chunk_autograd(linear_chunk)
refuse_derivative(linear_chunk_backward, "linear_attention")
