"""The window hybrid: its inputs, its state, and the two parts of a prompt, combined.

A key enters the linear sums when it leaves the window: token t of the linear attention has the
query of token t and the key of token t - W.

Other letters: R queries with such keys, rows or sequences, W window, G first tokens (sinks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard, latest_before
from attnzoo.contract.padding import fill_padding, values_are_known
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import LinearState
from attnzoo.ops.features.functional import MapWeights, map_features
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.common import like_features
from attnzoo.ops.linear.context_parallel import state_from_earlier_ranks
from attnzoo.ops.linear.cpu.linear import weighted_sums
from attnzoo.ops.window.causal_window import (
    AttendBand,
    WindowInputs,
    WindowState,
    causal_window,
    grow_window,
    is_filled,
    latest_tokens,
    local_softmax,
    next_window,
)
from attnzoo.ops.window.cpu.band import OutsideSums, band_attention_cpp
from attnzoo.runtime.kernel_calls import cat_huge_pages

MIN_WEIGHT = 1e-30  # a smaller sum of linear weights, before scaling, counts as 0


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


# -- the parts -------------------------------------------------------------------------------------


# The output, float32 or wider, and the linear sums after the last tokens if they are requested,
# whose values end in ones
PartsResult = tuple[Tensor, LinearState | None]


class LinearSums(NamedTuple):
    """Sums over the keys outside the windows of the last R queries; the others have no such keys.

    ``counts`` is the number of these keys, ``[B, T]``, at most 0 if there are none; ``None`` if the
    branch does not use it. ``state`` is that of causal calls; its last column sums ones.
    """

    sums: Tensor  # of values, [B, H, R, E]
    totals: Tensor  # of weights, [B, H, R]
    counts: Tensor | None
    state: LinearState | None


# Causal sums of queries, keys and values of sequences, with a log decay and a state: of values and
# of weights, float32 or wider, and the last state. Values of states end in ones, so the last column
# of their sums is that of keys.
CausalSums = Callable[
    [
        HybridInputs,
        tuple[Tensor, Tensor, Tensor],
        Sequences | None,
        Tensor | None,
        LinearState | None,
    ],
    tuple[Tensor, Tensor, LinearState | None],
]


def run_parts(x: HybridInputs, attend: AttendBand, sums: CausalSums) -> PartsResult:
    """Compute the window and the linear sums, then the output, in torch."""
    x = x.without_gaps().with_features()
    window = x.window_inputs()
    window = window._replace(v=x.v.to(torch.promote_types(x.v.dtype, torch.float32)))
    if x.causal:
        near, lse = causal_window(window, attend)
    else:
        near, lse = local_softmax(window, (x.window, x.window), attend)
    far = linear_sums(x, sums)
    missing = x.q.shape[2] - far.sums.shape[2]
    totals = F.pad(far.totals, (missing, 0)).unsqueeze(3)
    logit = linear_logit(x, far.counts, lse.dtype)
    out = combine(near, lse, F.pad(far.sums, (0, 0, missing, 0)), totals, logit, x.branch)
    return out, far.state


def run_torch(x: HybridInputs, attend: AttendBand, sums: CausalSums) -> PartsResult:
    """Run :func:`run_parts`, on rows if the number of sequences is unknown."""
    if x.sequences is None or x.sequences.rows is None:
        return run_parts(x, attend, sums)
    out, state = run_parts(x.in_rows(), attend, sums)
    return x.sequences.to_row(out, x.q.shape[2]), state


def run_cpp(x: HybridInputs) -> PartsResult:
    """Compute the linear sums in C++, then the window and the output in one pass."""
    if x.q.shape[2] == 1:
        return run_parts(x, band_attention_cpp, sums_cpp)
    if x.sequences is not None:
        x = x.without_gaps()
    if x.num_sinks or not x.causal or (x.state is not None and not _is_full(x.state, x.window)):
        x = x.with_features()
    far = linear_sums(x, sums_cpp)
    logit = linear_logit(x, far.counts, far.sums.dtype).expand(*x.q.shape[:3], 1).squeeze(3)
    branch, window = x.branch, x.window_inputs()
    outside = OutsideSums(far.sums, far.totals, logit, branch.relative)
    if x.causal:
        out, _ = causal_window(window, band_attention_cpp, outside)
    else:
        out, _ = local_softmax(window, (x.window, x.window), band_attention_cpp, outside)
    return out, far.state


def _is_full(state: HybridState, window: int) -> bool:
    """Return whether every place of a state's window is known to have a key.

    The features of a place without a key are zeros; those of a key of zeros are not.
    """
    return values_are_known(state.seen) and bool((state.seen >= window).all())


# -- the linear sums -------------------------------------------------------------------------------


def linear_sums(x: HybridInputs, compute: CausalSums) -> LinearSums:
    """Return the linear sums of a call.

    Where no query has a key outside its window, the branch has gradients of zeros, and not none:
    DistributedDataParallel waits for each.
    """
    if x.causal:
        found, lag = _causal_sums(x, compute), x.window + x.num_sinks
        is_empty = x.state is None and x.q.shape[2] <= lag
    else:
        found, is_empty = _bidirectional_sums(x, compute), x.q.shape[2] <= x.window + 1
    return found._replace(sums=_with_zero_gradients(found.sums, x.branch)) if is_empty else found


def _with_zero_gradients(sums: Tensor, branch: LinearBranch) -> Tensor:
    """Return sums that have gradients of zeros for the inputs of a branch."""
    inputs = [branch.q, branch.k, branch.log_decay, *(branch.map_weights or ())]
    for x in inputs:
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            sums = sums + x[:0].sum().to(sums.dtype)
    return sums


def _causal_sums(x: HybridInputs, compute: CausalSums) -> LinearSums:
    """Return the linear sums over keys before the window, without the first G keys."""
    branch, state, length, size = x.branch, x.state, x.q.shape[2], x.window
    log_decay, sequences, sums = branch.log_decay, x.sequences, None
    if state is None:
        first = size + x.num_sinks
        leaving = slice(x.num_sinks, max(length - size, x.num_sinks))
        keys, values = branch.k[:, :, leaving], x.v[:, :, leaving]
        queries = branch.q[:, :, first:]
        if log_decay is not None and log_decay.dim() > 1:
            log_decay = log_decay[:, :, first:]
        sequences = None if sequences is None else lagged(sequences, first, length)
    else:
        old = state.features if branch.feature_map == "identity" else state.k
        keys = torch.cat([old.to(branch.k.dtype), branch.k], 2)[:, :, :length]
        old_values = state.v[:, :, x.num_sinks :]
        values = torch.cat([old_values, x.v.to(old_values.dtype)], 2)[:, :, :length]
        queries, first, sums = branch.q, 0, LinearState(state.kv, state.z)
    is_partial = x.lengths is not None or (state is not None and x.num_sinks)
    if is_partial and (entering := entering_keys(x, first)) is not None:
        keys = keys.masked_fill(~entering[:, None, :, None], 0)
    out, totals, last = compute(x, (queries, keys, values), sequences, log_decay, sums)
    return LinearSums(out, totals, linear_counts(x) if branch.mean else None, last)


def lagged(sequences: Sequences, lag: int, tokens: int) -> Sequences:
    """Return the sequences of a row of N tokens without its first, all within the shorter row."""
    found = sequences.without_first(lag)
    return replace(found, starts=found.starts.clamp(max=max(tokens - lag, 0)))


def entering_keys(x: HybridInputs, first: int) -> Tensor | None:
    """Return at which tokens of rows from ``first`` on a key enters the linear sums, ``[B, R]``.

    ``None``: at all of them. At the others, the key is one of the first tokens, or the token is
    padding.
    """
    token, entering = torch.arange(x.q.shape[2], device=x.q.device)[first:], None
    if x.lengths is not None:
        entering = token < x.lengths[:, None]
    if x.state is not None and x.num_sinks:
        is_later = x.state.seen[:, None] + token >= x.window + x.num_sinks
        entering = is_later if entering is None else entering & is_later
    return entering


def linear_counts(x: HybridInputs) -> Tensor:
    """Return the number of keys in each token's linear sums, ``[1 or B, T]``; at most 0 if none."""
    length, sequences = x.q.shape[2], x.sequences
    if sequences is None:
        before = torch.arange(length, device=x.q.device)[None]
        after = length - 1 - before
    else:
        before = sequences.positions(length)[None]
        lengths = sequences.lengths[sequences.index(length).clamp(max=sequences.count - 1)]
        after = lengths - 1 - before
    if not x.causal:
        return (before - x.window).clamp(min=0) + (after - x.window).clamp(min=0)
    if x.state is not None:
        before = before + x.state.seen[:, None]
    return before + 1 - x.window - x.num_sinks


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
    return LinearSums(sums, totals, linear_counts(x) if branch.mean else None, None)


