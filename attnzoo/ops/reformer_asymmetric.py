r"""Which keys a query meets: a window, the first tokens, and a bucket of like keys in each round.

A round of hashing draws some keys as pivots. A key goes to its nearest pivot, a query to the pivot
that it scores highest; who shares a pivot shares a bucket (Voronoi hashing with the asymmetry that
inner products ask for: shifting all keys changes neither scores nor buckets). Keys are sorted by
bucket and position, and a query meets a stretch of that order: the latest ``chunk`` keys of its
bucket, or those around it where the future is seen. So clusters are balanced, however uneven the
buckets, and a round costs the same for each query.

In a causal sequence all of this is decided by the past alone. Queries at positions L to 2 L - 1 use
pivots among the first L keys, 2 L / chunk or half as many, so that buckets stay as full at any
length; the first queries, as many as the keys that a query meets at most, see every key, which
costs no more.

Every stretch is an interval of places in some order of the keys, the window and the first tokens
being intervals of the order as it stands. Whether one of the earlier rounds has met a key already
is then a comparison of numbers, and no key counts twice.

Time O(rounds T (chunk D + pivots D + log T)). Source: arXiv:2001.04451 (LSH attention),
arXiv:2010.05315 (asymmetric transforms, balanced clusters).
Letters: U key heads at hand, G query heads that share one, T queries, S keys, P pivots, N = G T.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.reformer_blocks import AWAY, Step
from attnzoo.ops.reformer_rule import Rule, named_generator

BLOCK = 32  # queries of a block
LANES = 16  # numbers in the widest vector registers; tiles of keys are as wide or a multiple
STEP = 2**17  # scores of a step: small enough for the cache of a core
GROWTH = 2  # the length of one level over that of the one before
MOST = 256  # pivots of a round, lest the cost of finding them outgrow that of attending
# Pivots of a round over chunks of keys, in turns: few reach far within a bucket, many far back
FINENESS = (0.5, 1.0)


class Level(NamedTuple):
    """Queries that hash alike: positions ``begin`` to ``end - 1``, beside the first ``keys``."""

    begin: int
    end: int
    keys: int
    past: int  # keys among which pivots are drawn; 0 where every key is seen


def levels(rule: Rule, begin: int, length: int) -> Iterator[Level]:
    """Split the queries from position ``begin`` on of a sequence of ``length`` keys."""
    if rule.shared or not rule.causal:
        yield Level(0, length, length, length if length > rule.reach else 0)
        return
    low, high = 0, rule.reach
    while low < length:
        end = min(high, length)
        if end > begin:
            yield Level(max(low, begin), end, end, low)
        low, high = high, GROWTH * high


class Order(NamedTuple):
    """An order of keys, the interval of its places that each query sees, and queries in blocks."""

    keys: Tensor  # [U, S]: the key in each place
    places: Tensor  # [U, S]: the place of each key
    blocks: Tensor  # [U, blocks, C]: queries of a bucket by rising intervals; -1: none
    begin: Tensor  # [U, N]: the interval of each query
    end: Tensor  # [U, N]: the place behind it


class Orders:
    """All orders of a level: as it stands for the window, then the rounds.

    Args:
        q: Queries of the level, ``[U, G, T, D]``.
        k: Keys that they may see, ``[U, S, D]``, in float32.
        rule: Whom they meet.
        level: Where they stand.
        seed: Numbers that name the draw of pivots.
    """

    def __init__(
        self, q: Tensor, k: Tensor, rule: Rule, level: Level, seed: tuple[int, ...]
    ) -> None:
        self.rule, self.level, self.seed, self.device = rule, level, seed, k.device
        self.units, self.groups = q.shape[:2]
        self.q, self.k = q.flatten(1, 2), k
        self.positions = torch.arange(level.begin, level.end, device=k.device)
        self.first = rule.first if level.past else 0  # keys that are seen beside the window
        self.list = [self._window()]
        if level.past:
            self.list += self._rounds()

    def earlier(self, index: int) -> list[int]:
        """Return the orders that may have met the same keys before; intervals may exclude it."""
        return list(range(1 if self.rule.causal else 0, index))

    def _as_it_stands(self, begin: Tensor, end: Tensor) -> Order:
        """Make an order of the keys as they stand, with intervals by position, ``[T]``."""
        keys = torch.arange(self.level.keys, device=self.device).expand(self.units, -1)
        queries = torch.arange(self.groups * len(begin), device=self.device)
        blocks = queries.view(self.groups, -1).t().flatten()
        blocks = F.pad(blocks, (0, -len(blocks) % BLOCK), value=-1).view(1, -1, BLOCK)
        begin, end = (x.repeat(self.groups).expand(self.units, -1) for x in (begin, end))
        return Order(keys, keys, blocks.expand(self.units, -1, -1), begin, end)

    def _window(self) -> Order:
        t, length = self.positions, self.level.keys
        before = self.rule.window - 1 if self.rule.causal else self.rule.window
        if not self.level.past:
            before = length
        end = t + 1 if self.rule.causal else (t + before + 1).clamp_max(length)
        return self._as_it_stands((t - before).clamp_min(0), end)

    def _rounds(self) -> list[Order]:
        found = hash_rounds(self.q, self.k, self.rule, self.level, self.seed)
        return [self._round(*buckets) for buckets in found]

    def _round(self, key_buckets: Tensor, query_buckets: Tensor, count: int) -> Order:
        """Sort one round, and find each query's stretch of its bucket."""
        rule, length = self.rule, self.level.keys
        edges = length * torch.arange(count + 2, device=self.device).expand(self.units, -1)
        positions = torch.arange(length, device=self.device)
        codes, keys = (key_buckets * length + positions).sort(-1)
        places = torch.empty_like(keys).scatter_(1, keys, positions.expand_as(keys))
        t = self.positions.repeat(self.groups)
        wanted, queries = (query_buckets * length + t).sort(dim=-1, stable=True)
        bucket = wanted // length
        starts = torch.searchsorted(codes, edges)
        low, high = starts.gather(1, bucket), starts.gather(1, bucket + 1)
        if rule.causal:  # the latest of the bucket that stand behind the window
            end = torch.searchsorted(codes, wanted - rule.window, right=True).maximum(low)
            begin = torch.maximum(end - rule.chunk, low)
        else:
            here = torch.searchsorted(codes, wanted, right=True) - rule.chunk // 2
            begin = torch.maximum(torch.minimum(here, high - rule.chunk), low)
            end = torch.minimum(begin + rule.chunk, high)
        begin, end = (torch.empty_like(x).scatter_(1, queries, x) for x in (begin, end))
        blocks = in_blocks(queries, bucket, torch.searchsorted(wanted, edges))
        return Order(keys, places, blocks, begin, end)


