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

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.backends.implementation import Implementation, select
from attnzoo.backends.linear.impl.cpp import cpp_reasons
from attnzoo.backends.linear.impl.triton_trust import trust
from attnzoo.backends.linear.op import linear_attention
from attnzoo.backends.linear.window_state import (
    HybridInputs,
    HybridState,
    next_state,
    reorder,
    state_before_shard,
)
from attnzoo.backends.linear.window_state import (
    LinearBranch as LinearBranch,
)
from attnzoo.backends.linear.window_step import hybrid_step, supports_step
from attnzoo.backends.linear.window_triton import hybrid_triton_reasons, run_hybrid_triton
from attnzoo.backends.local.band_cpp import OutsideSums, band_cpp_reasons
from attnzoo.backends.local.causal_window import causal_window, local_softmax, padding_last
from attnzoo.backends.local.pattern import gather_tokens
from attnzoo.backends.validation import check_size, is_empty_call
from attnzoo.kernels.context_parallel import SequenceShard
from attnzoo.kernels.memory import cat_huge_pages
from attnzoo.masks import AttentionMask
from attnzoo.state import AttentionOutput, ImplChoice, LinearState

STEP_IN_CPP = ImplChoice("cpp", "one token, compiled for this CPU")
MIN_WEIGHT = 1e-30  # a smaller sum of linear weights, before scaling, counts as 0


# The output, float32 or wider, and the state of the linear sums
Result = tuple[Tensor, LinearState | None]


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
) -> AttentionOutput:
    """Compute softmax attention inside a window and linear attention outside.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, T, E]``.
        branch: Features of queries and keys, their weight and decay.
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
        chunk_size: As in :func:`attnzoo.backends.linear.op.linear_attention`.
        shard: This rank's part of sequences that several ranks hold, in place of ``state``; causal.
        num_sinks: G, first real tokens of each row that belong to the window of every later query,
            and not to the linear branch; causal, without packed segments and ``shard``.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; also ``state`` and ``impl``.
    """
    mask = AttentionMask(causal=True) if mask is None else mask
    check_size("window", window)
    padding_mask, ids = mask.padding, mask.segment_ids
    needs_order = state is not None or return_state or shard is not None
    assert mask.causal or not (needs_order or branch.log_decay is not None)
    assert state is None or ids is None
    assert not num_sinks or (mask.causal and ids is None and shard is None)
    if shard is not None:
        state = state_before_shard(k, v, branch.k, window, shard)
    if (
        state is not None
        and shard is None
        and impl in ("auto", "cpp")
        and supports_step(q, k, v, branch, mask, state)
    ):
        out, after = hybrid_step(q, k, v, branch, state, scale=scale)
        return AttentionOutput(out, after if return_state else None, None, STEP_IN_CPP)
    order = None
    if padding_mask is not None:  # a stable sort puts real tokens first, so windows are contiguous
        order, padding_mask, ids = padding_last(padding_mask, ids)
        q, k, v = (gather_tokens(x, order) for x in (q, k, v))
        branch = reorder(branch, order)
    dtype = v.dtype
    x = HybridInputs(
        *(q, k, v, branch, window, scale, mask.causal, padding_mask, ids, state, return_state),
        *(impl, chunk_size, shard, num_sinks),
    )
    table = AUTOMATIC[q.device.type == "cuda"] if impl == "auto" else IMPLEMENTATIONS
    chosen, choice = select("hybrid_attention", table, x, impl)
    out, last = chosen.run(x._replace(impl=chosen.name))
    out = out.to(dtype)
    if order is not None and padding_mask is not None:
        out = out.masked_fill(~padding_mask[:, None, :, None], 0)
        out = gather_tokens(out, order.argsort(1))
    choice = ImplChoice(choice.impl, f"softmax window + linear form; {choice.reason}")
    return AttentionOutput(out, next_state(x, last) if return_state else None, None, choice)


def _with_ones(run: Callable[[HybridInputs], Result]) -> Callable[[HybridInputs], Result]:
    """Return a function that computes a call whose values end in ones, float32 or wider."""

    def run_with_ones(x: HybridInputs) -> Result:
        wide = torch.promote_types(x.v.dtype, torch.float32)
        ones = x.v.new_ones(*x.v.shape[:3], 1, dtype=wide)
        return run(x._replace(v=cat_huge_pages([x.v.to(wide), ones], 3)))

    return run_with_ones


def _run_triton(x: HybridInputs) -> Result:
    """Run the kernels; they count the keys themselves unless rows have other sequences in them."""
    is_simple = x.state is None and x.segment_ids is None
    counts = _linear_counts(x) if x.branch.mean and not is_simple else None
    return run_hybrid_triton(x, counts, MIN_WEIGHT)


