r"""Linear attention written out: dense, and token by token.

Both are differentiated by autograd and say what the fast forms must equal. The dense one is
quadratic in T (with a decay per key channel O(T^2 D) in memory too); the other takes T steps of
O(D E). Letters: B batch, H heads, Hkv key heads, G = H / Hkv, T queries, S keys, D key size,
E value size, F decays per token (1 or D).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.ops.linear_decay import FORGOTTEN
from attnzoo.state import LinearState

Result = tuple[Tensor, LinearState]  # the output, and the state after the last token


class LinearInputs(NamedTuple):
    """What :func:`attnzoo.ops.linear.linear_attention` is given, with defaults filled in."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    normalize: bool
    scale: float
    state: LinearState
    chunk_size: int
    causal: bool
    segment_ids: Tensor | None
    eps: float

    @property
    def dtype(self) -> torch.dtype:
        """The type that sums are kept in."""
        return self.state.kv.dtype

    def tokens(self, start: int, stop: int) -> LinearInputs:
        """Take a stretch of a causal call's tokens."""
        log_decay, ids = self.log_decay, self.segment_ids
        if log_decay is not None and log_decay.dim() > 1:
            log_decay = log_decay[:, :, start:stop]
        q, k, v = (x[:, :, start:stop] for x in (self.q, self.k, self.v))
        ids = None if ids is None else ids[:, start:stop]
        return self._replace(q=q, k=k, v=v, log_decay=log_decay, segment_ids=ids)


class _Weights(NamedTuple):
    """What decay and segments leave of one thing for another."""

    pairs: Tensor  # of each key for each query, [B, Hkv, T, S, F]
    reads: Tensor  # of the state for each query, [B, Hkv, T, F]
    writes: Tensor  # of each key at the end, [B, Hkv, S, F]
    carry: Tensor  # of the state at the end, [B, Hkv, F]


def dense(x: LinearInputs) -> Result:
    r"""Compute :math:`o_i = \sum_j p_{ij} v_j` with :math:`p_{ij} = \sum_d q_{id} k_{jd} w_{ijd}`.

    The weight w is the decay from j to i, zero where i may not see j. A causal call has a token.
    """
    q = x.q.to(x.dtype).unflatten(1, (x.k.shape[1], -1)) * x.scale  # [B, Hkv, G, T, D]
    k, v = x.k.to(x.dtype), x.v.to(x.dtype)
    w = _Weights(*(weight.to(x.dtype) for weight in (_causal if x.causal else _everywhere)(x)))
    if w.pairs.shape[-1] == 1:
        scores = (q @ k.mT.unsqueeze(2)) * w.pairs.squeeze(-1).unsqueeze(2)
    else:
        scores = torch.einsum("bhgid,bhjd,bhijd->bhgij", q, k, w.pairs)
    reading, writing = q * w.reads.unsqueeze(2), k * w.writes
    out = scores @ v.unsqueeze(2) + reading @ x.state.kv.unsqueeze(2)
    if x.normalize:
        carried = (reading * x.state.k[:, :, None, None]).sum(-1, keepdim=True)
        out = out / (scores.sum(-1, keepdim=True) + carried + x.eps)
    kv = x.state.kv * w.carry.unsqueeze(-1) + writing.mT @ v
    last = LinearState(kv, x.state.k * w.carry + writing.sum(2))
    return out.flatten(1, 2).to(x.v.dtype), last


def _causal(x: LinearInputs) -> _Weights:
    """Weigh by the decay between tokens of one segment; what lies ahead weighs nothing."""
    total = per_token(x).double().clamp(min=FORGOTTEN).cumsum(2)
    tokens = total.shape[2]
    ids = x.segment_ids
    if ids is None:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=total.device)
    seen = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril()[:, None, :, :, None]
    first = (ids == ids[:, :1])[:, None, :, None]
    pairs = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(~seen, 0).exp() * seen
    reads = total.exp() * first
    return _Weights(pairs, reads, pairs[:, :, -1], reads[:, :, -1])


