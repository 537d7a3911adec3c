"""One token of the window hybrid in torch, without gradients: decoding.

A few operations of fixed shapes, which a CUDA graph can capture. The state is read once; the new
key overwrites the oldest of the window, which enters the linear sums.

Other letters: W window, G first tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.contract.states import run_at_slots
from attnzoo.ops.hybrid.parts import HybridState, LinearBranch, StepInputs, StepResult, combine
from attnzoo.ops.linear.common import log_decay_per_token
from attnzoo.ops.window.band import dense_softmax
from attnzoo.runtime.kernel_calls import is_plain_call


def step_reasons(x: StepInputs) -> list[str]:
    """Return why a step that updates a state in place or copies it does not compute a call."""
    branch, state = x.branch, x.state
    tensors = [x.q, x.k, x.v, branch.q, branch.k, branch.log_weight, *state[:5]]
    tensors += [weight for weight in branch.map_weights or () if weight is not None]
    if not (x.in_place or is_plain_call(*tensors)):
        return ["the step of one token has no derivative"]
    wide = torch.promote_types(x.v.dtype, torch.float32)
    kept = state.k.dtype, state.v.dtype, state.features.dtype
    mapped = branch.k.dtype if branch.feature_map == "identity" else wide
    if kept != (x.k.dtype, wide, mapped):
        return [f"the state has keys, values and features of other types: {kept}"]
    return []


def hybrid_step(x: StepInputs) -> StepResult:
    """Compute one token; the next state overwrites the given one, or a copy."""
    x = x.with_features()
    if x.slots is None:
        return _step(x, x.state if x.in_place else HybridState._make([y.clone() for y in x.state]))
    return at_slots(x, lambda rows: _step(rows, rows.state))


def at_slots(x: StepInputs, step: Callable[[StepInputs], StepResult]) -> StepResult:
    """Run a step of rows, whose states it may overwrite, from the states at ``x.slots``."""
    assert x.slots is not None
    out, pool = run_at_slots(
        lambda rows: step(x._replace(state=HybridState._make(rows), slots=None, in_place=True)),
        *(x.state, x.slots),
        in_place=x.in_place,
    )
    return out, HybridState._make(pool)


def _step(x: StepInputs, state: HybridState) -> StepResult:
    """Compute one token; the next state overwrites the given one."""
    branch, v = x.branch, x.v
    sums = _update_sums(branch, state)
    _update_window((x.k, v.to(state.v.dtype), branch.k), state)
    state.seen.add_(1)
    stored, window = state.k.shape[2], state.features.shape[2]
    outside = state.seen[:, None] - window  # tokens before the window, at most 0 if there are none
    place = torch.arange(stored, device=v.device)
    num_sinks = stored - window
    seen = torch.where(place < num_sinks, place < outside, place - num_sinks < state.seen[:, None])
    near, lse = dense_softmax(x.q, state.k, state.v, seen[:, None, None], x.scale)
    logit = branch.log_weight.to(lse.dtype)
    if branch.mean:
        count = (outside - num_sinks).clamp(min=1).to(lse.dtype)
        logit = logit - count.log()[:, :, None, None]
    out = combine(near, lse, sums[..., :-1], sums[..., -1:], logit, branch)
    return out.to(v.dtype), state


def _update_sums(branch: LinearBranch, state: HybridState) -> Tensor:
    """Add the oldest key of the window to the linear sums.

    Returns the sums of values and, in the last column, of weights that the query reads,
    ``[B, H, 1, E + 1]``.
    """
    kv, z = state.kv, state.z
    window = state.features.shape[2]
    num_sinks = state.k.shape[2] - window
    row = (state.seen % window)[:, None, None, None]
    counted = state.seen >= window + num_sinks
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


def _update_window(new: tuple[Tensor, Tensor, Tensor], state: HybridState) -> None:
    """Overwrite the oldest key, value and features of the window; also write first tokens."""
    window = state.features.shape[2]
    num_sinks = state.k.shape[2] - window
    row = state.seen % window
    for i, (rows, token) in enumerate(zip(state[:3], new, strict=True)):
        of_window = rows if i == 2 else rows[:, :, num_sinks:]
        of_window.scatter_(2, row[:, None, None, None].expand_as(token), token)
    if num_sinks:
        row = state.seen.clamp(max=num_sinks - 1)[:, None, None, None]
        is_first = (state.seen < num_sinks)[:, None, None, None]
        for rows, token in zip(state[:2], new[:2], strict=True):
            index = row.expand_as(token)
            rows.scatter_(2, index, torch.where(is_first, token, rows.gather(2, index)))