def _run_torch(x: HybridInputs) -> Result:
    """Compute the window and the linear branch, then the output, in torch."""
    if x.causal:
        near, lse = causal_window(x.q, x.k, x.v[..., :-1], x.window_state, x.options)
        sums, counts, last = _causal_linear(x)
        sums = F.pad(sums, (0, 0, x.q.shape[2] - sums.shape[2], 0))
    else:
        reach = (x.window, x.window)
        near, lse = local_softmax(x.q, x.k, x.v[..., :-1], reach, x.options)
        (sums, counts), last = _bidirectional_linear(x), None
    return _combine(near, lse, sums, _logit(x, counts, lse.dtype), x.branch), last


def _run_cpp(x: HybridInputs) -> Result:
    """Compute the linear branch, then the window and the output in one pass."""
    if x.q.shape[2] == 1 or is_empty_call(x.q, x.k):
        return _run_torch(x)
    sums, counts, last = _causal_linear(x)
    logit = _logit(x, counts, sums.dtype).expand(*x.q.shape[:3], 1).squeeze(3)
    outside = OutsideSums(sums, logit, x.branch.relative, x.branch.linear_only_heads)
    out, _ = causal_window(x.q, x.k, x.v[..., :-1], x.window_state, x.options, outside)
    return out, last


