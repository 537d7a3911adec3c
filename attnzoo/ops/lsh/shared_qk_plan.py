r"""The paper's form of LSH attention: tokens sorted by bucket and cut into chunks.

In each hash round a random rotation maps queries and keys to buckets: the index of the largest
rotated coordinate, negated coordinates included. Tokens are sorted by bucket, then by position, and
cut into chunks. A query attends to the keys of its own chunk and of the previous chunk; the first
chunk of a round attends to the last chunk of the previous round, as in the paper's code. The
query's own key, future keys (if causal) and padding are masked. A key that is attended to in
several rounds counts in each of them.

Time O(T rounds (chunk D + D sqrt(buckets))). Source: Kitaev et al., 2020, arXiv:2001.04451, and its
code in trax; hashing from Andoni et al., 2015, arXiv:1509.02897. Other letters: U key heads of a
work item, R hash rounds, N chunks, F sum of the bucket factors, n blocks, W keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.lsh.block_softmax import BlockBatch, BlockPlan, split_blocks
from attnzoo.ops.lsh.options import seeded_generator

MAX_SCORES = 2**18  # scores of a batch of blocks: small enough for the cache of a core


def default_bucket_factors(length: int, chunk_size: int) -> tuple[int, ...]:
    """Return factors of the default number of buckets: about two per chunk."""
    power = max((2 * (length // chunk_size)).bit_length() - 1, 1)
    if 2**power <= 2 * max(chunk_size, 8):
        return (2**power,)
    return (2 ** (power // 2), 2 ** (power - power // 2))


def draw_rotations(
    heads: int, size: int, rounds: int, factors: Sequence[int], seed: tuple[int, ...]
) -> Tensor:
    """Draw the rotations of all rounds, ``[heads, D, R, F / 2]``."""
    shape, generator = (heads, size, rounds, sum(factors) // 2), seeded_generator(*seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def rotation_buckets(x: Tensor, rotations: Tensor, factors: Sequence[int]) -> Tensor:
    """Return the bucket of each vector in each round, ``[U, R, T]``.

    Args:
        x: Vectors of any norm, ``[U, T, D]``.
        rotations: ``[U, D, R, F / 2]``.
        factors: Their product is the number of buckets.
    """
    rounds, length = rotations.shape[2], x.shape[1]
    out = torch.zeros(len(x), rounds, length, dtype=torch.long, device=x.device)
    matrices = rotations.flatten(2).mT
    step = max(1, MAX_SCORES // (len(x) * matrices.shape[1]))
    for tokens, buckets in zip(x.split(step, 1), out.split(step, 2), strict=True):
        rotated = torch.bmm(matrices, tokens.mT).unflatten(1, (rounds, -1))  # [U, R, F / 2, tokens]
        product = 1
        parts = rotated.split([factor // 2 for factor in factors], 2)
        for factor, part in zip(factors, parts, strict=True):
            buckets += product * _signed_argmax(part)
            product *= factor
    return out


def _signed_argmax(x: Tensor) -> Tensor:
    """Return ``cat([x, -x], 2).argmax(2)``, ``[U, R, T]``; the first index of equal maxima.

    Several times faster than ``argmax``.
    """
    size, count = x.abs(), x.shape[2]
    largest = size == size.amax(2, keepdim=True)
    reversed_index = torch.arange(2 * count, count, -1, dtype=x.dtype, device=x.device)[:, None]
    candidates = (reversed_index - count * (x < 0)) * largest
    return 2 * count - candidates.amax(2).long()


def plan_chunks(
    q: Tensor,
    k: Tensor,
    rotations: Tensor,
    factors: Sequence[int],
    *,
    chunk_size: int,
    causal: bool,
) -> BlockPlan:
    """Sort tokens by bucket and cut them into chunks, round by round.

    Args:
        q: Queries, ``[U, G, T, D]``.
        k: Keys, ``[U, T, D]``.
        rotations: ``[U, D, R, F / 2]``.
        factors: Factors of the number of buckets.
        chunk_size: C, in tokens.
        causal: Whether future keys are masked.
    """
    units, groups, length, _ = q.shape
    single_chunk = length <= chunk_size  # all rounds would be equal
    rounds = 1 if single_chunk else rotations.shape[2]
    key_order = _sort_by_bucket(rotation_buckets(k, rotations[:, :, :rounds], factors))
    query_order = key_order
    if not same_memory(q.flatten(0, 1), k):
        per_query_head = rotations[:, :, :rounds].repeat_interleave(groups, 0)
        query_order = _sort_by_bucket(rotation_buckets(q.flatten(0, 1), per_query_head, factors))
    padding_row = units * groups * length
    queries = _cut_chunks(query_order, chunk_size, length)  # [U G, R, N, C] positions; T if padding
    keys = _cut_chunks(key_order, chunk_size, length).flatten(2)
    if not single_chunk:  # chunk 0 of a round attends to the last chunk of the previous round
        keys = torch.cat([keys[..., -chunk_size:].roll(1, 1), keys], -1)
    heads = torch.arange(units * groups, device=q.device)[:, None, None]
    keys = keys.repeat_interleave(groups, 0)
    query_rows = torch.where(queries < length, queries + heads[..., None] * length, padding_row)
    key_rows = keys.clamp_max(length - 1) + heads // groups * length
    width = chunk_size if single_chunk else 2 * chunk_size
    max_blocks = MAX_SCORES // (chunk_size * width)

    def batches() -> Iterator[BlockBatch]:
        for r in range(rounds):
            for some, blocks in split_blocks(units * groups, queries.shape[2], max_blocks):
                query_positions = queries[some, r, blocks].flatten(0, 1)
                strip = slice(blocks.start * chunk_size, (blocks.stop - 1) * chunk_size + width)
                key_positions = keys[some, r, strip].unfold(1, width, chunk_size).flatten(0, 1)
                penalty = _penalty(
                    query_positions.float(), key_positions.float(), length, causal=causal
                )
                rows = query_rows[some, r, blocks].flatten(0, 1)
                yield BlockBatch(rows, key_rows[some, r, strip], penalty, r)

    return BlockPlan(rounds * query_rows[:, 0].numel(), rounds, batches())


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are views of the same elements, as where keys are the queries."""
    return x.data_ptr() == y.data_ptr() and (x.shape, x.stride()) == (y.shape, y.stride())


