r"""Voronoi hashing for the asymmetric form: buckets of keys and queries, and sorted hash rounds.

Each hash round draws some keys as pivots. A key goes into the bucket of its nearest pivot (its
Voronoi cell), a query into the bucket of the pivot with the highest inner product. This is the
asymmetry of maximum inner product search: shifting all keys changes neither scores nor buckets.
Keys are sorted by bucket and position. A query attends to an interval of that order: the latest
``chunk_size`` keys of its bucket or, if bidirectional, those around its position. Attention is
therefore balanced however uneven the buckets are, and a round costs the same for each query.

In a causal sequence, buckets and intervals depend on past tokens only. Queries at positions L to
2 L - 1 use pivots among the first L keys, 2 L / chunk_size or half as many, so buckets hold about
as many keys at any length. The first queries, up to the most keys that a query attends to, get
full attention at the same cost.

Every set of attended keys is an interval of ranks in some order of the keys; the window is an
interval of the original order. Whether an earlier round contains a key is then a comparison of
numbers, and no key counts twice.

Time O(R T (chunk_size D + pivots D + log T)). Source: arXiv:2001.04451 (LSH attention),
arXiv:2010.05315 (asymmetric transforms, balanced clusters). Other letters: U key heads of a work
item, N = G T, R hash rounds, P pivots of all rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.lsh.options import LSHOptions, seeded_generator
from attnzoo.runtime.kernel_calls import LANES

BLOCK_QUERIES = 32  # queries of a block; products and sums over keys run well with so many columns
KEY_TILE = 32  # the keys of a block are a multiple of this
BLOCK_KEYS = 4 * KEY_TILE  # keys of a block, unless two chunks are more
MAX_SCORES = 2**17  # scores of a batch of blocks: small enough for the cache of a core
LEVEL_GROWTH = 2  # ratio of the lengths of successive levels
MAX_PIVOTS = 256  # pivots of a round; more would cost more than attention itself
# Even and odd rounds differ: few pivots give buckets with distant keys, many give similar keys
PIVOTS_PER_CHUNK = (0.5, 1.0)

# Arguments and result of best_pivots
PivotSearch = Callable[[Tensor, Tensor, Tensor | None, list[tuple[int, int]]], Tensor]


class Level(NamedTuple):
    """Queries that share pivots: positions ``begin`` to ``end - 1``, with the first ``keys``."""

    begin: int
    end: int
    keys: int
    pivot_keys: int  # pivots are drawn from as many leading keys; 0 means full attention


def split_levels(options: LSHOptions, begin: int, length: int) -> Iterator[Level]:
    """Yield the levels of the queries from position ``begin`` on, in a sequence of ``length``."""
    full = options.max_attended_keys
    if options.shared_qk or not options.causal:
        yield Level(0, length, length, length if length > full else 0)
        return
    low, high = 0, full
    while low < length:
        end = min(high, length)
        if end > begin:
            yield Level(max(low, begin), end, end, low)
        low, high = high, LEVEL_GROWTH * high


class HashRound(NamedTuple):
    """One hash round: keys sorted by bucket and position, and each query's interval of them."""

    chunk_size: int  # most keys of an interval
    keys: Tensor  # [U S]: key rows in sorted order
    key_ranks: Tensor  # [U S]: rank of each key row, plus chunk_size per bucket before its own
    centers: Tensor  # [U N + 1]: per query row, centre of its interval in ranks; last row: padding
    queries: Tensor  # [U N]: query rows, sorted as keys are
    buckets: Tensor  # [U N]: buckets, in the order of queries
    begin: Tensor  # [U N]: first key of the interval, an index into keys, in the order of queries
    end: Tensor  # [U N]


