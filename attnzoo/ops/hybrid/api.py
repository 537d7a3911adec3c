r"""The window hybrid: softmax inside a window, linear attention outside, one denominator.

Computes, with N the window of query i (the W latest keys, or W on each side) and F the other keys,

.. math:: o_i = \frac{\sum_{j \in N} e^{s\, q_i k_j} v_j + e^{f_i} \sum_{j \in F} w_{ij} v_j}
                     {\sum_{j \in N} e^{s\, q_i k_j} + e^{f_i} \sum_{j \in F} w_{ij}}, \qquad
          w_{ij} = d_{ij}\, \phi(q_i) \cdot \phi(k_j),

where f is the logit of the linear branch, and :math:`d_{ij}` the product of the decays from the
token after key j leaves the window up to token i. The larger of the two sums' logarithms is
subtracted, so nothing overflows.

Time O(T (W D + C F + F E)), memory O(T D) on a CPU; the state has a fixed size. A key enters the
linear state when it leaves the window, so query t is paired with key t - W, and no key is copied.
In C++ one kernel computes the linear sums, and one the window and the output from both. Source:
Zhang et al., 2024, arXiv:2410.10254 (LoLCATs), where :math:`e^{f_i}` is a factor of the window's
largest term. Other letters: W window.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.implementation import (
    CPP,
    TORCH,
    Implementation,
    register_implementation,
    select,
    select_if_supported,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, run_at_slots
from attnzoo.contract.validation import (
    DTYPES,
    STATE_DTYPES,
    check_broadcastable,
    check_dtype,
    check_log_decay,
    check_qkv,
    check_sequences,
    check_shape,
    check_shard,
    check_size,
    check_state_field,
    empty_output,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import num_features
from attnzoo.ops.hybrid.cpu.hybrid_step import hybrid_step_cpp, step_cpp_reasons
from attnzoo.ops.hybrid.parts import (
    HybridInputs,
    HybridState,
    StepInputs,
    empty_state,
    next_state,
    oldest_first,
    run_cpp,
    run_torch,
    state_before_shard,
    sums_torch,
)
from attnzoo.ops.hybrid.parts import (
    LinearBranch as LinearBranch,
)
from attnzoo.ops.hybrid.reference import run_reference
from attnzoo.ops.hybrid.step import hybrid_step, step_reasons
from attnzoo.ops.linear.common import check_feature_map
from attnzoo.ops.linear.cpu.linear import cpp_reasons
from attnzoo.ops.window import flex
from attnzoo.ops.window.causal_window import attend_torch
from attnzoo.ops.window.cpu.band import band_cpp_reasons


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch: LinearBranch,
    *,
    window: int,
    scale: float,
    causal: bool = True,
    sequences: Sequences | None = None,
    state: HybridState | None = None,
    return_state: bool = False,
    impl: str = "auto",
    chunk_size: int | None = None,
    shard: SequenceShard | None = None,
    num_sinks: int = 0,
    reuse_state: bool = False,
    slots: Tensor | None = None,
) -> AttentionOutput:
    """Compute softmax attention inside a window and linear attention outside.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, T, E]``.
        branch: Features of queries and keys, or the map that computes them; weight and decay.
        window: W, in tokens: the W latest keys, which include the query's own, or W keys on each
            side without a causal mask.
        scale: s, which multiplies query-key products in the window.
        causal: Whether a query sees keys up to its own token only.
        sequences: The sequences of one row, B = 1, which do not see each other; there is a state
            for each. ``None``: each row is a sequence.
        state: The state that an earlier causal call returned.
        return_state: Whether to return the state after the last token.
        impl: ``"flex"`` (CUDA; FlexAttention for the window, and the ``"auto"`` of
            ``linear_attention`` for the sums), ``"cpp"`` (CPUs), ``"torch"``, ``"reference"`` (the
            dense formula, differentiated by autograd), or ``"auto"``, which selects the fastest one
            that supports the call.
        chunk_size: As in :func:`attnzoo.ops.linear.api.linear_attention`.
        shard: This rank's part of sequences that several ranks hold, in place of ``state``; causal.
        num_sinks: G, first tokens of each sequence that belong to the window of every later query,
            and not to the linear branch; causal, without ``shard``.
        reuse_state: Whether one token without gradients may overwrite the tensors of ``state`` with
            the returned state.
        slots: For one token of each of B sequences: the row of each in ``state``, which is a pool
            of states, ``[B]`` integers; -1 for a sequence without a token, whose output is 0. The
            returned state is the pool.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; also ``state`` and ``impl``.

    Raises:
        UnsupportedError: The shapes disagree, or the inputs are not supported together.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 8)
        >>> branch = LinearBranch(q.exp(), k.exp(), log_weight=torch.zeros(()))
        >>> attnzoo.ops.hybrid_attention(q, k, v, branch, window=64, scale=8**-0.5).out.shape
        torch.Size([1, 4, 1000, 8])
    """
    _check_call(causal, state, shard, window, num_sinks, return_state, slots)
    check_qkv(q, k, v)
    check_sequences(sequences, slots, q, k)
    if branch.feature_map != "identity":
        _check_branch(branch, q, k, causal)
    x = HybridInputs(
        *(q, k, v, branch, window, scale, causal, sequences, None),
        *(state, return_state, chunk_size, num_sinks),
    )
    return run_hybrid_attention(x, impl, shard, reuse_state=reuse_state, slots=slots)


def run_hybrid_attention(
    x: HybridInputs,
    impl: str = "auto",
    shard: SequenceShard | None = None,
    *,
    reuse_state: bool = False,
    slots: Tensor | None = None,
) -> AttentionOutput:
    """Compute :func:`hybrid_attention` of tokens that fit each other, as those of a backend do.

    Features, decays and a state are checked here: a map, a gate or an earlier call has made them.

    Args:
        x: Queries, keys, values and options; the state is a ring buffer.
        impl: As in :func:`hybrid_attention`, and so are the others.
        shard: See impl.
        reuse_state: See impl.
        slots: See impl.
    """
    q, k, v, branch, sequences, state = x.q, x.k, x.v, x.branch, x.sequences, x.state
    if sequences is not None:  # the sums take other ones, which lag behind
        sequences.check(k.shape[2])
    if branch.feature_map == "identity" or branch.log_decay is not None:
        _check_branch(branch, q, k, x.causal)
    if state is not None:
        _check_state(x, state, slots)
        if q.shape[0] and q.shape[2] == 1 and sequences is None:
            in_place = reuse_state and x.return_state and not torch.is_grad_enabled()
            step = StepInputs(q, k, v, branch, state, x.scale, in_place, slots)
            if found := select_if_supported("hybrid_step", step, impl):
                out, after = found[0].run(step)
                return AttentionOutput(out, after if x.return_state else None, None, found[1])
            if slots is not None:
                return _at_slots(x, step, impl)
        x = x._replace(state=oldest_first(state))
    if shard is not None:
        x = x.with_features()
        before = state_before_shard(x.k, x.v, x.branch, x.window, shard, sequences)
        x = x._replace(state=before)
    in_rows = sequences is not None and (x.state is not None or x.num_sinks > 0)
    given = x.in_rows() if in_rows else x
    chosen, choice = select("hybrid_attention", given, impl)
    if 0 in k.shape:
        others = branch.q, branch.k, branch.log_weight, branch.log_decay
        out = empty_output(q, k, v, *others, *(branch.map_weights or ()))
        if x.return_state and state is None:
            state = empty_state(x)
        return AttentionOutput(out, state if x.return_state else None, None, choice)
    out, after = chosen.run(given)
    if sequences is not None and in_rows:
        out = sequences.to_row(out, q.shape[2])
    last = next_state(x, sequences, after) if x.return_state else None
    return AttentionOutput(out.to(v.dtype), last, None, choice)


def _at_slots(x: HybridInputs, step: StepInputs, impl: str) -> AttentionOutput:
    """Run one token, as many tokens are run, from the states at ``step.slots``."""
    assert step.slots is not None
    choices = []

    def run(rows: list[Tensor]) -> tuple[Tensor, HybridState]:
        here = x._replace(state=HybridState._make(rows), return_state=True)
        found = run_hybrid_attention(here, impl)
        assert found.state is not None
        choices.append(found.impl)
        return found.out, found.state

    out, pool = run_at_slots(run, step.state, step.slots, in_place=step.in_place)
    state = HybridState._make(pool) if x.return_state else None
    return AttentionOutput(out, state, None, choices[0])


def _check_call(
    causal: bool,
    state: HybridState | None,
    shard: SequenceShard | None,
    window: int,
    num_sinks: int,
    return_state: bool,
    slots: Tensor | None,
) -> None:
    """Raise ``UnsupportedError`` if the options of a window hybrid do not fit each other."""
    check_size("window", window)
    check_size("num_sinks", num_sinks, minimum=0)
    if not causal:
        needs_order = (
            ("state", state is not None),
            ("return_state", return_state),
            ("shard", shard is not None),
            ("num_sinks", num_sinks > 0),
        )
        if given := [name for name, is_given in needs_order if is_given]:
            raise UnsupportedError(
                f"hybrid_attention is given {' and '.join(given)}, which need a causal mask; pass "
                "causal=True, or leave them out."
            )
    if shard is not None and num_sinks:
        raise UnsupportedError(
            "hybrid_attention is given shard together with num_sinks, which is not supported; "
            "leave num_sinks out."
        )
    if slots is not None and state is None:
        raise UnsupportedError(
            "hybrid_attention is given slots, which are rows of state, without state; pass the "
            "pool of states."
        )
    check_shard(shard, state)


def _check_branch(branch: LinearBranch, q: Tensor, k: Tensor, causal: bool) -> None:
    """Raise ``UnsupportedError`` if a linear branch does not fit the window's queries and keys."""
    for name, x, like, letters in (
        ("branch.q", branch.q, q, "B, H, T, F"),
        ("branch.k", branch.k, k, "B, Hkv, T, F"),
    ):
        if x is not like:
            check_shape(name, x, like.shape[:3] + x.shape[-1:], letters, q.device)
    if q.shape[2] != k.shape[2] or branch.q.shape[3] != branch.k.shape[3]:
        raise UnsupportedError(
            "queries and keys must be of the same tokens and have as many features, got "
            f"{q.shape[2]} and {k.shape[2]} tokens, {branch.q.shape[3]} and {branch.k.shape[3]} "
            "features."
        )
    check_feature_map(branch.feature_map, branch.map_weights, branch.q, branch.k)
    if branch.log_decay is not None:
        features = num_features(branch.k, branch.feature_map, branch.map_weights)
        check_log_decay(branch.log_decay, (*k.shape[:3], features), q.device, causal)
    check_dtype("branch.log_weight", branch.log_weight)
    shape = (*q.shape[:3], 1)
    check_broadcastable("branch.log_weight", branch.log_weight, shape, "B, H, T, 1", q.device)