def in_blocks(queries: Tensor, bucket: Tensor, starts: Tensor) -> Tensor:
    """Put sorted queries into blocks of one bucket each, ``[U, blocks, C]``, -1 where none stands.

    So the blocks of a query, the first key beside it, and with both the order in which its sums are
    made, depend on its bucket's earlier queries and keys alone: no later token changes a bit of it.

    Args:
        queries: ``[U, N]``.
        bucket: The bucket of each.
        starts: Where each bucket begins among them, and the last one ends.
    """
    sizes = -(-starts.diff(dim=-1) // BLOCK) * BLOCK
    shift = F.pad(sizes.cumsum(-1), (1, 0)) - starts
    places = torch.arange(queries.shape[1], device=queries.device) + shift.gather(1, bucket)
    room = BLOCK * (-(-queries.shape[1] // BLOCK) + starts.shape[1] - 1)  # enough in any case
    slots = queries.new_full((len(queries), room), -1).scatter_(1, places, queries)
    return slots.view(len(queries), -1, BLOCK)


class Layout:
    """An order laid out for steps: blocks of queries, the widest stretches of places first."""

    def __init__(self, order: Order) -> None:
        units, count = order.begin.shape
        unit = torch.arange(units, device=order.begin.device)[:, None]
        self.size = order.keys.shape[1]
        self.keys = (order.keys + self.size * unit).flatten()  # [U S]: the key in each place
        self.places = order.places.flatten().float()  # [U S]: the place of each key
        # of the interval that each query sees, and of one more that stands for none, [U N + 1]
        self.middle = F.pad((order.begin + order.end - 1).flatten().float() / 2, (0, 1))
        self.half = F.pad((order.end - order.begin).flatten().float() / 2, (0, 1))
        blocks, stands = order.blocks.flatten(0, 1), order.blocks.flatten(0, 1) >= 0
        unit = unit.repeat_interleave(order.blocks.shape[1], 0)  # [blocks, 1]
        queries = torch.where(stands, blocks + count * unit, units * count)
        begin, end = (F.pad(x.flatten(), (0, 1)).take(queries) for x in (order.begin, order.end))
        begin, end = begin[:, 0], end.amax(-1)
        widths, widest = (end - begin).sort(descending=True, stable=True)
        self.widths: list[int] = widths.tolist()
        self.queries = queries.index_select(0, widest)  # [blocks, C]
        self.begin = begin.take(widest)[:, None]  # [blocks, 1]: the first place
        self.first = (self.size * unit).take(widest)[:, None]

    def batches(self, tile: int) -> Iterator[tuple[slice, int]]:
        """Yield the blocks of one step, and the first of ``tile`` places after a block's."""
        step = max(1, STEP // (BLOCK * tile))
        for ahead in range(0, max(self.widths, default=0), tile):
            count = sum(width > ahead for width in self.widths)
            for at in range(0, count, step):
                yield slice(at, min(at + step, count)), ahead

    def intervals(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return middle and half length of the intervals of queries, ``[blocks, C, 1]``."""
        return self.middle.take(queries)[:, :, None], self.half.take(queries)[:, :, None]


def steps(orders: Orders) -> Iterator[Step]:
    """Cut the orders of a level into steps; rows are ``[U N + 1]`` queries and ``[U S]`` keys.

    How far a place lies from the middle of an interval, less half its length, is 0.5 or more
    outside and -0.5 or less inside: what is away is outside its own order's, or inside another's.
    """
    layouts: list[Layout] = []
    for index, order in enumerate(orders.list):
        layout = Layout(order)
        layouts.append(layout)
        middle, half = layout.intervals(layout.queries)
        earlier = [layouts[i] for i in orders.earlier(index)]
        others = [(other.places, *other.intervals(layout.queries)) for other in earlier]
        reach = orders.rule.chunk if index else orders.rule.window + BLOCK - 1
        tile = torch.arange(_round_up(reach, LANES), device=orders.device)
        for at, ahead in layout.batches(len(tile)):
            keys = layout.begin[at] + tile.add(ahead)  # places, up to the next line but one
            away = (keys[:, None, :] - middle[at]).abs_().sub_(half[at])
            keys = layout.keys.take(keys.clamp_max_(layout.size - 1).add_(layout.first[at]))
            for where, its_middle, its_half in others:
                inside = (where.take(keys)[:, None, :] - its_middle[at]).abs_()
                torch.maximum(away, torch.sub(its_half[at], inside, out=inside), out=away)
            if orders.first and not index and not ahead:
                first = torch.arange(_round_up(orders.first, LANES), device=orders.device)
                inside = half[at] - (first - middle[at]).abs_()
                away = torch.cat([torch.maximum(inside, first - orders.first + 0.5), away], 2)
                keys = torch.cat([layout.first[at] + first.clamp_max_(layout.size - 1), keys], 1)
            yield Step(layout.queries[at], keys, away.mul_(-AWAY).clamp_max_(0))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def hash_rounds(
    q: Tensor, k: Tensor, rule: Rule, level: Level, seed: tuple[int, ...]
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield the buckets of keys ``[U, S]`` and of queries ``[U, N]`` of each round, and how many.

    The first tokens go to a bucket behind all others, where no query looks.
    """
    first, past = rule.first, level.past
    length = GROWTH * past if rule.causal else past
    center = k[:, :past].mean(1, keepdim=True)
    for kind, fineness in enumerate(FINENESS):
        rounds = len(range(kind, rule.rounds, len(FINENESS)))
        if not rounds:
            continue
        count = rule.buckets or min(max(1, int(fineness * length) // rule.chunk), MOST)
        count = min(count, past - first)
        draw = torch.rand(rounds, count, generator=named_generator(*seed, past, kind))
        edges = first + (past - first) * torch.arange(count + 1) // count
        index = edges[:-1] + (draw.double() * edges.diff()).long()  # one from each stretch
        pivots = k[:, index.flatten().to(k.device)] - center  # [U, rounds P, D]
        offset = (pivots * (center + pivots / 2)).sum(-1)
        nearest = best_pivots(k, pivots, -offset, rounds)
        highest = best_pivots(q, pivots, torch.zeros_like(offset), rounds)
        nearest[:, :first] = count
        for r in range(rounds):
            yield nearest[..., r], highest[..., r], count


def best_pivots(x: Tensor, pivots: Tensor, offset: Tensor, rounds: int) -> Tensor:
    """Return the pivot of highest ``x p + offset`` for each round, ``[U, T, rounds]``.

    The last bits of the scores hold the pivots' numbers, so that a maximum, which is far faster
    than looking for its place, tells which it was.
    """
    units, length, _ = x.shape
    count = pivots.shape[1] // rounds
    bits = (count - 1).bit_length()
    numbers = torch.arange(count, dtype=torch.int32, device=x.device)
    out = torch.empty(units, length, rounds, dtype=torch.long, device=x.device)
    step = max(1, STEP // (units * rounds * count))
    for part, into in zip(x.split(step, 1), out.split(step, 1), strict=True):
        scores = torch.baddbmm(offset[:, None], part, pivots.transpose(1, 2))
        codes = scores.view(torch.int32).unflatten(-1, (rounds, count))
        codes.bitwise_and_(-(1 << bits)).bitwise_or_(numbers)
        best = codes.view(torch.float32).amax(-1).view(torch.int32)
        into.copy_(best.bitwise_and_((1 << bits) - 1))
    return out
