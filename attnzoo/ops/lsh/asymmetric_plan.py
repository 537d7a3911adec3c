"""Blocks of the asymmetric form of LSH attention: window, first tokens, then the hash rounds.

Intervals are compared by ranks in the order of a round, and a key that an earlier round contains is
masked.
Letters: U key heads of a work item, G query heads per key head, T queries, S keys, N = G T;
n blocks, C queries of a block, W keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.lsh.block_softmax import BlockBatch, BlockPlan, split_blocks
from attnzoo.ops.lsh.voronoi_hashing import (
    BLOCK_QUERIES,
    KEY_TILE,
    MAX_SCORES,
    HashRounds,
    RoundBlocks,
)
from attnzoo.runtime.kernel_calls import LANES

WINDOW_SPLIT, FIRST_SPLIT, ROUND_SPLITS = 0, 1, 2  # the last is that of the first hash round


def plan_rounds(hashed: HashRounds) -> BlockPlan:
    """Return the blocks of a level; rows are ``[U N + 1]`` queries and ``[U S]`` keys."""
    rounds = [RoundBlocks(hash_round) for hash_round in hashed.rounds]
    near = _near_blocks(hashed)
    num_partials = near.numel() + hashed.padding_row * (hashed.first_tokens > 0)
    num_partials += sum(blocks.num_queries for blocks in rounds)

    def batches() -> Iterator[BlockBatch]:
        if hashed.level.pivot_keys:
            yield from _window_batches(hashed, near)
        else:
            yield from _full_batches(hashed, near)
        if hashed.first_tokens:
            yield _first_tokens_batch(hashed)
        for index, blocks in enumerate(rounds):
            yield from _round_batches(hashed, blocks, index)

    return BlockPlan(num_partials, ROUND_SPLITS + len(rounds), batches())


def _near_blocks(hashed: HashRounds) -> Tensor:
    """Cut queries into blocks of consecutive positions, all groups together, ``[U, blocks, C]``."""
    units, groups, length = hashed.units, hashed.groups, hashed.length
    block = max(1, (BLOCK_QUERIES if hashed.level.pivot_keys else 2 * BLOCK_QUERIES) // groups)
    blocks = -(-length // block)
    t = torch.arange(block * blocks, device=hashed.device).view(blocks, 1, block)
    group = torch.arange(units * groups, device=hashed.device).view(units, 1, groups, 1)
    return torch.where(t < length, t + group * length, hashed.padding_row).flatten(2)


def _near_intervals(hashed: HashRounds, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return centre and half width of the intervals of blocks' queries, ``[blocks, C]``."""
    block = blocks.shape[2] // hashed.groups
    padding = block * blocks.shape[1] - hashed.length
    centers, halves = (F.pad(x, (0, padding)).view(-1, block) for x in hashed.window_intervals())
    return centers.repeat(1, hashed.groups), halves.repeat(1, hashed.groups)


