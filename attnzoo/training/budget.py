"""A plan under a budget of cache: how many bytes a model may keep after so many tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from attnzoo.demo.measure import layer_bytes
from attnzoo.errors import ConfigError
from attnzoo.integrations.convert import restore, swap
from attnzoo.training.plan import EXACT, LayerMeasure, Planner

MEASURED = (1024, 2048)  # tokens; beyond them a cache grows along a line, or not at all
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20}


def read_size(text: str, option: str) -> int:
    """Read a number with a unit, such as 64KiB, 1.5MiB or, of tokens, 16k.

    Raises:
        ConfigError: It is none, or not above 0.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    size = int(float(found[1]) * UNITS[found[2]]) if found and found[2] in UNITS else 0
    if size < 1:
        raise ConfigError(f"{option} is a size such as 1MiB, 64KiB or 16k, got {text!r}")
    return size


@dataclass(frozen=True, kw_only=True)
class CacheBudget:
    """At most so many bytes, for one sequence, after so many tokens."""

    bytes: int
    length: int

    def choose(self, planner: Planner, measures: Sequence[LayerMeasure]) -> dict[int, str]:
        """Give every layer a candidate, and softmax where it helps most and still fits.

        Layers start with the candidate that changes predictions least. Where these together keep
        too much, the swap to a cheaper one that costs least for every byte saved comes first.

        Raises:
            ConfigError: Not even the smallest candidates fit.
        """
        sizes = {
            name: layer_sizes(planner, name, self.length) for name in (EXACT, *planner.candidates)
        }
        alone = {x.layer: x.alone for x in measures}
        chosen = {n: min(alone[n], key=lambda name: alone[n][name]) for n in planner.numbers}
        while (total := self.total(sizes, chosen, planner.numbers)) > self.bytes:
            cheaper = [
                ((alone[n][new] - alone[n][old]) / (sizes[old][n] - sizes[new][n]), n, new)
                for n, old in chosen.items()
                for new in planner.candidates
                if sizes[new][n] < sizes[old][n]
            ]
            if not cheaper:
                raise ConfigError(
                    f"The smallest candidates keep {total:,} bytes after {self.length:,} tokens, "
                    f"more than the {self.bytes:,} of the budget; add a candidate that keeps less, "
                    "such as longformer:window=32, or raise --cache-bytes"
                )
            _, number, name = min(cheaper)
            chosen[number] = name
        while chosen:
            tried = {}
            for number in chosen:
                rest = {n: name for n, name in chosen.items() if n != number}
                if self.total(sizes, rest, planner.numbers) <= self.bytes:
                    planner.tick(f"layer {number} exact")
                    tried[number] = planner.divergence(rest)
            if not tried:
                break
            del chosen[min(tried, key=lambda number: tried[number])]
        return chosen

    @staticmethod
    def total(
        sizes: Mapping[str, Mapping[int, int]], chosen: Mapping[int, str], numbers: Sequence[int]
    ) -> int:
        """Return the bytes of all layers together."""
        return sum(sizes[chosen.get(number, EXACT)][number] for number in numbers)


@torch.no_grad()
def layer_sizes(planner: Planner, name: str, length: int) -> dict[int, int]:
    """Return the bytes of every layer's cache after so many tokens, under one attention.

    Measured where that is short, else drawn on from two lengths.
    """
    planner.tick(f"the cache of {name}")
    swap(
        planner.model,
        planner.spec_of(dict.fromkeys(planner.numbers, name)) if name != EXACT else EXACT,
    )
    try:
        lengths = MEASURED if length > MEASURED[-1] else (length,)
        found = [_measured(planner, n) for n in lengths]
    finally:
        restore(planner.model)
    if len(found) == 1:
        return found[0]
    first, last = found
    steps = (length - MEASURED[1]) / (MEASURED[1] - MEASURED[0])
    return {n: last[n] + round((last[n] - first[n]) * steps) for n in planner.numbers}


def _measured(planner: Planner, length: int) -> dict[int, int]:
    tokens = planner.rows.flatten()
    tokens = tokens.repeat(-(-length // len(tokens)))[:length][None]
    cache = DynamicCache(config=planner.model.config)
    planner.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return dict(zip(planner.numbers, map(layer_bytes, cache.layers), strict=True))
