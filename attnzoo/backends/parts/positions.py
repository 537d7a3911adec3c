"""Token positions within a sequence, for feature maps that depend on them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import (
    AttentionOutput,
    CountedLinearState,
    LinearState,
    put_slots,
    read_slots,
)
from attnzoo.errors import UnsupportedError


class TokenCounts(NamedTuple):
    """The positions of one call's tokens, and the number of tokens after the call."""

    positions: Tensor  # [B, T], integers from 0; [1, T] of one row of sequences
    total: Tensor  # [B]: tokens of each sequence, over this and all earlier calls


def count_tokens(inputs: AttentionInputs) -> TokenCounts:
    """Return the positions of the tokens, which continue from the state.

    Raises:
        UnsupportedError: Queries and keys are not the same tokens.
    """
    batch, length, queries = inputs.k.shape[0], inputs.k.shape[2], inputs.q.shape[2]
    if queries != length:
        raise UnsupportedError(
            f"there are {queries} queries and {length} keys, so the positions of the queries are "
            "unknown (the weights of feature map 'cosine' depend on the distance; take another)"
        )
    sequences, slots, device = inputs.sequences, inputs.slots, inputs.k.device
    before = None if inputs.state is None else inputs.state.tokens
    if inputs.shard is not None:
        rows = batch if inputs.shard.layout is None else inputs.shard.layout.shape[0]
        before = inputs.shard.tokens_before(rows, device)
        before = inputs.shard.states(LinearState(before, before), sequences).kv
    if slots is not None:
        assert before is not None
        (here,) = read_slots([before], slots)
        (total,) = put_slots([before], slots, [here + 1], in_place=inputs.reuse_state)
        return TokenCounts(here[:, None], total)
    if sequences is None:
        positions = torch.arange(length, device=device).expand(batch, -1)
        total = torch.full((batch,), length, device=device)
        if before is not None:
            positions, total = positions + before[:, None], total + before
        return TokenCounts(positions, total)
    positions = sequences.positions(length)
    if before is not None:
        positions = positions + before[sequences.index(length).clamp(max=before.shape[0] - 1)]
    total = sequences.lengths if before is None else sequences.lengths + before
    return TokenCounts(positions[None], total)


def without_count(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with a :class:`LinearState`, as the op takes it."""
    state = inputs.state
    return inputs if state is None else inputs._replace(state=LinearState(state.kv, state.k))


def with_count(output: AttentionOutput, counts: TokenCounts) -> AttentionOutput:
    """Return the output with a :class:`CountedLinearState`."""
    state = output.state
    if state is None:
        return output
    return output._replace(state=CountedLinearState(state.kv, state.k, counts.total))
