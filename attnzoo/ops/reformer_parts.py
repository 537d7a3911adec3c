"""What Reformer's attention works on at once: rows of one length, a stretch of queries, some heads.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size;
in a part, U key heads of all its rows, G query heads that share one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.ops.reformer_asymmetric import Level, Orders, levels
from attnzoo.ops.reformer_blocks import NOTHING, PairBias, Plan, Sums, attend, attend_backward
from attnzoo.ops.reformer_rule import Rule
from attnzoo.ops.reformer_shared import (
    bucket_factors,
    chunk_steps,
    draw_rotations,
    same_memory,
)
from attnzoo.ops.reformer_steps import steps
from attnzoo.ops.room import room

HELD = 2**20  # numbers of keys worked on at once by each thread
QUERIES, KEYS = True, False


class Hashing(NamedTuple):
    """How both passes find who meets whom."""

    rule: Rule
    seed: tuple[int, ...]  # numbers that name the draws
    rotations: Tensor | None  # of the shared form, in place of drawn ones
    factors: list[int]  # buckets of the shared form; none has their number follow the length

    def plan(self, part: Part, q: Tensor, k: Tensor) -> Plan:
        """Cut the work on queries ``[U, G, T, D]`` and keys ``[U, S, D]`` into steps."""
        q, k, rule = q.float(), k.float(), self.rule
        if not rule.shared:
            return steps(Orders(q, k, rule, part.level, self.seed))
        factors, rotations = self.factors or bucket_factors(k.shape[1], rule.chunk), self.rotations
        if rotations is None:
            heads = part.key_heads
            rotations = draw_rotations(heads, k.shape[2], rule.rounds, factors, self.seed)
        rotations = rotations.to(k)[part.heads]
        rotations = rotations.repeat(len(k) // len(rotations), 1, 1, 1)
        return chunk_steps(q, k, rotations, factors, chunk=rule.chunk, causal=rule.causal)


class Rows(NamedTuple):
    """Sequences of one length: where their tokens stand."""

    batch: Tensor  # [R, 1]: the row of each sequence
    queries: Tensor  # [R, queries]: places in that row, the last of the sequence
    keys: Tensor  # [R, length]


class Part(NamedTuple):
    """Sequences of one length, a level of their queries with the keys they may see, key heads."""

    rows: Rows | None  # None: every row is a sequence
    heads: slice
    key_heads: int
    level: Level
    offset: int  # position of the first query of all
    dtype: torch.dtype  # in which all of it is computed

    def take(self, x: Tensor, queries: bool) -> Tensor:
        """Take its share of ``[B, H, T, D]``, as ``[U, G, T, D]`` in the dtype of the work."""
        return self._share(x, queries).to(self.dtype)

    def _share(self, x: Tensor, queries: bool) -> Tensor:
        share = self._tokens_first(x)[self._where(queries)]
        return share.permute(0, 2, 3, 1, 4).flatten(0, 1)

    def pair_bias(self, bias: Tensor, q: Tensor, k: Tensor) -> PairBias:
        """Say where its rows read ``bias``, broadcastable to ``[B, H, T, S]`` and contiguous."""
        shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
        sizes = (*q.shape[:3], k.shape[2])
        steps = [math.prod(shape[i + 1 :]) * (shape[i] > 1) for i in range(4)]
        row, head, query, key = (
            step * torch.arange(size, device=bias.device)
            for step, size in zip(steps, sizes, strict=True)
        )
        queries = row[:, None, None] + head[:, None] + query
        keys = key.expand(*k.shape[:2], -1)
        return PairBias(
            bias.flatten().to(self.dtype),
            as_rows(self._share(queries[..., None], QUERIES)).flatten(),
            self._share(keys[..., None], KEYS).flatten(),
        )

    def put(self, share: Tensor, into: Tensor) -> None:
        """Write its queries' share of ``[B, H, T, D]``, ``[U G T, D]``: no other part has any."""
        whole, where = self._tokens_first(into), self._where(QUERIES)
        whole[where] = self._by_tokens(share, whole[where].shape)

    def add(self, share: Tensor, into: Tensor) -> None:
        """Add its keys' share to ``[B, Hkv, S, D]``, ``[U S, D]``."""
        whole, where = self._tokens_first(into), self._where(KEYS)
        share = self._by_tokens(share, whole[where].shape)
        if self.rows is None:
            whole[where].add_(share)
        else:
            whole[where] = whole[where] + share

    def key_places(self, device: torch.device) -> Tensor:
        """Return where the part's keys stand among those given, ``[U or 1, 1, 1, S]``."""
        if self.rows is None:
            return torch.arange(self.level.keys, device=device)[None, None, None]
        places = self.rows.keys[:, : self.level.keys]
        return places.repeat_interleave(len(range(self.key_heads)[self.heads]), 0)[:, None, None]

    def _by_tokens(self, share: Tensor, shape: torch.Size) -> Tensor:
        batch, tokens, heads, groups, size = shape
        return share.view(batch, heads, groups, tokens, size).permute(0, 3, 1, 2, 4)

    def _tokens_first(self, x: Tensor) -> Tensor:
        """View ``[B, H, T, D]`` as ``[B, T, heads, G, D]``."""
        heads: Tensor = x.unflatten(1, (self.key_heads, -1))[:, self.heads]
        return heads.permute(0, 3, 1, 2, 4)

    def _where(self, queries: bool) -> tuple[slice | Tensor, slice | Tensor]:
        begin, end = self.level.begin - self.offset, self.level.end - self.offset
        tokens = slice(begin, end) if queries else slice(self.level.keys)
        if self.rows is None:
            return slice(None), tokens
        return self.rows.batch, (self.rows.queries if queries else self.rows.keys)[:, tokens]