def _directional_sums(
    x: HybridInputs, compute: CausalSums, queries: slice, keys: slice
) -> tuple[Tensor, Tensor]:
    """Return the linear sums of queries paired with the first keys outside their windows."""
    q, k, v = x.branch.q[:, :, queries], x.branch.k[:, :, keys], x.v[:, :, keys]
    sequences = x.sequences
    if sequences is not None:
        sequences = lagged(sequences, x.window + 1, x.q.shape[2])
    if queries.start is not None:
        sums, totals, _ = compute(x, (q, k, v), sequences, None, None)
        return sums, totals
    if sequences is not None:
        starts = (q.shape[2] - sequences.ends).clamp(min=0)
        lengths = sequences.lengths.flip(0)
        sequences = replace(sequences, starts=starts.flip(0), lengths=lengths)
    sums, totals, _ = compute(x, (q.flip(2), k.flip(2), v.flip(2)), sequences, None, None)
    return sums.flip(2), totals.flip(2)


def sums_cpp(
    x: HybridInputs,
    qkv: tuple[Tensor, Tensor, Tensor],
    sequences: Sequences | None,
    log_decay: Tensor | None,
    state: LinearState | None,
) -> tuple[Tensor, Tensor, LinearState | None]:
    """Compute :data:`CausalSums` in C++, which may compute the features too."""
    if state is not None:
        state = LinearState(state.kv[..., :-1], state.k)
    q, k, v = qkv
    out, totals, last = weighted_sums(
        *(q, k, v),
        sequences=sequences,
        log_decay=log_decay,
        state=state,
        chunk_size=x.chunk_size,
        feature_map=x.branch.feature_map,
        feature_scale=x.branch.feature_scale,
        map_weights=x.branch.map_weights,
        return_state=x.return_state,
    )
    if last is None or not x.return_state:
        return out, totals, None
    return out, totals, LinearState(torch.cat([last.kv, last.k.unsqueeze(3)], 3), last.k)