def _everywhere(x: LinearInputs) -> _Weights:
    """Weigh all tokens of a segment alike."""
    batch, heads, keys, _ = x.k.shape
    pairs = x.k.new_ones(batch, heads, x.q.shape[2], keys, 1)
    writes, carry = x.k.new_ones(batch, heads, keys, 1), x.k.new_ones(batch, heads, 1)
    ids = x.segment_ids
    if ids is None or keys == 0:
        return _Weights(pairs, pairs.new_ones(*pairs.shape[:3], 1), writes, carry)
    pairs = pairs * (ids.unsqueeze(2) == ids.unsqueeze(1))[:, None, :, :, None]
    last = ids[:, -1:]
    return _Weights(
        pairs,
        writes * (ids == ids[:, :1])[:, None, :, None],
        writes * (ids == last)[:, None, :, None],
        carry * (ids[:, :1] == last).unsqueeze(1),
    )


def dense_chunks(x: LinearInputs) -> Result:
    """Take the tokens chunk by chunk, each densely."""
    outs, state = [], x.state
    for start in range(0, x.k.shape[2], x.chunk_size):
        now = x.tokens(start, start + x.chunk_size)
        if x.segment_ids is not None and start > 0:
            state = _fenced(state, x.segment_ids[:, start - 1] == x.segment_ids[:, start])
        out, state = dense(now._replace(state=state))
        outs.append(out)
    return torch.cat(outs, 2), state


def recurrent(x: LinearInputs) -> Result:
    """Take the tokens one by one."""
    outs, state = [], x.state
    for t in range(x.k.shape[2]):
        if x.segment_ids is not None and t > 0:
            state = _fenced(state, x.segment_ids[:, t - 1] == x.segment_ids[:, t])
        out, state = step(x.tokens(t, t + 1)._replace(state=state))
        outs.append(out)
    return torch.cat(outs, 2), state


def step(x: LinearInputs) -> Result:
    """Take one token: a few plain operations of fixed shapes, fit for a captured graph."""
    q, k, v = folded(x), x.k.to(x.dtype), x.v.to(x.dtype)
    kv, z = x.state
    if x.log_decay is not None:
        gates = per_token(x).to(x.dtype).exp()  # [B, Hkv, 1, F]
        kv, z = kv * gates.mT, z * gates.squeeze(2)
    kv, z = torch.addcmul(kv, k.mT, v), z + k.squeeze(2)
    out = q @ kv
    if x.normalize:
        out = out / (q @ z.unsqueeze(-1) + x.eps)
    return out.view(*x.q.shape[:3], v.shape[3]).to(x.v.dtype), LinearState(kv, z)


def folded(x: LinearInputs) -> Tensor:
    """Return the scaled queries, a group's heads below each other, ``[B, Hkv, G * T, D]``."""
    batch, heads, queries, size = x.q.shape
    q = x.q.to(x.dtype).reshape(batch, x.k.shape[1], heads // x.k.shape[1] * queries, size)
    return q if x.scale == 1.0 else q * x.scale


def per_token(x: LinearInputs) -> Tensor:
    """Return the log decays of any accepted shape as ``[B, Hkv, S, F]``."""
    log_decay = x.k.new_zeros(x.k.shape[1]) if x.log_decay is None else x.log_decay
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(x.k.shape[0], -1, x.k.shape[2])
    return log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)


def empty_state(q: Tensor, k: Tensor, v: Tensor) -> LinearState:
    """Return the sums over no token."""
    z = torch.zeros(*k.shape[:2], k.shape[3], dtype=state_dtype(q, k, v), device=v.device)
    return LinearState(z.new_zeros(*z.shape, v.shape[3]), z)


def state_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """Return the type that sums are kept in: float32, or float64 where any input is."""
    return torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32


def _fenced(state: LinearState, same: Tensor) -> LinearState:
    """Drop the state of those rows of the batch that begin another segment; ``same`` is ``[B]``."""
    kept = same[:, None, None].to(state.k.dtype)
    return LinearState(state.kv * kept.unsqueeze(-1), state.k * kept)
