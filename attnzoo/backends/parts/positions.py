"""Token positions within a sequence, without padding, for feature maps that depend on them.

Letters: B batch, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput, CountedLinearState, LinearState
from attnzoo.errors import UnsupportedError


class TokenCounts(NamedTuple):
    """The positions of one call's tokens, and the number of tokens after the call."""

    positions: Tensor  # [B, T], integers from 0; at padding, the position of the next real token
    total: Tensor  # [B]: real tokens of the row's last sequence, over this and all earlier calls


def count_tokens(inputs: AttentionInputs) -> TokenCounts:
    """Return the positions of the tokens, which continue from the state; each segment starts at 0.

    Raises:
        UnsupportedError: Queries and keys are not the same tokens.
    """
    batch, length, queries = inputs.k.shape[0], inputs.k.shape[2], inputs.q.shape[2]
    if queries != length:
        raise UnsupportedError(
            f"there are {queries} queries and {length} keys, so the positions of the queries are "
            "unknown (the weights of feature map 'cosine' depend on the distance; take another)"
        )
    if inputs.shard is not None:
        return _count_all_shards(inputs, inputs.shard)
    mask, device = inputs.mask, inputs.k.device
    is_real = torch.ones(batch, length, dtype=torch.long, device=device)
    if mask.padding is not None:
        is_real = is_real * mask.padding
    positions = is_real.cumsum(1) - is_real
    if mask.segment_ids is not None:
        starts = torch.ones_like(mask.segment_ids, dtype=torch.bool)
        starts[:, 1:] = mask.segment_ids[:, 1:] != mask.segment_ids[:, :-1]
        positions = positions - (positions * starts).cummax(1).values
    if inputs.state is not None:
        positions = positions + inputs.state.tokens[:, None]
    if length == 0:
        total = is_real.new_zeros(batch) if inputs.state is None else inputs.state.tokens
    else:
        total = positions[:, -1] + is_real[:, -1]
    return TokenCounts(positions, total)


def _count_all_shards(inputs: AttentionInputs, shard: SequenceShard) -> TokenCounts:
    """Count the tokens of whole sequences, and return the positions of this rank's tokens."""
    length = shard.size * shard.length
    whole = inputs.k.new_empty(()).expand(inputs.k.shape[0], 1, length, 1)
    mask = AttentionMask(causal=True, padding=shard.padding, segment_ids=shard.segment_ids)
    counts = count_tokens(AttentionInputs(whole, whole, whole, mask, inputs.scale))
    return counts._replace(positions=shard.local(counts.positions))


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
