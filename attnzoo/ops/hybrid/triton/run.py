"""The window hybrid on the Triton kernels: which calls they support, and the call itself.

Letters: B batch, H heads, Hkv key heads, T tokens, E value size, F features, W window.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.states import LinearState
from attnzoo.ops.hybrid.merge import MIN_WEIGHT
from attnzoo.ops.hybrid.state import HybridInputs, HybridState, StepInputs, StepResult
from attnzoo.ops.hybrid.step import step_reasons
from attnzoo.ops.linear.triton.run import round_features, triton_reasons
from attnzoo.ops.linear.triton.verdicts import kernel_verdict
from attnzoo.ops.window.causal_window import WindowState, is_filled, next_sinks
from attnzoo.runtime.derivatives import check_reverse_mode

LARGEST = 256  # key and value size of the window


def hybrid_triton_reasons(x: HybridInputs) -> list[str]:
    """Return every reason why the kernels do not support a call."""
    reasons = triton_reasons(x.branch.q, x.branch.like_features(), x.v)
    reasons = _size_reasons(x.q, reasons)
    if x.shard is not None:
        reasons.append("several ranks hold the sequence (use impl='torch')")
    return reasons


def hybrid_verdict(x: HybridInputs | StepInputs) -> tuple[str, str]:
    """Return ``kernel_verdict`` of the kernels of the window hybrid for a call."""
    return kernel_verdict("hybrid", x.branch.log_decay, x.k, x.v, x.branch.like_features())


def _size_reasons(q: Tensor, reasons: list[str]) -> list[str]:
    """Return the reasons against the features and values, and those against the window's q."""
    if q.dtype == torch.float64 and "float64" not in " ".join(reasons):
        reasons.append("queries are float64 (the kernels support bfloat16, float16 and float32)")
    if q.shape[3] > LARGEST:
        reasons.append(f"queries have size {q.shape[3]} (at most {LARGEST})")
    return reasons


def run_hybrid_triton(x: HybridInputs, counts: Tensor | None) -> tuple[Tensor, LinearState]:
    """Run the kernels, and return the output and the linear state, whose values end in ones.

    With a state, the tokens of its window stand before those of the call, as queries without
    results. ``counts`` is the number of keys in the linear sums, ``[B, T]``; ``None`` if every
    token before the window is one of them.
    """
    from attnzoo.ops.hybrid.triton.custom_op import hybrid_triton

    branch, size, state = x.branch, x.window, x.state
    q, k, v = x.q, x.k, x.v
    first_k, first_v, first_seen = _first_tokens(x) if x.num_sinks else (None, None, None)
    q_features, k_features = (round_features(y, v) for y in (branch.q, branch.k))
    ids, padding_mask, log_decay = x.segment_ids, x.padding_mask, branch.log_decay
    check_reverse_mode("hybrid_attention", q, k, v, q_features, k_features, instead="impl='torch'")
    logit = branch.log_weight.float().squeeze(-1).expand(q.shape[:3])
    if state is not None:
        q, q_features = F.pad(q, (0, 0, size, 0)), F.pad(q_features, (0, 0, size, 0))
        logit = F.pad(logit, (size, 0))
        k, v, k_features = (
            torch.cat([old.to(new.dtype), new], 2)
            for old, new in (
                (state.k[:, :, x.num_sinks :], k),
                (state.v[:, :, x.num_sinks :], v),
                (state.features, k_features),
            )
        )
        first_seen = None if first_seen is None else F.pad(first_seen, (0, 0, size, 0))
        real = padding_mask
        if real is None:
            real = torch.ones(q.shape[0], x.q.shape[2], dtype=torch.bool, device=q.device)
        padding_mask = torch.cat([is_filled(state.seen, size), real], 1)
        ids = None if ids is None else torch.cat([ids[:, :1].expand(-1, size), ids], 1)
        counts = None if counts is None else F.pad(counts, (size, 0))
        kv, z = state.kv[..., :-1].contiguous(), state.z
    else:
        shape = *k_features.shape[:2], k_features.shape[3]  # zeros, in one launch for both
        zeros = v.new_zeros(math.prod(shape) * (v.shape[3] + 1), dtype=torch.float32)
        z, kv = zeros[: math.prod(shape)], zeros[math.prod(shape) :]
        z, kv = z.view(shape), kv.view(*shape, v.shape[3])
    k_features = _zero_outside_sums(x, k_features, padding_mask, ids)
    if log_decay is not None and log_decay.dim() > 1 and state is None:
        log_decay = log_decay[:, :, size:]
    out, kv, z, *_ = hybrid_triton(
        *(q, k, v, q_features, k_features, logit, log_decay, kv, z, padding_mask, ids, counts),
        *(
            branch.linear_only_heads,
            first_k,
            first_v,
            first_seen,
            size,
            x.scale,
            branch.relative,
            branch.mean,
            MIN_WEIGHT,
        ),
    )
    if state is not None:
        out = out[:, :, size:]
    return out, LinearState(torch.cat([kv, z.unsqueeze(-1)], -1), z)


