r"""Block-sparse attention: exact softmax over a window, the first tokens and the best key blocks.

Keys are divided into blocks. Each query, or block of queries, scores a summary of every block
outside its window and attends to the keys of the best ones
(see :mod:`attnzoo.ops.block_sparse.selection`).

Other letters: N key blocks.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attnzoo.contract.implementation import (
    Implementation,
    register_implementation,
    select,
    select_if_supported,
)
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput
from attnzoo.contract.validation import check_lengths, empty_output
from attnzoo.ops.block_sparse.cpu.block_sparse import best_blocks, cpp_reasons
from attnzoo.ops.block_sparse.custom_ops import CPP, TORCH, SparseOperators
from attnzoo.ops.block_sparse.flex import flex_reasons, run_flex, skip_flex
from attnzoo.ops.block_sparse.gather import attend_step as torch_step
from attnzoo.ops.block_sparse.index_keys import add_index, pack_queries
from attnzoo.ops.block_sparse.options import (
    BlockSparseState,
    IndexTensors,
    SelectionOptions,
    SparseCall,
    SparseOptions,
    SparseStep,
    check_index,
    check_inputs,
    check_options,
    check_state,
)
from attnzoo.ops.block_sparse.reference import reference_attention
from attnzoo.ops.block_sparse.selection import (
    add_token,
    align_rows,
    new_state,
    restore_order,
)
from attnzoo.ops.window.flex import FLEX
from attnzoo.runtime.cpp import prebuilt


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask | None = None,
    window: int = 32,
    num_sinks: int = 4,
    top_k: int = 12,
    block_size: int = 8,
    query_block: int = 1,
    score: str = "moments",
    coverage: float | None = None,
    per_key_head: bool = False,
    index: tuple[Tensor, Tensor, Tensor] | None = None,
    scale: float | None = None,
    state: BlockSparseState | None = None,
    return_state: bool = False,
    impl: str = "auto",
) -> AttentionOutput:
    r"""Attend to a window, the first tokens, and the key blocks with the best scores.

    Block j contains the real tokens ``j * block_size`` to ``(j + 1) * block_size - 1``. The window
    begins, and in bidirectional attention ends, at an end of a block, so that it contains up to
    ``block_size - 1`` more keys on a side. Time O(T X D) for X attended keys, plus O(T N D) for the
    scores of blocks, divided by ``query_block``; memory O(T D). The backward pass saves inputs and
    output only; the selection has no gradient. If ``top_k`` blocks cover all keys, this is softmax
    attention. No bit of a causal output depends on later tokens, if their values are finite. Blocks
    of 16-bit tensors are scored in float32; a change by rounding may still select other blocks
    where scores are nearly equal.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``; with a ``state``, the new keys.
        v: Values, ``[B, Hkv, S, E]``.
        mask: Causality and padding; ``None`` means no mask. With a causal mask and without a state,
            query 0 has position ``q_offset``, and keys after the last query's position are ignored.
            Queries that are padding give zeros.
        window: A causal query attends to the latest keys, its own included, another query to as
            many keys on each side.
        num_sinks: Number of leading keys that every query attends to.
        top_k: Most key blocks that a query selects.
        block_size: Keys per block.
        query_block: Consecutive queries that share a selection and a window, for fewer scores. In
            causal attention their first query selects, else their mean.
        score: ``"moments"``, ``"mean"``, ``"bounds"``, or ``"indexer"``, which needs ``index``.
        coverage: Select no more blocks than have this share of the estimated weight of all blocks
            outside the window; ``None`` selects ``top_k``.
        per_key_head: Whether the query heads of a key head share a selection, by their mean query.
        index: Queries ``[B, I, T, P]``, keys ``[B, 1, S, P]`` and head weights ``[B, I, T]`` of an
            indexer, whose selection all heads share (see
            :mod:`attnzoo.ops.block_sparse.index_keys`). They get no gradient.
        scale: Multiplies query-key products; ``None`` means ``D ** -0.5``.
        state: State of the earlier tokens; causal only.
        return_state: Whether to return the state after the last token.
        impl: ``"cpp"`` (on CPUs, for block sizes that divide 32 or are multiples of it),
            ``"flex"`` (CUDA), ``"torch"`` (gathers the keys), ``"reference"`` (dense scores), or
            ``"auto"``, which selects the fastest that supports the call.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; ``state``; and ``impl``.

    Raises:
        UnsupportedError: Shapes, lengths, the mask or an option are not supported, or ``impl`` is
            unknown or does not support the call.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 8)
        >>> mask = attnzoo.AttentionMask(causal=True)
        >>> exact = attnzoo.ops.flash_attention(q, k, v, mask=mask).out
        >>> out = attnzoo.ops.block_sparse_attention(q, k, v, mask=mask, top_k=125).out  # all
        >>> torch.allclose(out, exact, atol=1e-5)
        True
    """
    mask = AttentionMask() if mask is None else mask
    options = SparseOptions(mask.causal, window, num_sinks, top_k, block_size, query_block)
    selection = SelectionOptions(score, coverage, per_key_head)
    check_options(options, selection)
    check_inputs(q, k, v, mask, has_state=state is not None, query_block=query_block)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = SparseCall(q, k, v, None, None, None, None, scale, options, selection)
    call = call._replace(return_state=return_state)
    return run_block_sparse_attention(call, mask, index, state, impl)


def run_block_sparse_attention(
    call: SparseCall,
    mask: AttentionMask,
    index: tuple[Tensor, Tensor, Tensor] | None = None,
    state: BlockSparseState | None = None,
    impl: str = "auto",
) -> AttentionOutput:
    """Compute :func:`block_sparse_attention` of tensors that fit each other, as a backend's do.

    A state and index tensors are checked here: an earlier call and an indexer have made them.

    Args:
        call: Queries, keys, values and options, in rows as they are given.
        mask: As in :func:`block_sparse_attention`, and so are the others.
        index: See mask.
        state: See mask.
        impl: See mask.
    """
    q, k, v, return_state = call.q, call.k, call.v, call.return_state
    if state is not None:
        check_state(state, k, v)
    else:
        check_lengths(q, k, mask)
    given = None if index is None else IndexTensors(*(x.detach() for x in index))
    check_index(given, q, k, call.selection.score)
    if 0 in (q.shape[2], *k.shape):
        return _empty(call, given, state, return_state, impl)
    if state is not None and _is_step(q, k, v, mask):
        step = _step_of(call, given, state)
        if found := select_if_supported("block_sparse_step", step, impl):
            out = found[0].run(step).to(v.dtype)
            return AttentionOutput(out, step.state if return_state else None, impl=found[1])
    call, order, key_order = align_rows(call, mask, state)
    call = call._replace(leader=None if state is None else state.leader)
    if given is not None:
        call = add_index(call, given, order, key_order, state)
    implementation, choice = select("block_sparse_attention", call, impl)
    out, summary = implementation.run(call)
    out = restore_order(out, order).to(v.dtype)
    after = new_state(call._replace(summary=summary), state) if return_state else None
    return AttentionOutput(out, after, impl=choice)


def _empty(
    call: SparseCall,
    index: IndexTensors | None,
    state: BlockSparseState | None,
    return_state: bool,
    impl: str,
) -> AttentionOutput:
    """Return the output of a call without queries or keys."""
    _, choice = select("block_sparse_attention", call, impl)
    q, k, v = call.q, call.k, call.v
    if return_state and state is None:
        if index is not None:
            call = add_index(call, index)
        state = new_state(call, None)
    return AttentionOutput(empty_output(q, k, v), state if return_state else None, impl=choice)


def _is_step(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> bool:
    """Return whether a call has one new real token in every row, and needs no gradient."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if q.shape[2] != 1 or needs_grad:
        return False
    return mask.padding is None or bool(mask.padding.all())


