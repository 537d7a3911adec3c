"""Launch the Triton kernels of block-sparse attention.

Other letters: N key blocks, M query blocks, K selected blocks, A heads with a selection of their
own, Y = H / A, Q queries of a query block, R = Q Y rows that share a selection.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnzoo.ops.block_sparse.triton.attend import attend_kernel
from attnzoo.ops.block_sparse.triton.key_gradient import (
    selection_gradient_kernel,
    sink_gradient_kernel,
    window_gradient_kernel,
)
from attnzoo.runtime.triton_products import (
    block_size,
    contiguous_rows,
    device_context,
    operand_precision,
)

LARGEST_TILE = 64  # rows or keys
TILE_ELEMENTS = {False: 8192, True: 2048}  # of a tile; the key is whether operands are float32
PART_ROWS = 1024  # rows that one program of a key gradient sums over
STAGES = 2


class KernelOptions(NamedTuple):
    """Sizes of a call; see ``SparseOptions``."""

    causal: bool
    window: int
    num_sinks: int
    block_size: int
    query_block: int
    num_blocks: int  # N; in the list of selected blocks, N or more marks an unused entry
    scale: float


def invert_selection(
    selected: Tensor, key_heads: int, num_blocks: int, pairs_per_item: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort selections ``[B, A, M, K]`` by key block, and split them into items of limited size.

    The sizes of the results depend on shapes only, so the device is not synchronised. There may be
    more items than needed.

    Returns:
        Index (b A + a) M + m of each selection, sorted by block; the first of these of each block,
        ``[B Hkv N + 1]``; the first item of each block, ``[B Hkv N + 1]``; the block of each item.
    """
    device, kept = selected.device, selected.shape[3]
    units = len(selected) * key_heads
    total = units * num_blocks
    unit = torch.arange(units, device=device, dtype=torch.int32)[:, None] * num_blocks
    rows = selected.reshape(units, -1)
    block = torch.where(rows >= num_blocks, total, rows + unit).flatten()
    ordered, order = block.sort(stable=True)
    edges = torch.arange(total + 1, device=device, dtype=torch.int32)
    first_pair = torch.searchsorted(ordered, edges)
    items = (first_pair.diff() + pairs_per_item - 1) // pairs_per_item
    first_item = torch.nn.functional.pad(items.cumsum(0), (1, 0))
    bound = total + block.numel() // pairs_per_item
    item = torch.arange(bound, device=device)
    item_block = torch.searchsorted(first_item[1:].contiguous(), item, right=True)
    return order // kept, first_pair, first_item, item_block.clamp(max=total - 1)