def sums_torch(
    x: HybridInputs,
    qkv: tuple[Tensor, Tensor, Tensor],
    sequences: Sequences | None,
    log_decay: Tensor | None,
    state: LinearState | None,
    impl: str = "torch",
) -> tuple[Tensor, Tensor, LinearState | None]:
    """Compute :data:`CausalSums` in torch, or by another ``impl``; features are given."""
    q, k, v = qkv
    wide = dtype = torch.promote_types(v.dtype, torch.float32)
    inputs = [y for y in (*qkv, log_decay) if y is not None]
    trains = torch.is_grad_enabled() and any(y.requires_grad for y in inputs)
    if impl != "torch" and v.dtype == torch.bfloat16 and not trains:
        dtype = v.dtype  # gradients of the two sums would lose digits, and float16 overflows
    elif impl != "torch":  # kernels take one dtype
        q, k = q.to(wide), k.to(wide)
    ones = v.new_ones(*v.shape[:3], 1, dtype=dtype)
    found = linear_attention(
        *(q, k, cat_huge_pages([v.to(dtype), ones], 3)),
        sequences=sequences,
        log_decay=log_decay,
        impl=impl,
        state=state,
        return_state=x.return_state,
        chunk_size=x.chunk_size,
    )
    out = found.out.to(wide)
    return out[..., :-1], out[..., -1], found.state


# -- the output ------------------------------------------------------------------------------------


def linear_logit(x: HybridInputs, counts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the logit of the linear sums, broadcastable to ``[B, H, T, 1]``."""
    logit = x.branch.log_weight.to(dtype)
    if counts is None:
        return logit
    return logit - counts.clamp(min=1).to(dtype).log()[:, None, :, None]


def combine(
    near: Tensor, lse: Tensor, values: Tensor, total: Tensor, logit: Tensor, branch: LinearBranch
) -> Tensor:
    """Return the window and the linear sums over one denominator.

    Args:
        near: Softmax attention inside the window, ``[B, H, T, E]``.
        lse: Log-sum-exp of its scores, ``[B, H, T, 1]``.
        values: Linear sums of values, ``[B, H, T, E]``.
        total: Linear sums of weights, ``[B, H, T, 1]``.
        logit: Logit of the linear sums, broadcastable to ``[B, H, T, 1]``.
        branch: Options of the linear branch.
    """
    has_linear = total > MIN_WEIGHT
    window_weight, linear_weight = _weights(lse, total, has_linear, logit, branch)
    numerator = window_weight * near + linear_weight * values
    return numerator / (window_weight + linear_weight * total)


def _weights(
    lse: Tensor, total: Tensor, has_linear: Tensor, logit: Tensor, branch: LinearBranch
) -> tuple[Tensor, Tensor]:
    """Return the factors of the window and of the linear sums, the larger of both terms 1."""
    if branch.relative:
        lse = torch.zeros_like(lse)  # the window's sum is a factor of both terms and cancels
    log_total = total.clamp(min=MIN_WEIGHT).log()
    maximum = torch.where(has_linear, torch.maximum(lse, logit + log_total), lse).detach()
    linear_weight = (logit - maximum).masked_fill(~has_linear, -torch.inf).exp()
    return (lse - maximum).exp(), linear_weight


# -- the state after a call ------------------------------------------------------------------------


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
