r"""Attention to the keys that hashing brings together (Reformer), in both of its forms.

:func:`lsh_attention` is for models whose queries and keys differ, as pretrained ones do: softmax
over a window, the first tokens and, round by round, the keys whose bucket a query shares, under one
denominator in which no key counts twice (see :mod:`attnzoo.ops.reformer_asymmetric`).

:func:`shared_qk_attention` is the paper's, for models whose keys are their queries (see
:mod:`attnzoo.ops.reformer_shared`).

Source: Kitaev et al., 2020, arXiv:2001.04451; Daras et al., 2020, arXiv:2010.05315.
Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.errors import UnsupportedError, did_you_mean
from attnzoo.ops.reformer_cpp import CompiledShare, why_not
from attnzoo.ops.reformer_parts import KEYS, QUERIES, Hashing, Segments, Share, as_rows, parts
from attnzoo.ops.reformer_rule import Rule
from attnzoo.ops.room import room
from attnzoo.ops.softmax import softmax_attention

IMPLS = ("reference", "torch", "cpp")


def lsh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rounds: int = 8,
    chunk_size: int = 64,
    num_buckets: int | None = None,
    window: int = 32,
    first_tokens: int = 4,
    causal: bool = True,
    segments: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    seed: int | Tensor = 0,
    impl: str = "auto",
) -> Tensor:
    r"""Attend to a window, the first tokens, and the keys that share a bucket in one of the rounds.

    Time :math:`O(T (r c + w) D)` and what finding buckets takes, memory O(T); the backward pass
    keeps inputs and output. Sequences so short that the rounds would meet most keys anyway are
    attended to in full, and so are the first queries of a long causal one. No later token changes
    a bit of what an earlier one gets. One query at the end of S keys meets what it would meet in a
    whole pass; to find it, all keys are hashed, which costs more than attending to them all.

    Args:
        q: Queries, ``[B, H, T, D]``; the last T positions of a causal sequence.
        k: Keys, ``[B, Hkv, S, D]``.
        v: Values, ``[B, Hkv, S, E]``.
        rounds: r, how often keys are hashed.
        chunk_size: c, how many keys a query meets in a round at most.
        num_buckets: Buckets of a round; ``None`` has them grow with the position of the query.
        window: w; a causal query sees the w latest keys, its own included, another w on each side.
        first_tokens: How many keys at the beginning are seen by all.
        causal: Whether a query sees only keys up to its own position.
        segments: Which sequence each query ``[B, T]`` and each key ``[B, S]`` belongs to, by number
            within its row, where it sees no other; what has a negative one is never looked at, and
            such queries get zeros.
        scale: Multiplies the products; ``None`` means ``D ** -0.5``.
        bias: Added to the scores, broadcastable to ``[B, H, T, S]``, and read where a query meets a
            key; whom it meets does not depend on it.
        seed: Decides which keys are drawn as pivots; a tensor of integers is read when it runs.
        impl: ``"torch"`` works block by block; ``"reference"`` writes the whole matrix out;
            ``"auto"`` takes the block form.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``.

    Raises:
        UnsupportedError: There is no such ``impl``, or queries and keys do not go together.
    """
    if q.shape[2] > k.shape[2] or (q.shape[2] < k.shape[2] and not causal):
        raise UnsupportedError(
            f"{q.shape[2]} queries and {k.shape[2]} keys are given (fewer queries than keys go "
            "with causal=True, where they are the last of the sequence; else as many are needed)"
        )
    rule = Rule(False, causal, rounds, chunk_size, num_buckets or 0, window, first_tokens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _attend(q, k, v, segments, None, _named(seed), [], scale, rule, impl, bias)


def shared_qk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rounds: int = 4,
    chunk_size: int = 64,
    num_buckets: int | Sequence[int] | None = None,
    causal: bool = True,
    segments: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    seed: int | Tensor = 0,
    rotations: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""Attend as Reformer does: to unit keys, sorted into chunks of like ones round by round.

    The score is :math:`q \cdot k / |k|`, without a scale. A query sees its own key only where it
    sees no other. Which keys share a chunk depends on all tokens, as in the paper, though no query
    sees a later one. Time :math:`O(T r c D)`, memory O(T); the backward pass keeps inputs and
    output.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``: the queries, in models that share them.
        v: Values, ``[B, Hkv, T, E]``.
        rounds: r, how often tokens are hashed.
        chunk_size: c, in tokens; a query sees its own chunk and the one before.
        num_buckets: Buckets of a round, even, or factors of them; ``None`` has about two for each
            chunk.
        causal: Whether a query sees only keys up to its own position.
        segments: As in :func:`lsh_attention`.
        bias: As in :func:`lsh_attention`.
        seed: Decides the rotations; a tensor of integers is read when it runs.
        rotations: ``[Hkv, D, r, num_buckets / 2]``, in place of drawn ones.
        impl: As in :func:`lsh_attention`.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``.

    Raises:
        UnsupportedError: There is no such ``impl``, or queries and keys do not go together.
    """
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"{q.shape[2]} queries and {k.shape[2]} keys are given (each token has one of both; "
            "to go on from earlier keys, the whole sequence is needed)"
        )
    given = num_buckets if isinstance(num_buckets, Sequence) else [num_buckets or 0]
    factors = [factor for factor in given if factor]
    rule = Rule(True, causal, rounds, chunk_size)
    return _attend(q, k, v, segments, rotations, _named(seed), factors, 1.0, rule, impl, bias)


