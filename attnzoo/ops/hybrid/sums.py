"""The linear branch of the window hybrid: sums over the keys outside the window, and their number.

Letters: B batch, H query heads, Hkv key heads, T queries, R queries with such keys, E value size,
F features of a key, W window, G first tokens (sinks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import fill_padding
from attnzoo.contract.states import LinearState
from attnzoo.ops.hybrid.state import HybridInputs
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.common import empty_state
from attnzoo.ops.linear.cpu.linear import weighted_sums
from attnzoo.ops.linear.triton.run import linear_sums as triton_sums
from attnzoo.ops.linear.triton.run import round_features
from attnzoo.ops.window.causal_window import is_filled
from attnzoo.runtime.memory import cat_huge_pages


class LinearSums(NamedTuple):
    """Sums over the keys outside the windows of the last R queries; the others have no such keys.

    ``counts`` is the number of these keys, ``[B, T]``, at most 0 if there are none; ``None`` if the
    branch does not use it. ``state`` is that of causal calls; its last column sums ones.
    """

    sums: Tensor  # of values, [B, H, R, E]
    totals: Tensor  # of weights, [B, H, R]
    counts: Tensor | None
    state: LinearState | None


# Sums of queries, keys and values under a causal mask, whose padding are keys that do not count,
# with a log decay and a state: of values and of weights, float32 or wider, and the last state.
# Values of states end in ones, so the last column of their sums is that of keys.
CausalSums = Callable[
    [
        HybridInputs,
        tuple[Tensor, Tensor, Tensor],
        AttentionMask,
        Tensor | None,
        LinearState | None,
    ],
    tuple[Tensor, Tensor, LinearState | None],
]


def linear_sums(x: HybridInputs, compute: CausalSums) -> LinearSums:
    """Return the linear sums of a call."""
    return _causal_sums(x, compute) if x.causal else _bidirectional_sums(x, compute)


def _causal_sums(x: HybridInputs, compute: CausalSums) -> LinearSums:
    """Return the linear sums over keys before the window.

    Token t of the linear attention has the query of token t and the key of token t - W; the first
    G keys are left out.
    """
    branch, state, length, size = x.branch, x.state, x.q.shape[2], x.window
    log_decay, ids = branch.log_decay, None
    if state is None:
        first, sums = size + x.num_sinks, None
        leaving = slice(x.num_sinks, max(length - size, x.num_sinks))
        keys, values = branch.k[:, :, leaving], x.v[:, :, leaving]
        queries = branch.q[:, :, first:]
        if log_decay is not None and log_decay.dim() > 1:
            log_decay = log_decay[:, :, first:]
    else:
        old = state.features if branch.feature_map == "identity" else state.k
        keys = torch.cat([old.to(branch.k.dtype), branch.k], 2)[:, :, :length]
        old_values = state.v[:, :, x.num_sinks :]
        values = torch.cat([old_values, x.v.to(old_values.dtype)], 2)[:, :, :length]
        queries, first, sums = branch.q, 0, LinearState(state.kv, state.z)
    seen = None if x.padding_mask is None else x.padding_mask[:, first:]  # none leaves at padding
    if state is not None and x.num_sinks:
        rank = state.seen[:, None] - size + torch.arange(length, device=keys.device)
        counted = rank >= x.num_sinks
        seen = counted if seen is None else seen & counted
    if state is not None and branch.feature_map != "identity":
        places = F.pad(is_filled(state.seen, size), (0, length), value=True)[:, :length]
        seen = places if seen is None else seen & places
    if x.segment_ids is not None:  # a key of another segment does not enter the state
        ids, key_ids = x.segment_ids[:, first:], x.segment_ids
        if state is not None:
            key_ids = torch.cat([key_ids[:, :1].expand(-1, size), key_ids], 1)
        is_same = ids == key_ids[:, : ids.shape[1]]
        seen = is_same if seen is None else seen & is_same
    sums = None if x.shard is not None else sums
    mask = AttentionMask(causal=True, padding=seen, segment_ids=ids)
    out, totals, last = compute(x, (queries, keys, values), mask, log_decay, sums)
    return LinearSums(out, totals, linear_counts(x) if branch.mean else None, last)


def linear_counts(x: HybridInputs) -> Tensor:
    """Return the number of keys in each token's linear sums, ``[B, T]``; at most 0 if none."""
    counts = _tokens_around(x)[0] + 1 - x.window - x.num_sinks
    if x.state is not None:
        earlier = x.state.seen[:, None]
        if x.segment_ids is not None:
            earlier = earlier * (x.segment_ids == x.segment_ids[:, :1])
        counts = counts + earlier
    return counts


