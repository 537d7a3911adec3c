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
In C++ one kernel computes the linear sums, and one the window and the output from both.
Source: Zhang et al., 2024, arXiv:2410.10254 (LoLCATs), where :math:`e^{f_i}` is a factor of the
window's largest term.
Letters: B batch, H query heads, Hkv key heads, T queries, D key size, E value size, F features of a
key, W window.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.implementation import (
    Implementation,
    register_implementation,
    select,
    select_if_supported,
)
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import fill_padding, gather_tokens, padding_if_any
from attnzoo.contract.states import AttentionOutput, LinearState
from attnzoo.contract.validation import (
    DTYPES,
    check_broadcastable,
    check_dtype,
    check_mask_fields,
    check_qkv,
    check_shape,
    check_shard,
    check_size,
    check_state_field,
    format_shape,
    is_empty_call,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.hybrid.cpu.hybrid_step import hybrid_step_cpp, step_cpp_reasons
from attnzoo.ops.hybrid.merge import combine, combine_kernels
from attnzoo.ops.hybrid.state import (
    HybridInputs,
    HybridState,
    StepInputs,
    as_ring,
    next_state,
    oldest_first,
    reorder,
    state_before_shard,
)
from attnzoo.ops.hybrid.state import (
    LinearBranch as LinearBranch,
)
from attnzoo.ops.hybrid.step import hybrid_step, step_reasons
from attnzoo.ops.hybrid.sums import (
    CausalSums,
    linear_counts,
    linear_sums,
    sums_cpp,
    sums_of_op,
    sums_triton,
)
from attnzoo.ops.hybrid.triton.run import (
    hybrid_triton_reasons,
    hybrid_verdict,
    run_hybrid_triton,
    run_step_triton,
    run_window_triton,
    step_triton_reasons,
)
from attnzoo.ops.linear.common import check_feature_map, num_features
from attnzoo.ops.linear.cpu.linear import cpp_reasons
from attnzoo.ops.linear.validation import check_log_decay
from attnzoo.ops.window.causal_window import (
    AttendBand,
    Window,
    WindowState,
    attend_dense,
    attend_torch,
    causal_window,
    local_softmax,
    padding_last,
)
from attnzoo.ops.window.cpu.band import OutsideSums, band_attention_cpp, band_cpp_reasons

# The output, float32 or wider, and the state after the last token if it is requested
Result = tuple[Tensor, HybridState | None]


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch: LinearBranch,
    *,
    window: int,
    scale: float,
    mask: AttentionMask | None = None,
    state: HybridState | None = None,
    return_state: bool = False,
    impl: str = "auto",
    chunk_size: int | None = None,
    shard: SequenceShard | None = None,
    num_sinks: int = 0,
    reuse_state: bool = False,
) -> AttentionOutput:
    """Compute softmax attention inside a window and linear attention outside.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, T, E]``.
        branch: Features of queries and keys, or the map that computes them; weight and decay.
        window: W, in real tokens: the W latest keys, which include the query's own, or W keys on
            each side without a causal mask.
        scale: s, which multiplies query-key products in the window.
        mask: Causality, padding and segments; ``None`` means causal. Outputs at padding are zeros.
            Packed segments do not see each other, and the returned state is that of the last.
        state: The state that an earlier causal call returned; not together with segments.
        return_state: Whether to return the state after the last token.
        impl: ``"triton"`` (NVIDIA GPUs), ``"cpp"`` (CPUs), ``"torch"``, ``"reference"``, which
            computes the window with a dense mask, or ``"auto"``, which selects the fastest one that
            supports the call; ``"triton"`` only after its kernels passed a check on the device.
        chunk_size: As in :func:`attnzoo.ops.linear.api.linear_attention`.
        shard: This rank's part of sequences that several ranks hold, in place of ``state``; causal.
        num_sinks: G, first real tokens of each row that belong to the window of every later query,
            and not to the linear branch; causal, without packed segments and ``shard``.
        reuse_state: Whether one token without gradients may overwrite the tensors of ``state`` with
            the returned state.

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
    mask = AttentionMask(causal=True) if mask is None else mask
    _check(q, k, v, branch, mask, state, shard, window, num_sinks, return_state)
    padding_mask, ids = mask.padding, mask.segment_ids
    padding_mask = None if padding_mask is None else padding_if_any(padding_mask)
    if padding_mask is not mask.padding:
        mask = replace(mask, padding=padding_mask)
    if padding_mask is not None:
        q, k, v = (fill_padding(x, padding_mask) for x in (q, k, v))
        branch = branch.without_padding(padding_mask)
    if shard is not None:
        branch = branch.mapped(padding_mask)
        state = state_before_shard(k, v, branch.k, window, shard)
    elif state is not None:
        if q.shape[2] == 1:
            branch = branch.mapped(padding_mask)
            in_place = reuse_state and return_state and not torch.is_grad_enabled()
            step = StepInputs(q, k, v, branch, mask, state, scale, in_place)
            if found := select_if_supported("hybrid_step", step, impl):
                out, after = found[0].run(step)
                return AttentionOutput(out, after if return_state else None, None, found[1])
        state = oldest_first(state)
    order = None
    if padding_mask is not None:  # a stable sort puts real tokens first, so windows are contiguous
        order, padding_mask, ids = padding_last(padding_mask, ids)
        q, k, v = (gather_tokens(x, order) for x in (q, k, v))
        branch = reorder(branch, order)
    dtype = v.dtype
    x = HybridInputs(
        *(q, k, v, branch, window, scale, mask.causal, padding_mask, ids, state, return_state),
        *(chunk_size, shard, num_sinks),
    )
    chosen, choice = select("hybrid_attention", x, impl)
    out, after = chosen.run(x)
    out = out.to(dtype)
    if order is not None and padding_mask is not None:
        out = out.masked_fill(~padding_mask[:, None, :, None], 0)
        out = gather_tokens(out, order.argsort(1))
    return AttentionOutput(out, after, None, choice)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch: LinearBranch,
    mask: AttentionMask,
    state: HybridState | None,
    shard: SequenceShard | None,
    window: int,
    num_sinks: int,
    return_state: bool,
) -> None:
    """Raise ``UnsupportedError`` if the inputs of a window hybrid do not fit each other."""
    check_qkv(q, k, v, mask)
    is_shifted = type(mask.q_offset) is not int or mask.q_offset != 0
    if is_shifted or mask.window is not None or mask.function is not None:  # without a call
        check_mask_fields("hybrid_attention", mask, "segment_ids")
    check_size("window", window)
    features = _check_branch(branch, q, k, mask.causal)
    if state is not None:
        _check_state(state, k, v, features, window, num_sinks)
    if mask.causal and mask.segment_ids is None and shard is None and not num_sinks:
        return
    check_size("num_sinks", num_sinks, minimum=0)
    needs_order = (
        ("state", state is not None),
        ("return_state", return_state),
        ("shard", shard is not None),
        ("num_sinks", num_sinks > 0),
    )
    given = [name for name, is_given in needs_order if is_given]
    if given and not mask.causal:
        raise UnsupportedError(
            f"hybrid_attention is given {' and '.join(given)}, which need a causal mask; pass "
            "AttentionMask(causal=True), or leave them out."
        )
    packed = [name for name in given if name in ("state", "num_sinks")]
    if packed and mask.segment_ids is not None:
        raise UnsupportedError(
            f"hybrid_attention is given {' and '.join(packed)} together with segment_ids, which is "
            "not supported; run the sequences as rows of a batch."
        )
    if shard is not None and num_sinks:
        raise UnsupportedError(
            "hybrid_attention is given shard together with num_sinks, which is not supported; "
            "leave num_sinks out."
        )
    check_shard(shard, state)


def _check_branch(branch: LinearBranch, q: Tensor, k: Tensor, causal: bool) -> int:
    """Return the number of features of a linear branch.

    Raises:
        UnsupportedError: The branch does not fit the queries and keys of the window.
    """
    q_shape, k_shape = q.shape[:3] + branch.q.shape[-1:], k.shape[:3] + branch.k.shape[-1:]
    check_shape("branch.q", branch.q, q_shape, "B, H, T, F", q.device)
    check_shape("branch.k", branch.k, k_shape, "B, Hkv, T, F", q.device)
    if q.shape[2] != k.shape[2] or branch.q.shape[3] != branch.k.shape[3]:
        raise UnsupportedError(
            "queries and keys must be of the same tokens and have as many features, got "
            f"{q.shape[2]} and {k.shape[2]} tokens, {branch.q.shape[3]} and {branch.k.shape[3]} "
            "features."
        )
    check_feature_map(branch.feature_map, branch.map_weights, branch.q, branch.k)
    features = num_features(branch.k, branch.feature_map, branch.map_weights)
    if branch.log_decay is not None:
        check_log_decay(branch.log_decay, (*k.shape[:3], features), q.device, causal)
    check_dtype("branch.log_weight", branch.log_weight)
    shape, heads = (*q.shape[:3], 1), branch.linear_only_heads
    check_broadcastable("branch.log_weight", branch.log_weight, shape, "B, H, T, 1", q.device)
    if heads is not None and (heads.dtype != torch.bool or heads.shape != (q.shape[1],)):
        raise UnsupportedError(
            f"branch.linear_only_heads must be [H], here [{q.shape[1]}], and bool, got "
            f"{format_shape(heads)} {heads.dtype}."
        )
    return features


def _check_state(
    state: HybridState, k: Tensor, v: Tensor, features: int, window: int, num_sinks: int
) -> None:
    """Raise ``UnsupportedError`` if the state of a window hybrid does not fit the call."""
    heads, rows, values = k.shape[:2], num_sinks + window, v.shape[3]
    check_state_field("state.kv", state.kv, (*heads, features, values + 1), k.device)
    check_state_field("state.z", state.z, (*heads, features), k.device)
    check_state_field("state.k", state.k, (*heads, rows, k.shape[3]), k.device, DTYPES)
    check_state_field("state.v", state.v, (*heads, rows, values), k.device, DTYPES)
    shape = (*heads, window, features)
    check_state_field("state.features", state.features, shape, k.device, DTYPES)
    check_state_field("state.seen", state.seen, heads[:1], k.device, (torch.int64,))


# -- implementations -------------------------------------------------------------------------------


def _run_triton(x: HybridInputs) -> Result:
    """Run the kernels; they count the keys themselves unless rows have other sequences in them."""
    x = _with_features(x)
    if not x.causal:
        return _run_triton_bidirectional(x), None
    is_simple = x.state is None and x.segment_ids is None and not x.num_sinks
    counts = linear_counts(x) if x.branch.mean and not is_simple else None
    out, last = run_hybrid_triton(x, counts)
    return out, _state_after(x, last)


def _run_triton_bidirectional(x: HybridInputs) -> Tensor:
    """Run the kernels of the window and of linear sums in both directions, and merge in torch."""
    near, lse = run_window_triton(x)
    far = linear_sums(x, sums_triton)
    logit, totals = _logit(x, far.counts, lse.dtype), far.totals.unsqueeze(3)
    return combine_kernels(near, lse, far.sums, totals, logit, x.branch, x.v.dtype)


def _run_in_parts(x: HybridInputs, attend: AttendBand, sums: CausalSums) -> Result:
    """Compute the window and the linear branch, then the output, in torch."""
    x = _with_features(x)
    before, options = _window(x, attend)
    v = x.v.to(torch.promote_types(x.v.dtype, torch.float32))
    if x.causal:
        near, lse = causal_window(x.q, x.k, v, before, options)
    else:
        near, lse = local_softmax(x.q, x.k, v, (x.window, x.window), options)
    far = linear_sums(x, sums)
    missing = x.q.shape[2] - far.sums.shape[2]
    totals = F.pad(far.totals, (missing, 0)).unsqueeze(3)
    logit = _logit(x, far.counts, lse.dtype)
    out = combine(near, lse, F.pad(far.sums, (0, 0, missing, 0)), totals, logit, x.branch)
    return out, _state_after(x, far.state)


def _run_cpp(x: HybridInputs) -> Result:
    """Compute the linear branch, then the window and the output in one pass."""
    if x.q.shape[2] == 1 or is_empty_call(x.q, x.k):
        return _run_in_parts(x, band_attention_cpp, sums_cpp)
    if x.num_sinks or not x.causal:
        x = _with_features(x)
    before, options = _window(x, band_attention_cpp)
    far = linear_sums(x, sums_cpp)
    logit = _logit(x, far.counts, far.sums.dtype).expand(*x.q.shape[:3], 1).squeeze(3)
    branch = x.branch
    outside = OutsideSums(far.sums, far.totals, logit, branch.relative, branch.linear_only_heads)
    if x.causal:
        out, _ = causal_window(x.q, x.k, x.v, before, options, outside)
    else:
        out, _ = local_softmax(x.q, x.k, x.v, (x.window, x.window), options, outside)
    return out, _state_after(x, far.state)


def _with_features(x: HybridInputs) -> HybridInputs:
    return x._replace(branch=x.branch.mapped(x.padding_mask))


def _state_after(x: HybridInputs, sums: LinearState | None) -> HybridState | None:
    """Return the state after a call, if it is requested."""
    if not x.return_state:
        return None
    return as_ring(next_state(x, *_window(x, attend_torch), sums))


def _window(x: HybridInputs, attend: AttendBand) -> tuple[WindowState | None, Window]:
    """Return the window before a call, and its options."""
    state = x.state
    before = None if state is None else WindowState(state.k, state.v, state.seen)
    masks = x.padding_mask, x.segment_ids
    return before, Window(x.window, x.scale, *masks, attend, x.num_sinks)


def _logit(x: HybridInputs, counts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the logit of the linear sums, broadcastable to ``[B, H, T, 1]``."""
    logit = x.branch.log_weight.to(dtype)
    if counts is None:
        return logit
    return logit - counts.clamp(min=1).to(dtype).log()[:, None, :, None]


