"""The window hybrid on the Triton kernels: which calls they support, and the call itself.

Other letters: W window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.states import LinearState, check_slots
from attnzoo.ops.hybrid.parts import (
    MIN_WEIGHT,
    HybridInputs,
    HybridState,
    PartsResult,
    StepInputs,
    StepResult,
    combine_kernels,
    entering_keys,
    lagged,
    linear_counts,
    linear_logit,
    linear_sums,
    sums_triton,
)
from attnzoo.ops.hybrid.step import at_slots, step_reasons
from attnzoo.ops.linear.triton.run import round_features, triton_reasons
from attnzoo.ops.linear.triton.verdicts import kernel_verdict
from attnzoo.ops.window.causal_window import first_tokens, is_filled
from attnzoo.runtime.kernel_calls import check_reverse_mode

LARGEST = 256  # key and value size of the window


def hybrid_triton_reasons(x: HybridInputs) -> list[str]:
    """Return every reason why the kernels do not support a call."""
    reasons = triton_reasons(x.branch.q, x.branch.like_features(), x.v)
    return _size_reasons(x.q, reasons)


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


def run_triton(x: HybridInputs) -> PartsResult:
    """Run the kernels; they count the keys themselves if each row is one sequence from its start.

    With a state, the tokens of its window stand before those of the call, as queries without
    results.
    """
    from attnzoo.ops.hybrid.triton.custom_op import hybrid_triton

    x = x.with_features()
    if not x.causal:
        return _run_bidirectional(x), None
    branch, size, state, sequences = x.branch, x.window, x.state, x.sequences
    q, k, v, log_decay = x.q, x.k, x.v, branch.log_decay
    counts, before = None, (None, None)
    if branch.mean and not (state is None and sequences is None and x.num_sinks == 0):
        counts = linear_counts(x).expand(q.shape[0], -1)
    first = _first_tokens(x) if x.num_sinks else (None, None, None)
    q_features, k_features = (round_features(y, v) for y in (branch.q, branch.k))
    check_reverse_mode("hybrid_attention", q, k, v, q_features, k_features, instead="impl='torch'")
    logit = branch.log_weight.float().squeeze(-1).expand(q.shape[:3])
    ids, places = _ids(x), (None, None)
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
        if x.num_sinks:
            first = *first[:2], F.pad(first[2], (0, 0, size, 0))
        counts = None if counts is None else F.pad(counts, (size, 0))
        before = state.kv[..., :-1].contiguous(), state.z
    elif log_decay is not None and log_decay.dim() > 1:
        log_decay = log_decay[:, :, size:]
    if sequences is not None:
        of_sums = lagged(sequences, size, x.q.shape[2])
        places = of_sums.starts, of_sums.lengths
    out, kv, z, *_ = hybrid_triton(
        *(q, k, v, q_features, _zero_outside_sums(x, k_features), logit, log_decay, *before),
        *(ids, *places, counts, *first, size, x.scale),
        *(branch.relative, branch.mean, MIN_WEIGHT, x.return_state),
    )
    out = out if state is None else out[:, :, size:]
    return out, LinearState(torch.cat([kv, z.unsqueeze(-1)], -1), z) if x.return_state else None


def _run_bidirectional(x: HybridInputs) -> Tensor:
    """Run the kernels of the window and of linear sums in both directions, and merge in torch."""
    from attnzoo.ops.window.triton.window import window_triton

    check_reverse_mode("hybrid_attention", x.q, x.k, x.v, instead="impl='torch'")
    near, lse = window_triton(x.q, x.k, x.v, _ids(x), x.window, x.window, x.scale, True)
    far, lse = linear_sums(x, sums_triton), lse.unsqueeze(3)
    logit, totals = linear_logit(x, far.counts, lse.dtype), far.totals.unsqueeze(3)
    return combine_kernels(near, lse, far.sums, totals, logit, x.branch, x.v.dtype)


def step_triton_reasons(x: StepInputs) -> list[str]:
    """Return every reason why :func:`run_step_triton` does not support a call."""
    reasons = triton_reasons(x.branch.q, x.branch.k, x.v)
    return step_reasons(x) + _size_reasons(x.q, reasons)


def run_step_triton(x: StepInputs) -> StepResult:
    """Compute one token."""
    from attnzoo.ops.hybrid.triton.step import hybrid_triton_step_

    x = x.with_features()
    branch, state = x.branch, x.state
    if x.slots is not None:
        check_slots(x.slots, state.kv.shape[0])
    if x.slots is not None and not all(y.is_contiguous() for y in state):
        return at_slots(x, run_step_triton)
    if not (x.in_place and all(y.is_contiguous() for y in state)):
        state = HybridState._make(y.clone(memory_format=torch.contiguous_format) for y in state)
    out = hybrid_triton_step_(
        *(x.q, x.k, x.v, branch.q, branch.k, branch.log_decay),
        branch.log_weight.float().expand(*x.q.shape[:3], 1),
        x.slots,
        *state,
        *(x.scale, branch.relative, branch.mean, MIN_WEIGHT),
    )
    return out, state


def _ids(x: HybridInputs) -> Tensor | None:
    """Return the sequence of each token for the kernels of the window, -1 for tokens of none."""
    if x.sequences is not None:
        index = x.sequences.index(x.q.shape[2])
        return torch.where(index < x.sequences.count, index, -1).int()[None]
    if x.state is None:
        return None
    stored = is_filled(x.state.seen, x.window).int() - 1  # 0 if there is a key
    return F.pad(stored, (0, x.q.shape[2]))


def _first_tokens(x: HybridInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values of the first tokens, and which queries see them outside the window."""
    tokens, state = torch.arange(x.q.shape[2], device=x.q.device), x.state
    seen = tokens.new_zeros(x.q.shape[0]) if state is None else state.seen
    k = first_tokens(x.k, x.num_sinks, None if state is None else (state.k, seen), None)
    v = first_tokens(x.v, x.num_sinks, None if state is None else (state.v, seen), None)
    rank = seen[:, None, None] + tokens[:, None]
    return k, v, rank - torch.arange(x.num_sinks, device=rank.device) >= x.window


def _zero_outside_sums(x: HybridInputs, k_features: Tensor) -> Tensor:
    """Return the features of keys, zero where they do not enter the linear sums.

    Features of the tokens of a state's window stand before those of the call.
    """
    if x.num_sinks and x.state is None:
        k_features = F.pad(k_features[:, :, x.num_sinks :], (0, 0, x.num_sinks, 0))
    entering = entering_keys(x, 0 if x.state is not None else x.window)
    if entering is None:
        return k_features
    hidden = F.pad(~entering, (0, k_features.shape[2] - entering.shape[1]))
    return k_features.masked_fill(hidden[:, None, :, None], 0)
