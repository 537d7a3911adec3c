r"""Linear attention in torch: plain operations and autograd, in chunks or in two products.

A causal call is dense inside a chunk, with one state per key head between chunks. With gradients,
each chunk is a checkpoint: only its inputs and the state before it are kept.

Query i sees key j of its chunk with weight ``exp(b_i - b_j)``, where b is the cumulative sum of the
log decays. It is exact for any gate, however strong:

- *Scalar* decay (one per token): the differences are computed in float64. For float64 results, they
  would cancel, so that chunks are computed as with a decay per channel.
- Decay *per channel* (of the keys): every pair has one weight per channel, and the split into
  ``exp(b_i) exp(-b_j)`` overflows. Instead, blocks of 1, 2, 4 ... tokens are joined in pairs. The
  scores between the second block's queries and the first block's keys are one product of queries
  decayed from the border and keys decayed to it; then each block is decayed by the other's total.

Other letters: N batch times key heads, C tokens of a chunk, F decays per token (1 or D). Queries of
a chunk are folded to ``[N, C * G, D]``, token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attnzoo.contract.states import LinearState, run_on_slots
from attnzoo.ops.linear.common import (
    CHUNK_SIZE,
    LinearInputs,
    Result,
    log_decay_per_token,
    map_inputs,
)
from attnzoo.runtime.kernel_calls import autocast_disabled, is_transformed

LOWEST_LOG_DECAY = -1e4  # its exponential is 0 in every dtype; lower log decays are clamped to it
LOWEST_NORMAL = {torch.float32: -87.0, torch.float64: -708.0}  # logarithms of normal numbers


def run_torch(x: LinearInputs) -> Result:
    """Compute a call on rows of features."""
    return run_chunks(x) if x.causal else _run_products(x)


def run_chunks(x: LinearInputs) -> Result:
    """Compute a causal call chunk by chunk."""
    kv, z = x.first_state()
    chunk = partial(_linear_chunk, scale=x.scale, eps=x.eps if x.normalize else None)
    size = x.chunk_size or CHUNK_SIZE
    out, kv, z = scan_chunks(chunk, size, (x.q, x.k, x.v), x.log_decay, kv, z)
    return out.to(x.v.dtype), LinearState(kv, z)


def _run_products(x: LinearInputs) -> Result:
    """Compute a call in which tokens see all keys: two products, and two sums.

    Factors have the dtype of the state: gradients of a normalised output nearly cancel, and the
    products of 16-bit factors would round the sums.
    """
    kv, z = x.first_state()
    k, v = x.k.to(kv.dtype), x.v.to(kv.dtype)
    kv, z = kv + k.mT @ v, z + k.sum(2)
    q = x.q.to(kv.dtype).unflatten(1, (k.shape[1], -1)).flatten(2, 3) * x.scale  # [B, Hkv, G T, D]
    out = q @ kv
    if x.normalize:
        out = out / (q @ z.unsqueeze(-1) + x.eps)
    return out.view(*x.q.shape[:3], v.shape[3]).to(x.v.dtype), LinearState(kv, z)


def _linear_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    scale: float,
    eps: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of a chunk, ``[N, C * G, E]``, and the state after it."""
    c = chunk_scores(q * scale if scale != 1.0 else q, k, log_decay)
    out = torch.baddbmm(c.q @ kv, c.scores, v)
    if eps is not None:
        out = out / (c.scores.sum(-1, keepdim=True) + c.q @ z.unsqueeze(-1) + eps)
    if c.state is not None:
        kv, z = kv * c.state.mT, z * c.state.squeeze(1)
    return out, torch.baddbmm(kv, c.k.mT, v), z + c.k.sum(1)