class Segments(NamedTuple):
    """Which sequence each token belongs to, by number; negative where it is padding."""

    queries: Tensor  # [B, T]
    keys: Tensor  # [B, S]

    @classmethod
    def of(cls, queries: Tensor | None, keys: Tensor | None) -> Segments | None:
        """Make it of what an operator is given."""
        return None if queries is None or keys is None else cls(queries, keys)

    def rows(self) -> Iterator[Rows]:
        """Yield the sequences, those of one length together; those without a query are left out."""
        groups: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = {}
        for row, (queries, keys) in enumerate(zip(self.queries, self.keys, strict=True)):
            for number in queries[queries >= 0].unique().tolist():
                its_queries, its_keys = ((x == number).nonzero()[:, 0] for x in (queries, keys))
                found = groups.setdefault((len(its_keys), len(its_queries)), [])
                found.append((row, its_queries, its_keys))
        for _, found in sorted(groups.items()):
            rows, queries, keys = zip(*found, strict=True)
            batch = torch.tensor(rows, device=self.keys.device)[:, None]
            yield Rows(batch, torch.stack(queries), torch.stack(keys))


def parts(q: Tensor, k: Tensor, segments: Segments | None, rule: Rule) -> Iterator[Part]:
    """Split the work.

    Args:
        q: Queries, ``[B, H, T, D]``; in each sequence the last of its keys' positions.
        k: Keys, ``[B, Hkv, S, D]``.
        segments: Which sequence each token belongs to; ``None`` has a sequence in every row.
        rule: Whom queries meet.
    """
    whole, threads = [None] if q.shape[2] else [], torch.get_num_threads()
    wide = torch.promote_types(q.dtype, torch.float32)
    for rows in whole if segments is None else segments.rows():
        count, length, queries = len(k), k.shape[2], q.shape[2]
        if rows is not None:
            (count, length), queries = rows.keys.shape, rows.queries.shape[1]
        for level in levels(rule, length - queries, length):
            step = max(1, threads * HELD // (count * level.keys * k.shape[3]))
            for head in range(0, k.shape[1], step):
                heads = slice(head, min(head + step, k.shape[1]))
                yield Part(rows, heads, k.shape[1], level, length - queries, wide)


class Share(NamedTuple):
    """Queries, keys and values of a part, as rows, and who meets whom."""

    q: Tensor  # [U G T + 1, D], scaled; the last fills blocks up
    k: Tensor  # [U S, D]; of length 1 in the shared form
    v: Tensor  # [U S, E]
    scale: float  # that of q
    norm: Tensor | None  # [U S, 1], what keys were divided by in the shared form
    group: tuple[int, int]  # G and T
    plan: Plan
    bias: PairBias | None

    @classmethod
    def of(
        cls,
        part: Part,
        hashing: Hashing,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        bias: Tensor | None,
    ) -> Share:
        """Take a part's share."""
        pairs = None if bias is None else part.pair_bias(bias, q, k)
        one = hashing.rule.shared and same_memory(q, k)
        q, v = part.take(q, QUERIES), part.take(v, KEYS).flatten(0, 2)
        k = q if one else part.take(k, KEYS)
        plan, norm, group = hashing.plan(part, q, k[:, 0]), None, (q.shape[1], q.shape[2])
        q_rows = as_rows(q)
        k = q_rows[:-1] if one else k.flatten(0, 2)
        if hashing.rule.shared:
            norm = torch.linalg.vector_norm(k, dim=1, keepdim=True)
            norm = norm.square_().add_(1e-6 * k.shape[1]).sqrt_()
            k = torch.div(k, norm, out=room(k, k.shape))
        if scale != 1:
            q_rows.mul_(scale)
        return cls(q_rows, k, v, scale, norm, group, plan, pairs)

    def attend(self) -> Sums:
        """Attend; in the shared form, who meets no other key sees its own."""
        sums = attend(self.q, self.k, self.v, self.plan, self.bias)
        queries, keys = self._alone(sums.lse)
        sums.out[queries] = self.v[keys]
        return Sums(sums.out[:-1], sums.lse[:-1])

    def backward(
        self, d_out: Tensor, delta: Tensor, lse: Tensor, d_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, k and v.

        What is given has the row more that :func:`as_rows` makes. ``d_out`` is changed, and what
        the bias gets is added to ``d_bias``.
        """
        queries, keys = self._alone(lse)
        d_own = d_out[queries]
        d_out[queries] = 0
        given = (self.q, self.k, self.v, self.plan.steps, self.bias, d_bias)
        dq, dk, dv = attend_backward(d_out, delta, lse, *given)
        dv.index_add_(0, keys, d_own)
        if self.norm is not None:
            along = (self.k * dk).sum(1, keepdim=True)
            dk.addcmul_(self.k, along, value=-1).div_(self.norm)
        return dq[:-1].mul_(self.scale) if self.scale != 1 else dq[:-1], dk, dv

    def _alone(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries that meet no other key, and the rows of their own."""
        groups, length = self.group
        alone = (lse[:-1, 0] <= NOTHING / 2) & (self.norm is not None)
        queries = alone.nonzero()[:, 0]
        return queries, queries // (groups * length) * length + queries % length


def as_rows(x: Tensor) -> Tensor:
    """Make rows of ``[U, G, T, D]``, and one more of zeros, which fills blocks up."""
    size = x.shape[-1]
    rows = room(x, (x.numel() // size + 1, size))
    rows[:-1].view(x.shape).copy_(x)
    rows[-1] = 0
    return rows
