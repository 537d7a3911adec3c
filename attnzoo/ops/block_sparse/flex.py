"""Block-sparse attention by FlexAttention: a table of the selected blocks is its mask.

Torch selects the blocks. Kernels read blocks of 128 keys of which a block of 128 queries has
selected any part, so that few queries which share a selection, and small blocks, are read with
others. Other letters: M query blocks, N key blocks, A heads with a selection of their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.block_sparse.custom_ops import TORCH
from attnzoo.ops.block_sparse.gather import SparseTensors
from attnzoo.ops.block_sparse.options import SparseCall
from attnzoo.ops.block_sparse.selection import count_query_blocks
from attnzoo.ops.window import flex
from attnzoo.ops.window.flex import Region, between, reader

LARGEST_TABLE = 2**28  # entries, of which each takes 9 bytes for a moment


def flex_reasons(call: SparseCall) -> list[str]:
    """Return every reason why FlexAttention does not support a call."""
    reasons = flex.flex_reasons(call.q, call.k, call.v)
    options, selection = call.options, call.selection
    shares = selection.per_key_head or selection.score == "indexer"
    heads = call.k.shape[1] if shares else call.q.shape[1]
    rows = call.q.shape[0] * heads * count_query_blocks(call.q.shape[2], options.query_block)
    entries = rows * -(-call.k.shape[2] // options.block_size)
    if entries > LARGEST_TABLE:
        reasons.append(f"the table of selected blocks has {entries} entries (at most 2^28)")
    return reasons


def skip_flex(call: SparseCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider FlexAttention for a call."""
    return ["one query reads few keys"] if call.q.shape[2] == 1 else []


def run_flex(call: SparseCall) -> Tensor:
    """Select blocks in torch and attend to them, ``[B, H, T, E]``."""
    x = SparseTensors(
        *(call.q, call.k, call.v, TORCH.selected(call), call.lengths, call.counts),
        *(call.scale, call.options),
    )
    return flex.run_flex(x.q, x.k, x.v, attended(x), x.scale)[0]


def attended(x: SparseTensors) -> Region:
    """Return the keys that queries see, as ``key_slots`` lists them."""
    options, lengths = x.options, x.key_lengths
    length, keys, size = x.q.shape[2], x.k.shape[2], options.block_size
    shift = keys - lengths  # column of a row's first key, [1 or B, 1]
    position = lengths - length + torch.arange(length, device=x.q.device)
    block = position.div(options.query_block, rounding_mode="floor")
    begin, end = options.near_range(block * options.query_block, lengths)
    last = lengths.expand_as(position)
    if options.causal:
        end = last = position + 1
    first, stop = begin + shift, end + shift
    sinks, all_keys = last.clamp(max=options.num_sinks) + shift, last + shift
    if x.counts is not None:
        real = position >= lengths - x.counts[:, None]
        stop, sinks, all_keys = (y.masked_fill(~real, 0) for y in (stop, sinks, all_keys))
    start = shift.expand_as(position)
    near, leading, past = (
        between(low.expand_as(high)[:, None], high[:, None], keys)
        for low, high in ((first, stop), (start, sinks), (start, all_keys))
    )
    column = torch.arange(keys, device=x.q.device) - shift
    key_blocks = column.clamp(min=0).div(size, rounding_mode="floor")
    return near | leading | (_selected(x, block - block[:, :1], key_blocks) & past)


def _selected(x: SparseTensors, rows: Tensor, columns: Tensor) -> Region:
    """Return the keys of the selected blocks.

    Args:
        x: Inputs of the call.
        rows: The query block of each query, ``[1 or B, T]``, from 0.
        columns: The block of each key, ``[1 or B, S]``.
    """
    count, shared = -(-x.k.shape[2] // x.options.block_size), x.q.shape[1] // x.selected.shape[1]
    table = torch.zeros(*x.selected.shape[:3], count + 1, dtype=torch.bool, device=x.q.device)
    table = table.scatter(3, x.selected.clamp(max=count).long(), value=True)
    table[..., count] = False  # of NO_BLOCK
    sums = F.pad(table.cumsum(2, dtype=torch.int32).cumsum(3, dtype=torch.int32), (1, 0, 1, 0))
    (low, high), (left, right) = (
        (blocks.amin(3), blocks.amax(3) + 1)
        for blocks in (flex.blocks_of(y[:, None]) for y in (rows, columns))
    )
    strip = _take(sums, high, 2) - _take(sums, low, 2)
    some = (_take(strip, right, 3) > _take(strip, left, 3)).repeat_interleave(shared, 1)
    row, column = reader(rows[:, None]), reader(columns[:, None])
    return Region(
        lambda b, h, i, j: table[b, h // shared, row(b, h, i), column(b, h, j)],
        some,
        torch.zeros_like(some),
    )


def _take(sums: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return the entries of ``[B, A, M, N]`` at ``[1 or B, 1, X]`` of a dimension."""
    shape = list(sums.shape)
    shape[dim] = index.shape[2]
    return sums.gather(dim, index[..., None].transpose(2, dim).expand(shape))
