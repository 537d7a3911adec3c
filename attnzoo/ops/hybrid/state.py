"""The inputs of the window hybrid, and the state that it keeps between calls.

Other letters: W window, G first tokens of a sequence, R rows or sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard, latest_before
from attnzoo.contract.padding import fill_padding
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import LinearState
from attnzoo.ops.features.functional import MapWeights, map_features
from attnzoo.ops.linear.common import like_features
from attnzoo.ops.linear.context_parallel import state_from_earlier_ranks
from attnzoo.ops.window.causal_window import (
    WindowInputs,
    WindowState,
    grow_window,
    is_filled,
    latest_tokens,
    next_window,
)


class HybridState(NamedTuple):
    """The first keys, those of the window and the sums over all others; of a fixed size.

    The window is a ring buffer: token number n of a sequence is in row n mod W, and the next token
    overwrites the oldest one.
    """

    k: Tensor  # [B, Hkv, G + W, D]: first keys, then the latest; zeros if there are fewer
    v: Tensor  # [B, Hkv, G + W, E]
    features: Tensor  # [B, Hkv, W, F]: the features of the latest keys
    kv: Tensor  # [B, Hkv, F, E + 1]: the decayed sum of k v^T and, in the last column, of k
    z: Tensor  # [B, Hkv, F]: the decayed sum of k
    seen: Tensor  # [B], int64: number of tokens so far


def oldest_first(state: HybridState) -> HybridState:
    """Return the state with the keys of its window in order of time, the newest last."""
    return _rotate(state, state.seen)


def with_window(state: HybridState, window: int) -> HybridState:
    """Return a state whose window has more rows than all its tokens fill."""
    held = state.features.shape[2]
    if held == window:
        return state
    in_order, num_sinks = oldest_first(state), state.k.shape[2] - held
    k, v = (grow_window(x, window, num_sinks) for x in (in_order.k, in_order.v))
    features = grow_window(in_order.features, window, 0)
    return _rotate(in_order._replace(k=k, v=v, features=features), -state.seen)  # a ring buffer


def _rotate(state: HybridState, steps: Tensor) -> HybridState:
    """Return the state with row i of its window from row i + ``steps``, ``[B]``."""
    window = state.features.shape[2]
    place = torch.arange(window, device=steps.device)
    index = (place + steps[:, None]) % window
    rows = state.k.shape[2] - window + index
    first = torch.arange(state.k.shape[2] - window, device=steps.device).expand(steps.shape[0], -1)
    rows = torch.cat([first, rows], 1)
    moved = []
    for x, places in ((state.k, rows), (state.v, rows), (state.features, index)):
        # take_along_dim fixes the lengths that an exported program accepts
        places = places[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])
        moved.append(x.gather(2, places))
    return state._replace(k=moved[0], v=moved[1], features=moved[2])


class LinearBranch(NamedTuple):
    """The linear attention outside the window: features, and their weight relative to the window.

    ``log_weight`` is f, broadcastable to ``[B, H, T, 1]``. With ``relative``, the log-sum-exp of
    the window is added to it. With ``mean``, the linear sums are divided by the number of keys in
    them.

    With a ``feature_map`` other than ``"identity"``, q and k are its inputs instead: ``[B, H, T,
    D]``, and the keys of the window. Its options are those of ``linear_attention``.
    """

    q: Tensor  # [B, H, T, F], not negative
    k: Tensor  # [B, Hkv, T, F], not negative
    log_weight: Tensor
    log_decay: Tensor | None = None  # as in linear_attention
    relative: bool = True
    mean: bool = False
    feature_map: str = "identity"
    feature_scale: float = 1.0
    map_weights: MapWeights | None = None

    def like_features(self) -> Tensor:
        """Return a tensor with the shape, dtype and device of the features of keys."""
        return like_features(self.k, self.feature_map, self.map_weights)

    def mapped(self) -> LinearBranch:
        """Return the branch with features in place of the inputs of the feature map."""
        if self.feature_map == "identity":
            return self
        options = (self.feature_map, self.feature_scale, self.map_weights)
        q = map_features(self.q, *options, of_keys=False)
        k = map_features(self.k, *options, of_keys=True)
        return self._replace(q=q, k=k, feature_map="identity", map_weights=None)


class HybridInputs(NamedTuple):
    """Inputs of one call."""

    q: Tensor
    k: Tensor
    v: Tensor  # [B, Hkv, T, E]
    branch: LinearBranch
    window: int
    scale: float
    causal: bool
    sequences: Sequences | None  # of one row, without a state and first tokens
    lengths: Tensor | None  # of rows, [B]: later tokens are padding, zeros; None: rows are full
    state: HybridState | None  # in order of time
    return_state: bool
    chunk_size: int | None
    num_sinks: int = 0  # G, first tokens of each sequence in the window of every query

    def without_gaps(self) -> HybridInputs:
        """Return the inputs with zeros at tokens that belong to no sequence."""
        inside = None if self.sequences is None else self.sequences.inside(self.q.shape[2])
        if inside is None:
            return self
        inside = inside[None]
        branch, weight = self.branch, self.branch.log_weight
        if weight.dim() > 1 and weight.shape[-2] > 1:
            weight = fill_padding(weight[(None,) * (4 - weight.dim())], inside)
        q, k, v, far_q, far_k = (
            fill_padding(x, inside) for x in (self.q, self.k, self.v, branch.q, branch.k)
        )
        branch = branch._replace(q=far_q, k=far_k, log_weight=weight)
        return self._replace(q=q, k=k, v=v, branch=branch)

    def with_features(self) -> HybridInputs:
        """Return the inputs with the feature map applied."""
        if self.branch.feature_map == "identity":
            return self
        x = self.without_gaps()  # the gradient of a map of NaN is NaN
        return x._replace(branch=x.branch.mapped())

    def in_rows(self) -> HybridInputs:
        """Return the inputs with one row a sequence, and features."""
        x, sequences = self.with_features(), self.sequences
        if sequences is None:
            return x
        branch, decay, weight = x.branch, x.branch.log_decay, x.branch.log_weight
        if decay is not None:  # padding does not decay the sums
            if decay.dim() == 1:
                decay = decay[None, :, None].expand(x.k.shape[:3])
            decay = sequences.to_rows(decay)
        if weight.dim() > 1 and weight.shape[-2] > 1:
            weight = sequences.to_rows(weight[(None,) * (4 - weight.dim())])
        q, k, v, far_q, far_k = map(sequences.to_rows, (x.q, x.k, x.v, branch.q, branch.k))
        return x._replace(
            q=q,
            k=k,
            v=v,
            branch=branch._replace(q=far_q, k=far_k, log_decay=decay, log_weight=weight),
            sequences=None,
            lengths=sequences.lengths if sequences.rows is None else None,
        )

    def window_inputs(self) -> WindowInputs:
        """Return the inputs of the window."""
        state, ids = self.state, None
        before = None if state is None else WindowState(state.k, state.v, state.seen)
        if self.sequences is not None:
            ids = self.sequences.index(self.q.shape[2])[None]
        return WindowInputs(
            *(self.q, self.k, self.v, self.window, self.scale, ids, before, self.num_sinks)
        )


class StepInputs(NamedTuple):
    """Inputs of one token after a state."""

    q: Tensor
    k: Tensor
    v: Tensor
    branch: LinearBranch
    state: HybridState  # a ring buffer; with slots, a pool of states
    scale: float
    in_place: bool  # whether the next state overwrites the tensors of the given one
    slots: Tensor | None  # [B], the row of each token in the pool; -1: no token

    def with_features(self) -> StepInputs:
        """Return the inputs with the feature map applied."""
        return self._replace(branch=self.branch.mapped())


StepResult = tuple[Tensor, HybridState]  # [B, H, 1, E], zeros for no token, and the next state


def next_state(
    x: HybridInputs, sequences: Sequences | None, sums: LinearState | None
) -> HybridState:
    """Return the state after the last tokens, a ring buffer; does not modify the given one.

    Args:
        x: The inputs of the call before they are brought to rows.
        sequences: The sequences of the one row, if it is one.
        sums: The linear sums after the call.
    """
    assert sums is not None
    branch, state = x.branch, x.state
    k, v, seen = next_window(x._replace(sequences=None).window_inputs(), sequences)
    v = v.to(torch.promote_types(v.dtype, torch.float32))
    if branch.feature_map == "identity":
        old = None if state is None else state.features
        features = latest_tokens(branch.k, x.window, old, sequences)
    else:
        options = (branch.feature_map, branch.feature_scale, branch.map_weights)
        features = map_features(k[:, :, x.num_sinks :], *options, of_keys=True)
        features = features * is_filled(seen, x.window)[:, None, :, None]
    return _rotate(HybridState(k, v, features, sums.kv, sums.k, seen), -seen)  # a ring buffer


def empty_state(x: HybridInputs) -> HybridState:
    """Return the state before the first token."""
    states = x.k.shape[0] if x.sequences is None else x.sequences.count
    heads, features = (states, x.k.shape[1]), x.branch.like_features()
    wide = torch.promote_types(x.v.dtype, torch.float32)
    sums = torch.zeros(*heads, features.shape[3], x.v.shape[3] + 1, dtype=wide, device=x.v.device)
    rows = x.num_sinks + x.window
    return HybridState(
        x.k.new_zeros(*heads, rows, x.k.shape[3]),
        sums.new_zeros(*heads, rows, x.v.shape[3]),
        features.new_zeros(*heads, x.window, features.shape[3]),
        sums,
        sums.new_zeros(*heads, features.shape[3]),
        sums.new_zeros(states, dtype=torch.int64),
    )


def state_before_shard(
    k: Tensor,
    v: Tensor,
    branch: LinearBranch,
    window: int,
    shard: SequenceShard,
    sequences: Sequences | None,
) -> HybridState:
    """Return the state before a rank's tokens, in order of time; the branch has features."""
    rows = [shard.rows(x) for x in (k, v, branch.k)]
    seen = shard.tokens_before(rows[0].shape[0], k.device)
    first_k, first_v, features = latest_before(rows, shard, window)
    features = features * is_filled(seen, window)[:, None, :, None]
    empty = features.new_zeros(seen.shape[0], 0)
    state = HybridState(first_k, first_v, features, empty, empty, seen)
    state = shard.states(state, sequences)
    # the key that leaves the window at each of this rank's tokens, and its value
    leaving_k = _lagging(state.features, branch.k, sequences)
    leaving_v = _lagging(state.v, v, sequences)
    sums = state_from_earlier_ranks(leaving_k, leaving_v, branch.log_decay, shard, sequences)
    return state._replace(kv=torch.cat([sums.kv, sums.k.unsqueeze(3)], 3), z=sums.k)


def _lagging(old: Tensor, new: Tensor, sequences: Sequences | None) -> Tensor:
    """Return the token before each token by as many as ``old`` has, which precede ``new``."""
    tokens = new.shape[2]
    new = new if sequences is None else sequences.to_rows(new)
    rows = torch.cat([old.to(new.dtype), new], 2)[:, :, : new.shape[2]]
    return rows if sequences is None else sequences.to_row(rows, tokens)
