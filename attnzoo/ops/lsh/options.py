"""Options and inputs of LSH attention, and its seeded random generator.

Other letters: R hash rounds.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor


class LSHOptions(NamedTuple):
    """Options that determine, with the seed, which keys each query attends to."""

    shared_qk: bool  # the paper's form: no window, no first tokens
    causal: bool
    num_hashes: int  # R
    chunk_size: int  # asymmetric form: keys per query and round; shared_qk: tokens per chunk
    num_buckets: int = 0  # asymmetric form: pivots per round; 0 scales them with the length
    window: int = 0  # the w latest keys including the query's own; bidirectional: w on each side
    first_tokens: int = 0  # leading keys that every query attends to

    @classmethod
    def from_ints(cls, values: list[int]) -> LSHOptions:
        """Return the options from the list of integers that custom operators take."""
        return cls(bool(values[0]), bool(values[1]), *values[2:])

    @property
    def max_attended_keys(self) -> int:
        """Most keys that a query attends to; shorter sequences get full attention at no more cost.

        Asymmetric form only.
        """
        window = self.window if self.causal else 2 * self.window + 1
        return self.num_hashes * self.chunk_size + window + self.first_tokens


class LSHInputs(NamedTuple):
    """Inputs of one call of an LSH attention op."""

    q: Tensor  # [B, H, T, D]; in each sequence, the last T positions
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    scale: float  # multiplies query-key products
    query_segments: Tensor | None  # [B, T]: sequence of each query within its row; < 0 is padding
    key_segments: Tensor | None  # [B, S]; None, like query_segments, if every row is one sequence
    rotations: Tensor | None  # [Hkv, D, R, F / 2], shared_qk only; None draws them from the seed
    seed: Tensor  # integers
    bucket_factors: list[int]  # shared_qk only: F is their sum; [] scales with the length
    options: LSHOptions
    bias: Tensor | None  # added to the scores, broadcastable to [B, H, T, S]


def seeded_generator(*seed: int) -> torch.Generator:
    """Return a CPU generator that depends on these integers only, so it is equal on every rank.

    ``manual_seed`` uses 32 bits, so a checksum combines the integers.
    """
    return torch.Generator("cpu").manual_seed(zlib.crc32(",".join(map(str, seed)).encode()))
