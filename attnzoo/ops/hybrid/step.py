"""One token of the window hybrid in torch, without gradients: decoding.

A few operations of fixed shapes, which a CUDA graph can capture. The state is read once; the new
key overwrites the oldest of the window, which enters the linear sums.

Letters: B batch, H query heads, Hkv key heads, D key size, E value size, F features of a key,
W window, G first tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.ops.hybrid.merge import combine
from attnzoo.ops.hybrid.state import HybridState, LinearBranch, StepInputs, StepResult
from attnzoo.ops.linear.common import log_decay_per_token
from attnzoo.ops.window.causal_window import dense_softmax
from attnzoo.runtime.derivatives import is_plain_call


def step_reasons(x: StepInputs) -> list[str]:
    """Return why a step that updates a state in place or copies it does not compute a call."""
    branch, state = x.branch, x.state
    if x.mask.segment_ids is not None:
        return ["rows are packed"]
    tensors = (x.q, x.k, x.v, branch.q, branch.k, branch.log_weight, *state[:5])
    if not (x.in_place or is_plain_call(*tensors)):
        return ["the step of one token has no derivative"]
    wide = torch.promote_types(x.v.dtype, torch.float32)
    kept = state.k.dtype, state.v.dtype, state.features.dtype
    if kept != (x.k.dtype, wide, branch.k.dtype):
        return [f"the state has keys, values and features of other types: {kept}"]
    return []


def hybrid_step(x: StepInputs) -> StepResult:
    """Compute one token; the next state overwrites the given one, or a copy."""
    q, k, v, branch, mask, state, scale, in_place = x
    if not in_place:
        state = HybridState._make([x.clone() for x in state])
    real = None if mask.padding is None else mask.padding[:, 0]
    sums = _update_sums(branch, state, real)
    _update_window((k, v.to(state.v.dtype), branch.k), state, real)
    state.seen.add_(1 if real is None else real)
    stored, window = state.k.shape[2], state.features.shape[2]
    outside = state.seen[:, None] - window  # tokens before the window, at most 0 if there are none
    place = torch.arange(stored, device=q.device)
    num_sinks = stored - window
    seen = torch.where(place < num_sinks, place < outside, place - num_sinks < state.seen[:, None])
    near, lse = dense_softmax(q, state.k, state.v, seen[:, None, None], scale)
    logit = branch.log_weight.to(lse.dtype)
    if branch.mean:
        count = (outside - num_sinks).clamp(min=1).to(lse.dtype)
        logit = logit - count.log()[:, :, None, None]
    out = combine(near, lse, sums[..., :-1], sums[..., -1:], logit, branch).to(v.dtype)
    return out if real is None else out.masked_fill(~real[:, None, None, None], 0), state


def _update_sums(branch: LinearBranch, state: HybridState, real: Tensor | None) -> Tensor:
    """Add the oldest key of the window to the linear sums.

    Returns the sums of values and, in the last column, of weights that the query reads,
    ``[B, H, 1, E + 1]``.
    """
    kv, z = state.kv, state.z
    window = state.features.shape[2]
    num_sinks = state.k.shape[2] - window
    row = (state.seen % window)[:, None, None, None]
    counted = state.seen >= window + num_sinks
    if real is not None:
        counted = counted & real
    features = torch.take_along_dim(state.features, row, 2).to(kv.dtype)
    features = features * counted[:, None, None, None]
    values = torch.take_along_dim(state.v[:, :, num_sinks:], row, 2).to(kv.dtype)
    values = torch.cat([values, values.new_ones(*values.shape[:3], 1)], 3)
    if branch.log_decay is not None:
        decay = log_decay_per_token(branch.log_decay, branch.k).to(kv.dtype).exp()
        kv.mul_(decay.mT), z.mul_(decay.squeeze(2))
    kv.addcmul_(features.mT, values), z.add_(features.squeeze(2))
    batch, heads, _, size = branch.q.shape
    queries = branch.q.to(kv.dtype).reshape(batch, kv.shape[1], -1, size)
    return (queries @ kv).view(batch, heads, 1, kv.shape[3])


def _update_window(
    new: tuple[Tensor, Tensor, Tensor], state: HybridState, real: Tensor | None
) -> None:
    """Overwrite the oldest key, value and features of the window; also write first tokens."""
    window = state.features.shape[2]
    num_sinks = state.k.shape[2] - window
    row = state.seen % window
    for i, (rows, token) in enumerate(zip(state[:3], new, strict=True)):
        of_window = rows if i == 2 else rows[:, :, num_sinks:]
        _overwrite(of_window, row, token, real)
    if num_sinks:
        row, is_first = state.seen.clamp(max=num_sinks - 1), state.seen < num_sinks
        is_first = is_first if real is None else is_first & real
        for rows, token in zip(state[:2], new[:2], strict=True):
            _overwrite(rows, row, token, is_first)


def _overwrite(rows: Tensor, row: Tensor, token: Tensor, where: Tensor | None) -> None:
    """Write a token ``[B, Hkv, 1, X]`` to row ``[B]`` of ``[B, Hkv, R, X]``, where true."""
    index = row[:, None, None, None].expand_as(token)
    if where is not None:
        token = torch.where(where[:, None, None, None], token, rows.gather(2, index))
    rows.scatter_(2, index, token)