class HashRounds:
    """All hash rounds of a level.

    Args:
        q: Queries of the level, ``[U, G, T, D]``, float32.
        k: Keys of the level, ``[U, S, D]``, float32.
        options: Options.
        level: Positions of the queries.
        seed: Integers from which pivots are drawn.
        pivot_search: Computes what :func:`best_pivots` does, which is the default.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        options: LSHOptions,
        level: Level,
        seed: tuple[int, ...],
        pivot_search: PivotSearch | None = None,
    ) -> None:
        self.options, self.level, self.seed, self.device = options, level, seed, k.device
        self.pivot_search = pivot_search or best_pivots
        self.units, self.groups, self.length = q.shape[:3]
        self.positions = torch.arange(level.begin, level.end, device=k.device)
        # Keys attended to besides the window and the buckets
        self.first_tokens = options.first_tokens if level.pivot_keys else 0
        self.rounds = self._sort(q.flatten(1, 2), k) if level.pivot_keys else []

    @property
    def padding_row(self) -> int:
        """The row after all queries."""
        return self.units * self.groups * self.length

    def window_intervals(self) -> tuple[Tensor, Tensor]:
        """Return centre and half width of each query's interval of positions, ``[T]``."""
        t, length = self.positions, self.level.keys
        before = self.options.window - 1 if self.options.causal else self.options.window
        if not self.level.pivot_keys:
            before = length
        begin = (t - before).clamp_min(0)
        end = t + 1 if self.options.causal else (t + before + 1).clamp_max(length)
        return (begin + end - 1).float() / 2, (end - begin).float() / 2

    def _sort(self, q: Tensor, k: Tensor) -> list[HashRound]:
        """Sort keys and queries ``[U, N, D]`` of all rounds at once, by bucket and position.

        A query is sorted after the last key that it may attend to, so the number of keys before it
        is the end of its interval.
        """
        options, size, chunk = self.options, self.level.keys, self.options.chunk_size
        key_buckets, query_buckets, num_buckets = hash_rounds(
            q, k, options, self.level, self.seed, self.pivot_search
        )
        rounds, units, count = query_buckets.shape
        rows = rounds * units
        row = torch.arange(rows, device=self.device)[:, None]
        positions = torch.arange(size, device=self.device)
        last = self.positions - (options.window if options.causal else 0)
        times = torch.cat([2 * positions, (2 * last + 1).repeat(self.groups)])
        times = times.sort(stable=True).indices
        dtype = torch.int16 if rows * num_buckets < 2**15 else torch.int32  # a radix sort by bytes
        codes = torch.cat([key_buckets, query_buckets], 2).flatten(0, 1)
        codes = codes.add_(row.int() * num_buckets).to(dtype)
        codes, source = codes.index_select(1, times).flatten().sort(stable=True)
        source = times.take(source.view(rows, -1).sub_(row * len(times)))
        is_key = source < size
        key, query = (x.flatten().nonzero().view(rows, -1) for x in (is_key, ~is_key))
        keys, queries = source.take(key), source.take(query).sub_(size)
        of_key, of_query = (codes.take(x).long().sub_(row * num_buckets) for x in (key, query))
        keys_before = is_key.cumsum(1).take(query)
        edges = torch.arange(num_buckets + 1, device=self.device).repeat(rows, 1)
        starts = torch.searchsorted(of_key, edges)
        low = starts.gather(1, of_query)
        if options.causal:  # the latest keys of the bucket, before the window
            begin, end = torch.maximum(keys_before - chunk, low), keys_before
        else:  # the keys around the query's position
            high = starts.gather(1, of_query + 1)
            begin = torch.maximum(torch.minimum(keys_before - chunk // 2, high - chunk), low)
            end = torch.minimum(begin + chunk, high)
        key_ranks = torch.empty(rows, size, dtype=torch.float32, device=self.device)
        key_ranks.scatter_(1, keys, of_key.mul_(chunk).add_(positions).float())
        centers = torch.empty(rows, count, dtype=torch.float32, device=self.device)
        centers.scatter_(1, queries, (end + of_query * chunk).float().sub_((chunk + 1) / 2))
        unit = row % units
        fields = (
            keys.add_(unit * size),
            key_ranks,
            F.pad(centers.view(rounds, -1), (0, 1)),
            queries.add_(unit * count),
            of_query.add_(unit * num_buckets),
            begin.add_(unit * size),
            end.add_(unit * size),
        )
        by_round = zip(*(x.view(rounds, -1) for x in fields), strict=True)
        return [HashRound._make((chunk, *values)) for values in by_round]


class RoundBlocks:
    """A hash round cut into blocks of queries with few keys, sorted by width, widest first.

    A block has up to ``BLOCK_QUERIES`` consecutive queries of one bucket whose intervals lie within
    ``BLOCK_KEYS`` keys; queries whose intervals lie further on start another block. The block of a
    query and its first key depend only on earlier queries and keys of its bucket, and so does the
    order in which sums are computed.
    """

    def __init__(self, hash_round: HashRound) -> None:
        self.hash_round, chunk = hash_round, hash_round.chunk_size
        padding_row = len(hash_round.centers) - 1
        width = max(BLOCK_KEYS, -(-2 * chunk // KEY_TILE) * KEY_TILE)
        advance = width - chunk
        index = torch.arange(len(hash_round.queries), device=hash_round.queries.device)
        start = torch.where(_changes(hash_round.buckets), index, 0).cummax(0).values
        column = (index - start) % BLOCK_QUERIES
        base = hash_round.begin.take(index - column)
        shift = (hash_round.begin - base).div_(advance, rounding_mode="floor").add_(1)
        shift.mul_(hash_round.end - base > width)
        starts_block = _changes(shift).logical_or_(column == 0)
        firsts = starts_block.nonzero()[:, 0]
        lasts = F.pad(firsts, (0, 1), value=len(index))[1:] - 1
        base = base.take(firsts) + advance * (shift.take(firsts) - 1).clamp_min_(0)
        self.widths, order = (hash_round.end.take(lasts) - base).sort(descending=True, stable=True)
        queries = hash_round.queries.new_full((len(firsts), BLOCK_QUERIES), padding_row)
        block = starts_block.cumsum(0) - 1
        queries.view(-1)[block * BLOCK_QUERIES + column] = hash_round.queries
        self.queries = queries.index_select(0, order)  # [blocks, C]
        self.begin = base.take(order)[:, None]  # [blocks, 1]: index of the first key

    @property
    def num_queries(self) -> int:
        """Number of queries of all blocks that have keys, padding included."""
        return BLOCK_QUERIES * int(self.widths.count_nonzero())

    def by_width(self, tile: int) -> Iterator[tuple[slice, int]]:
        """Yield the blocks with equally many tiles of keys, and their number of keys."""
        counts = torch.bincount(-(-self.widths // tile)).tolist()
        begin = 0
        for tiles in reversed(range(1, len(counts))):
            if counts[tiles]:
                yield slice(begin, begin + counts[tiles]), tile * tiles
                begin += counts[tiles]


def _changes(x: Tensor) -> Tensor:
    """Return where a value differs from the previous one; true at the first."""
    changes = torch.ones_like(x, dtype=torch.bool)
    torch.ne(x[1:], x[:-1], out=changes[1:])
    return changes


def hash_rounds(
    q: Tensor,
    k: Tensor,
    options: LSHOptions,
    level: Level,
    seed: tuple[int, ...],
    pivot_search: PivotSearch,
) -> tuple[Tensor, Tensor, int]:
    """Return the buckets of keys ``[R, U, S]`` and of queries ``[R, U, N]``, and their number.

    The first tokens go into the last bucket, which has no queries.
    """
    first, pivot_keys = options.first_tokens, level.pivot_keys
    length = LEVEL_GROWTH * pivot_keys if options.causal else pivot_keys
    groups, index = [], []
    for group, pivots_per_chunk in enumerate(PIVOTS_PER_CHUNK):
        rounds = len(range(group, options.num_hashes, len(PIVOTS_PER_CHUNK)))
        count = max(1, int(pivots_per_chunk * length) // options.chunk_size)
        count = min(options.num_buckets or min(count, MAX_PIVOTS), pivot_keys - first)
        generator = seeded_generator(*seed, pivot_keys, group)
        draw = torch.rand(rounds, count, generator=generator, dtype=torch.float32)
        edges = first + (pivot_keys - first) * torch.arange(count + 1) // count
        index.append((edges[:-1] + (draw.double() * edges.diff()).long()).flatten())
        groups.append((rounds, count))  # one pivot from each range between edges
    center = k[:, :pivot_keys].mean(1, keepdim=True)
    pivots = k.index_select(1, torch.cat(index).to(k.device)) - center  # [U, P, D]
    offset = (pivots * (center + pivots / 2)).sum(-1, keepdim=True)
    key_buckets = pivot_search(k, pivots, offset, groups)
    query_buckets = pivot_search(q, pivots, None, groups)
    most = max(count for _, count in groups)
    key_buckets[:, :, :first] = most
    return key_buckets, query_buckets, most + 1


def best_pivots(
    x: Tensor, pivots: Tensor, offset: Tensor | None, groups: list[tuple[int, int]]
) -> Tensor:
    """Return the pivot with the highest ``x @ pivot - offset`` in each round, ``[R, U, T]``.

    The last bits of each score hold the pivot's index, so a maximum, which is far faster than
    ``argmax``, gives the index.

    Args:
        x: ``[U, T, D]``.
        pivots: ``[U, P, D]``, round after round.
        offset: ``[U, P, 1]``.
        groups: Pairs of a number of rounds and their number of pivots.
    """
    units, length, _ = x.shape
    numbers = torch.cat([torch.arange(count).repeat(rounds) for rounds, count in groups])
    numbers = numbers.to(x.device, torch.int32)[:, None]
    bits = (max(count for _, count in groups) - 1).bit_length()
    tokens = 4 * LANES  # multiples of it run fastest
    step = max(1, 2 * MAX_SCORES // (units * pivots.shape[1] * tokens)) * tokens
    out = numbers.new_empty(sum(rounds for rounds, _ in groups), units, length)
    buffer = x.new_empty(units, pivots.shape[1], step)
    for part, result in zip(x.split(step, 1), out.split(step, 2), strict=True):
        full = part.shape[1] == step
        scores = torch.bmm(pivots, part.mT, out=buffer if full else None)
        if offset is not None:
            scores.sub_(offset)
        scores.view(torch.int32).bitwise_and_(-1 << bits).bitwise_or_(numbers)
        by_group = scores.split([rounds * count for rounds, count in groups], 1)
        row = 0
        for (rounds, count), group in zip(groups, by_group, strict=True):
            best = group.unflatten(1, (rounds, count)).amax(2).transpose(0, 1)  # [rounds, U, t]
            indices = result[row : row + rounds]
            torch.bitwise_and(best.view(torch.int32), (1 << bits) - 1, out=indices)
            indices.clamp_(max=count - 1)  # NaN may hold any index
            row += rounds
    return out
