"""Launch the Triton kernels that select key blocks.

Other letters: M query blocks, N key blocks, K selected blocks, A heads with a selection of their
own, Z numbers per summary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from attnzoo.ops.block_sparse.triton.launch import KernelOptions
from attnzoo.ops.block_sparse.triton.selection import (
    pool_kernel,
    select_kernel,
    summary_kernel,
)
from attnzoo.runtime.triton_products import (
    block_size,
    contiguous_rows,
    device_context,
    operand_precision,
)

TILE_BLOCKS = 64  # key blocks that are scored at a time
TILE_ROWS = 32  # query blocks times heads of a program
TILE_RANKS = 4096  # rows times blocks of a tile; a rank takes 8 bytes
TILE_SUMS = 4096  # elements of summaries, or of pooled queries, per program


class SelectionLauncher:
    """Launches the kernels that select the blocks of a call, whose rows are aligned at their ends.

    Args:
        q: Queries, ``[B, H, T, D]``; of an indexer, ``[B, I, T, P + 1]``.
        k: Keys, ``[B, Hkv, S, D]``.
        summary: ``[B, Hkv or 1, N, Z]``, float32; ``None`` computes it.
        lengths: Real keys of each row, ``[B]``; ``None`` means S.
        counts: Real queries of each row, ``[B]``; ``None`` means T.
        leader: As in ``SparseCall``.
        options: Sizes.
        query_blocks: M.
        top_k: Maximum number of selected blocks.
        score: ``"mean"``, ``"moments"``, ``"bounds"`` or ``"indexer"``.
        coverage: Share of the estimated weight to cover; ``None`` selects ``top_k`` blocks.
        per_key_head: Whether the query heads of a key head share a selection.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        summary: Tensor | None,
        lengths: Tensor | None,
        counts: Tensor | None,
        leader: Tensor | None,
        options: KernelOptions,
        *,
        query_blocks: int,
        top_k: int,
        score: str,
        coverage: float | None,
        per_key_head: bool,
    ) -> None:
        self.options, self.score, self.coverage = options, score, coverage
        self.indexed, self.q, self.k = score == "indexer", contiguous_rows(q), k
        self.summary, self.leader = summary, leader
        self.batch, self.heads, self.tokens, self.size = self.q.shape
        self.size -= self.indexed  # the last number is a weight
        self.key_heads, self.keys = (1 if self.indexed else k.shape[1]), k.shape[2]
        self.lists = self.key_heads if per_key_head or self.indexed else self.heads
        self.query_blocks, self.blocks = query_blocks, options.num_blocks
        self.kept = min(top_k, self.blocks)
        self.precision = operand_precision(q, k)[1]
        unused = self.q.new_empty(1, dtype=torch.int64)
        self.ragged = (unused, unused)
        if lengths is not None:
            full = torch.full_like(lengths, self.tokens)
            self.ragged = (lengths, full if counts is None else counts)
        self.sizes: dict[str, Any] = {
            "tokens": self.tokens,
            "keys": self.keys,
            "BLOCK": options.block_size,
            "RAGGED": lengths is not None,
        }

    def select(self) -> Tensor:
        """Return the selected blocks, ``[B, A, M, K]`` int32; see :func:`select_blocks`."""
        shape = (self.batch, self.lists, self.query_blocks, self.kept)
        selected = torch.empty(shape, dtype=torch.int32, device=self.q.device)
        if selected.numel() == 0:
            return selected
        summary = self.summarize() if self.summary is None else self.summary.contiguous()
        queries, options, coverage = self.pool(), self.options, self.coverage
        sorted_blocks = max(2, triton.next_power_of_2(self.kept))  # KP
        wide = block_size(self.size) > 128
        columns = min(TILE_BLOCKS >> wide, block_size(self.blocks))
        columns, lists_per_key_head = max(columns, sorted_blocks), self.lists // self.key_heads
        rows = min(
            TILE_ROWS >> wide,
            TILE_RANKS // columns,
            block_size(self.query_blocks * lists_per_key_head),
        )
        tiles = -(-self.query_blocks * lists_per_key_head // rows)
        with device_context(self.q.device):
            select_kernel[(self.batch * self.key_heads * tiles,)](
                queries, summary, *self.ragged, selected, *queries.stride()[:3], **self.sizes,
                query_blocks=self.query_blocks, blocks=self.blocks, kept=self.kept,
                window=options.window, num_sinks=options.num_sinks,
                scale=1.0 if self.indexed else options.scale,
                coverage=0.0 if coverage is None else coverage, key_heads=self.key_heads,
                F=lists_per_key_head, HEADS=self.heads if self.indexed else 1,
                Q=options.query_block, D=self.size, BD=block_size(self.size), BM=rows, BN=columns,
                KP=sorted_blocks, SCORE=self.score, COVERAGE=coverage is not None,
                CAUSAL=options.causal, PRECISION=self.precision,
                num_warps=8 if columns > TILE_BLOCKS else 4, num_stages=1,
            )  # fmt: skip
        return selected

    def summarize(self) -> Tensor:
        """Return the summary of each block, ``[B, Hkv, N, Z]``, as :func:`summarize` does."""
        k, score = contiguous_rows(self.k), self.score
        size, numbers = k.shape[3], k.shape[3] * (1 if score == "mean" else 2)
        shape = (self.batch, self.key_heads, self.blocks, numbers)
        summary = torch.empty(shape, dtype=torch.float32, device=k.device)
        rows = max(1, TILE_SUMS // block_size(size) // 4)
        tiles = -(-self.blocks // rows)
        with device_context(k.device):
            summary_kernel[(self.batch * self.key_heads * tiles,)](
                k, *self.ragged, summary, *k.stride()[:3], **self.sizes, blocks=self.blocks,
                key_heads=self.key_heads, D=size, BD=block_size(size), BN=rows, SCORE=score,
                num_warps=4,
            )  # fmt: skip
        return summary

    def pool(self) -> Tensor:
        """Return the query of each query block, ``[B, A, M, D]``, as :func:`pool_queries` does.

        With an indexer, these are the queries of its heads.
        """
        size = self.options.query_block
        lists = self.heads if self.indexed else self.lists
        shared = self.heads // lists
        if size == 1 and shared == 1:
            return self.q
        width, leader = self.q.shape[3], self.leader
        pooled = self.q.new_empty(self.batch, lists, self.query_blocks, width, dtype=torch.float32)
        has_leader = size > 1 and leader is not None and leader.shape[2] > 0
        rows = max(1, TILE_SUMS // block_size(width) // 4)
        tiles = -(-self.query_blocks // rows)
        sizes = {name: x for name, x in self.sizes.items() if name != "BLOCK"}
        with device_context(self.q.device):
            pool_kernel[(self.batch * lists * tiles,)](
                self.q, leader.contiguous() if has_leader else self.q, *self.ragged, pooled,
                *self.q.stride()[:3], **sizes, query_blocks=self.query_blocks, lists=lists,
                Y=shared, Q=size, D=width, BD=block_size(width), BM=rows,
                CAUSAL=self.options.causal, LEADER=has_leader, num_warps=4,
            )  # fmt: skip
        return pooled