def _cpp_reasons(x: HybridInputs) -> list[str]:
    return cpp_reasons(chunk_size=x.chunk_size) or band_cpp_reasons()


def _skip_cpp(x: HybridInputs) -> list[str]:
    return ["one token is a few torch operations"] if x.q.shape[2] == 1 else []


register_implementation(
    Implementation(
        op="hybrid_attention",
        name="triton",
        devices=("cuda",),
        interpreted_on=("cpu",),
        run=_run_triton,
        reasons=hybrid_triton_reasons,
        form="softmax window + linear form",
        automatic="compiled for this GPU",
        verdict=hybrid_verdict,
    ),
    Implementation(
        op="hybrid_attention",
        name="cpp",
        devices=("cpu",),
        run=_run_cpp,
        reasons=_cpp_reasons,
        auto_reasons=_skip_cpp,
        form="softmax window + linear form",
        automatic="compiled for this CPU",
    ),
    Implementation(
        op="hybrid_attention",
        name="torch",
        run=partial(_run_in_parts, attend=attend_torch, sums=partial(sums_of_op, impl="torch")),
        form="softmax window + linear form",
        automatic="runs on every device",
    ),
    Implementation(
        op="hybrid_attention",
        name="reference",
        form="softmax window + linear form",
        run=partial(_run_in_parts, attend=attend_dense, sums=partial(sums_of_op, impl="reference")),
    ),
    Implementation(
        op="hybrid_step",
        name="triton",
        devices=("cuda",),
        interpreted_on=("cpu",),
        run=run_step_triton,
        reasons=step_triton_reasons,
        form="softmax window + linear form; one token",
        automatic="compiled for this GPU",
        verdict=hybrid_verdict,
    ),
    Implementation(
        op="hybrid_step",
        name="cpp",
        devices=("cpu",),
        run=hybrid_step_cpp,
        reasons=step_cpp_reasons,
        form="softmax window + linear form; one token",
        automatic="compiled for this CPU",
    ),
    Implementation(
        op="hybrid_step",
        name="torch",
        run=hybrid_step,
        reasons=step_reasons,
        form="softmax window + linear form; one token",
        automatic="runs on every device",
    ),
)
