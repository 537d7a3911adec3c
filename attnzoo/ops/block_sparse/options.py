"""Options, inputs and state of block-sparse attention.

Other letters: N key blocks, C keys of a block, Z numbers per summary, R recent keys, I indexer
heads, P size of index queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SparseOptions(NamedTuple):
    """Sizes that determine, with the selected blocks, which keys each query attends to."""

    causal: bool
    window: int  # the latest keys including the query's own; bidirectional: keys on each side
    num_sinks: int  # leading keys that every query attends to
    top_k: int  # most key blocks that are selected
    block_size: int  # keys per block
    query_block: int  # consecutive queries that share a selection

    @classmethod
    def from_ints(cls, values: list[int]) -> SparseOptions:
        """Return the options from the list of integers that custom operators take."""
        return cls(bool(values[0]), *values[1:])

    @property
    def near_slots(self) -> int:
        """Most keys of a window, with the rest of the blocks in which it begins and ends."""
        rounding = self.block_size - 1
        if self.causal:
            return self.window + self.query_block - 1 + rounding
        return 2 * (self.window + rounding) + self.query_block

    def near_range(self, first: Tensor, lengths: Tensor | int) -> tuple[Tensor, Tensor]:
        """Return begin and end of the window of query blocks that begin at positions ``first``.

        Both are ends of blocks, or an end of the sequence. Causal queries also stop at their own
        position.
        """
        size = self.block_size
        begin = first - self.window + int(self.causal)
        begin = begin.clamp(min=0).div(size, rounding_mode="floor") * size
        if self.causal:
            end = first + self.query_block
        else:
            end = first + self.query_block + self.window
            end = (end + size - 1).div(size, rounding_mode="floor") * size
        return begin, torch.minimum(end, torch.as_tensor(lengths, device=end.device))


class SelectionOptions(NamedTuple):
    """Options of the scores of blocks."""

    score: str  # "mean", "moments", "bounds" or "indexer"
    coverage: float | None  # share of the estimated weight that is enough; None: top_k blocks
    per_key_head: bool  # whether the query heads of a key head share a selection


class IndexTensors(NamedTuple):
    """Outputs of an indexer for the hidden states of a call."""

    q: Tensor  # [B, I, T, P]
    k: Tensor  # [B, 1, S, P]; with a state, of the new tokens
    weights: Tensor  # [B, I, T], of the indexer's heads


class SparseCall(NamedTuple):
    """Inputs of block-sparse attention; rows are aligned at their ends, padding comes first."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    lengths: Tensor | None  # [B], real keys of each row; None means S
    counts: Tensor | None  # [B], real queries of each row; None means T
    # [B, H, D] or [B, I, P + 1], first query of the query block in which the call begins
    leader: Tensor | None
    # [B, Hkv, N, Z] from a state, or [B, 1, N, P] of index keys; None computes them from the keys
    summary: Tensor | None
    scale: float
    options: SparseOptions
    selection: SelectionOptions
    index_q: Tensor | None = None  # [B, I, T, P + 1]: index queries, and the weights of their heads
    tail: Tensor | None = None  # [B, 1, C - 1, P]: the latest index keys
    return_state: bool = False

    def with_selecting_queries(self) -> SparseCall:
        """Return the call with the queries that score blocks."""
        return self if self.index_q is None else self._replace(q=self.index_q)


class BlockSparseState(NamedTuple):
    """Keys and values, and a summary of each finished block.

    Rows are aligned at their ends. Recent keys are apart, so that a new token copies these only.
    """

    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    recent_k: Tensor  # [B, Hkv, R, D], the latest keys
    recent_v: Tensor  # [B, Hkv, R, E]
    length: Tensor  # [B], integers: real tokens so far
    summary: Tensor  # [B, Hkv or 1, N, Z], float32 or float64: of finished blocks
    # [B, H, D] or [B, I, P + 1]: first query of the current query block; size 0 without sharing
    leader: Tensor
    tail: Tensor  # [B, 1, C - 1, P]: the latest index keys; size 0 without an indexer


class SparseStep(NamedTuple):
    """One new token: the call, which has the query and no earlier keys, and the state after it."""

    call: SparseCall
    state: BlockSparseState

    @property
    def q(self) -> Tensor:
        """The query, ``[B, H, 1, D]``."""
        return self.call.q

    @property
    def kept(self) -> int:
        """The largest number of blocks that the token reads."""
        return min(self.call.options.top_k, self.state.summary.shape[2])
