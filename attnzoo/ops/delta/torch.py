r"""The delta rule in torch: in chunks, and token by token.

The chunk form has one triangular system inside a chunk, and one state between chunks. With the
state decayed from the chunk's start, :math:`A_t = e^{b_t}`, the recurrence unrolls to

.. math:: S_t = A_t S_0 + \sum_{j \le t} e^{b_t - b_j} k_j u_j^T, \qquad u_t = \beta_t e_t, \qquad
          e_t = v_t - A_t k_t S_0 - \sum_{j < t} (k_t^T e^{b_t - b_j} k_j)\, u_j

so the prediction errors e solve :math:`(I + L\, \mathrm{diag}(\beta))\, e = V - K_A S_0`, with L
the strictly lower triangle of the decayed products of keys. The system is solved exactly by forward
substitution. With u for values, the rest is linear attention: the decays and their gradients come
from :mod:`attnzoo.ops.linear.chunk_common`, where the keys are one more group of queries.

The forward pass of the chunk form computes the chunks of a few heads in order, so that the working
set stays in the cache. For the backward pass it saves the inputs and e, which has the size of the
values. The gradient of e solves the transposed system. Both passes are custom operators, opaque to
``torch.compile``. Sources: Yang et al., 2024, arXiv:2406.06484 (the WY form), arXiv:2412.06464
(decay per token); Kimi Team, 2025, arXiv:2510.26692 (decay per channel).
Letters as in :mod:`attnzoo.ops.linear.chunk_common`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.states import DeltaState, run_on_slots
from attnzoo.ops.delta.common import CHUNK_SIZE, DeltaInputs, Result, normalized
from attnzoo.ops.linear.chunk_common import (
    Chunk,
    ChunkInputs,
    ChunkIterator,
    clone_contiguous,
    grouped,
    pairs_backward,
    states_backwards,
)
from attnzoo.runtime.autocast import autocast_disabled
from attnzoo.runtime.derivatives import check_reverse_mode, refuse_derivative
from attnzoo.runtime.memory import empty_huge_pages


def run_chunks(x: DeltaInputs) -> Result:
    """Compute rows chunk by chunk."""
    x = normalized(x)
    inputs = [x.q, x.k, x.v, x.beta, x.log_decay, x.first_state().kv]
    check_reverse_mode("delta_attention", *inputs)
    differentiable = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in inputs
    )
    out, kv, _ = delta_chunk(*inputs, x.scale, x.chunk_size or CHUNK_SIZE, differentiable)
    return out, DeltaState(kv)


class DeltaChunks(ChunkIterator):
    """The chunks of some key heads of some batch rows; each token's key is its last query."""

    def __init__(self, inputs: ChunkInputs, beta: Tensor) -> None:
        super().__init__(inputs)
        self.beta = self.split(beta.unsqueeze(-1))

    def queries(self, i: int, size: int = 0) -> Tensor:
        """Return scaled queries and then the key of every token, ``[N, C * (G + 1), D]``."""
        k = self.load(self.k[i], size)
        q = super().queries(i, size).view(self.n, k.shape[1], self.groups, -1)
        return torch.cat([q, k.unsqueeze(2)], 2).flatten(1, 2)

    def write_strength(self, i: int) -> Tensor:
        """Return beta of chunk i, ``[N, C, 1]``."""
        return self.load(self.beta[i], self.size(i))

    def advance(self, i: int, kv: Tensor) -> Tensor:
        """Return the state after chunk i from the one before; the values must be the errors e."""
        k, state_decay = self.keys_at_end(i)
        u = self.load(self.v[i], self.size(i)) * self.write_strength(i)
        kv = kv.clone() if state_decay is None else kv * state_decay.mT
        return kv.baddbmm_(k.mT, u)


