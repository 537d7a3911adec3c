r"""The delta rule in torch: in chunks, and one token.

The chunk form has one triangular system inside a chunk, and one state between chunks. With the
state decayed from the chunk's start, :math:`A_t = e^{b_t}`, the recurrence unrolls to

.. math:: S_t = A_t S_0 + \sum_{j \le t} e^{b_t - b_j} k_j u_j^T, \qquad u_t = \beta_t e_t, \qquad
          e_t = v_t - A_t k_t S_0 - \sum_{j < t} (k_t^T e^{b_t - b_j} k_j)\, u_j

so the prediction errors e solve :math:`(I + L\, \mathrm{diag}(\beta))\, e = V - K_A S_0`, with L
the strictly lower triangle of the decayed products of keys. The system is solved exactly by forward
substitution. With u for values, the rest is linear attention, where keys are one more group of
queries. The chunks are those of :mod:`attnzoo.ops.linear.torch`. Sources: Yang et al., 2024,
arXiv:2406.06484 (the WY form), arXiv:2412.06464 (decay per token); Kimi Team, 2025,
arXiv:2510.26692 (decay per channel). Letters as there.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attnzoo.contract.states import DeltaState, run_on_slots
from attnzoo.ops.delta.common import CHUNK_SIZE, DeltaInputs, Result, normalized
from attnzoo.ops.linear.torch import chunk_scores, scan_chunks


def run_chunks(x: DeltaInputs) -> Result:
    """Compute rows chunk by chunk."""
    x = normalized(x)
    tokens = (x.q, x.k, x.v, x.beta.unsqueeze(-1))
    chunk = partial(_delta_chunk, scale=x.scale)
    size, (kv,) = x.chunk_size or CHUNK_SIZE, x.first_state()
    out, kv = scan_chunks(chunk, size, tokens, x.log_decay, kv)
    return out.to(x.v.dtype), DeltaState(kv)


def _delta_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output of a chunk, ``[N, C * G, E]``, and the state after it."""
    per_token = (k.shape[1], -1)  # queries of a token, the last of which is its key
    queries = torch.cat([(q * scale).unflatten(1, per_token), k.unsqueeze(2)], 2).flatten(1, 2)
    c = chunk_scores(queries, k, log_decay)
    of_state, of_keys = ((c.q @ kv).unflatten(1, per_token), c.scores.unflatten(1, per_token))
    errors = _solve(of_keys[:, :, -1] * beta.mT, v - of_state[:, :, -1])
    u = errors * beta
    scores, from_state = of_keys[:, :, :-1].flatten(1, 2), of_state[:, :, :-1].flatten(1, 2)
    kv = kv if c.state is None else kv * c.state.mT
    return torch.baddbmm(from_state, scores, u), torch.baddbmm(kv, c.k.mT, u)


def _solve(triangle: Tensor, x: Tensor) -> Tensor:
    """Solve ``(I + triangle) y = x``, ``[N, C, E]``; the diagonal is taken for ones.

    The transposed system suits rows that are contiguous: half the time of the plain call.
    """
    y: Tensor = torch.linalg.solve_triangular(
        triangle.mT, x.mT, upper=True, left=False, unitriangular=True
    )
    return y.mT


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


def _column(x: DeltaInputs) -> torch.Tensor:
    """Return the log decays of one token as ``[B or 1, Hkv, D or 1, 1]``."""
    assert x.log_decay is not None
    if x.log_decay.dim() == 4:
        return x.log_decay.mT
    return x.log_decay.view(-1, x.k.shape[1], 1, 1)