def _step_of(call: SparseCall, index: IndexTensors | None, state: BlockSparseState) -> SparseStep:
    """Return the step of one new token, with the state after it."""
    index_k = None
    if index is not None:
        call, index_k = call._replace(index_q=pack_queries(index)), index.k
    query = call.with_selecting_queries().q
    after = add_token(state, call.k, call.v, query, call.options, call.selection, index_k)
    return SparseStep(call, after)


# -- implementations -------------------------------------------------------------------------------

Result = tuple[Tensor, Tensor | None]  # the output, and the summary of keys if it is known


def _run(call: SparseCall, operators: SparseOperators) -> Result:
    return operators.run(call), call.summary


def _run_flex(call: SparseCall) -> Result:
    return run_flex(call), call.summary


def _run_reference(call: SparseCall) -> Result:
    return reference_attention(call), call.summary


def _step_note(step: SparseStep) -> str:
    blocks = step.state.summary.shape[2]
    return f"one new token scores {blocks} blocks and reads at most {step.kept} of them"


register_implementation(
    Implementation(
        op="block_sparse_attention",
        name="cpp",
        devices=("cpu",),
        run=partial(_run, operators=CPP),
        reasons=cpp_reasons,
        automatic=prebuilt.origin(),
    ),
    Implementation(
        op="block_sparse_attention",
        **FLEX,
        run=_run_flex,
        reasons=flex_reasons,
        auto_reasons=skip_flex,
    ),
    Implementation(
        op="block_sparse_attention",
        name="torch",
        run=partial(_run, operators=TORCH),
        automatic="gathers the selected keys, on every device",
    ),
    Implementation(op="block_sparse_attention", name="reference", run=_run_reference),
    Implementation(  # selects in C++ and reads in torch; not faster than torch alone
        op="block_sparse_step",
        name="cpp",
        devices=("cpu",),
        run=partial(torch_step, best=best_blocks),
        reasons=lambda step: cpp_reasons(step.call),
        note=_step_note,
    ),
    Implementation(
        op="block_sparse_step",
        name="torch",
        run=torch_step,
        automatic="gathers the selected keys, on every device",
        note=_step_note,
    ),
)
