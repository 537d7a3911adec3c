"""Work items of LSH attention: sequences of one length, one level of queries, some key heads.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size;
of a work item: U key heads over all its sequences, G query heads per key head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnzoo.ops.lsh.block_softmax import HIDDEN, PairBias
from attnzoo.ops.lsh.options import LSHInputs
from attnzoo.ops.lsh.voronoi_hashing import Level, split_levels
from attnzoo.runtime.kernel_calls import empty_huge_pages

MAX_KEY_ELEMENTS = 2**20  # of a work item, per thread
QUERIES, KEYS = True, False


class WorkItemTensors(Protocol):
    """Tensors of one work item; the implementations differ in this class."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output and base-2 log-sum-exp of the work item's queries, ``[U G T, ...]``."""

    def backward(
        self, d_out: Tensor, delta: Tensor, lse: Tensor, d_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values; add that of the bias to ``d_bias``.

        ``d_out``, ``delta`` and ``lse`` have the padding row of :func:`to_rows`; ``d_out`` is
        overwritten.
        """


class EqualLengthSequences(NamedTuple):
    """Token indices of packed or padded sequences that have equal lengths."""

    batch: Tensor  # [sequences, 1]: batch row of each sequence
    queries: Tensor  # [sequences, T]: indices in that row, the last of the sequence
    keys: Tensor  # [sequences, S]


class WorkItem(NamedTuple):
    """Sequences of one length, a level of their queries with its keys, and a range of key heads."""

    sequences: EqualLengthSequences | None  # None: every row is one sequence
    heads: slice  # of the key heads
    key_heads: int  # Hkv
    level: Level
    offset: int  # position of the first query of the call
    dtype: torch.dtype  # of the computation

    def gather(self, x: Tensor, queries: bool) -> Tensor:
        """Return the work item's queries or keys of ``[B, H, T, D]``, as ``[U, G, T, D]``."""
        return self._gather(x, queries).to(self.dtype)

    def _gather(self, x: Tensor, queries: bool) -> Tensor:
        own = self._tokens_first(x)[self._index(queries)]
        return own.permute(0, 2, 3, 1, 4).flatten(0, 1)

    def pair_bias(self, bias: Tensor, q: Tensor, k: Tensor) -> PairBias:
        """Return the work item's view of a contiguous bias broadcastable to ``[B, H, T, S]``."""
        shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
        sizes = (*q.shape[:3], k.shape[2])
        strides = [math.prod(shape[i + 1 :]) * (shape[i] > 1) for i in range(4)]
        row, head, query, key = (
            stride * torch.arange(size, device=bias.device)
            for stride, size in zip(strides, sizes, strict=True)
        )
        queries = row[:, None, None] + head[:, None] + query
        keys = key.expand(*k.shape[:2], -1)
        return PairBias(
            bias.flatten().to(self.dtype).clamp_min(HIDDEN),
            to_rows(self._gather(queries[..., None], QUERIES)).flatten(),
            self._gather(keys[..., None], KEYS).flatten(),
        )

    def scatter(self, rows: Tensor, out: Tensor) -> None:
        """Write query rows ``[U G T, D]`` to ``[B, H, T, D]``; work items do not overlap."""
        by_token, index = self._tokens_first(out), self._index(QUERIES)
        by_token[index] = self._from_rows(rows, by_token[index].shape)

    def scatter_add(self, rows: Tensor, out: Tensor) -> None:
        """Add key rows ``[U S, D]`` to ``[B, Hkv, S, D]``."""
        by_token, index = self._tokens_first(out), self._index(KEYS)
        values = self._from_rows(rows, by_token[index].shape)
        if self.sequences is None:
            by_token[index].add_(values)
        else:
            by_token[index] = by_token[index] + values

    def _from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        batch, tokens, heads, groups, size = shape
        return rows.view(batch, heads, groups, tokens, size).permute(0, 3, 1, 2, 4)

    def _tokens_first(self, x: Tensor) -> Tensor:
        """View ``[B, H, T, D]`` as ``[B, T, heads, G, D]``."""
        heads: Tensor = x.unflatten(1, (self.key_heads, -1))[:, self.heads]
        return heads.permute(0, 3, 1, 2, 4)

    def _index(self, queries: bool) -> tuple[slice | Tensor, slice | Tensor]:
        """Return the indices of batch rows and tokens."""
        begin, end = self.level.begin - self.offset, self.level.end - self.offset
        tokens = slice(begin, end) if queries else slice(self.level.keys)
        if self.sequences is None:
            return slice(None), tokens
        indices = self.sequences.queries if queries else self.sequences.keys
        return self.sequences.batch, indices[:, tokens]


def _group_by_length(query_ids: Tensor, key_ids: Tensor) -> Iterator[EqualLengthSequences]:
    """Yield all sequences that have queries, those of equal length together.

    Args:
        query_ids: Number of each query's sequence within its row, ``[B, T]``; negative at padding.
        key_ids: The same for keys, ``[B, S]``.
    """
    groups: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = {}
    for row, (queries, keys) in enumerate(zip(query_ids, key_ids, strict=True)):
        for number in queries[queries >= 0].unique().tolist():
            its_queries, its_keys = ((x == number).nonzero()[:, 0] for x in (queries, keys))
            group = groups.setdefault((len(its_keys), len(its_queries)), [])
            group.append((row, its_queries, its_keys))
    for _, group in sorted(groups.items()):
        rows, queries, keys = zip(*group, strict=True)
        batch = torch.tensor(rows, device=key_ids.device)[:, None]
        yield EqualLengthSequences(batch, torch.stack(queries), torch.stack(keys))


def split_work(inputs: LSHInputs) -> Iterator[WorkItem]:
    """Yield the work items of a call."""
    q, k, options = inputs.q, inputs.k, inputs.options
    parts: Iterable[EqualLengthSequences | None] = [None] if q.numel() else []
    if inputs.query_segments is not None and inputs.key_segments is not None:
        parts = _group_by_length(inputs.query_segments, inputs.key_segments)
    dtype, threads = torch.promote_types(q.dtype, torch.float32), torch.get_num_threads()
    for sequences in parts:
        count, length, queries = k.shape[0], k.shape[2], q.shape[2]
        if sequences is not None:
            (count, length), queries = sequences.keys.shape, sequences.queries.shape[1]
        for level in split_levels(options, length - queries, length):
            step = max(1, threads * MAX_KEY_ELEMENTS // (count * level.keys * k.shape[3]))
            for head in range(0, k.shape[1], step):
                heads = slice(head, min(head + step, k.shape[1]))
                yield WorkItem(sequences, heads, k.shape[1], level, length - queries, dtype)


def to_rows(x: Tensor) -> Tensor:
    """Return ``[U, G, T, D]`` as rows ``[U G T + 1, D]``; the last row, zeros, pads blocks."""
    size = x.shape[-1]
    rows = empty_huge_pages(x, (x.numel() // size + 1, size))
    rows[:-1].view(x.shape).copy_(x)
    rows[-1] = 0
    return rows