def run_window_triton(x: HybridInputs) -> tuple[Tensor, Tensor]:
    """Return softmax attention to W keys on each side, and its log-sum-exp ``[B, H, T, 1]``."""
    from attnzoo.ops.window.triton.custom_op import window_triton

    check_reverse_mode("hybrid_attention", x.q, x.k, x.v, instead="impl='torch'")
    masks = x.padding_mask, x.segment_ids
    near, lse = window_triton(x.q, x.k, x.v, *masks, x.window, x.window, x.scale, True)
    return near, lse.unsqueeze(3)


def step_triton_reasons(x: StepInputs) -> list[str]:
    """Return every reason why :func:`run_step_triton` does not support a call."""
    reasons = triton_reasons(x.branch.q, x.branch.k, x.v)
    return step_reasons(x) + _size_reasons(x.q, reasons)


def run_step_triton(x: StepInputs) -> StepResult:
    """Compute one token."""
    from attnzoo.ops.hybrid.triton.step import hybrid_triton_step_

    branch, state = x.branch, x.state
    if not (x.in_place and all(y.is_contiguous() for y in state)):
        state = HybridState._make(y.clone(memory_format=torch.contiguous_format) for y in state)
    out = hybrid_triton_step_(
        *(x.q, x.k, x.v, branch.q, branch.k, branch.log_decay),
        branch.log_weight.float().expand(*x.q.shape[:3], 1),
        x.mask.padding,
        branch.linear_only_heads,
        *state,
        *(x.scale, branch.relative, branch.mean, MIN_WEIGHT),
    )
    return out, state


def _first_tokens(x: HybridInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values of the first tokens, and which queries see them outside the window."""
    tokens = torch.arange(x.q.shape[2], device=x.q.device)
    seen = tokens.new_zeros(x.q.shape[0]) if x.state is None else x.state.seen
    count = torch.full_like(seen, len(tokens))
    if x.padding_mask is not None:
        count = x.padding_mask.sum(1)
    before = None if x.state is None else WindowState(x.state.k, x.state.v, seen)
    k, v = next_sinks((x.k, x.v), before, seen, count, x.num_sinks)
    rank = seen[:, None, None] + tokens[:, None]
    return k, v, rank - torch.arange(x.num_sinks, device=rank.device) >= x.window


def _zero_outside_sums(
    x: HybridInputs, k_features: Tensor, padding_mask: Tensor | None, ids: Tensor | None
) -> Tensor:
    """Return the features of keys, zero where they do not enter the linear sums.

    The tokens of a state's window stand before those of the call in all arguments but ``x``.
    """
    size, length = x.window, k_features.shape[2]
    if x.num_sinks:
        before = 0 if x.state is None else x.state.seen[:, None] - size
        place = torch.arange(length, device=k_features.device)[None]
        is_first = before + place < x.num_sinks
        k_features = k_features.masked_fill(is_first[:, None, :, None], 0)
    hidden = None  # keys that the query W tokens later does not see, [B, T]
    if x.padding_mask is not None and length > size:
        assert padding_mask is not None
        hidden = ~padding_mask[:, size:]
    if ids is not None and length > size:
        other = ids[:, size:] != ids[:, :-size]
        hidden = other if hidden is None else hidden | other
    if hidden is None:
        return k_features
    return k_features.masked_fill(F.pad(hidden, (0, size))[:, None, :, None], 0)