def _named(seed: int | Tensor) -> Tensor:
    return seed.flatten() if isinstance(seed, Tensor) else torch.tensor([seed], device="cpu")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: tuple[Tensor, Tensor] | None,
    rotations: Tensor | None,
    seed: Tensor,
    factors: list[int],
    scale: float,
    rule: Rule,
    impl: str,
    bias: Tensor | None,
) -> Tensor:
    """Run an impl by name."""
    whom = (*(segments or (None, None)), rotations, seed, factors, list(map(int, rule)))
    impl, _ = choose_impl(impl, q, rule.shared, bias)
    if impl != "reference":
        return cast(Tensor, lsh_blocks(q, k, v, scale, *whom, bias, impl)[0])
    met = lsh_meetings(q.detach(), k.detach(), *whom)
    times = met.clamp_min(1).to(torch.promote_types(q.dtype, torch.float32)).log()
    bias = times if bias is None else times + bias
    if rule.shared:
        wide = k.to(times.dtype)
        k = wide / (wide.square().sum(-1, keepdim=True) + 1e-6 * k.shape[3]).sqrt()
    return softmax_attention(q, k, v, scale=scale, mask=met > 0, bias=bias).out


def choose_impl(impl: str, q: Tensor, shared: bool, bias: Tensor | None) -> tuple[str, str]:
    """Return who computes attention, and why.

    Args:
        impl: One of ``IMPLS``, or ``"auto"``, which takes the fastest that can.
        q: Queries.
        shared: Whether they are the keys.
        bias: Added to the scores.

    Raises:
        UnsupportedError: There is no such impl, or the one that is named cannot run.
    """
    if impl not in ("auto", *IMPLS):
        raise UnsupportedError(
            f"Reformer's attention has no impl {impl!r}.{did_you_mean(impl, IMPLS)} "
            f"It has auto, {', '.join(IMPLS)}."
        )
    reason = why_not(q, shared, bias) if impl in ("auto", "cpp") else ""
    if impl == "cpp" and reason:
        raise UnsupportedError(f"impl='cpp' cannot run: {reason}. impl='torch' can.")
    if impl == "auto":
        return ("torch", f"not cpp: {reason}") if reason else ("cpp", "compiled for this CPU")
    return impl, "named in the options"


# -- operators, so that torch.compile sees one call each -------------------------------------------


def unrounded(device: torch.device) -> torch.autocast:
    """Return a context where autocast leaves products as they are: a part has one dtype."""
    return torch.autocast(device.type, enabled=False)