def _sort_by_bucket(buckets: Tensor) -> Tensor:
    """Return positions sorted by bucket, then by position.

    One sort of integers over all rows, which is several times faster than one sort per row.
    """
    rows = buckets.flatten(0, 1)
    row = torch.arange(len(rows), device=rows.device)[:, None]
    order = (rows + row * (rows.amax() + 1)).flatten().sort(stable=True).indices
    return (order.view(rows.shape) - row * rows.shape[1]).view(buckets.shape)


def _cut_chunks(order: Tensor, chunk_size: int, length: int) -> Tensor:
    """Cut ``[U, R, T]`` into chunks; the padding of the last chunk has position T."""
    padded = F.pad(order, (0, -length % chunk_size), value=length)
    chunks: Tensor = padded.unflatten(-1, (-1, chunk_size))
    return chunks


def _penalty(queries: Tensor, keys: Tensor, length: int, *, causal: bool) -> Tensor:
    """Return the penalty ``[n, W, C]`` of the query's own key, future keys and padding.

    Args:
        queries: Positions, ``[n, C]``.
        keys: Positions, ``[n, W]``.
        length: T; the position of padding.
        causal: Whether future keys are masked.
    """
    queries, keys = queries[:, None, :], keys[:, :, None]
    if causal:  # at least 1/2 from the query's own key on; padding comes after all positions
        return (keys - (queries - 0.5)).clamp_(0, 1)
    penalty = (queries - keys).abs_().neg_().add_(1).clamp_(0, 1)
    if length % queries.shape[2]:
        penalty.add_((keys - (length - 1)).clamp_(0, 1))
    return penalty
