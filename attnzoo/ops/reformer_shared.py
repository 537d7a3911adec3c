r"""Reformer's own rounds: shared queries and keys, sorted by bucket, in chunks that look one back.

Each round rotates queries and keys at random; the largest of the rotated coordinates and their
negatives names the bucket. Tokens are sorted by bucket, then position, and cut into chunks. A query
sees the keys of its own chunk and of the chunk before it; the first chunk of a round looks back to
the last of the round before, as in the paper's code. Neither its own key nor later ones nor padding
are seen. A key that is met in several rounds counts in each.

Time O(T rounds (chunk D + D sqrt(buckets))). Source: Kitaev et al., 2020, arXiv:2001.04451, and
its code in trax; hashing from Andoni et al., 2015, arXiv:1509.02897.
Letters: U key heads at hand, G query heads that share one, T tokens, R rounds, N chunks,
C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.reformer_blocks import Plan, Step, stretches
from attnzoo.ops.reformer_rule import named_generator

STEP = 2**18  # scores of a step: small enough for the cache of a core


def bucket_factors(length: int, chunk: int) -> tuple[int, ...]:
    """Return how many buckets suit a length, about two for a chunk; many as a product of two."""
    power = max((2 * (length // chunk)).bit_length() - 1, 1)
    if 2**power <= 2 * max(chunk, 8):
        return (2**power,)
    return (2 ** (power // 2), 2 ** (power - power // 2))


def draw_rotations(
    heads: int, size: int, rounds: int, factors: Sequence[int], seed: tuple[int, ...]
) -> Tensor:
    """Draw the rotations of all rounds, ``[heads, D, R, sum(factors) / 2]``."""
    return torch.randn(heads, size, rounds, sum(factors) // 2, generator=named_generator(*seed))


def rotation_buckets(x: Tensor, rotations: Tensor, factors: Sequence[int]) -> Tensor:
    """Return the bucket of each vector in each round, ``[U, R, T]``.

    Args:
        x: ``[U, T, D]``; its length does not matter.
        rotations: ``[U, D, R, sum(factors) / 2]``.
        factors: Their product is the number of buckets.
    """
    rounds, length = rotations.shape[2], x.shape[1]
    out = torch.zeros(len(x), rounds, length, dtype=torch.long, device=x.device)
    flat = rotations.flatten(2).mT
    step = max(1, STEP // (len(x) * flat.shape[1]))
    for part, into in zip(x.split(step, 1), out.split(step, 2), strict=True):
        rotated = torch.bmm(flat, part.mT).unflatten(1, (rounds, -1))  # [U, R, F, tokens]
        product = 1
        rows = rotated.split([factor // 2 for factor in factors], 2)
        for factor, its_rows in zip(factors, rows, strict=True):
            into += product * _largest(its_rows)
            product *= factor
    return out


def _largest(x: Tensor) -> Tensor:
    """Return the place of the largest of F rows and, behind them, their negatives, ``[U, R, T]``.

    The first of several; asking for places straight away would take several times as long.
    """
    size, count = x.abs(), x.shape[2]
    largest = size == size.amax(2, keepdim=True)
    rows = torch.arange(2 * count, count, -1, dtype=x.dtype, device=x.device)[:, None]
    from_behind = (rows - count * (x < 0)) * largest
    return 2 * count - from_behind.amax(2).long()


def chunk_steps(
    q: Tensor, k: Tensor, rotations: Tensor, factors: Sequence[int], *, chunk: int, causal: bool
) -> Plan:
    """Sort into buckets, cut into chunks, and say who sees whom, round by round.

    Args:
        q: Queries, ``[U, G, T, D]``.
        k: Keys, ``[U, T, D]``.
        rotations: ``[U, D, R, sum(factors) / 2]``.
        factors: Numbers of buckets.
        chunk: C, in tokens.
        causal: Whether a query sees no key after its own position.
    """
    units, groups, length, _ = q.shape
    alone = length <= chunk  # one chunk for all: every round would see the same
    rounds = 1 if alone else rotations.shape[2]
    key_order = _sorted(rotation_buckets(k, rotations[:, :, :rounds], factors))
    query_order = key_order
    if not same_memory(q.flatten(0, 1), k):
        turned = rotations[:, :, :rounds].repeat_interleave(groups, 0)
        query_order = _sorted(rotation_buckets(q.flatten(0, 1), turned, factors))
    none = units * groups * length
    queries = _chunks(query_order, chunk, length)  # [U G, R, N, C]; the length where there is none
    keys = _chunks(key_order, chunk, length).flatten(2)
    if not alone:  # chunk 0 of a round looks back to the last of the round before
        keys = torch.cat([keys[..., -chunk:].roll(1, 1), keys], -1)
    heads = torch.arange(units * groups, device=q.device)[:, None, None]
    keys = keys.repeat_interleave(groups, 0)
    rows = torch.where(queries < length, queries + heads[..., None] * length, none)
    beside = keys.clamp_max(length - 1) + heads // groups * length
    reach = chunk if alone else 2 * chunk
    most = STEP // (chunk * reach)

    def found() -> Iterator[Step]:
        for r in range(rounds):
            for some, blocks in stretches(units * groups, queries.shape[2], most):
                at = queries[some, r, blocks].flatten(0, 1)
                stretch = slice(blocks.start * chunk, (blocks.stop - 1) * chunk + reach)
                seen = keys[some, r, stretch].unfold(1, reach, chunk).flatten(0, 1)
                away = _away(at.float(), seen.float(), length, causal=causal)
                yield Step(rows[some, r, blocks].flatten(0, 1), beside[some, r, stretch], away, r)

    return Plan(rounds * rows[:, 0].numel(), rounds, found())


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are one, as where a model's keys are its queries."""
    return x.data_ptr() == y.data_ptr() and (x.shape, x.stride()) == (y.shape, y.stride())


def _sorted(buckets: Tensor) -> Tensor:
    """Return positions by bucket, and by position inside a bucket.

    All rows go into one sort of whole numbers, which is several times faster than one for each.
    """
    rows = buckets.flatten(0, 1)
    row = torch.arange(len(rows), device=rows.device)[:, None]
    order = (rows + row * (rows.amax() + 1)).flatten().sort(stable=True).indices
    return (order.view(rows.shape) - row * rows.shape[1]).view(buckets.shape)


def _chunks(order: Tensor, chunk: int, length: int) -> Tensor:
    """Cut ``[U, R, T]`` into chunks; what fills the last one up stands at position T."""
    more = -length % chunk
    chunks: Tensor = F.pad(order, (0, more), value=length).unflatten(-1, (-1, chunk))
    return chunks


def _away(queries: Tensor, keys: Tensor, length: int, *, causal: bool) -> Tensor:
    """Mark a query's own key, and what it must not see, ``[n, W, C]``, by positions."""
    queries, keys = queries[:, None, :], keys[:, :, None]
    if causal:  # half a place at least; what fills up the last chunk is ahead of all
        return (keys - (queries - 0.5)).clamp_min_(0)
    itself = (queries - keys).abs_().neg_().add_(1).clamp_min_(0)
    if length % queries.shape[2]:
        itself.add_((keys - (length - 1)).clamp_(0, 1))
    return itself
