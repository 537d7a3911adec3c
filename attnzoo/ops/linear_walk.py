"""Walk over the chunks of causal linear attention: what both passes of the chunk form share.

Letters: B batch, Hkv key heads, G query heads per key head, T tokens, C tokens per chunk, D key
size, E value size, N = rows of the batch times key heads at work, F decays per token (1 or D).
Query rows of a chunk are folded as ``[N, C * G, D]``, token by token. All is in the type that sums
are kept in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.ops import linear_decay as decay

CACHE_BYTES = 2**21  # of one core, second level and a share of the third: tried 1/4 to 4 MiB


class Sequences(NamedTuple):
    """Inputs of the chunk form: of the whole batch, or of the part of it that is at work."""

    q: Tensor  # [B, Hkv, G, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    log_decay: Tensor | None  # [Hkv], [B, Hkv, T] or [B, Hkv, T, D]
    segment_ids: Tensor | None  # [B, T]
    scale: float
    chunk_size: int
    dtype: torch.dtype  # to accumulate in

    def part(self, b: slice, h: slice) -> Sequences:
        """Take some key heads of some rows of the batch."""
        log_decay, ids = self.log_decay, self.segment_ids
        if log_decay is not None:
            log_decay = log_decay[h] if log_decay.dim() == 1 else log_decay[b, h]
        return self._replace(
            q=self.q[b, h],
            k=self.k[b, h],
            v=self.v[b, h],
            log_decay=log_decay,
            segment_ids=None if ids is None else ids[b],
        )

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Yield which rows and key heads to walk together; of several rows, all heads."""
        batch, heads, groups, tokens, d = self.q.shape
        chunk_size = min(self.chunk_size, tokens)
        at_once = heads_at_once(chunk_size, groups, d, self.v.shape[-1], self.q.device)
        rows, cols = _even(batch, at_once // heads), _even(heads, at_once)
        for b in range(0, batch, rows):
            for h in range(0, heads, cols):
                yield slice(b, b + rows), slice(h, h + cols)


class Sums(NamedTuple):
    """A state of the heads at work, or its gradient."""

    kv: Tensor  # [N, D, E]
    z: Tensor  # [N, 1, D]

    def advance(self, k: Tensor, v: Tensor, carry: Tensor | None) -> None:
        """Take in a chunk's keys and values, in place."""
        if carry is not None:
            self.kv.mul_(carry.mT)
            self.z.mul_(carry)
        self.kv.baddbmm_(k.mT, v)
        self.z.add_(k.sum(1, keepdim=True))


class Factors(NamedTuple):
    """What decay and segment borders leave of one token for another; ``None`` is one everywhere."""

    pairs: Tensor | None = None  # of each key for each row, [N or 1, C, 1, C]
    reads: Tensor | None = None  # of the carried state for each token, [N, C, 1, 1]
    writes: Tensor | None = None  # of each token at the chunk's end, [N, C, 1]
    carry: Tensor | None = None  # of the carried state at the chunk's end, [N, 1, 1]


class Chunk(NamedTuple):
    """One chunk of the heads at work, padded with zeros to C tokens."""

    q: Tensor  # [N, C * G, D], scaled
    k: Tensor  # [N, C, D]
    v: Tensor  # [N, C, E]
    scores: Tensor  # [N, C * G, C], decayed and masked
    reading: Tensor  # q as it meets the carried state
    writing: Tensor  # k as it enters the next state
    carry: Tensor | None  # what is left of the carried state in the next, [N, 1, F]
    factors: Factors  # of scores, reading, writing; decay of vectors is in the joins instead
    gates: Tensor | None  # exponentials of log decays that are vectors, [N, C, D]
    joins: list[decay.Join]


class Walk:
    """The chunks of some key heads of some rows of the batch, by number."""

    def __init__(self, inputs: Sequences) -> None:
        self.batch, self.heads, self.groups, self.tokens, _ = inputs.q.shape
        self.n, self.scale, self.chunk_size = (
            self.batch * self.heads,
            inputs.scale,
            inputs.chunk_size,
        )
        self.dtype = inputs.dtype
        self.count = -(-self.tokens // self.chunk_size)
        self.q, self.k, self.v = (self.cut(x) for x in (inputs.q, inputs.k, inputs.v))
        self.segment_ids = inputs.segment_ids
        self.log_decay: tuple[Tensor, ...] | None = None
        log_decay = inputs.log_decay
        self.vector = log_decay is not None and log_decay.dim() == 4
        self.constant = (log_decay is None or log_decay.dim() == 1) and self.segment_ids is None
        self.known: dict[int, Factors] = {}  # by tokens, where chunks of a length are alike
        if log_decay is not None:
            if log_decay.dim() == 1:
                log_decay = log_decay[:, None].expand(self.batch, -1, self.tokens)
            self.log_decay = self.cut(log_decay if self.vector else log_decay.unsqueeze(-1))

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split ``[b, h, (G,) T, X]`` into chunks; b and h are merged where that is a view."""
        if x.dim() == 5 and self.groups == 1:
            x = x.squeeze(2)
        if self.batch == 1 or self.heads == 1 or x.stride(0) == x.shape[1] * x.stride(1):
            x = x.flatten(0, 1)
        pieces: tuple[Tensor, ...] = x.split(self.chunk_size, -2)
        return pieces

    def size(self, i: int) -> int:
        """Return C of chunk i: its tokens, rounded up to a power of two where blocks are joined."""
        tokens = self.k[i].shape[-2]
        return 1 << (tokens - 1).bit_length() if self.vector else tokens

    def load(self, piece: Tensor, size: int = 0, groups: int = 1) -> Tensor:
        """Return a chunk of an input as ``[N, C * G, X]``, of ``size`` tokens at least."""
        if groups > 1:
            piece = piece.reshape(self.n, groups, *piece.shape[-2:]).transpose(1, 2)
        if piece.dim() > 3:
            piece = piece.reshape(self.n, -1, piece.shape[-1])
        x = piece.to(self.dtype)
        short = size * groups - x.shape[1]
        return pad(x, (0, 0, 0, short)) if short > 0 else x

    def queries(self, i: int, size: int = 0) -> Tensor:
        """Return the scaled queries of chunk i, ``[N, C * G, D]``."""
        q = self.load(self.q[i], size, self.groups)
        return q if self.scale == 1.0 else q * self.scale

    def store(self, piece: Tensor, x: Tensor, divisor: Tensor | None = None) -> None:
        """Write ``[N, C, X]``, or ``[N, C * G, X]``, to a chunk of a result, less the padding."""
        x = self.laid_out(x, piece)
        if divisor is None:
            piece.copy_(x)
        else:
            torch.div(x, self.laid_out(divisor, piece), out=piece)

    def laid_out(self, x: Tensor, piece: Tensor) -> Tensor:
        """View ``[N, C * G, X]`` as ``piece`` is laid out: ``[N, (G,) tokens, X]``."""
        if piece.dim() == 4:
            x = x.view(self.n, -1, self.groups, x.shape[-1]).transpose(1, 2)
        tokens = piece.shape[-2]
        return x if x.shape[-2] == tokens else x[..., :tokens, :]

    def gates(self, i: int) -> Tensor:
        """Return the exponentials of chunk i's vector log decays; padding decays nothing."""
        assert self.log_decay is not None
        log_decay = self.load(self.log_decay[i], self.size(i))
        return decay.fade(log_decay.clone(memory_format=torch.contiguous_format))

    def factors(self, i: int, pairs: bool = True) -> Factors:
        """Return the factors of chunk i, those of pairs only if asked for."""
        tokens = self.k[i].shape[-2]
        if tokens in self.known:
            return self.known[tokens]
        factors, weights = Factors(), None
        if self.log_decay is None:
            ones = torch.ones(tokens, tokens, dtype=self.dtype, device=self.k[0].device)
            factors = Factors(ones.tril_().view(1, tokens, 1, tokens))
        elif not self.vector:
            spans = decay.scalar_spans(self.load(self.log_decay[i], tokens), self.dtype)
            if pairs or self.constant:
                weights = decay.scalar_pairs(spans.sums, self.dtype).unsqueeze(2)
            factors = Factors(weights, spans.reads.unsqueeze(2), spans.writes, spans.carry)
        if self.segment_ids is not None:
            factors = self.fenced(i, factors)
        if self.constant:
            self.known[tokens] = factors
        return factors

    def fenced(self, i: int, factors: Factors) -> Factors:
        """Let nothing through a border between segments; an incoming state is of the first one."""
        assert self.segment_ids is not None
        start = i * self.chunk_size
        ids = self.segment_ids[:, start : start + self.chunk_size]
        carried, last = self.segment_ids[:, max(start - 1, 0), None], ids[:, -1:]
        short = self.size(i) - ids.shape[1]

        def per_head(same: Tensor) -> Tensor:
            return same.to(self.dtype).repeat_interleave(self.heads, 0)

        pairs = per_head(pad(ids[:, :, None] == ids[:, None], (0, short, 0, short)))
        reads = per_head(pad(ids == carried, (0, short)))
        writes = per_head(pad(ids == last, (0, short)))
        carry = per_head(last == carried)
        return Factors(
            times(pairs.unsqueeze(2), factors.pairs),
            times(reads[:, :, None, None], factors.reads),
            times(writes.unsqueeze(-1), factors.writes),
            times(carry.unsqueeze(-1), factors.carry),
        )

    def chunk(self, i: int, keep: bool = False) -> Chunk:
        """Load chunk i and work out its scores; ``keep`` what its backward pass needs."""
        size, groups = self.size(i), self.groups
        q, k, v = self.queries(i, size), self.load(self.k[i], size), self.load(self.v[i], size)
        factors = self.factors(i)
        gates, carry = None, factors.carry
        joins: list[decay.Join] = []
        if self.vector:
            q, k, gates = q.contiguous(), k.contiguous(), self.gates(i)  # blocks are views of them
            scores, reading, writing, total = decay.vector_scores(
                q, k, gates, joins if keep else None
            )
            carry = times(total, factors.carry)
        else:
            scores, reading, writing = torch.bmm(q, k.mT), q, k
        if factors.pairs is not None:
            scores.view(-1, size, groups, size).mul_(factors.pairs)
        reading, writing = times_rows(reading, factors.reads), times(writing, factors.writes)
        return Chunk(q, k, v, scores, reading, writing, carry, factors, gates, joins)

    def state_after(self, i: int, before: Sums) -> Sums:
        """Return the state after chunk i, given the one before it."""
        factors, size = self.factors(i, pairs=False), self.size(i)
        k, carry = self.load(self.k[i], size), factors.carry
        if self.vector:
            k, total = decay.vector_writing(k, self.gates(i))
            carry = times(total, factors.carry)
        after = Sums(before.kv.clone(), before.z.clone())
        after.advance(times(k, factors.writes), self.load(self.v[i], size), carry)
        return after


def as_given(x: Tensor) -> AbstractContextManager[object]:
    """Keep autocast away: sums are made in float32 and wider whatever surrounds the call."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def grouped(x: Tensor, k: Tensor) -> Tensor:
    """View ``[B, H, T, X]`` as ``[B, Hkv, G, T, X]``."""
    heads = k.shape[1]
    return x.view(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:])


def own(x: Tensor) -> Tensor:
    """Copy what is going to be updated in place."""
    return x.clone(memory_format=torch.contiguous_format)


def _even(count: int, most: int) -> int:
    """Return the size of the largest part when ``count`` is split evenly into parts of ``most``."""
    parts = -(-count // max(most, 1))
    return max(1, -(-count // max(parts, 1)))


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """Multiply, where there is a factor."""
    return x if factor is None else x * factor


def times_rows(x: Tensor, factor: Tensor | None) -> Tensor:
    """Multiply query rows ``[N, C * G, D]`` by a factor per token, where there is one."""
    if factor is None:
        return x
    n, rows, width = x.shape
    return (x.view(n, factor.shape[1], -1, width) * factor).view(n, rows, width)


def heads_at_once(chunk_size: int, groups: int, d: int, e: int, device: torch.device) -> int:
    """Return how many key heads to walk together: few enough for the cache, some for every core."""
    if device.type != "cpu":
        return 2**31
    rows, threads = groups * chunk_size, torch.get_num_threads()
    floats = rows * (chunk_size + d + e) + chunk_size * (d + e) + d * e
    return max(1, CACHE_BYTES // (4 * max(floats, 1))) * threads
