"""Where tokens stand in their sequence, counted over the real ones, for maps that depend on it.

Letters: B batch, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.inputs import AttentionInputs
from attnzoo.errors import UnsupportedError
from attnzoo.masks import AttentionMask
from attnzoo.ops.context_parallel import Shard
from attnzoo.state import AttentionOutput, CountedLinearState, LinearState


class Places(NamedTuple):
    """The tokens of one call, counted."""

    positions: Tensor  # [B, T], integers from 0; in padding, that of the next real token
    seen: Tensor  # [B]: real tokens of the row's last sequence, those of earlier calls included


def count_tokens(inputs: AttentionInputs) -> Places:
    """Count the real tokens of every row, from the state's count on; packed sequences from 0.

    Raises:
        UnsupportedError: Queries and keys are not those of the same tokens.
    """
    batch, length, queries = inputs.k.shape[0], inputs.k.shape[2], inputs.q.shape[2]
    if queries != length:
        raise UnsupportedError(
            f"{queries} queries and {length} keys are given, and the positions of the queries are "
            "not known (feature map 'cosine' weighs by distance; other maps do not)"
        )
    if inputs.shard is not None:
        return _count_whole_rows(inputs, inputs.shard)
    mask, device = inputs.mask, inputs.k.device
    real = torch.ones(batch, length, dtype=torch.long, device=device)
    if mask.padding is not None:
        real = real * mask.padding
    positions = real.cumsum(1) - real
    if mask.segment_ids is not None:
        begins = torch.ones_like(mask.segment_ids, dtype=torch.bool)
        begins[:, 1:] = mask.segment_ids[:, 1:] != mask.segment_ids[:, :-1]
        positions = positions - (positions * begins).cummax(1).values
    if inputs.state is not None:
        positions = positions + inputs.state.tokens[:, None]
    if length == 0:
        seen = real.new_zeros(batch) if inputs.state is None else inputs.state.tokens
    else:
        seen = positions[:, -1] + real[:, -1]
    return Places(positions, seen)


def _count_whole_rows(inputs: AttentionInputs, shard: Shard) -> Places:
    """Count the tokens of rows that lie on several processes, and take this one's."""
    width = shard.size * shard.length
    whole = inputs.k.new_empty(()).expand(inputs.k.shape[0], 1, width, 1)
    mask = AttentionMask(causal=True, padding=shard.padding, segment_ids=shard.segment_ids)
    places = count_tokens(AttentionInputs(whole, whole, whole, mask, inputs.scale))
    return places._replace(positions=shard.own(places.positions))


def without_count(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with the state that the op knows."""
    state = inputs.state
    return inputs if state is None else inputs._replace(state=LinearState(state.kv, state.k))


def with_count(output: AttentionOutput, places: Places) -> AttentionOutput:
    """Return the output with the count in its state."""
    state = output.state
    if state is None:
        return output
    return output._replace(state=CountedLinearState(state.kv, state.k, places.seen))
