r"""Block-sparse attention: exact softmax over a window, the first tokens and the best key blocks.

Keys are divided into blocks. Each query, or block of queries, scores a summary of every block
outside its window and attends to the keys of the best ones
(see :mod:`attnzoo.ops.block_sparse.selection`).

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size,
N key blocks.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attnzoo.contract.implementation import Implementation, select
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput, ImplChoice
from attnzoo.contract.validation import empty_output, is_empty_call
from attnzoo.ops.block_sparse.cpu.block_sparse import cpp_reasons
from attnzoo.ops.block_sparse.custom_ops import sparse_attention, triton_step
from attnzoo.ops.block_sparse.index_keys import add_index, pack_queries
from attnzoo.ops.block_sparse.layout import (
    add_token,
    align_rows,
    new_state,
    restore_order,
)
from attnzoo.ops.block_sparse.options import (
    BlockSparseState,
    IndexTensors,
    SelectionOptions,
    SparseCall,
    SparseOptions,
)
from attnzoo.ops.block_sparse.reference import reference_attention
from attnzoo.ops.block_sparse.step import attend_step as torch_step
from attnzoo.ops.block_sparse.triton.run import (
    selection_reason,
    sorting_reason,
    summarize,
    triton_reasons,
    triton_verdict,
)
from attnzoo.ops.block_sparse.validation import (
    check_index,
    check_inputs,
    check_options,
    check_state,
)

IMPLEMENTATIONS = (
    Implementation(
        name="cpp",
        run=partial(sparse_attention, impl="cpp"),
        reasons=cpp_reasons,
        automatic="compiled for this CPU",
    ),
    Implementation(
        name="triton",
        run=partial(sparse_attention, impl="triton"),
        reasons=triton_reasons,
        automatic="compiled for this GPU",
        verdict=triton_verdict,
    ),
    Implementation(
        name="torch",
        run=partial(sparse_attention, impl="torch"),
        automatic="gathers the selected keys, on every device",
    ),
    Implementation(name="reference", run=reference_attention),
)


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
            ``"triton"`` (on NVIDIA GPUs), ``"torch"`` (gathers the keys), ``"reference"`` (dense
            scores), or ``"auto"``, which selects the fastest that supports the call; ``"triton"``
            only on devices where it passed a check. A single new token after a state is computed
            in Triton with ``"triton"``, on checked devices also with ``"auto"``, and in torch with
            ``"cpp"`` and ``"torch"``.

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
    if state is not None:
        check_state(state, k, v)
    given = None if index is None else IndexTensors(*(x.detach() for x in index))
    check_index(given, q, k, score)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = SparseCall(q, k, v, None, None, None, None, scale, options, selection)
    if is_empty_call(q, k):
        _, choice = select("block_sparse_attention", IMPLEMENTATIONS, call, impl)
        if return_state and state is None:
            if given is not None:
                call = add_index(call, given)
            state = new_state(call, None)
        return AttentionOutput(empty_output(q, k, v), state if return_state else None, impl=choice)
    if state is not None and impl != "reference" and _is_step(q, k, v, mask):
        return _step(call, given, state, return_state, impl)
    call, order, key_order = align_rows(call, mask, state)
    if state is not None:
        call = call._replace(leader=state.leader)
    if given is not None:
        call = add_index(call, given, order, key_order, state)
    implementation, choice = select("block_sparse_attention", IMPLEMENTATIONS, call, impl)
    if choice.impl == "triton":
        if reason := selection_reason(call):
            choice = choice._replace(reason=f"{choice.reason}; {reason}")
        if return_state and call.summary is None:
            call = call._replace(summary=summarize(call))  # once for the selection and the state
    out = restore_order(implementation.run(call), order).to(v.dtype)
    return AttentionOutput(out, new_state(call, state) if return_state else None, impl=choice)


def _is_step(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> bool:
    """Return whether a call has one new real token in every row, and needs no gradient."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if q.shape[2] != 1 or needs_grad:
        return False
    return mask.padding is None or bool(mask.padding.all())


def _step(
    call: SparseCall,
    index: IndexTensors | None,
    state: BlockSparseState,
    return_state: bool,
    impl: str,
) -> AttentionOutput:
    """Attend with one new token, in Triton on NVIDIA GPUs, otherwise in torch."""
    choice = _step_choice(call, impl)
    index_k = None
    if index is not None:
        call, index_k = call._replace(index_q=pack_queries(index)), index.k
    query = call.with_selecting_queries().q
    after = add_token(state, call.k, call.v, query, call.options, call.selection, index_k)
    blocks, kept = after.summary.shape[2], min(call.options.top_k, after.summary.shape[2])
    in_triton = choice is not None and choice.impl == "triton"
    sorted_in_torch = sorting_reason(call, kept) if in_triton else ""
    run = triton_step if in_triton and not sorted_in_torch else torch_step
    out = run(call, after).to(call.v.dtype)
    text = f"one new token scores {blocks} blocks and reads at most {kept} of them"
    if choice is not None:
        text += f"; {sorted_in_torch or f'{choice.impl}: {choice.reason}'}"
    return AttentionOutput(out, after if return_state else None, impl=ImplChoice("step", text))


def _step_choice(call: SparseCall, impl: str) -> ImplChoice | None:
    """Return what computes one new token, if the kernels are a choice."""
    if impl not in ("auto", "triton"):
        return None
    if impl == "auto" and call.q.device.type == "cpu":  # the interpreter runs on one thread only
        return None
    table = tuple(x for x in IMPLEMENTATIONS if x.name in ("triton", "torch"))
    return select("block_sparse_attention", table, call, impl)[1]