def scan_chunks(
    chunk: Callable[..., tuple[Tensor, ...]],
    size: int,
    tokens: tuple[Tensor, ...],
    log_decay: Tensor | None,
    *state: Tensor,
) -> list[Tensor]:
    """Run a function on one chunk of ``size`` tokens after another.

    Args:
        chunk: Gets a chunk of each tensor of ``tokens``, its log decays or ``None``, and the state,
            and returns the output, ``[N, C * G, E]``, and the next state.
        size: C, in tokens.
        tokens: Queries, ``[B, H, T, D]``, keys, ``[B, Hkv, T, D]``, and others like keys.
        log_decay: ``[Hkv]``, ``[B, Hkv, T]`` or ``[B, Hkv, T, D]``, or ``None``.
        state: ``[B, Hkv, ...]``, in the dtype of the chunks.

    Returns:
        The output, ``[B, H, T, E]``, and the last state.
    """
    batch, heads, length, _ = tokens[1].shape
    groups = tokens[0].shape[1] // heads
    if log_decay is not None and log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(batch, heads, length)
    if log_decay is not None and log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(3)
    every = [x for x in (*tokens, log_decay, *state) if x is not None]
    keep_graph = torch.is_grad_enabled() and any(x.requires_grad for x in every)
    if keep_graph and not is_transformed():
        chunk = partial(
            checkpoint, chunk, use_reentrant=False, preserve_rng_state=False,
            determinism_check="none",
        )  # fmt: skip
    dtype, shape = state[0].dtype, state[0].shape[:2]
    last = [x.flatten(0, 1) for x in state]
    decays = (None,) * -(-length // size) if log_decay is None else log_decay.split(size, 2)
    outs = []
    for (q, *others), decay in zip(
        zip(*(x.split(size, 2) for x in tokens), strict=True), decays, strict=True
    ):
        q = q.unflatten(1, (heads, groups)).transpose(2, 3).reshape(batch * heads, -1, q.shape[3])
        others = [x.to(dtype).flatten(0, 1) for x in others]
        decay = None if decay is None else decay.flatten(0, 1)
        out, *last = chunk(q.to(dtype), *others, decay, *last)
        outs.append(out.view(batch, heads, -1, groups, out.shape[2]))
    out = torch.cat(outs, 2).transpose(2, 3).flatten(1, 2)
    return [out, *(x.unflatten(0, shape) for x in last)]


def exp_flush_denormals(x: Tensor) -> Tensor:
    """Return exponentials; denormal ones, which slow later operations down, are 0."""
    return x.masked_fill(x < LOWEST_NORMAL[x.dtype], -torch.inf).exp()


class Scores(NamedTuple):
    """The products of a chunk's queries and keys, and what decays with the tokens."""

    scores: Tensor  # decayed, [N, C * G, C]; 0 for future keys
    q: Tensor  # queries, decayed from the chunk's start
    k: Tensor  # keys, decayed to its end
    state: Tensor | None  # decay of the state over the chunk, [N, 1, F]


def chunk_scores(q: Tensor, k: Tensor, log_decay: Tensor | None) -> Scores:
    """Return the products of queries ``[N, C * G, D]`` and keys under log decays ``[N, C, F]``."""
    if log_decay is not None and (log_decay.shape[2] > 1 or k.dtype == torch.float64):
        return _joined_scores(q, k, log_decay)
    size = k.shape[1]
    future = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    scores = (q @ k.mT).unflatten(1, (size, -1))  # [N, C, G, C]
    if log_decay is None:
        return Scores(scores.masked_fill(future.unsqueeze(1), 0).flatten(1, 2), q, k, None)
    sums = log_decay.double().clamp(min=LOWEST_LOG_DECAY).cumsum(1)
    between = exp_flush_denormals((sums - sums.mT).to(k.dtype).masked_fill(future, -torch.inf))
    from_start, to_end = (x.exp().to(k.dtype) for x in (sums, sums[:, -1:] - sums))
    scores = (scores * between.unsqueeze(2)).flatten(1, 2)
    q = (q.unflatten(1, (size, -1)) * from_start.unsqueeze(2)).flatten(1, 2)
    return Scores(scores, q, k * to_end, from_start[:, -1:])


def _joined_scores(q: Tensor, k: Tensor, log_decay: Tensor) -> Scores:
    """Compute :func:`chunk_scores` by joins of pairs of blocks."""
    n, size, d = k.shape
    missing = (1 << (size - 1).bit_length()) - size
    gates = exp_flush_denormals(log_decay.to(k.dtype))
    if missing:
        groups = q.shape[1] // size
        q, k = pad(q, (0, 0, 0, missing * groups)), pad(k, (0, 0, 0, missing))
        gates = pad(gates, (0, 0, 0, missing), value=1.0)
    total, k = gates.reshape(-1, 1, gates.shape[2]), k.reshape(-1, 1, d)
    q = q.reshape(len(k), -1, d)
    scores = q @ k.mT
    q = q * total
    while len(total) > n:
        (q, q2), (k, k2), (total, total2), (scores, scores2) = (
            x.view(-1, 2, *x.shape[1:]).unbind(1) for x in (q, k, total, scores)
        )
        across = torch.cat([q2 @ k.mT, scores2], 2)
        scores = torch.cat([pad(scores, (0, scores.shape[2])), across], 1)
        q, k = torch.cat([q, q2 * total], 1), torch.cat([k * total2, k2], 1)
        total = total * total2
    if missing:
        q, k = q[:, : size * groups], k[:, :size]
        scores = scores[:, : size * groups, :size]
    return Scores(scores, q, k, total)


def step(x: LinearInputs) -> Result:
    """Compute one token: a few operations of fixed shapes, which a CUDA graph can capture."""
    with autocast_disabled(x.q.device):
        return run_on_slots(x, _step_on_rows)


def _step_on_rows(x: LinearInputs) -> Result:
    x = map_inputs(x)
    kv, z = x.first_state()
    dtype = kv.dtype
    batch, heads, _, size = x.q.shape
    key_heads = x.k.shape[1]
    q = x.q.to(dtype).reshape(batch, key_heads, heads // key_heads, size)
    if x.scale != 1.0:
        q = q * x.scale
    k, v = x.k.to(dtype), x.v.to(dtype)
    if x.log_decay is not None:
        decay = log_decay_per_token(x.log_decay, x.k).to(dtype).exp()  # [B, Hkv, 1, F]
        if x.reuse_state:
            kv.mul_(decay.mT), z.mul_(decay.squeeze(2))
        else:
            kv, z = kv * decay.mT, z * decay.squeeze(2)
    if x.reuse_state:
        kv.addcmul_(k.mT, v), z.add_(k.squeeze(2))
    else:
        kv, z = torch.addcmul(kv, k.mT, v), z + k.squeeze(2)
    out = q @ kv
    if x.normalize:
        out = out / (q @ z.unsqueeze(-1) + x.eps)
    return out.view(batch, heads, 1, v.shape[3]).to(x.v.dtype), LinearState(kv, z)