@torch.library.custom_op("attnzoo::delta_chunk", mutates_args=())
def delta_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    scale: float,
    chunk_size: int,
    keep_errors: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]``, the last state, and the prediction errors.

    The errors, ``[B, Hkv, T, E]`` in the dtype of the state, are what the backward pass needs;
    without ``keep_errors`` they are empty.
    """
    inputs = ChunkInputs(grouped(q, k), k, v, log_decay, scale, chunk_size, kv.dtype)
    out = empty_huge_pages(v, (*inputs.q.shape[:-1], v.shape[-1]))
    last = clone_contiguous(kv)
    errors = empty_huge_pages(kv, (*k.shape[:3], v.shape[3] if keep_errors else 0))
    with autocast_disabled(q.device):
        for b, h in inputs.parts():
            chunks = DeltaChunks(inputs.part(b, h), beta[b, h])
            outs, kept = chunks.split(out[b, h]), chunks.split(errors[b, h])
            state = last[b, h].flatten(0, 1)
            for i in range(chunks.count):
                c, write = chunks.chunk(i), chunks.write_strength(i)
                reads, predicted = _split(torch.bmm(c.q_decayed, state), c)
                scores, products = _split(c.scores, c)
                e = _solve(products * write.mT, c.v - predicted)
                u = e * write
                chunks.store(outs[i], torch.baddbmm(reads, scores, u))
                if keep_errors:
                    chunks.store(kept[i], e)
                if c.state_decay is not None:
                    state.mul_(c.state_decay.mT)
                state.baddbmm_(c.k_decayed.mT, u)
    return out.flatten(1, 2), last, errors


@torch.library.custom_op("attnzoo::delta_chunk_backward", mutates_args=())
def delta_chunk_backward(
    d_out: Tensor,
    d_kv: Tensor,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    errors: Tensor,
    scale: float,
    chunk_size: int,
    want_decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, beta, log_decay (empty without ``want_decay``) and kv."""
    inputs = ChunkInputs(grouped(q, k), k, errors, log_decay, scale, chunk_size, kv.dtype)
    d_out, d_kv = grouped(d_out, k), clone_contiguous(d_kv)
    dq, dk, d_beta = (empty_huge_pages(x, x.shape) for x in (inputs.q, k, beta.unsqueeze(-1)))
    dv = empty_huge_pages(errors, errors.shape, d_out.dtype)
    per_channel = log_decay is not None and log_decay.dim() == 4
    factors = 0 if log_decay is None or not want_decay else k.shape[3] if per_channel else 1
    d_log = empty_huge_pages(kv, (*k.shape[:3], factors))
    with autocast_disabled(q.device):
        for b, h in inputs.parts():
            chunks = DeltaChunks(inputs.part(b, h), beta[b, h])
            d_outs, dqs, dks, dvs, d_betas, d_logs = (
                chunks.split(x[b, h]) for x in (d_out, dq, dk, dv, d_beta, d_log)
            )
            d_state = d_kv[b, h].flatten(0, 1)
            for i, before in states_backwards(chunks.count, kv[b, h].flatten(0, 1), chunks.advance):
                rows = chunks.load(d_outs[i], chunks.size(i), chunks.groups)
                c, write = chunks.chunk(i, for_backward=True), chunks.write_strength(i)
                d_queries, *others = _chunk_backward(c, write, rows, before, d_state, factors > 0)
                chunks.store(dqs[i], d_queries.mul(scale) if scale != 1.0 else d_queries)
                for piece, x in zip((dks[i], dvs[i], d_betas[i], d_logs[i]), others, strict=True):
                    if x is not None:
                        chunks.store(piece, x)
    if not factors:
        d_log = d_log.new_empty(0)
    elif log_decay is not None:
        d_log = d_log.sum((0, 2, 3)) if log_decay.dim() == 1 else d_log.view(log_decay.shape)
        d_log = d_log.to(log_decay.dtype)
    return dq.flatten(1, 2), dk, dv, d_beta.squeeze(-1), d_log, d_kv


