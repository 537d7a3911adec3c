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

Every stretch is an interval of places in some order of the keys, the window being one of the order
as it stands. Whether one of the earlier rounds has met a key already is then a comparison of
numbers, and no key counts twice.

Time O(rounds T (chunk D + pivots D + log T)). Source: arXiv:2001.04451 (LSH attention),
arXiv:2010.05315 (asymmetric transforms, balanced clusters).
Letters: U key heads at hand, G query heads that share one, T queries, S keys, N = G T, R rounds,
P pivots of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.reformer_rule import Rule, named_generator
from attnzoo.ops.room import LANES

BLOCK = 32  # queries of a block: as many lanes as products and sums over keys run well with
TILE = 32  # keys beside a block are a multiple of this
REACH = 4 * TILE  # and seldom more than these
STEP = 2**17  # scores of a step: small enough for the cache of a core
GROWTH = 2  # the length of one level over that of the one before
MOST = 256  # pivots of a round, lest the cost of finding them outgrow that of attending
# Pivots of a round over chunks of keys, in turns: few reach far within a bucket, many far back
FINENESS = (0.5, 1.0)


Best = Callable[[Tensor, Tensor, Tensor | None, list[tuple[int, int]]], Tensor]


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
    """A round: keys sorted by bucket and position, and of each query the interval that it sees."""

    chunk: int  # places that an interval has at most
    keys: Tensor  # [U S]: the row of the key in each place
    places: Tensor  # [U S]: the place of each key's row, with ``chunk`` places between buckets
    middles: Tensor  # [U N + 1]: of each query's row, of an interval ``chunk`` long, and of none
    queries: Tensor  # [U N]: rows, sorted as keys are
    buckets: Tensor  # [U N]: the bucket of each of those, in this order
    begin: Tensor  # [U N]: its interval, in places of ``keys``
    end: Tensor  # [U N]