def _check_state(x: HybridInputs, state: HybridState, slots: Tensor | None) -> None:
    """Raise ``UnsupportedError`` if the state of a window hybrid does not fit the call."""
    k, branch, window = x.k, x.branch, x.window
    states = k.shape[0] if x.sequences is None else x.sequences.count
    states = states if slots is None else state.seen.shape[0]
    features = num_features(branch.k, branch.feature_map, branch.map_weights)
    heads, rows, values = (states, k.shape[1]), x.num_sinks + window, x.v.shape[3]
    for name, shape, dtypes in (
        ("kv", (*heads, features, values + 1), STATE_DTYPES),
        ("z", (*heads, features), STATE_DTYPES),
        ("k", (*heads, rows, k.shape[3]), DTYPES),
        ("v", (*heads, rows, values), DTYPES),
        ("features", (*heads, window, features), DTYPES),
        ("seen", heads[:1], (torch.int64,)),
    ):
        y: Tensor = getattr(state, name)
        if not (y.shape == shape and y.device == k.device and y.dtype in dtypes):
            check_state_field(f"state.{name}", y, shape, k.device, dtypes)


# -- implementations -------------------------------------------------------------------------------


STEP_FORM = "softmax window + linear form; one token"


def _cpp_reasons(x: HybridInputs) -> list[str]:
    return cpp_reasons(chunk_size=x.chunk_size) or band_cpp_reasons()


def _skip_kernel(x: HybridInputs) -> list[str]:
    return ["one token is a few torch operations"] if x.q.shape[2] == 1 else []


register_implementation(
    Implementation(
        op="hybrid_attention",
        **flex.FLEX,
        run=partial(run_torch, attend=flex.attend_flex, sums=partial(sums_torch, impl="auto")),
        reasons=lambda x: flex.flex_reasons(x.q, x.k, x.v),
        auto_reasons=_skip_kernel,
        form="softmax window + linear form",
    ),
    Implementation(
        op="hybrid_attention",
        **CPP,
        run=run_cpp,
        reasons=_cpp_reasons,
        auto_reasons=_skip_kernel,
        form="softmax window + linear form",
        step=hybrid_step_cpp,
        step_reasons=step_cpp_reasons,
        step_form=STEP_FORM,
    ),
    Implementation(
        op="hybrid_attention",
        **TORCH,
        run=partial(run_torch, attend=attend_torch, sums=sums_torch),
        form="softmax window + linear form",
        step=hybrid_step,
        step_reasons=step_reasons,
        step_form=STEP_FORM,
    ),
    Implementation(
        op="hybrid_attention",
        name="reference",
        form="softmax window + linear form",
        run=run_reference,
    ),
)
