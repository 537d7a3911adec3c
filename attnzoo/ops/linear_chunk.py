r"""Causal linear attention in chunks: dense inside a chunk, one state per key head between chunks.

The chunks of a few heads are walked in order, so that all that is being worked on stays in the
cache; nothing of length T is made but the results. The backward pass keeps only the inputs. It
walks forward once for the states before every R-th chunk, then back, R chunks at a time, where R is
the root of their number. So it has the state and the gradient of the state at hand together, makes
every product once, and takes the denominator and its gradient from products that it needs anyway,
in float32.

Both passes are custom operators, opaque to ``torch.compile``: no graph break, no unrolled loop.
Letters as in :mod:`attnzoo.ops.linear_walk`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from attnzoo.ops import linear_decay as decay
from attnzoo.ops.linear_cpp import linear_walk
from attnzoo.ops.linear_walk import (
    Chunk,
    Sequences,
    Sums,
    Walk,
    as_given,
    grouped,
    own,
    times,
    times_rows,
)
from attnzoo.ops.room import room


@torch.library.custom_op("attnzoo::linear_chunk", mutates_args=())
def linear_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    segment_ids: Tensor | None,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the two sums of the state after the last token."""
    if compiled:
        options = (segment_ids, scale, eps if normalize else None, chunk_size)
        return linear_walk(q, k, v, log_decay, kv, z, *options)
    inputs = Sequences(grouped(q, k), k, v, log_decay, segment_ids, scale, chunk_size, kv.dtype)
    out = room(v, (*inputs.q.shape[:-1], v.shape[-1]))
    last_kv, last_z = own(kv), own(z).unsqueeze(2)
    with as_given(q):
        for b, h in inputs.parts():
            walk = Walk(inputs.part(b, h))
            outs = walk.cut(out[b, h])
            sums = Sums(last_kv[b, h].flatten(0, 1), last_z[b, h].flatten(0, 1))
            for i in range(walk.count):
                c = walk.chunk(i)
                rows = torch.bmm(c.reading, sums.kv).baddbmm_(c.scores, c.v)
                walk.store(outs[i], rows, _denominator(c, sums.z, eps) if normalize else None)
                sums.advance(c.writing, c.v, c.carry)
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
    segment_ids: Tensor | None,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
    want_decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients for q, k, v, log_decay (empty if not wanted), kv and z."""
    inputs = Sequences(grouped(q, k), k, v, log_decay, segment_ids, scale, chunk_size, kv.dtype)
    d_out = grouped(d_out, k)
    d_kv, d_z, z = own(d_kv), own(d_z).unsqueeze(2), z.unsqueeze(2)
    dq, dk, dv = (room(x, x.shape) for x in inputs[:3])
    d_log = _new_decay_gradient(k, kv.dtype, log_decay if want_decay else None)
    with as_given(q):
        for b, h in inputs.parts():
            walk = Walk(inputs.part(b, h))
            d_outs, dqs, dks, dvs, d_logs = (walk.cut(x[b, h]) for x in (d_out, dq, dk, dv, d_log))
            d_sums = Sums(d_kv[b, h].flatten(0, 1), d_z[b, h].flatten(0, 1))
            first = Sums(kv[b, h].flatten(0, 1), z[b, h].flatten(0, 1))
            for i, before in _states_backwards(walk, first):
                rows = walk.load(d_outs[i], walk.size(i), walk.groups)
                c = walk.chunk(i, keep=True)
                d_rows, d_keys, d_values, d_gates = _chunk_backward(
                    c, rows, before, d_sums, eps if normalize else None, want_decay
                )
                walk.store(dqs[i], d_rows.mul_(scale) if scale != 1.0 else d_rows)
                walk.store(dks[i], d_keys)
                walk.store(dvs[i], d_values)
                if d_gates is not None:
                    walk.store(d_logs[i], d_gates)
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
    """Return one chunk's gradients for q (scaled), k, v and the log decays.

    ``sums`` are those before the chunk; ``d_sums``, the gradients of those after it, become the
    gradients of those before it, in place. ``eps`` is ``None`` where nothing is normalised.
    """
    kv, z = sums
    d_kv, d_z = d_sums
    if eps is not None:
        inverse = _denominator(c, z, eps).reciprocal_()
        d_rows = d_rows * inverse  # of the numerator
    d_scores = torch.bmm(d_rows, c.v.mT)
    d_reading = torch.bmm(d_rows, kv.mT)
    d_sum = None
    if eps is not None:  # numerator times its gradient, from products that are made anyway
        d_sum = (c.scores * d_scores).sum(-1, keepdim=True)
        d_sum.add_((c.reading * d_reading).sum(-1, keepdim=True)).mul_(inverse).neg_()
        d_scores.add_(d_sum)
        d_reading.addcmul_(d_sum, z)
    d_writing = torch.baddbmm(d_z, c.v, d_kv.mT)
    d_values = torch.bmm(c.scores.mT, d_rows).baddbmm_(c.writing, d_kv)
    kept = None
    if want_decay and c.carry is not None:
        kept = c.carry * ((kv * d_kv).sum(-1).unsqueeze(1) + z * d_z)
    dq, dk, d_log = _pairs_backward(c, d_scores, d_reading, d_writing, kept)
    if c.carry is not None:
        d_kv.mul_(c.carry.mT)
        d_z.mul_(c.carry)
    d_kv.baddbmm_(c.reading.mT, d_rows)
    if d_sum is not None:
        d_z.add_((c.reading * d_sum).sum(1, keepdim=True))
    return dq, dk, d_values, d_log


def _pairs_backward(
    c: Chunk, d_scores: Tensor, d_reading: Tensor, d_writing: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Take the gradients of scores, reading and writing back to q, k and the log decays."""
    size, d_log = c.k.shape[1], None
    if kept is not None and c.gates is None:
        products = (c.scores * d_scores).unflatten(1, (size, -1)).sum(2)
        read = (c.reading * d_reading).sum(-1).unflatten(1, (size, -1)).sum(2, keepdim=True)
        written = (c.writing * d_writing).sum(-1, keepdim=True)
        d_log = decay.scalar_backward(products, read, written, kept.sum(-1, keepdim=True))
    if c.factors.pairs is not None:
        d_scores.unflatten(1, (size, -1)).mul_(c.factors.pairs)
    d_reading = times_rows(d_reading, c.factors.reads)
    d_writing = times(d_writing, c.factors.writes)
    if c.gates is not None:
        return decay.vector_backward(
            c.q, c.k, c.gates, c.joins, d_scores, d_reading, d_writing, kept
        )
    dq = d_reading.baddbmm_(d_scores, c.k)
    return dq, d_writing.baddbmm_(d_scores.mT, c.q), d_log


