"""The inputs of the window hybrid, and the state that it keeps between calls.

Letters: B batch, H query heads, Hkv key heads, T queries, D key size, E value size, F features of a
key, W window, G first tokens of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard, latest_before
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import fill_padding, gather_tokens
from attnzoo.contract.states import LinearState
from attnzoo.ops.linear.common import (
    MapWeights,
    decay_of_real_tokens,
    like_features,
    map_features,
)
from attnzoo.ops.window.causal_window import Window, WindowState, is_filled, next_window


class HybridState(NamedTuple):
    """The first keys, those of the window and the sums over all others; of a fixed size.

    The window is a ring buffer: real token number n of a row is in row n mod W, and the next token
    overwrites the oldest one.
    """

    k: Tensor  # [B, Hkv, G + W, D]: first keys, then the latest; zeros if there are fewer
    v: Tensor  # [B, Hkv, G + W, E]
    features: Tensor  # [B, Hkv, W, F]: the features of the latest keys
    kv: Tensor  # [B, Hkv, F, E + 1]: the decayed sum of k v^T and, in the last column, of k
    z: Tensor  # [B, Hkv, F]: the decayed sum of k
    seen: Tensor  # [B], int64: number of real tokens so far


def oldest_first(state: HybridState) -> HybridState:
    """Return the state with the keys of its window in order of time, the newest last."""
    return _rotate(state, state.seen)


def as_ring(state: HybridState) -> HybridState:
    """Return the ring buffer of a state whose keys are in order of time."""
    return _rotate(state, -state.seen)


def _rotate(state: HybridState, steps: Tensor) -> HybridState:
    """Return the state with row i of its window from row i + ``steps``, ``[B]``."""
    window = state.features.shape[2]
    place = torch.arange(window, device=steps.device)
    index = (place + steps[:, None]) % window
    rows = state.k.shape[2] - window + index
    first = torch.arange(state.k.shape[2] - window, device=steps.device).expand(len(steps), -1)
    rows = torch.cat([first, rows], 1)
    k, v = gather_tokens(state.k, rows), gather_tokens(state.v, rows)
    return state._replace(k=k, v=v, features=gather_tokens(state.features, index))


class LinearBranch(NamedTuple):
    """The linear attention outside the window: features, and their weight relative to the window.

    ``log_weight`` is f, broadcastable to ``[B, H, T, 1]``. With ``relative``, the log-sum-exp of
    the window is added to it. With ``mean``, the linear sums are divided by the number of keys in
    them. The heads in ``linear_only_heads``, ``[H]`` bool, ignore the window for every query that
    has keys outside it.

    With a ``feature_map`` other than ``"identity"``, q and k are its inputs instead: ``[B, H, T,
    D]``, and the keys of the window. Its options are those of ``linear_attention``.
    """

    q: Tensor  # [B, H, T, F], not negative
    k: Tensor  # [B, Hkv, T, F], not negative
    log_weight: Tensor
    log_decay: Tensor | None = None  # as in linear_attention, but padding does not decay the sums
    relative: bool = True
    mean: bool = False
    linear_only_heads: Tensor | None = None
    feature_map: str = "identity"
    feature_scale: float = 1.0
    map_weights: MapWeights | None = None

    def like_features(self) -> Tensor:
        """Return a tensor with the shape, dtype and device of the features of keys."""
        return like_features(self.k, self.feature_map, self.map_weights)

    def features(self, x: Tensor, *, of_keys: bool) -> Tensor:
        """Return the features of queries or keys."""
        options = (self.feature_map, self.feature_scale, self.map_weights)
        return map_features(x, *options, of_keys=of_keys)

    def mapped(self, padding_mask: Tensor | None) -> LinearBranch:
        """Return the branch with features in place of the inputs of the feature map."""
        if self.feature_map == "identity":
            return self
        q, k = self.features(self.q, of_keys=False), self.features(self.k, of_keys=True)
        k = fill_padding(k, padding_mask)
        return self._replace(q=q, k=k, feature_map="identity", map_weights=None)

    def without_padding(self, padding_mask: Tensor) -> LinearBranch:
        """Return the branch with zeros at padding: tokens that neither count nor decay the sums."""
        log_decay = self.log_decay
        weight = self.log_weight[(None,) * (4 - self.log_weight.dim())]
        if log_decay is not None:
            log_decay = decay_of_real_tokens(log_decay, self.k, padding_mask)
        if weight.shape[2] > 1:
            weight = fill_padding(weight.expand(len(padding_mask), -1, -1, -1), padding_mask)
        q, k = (fill_padding(x, padding_mask) for x in (self.q, self.k))
        return self._replace(q=q, k=k, log_decay=log_decay, log_weight=weight)


class HybridInputs(NamedTuple):
    """Inputs of one call, with padding moved to the end of the rows."""

    q: Tensor
    k: Tensor
    v: Tensor  # [B, Hkv, T, E]
    branch: LinearBranch
    window: int
    scale: float
    causal: bool
    padding_mask: Tensor | None
    segment_ids: Tensor | None
    state: HybridState | None  # in order of time
    return_state: bool
    chunk_size: int | None
    shard: SequenceShard | None
    num_sinks: int = 0  # G, first tokens of each row in the window of every query


class StepInputs(NamedTuple):
    """Inputs of one token after a state; the branch has features."""

    q: Tensor
    k: Tensor
    v: Tensor
    branch: LinearBranch
    mask: AttentionMask
    state: HybridState  # a ring buffer
    scale: float
    in_place: bool  # whether the next state overwrites the tensors of the given one


StepResult = tuple[Tensor, HybridState]  # [B, H, 1, E], zeros at padding, and the next state


def next_state(
    x: HybridInputs, before: WindowState | None, options: Window, sums: LinearState | None
) -> HybridState:
    """Return the state after the last real token, in order of time; does not modify the given."""
    assert sums is not None
    branch = x.branch
    values = x.v.to(torch.promote_types(x.v.dtype, torch.float32))
    if branch.feature_map == "identity":
        old = () if x.state is None else (x.state.features,)
        k, v, features, seen = next_window((x.k, values, branch.k), before, options, old)
    else:
        k, v, seen = next_window((x.k, values), before, options)
        features = branch.features(k, of_keys=True)
    after = HybridState(k, v, features, sums.kv, sums.k, seen)
    if x.segment_ids is None and branch.feature_map == "identity":
        return after
    return after._replace(features=features * _filled_places(after))


def state_before_shard(
    k: Tensor, v: Tensor, features: Tensor, window: int, shard: SequenceShard
) -> HybridState:
    """Return the window before a rank's tokens; the op computes the linear sums itself."""
    seen = shard.tokens_before(k.shape[0], k.device)
    k, v, features = latest_before((k, v, features), shard, window)
    empty = features.new_zeros(0)
    state = HybridState(k, v, features, empty, empty, seen)
    return state._replace(features=features * _filled_places(state))


def _filled_places(state: HybridState) -> Tensor:
    return is_filled(state.seen, state.features.shape[2])[:, None, :, None]


def reorder(branch: LinearBranch, order: Tensor) -> LinearBranch:
    """Return the branch with its tokens in another order."""
    log_decay, weight = branch.log_decay, branch.log_weight
    if log_decay is not None and log_decay.dim() == 3:
        log_decay = torch.take_along_dim(log_decay, order[:, None], 2)
    elif log_decay is not None and log_decay.dim() == 4:
        log_decay = gather_tokens(log_decay, order)
    if weight.dim() == 4 and weight.shape[2] > 1:
        weight = gather_tokens(weight, order)
    q, k = gather_tokens(branch.q, order), gather_tokens(branch.k, order)
    return branch._replace(q=q, k=k, log_decay=log_decay, log_weight=weight)
