"""Select the config of each kernel from the costs of candidates."""

from __future__ import annotations

from collections.abc import Mapping

from attnzoo.ops.linear.triton.configs import Config

SAME_TILE = ("dq", "dk")  # with scalar decay, dk reads q_dq per tile as dq writes it

Costs = Mapping[Config, Mapping[str, float]]  # by candidate and kernel; lower is better


def cheapest_configs(costs: Costs, decay: str) -> dict[str, Config]:
    """Return the cheapest candidate of each kernel; the first of equal ones.

    With scalar decay, the tile of :data:`SAME_TILE` is that with the smallest sum of their costs.
    """
    kernels = dict.fromkeys(name for row in costs.values() for name in row)
    best = {name: _cheapest(costs, name) for name in kernels}
    if decay == "scalar" and all(name in kernels for name in SAME_TILE):
        tiles = {
            config.tile
            for config in costs
            if all(
                any(name in row and other.tile == config.tile for other, row in costs.items())
                for name in SAME_TILE
            )
        }
        pairs = []
        for tile in sorted(tiles, reverse=True):
            pair = {name: _cheapest(costs, name, tile) for name in SAME_TILE}
            pairs.append((sum(costs[config][name] for name, config in pair.items()), pair))
        if pairs:
            best |= min(pairs, key=lambda pair: pair[0])[1]
    return best


def _cheapest(costs: Costs, name: str, tile: int | None = None) -> Config:
    candidates = [
        config for config, row in costs.items() if name in row and tile in (None, config.tile)
    ]
    return min(candidates, key=lambda config: costs[config][name])
