r"""Attention by locality-sensitive hashing (Reformer), in two forms.

:func:`lsh_attention` is for models whose queries and keys differ, as in pretrained models: softmax
over a window, the first tokens and, in each hash round, keys of the query's bucket, under one
denominator in which no key counts twice
(see :mod:`attnzoo.ops.lsh.voronoi_hashing`).

:func:`shared_qk_attention` is the form of the paper, for models whose keys are their queries (see
:mod:`attnzoo.ops.lsh.shared_qk_plan`).

Source: Kitaev et al., 2020, arXiv:2001.04451; Daras et al., 2020, arXiv:2010.05315.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnzoo.contract.implementation import Implementation, register_implementation, select
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput
from attnzoo.ops.lsh.cpu.lsh import cpp_reasons
from attnzoo.ops.lsh.custom_ops import run_cpp, run_torch
from attnzoo.ops.lsh.options import LSHInputs, LSHOptions
from attnzoo.ops.lsh.reference import reference_attention
from attnzoo.ops.lsh.validation import check_inputs, check_options
from attnzoo.runtime.cpp import prebuilt

register_implementation(
    Implementation(
        op="lsh_attention",
        name="cpp",
        devices=("cpu",),
        run=run_cpp,
        reasons=cpp_reasons,
        automatic=prebuilt.origin(),
    ),
    *(
        each
        for op in ("lsh_attention", "shared_qk_attention")
        for each in (
            Implementation(
                op=op,
                name="torch",
                run=run_torch,
                automatic="block by block, on every device",
            ),
            Implementation(op=op, name="reference", run=reference_attention),
        )
    ),
)


def lsh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask | None = None,
    num_hashes: int = 8,
    chunk_size: int = 64,
    num_buckets: int | None = None,
    window: int = 32,
    first_tokens: int = 4,
    scale: float | None = None,
    bias: Tensor | None = None,
    seed: int | Tensor = 0,
    impl: str = "auto",
) -> AttentionOutput:
    r"""Attend to a window, the first tokens, and keys that share a bucket in some hash round.

    Time :math:`O(T (R c + w) D)` plus the hashing, memory O(T); the backward pass saves inputs and
    output only. Sequences no longer than the most keys that a query can attend to get full
    attention, and so do as many first queries of a longer causal sequence. The contents of future
    tokens do not change a bit of a causal output. One query at the end of S keys attends to the
    same keys as in one pass over the sequence; this hashes all keys, which costs more than full
    attention of that query.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``.
        v: Values, ``[B, Hkv, S, E]``.
        mask: Causality, padding and segments; ``None`` means no mask. With a causal mask, query 0
            has position ``q_offset``, and keys after the last query's position are ignored;
            otherwise T equals S. Queries that are padding give zeros.
        num_hashes: R, the number of hash rounds.
        chunk_size: c, the most keys that a query attends to in one round.
        num_buckets: Buckets per round; ``None`` scales them with the position of the query.
        window: w; a causal query attends to the w latest keys, its own included, another query to w
            keys on each side.
        first_tokens: Number of leading keys that every query attends to.
        scale: Multiplies query-key products; ``None`` means ``D ** -0.5``.
        bias: Added to the scores, broadcastable to ``[B, H, T, S]``. It does not change which keys
            a query attends to; one whose bias is -inf, or in ``"torch"`` below -1e8, at all of them
            gives zeros.
        seed: Integer, or tensor of integers, from which pivots are drawn.
        impl: ``"torch"`` (block by block), ``"cpp"`` (on CPUs, without ``bias``), ``"reference"``
            (dense scores), or ``"auto"``, which selects the fastest that supports the call.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``, and ``impl``.

    Raises:
        UnsupportedError: Shapes or lengths disagree, the mask is not supported, or ``impl`` is
            unknown or does not support the call.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 8)
        >>> mask = attnzoo.AttentionMask(causal=True)
        >>> attnzoo.ops.lsh_attention(q, k, v, mask=mask, num_hashes=4).out.shape
        torch.Size([1, 4, 1000, 8])
    """
    mask = AttentionMask() if mask is None else mask
    check_inputs(q, k, v, mask, bias, shared_qk=False)
    options = LSHOptions(
        False, mask.causal, num_hashes, chunk_size, num_buckets or 0, window, first_tokens
    )
    check_options(options)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    segments = segment_ids(mask, q, k)
    inputs = LSHInputs(q, k, v, scale, *segments, None, _seed_tensor(seed), [], options, bias)
    implementation, choice = select("lsh_attention", inputs, impl)
    return AttentionOutput(implementation.run(inputs), impl=choice)


def shared_qk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask | None = None,
    num_hashes: int = 4,
    chunk_size: int = 64,
    num_buckets: int | Sequence[int] | None = None,
    bias: Tensor | None = None,
    seed: int | Tensor = 0,
    rotations: Tensor | None = None,
    impl: str = "auto",
) -> AttentionOutput:
    r"""Attend as in the Reformer paper: to unit keys in sorted chunks, in each hash round.

    The score is :math:`q \cdot k / |k|`, without a scale. A query attends to its own key only if it
    attends to no other. Even with a causal mask, all tokens determine which keys share a chunk, as
    in the paper. Time :math:`O(T R c D)`, memory O(T); the backward pass saves inputs and output
    only.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``: the queries, in models that share them.
        v: Values, ``[B, Hkv, T, E]``.
        mask: As in :func:`lsh_attention`.
        num_hashes: R, the number of hash rounds.
        chunk_size: c, in tokens; a query attends to its own chunk and the previous one.
        num_buckets: Buckets per round, an even number, or even factors of it; ``None`` means about
            two per chunk.
        bias: As in :func:`lsh_attention`.
        seed: Integer, or tensor of integers, from which rotations are drawn.
        rotations: ``[Hkv, D, R, num_buckets / 2]``, used instead of drawn ones; with factors, their
            sum takes the place of ``num_buckets``.
        impl: As in :func:`lsh_attention`, without ``"cpp"``.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``, and ``impl``.

    Raises:
        UnsupportedError: Shapes or lengths disagree, the mask is not supported, or ``impl`` is
            unknown or does not support the call.

    Example:
        >>> qk, v = torch.randn(2, 1, 4, 1024, 8)
        >>> mask = attnzoo.AttentionMask(causal=True)
        >>> attnzoo.ops.shared_qk_attention(qk, qk, v, mask=mask).out.shape
        torch.Size([1, 4, 1024, 8])
    """
    mask = AttentionMask() if mask is None else mask
    check_inputs(q, k, v, mask, bias, shared_qk=True)
    factors = num_buckets if isinstance(num_buckets, Sequence) else [num_buckets or 0]
    factors = [factor for factor in factors if factor]
    options = LSHOptions(True, mask.causal, num_hashes, chunk_size)
    check_options(options, factors)
    segments = segment_ids(mask, q, k)
    inputs = LSHInputs(
        q, k, v, 1.0, *segments, rotations, _seed_tensor(seed), factors, options, bias
    )
    implementation, choice = select("shared_qk_attention", inputs, impl)
    return AttentionOutput(implementation.run(inputs), impl=choice)


def segment_ids(mask: AttentionMask, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the segment ids of queries ``[B, T]`` and keys ``[B, S]``; -1 for padding.

    Two ``None`` if every row is one sequence, whose last positions are the queries.
    """
    (batch, _, size, _), length = k.shape, q.shape[2]
    offset = mask.q_offset if mask.causal else size - length
    queries_are_last = isinstance(offset, int) and offset == size - length
    if mask.padding is None and mask.segment_ids is None and queries_are_last:
        return None, None
    positions = torch.arange(size, device=k.device)
    valid = (positions < offset + length).expand(batch, size)  # a static cache has unwritten keys
    if mask.padding is not None:
        valid = valid & mask.padding
    ids = torch.zeros_like(positions) if mask.segment_ids is None else mask.segment_ids
    ids = torch.where(valid, ids, -1)
    return ids.index_select(1, positions[:length] + offset), ids


def _seed_tensor(seed: int | Tensor) -> Tensor:
    return seed.flatten() if isinstance(seed, Tensor) else torch.tensor([seed], device="cpu")
