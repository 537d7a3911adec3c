"""The window hybrid in two parts, the window and the linear sums, and the output from both.

A key enters the linear sums when it leaves the window: token t of the linear attention has the
query of token t and the key of token t - W.

Other letters: R queries with such keys, W window, G first tokens (sinks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.padding import values_are_known
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import LinearState
from attnzoo.ops.hybrid.state import HybridInputs, HybridState, LinearBranch
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.cpu.linear import weighted_sums
from attnzoo.ops.linear.triton.run import divide_sums, round_features
from attnzoo.ops.linear.triton.run import linear_sums as triton_sums
from attnzoo.ops.window.causal_window import AttendBand, causal_window, local_softmax
from attnzoo.ops.window.cpu.band import OutsideSums, band_attention_cpp
from attnzoo.runtime.kernel_calls import cat_huge_pages

MIN_WEIGHT = 1e-30  # a smaller sum of linear weights, before scaling, counts as 0

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
    before, after = _tokens_around(x)
    if not x.causal:
        return (before - x.window).clamp(min=0) + (after - x.window).clamp(min=0)
    if x.state is not None:
        before = before + x.state.seen[:, None]
    return before + 1 - x.window - x.num_sinks


def _tokens_around(x: HybridInputs) -> tuple[Tensor, Tensor]:
    """Return the number of tokens of this call before and after each token in its sequence."""
    length, sequences = x.q.shape[2], x.sequences
    if sequences is None:
        position = torch.arange(length, device=x.q.device)[None]
        return position, length - 1 - position
    position = sequences.positions(length)
    lengths = sequences.lengths[sequences.index(length).clamp(max=sequences.count - 1)]
    return position[None], (lengths - 1 - position)[None]


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


def sums_triton(
    x: HybridInputs,
    qkv: tuple[Tensor, Tensor, Tensor],
    sequences: Sequences | None,
    log_decay: Tensor | None,
    state: LinearState | None,
) -> tuple[Tensor, Tensor, LinearState | None]:
    """Compute :data:`CausalSums` in Triton, without a state; features are given."""
    assert state is None
    q, k, v = qkv
    q, k = round_features(q, v), round_features(k, v)
    out, totals, _ = triton_sums(q, k, v, log_decay, None, sequences, return_state=False)
    return out, totals, None


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
) -> tuple[Tensor, Tensor, LinearState | None]:
    """Compute :data:`CausalSums` in torch; features are given."""
    q, k, v = qkv
    wide = torch.promote_types(v.dtype, torch.float32)
    ones = v.new_ones(*v.shape[:3], 1, dtype=wide)
    found = linear_attention(
        *(q, k, cat_huge_pages([v.to(wide), ones], 3)),
        sequences=sequences,
        log_decay=log_decay,
        impl="torch",
        state=state,
        return_state=x.return_state,
        chunk_size=x.chunk_size,
    )
    return found.out[..., :-1], found.out[..., -1], found.state


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


def combine_kernels(
    near: Tensor,
    lse: Tensor,
    values: Tensor,
    total: Tensor,
    logit: Tensor,
    branch: LinearBranch,
    dtype: torch.dtype,
) -> Tensor:
    """Return :func:`combine` of linear sums whose gradients Triton kernels round to ``dtype``.

    It is a mean of the outputs of both branches, so that :func:`divide_sums` makes the gradients of
    the linear sums of values and of weights consistent.
    """
    has_linear = total > MIN_WEIGHT
    far = divide_sums(values, total.clamp(min=MIN_WEIGHT), dtype)
    window_weight, linear_weight = _weights(lse, total, has_linear, logit, branch)
    linear_weight = linear_weight * total.clamp(min=MIN_WEIGHT)
    share = linear_weight / (window_weight + linear_weight)
    return near + share * (far - near)


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
