"""What decides whom a query meets in Reformer's attention: numbers, and draws named by numbers."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch


class Rule(NamedTuple):
    """What decides whom a query meets, beside the seed."""

    shared: bool  # Reformer's own rounds: no window, no first tokens, no levels
    causal: bool
    rounds: int
    chunk: int  # keys of a bucket that a query meets in a round
    buckets: int = 0  # pivots of a round; 0 lets their number follow the length
    window: int = 0  # the w latest keys, its own included, or w to either side
    first: int = 0  # keys at the beginning that all see

    @classmethod
    def read(cls, numbers: list[int]) -> Rule:
        """Make it of plain numbers, in which form operators take it."""
        shared, causal, rounds, chunk, buckets, window, first = numbers
        return cls(bool(shared), bool(causal), rounds, chunk, buckets, window, first)

    @property
    def reach(self) -> int:
        """How many keys a query meets at most; over so many, seeing all of them costs no more."""
        window = self.window if self.causal else 2 * self.window + 1
        return self.rounds * self.chunk + window + self.first


def named_generator(*name: int) -> torch.Generator:
    """Return a generator on the CPU that depends on these numbers alone: equal on every rank.

    It reads 32 bits of its seed only, so all numbers are mixed into those.
    """
    return torch.Generator("cpu").manual_seed(zlib.crc32(",".join(map(str, name)).encode()))