class Orders:
    """All rounds of a level, and what is seen beside them.

    Args:
        q: Queries of the level, ``[U, G, T, D]``.
        k: Keys that they may see, ``[U, S, D]``, in float32.
        rule: Whom they meet.
        level: Where they stand.
        seed: Numbers that name the draw of pivots.
        best: Finds the best pivots as :func:`best_pivots` does.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        rule: Rule,
        level: Level,
        seed: tuple[int, ...],
        best: Best | None = None,
    ) -> None:
        self.rule, self.level, self.seed, self.device = rule, level, seed, k.device
        self.best = best or best_pivots
        self.units, self.groups, self.length = q.shape[:3]
        self.q, self.k = q.flatten(1, 2), k
        self.positions = torch.arange(level.begin, level.end, device=k.device)
        self.first = rule.first if level.past else 0  # keys that are seen beside the window
        self.list = self._rounds() if level.past else []

    @property
    def none(self) -> int:
        """The row behind all queries, which stands for none."""
        return self.units * self.groups * self.length

    def window(self) -> tuple[Tensor, Tensor]:
        """Return middle and half length of the interval of positions that each query sees, [T]."""
        t, length = self.positions, self.level.keys
        before = self.rule.window - 1 if self.rule.causal else self.rule.window
        if not self.level.past:
            before = length
        begin = (t - before).clamp_min(0)
        end = t + 1 if self.rule.causal else (t + before + 1).clamp_max(length)
        return (begin + end - 1).float() / 2, (end - begin).float() / 2

    def _rounds(self) -> list[Order]:
        """Sort keys and queries of all rounds at once, by bucket and position.

        A query stands behind the last key that it may meet, so counting keys tells where it ends.
        """
        rule, size, chunk = self.rule, self.level.keys, self.rule.chunk
        nearest, highest, buckets = hash_rounds(
            self.q, self.k, rule, self.level, self.seed, self.best
        )
        rounds, units, count = highest.shape
        rows = rounds * units
        row = torch.arange(rows, device=self.device)[:, None]
        positions = torch.arange(size, device=self.device)
        last = self.positions - (rule.window if rule.causal else 0)
        times = torch.cat([2 * positions, (2 * last + 1).repeat(self.groups)])
        times = times.sort(stable=True).indices
        narrow = torch.int16 if rows * buckets < 2**15 else torch.int32  # sorted byte by byte
        codes = torch.cat([nearest, highest], 2).flatten(0, 1).add_(row.int() * buckets).to(narrow)
        codes, source = codes.index_select(1, times).flatten().sort(stable=True)
        source = times.take(source.view(rows, -1).sub_(row * len(times)))
        is_key = source < size
        key, query = (x.flatten().nonzero().view(rows, -1) for x in (is_key, ~is_key))
        keys, queries = source.take(key), source.take(query).sub_(size)
        home, bucket = (codes.take(x).long().sub_(row * buckets) for x in (key, query))
        seen = is_key.cumsum(1).take(query)
        edges = torch.arange(buckets + 1, device=self.device).repeat(rows, 1)
        starts = torch.searchsorted(home, edges)
        low = starts.gather(1, bucket)
        if rule.causal:  # the latest of the bucket that stand behind the window
            begin, end = torch.maximum(seen - chunk, low), seen
        else:  # those around it
            high = starts.gather(1, bucket + 1)
            begin = torch.maximum(torch.minimum(seen - chunk // 2, high - chunk), low)
            end = torch.minimum(begin + chunk, high)
        places = torch.empty(rows, size, device=self.device)
        places.scatter_(1, keys, home.mul_(chunk).add_(positions).float())
        middles = torch.empty(rows, count, device=self.device)
        middles.scatter_(1, queries, (end + bucket * chunk).float().sub_((chunk + 1) / 2))
        unit = row % units
        found = (
            keys.add_(unit * size),
            places,
            F.pad(middles.view(rounds, -1), (0, 1)),
            queries.add_(unit * count),
            bucket.add_(unit * buckets),
            begin.add_(unit * size),
            end.add_(unit * size),
        )
        each = zip(*(x.view(rounds, -1) for x in found), strict=True)
        return [Order._make((chunk, *its)) for its in each]


class Layout:
    """A round laid out for steps: blocks of queries beside few keys, those beside most first.

    A block has up to ``BLOCK`` queries of one bucket, as they follow each other, whose intervals
    lie within ``reach`` places; those that lie further on go into a block of their own. Which block
    a query is in and which key is the first beside it depends on earlier queries and keys of its
    bucket alone, and with both the order in which its sums are made.
    """

    def __init__(self, order: Order) -> None:
        self.order, chunk, none = order, order.chunk, len(order.middles) - 1
        reach = max(REACH, -(-2 * chunk // TILE) * TILE)
        advance = reach - chunk
        at = torch.arange(len(order.queries), device=order.queries.device)
        start = torch.where(_changes(order.buckets), at, 0).cummax(0).values
        rank = (at - start) % BLOCK
        base = order.begin.take(at - rank)
        ahead = (order.begin - base).div_(advance, rounding_mode="floor").add_(1)
        ahead.mul_(order.end - base > reach)
        block = _changes(ahead).logical_or_(rank == 0)
        firsts = block.nonzero()[:, 0]
        lasts = F.pad(firsts, (0, 1), value=len(at))[1:] - 1
        base = base.take(firsts) + advance * (ahead.take(firsts) - 1).clamp_min_(0)
        self.widths, widest = (order.end.take(lasts) - base).sort(descending=True, stable=True)
        slots = order.queries.new_full((len(firsts), BLOCK), none)
        slots.view(-1)[(block.cumsum(0) - 1) * BLOCK + rank] = order.queries
        self.queries = slots.index_select(0, widest)  # [blocks, C]
        self.begin = base.take(widest)[:, None]  # [blocks, 1]: the first place

    @property
    def slots(self) -> int:
        """Return how many places for queries its blocks have, without those beside no key."""
        return BLOCK * int(self.widths.count_nonzero())

    def batches(self, tile: int) -> Iterator[tuple[slice, int]]:
        """Yield the blocks that as many tiles of keys are beside, and how many keys those are."""
        counts = torch.bincount(-(-self.widths // tile)).tolist()
        at = 0
        for tiles in reversed(range(1, len(counts))):
            if counts[tiles]:
                yield slice(at, at + counts[tiles]), tile * tiles
                at += counts[tiles]


def _changes(x: Tensor) -> Tensor:
    """Say where a number differs from the one before it."""
    changes = torch.ones_like(x, dtype=torch.bool)
    torch.ne(x[1:], x[:-1], out=changes[1:])
    return changes


def hash_rounds(
    q: Tensor, k: Tensor, rule: Rule, level: Level, seed: tuple[int, ...], best: Best
) -> tuple[Tensor, Tensor, int]:
    """Return the buckets of keys ``[R, U, S]`` and queries ``[R, U, N]``, and how many there are.

    The first tokens go to a bucket behind all others, where no query looks.
    """
    first, past = rule.first, level.past
    length = GROWTH * past if rule.causal else past
    kinds, index = [], []
    for kind, fineness in enumerate(FINENESS):
        rounds = len(range(kind, rule.rounds, len(FINENESS)))
        count = rule.buckets or min(max(1, int(fineness * length) // rule.chunk), MOST)
        count = min(count, past - first)
        draw = torch.rand(rounds, count, generator=named_generator(*seed, past, kind))
        edges = first + (past - first) * torch.arange(count + 1) // count
        index.append((edges[:-1] + (draw.double() * edges.diff()).long()).flatten())
        kinds.append((rounds, count))  # one pivot from each stretch between edges
    center = k[:, :past].mean(1, keepdim=True)
    pivots = k.index_select(1, torch.cat(index).to(k.device)) - center  # [U, P, D]
    offset = (pivots * (center + pivots / 2)).sum(-1, keepdim=True)
    nearest, highest = best(k, pivots, offset, kinds), best(q, pivots, None, kinds)
    most = max(count for _, count in kinds)
    nearest[:, :, :first] = most
    return nearest, highest, most + 1


def best_pivots(
    x: Tensor, pivots: Tensor, offset: Tensor | None, kinds: list[tuple[int, int]]
) -> Tensor:
    """Return the pivot of highest ``x p - offset`` in each round, ``[R, U, T]``.

    The last bits of the scores hold the pivots' numbers, so that a maximum, which is far faster
    than looking for its place, tells which it was.

    Args:
        x: ``[U, T, D]``.
        pivots: ``[U, P, D]``, those of one round after those of another.
        offset: ``[U, P, 1]``.
        kinds: Numbers of rounds that have as many pivots, and how many.
    """
    units, length, _ = x.shape
    numbers = torch.cat([torch.arange(count).repeat(rounds) for rounds, count in kinds])
    numbers = numbers.to(x.device, torch.int32)[:, None]
    bits = (max(count for _, count in kinds) - 1).bit_length()
    line = 4 * LANES  # shorter or uneven rows take longer
    step = max(1, 2 * STEP // (units * pivots.shape[1] * line)) * line
    out = numbers.new_empty(sum(rounds for rounds, _ in kinds), units, length)
    buffer = x.new_empty(units, pivots.shape[1], step)
    for part, into in zip(x.split(step, 1), out.split(step, 2), strict=True):
        whole = part.shape[1] == step
        scores = torch.bmm(pivots, part.mT, out=buffer if whole else None)
        if offset is not None:
            scores.sub_(offset)
        scores.view(torch.int32).bitwise_and_(-1 << bits).bitwise_or_(numbers)
        its = scores.split([rounds * count for rounds, count in kinds], 1)
        row = 0
        for (rounds, count), some in zip(kinds, its, strict=True):
            best = some.unflatten(1, (rounds, count)).amax(2).transpose(0, 1)  # [rounds, U, t]
            best = best.view(torch.int32)
            its_numbers = into[row : row + rounds]
            torch.bitwise_and(best, (1 << bits) - 1, out=its_numbers)
            its_numbers.clamp_(max=count - 1)  # that of what is not a number may be any
            row += rounds
    return out