def _chunk_backward(
    c: Chunk, write: Tensor, d_rows: Tensor, kv: Tensor, d_kv: Tensor, want_decay: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return one chunk's gradients of q (scaled), k, v, beta and the log decays.

    The values of ``c`` are the errors e. ``kv`` is the state before the chunk. ``d_kv`` is the
    gradient of the state after it, and is updated in place to that of the state before it.
    """
    e, u = c.v, c.v * write
    scores, products = _split(c.scores, c)
    d_u = torch.bmm(scores.mT, d_rows).baddbmm_(c.k_decayed, d_kv)
    # e = (I + L diag(beta))^-1 x, so d_x = beta w with (I + L^T diag(beta)) w = d_u
    w = _solve((products * write).mT, d_u, upper=True)
    d_beta, d_x = (e * w).sum(-1, keepdim=True), w * write
    d_rows = torch.cat([d_rows.unflatten(1, (c.k.shape[1], -1)), -d_x.unsqueeze(2)], 2).flatten(
        1, 2
    )
    d_scores = torch.bmm(d_rows, u.mT)
    _split(d_scores, c)[1].diagonal(dim1=1, dim2=2).zero_()  # e_t does not depend on its own key
    d_q_decayed, d_k_decayed = torch.bmm(d_rows, kv.mT), torch.bmm(u, d_kv.mT)
    d_log_state = None
    if want_decay and c.state_decay is not None:
        d_log_state = c.state_decay * (kv * d_kv).sum(-1).unsqueeze(1)
    d_all, dk, d_log = pairs_backward(c, d_scores, d_q_decayed, d_k_decayed, d_log_state)
    dq, d_keys = _split(d_all, c)
    if c.state_decay is not None:
        d_kv.mul_(c.state_decay.mT)
    d_kv.baddbmm_(c.q_decayed.mT, d_rows)
    return dq, dk.add_(d_keys), d_x, d_beta, d_log


def _split(x: Tensor, c: Chunk) -> tuple[Tensor, Tensor]:
    """Split rows ``[N, C * (G + 1), X]`` into those of queries, ``[N, C * G, X]``, and of keys."""
    x = x.unflatten(1, (c.k.shape[1], -1))
    return x[:, :, :-1].flatten(1, 2), x[:, :, -1]


def _solve(triangle: Tensor, x: Tensor, upper: bool = False) -> Tensor:
    """Solve ``(I + triangle) y = x``, ``[N, C, E]``; the diagonal is taken for ones.

    The transposed system suits rows that are contiguous: half the time of the plain call.
    """
    y: Tensor = torch.linalg.solve_triangular(
        triangle.mT, x.mT, upper=not upper, left=False, unitriangular=True
    )
    return y.mT


@delta_chunk.register_fake
def _delta_chunk_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, _, _, kv, *_, keep_errors = args
    errors = kv.new_empty(*k.shape[:3], v.shape[3] if keep_errors else 0)
    return v.new_empty(*q.shape[:-1], v.shape[-1]), kv.new_empty(kv.shape), errors


@delta_chunk_backward.register_fake
def _delta_chunk_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    d_out, _, q, k, beta, log_decay, kv, errors, *_, want_decay = args
    d_log = q.new_empty(0) if log_decay is None or not want_decay else log_decay
    dv = d_out.new_empty(errors.shape)
    return (*(x.new_empty(x.shape) for x in (q, k, dv, beta, d_log, kv)),)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, beta, log_decay, kv, *options, _ = inputs
    ctx.save_for_backward(q, k, beta, log_decay, kv, output[2])
    ctx.options = options


def _backward(ctx: Any, d_out: Tensor, d_kv: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    want_decay = ctx.needs_input_grad[4]
    grads = delta_chunk_backward(d_out, d_kv, *ctx.saved_tensors, *ctx.options, want_decay)
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None, None


delta_chunk.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(delta_chunk_backward, "delta_attention")


def step(x: DeltaInputs) -> Result:
    """Compute one token: a few operations of fixed shapes, which a CUDA graph can capture."""
    return run_on_slots(x, _step_on_rows)


def _step_on_rows(x: DeltaInputs) -> Result:
    x = normalized(x)
    (kv,) = x.first_state()
    batch, heads, _, size = x.q.shape
    key_heads = x.k.shape[1]
    q = x.q.to(kv.dtype).reshape(batch, key_heads, heads // key_heads, size)
    if x.scale != 1.0:
        q = q * x.scale
    k, v, beta = x.k.to(kv.dtype), x.v.to(kv.dtype), x.beta.to(kv.dtype).unsqueeze(-1)
    if x.log_decay is not None:
        decay = _column(x).to(kv.dtype).exp()
        kv = kv.mul_(decay) if x.reuse_state else kv * decay
    update = beta * (v - k @ kv)
    kv = kv.addcmul_(k.mT, update) if x.reuse_state else torch.addcmul(kv, k.mT, update)
    return (q @ kv).view(batch, heads, 1, v.shape[3]).to(x.v.dtype), DeltaState(kv)


def run_steps(x: DeltaInputs, step: Callable[[DeltaInputs], Result]) -> Result:
    """Compute all tokens of rows, one step after another, with the implementation of one token."""
    x = normalized(x)
    outs, state = [x.v.new_empty(*x.q.shape[:2], 0, x.v.shape[3])], x.state
    for t in range(x.k.shape[2]):
        out, state = step(x.tokens(t, t + 1)._replace(state=state))
        outs.append(out)
    return torch.cat(outs, 2), state


def _column(x: DeltaInputs) -> torch.Tensor:
    """Return the log decays of one token as ``[B or 1, Hkv, D or 1, 1]``."""
    assert x.log_decay is not None
    if x.log_decay.dim() == 4:
        return x.log_decay.mT
    return x.log_decay.view(-1, x.k.shape[1], 1, 1)
