"""Iterate over the chunks of causal linear attention: code that both passes share.

Other letters: N = batch rows times key heads in one iterator, F decays per token (1 or D). Queries
of a chunk are folded to ``[N, C * G, D]``, token by token. Chunks have the dtype of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.ops.linear import decay

CACHE_BYTES = 2**21  # per core, of the L2 and L3 caches; measured from 1/4 to 4 MiB


State = TypeVar("State")


class ChunkInputs(NamedTuple):
    """Inputs of the chunk form, of the whole batch or of some rows and key heads."""

    q: Tensor  # [B, Hkv, G, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    log_decay: Tensor | None  # [Hkv], [B, Hkv, T] or [B, Hkv, T, D]
    scale: float
    chunk_size: int
    dtype: torch.dtype  # of the sums

    def part(self, b: slice, h: slice) -> ChunkInputs:
        """Return the inputs of some rows and key heads."""
        log_decay = self.log_decay
        if log_decay is not None:
            log_decay = log_decay[h] if log_decay.dim() == 1 else log_decay[b, h]
        return self._replace(
            q=self.q[b, h],
            k=self.k[b, h],
            v=self.v[b, h],
            log_decay=log_decay,
        )

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and key heads that one iterator computes; several rows have all heads."""
        batch, heads, groups, tokens, d = self.q.shape
        chunk_size = min(self.chunk_size, tokens)
        at_once = heads_at_once(chunk_size, groups, d, self.v.shape[-1], self.q.device)
        rows, cols = _even(batch, at_once // heads), _even(heads, at_once)
        for b in range(0, batch, rows):
            for h in range(0, heads, cols):
                yield slice(b, b + rows), slice(h, h + cols)


class Sums(NamedTuple):
    """The state of one iterator's heads, or its gradient."""

    kv: Tensor  # [N, D, E]
    z: Tensor  # [N, 1, D]

    def advance(self, k: Tensor, v: Tensor, state_decay: Tensor | None) -> None:
        """Decay the state and add a chunk's keys and values, in place."""
        if state_decay is not None:
            self.kv.mul_(state_decay.mT)
            self.z.mul_(state_decay)
        self.kv.baddbmm_(k.mT, v)
        self.z.add_(k.sum(1, keepdim=True))


class Factors(NamedTuple):
    """Factors from decay; ``None`` stands for ones."""

    pairs: Tensor | None = None  # from key to query, [N or 1, C, 1, C]
    q: Tensor | None = None  # from the incoming state to each query, [N, C, 1, 1]
    k: Tensor | None = None  # from each key to the chunk's end, [N, C, 1]
    state: Tensor | None = None  # from the incoming state to the chunk's end, [N, 1, 1]


class Chunk(NamedTuple):
    """One chunk, padded with zeros to C tokens."""

    q: Tensor  # [N, C * G, D], scaled
    k: Tensor  # [N, C, D]
    v: Tensor  # [N, C, E]
    scores: Tensor  # [N, C * G, C], decayed and masked
    q_decayed: Tensor  # q times the decay since the chunk's start
    k_decayed: Tensor  # k times the decay until the chunk's end
    state_decay: Tensor | None  # over the chunk, [N, 1, F]
    factors: Factors  # of scores, queries and keys; without the decay per channel
    gates: Tensor | None  # exponentials of the log decays per channel, [N, C, D]
    joins: list[decay.Join]  # of the decay per channel


class ChunkIterator:
    """The chunks of some key heads of some batch rows, by index."""

    def __init__(self, inputs: ChunkInputs) -> None:
        self.batch, self.heads, self.groups, self.tokens, _ = inputs.q.shape
        self.n = self.batch * self.heads
        self.scale, self.chunk_size, self.dtype = inputs.scale, inputs.chunk_size, inputs.dtype
        self.count = -(-self.tokens // self.chunk_size)
        self.q, self.k, self.v = (self.split(x) for x in (inputs.q, inputs.k, inputs.v))
        self.log_decay: tuple[Tensor, ...] | None = None
        log_decay = inputs.log_decay
        self.per_channel = log_decay is not None and log_decay.dim() == 4
        self.constant = log_decay is None or log_decay.dim() == 1
        self.cache: dict[int, Factors] = {}  # by chunk length, if the decay is constant
        if log_decay is not None:
            if log_decay.dim() == 1:
                log_decay = log_decay[:, None].expand(self.batch, -1, self.tokens)
            self.log_decay = self.split(log_decay if self.per_channel else log_decay.unsqueeze(-1))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the chunks of ``[b, h, (G,) T, X]``; b and h are merged if that needs no copy."""
        if x.dim() == 5 and self.groups == 1:
            x = x.squeeze(2)
        if self.batch == 1 or self.heads == 1 or x.stride(0) == x.shape[1] * x.stride(1):
            x = x.flatten(0, 1)
        pieces: tuple[Tensor, ...] = x.split(self.chunk_size, -2)
        return pieces

    def size(self, i: int) -> int:
        """Return C of chunk i: its tokens, rounded up to a power of two for decay per channel."""
        tokens = self.k[i].shape[-2]
        return 1 << (tokens - 1).bit_length() if self.per_channel else tokens

    def load(self, piece: Tensor, size: int = 0, groups: int = 1) -> Tensor:
        """Return a chunk of an input as ``[N, C * G, X]``, padded to ``size`` tokens."""
        if groups > 1:
            piece = piece.reshape(self.n, groups, *piece.shape[-2:]).transpose(1, 2)
        if piece.dim() > 3:
            piece = piece.reshape(self.n, -1, piece.shape[-1])
        x = piece.to(self.dtype)
        missing = size * groups - x.shape[1]
        return pad(x, (0, 0, 0, missing)) if missing > 0 else x

    def queries(self, i: int, size: int = 0) -> Tensor:
        """Return the scaled queries of chunk i, ``[N, C * G, D]``."""
        q = self.load(self.q[i], size, self.groups)
        return q if self.scale == 1.0 else q * self.scale

    def store(self, piece: Tensor, x: Tensor, divisor: Tensor | None = None) -> None:
        """Write ``[N, C * G, X]`` without its padding to a chunk of a result."""
        x = self.view_as(x, piece)
        if divisor is None:
            piece.copy_(x)
        else:
            torch.div(x, self.view_as(divisor, piece), out=piece)

    def view_as(self, x: Tensor, piece: Tensor) -> Tensor:
        """View ``[N, C * G, X]`` in the layout of ``piece``, ``[N, (G,) tokens, X]``."""
        if piece.dim() == 4:
            x = x.view(self.n, -1, self.groups, x.shape[-1]).transpose(1, 2)
        tokens = piece.shape[-2]
        return x if x.shape[-2] == tokens else x[..., :tokens, :]

    def gates(self, i: int) -> Tensor:
        """Return the exponentials of chunk i's log decays per channel, 1 at padding."""
        assert self.log_decay is not None
        log_decay = self.load(self.log_decay[i], self.size(i))
        return decay.exp_flush_denormals(log_decay.clone(memory_format=torch.contiguous_format))

    def factors(self, i: int, pairs: bool = True) -> Factors:
        """Return the factors of chunk i; those of pairs only if requested."""
        tokens = self.k[i].shape[-2]
        if tokens in self.cache:
            return self.cache[tokens]
        factors, weights = Factors(), None
        if self.log_decay is None:
            ones = torch.ones(tokens, tokens, dtype=self.dtype, device=self.k[0].device)
            factors = Factors(ones.tril_().view(1, tokens, 1, tokens))
        elif not self.per_channel:
            decays = decay.scalar_decays(self.load(self.log_decay[i], tokens), self.dtype)
            if pairs or self.constant:
                weights = decay.scalar_pairs(decays, self.dtype).unsqueeze(2)
            factors = Factors(weights, decays.q.unsqueeze(2), decays.k, decays.state)
        if self.constant:
            self.cache[tokens] = factors
        return factors

    def chunk(self, i: int, for_backward: bool = False) -> Chunk:
        """Load chunk i and compute its scores; ``for_backward`` keeps the joins."""
        size = self.size(i)
        q, k, v = self.queries(i, size), self.load(self.k[i], size), self.load(self.v[i], size)
        factors = self.factors(i)
        gates, state_decay = None, factors.state
        joins: list[decay.Join] = []
        if self.per_channel:
            q, k, gates = q.contiguous(), k.contiguous(), self.gates(i)  # viewed as blocks
            scores, q_decayed, k_decayed, total = decay.channel_scores(
                q, k, gates, joins if for_backward else None
            )
            state_decay = times(total, factors.state)
        else:
            scores, q_decayed, k_decayed = torch.bmm(q, k.mT), q, k
        if factors.pairs is not None:
            scores.view(-1, size, q.shape[1] // size, size).mul_(factors.pairs)
        q_decayed, k_decayed = times_rows(q_decayed, factors.q), times(k_decayed, factors.k)
        return Chunk(q, k, v, scores, q_decayed, k_decayed, state_decay, factors, gates, joins)

    def keys_at_end(self, i: int) -> tuple[Tensor, Tensor | None]:
        """Return chunk i's keys, decayed to its end, and the decay over it, ``[N, 1, F]``."""
        factors = self.factors(i, pairs=False)
        k, state_decay = self.load(self.k[i], self.size(i)), factors.state
        if self.per_channel:
            k, total = decay.channel_keys(k, self.gates(i))
            state_decay = times(total, factors.state)
        return times(k, factors.k), state_decay

    def state_after(self, i: int, before: Sums) -> Sums:
        """Return the state after chunk i from the state before it."""
        k, state_decay = self.keys_at_end(i)
        after = Sums(before.kv.clone(), before.z.clone())
        after.advance(k, self.load(self.v[i], self.size(i)), state_decay)
        return after


def pairs_backward(
    c: Chunk, d_scores: Tensor, d_q_decayed: Tensor, d_k_decayed: Tensor, d_log_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k and the log decays from those of the products' inputs."""
    size, d_log = c.k.shape[1], None
    if d_log_state is not None and c.gates is None:
        products = (c.scores * d_scores).unflatten(1, (size, -1)).sum(2)
        read = (c.q_decayed * d_q_decayed).sum(-1).unflatten(1, (size, -1)).sum(2, keepdim=True)
        written = (c.k_decayed * d_k_decayed).sum(-1, keepdim=True)
        d_log = decay.scalar_backward(products, read, written, d_log_state.sum(-1, keepdim=True))
    if c.factors.pairs is not None:
        d_scores.unflatten(1, (size, -1)).mul_(c.factors.pairs)
    d_q_decayed = times_rows(d_q_decayed, c.factors.q)
    d_k_decayed = times(d_k_decayed, c.factors.k)
    if c.gates is not None:
        return decay.channel_backward(
            c.q, c.k, c.gates, c.joins, d_scores, d_q_decayed, d_k_decayed, d_log_state
        )
    dq = d_q_decayed.baddbmm_(d_scores, c.k)
    return dq, d_k_decayed.baddbmm_(d_scores.mT, c.q), d_log


def states_backwards(
    count: int, first: State, state_after: Callable[[int, State], State]
) -> Iterator[tuple[int, State]]:
    """Yield each chunk's index and the state before it, from the last chunk to the first.

    Computes every state twice, and holds at most 2 sqrt(chunks) of them.

    Args:
        count: Number of chunks.
        first: The state before the first chunk.
        state_after: ``state_after(i, state)`` returns the state after chunk i from the one before.
    """
    stride = isqrt(max(count - 1, 0)) + 1
    starts = range(0, count, stride)
    checkpoints = [first]
    for start in starts[:-1]:
        state = checkpoints[-1]
        for i in range(start, start + stride):
            state = state_after(i, state)
        checkpoints.append(state)
    for start in reversed(starts):
        states = [checkpoints.pop()]
        for i in range(start, min(start + stride, count) - 1):
            states.append(state_after(i, states[-1]))
        while states:
            yield start + len(states) - 1, states.pop()


def grouped(x: Tensor, k: Tensor) -> Tensor:
    """View ``[B, H, T, X]`` as ``[B, Hkv, G, T, X]``."""
    heads = k.shape[1]
    return x.view(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:])


def clone_contiguous(x: Tensor) -> Tensor:
    """Return a contiguous copy, to update in place."""
    return x.clone(memory_format=torch.contiguous_format)


def _even(count: int, most: int) -> int:
    """Return the size of the parts when ``count`` splits evenly into parts of at most ``most``."""
    parts = -(-count // max(most, 1))
    return max(1, -(-count // max(parts, 1)))


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """Return ``x * factor``; ``None`` stands for ones."""
    return x if factor is None else x * factor


def times_rows(x: Tensor, factor: Tensor | None) -> Tensor:
    """Return folded queries ``[N, C * G, D]`` times a factor per token; ``None`` is ones."""
    if factor is None:
        return x
    n, rows, width = x.shape
    return (x.view(n, factor.shape[1], -1, width) * factor).view(n, rows, width)


def heads_at_once(chunk_size: int, groups: int, d: int, e: int, device: torch.device) -> int:
    """Return how many key heads one iterator computes: as many as fit into the cores' caches."""
    if device.type != "cpu":
        return 2**31
    rows, threads = groups * chunk_size, torch.get_num_threads()
    floats = rows * (chunk_size + d + e) + chunk_size * (d + e) + d * e
    return max(1, CACHE_BYTES // (4 * max(floats, 1))) * threads
