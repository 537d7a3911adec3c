"""The asymmetric form of Reformer's attention as steps: who is beside whom, and who sees whom.

First comes the window, then the first tokens, then round after round. Places are compared where
they lie in the order of a round, and a key that an earlier round has met is not seen again.
Letters: U key heads at hand, G query heads that share one, T queries, S keys, N = G T;
n blocks of a step, C queries of a block, W keys beside them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.reformer_asymmetric import BLOCK, STEP, TILE, Layout, Orders
from attnzoo.ops.reformer_blocks import Plan, Step, stretches
from attnzoo.ops.room import LANES


def steps(orders: Orders) -> Plan:
    """Cut what a level meets into steps; rows are ``[U N + 1]`` queries and ``[U S]`` keys."""
    layouts = [Layout(order) for order in orders.list]
    near = _near_blocks(orders)
    slots = near.numel() + orders.none * (orders.first > 0) + sum(x.slots for x in layouts)

    def found() -> Iterator[Step]:
        if orders.level.past:
            yield from _window(orders, near)
        else:
            yield from _everything(orders, near)
        if orders.first:
            yield _first(orders)
        for index, layout in enumerate(layouts):
            yield from _round(orders, layout, index)

    return Plan(slots, 2 + len(layouts), found())


def _near_blocks(orders: Orders) -> Tensor:
    """Cut queries into blocks of all groups of a unit at some positions, ``[U, blocks, C]``."""
    units, groups, length = orders.units, orders.groups, orders.length
    block = max(1, (BLOCK if orders.level.past else 2 * BLOCK) // groups)
    blocks = -(-length // block)
    t = torch.arange(block * blocks, device=orders.device).view(blocks, 1, block)
    group = torch.arange(units * groups, device=orders.device).view(units, 1, groups, 1)
    return torch.where(t < length, t + group * length, orders.none).flatten(2)


def _near_intervals(orders: Orders, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return middle and half length of what the queries of blocks see, ``[blocks, C]``."""
    block = blocks.shape[2] // orders.groups
    more = block * blocks.shape[1] - orders.length
    middle, half = (F.pad(x, (0, more)).view(-1, block) for x in orders.window())
    return middle.repeat(1, orders.groups), half.repeat(1, orders.groups)


def _window(orders: Orders, blocks: Tensor) -> Iterator[Step]:
    """Yield the steps of the window: blocks that follow each other, beside one stretch of keys."""
    size, window, causal = orders.level.keys, orders.rule.window, orders.rule.causal
    middle, half = _near_intervals(orders, blocks)
    block, before = blocks.shape[2] // orders.groups, window - causal
    width = before + block + (0 if causal else window)
    width = -(-width // LANES) * LANES
    unit = size * torch.arange(orders.units, device=orders.device)[:, None]
    most = STEP // (width * blocks.shape[2])
    for some, at in stretches(orders.units, blocks.shape[1], most):
        places = torch.arange(width + (at.stop - at.start - 1) * block, device=orders.device)
        places += orders.level.begin - before + at.start * block
        keys = places.clamp(0, size - 1) + unit[some]
        places = torch.where((places >= 0) & (places < size), places, -2 * size)
        away = _away(places.float().unfold(0, width, block), middle[at], half[at])
        if len(keys) > 1:  # windows of several stretches would be copied, slower than gathered
            keys = keys.unfold(1, width, block).flatten(0, 1)
        yield Step(blocks[some, at].flatten(0, 1), keys, away.repeat(len(unit[some]), 1, 1), 0)


def _everything(orders: Orders, blocks: Tensor) -> Iterator[Step]:
    """Yield the steps of queries that see every key, or all up to their own."""
    block, size = blocks.shape[2] // orders.groups, orders.level.keys
    unit = size * torch.arange(orders.units, device=orders.device)[:, None]
    intervals = zip(*_near_intervals(orders, blocks), strict=True)
    for i, (middle, half) in enumerate(intervals):
        last = orders.level.begin + (i + 1) * block
        places = torch.arange(min(last, size) if orders.rule.causal else size, device=orders.device)
        away = _away(places.float()[None], middle[None], half[None])
        step = max(1, STEP // away.numel())
        for rows, its in zip(blocks[:, i].split(step), unit.split(step), strict=True):
            yield Step(rows, places + its, away.repeat(len(its), 1, 1), 0)


def _away(places: Tensor, middle: Tensor, half: Tensor) -> Tensor:
    """Return how far places ``[n, W]`` lie outside of intervals ``[n, C]``, ``[n, W, C]``."""
    return (places[:, :, None] - middle[:, None]).abs_().sub_(half[:, None]).clamp_min_(0)


def _first(orders: Orders) -> Step:
    """Return the step of the first tokens, where they are not in the window anyway."""
    keys = torch.arange(orders.first, device=orders.device)
    middle, half = (x.repeat(orders.groups) for x in orders.window())
    inside = half - (keys.float()[:, None] - middle).abs_()
    away = inside.clamp_min_(0).repeat(orders.units, 1, 1)
    rows = torch.arange(orders.none, device=orders.device).view(orders.units, -1)
    unit = torch.arange(orders.units, device=orders.device)[:, None]
    return Step(rows, keys + orders.level.keys * unit, away, 1)


def _round(orders: Orders, layout: Layout, index: int) -> Iterator[Step]:
    """Yield the steps of a round, where earlier ones have not met a key already.

    How far places lie from the middle of an interval is compared by squares, which take one pass.
    """
    order, limit = layout.order, (orders.rule.chunk / 2) ** 2
    earlier = [(x.places, x.middles) for x in orders.list[:index]]
    if not orders.rule.causal:
        earlier.append(window_order(orders))
    for some, width in layout.batches(TILE):
        begin, queries = layout.begin[some], layout.queries[some]
        tile = torch.arange(width, device=orders.device)
        keys = order.keys.take((begin + tile).clamp_max_(len(order.keys) - 1))
        places = order.places.take(keys[:, :1]) + tile  # as if all were of its bucket
        middles = order.middles.take(queries)
        most = max(1, STEP // (width * BLOCK))
        for i in range(0, len(keys), most):
            at = slice(i, i + most)
            away = _squares(places[at], middles[at])
            met: Tensor | None = None
            for where, its_middles in earlier:
                its = _squares(where.take(keys[at]), its_middles.take(queries[at]))
                met = its if met is None else torch.minimum(met, its, out=met)
            if met is not None:
                away = torch.maximum(away, torch.rsub(met, 2 * limit), out=away)
            yield Step(queries[at], keys[at], away.sub_(limit).clamp_min_(0), 2 + index)


def _squares(places: Tensor, middles: Tensor) -> Tensor:
    """Return the squared distances of ``[n, W]`` from ``[n, C]``, as ``[n, W, C]``."""
    squares: Tensor = torch.ops.aten.mse_loss(places[:, :, None], middles[:, None], 0)
    return squares


def window_order(orders: Orders) -> tuple[Tensor, Tensor]:
    """Return places of keys and middles of queries in the order as it stands, scaled."""
    t, rule = orders.positions, orders.rule
    scale = rule.chunk / (2 * rule.window + 1)
    places = torch.arange(orders.level.keys, device=orders.device).repeat(orders.units)
    t = t.repeat(orders.units * orders.groups)
    return places.float() * scale, F.pad(t.float() * scale, (0, 1))