def _logit(x: HybridInputs, counts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the logit of the linear sums, broadcastable to ``[B, H, T, 1]``."""
    logit = x.branch.log_weight.to(dtype)
    if counts is None:
        return logit
    return logit - counts.clamp(min=1).to(dtype).log()[:, None, :, None]


def _triton_trust(x: HybridInputs) -> tuple[tuple[str, ...], str]:
    return trust("hybrid", x.branch.log_decay, x.k, x.v, x.branch.k)


def _cpp_reasons(x: HybridInputs) -> list[str]:
    reasons = cpp_reasons(x.q, causal=x.causal, chunk_size=x.chunk_size)
    return reasons or band_cpp_reasons(x.q.device)


def _skip_cpp(x: HybridInputs) -> list[str]:
    return ["one token takes the step in torch"] if x.q.shape[2] == 1 else []


IMPLEMENTATIONS = (
    Implementation(
        name="triton",
        run=_run_triton,
        reasons=hybrid_triton_reasons,
        automatic="compiled for this GPU",
        trust=_triton_trust,
    ),
    Implementation(
        name="cpp",
        run=_with_ones(_run_cpp),
        reasons=_cpp_reasons,
        auto_reasons=_skip_cpp,
        automatic="compiled for this CPU",
    ),
    Implementation(name="torch", run=_with_ones(_run_torch), automatic="runs on every device"),
    Implementation(name="reference", run=_with_ones(_run_torch)),
)
# What impl="auto" selects from, by whether the tensors are on a GPU; the interpreter is for tests
AUTOMATIC = {True: IMPLEMENTATIONS, False: IMPLEMENTATIONS[1:]}


# -- the linear branch -----------------------------------------------------------------------------


def _causal_linear(x: HybridInputs) -> tuple[Tensor, Tensor | None, LinearState | None]:
    """Return the linear sums over keys before the window, their number, and their state.

    The first queries, whose windows hold all earlier keys, have no sums. Token t of the linear
    attention has the query of token t and the key of token t - W; the first G keys are left out.
    """
    branch, state, length, size = x.branch, x.state, x.q.shape[2], x.window
    log_decay, ids = branch.log_decay, None
    if state is None:
        first, sums = size + x.num_sinks, None
        leaving = slice(x.num_sinks, max(length - size, x.num_sinks))
        keys, values = branch.k[:, :, leaving], x.v[:, :, leaving]
        queries = branch.q[:, :, first:]
        if log_decay is not None and log_decay.dim() > 1:
            log_decay = log_decay[:, :, first:]
    else:
        old_values = F.pad(state.v[:, :, x.num_sinks :], (0, 1), value=1.0).to(x.v.dtype)
        keys = torch.cat([state.features.to(branch.k.dtype), branch.k], 2)[:, :, :length]
        values = torch.cat([old_values, x.v], 2)[:, :, :length]
        queries, first, sums = branch.q, 0, LinearState(state.kv, state.z)
        if x.num_sinks:
            rank = state.seen[:, None] - size + torch.arange(length, device=keys.device)
            keys = keys.masked_fill((rank < x.num_sinks)[:, None, :, None], 0)
    if x.padding_mask is not None:  # no key leaves the window at padding
        keys = keys.masked_fill(~x.padding_mask[:, None, first:, None], 0)
    if x.segment_ids is not None:  # a key of another segment does not enter the state
        ids, key_ids = x.segment_ids[:, first:], x.segment_ids
        if state is not None:
            key_ids = torch.cat([key_ids[:, :1].expand(-1, size), key_ids], 1)
        is_other = ids != key_ids[:, : ids.shape[1]]
        keys = keys.masked_fill(is_other[:, None, :, None], 0)
    out, last, *_ = linear_attention(
        queries,
        keys,
        values,
        mask=AttentionMask(causal=True, segment_ids=ids),
        log_decay=log_decay,
        form="recurrent" if queries.shape[2] == 1 else "chunk",
        impl=x.impl,
        state=None if x.shard is not None else sums,
        return_state=x.return_state,
        chunk_size=x.chunk_size,
        shard=x.shard,
    )
    return out, _linear_counts(x) if branch.mean else None, last


def _linear_counts(x: HybridInputs) -> Tensor:
    """Return the number of keys in each token's linear sums, ``[B, T]``; at most 0 if none."""
    counts = _tokens_around(x)[0] + 1 - x.window - x.num_sinks
    if x.state is not None:
        earlier = x.state.seen[:, None]
        if x.segment_ids is not None:
            earlier = earlier * (x.segment_ids == x.segment_ids[:, :1])
        counts = counts + earlier
    return counts


def _bidirectional_linear(x: HybridInputs) -> tuple[Tensor, Tensor | None]:
    """Return the linear sums over keys before and after the window, and their number."""
    branch, length, skip = x.branch, x.q.shape[2], x.window + 1
    sums = branch.q.new_zeros(*x.q.shape[:3], x.v.shape[3], dtype=x.v.dtype)
    if length > skip:
        early, late = slice(length - skip), slice(skip, length)
        sums = F.pad(_directional_sums(x, late, early), (0, 0, skip, 0))
        sums = sums + F.pad(_directional_sums(x, early, late), (0, 0, 0, skip))
    if not branch.mean:
        return sums, None
    before, after = _tokens_around(x)
    return sums, (before - x.window).clamp(min=0) + (after - x.window).clamp(min=0)


def _directional_sums(x: HybridInputs, queries: slice, keys: slice) -> Tensor:
    """Return the linear sums of queries paired with the first keys outside their windows."""
    q, k, v = x.branch.q[:, :, queries], x.branch.k[:, :, keys], x.v[:, :, keys]
    reverse, ids = queries.start is None, None
    if x.segment_ids is not None:
        ids = x.segment_ids[:, queries]
        k = k.masked_fill((ids != x.segment_ids[:, keys])[:, None, :, None], 0)
        ids = (ids.amax() - ids).flip(1) if reverse else ids
    if reverse:
        q, k, v = q.flip(2), k.flip(2), v.flip(2)
    mask = AttentionMask(causal=True, segment_ids=ids)
    out = linear_attention(q, k, v, mask=mask, impl=x.impl, chunk_size=x.chunk_size).out
    return out.flip(2) if reverse else out


def _tokens_around(x: HybridInputs) -> tuple[Tensor, Tensor]:
    """Return the number of tokens before and after each token in its sequence, ``[B, T]`` each."""
    batch, length, ids = len(x.q), x.q.shape[2], x.segment_ids
    position = torch.arange(length, device=x.q.device)
    lengths = torch.full((batch, 1), length, device=position.device)
    if x.padding_mask is not None:
        lengths = x.padding_mask.sum(1, keepdim=True)
    if ids is None:
        return position.expand(batch, length), (lengths - 1 - position).clamp(min=0)
    changes = ids[:, 1:] != ids[:, :-1]
    first = F.pad(position[1:] * changes, (1, 0)).cummax(1).values
    last = F.pad(torch.where(changes, position[:-1], length - 1), (0, 1), value=length - 1)
    last = torch.minimum(last.flip(1).cummin(1).values.flip(1), lengths - 1)
    return position - first, (last - position).clamp(min=0)


# -- the output ------------------------------------------------------------------------------------


def _combine(
    near: Tensor, lse: Tensor, sums: Tensor, logit: Tensor, branch: LinearBranch
) -> Tensor:
    """Return the window and the linear sums over one denominator."""
    values, total = sums[..., :-1], sums[..., -1:]
    if branch.relative:
        lse = torch.zeros_like(lse)  # the window's sum is a factor of both terms and cancels
    has_linear = total > MIN_WEIGHT
    if branch.linear_only_heads is not None:
        heads = branch.linear_only_heads.view(1, -1, 1, 1)
        lse = lse.masked_fill(has_linear & heads, -torch.inf)
    log_total = total.clamp(min=MIN_WEIGHT).log()
    maximum = torch.where(has_linear, torch.maximum(lse, logit + log_total), lse).detach()
    linear_weight = (logit - maximum).masked_fill(~has_linear, -torch.inf).exp()
    window_weight = (lse - maximum).exp()
    numerator = window_weight * near + linear_weight * values
    return numerator / (window_weight + linear_weight * total)