def _window_batches(hashed: HashRounds, blocks: Tensor) -> Iterator[BlockBatch]:
    """Yield the batches of the window: consecutive blocks share a strip of keys."""
    options, size = hashed.options, hashed.level.keys
    centers, halves = _near_intervals(hashed, blocks)
    block, before = blocks.shape[2] // hashed.groups, options.window - options.causal
    width = before + block + (0 if options.causal else options.window)
    width = -(-width // LANES) * LANES
    first_key = size * torch.arange(hashed.units, device=hashed.device)[:, None]
    max_blocks = MAX_SCORES // (width * blocks.shape[2])
    for some, at in split_blocks(hashed.units, blocks.shape[1], max_blocks):
        length = width + (at.stop - at.start - 1) * block
        positions = torch.arange(length, device=hashed.device)
        positions += hashed.level.begin - before + at.start * block
        keys = positions.clamp(0, size - 1) + first_key[some]
        positions = torch.where((positions >= 0) & (positions < size), positions, -2 * size)
        windows = positions.float().unfold(0, width, block)
        penalty = _distance_outside(windows, centers[at], halves[at])
        if len(keys) > 1:  # windows of several strips would be copied, slower than gathered
            keys = keys.unfold(1, width, block).flatten(0, 1)
        penalty = penalty.repeat(len(first_key[some]), 1, 1)
        yield BlockBatch(blocks[some, at].flatten(0, 1), keys, penalty, WINDOW_SPLIT)


def _full_batches(hashed: HashRounds, blocks: Tensor) -> Iterator[BlockBatch]:
    """Yield the batches of full attention: to every key or, if causal, every past key."""
    block, size = blocks.shape[2] // hashed.groups, hashed.level.keys
    first_key = size * torch.arange(hashed.units, device=hashed.device)[:, None]
    intervals = zip(*_near_intervals(hashed, blocks), strict=True)
    for i, (centers, halves) in enumerate(intervals):
        end = min(hashed.level.begin + (i + 1) * block, size) if hashed.options.causal else size
        positions = torch.arange(end, device=hashed.device)
        penalty = _distance_outside(positions.float()[None], centers[None], halves[None])
        step = max(1, MAX_SCORES // penalty.numel())
        for rows, first in zip(blocks[:, i].split(step), first_key.split(step), strict=True):
            keys = positions + first
            yield BlockBatch(rows, keys, penalty.repeat(len(first), 1, 1), WINDOW_SPLIT)


def _distance_outside(positions: Tensor, centers: Tensor, halves: Tensor) -> Tensor:
    """Return the distance ``[n, W, C]`` of positions ``[n, W]`` outside intervals ``[n, C]``."""
    distance = (positions[:, :, None] - centers[:, None]).abs_()
    return distance.sub_(halves[:, None]).clamp_(0, 1)


def _first_tokens_batch(hashed: HashRounds) -> BlockBatch:
    """Return the batch of the first tokens, masked where the window contains them."""
    keys = torch.arange(hashed.first_tokens, device=hashed.device)
    centers, halves = (x.repeat(hashed.groups) for x in hashed.window_intervals())
    depth_inside = halves - (keys.float()[:, None] - centers).abs_()
    penalty = depth_inside.clamp_(0, 1).repeat(hashed.units, 1, 1)
    rows = torch.arange(hashed.padding_row, device=hashed.device).view(hashed.units, -1)
    unit = torch.arange(hashed.units, device=hashed.device)[:, None]
    return BlockBatch(rows, keys + hashed.level.keys * unit, penalty, FIRST_SPLIT)


def _round_batches(hashed: HashRounds, blocks: RoundBlocks, index: int) -> Iterator[BlockBatch]:
    """Yield the batches of a hash round, without the keys of earlier rounds.

    Distances from the centre of an interval are compared as squares, which take one pass.
    """
    hash_round, limit = blocks.hash_round, (hashed.options.chunk_size / 2) ** 2
    earlier = [(x.key_ranks, x.centers) for x in hashed.rounds[:index]]
    if not hashed.options.causal:
        earlier.append(window_ranks(hashed))
    for some, width in blocks.by_width(KEY_TILE):
        begin, queries = blocks.begin[some], blocks.queries[some]
        tile = torch.arange(width, device=hashed.device)
        keys = hash_round.keys.take((begin + tile).clamp_max_(len(hash_round.keys) - 1))
        # Ranks as if all keys had the bucket of the first; no interval reaches the others
        ranks = hash_round.key_ranks.take(keys[:, :1]) + tile
        centers = hash_round.centers.take(queries)
        step = max(1, MAX_SCORES // (width * BLOCK_QUERIES))
        for i in range(0, len(keys), step):
            at = slice(i, i + step)
            penalty = _squared_distance(ranks[at], centers[at])
            nearest: Tensor | None = None  # least squared distance of the earlier rounds
            for key_ranks, its_centers in earlier:
                squares = _squared_distance(key_ranks.take(keys[at]), its_centers.take(queries[at]))
                nearest = (
                    squares if nearest is None else torch.minimum(nearest, squares, out=nearest)
                )
            if nearest is not None:
                nearest = torch.rsub(nearest, 2 * limit)
                penalty = torch.maximum(penalty, nearest, out=penalty)
            penalty = penalty.sub_(limit).clamp_(0, 1)
            yield BlockBatch(queries[at], keys[at], penalty, ROUND_SPLITS + index)


def _squared_distance(ranks: Tensor, centers: Tensor) -> Tensor:
    """Return the squared distances of ``[n, W]`` from ``[n, C]``, as ``[n, W, C]``."""
    squares: Tensor = torch.ops.aten.mse_loss(ranks[:, :, None], centers[:, None], 0)
    return squares


def window_ranks(hashed: HashRounds) -> tuple[Tensor, Tensor]:
    """Return the window as :class:`HashRound` has intervals: key ranks and query centres.

    Positions are scaled so that the window is ``chunk_size`` wide.
    """
    t, options = hashed.positions, hashed.options
    scale = options.chunk_size / (2 * options.window + 1)
    positions = torch.arange(hashed.level.keys, device=hashed.device).repeat(hashed.units)
    t = t.repeat(hashed.units * hashed.groups)
    return positions.float() * scale, F.pad(t.float() * scale, (0, 1))
