"""Choice of a plan by the size of the cache: a limit in bytes at a context length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnzoo.errors import ConfigError
from attnzoo.evaluation.equal_memory import saved_cache_bytes
from attnzoo.spec import AttentionSpec
from attnzoo.training.plan import EXACT, LayerMeasure, Planner

UNITS = {
    **{"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9},
}


def parse_size(text: str, option: str) -> int:
    """Return the number in a text with a unit, such as 64KiB or 1.5MiB, or 16k for tokens.

    Args:
        text: The text.
        option: Name of the option, for the error.

    Raises:
        ConfigError: The text is not a size above 0.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    size = int(float(found[1]) * UNITS[found[2]]) if found and found[2] in UNITS else 0
    if size < 1:
        raise ConfigError(f"{option} must be a size such as 1MiB, 64KiB or 16k, got {text!r}")
    return size


@dataclass(frozen=True, kw_only=True)
class CacheBudget:
    """A limit on the cache of one sequence."""

    bytes: int
    length: int  # context length in tokens

    def check(self, path: Path, candidates: Iterable[AttentionSpec]) -> None:
        """Raise an error if no choice of candidates fits; nothing is measured yet.

        Args:
            path: Folder of the model.
            candidates: Specs of one backend each.

        Raises:
            ConfigError: The smallest candidates exceed the limit.
        """
        exact = saved_cache_bytes(path, AttentionSpec(EXACT), self.length)
        swapped = [saved_cache_bytes(path, spec, self.length) for spec in candidates]
        least = sum(min(x[n] for x in (exact, *swapped)) for n in exact)
        if least > self.bytes:
            raise self._exceeded(least)

    def _exceeded(self, least: int) -> ConfigError:
        return ConfigError(
            f"The smallest candidates use {least:,} bytes after {self.length:,} tokens, more than "
            f"the limit of {self.bytes:,}; add a candidate with a smaller cache, such as "
            "longformer:window=32, or raise --cache-bytes"
        )

    def choose(self, planner: Planner, measures: Sequence[LayerMeasure]) -> dict[int, str]:
        """Return the candidates of the layers that are not exact, within the limit, greedily.

        Each layer starts with the candidate that changes the predictions least. While the cache
        exceeds the limit, a layer changes to a smaller candidate, at the least KL per saved byte.
        Then softmax is restored where that reduces the KL most and the cache stays in the limit.

        Raises:
            ConfigError: The smallest candidates exceed the limit.
        """
        sizes = {
            name: layer_sizes(planner, name, self.length) for name in (EXACT, *planner.candidates)
        }
        divergence = {x.layer: x.alone for x in measures}
        chosen = {
            n: min(divergence[n], key=lambda name: divergence[n][name]) for n in planner.numbers
        }
        while (total := self.total(sizes, chosen)) > self.bytes:
            cheaper = [
                (
                    (divergence[n][new] - divergence[n][old]) / (sizes[old][n] - sizes[new][n]),
                    n,
                    new,
                )
                for n, old in chosen.items()
                for new in planner.candidates
                if sizes[new][n] < sizes[old][n]
            ]
            if not cheaper:
                raise self._exceeded(total)
            _, number, name = min(cheaper)
            chosen[number] = name
        while chosen:
            divergences = {}
            for number in chosen:
                rest = {n: name for n, name in chosen.items() if n != number}
                if self.total(sizes, rest) <= self.bytes:
                    planner.on_step(f"layer {number} exact")
                    divergences[number] = planner.divergence(rest)
            if not divergences:
                break
            del chosen[min(divergences, key=lambda number: divergences[number])]
        return chosen

    @staticmethod
    def total(sizes: Mapping[str, Mapping[int, int]], chosen: Mapping[int, str]) -> int:
        """Return the cache bytes of all layers."""
        return sum(sizes[chosen.get(number, EXACT)][number] for number in sizes[EXACT])


def layer_sizes(planner: Planner, name: str, length: int) -> dict[int, int]:
    """Return the cache bytes of each layer at a context length, all layers with one candidate."""
    planner.on_step(f"the cache of {name}")
    spec = AttentionSpec(EXACT)
    if name != EXACT:
        spec = planner.make_spec(dict.fromkeys(planner.numbers, name))
    return planner.cache_sizes(spec, length)