def _bidirectional_sums(x: HybridInputs, compute: CausalSums) -> LinearSums:
    """Return the linear sums over keys before and after the window."""
    branch, length, skip = x.branch, x.q.shape[2], x.window + 1
    wide = torch.promote_types(x.v.dtype, torch.float32)
    sums = branch.q.new_zeros(*x.q.shape[:3], x.v.shape[3], dtype=wide)
    totals = sums.new_zeros(sums.shape[:3])
    if length > skip:
        early, late = slice(length - skip), slice(skip, length)
        before, weights_before = _directional_sums(x, compute, late, early)
        after, weights_after = _directional_sums(x, compute, early, late)
        sums = F.pad(before, (0, 0, skip, 0)) + F.pad(after, (0, 0, 0, skip))
        totals = F.pad(weights_before, (skip, 0)) + F.pad(weights_after, (0, skip))
    if not branch.mean:
        return LinearSums(sums, totals, None, None)
    tokens_before, tokens_after = _tokens_around(x)
    outside = (tokens_before - x.window).clamp(min=0) + (tokens_after - x.window).clamp(min=0)
    return LinearSums(sums, totals, outside, None)


def _directional_sums(
    x: HybridInputs, compute: CausalSums, queries: slice, keys: slice
) -> tuple[Tensor, Tensor]:
    """Return the linear sums of queries paired with the first keys outside their windows."""
    q, k, v = x.branch.q[:, :, queries], x.branch.k[:, :, keys], x.v[:, :, keys]
    reverse, ids, seen = queries.start is None, None, None
    if x.segment_ids is not None:
        ids = x.segment_ids[:, queries]
        seen = ids == x.segment_ids[:, keys]
    if reverse:
        q, k, v = q.flip(2), k.flip(2), v.flip(2)
        ids = None if ids is None else (ids.amax() - ids).flip(1)
        seen = None if seen is None else seen.flip(1)
    mask = AttentionMask(causal=True, padding=seen, segment_ids=ids)
    sums, totals, _ = compute(x, (q, k, v), mask, None, None)
    return (sums.flip(2), totals.flip(2)) if reverse else (sums, totals)


def sums_triton(
    x: HybridInputs,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: AttentionMask,
    log_decay: Tensor | None,
    state: LinearState | None,
) -> tuple[Tensor, Tensor, LinearState | None]:
    """Compute :data:`CausalSums` in Triton, without a state; features are given."""
    assert state is None
    q, k, v = qkv
    q, k = round_features(q, v), round_features(k, v)
    k = fill_padding(k, mask.padding)
    out, totals, _ = triton_sums(q, k, v, log_decay, empty_state(q, k, v), mask.segment_ids)
    return out, totals, None


def sums_cpp(
    x: HybridInputs,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: AttentionMask,
    log_decay: Tensor | None,
    state: LinearState | None,
) -> tuple[Tensor, Tensor, LinearState | None]:
    """Compute :data:`CausalSums` in C++, which may compute the features too."""
    if state is not None:
        state = LinearState(state.kv[..., :-1], state.k)
    out, totals, last = weighted_sums(
        *qkv,
        mask=mask,
        log_decay=log_decay,
        state=state,
        chunk_size=x.chunk_size,
        feature_map=x.branch.feature_map,
        feature_scale=x.branch.feature_scale,
        map_weights=x.branch.map_weights,
        shard=x.shard,
    )
    if not x.return_state:
        return out, totals, None
    return out, totals, LinearState(torch.cat([last.kv, last.k.unsqueeze(3)], 3), last.k)


def sums_of_op(
    x: HybridInputs,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: AttentionMask,
    log_decay: Tensor | None,
    state: LinearState | None,
    *,
    impl: str,
) -> tuple[Tensor, Tensor, LinearState | None]:
    """Compute :data:`CausalSums` by an implementation of linear attention; features are given."""
    q, k, v = qkv
    wide = torch.promote_types(v.dtype, torch.float32)
    ones = v.new_ones(*v.shape[:3], 1, dtype=wide)
    found = linear_attention(
        *(q, k, cat_huge_pages([v.to(wide), ones], 3)),
        mask=mask,
        log_decay=log_decay,
        impl=impl,
        state=state,
        return_state=x.return_state,
        chunk_size=x.chunk_size,
        shard=x.shard,
    )
    return found.out[..., :-1], found.out[..., -1], found.state


def _tokens_around(x: HybridInputs) -> tuple[Tensor, Tensor]:
    """Return the number of tokens before and after each token in its sequence, ``[B, T]`` each."""
    batch, length, ids = x.q.shape[0], x.q.shape[2], x.segment_ids
    position = torch.arange(length, device=x.q.device)
    lengths = torch.full((batch, 1), length, device=position.device)
    if x.padding_mask is not None:
        lengths = x.padding_mask.sum(1, keepdim=True)
    if ids is None:
        return position.expand(batch, length), (lengths - 1 - position).clamp(min=0)
    changes = ids[:, 1:] != ids[:, :-1]
    first = F.pad(position[1:] * changes, (1, 0)).cummax(1).values
    last = F.pad(torch.where(changes, position[:-1], length - 1), (0, 1), value=length - 1)
    last = torch.minimum(last.flip(1).cummin(1).values.flip(1), lengths - 1)
    return position - first, (last - position).clamp(min=0)