def by_tokens(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return an empty ``[B, H, T, size]``, token after token, as the layers around it want it."""
    batch, heads, length, _ = like.shape
    return room(like, (batch, length, heads, size), dtype).transpose(1, 2)


@torch.library.custom_op("attnzoo::lsh_blocks", mutates_args=())
def lsh_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    rotations: Tensor | None,
    seed: Tensor,
    factors: list[int],
    rule: list[int],
    bias: Tensor | None = None,
    impl: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and what :class:`Sums` calls lse, ``[B, H, T, 1]``."""
    hashing = Hashing(Rule.read(rule), tuple(seed.tolist()), rotations, factors)
    segments = Segments.of(query_segments, key_segments)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = by_tokens(q, v.shape[3], wide)
    lse = q.new_zeros(*q.shape[:3], 1, dtype=wide)
    if segments is not None:  # padding belongs to no part
        out.zero_()
    take = CompiledShare.of if impl == "cpp" else Share.of
    with unrounded(q.device):
        for part in parts(q, k, segments, hashing.rule):
            sums = take(part, hashing, q, k, v, scale, bias).attend()
            part.put(sums.out, out)
            part.put(sums.lse, lse)
    return out.to(v.dtype), lse


@torch.library.custom_op("attnzoo::lsh_blocks_backward", mutates_args=())
def lsh_blocks_backward(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    rotations: Tensor | None,
    seed: Tensor,
    factors: list[int],
    rule: list[int],
    bias: Tensor | None,
    impl: str,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and bias, if asked; who meets whom is found again."""
    hashing = Hashing(Rule.read(rule), tuple(seed.tolist()), rotations, factors)
    segments = Segments.of(query_segments, key_segments)
    dq, dk, dv = (by_tokens(x, x.shape[3], lse.dtype).zero_() for x in (q, k, v))
    d_bias = bias.new_zeros(bias.numel(), dtype=lse.dtype) if bias is not None and of_bias else None
    delta = (d_out.to(lse.dtype) * out).sum(-1, keepdim=True)
    take = CompiledShare.of if impl == "cpp" else Share.of
    with unrounded(q.device):
        for part in parts(q, k, segments, hashing.rule):
            d_rows, sums, log = (as_rows(part.take(x, QUERIES)) for x in (d_out, delta, lse))
            share = take(part, hashing, q, k, v, scale, bias)
            gradients = share.backward(d_rows, sums, log, d_bias)
            part.put(gradients[0], dq)
            part.add(gradients[1], dk)
            part.add(gradients[2], dv)
    to_bias = q.new_empty(0)
    if bias is not None and d_bias is not None:
        to_bias = d_bias.to(bias.dtype).view(bias.shape)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), to_bias


@torch.library.custom_op("attnzoo::lsh_meetings", mutates_args=())
def lsh_meetings(
    q: Tensor,
    k: Tensor,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    rotations: Tensor | None,
    seed: Tensor,
    factors: list[int],
    rule: list[int],
) -> Tensor:
    """Return how often each query meets each key, ``[B, H, T, S]``: quadratic."""
    hashing = Hashing(Rule.read(rule), tuple(seed.tolist()), rotations, factors)
    segments = Segments.of(query_segments, key_segments)
    met = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.long, device=q.device)
    for part in parts(q, k, segments, hashing.rule):
        queries, keys = part.take(q, QUERIES), part.take(k, KEYS)[:, 0]
        units, groups, length, _ = queries.shape
        counts = met.new_zeros(units * groups * length + 1, keys.shape[1])
        with unrounded(q.device):
            found = list(hashing.plan(part, queries, keys).steps)
        for step in found:
            at = step.windows(step.keys.flatten() % keys.shape[1])[:, :, None].expand_as(step.away)
            rows = step.queries[:, None].expand_as(step.away)
            counts.index_put_((rows, at), (step.away == 0).long(), accumulate=True)
        counts = counts[:-1].view(units, groups, length, -1)
        if hashing.rule.shared:  # who meets no other key sees its own
            counts += torch.eye(length, device=q.device).long() * (counts.sum(-1, True) == 0)
        whole = met.new_zeros(*counts.shape[:3], k.shape[2])
        part.put(whole.scatter_(3, part.key_places(q.device).expand_as(counts), counts), met)
    return met


def _shaped(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return what :func:`by_tokens` does, of no memory."""
    batch, heads, length, _ = like.shape
    return like.new_empty(batch, length, heads, size, dtype=dtype).transpose(1, 2)


@lsh_blocks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return _shaped(q, v.shape[3], v.dtype), q.new_empty(*q.shape[:3], 1, dtype=wide)


@lsh_blocks_backward.register_fake
def _(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_shaped(x, x.shape[3], x.dtype) for x in (q, k, v))
    bias, _, of_bias = options[-3:]
    return dq, dk, dv, bias.new_empty(bias.shape) if of_bias else q.new_empty(0)


@lsh_meetings.register_fake
def _(q: Tensor, k: Tensor, *options: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], k.shape[2], dtype=torch.long)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, query_segments, key_segments, rotations, seed, *ctx.options = inputs[:-2]
    bias, ctx.impl = inputs[-2:]
    ctx.of_bias = bias is not None and bias.requires_grad
    ctx.save_for_backward(q, k, v, bias, query_segments, key_segments, rotations, seed, *output)


def _backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, bias, *whom, out, lse = ctx.saved_tensors
    options = (ctx.scale, *whom, *ctx.options, bias, ctx.impl, ctx.of_bias)
    *gradients, to_bias = lsh_blocks_backward(d_out, out, lse, q, k, v, *options)
    rest = [None] * (1 + len(whom) + len(ctx.options))
    return (*gradients, *rest, to_bias if ctx.of_bias else None, None)


lsh_blocks.register_autograd(_backward, setup_context=_keep)
