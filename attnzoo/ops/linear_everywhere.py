r"""Bidirectional linear attention: the sums run over all keys, then every query reads them.

:math:`o_t = q_t S / (q_t z + \epsilon)` with :math:`S = \sum_j k_j v_j^T`, :math:`z = \sum_j k_j`,
in O(D E) for each query and key. A stretch of tokens is worked on at a time, so that it stays in
the cache; nothing of their length is made but the results. Both passes are custom operators, as in
:mod:`attnzoo.ops.linear_chunk`. Letters as in :mod:`attnzoo.ops.linear_walk`; there may be more or
fewer keys than queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.ops.linear_chunk import linear_chunk
from attnzoo.ops.linear_reference import LinearInputs, Result
from attnzoo.ops.linear_walk import Sequences, Sums, Walk, as_given, grouped, own
from attnzoo.ops.room import room
from attnzoo.state import LinearState

STRETCH = 128  # tokens at a time


def everywhere(x: LinearInputs) -> Result:
    """Let every token see all keys, or all keys of its segment."""
    if x.segment_ids is not None:
        return _packed(x)
    out, kv, z = linear_everywhere(x.q, x.k, x.v, *x.state, x.scale, x.normalize, x.eps)
    return out, LinearState(kv, z)


@torch.library.custom_op("attnzoo::linear_everywhere", mutates_args=())
def linear_everywhere(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    z: Tensor,
    scale: float,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the two sums, those given included."""
    inputs = Sequences(grouped(q, k), k, v, None, None, scale, STRETCH, kv.dtype)
    out = room(v, (*inputs.q.shape[:-1], v.shape[-1]))
    kv, z = own(kv), own(z).unsqueeze(2)
    with as_given(q):
        for b, h in inputs.parts():
            walk = Walk(inputs.part(b, h))
            sums = Sums(kv[b, h].flatten(0, 1), z[b, h].flatten(0, 1))
            for i in range(len(walk.k)):
                sums.advance(walk.load(walk.k[i]), walk.load(walk.v[i]), None)
            for i, piece in enumerate(walk.cut(out[b, h])):
                rows = walk.queries(i)
                divisor = _denominator(rows, sums.z, eps) if normalize else None
                walk.store(piece, torch.bmm(rows, sums.kv), divisor)
    return out.flatten(1, 2), kv, z.squeeze(2)


@torch.library.custom_op("attnzoo::linear_everywhere_backward", mutates_args=())
def linear_everywhere_backward(
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
    """Return the gradients for q, k, v and the sums given; ``kv`` and ``z`` are those returned."""
    inputs = Sequences(grouped(q, k), k, v, None, None, scale, STRETCH, kv.dtype)
    d_out, z = grouped(d_out, k), z.unsqueeze(2)
    d_kv, d_z = own(d_kv), own(d_z).unsqueeze(2)
    dq, dk, dv = (room(x, x.shape) for x in inputs[:3])
    with as_given(q):
        for b, h in inputs.parts():
            walk = Walk(inputs.part(b, h))
            d_outs, dqs, dks, dvs = (walk.cut(x[b, h]) for x in (d_out, dq, dk, dv))
            sums = Sums(kv[b, h].flatten(0, 1), z[b, h].flatten(0, 1))
            d_sums = Sums(d_kv[b, h].flatten(0, 1), d_z[b, h].flatten(0, 1))
            for i, piece in enumerate(dqs):
                rows, d_rows = walk.queries(i), walk.load(d_outs[i], groups=walk.groups)
                d_q = _queries_backward(rows, d_rows, sums, d_sums, eps if normalize else None)
                walk.store(piece, d_q.mul_(scale))
            for i, piece in enumerate(dks):
                keys, values = walk.load(walk.k[i]), walk.load(walk.v[i])
                walk.store(piece, torch.baddbmm(d_sums.z, values, d_sums.kv.mT))
                walk.store(dvs[i], torch.bmm(keys, d_sums.kv))
    return dq.flatten(1, 2), dk, dv, d_kv, d_z.squeeze(2)


def _queries_backward(
    rows: Tensor, d_rows: Tensor, sums: Sums, d_sums: Sums, eps: float | None
) -> Tensor:
    """Return the gradient of some queries, and add theirs of the sums to ``d_sums``."""
    if eps is not None:
        inverse = _denominator(rows, sums.z, eps).reciprocal_()
        d_rows = d_rows * inverse
    d_reading = torch.bmm(d_rows, sums.kv.mT)
    d_sums.kv.baddbmm_(rows.mT, d_rows)
    if eps is not None:
        d_divisor = (rows * d_reading).sum(-1, keepdim=True).mul_(inverse).neg_()
        d_reading.addcmul_(d_divisor, sums.z)
        d_sums.z.add_((rows * d_divisor).sum(1, keepdim=True))
    return d_reading


def _denominator(rows: Tensor, z: Tensor, eps: float) -> Tensor:
    return (rows * z).sum(-1, keepdim=True).add_(eps)


@linear_everywhere.register_fake
def _linear_everywhere_fake(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(*q.shape[:-1], v.shape[-1]), kv.new_empty(kv.shape), z.new_empty(z.shape)


@linear_everywhere_backward.register_fake
def _linear_everywhere_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in args[3:8])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1:])
    ctx.options = inputs[5:]


def _backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
    grads = linear_everywhere_backward(d_out, d_kv, d_z, *ctx.saved_tensors, *ctx.options)
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, *(None for _ in ctx.options)


linear_everywhere.register_autograd(_backward, setup_context=_setup_context)


def _packed(x: LinearInputs) -> Result:
    """Let every token see all keys of its segment: those up to it, plus those from it on, less one.

    How many segments there are is known only to the data, so no sum per segment can be made.
    The denominator is carried as one more value, of ones.
    """
    assert x.segment_ids is not None
    q, k = x.q.to(x.dtype), x.k.to(x.dtype)
    v = pad(x.v.to(x.dtype), (0, 1), value=1.0)
    kv = torch.cat([x.state.kv, x.state.k.unsqueeze(-1)], -1)
    options = (x.scale, False, x.eps, x.chunk_size, False)
    up_to, kv, _ = linear_chunk(q, k, v, None, kv, x.state.k, x.segment_ids, *options)
    backwards = [t.flip(-2) for t in (q, k, v)]
    nothing = kv.new_zeros(kv.shape), x.state.k.new_zeros(x.state.k.shape)
    onwards, _, _ = linear_chunk(*backwards, None, *nothing, x.segment_ids.flip(-1), *options)
    by_group = q.unflatten(1, (k.shape[1], -1)) * x.scale
    own_part = (by_group * k.unsqueeze(2)).sum(-1, keepdim=True) * v.unsqueeze(2)
    out = up_to + onwards.flip(-2) - own_part.flatten(1, 2)
    out = out[..., :-1] / (out[..., -1:] + x.eps) if x.normalize else out[..., :-1]
    return out.to(x.v.dtype), LinearState(kv[..., :-1], kv[..., -1])