class SparseLauncher:
    """Launches the kernels of one call, whose rows are aligned at their ends.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``.
        v: Values, ``[B, Hkv, S, E]``.
        selected: Selected blocks, ``[B, A, M, K]``, the smallest first.
        lengths: Real keys of each row, ``[B]``; ``None`` means S.
        counts: Real queries of each row, ``[B]``; ``None`` means T.
        options: Sizes.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selected: Tensor,
        lengths: Tensor | None,
        counts: Tensor | None,
        options: KernelOptions,
    ) -> None:
        self.options = options
        self.q, self.k, self.v = (contiguous_rows(x) for x in (q, k, v))
        self.batch, self.heads, self.tokens, self.d = q.shape
        self.key_heads, self.keys, self.e = v.shape[1:]
        self.selected = selected.contiguous()
        self.lists, self.query_blocks, self.kept = selected.shape[1:]
        self.shared_heads = self.heads // self.lists
        self.rows = options.query_block * self.shared_heads  # R
        self.num_blocks = options.num_blocks
        self.ragged = (self.selected, self.selected)  # unused
        if lengths is not None:
            self.ragged = (
                lengths,
                torch.full_like(lengths, self.tokens) if counts is None else counts,
            )
        wide, precision = operand_precision(self.q, self.k, self.v)
        strides = zip(("q", "k", "v"), (self.q, self.k, self.v), strict=True)
        self.arguments: dict[str, Any] = {
            f"{name}_{axis}": stride
            for name, y in strides
            for axis, stride in zip(("batch", "head", "token"), y.stride(), strict=False)
        } | {
            "tokens": self.tokens,
            "keys": self.keys,
            "num_sinks": options.num_sinks,
            "scale": options.scale,
            "D": self.d,
            "E": self.e,
            "BD": block_size(self.d),
            "BE": block_size(self.e),
            "RAGGED": lengths is not None,
            "OPERAND": tl.float32 if wide else tl.bfloat16,
            "PRECISION": precision,
            "num_stages": STAGES,
        }
        self.wide, self.largest = wide, max(self.arguments["BD"], self.arguments["BE"])
        self.tile = min(LARGEST_TILE, max(16, TILE_ELEMENTS[wide] // self.largest))
        self.small_tile = max(16, self.tile // 2)  # sums for keys and values stay in registers

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output ``[B, H, T, E]`` in the dtype of v, and the log-sum-exp, float32."""
        out = self.v.new_empty(self.batch, self.heads, self.tokens, self.e)
        lse = self.q.new_empty(self.batch, self.heads, self.tokens, 1, dtype=torch.float32)
        self._attend(out, lse, self.q, lse, gradient=False)
        return out, lse

    def backward(self, d_out: Tensor, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, in their dtypes."""
        d_out, delta, lse = contiguous_rows(d_out), delta.contiguous(), lse.contiguous()
        dq, dk, dv = (y.new_empty(y.shape) for y in (self.q, self.k, self.v))
        self._attend(dq, lse, d_out, delta, gradient=True)
        self._key_gradients(dk, dv, (d_out, lse, delta))
        return dq, dk, dv

    def _attend(
        self, out: Tensor, lse: Tensor, d_out: Tensor, delta: Tensor, *, gradient: bool
    ) -> None:
        options = self.options
        rows = min(self.tile, block_size(self.rows))
        tiles = -(-self.rows // rows)
        count = (self.selected < self.num_blocks).sum(3, dtype=torch.int32)
        grid = (self.batch * self.lists * self.query_blocks * tiles,)
        with device_context(self.q.device):
            attend_kernel[grid](
                self.q, self.k, self.v, self.selected, count, *self.ragged, out, lse, d_out, delta,
                **self._strides(d_out), **self.arguments, query_blocks=self.query_blocks,
                kept=self.kept, window=options.window, lists=self.lists,
                lists_per_key_head=self.lists // self.key_heads, Y=self.shared_heads,
                Q=options.query_block, BLOCK=options.block_size, BM=rows, BN=self.tile,
                TILES=tiles, CAUSAL=options.causal, GRADIENT=gradient,
                num_warps=2 if rows == 16 and not (gradient or self.wide) else 4,
            )  # fmt: skip

    def _key_gradients(self, dk: Tensor, dv: Tensor, rows: tuple[Tensor, ...]) -> None:
        options, units = self.options, self.batch * self.key_heads
        sinks, splits = self._sink_sums(rows)
        blocks, first_item = self._selection_sums(rows)
        grid = (units * -(-self.keys // self.small_tile),)
        with device_context(self.q.device):
            window_gradient_kernel[grid](
                self.q, self.k, self.v, *rows, *self.ragged, *sinks, first_item, *blocks, dk, dv,
                **self._strides(rows[0]), **self.arguments, num_blocks=self.num_blocks,
                window=options.window, splits=splits, key_heads=self.key_heads,
                G=self.heads // self.key_heads, Q=options.query_block, BLOCK=options.block_size,
                BM=self.small_tile, BN=self.small_tile, CAUSAL=options.causal,
                num_warps=4,
            )  # fmt: skip

    def _sink_sums(self, rows: tuple[Tensor, ...]) -> tuple[tuple[Tensor, Tensor], int]:
        """Return the sums for the first tokens, in parts, and the number of parts."""
        options, units = self.options, self.batch * self.key_heads
        groups = self.heads // self.key_heads
        splits = -(-self.tokens * groups // PART_ROWS) if options.num_sinks else 0
        sums = self._empty_sums(units * splits, options.num_sinks)
        keys = min(self.tile, block_size(max(1, options.num_sinks)))
        tiles = -(-options.num_sinks // keys)
        if splits:
            with device_context(self.q.device):
                sink_gradient_kernel[(units * splits * tiles,)](
                    self.q, self.k, self.v, *rows, *self.ragged, *sums, **self._strides(rows[0]),
                    **self.arguments, rows_per_split=PART_ROWS, key_heads=self.key_heads, G=groups,
                    BM=self.small_tile, BN=keys, SPLITS=splits, TILES=tiles, CAUSAL=options.causal,
                    num_warps=4,
                )  # fmt: skip
        return sums, splits

    def _selection_sums(self, rows: tuple[Tensor, ...]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the sums for selected blocks, in items, and the first item of each block."""
        options, units = self.options, self.batch * self.key_heads
        if self.num_blocks == 0 or self.kept == 0:
            first_item = torch.zeros(
                units * self.num_blocks + 1, dtype=torch.int64, device=self.q.device
            )
            return self._empty_sums(0, options.block_size), first_item
        pairs = max(1, PART_ROWS // self.rows)
        index, first_pair, first_item, item_block = invert_selection(
            self.selected, self.key_heads, self.num_blocks, pairs
        )
        items = len(item_block)
        sums = self._empty_sums(items, options.block_size)
        keys = min(self.tile, block_size(options.block_size))
        tiles = -(-options.block_size // keys)
        with device_context(self.q.device):
            selection_gradient_kernel[(items * tiles,)](
                self.q, self.k, self.v, *rows, *self.ragged, item_block, first_item,
                first_pair, index, *sums, **self._strides(rows[0]), **self.arguments,
                query_blocks=self.query_blocks, num_blocks=self.num_blocks,
                key_heads=self.key_heads, lists=self.lists, Y=self.shared_heads,
                Q=options.query_block, PAIRS=pairs, BLOCK=options.block_size, BM=self.small_tile,
                BN=keys, TILES=tiles, num_warps=4,
            )  # fmt: skip
        return sums, first_item

    def _empty_sums(self, count: int, keys: int) -> tuple[Tensor, Tensor]:
        """Return float32 buffers for the sums of ``count`` parts for some keys and values."""
        dk, dv = (
            self.q.new_empty(count, keys, size, dtype=torch.float32) for size in (self.d, self.e)
        )
        return dk, dv

    @staticmethod
    def _strides(d_out: Tensor) -> dict[str, int]:
        return dict(zip(("d_batch", "d_head", "d_token"), d_out.stride(), strict=False))
