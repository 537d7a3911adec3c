"""Move the real tokens of each row to its end, and add tokens to a state.

Other letters: N key blocks, Z numbers per summary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.block_sparse.options import (
    BlockSparseState,
    SelectionOptions,
    SparseCall,
    SparseOptions,
)
from attnzoo.ops.block_sparse.selection import MEAN, pool_queries, summarize

MAX_RECENT = 256  # tokens that a state keeps apart; a multiple of this many are merged at a time


def align_rows(
    call: SparseCall, mask: AttentionMask, state: BlockSparseState | None = None
) -> tuple[SparseCall, Tensor | None, Tensor | None]:
    """Move padding to the front of every row, after the keys of the state.

    Returns:
        The call, whose rows end with their last real token; the index of each of its queries in
        the call before, ``[B, T]``; and that of each key, ``[B, S]``, those of the state first.
        ``None`` means unchanged.
    """
    q, k, v = call.q, call.k, call.v
    batch, length = q.shape[0], q.shape[2]
    padding = _key_mask(q, k, mask)
    if state is None and padding is None:
        return call, None, None
    if padding is None:
        padding = torch.ones(batch, length, dtype=torch.bool, device=q.device)
    padding = padding.expand(batch, -1)
    if isinstance(mask.q_offset, int) and (state is not None or mask.q_offset == 0):
        query_mask = padding[:, :length]
    else:
        positions = torch.arange(length, device=q.device) + mask.q_offset
        query_mask = padding.index_select(1, positions)
    if state is not None:
        k = torch.cat([state.k, state.recent_k, k], 2)
        v = torch.cat([state.v, state.recent_v, v], 2)
        past = k.shape[2] - length
        position = torch.arange(past, device=k.device)
        real = position >= past - state.length[:, None]
        padding = torch.cat([real, padding], 1)
    if not torch.compiler.is_compiling() and bool(padding.all()):
        return call._replace(k=k, v=v), None, None
    keys = padding.int().argsort(dim=1, stable=True)
    order = query_mask.int().argsort(dim=1, stable=True)
    lengths, counts = padding.sum(1), query_mask.sum(1)
    k, v = (align_tokens(x, keys, lengths) for x in (k, v))
    if not torch.compiler.is_compiling():
        longest = max(int(lengths.max()), length)
        k, v = k[:, :, k.shape[2] - longest :], v[:, :, v.shape[2] - longest :]
    q = align_tokens(q, order, counts)
    return call._replace(q=q, k=k, v=v, lengths=lengths, counts=counts), order, keys


def _key_mask(q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor | None:
    """Return which keys exist, ``[1 or B, S]`` bool; ``None`` means all."""
    length, keys, offset = q.shape[2], k.shape[2], mask.q_offset
    if length == keys or (isinstance(offset, int) and offset == keys - length):
        return mask.padding
    exists = (torch.arange(keys, device=k.device) < offset + length)[None]  # of a static cache
    return exists if mask.padding is None else exists & mask.padding


def align_tokens(x: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """Reorder ``[B, H, T, D]`` by ``[B, T]``; tokens before the last ``counts`` become zeros."""
    x = gather_tokens(x, order)
    is_padding = torch.arange(x.shape[2], device=x.device) < x.shape[2] - counts[:, None]
    return x.masked_fill(is_padding[:, None, :, None], 0)


def restore_order(out: Tensor, order: Tensor | None) -> Tensor:
    """Move outputs ``[B, H, T, E]`` back to the places of their queries."""
    return out if order is None else gather_tokens(out, order.argsort(1))


def new_state(call: SparseCall, state: BlockSparseState | None) -> BlockSparseState:
    """Return the state after all keys of a call, ``state`` being the one before it."""
    k, v, size = call.k, call.v, call.options.block_size
    lengths = call.lengths
    if lengths is None:
        lengths = torch.full((k.shape[0],), k.shape[2], device=k.device)
    summary = call.summary
    if summary is None:
        summary = summarize(k, call.lengths, call.options, call.selection)
    finished = int(lengths.max()) // size if k.shape[0] else 0
    leader = _current_leader(call.with_selecting_queries(), lengths)
    empty = k[:, :, :0], v[:, :, :0]
    tail = k[:, :1, :0, :0] if call.tail is None else call.tail
    return BlockSparseState(
        k.contiguous(), v.contiguous(), *empty, lengths, summary[:, :, :finished], leader, tail
    )


def _current_leader(call: SparseCall, lengths: Tensor) -> Tensor:
    """Return the first query of the query block of the last token, ``[B, H, D]``."""
    q, size = call.q, call.options.query_block
    if size == 1 or not call.options.causal:
        return q.new_zeros(*q.shape[:2], 0)
    if not q.shape[2]:
        return q.new_zeros(*q.shape[:2], q.shape[3])
    pooled, first = pool_queries(call)
    block = ((lengths[:, None] - 1) // size - first[:, :1] // size).clamp(min=0)
    return gather_tokens(pooled, block)[:, :, 0]


def add_token(
    state: BlockSparseState,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    options: SparseOptions,
    selection: SelectionOptions,
    index_k: Tensor | None = None,
) -> BlockSparseState:
    """Return the state after one more real token in every row; copies the recent keys only.

    ``q`` is the query that scores blocks, and ``index_k`` the index key, ``[B, 1, 1, P]``.
    """
    recent_k = torch.cat([state.recent_k, k], 2)
    recent_v = torch.cat([state.recent_v, v], 2)
    old_k, old_v, length, size = state.k, state.v, state.length + 1, options.block_size
    finished = length % size == 0
    summary, tail = state.summary, state.tail
    if index_k is not None:
        latest = torch.cat([tail, index_k.to(tail.dtype)], 2)
        tail = latest[:, :, 1:]
    if bool(finished.any()):
        keys = recent_k[:, :, -size:] if index_k is None else latest
        if keys.shape[2] < size:
            keys = torch.cat([old_k[:, :, old_k.shape[2] + keys.shape[2] - size :], keys], 2)
        keys = F.pad(keys, (0, 0, size - keys.shape[2], 0))  # of rows that are shorter than a block
        given = selection if index_k is None else MEAN
        new = summarize(keys, None, options, given).to(summary.dtype)
        index = length // size - 1
        if bool((index == summary.shape[2]).all()):
            summary = torch.cat([summary, new], 2)
        else:
            if int(index.max()) >= summary.shape[2]:
                summary = F.pad(summary, (0, 0, 0, 1))
            index = torch.where(finished, index, -1)[:, None, None, None]
            column = torch.arange(summary.shape[2], device=k.device)[:, None]
            summary = torch.where(column == index, new, summary)
    leader = state.leader
    if leader.shape[2]:
        begins = (state.length % options.query_block == 0)[:, None, None]
        leader = torch.where(begins, q[:, :, 0], leader)
    if recent_k.shape[2] >= MAX_RECENT:
        old_k, old_v = torch.cat([old_k, recent_k], 2), torch.cat([old_v, recent_v], 2)
        recent_k, recent_v = recent_k[:, :, :0], recent_v[:, :, :0]
    return BlockSparseState(old_k, old_v, recent_k, recent_v, length, summary, leader, tail)