def _states_backwards(walk: Walk, first: Sums) -> Iterator[tuple[int, Sums]]:
    """Yield each chunk's number and the sums before it, from the last chunk to the first.

    Cost: the states are worked out twice, and 2 sqrt(chunks) of them are held at most.
    """
    stride = isqrt(max(walk.count - 1, 0)) + 1
    starts = range(0, walk.count, stride)
    marks = [first]
    for start in starts[:-1]:
        state = marks[-1]
        for i in range(start, start + stride):
            state = walk.state_after(i, state)
        marks.append(state)
    for start in reversed(starts):
        states = [marks.pop()]
        for i in range(start, min(start + stride, walk.count) - 1):
            states.append(walk.state_after(i, states[-1]))
        while states:
            yield start + len(states) - 1, states.pop()


def _denominator(c: Chunk, z: Tensor, eps: float) -> Tensor:
    """Return ``q_t z_t + eps`` of each row, ``[N, C * G, 1]``."""
    inside, carried = c.scores.sum(-1, keepdim=True), (c.reading * z).sum(-1, keepdim=True)
    return inside.add_(carried).add_(eps)


def _new_decay_gradient(k: Tensor, dtype: torch.dtype, log_decay: Tensor | None) -> Tensor:
    """Return room for the gradient of every token's log decay, ``[B, Hkv, T, F]``."""
    if log_decay is None:
        return k.new_empty(*k.shape[:3], 0)
    if log_decay.dim() == 4:
        return room(log_decay, log_decay.shape)
    return k.new_empty(*k.shape[:3], 1, dtype=dtype)


def _shaped(d_log: Tensor, log_decay: Tensor | None) -> Tensor:
    """Bring the gradient of every token's log decay to the shape and type of ``log_decay``."""
    if log_decay is None:
        return d_log.new_empty(0)
    if log_decay.dim() == 1:
        d_log = d_log.sum((0, 2, 3))
    return d_log.view(log_decay.shape).to(log_decay.dtype)


@linear_chunk.register_fake
def _linear_chunk_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, kv: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(*q.shape[:-1], v.shape[-1]), kv.new_empty(kv.shape), z.new_empty(z.shape)


@linear_chunk_backward.register_fake
def _linear_chunk_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    q, k, v, log_decay, kv, z = args[3:9]
    want_decay = args[-1]
    like = (q, k, v, log_decay if want_decay else q.new_empty(0), kv, z)
    return tuple(x.new_empty(x.shape) for x in like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    *ctx.options, _ = inputs[7:]


def _backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    want_decay = ctx.needs_input_grad[3]
    grads = linear_chunk_backward(d_out, d_kv, d_z, *saved, *ctx.options, want_decay)
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, None, *(None for _ in ctx.options), None


linear_chunk.register_autograd(_backward, setup_context=_setup_context)
