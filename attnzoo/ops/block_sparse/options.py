"""Options, inputs and state of block-sparse attention, and the checks of a call.

Other letters: N key blocks, C keys of a block, Z numbers per summary, R recent keys, I indexer
heads, P size of index queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.validation import (
    DTYPES,
    check_lengths,
    check_mask_fields,
    check_qkv,
    check_shape,
    check_size,
    check_state_field,
)
from attnzoo.errors import UnsupportedError

SCORES = ("mean", "moments", "bounds", "indexer")


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


# -- checks ----------------------------------------------------------------------------------------


def selection_reasons(selection: SelectionOptions) -> list[str]:
    """Return every reason why the options of a selection are invalid; empty if they are valid."""
    reasons = []
    if selection.score not in SCORES:
        accepted = " or ".join(map(repr, SCORES))
        reasons.append(f"score must be {accepted}, got {selection.score!r}")
    coverage = selection.coverage
    if coverage is not None and not 0 < coverage <= 1:
        reasons.append(
            f"coverage must be above 0 and at most 1, got {coverage}; it is a share of the weight "
            "of all blocks"
        )
    if coverage is not None and selection.score == "bounds":
        reasons.append(
            "coverage needs score='mean' or 'moments' or 'indexer', got score='bounds', which does "
            "not estimate the weight of a block"
        )
    if selection.per_key_head and selection.score == "indexer":
        reasons.append(
            "per_key_head must be False with score='indexer', got True; an indexer has one "
            "selection for all heads"
        )
    return reasons


def check_options(options: SparseOptions, selection: SelectionOptions) -> None:
    """Raise ``UnsupportedError`` if an option is invalid."""
    for name in ("window", "block_size", "query_block"):
        check_size(name, getattr(options, name))
    for name in ("num_sinks", "top_k"):
        check_size(name, getattr(options, name), minimum=0)
    reasons = selection_reasons(selection)
    if reasons:
        raise UnsupportedError(f"{'; '.join(reasons)}.")


def check_index(index: IndexTensors | None, q: Tensor, k: Tensor, score: str) -> None:
    """Raise ``UnsupportedError`` if index tensors are missing, unexpected or of wrong shapes."""
    if score != "indexer":
        if index is not None:
            raise UnsupportedError(
                f"index is given with score={score!r}, which does not use it; set score='indexer', "
                "or leave index out."
            )
        return
    if index is None:
        raise UnsupportedError(
            "score='indexer' needs index=(queries, keys, weights) of the indexer; another score "
            "computes blocks' scores from q and k."
        )
    heads, size = index.q.shape[1], index.q.shape[-1]
    (batch, _, length, _), keys = q.shape, k.shape[2]
    for name, x, letters, shape in (
        ("queries", index.q, "B, I, T, P", (batch, heads, length, size)),
        ("keys", index.k, "B, 1, S, P", (batch, 1, keys, size)),
        ("weights", index.weights, "B, I, T", (batch, heads, length)),
    ):
        check_shape(f"index {name}", x, shape, letters, q.device)


def check_state(state: BlockSparseState, k: Tensor, v: Tensor) -> None:
    """Raise ``UnsupportedError`` if a state does not fit the keys and values."""
    heads, kept, recent = k.shape[:2], state.k.shape[-2], state.recent_k.shape[-2]
    for name, shape in (
        ("k", (*heads, kept, k.shape[3])),
        ("v", (*heads, kept, v.shape[3])),
        ("recent_k", (*heads, recent, k.shape[3])),
        ("recent_v", (*heads, recent, v.shape[3])),
        ("summary", (k.shape[0], *state.summary.shape[1:])),
        ("leader", (k.shape[0], *state.leader.shape[1:])),
        ("tail", (k.shape[0], *state.tail.shape[1:])),
    ):
        x: Tensor = getattr(state, name)
        if not (x.shape == shape and x.device == k.device and x.dtype in DTYPES):
            check_state_field(f"state.{name}", x, shape, k.device, DTYPES)
    integers = (torch.int32, torch.int64)
    check_state_field("state.length", state.length, (k.shape[0],), k.device, integers)


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, has_state: bool, query_block: int
) -> None:
    """Raise ``UnsupportedError`` for shapes, masks or lengths that are not supported."""
    check_qkv(q, k, v, mask)
    check_mask_fields("block_sparse_attention", mask, "q_offset")
    length, keys = q.shape[2], k.shape[2]
    given = f"{length} queries and {keys} keys are given"
    if has_state and (length != keys or not mask.causal):
        raise UnsupportedError(
            f"{given} with a state; it needs a causal mask and as many queries as new keys."
        )
    check_lengths(q, k, mask)
    if query_block > 1 and length < keys:
        raise UnsupportedError(
            f"{given} with query_block={query_block}; the first query of a query block selects for "
            "all of them and may be missing. Pass the earlier tokens as state=, or use "
            "query_block=1."
        )
