"""Checks of the masks, lengths and options that block-sparse attention supports.

Other letters: I indexer heads, P size of index queries and keys.
"""

from __future__ import annotations

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
from attnzoo.ops.block_sparse.options import (
    BlockSparseState,
    IndexTensors,
    SelectionOptions,
    SparseOptions,
)

SCORES = ("mean", "moments", "bounds", "indexer")


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
