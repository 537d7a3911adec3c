"""Block-sparse attention in PyTorch: gather the keys of some queries at a time.

Memory is bounded; the backward pass computes the weights again. Other letters: M query blocks, K
selected blocks, A heads with a selection of their own (H or Hkv), F = A / Hkv, Y = H / A, X keys
that a query may attend to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.ops.block_sparse.options import SparseOptions, SparseStep
from attnzoo.ops.block_sparse.selection import NO_BLOCK, Best, select_blocks

MAX_ELEMENTS = 2**20  # of the keys that are gathered at a time


class SparseTensors(NamedTuple):
    """Inputs of the kernels; rows are aligned at their ends."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    selected: Tensor  # [B, A, M, K]
    lengths: Tensor | None  # [B]
    counts: Tensor | None  # [B]
    scale: float
    options: SparseOptions

    @property
    def key_lengths(self) -> Tensor:
        """Real keys of each row, ``[1 or B, 1]``."""
        if self.lengths is None:
            return torch.tensor([[self.k.shape[2]]], device=self.k.device)
        return self.lengths[:, None]


def key_slots(x: SparseTensors, queries: slice) -> tuple[Tensor, Tensor]:
    """Return the keys that each query of a slice attends to.

    Returns:
        Columns of k, and whether each is valid, both ``[B, A, c, X]``; one that is not valid is
        that of any key.
    """
    options, lengths = x.options, x.key_lengths
    length, keys, size = x.q.shape[2], x.k.shape[2], options.block_size
    device = x.q.device
    position = lengths - length + torch.arange(length, device=device)[queries]  # [1 or B, c]
    block = position.div(options.query_block, rounding_mode="floor")
    begin, end = options.near_range(block * options.query_block, lengths)
    if options.causal:
        end = position + 1
    near = begin[..., None] + torch.arange(min(options.near_slots, keys), device=device)
    near_valid = near < end[..., None]
    sinks = torch.arange(min(options.num_sinks, keys), device=device).expand(*position.shape, -1)
    sinks_valid = (sinks < begin[..., None]) | ((sinks >= end[..., None]) & (not options.causal))
    sinks_valid = sinks_valid & (sinks < lengths[..., None])
    shared = torch.cat([sinks, near], 2)[:, None]
    shared_valid = torch.cat([sinks_valid, near_valid], 2)[:, None]
    first_block = (lengths - length).div(options.query_block, rounding_mode="floor")
    rows = (block - first_block).expand(x.q.shape[0], -1)[:, None, :, None]
    heads = x.selected.shape[1]
    selected = x.selected.gather(2, rows.expand(-1, heads, -1, x.selected.shape[3]))
    far = selected.long()[..., None] * size + torch.arange(size, device=device)
    far_valid = (selected != NO_BLOCK)[..., None] & (far >= options.num_sinks)
    far_valid = far_valid & (far < lengths[:, :, None, None, None])
    far, far_valid = far.flatten(3), far_valid.flatten(3)
    shape = (*far.shape[:3], -1)
    index = torch.cat([shared.expand(shape), far], 3)
    valid = torch.cat([shared_valid.expand(shape), far_valid], 3)
    if x.counts is not None:
        real = position >= lengths - x.counts[:, None]
        valid = valid & real[:, None, :, None]
    index = index + (keys - lengths)[:, :, None, None]
    return torch.where(valid, index, keys - 1), valid


class QueryChunk(NamedTuple):
    """Some queries and the keys that they attend to, in float32 or wider."""

    queries: slice
    columns: Tensor  # [B, A, c, X], from :func:`key_slots`
    q: Tensor  # [B, Hkv, F, c, Y, D]
    k: Tensor  # [B, Hkv, F, c, X, D]
    v: Tensor  # [B, Hkv, F, c, X, E]
    scores: Tensor  # [B, Hkv, F, c, Y, X], minus infinity where a column is not valid


def split_queries(x: SparseTensors) -> Iterator[QueryChunk]:
    """Yield all queries, a few at a time."""
    batch, _, length, _ = x.q.shape
    heads, key_heads = x.selected.shape[1], x.k.shape[1]
    slots = x.options.near_slots + x.options.num_sinks + x.selected.shape[3] * x.options.block_size
    width = x.k.shape[3] + x.v.shape[3]
    step = max(1, MAX_ELEMENTS // max(1, batch * heads * slots * width))
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    for start in range(0, length, step):
        queries = slice(start, min(start + step, length))
        columns, valid = key_slots(x, queries)
        q = head_groups(x.q[:, :, queries], heads, key_heads).to(dtype)
        k, v = (gather_keys(y, columns).to(dtype) for y in (x.k, x.v))
        mask = valid.unflatten(1, q.shape[1:3])[:, :, :, :, None]  # [B, Hkv, F, c, 1, X]
        scores = (q @ k.mT * x.scale).masked_fill(~mask, -torch.inf)
        yield QueryChunk(queries, columns, q, k, v, scores)


def head_groups(x: Tensor, heads: int, key_heads: int) -> Tensor:
    """View ``[B, H, c, D]`` as ``[B, Hkv, F, c, Y, D]``."""
    groups: Tensor = x.unflatten(1, (key_heads, heads // key_heads, -1))
    return groups.transpose(3, 4)


def gather_keys(x: Tensor, index: Tensor) -> Tensor:
    """Gather ``[B, Hkv, S, D]`` at columns ``[B, A, c, X]``, as ``[B, Hkv, F, c, X, D]``."""
    batch, key_heads, _, size = x.shape
    row, head, token, step = x.stride()
    if step != 1 or row % size or head % size or token % size:
        x = x.contiguous()
        row, head, token, _ = x.stride()
    row, head, token = row // size, head // size, token // size
    rows = 1 + (batch - 1) * row + (key_heads - 1) * head + (x.shape[2] - 1) * token
    flat = x.as_strided((rows, size), (size, 1))
    index = index.unflatten(1, (key_heads, -1)) * token
    device = x.device
    index = index + (torch.arange(batch, device=device) * row)[:, None, None, None, None]
    index = index + (torch.arange(key_heads, device=device) * head)[:, None, None, None]
    return flat.index_select(0, index.flatten()).view(*index.shape, size)


def forward(x: SparseTensors) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the log-sum-exp of the scores, ``[B, H, T, 1]``.

    Both are in float32 or wider; queries that attend to no key give zeros and infinity.
    """
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    out = x.q.new_empty(*x.q.shape[:3], x.v.shape[3], dtype=dtype)
    lse = x.q.new_empty(*x.q.shape[:3], 1, dtype=dtype)
    for chunk in split_queries(x):
        logs = chunk.scores.logsumexp(-1, keepdim=True)
        logs = logs.masked_fill(logs == -torch.inf, torch.inf)  # so that all weights are 0
        weights = (chunk.scores - logs).exp()
        for whole, part in ((out, weights @ chunk.v), (lse, logs)):
            whole[:, :, chunk.queries] = part.transpose(3, 4).flatten(1, 3)
    return out, lse


def row_products(d_out: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of gradient times output of each query, ``[B, H, T, 1]``."""
    return (d_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)


def backward(
    x: SparseTensors, d_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in float32 or wider.

    Args:
        x: Inputs of the forward pass.
        d_out: Gradient of the output, ``[B, H, T, E]``.
        out: The output, ``[B, H, T, E]``.
        lse: Log-sum-exp of each query, ``[B, H, T, 1]``.
    """
    dq, dk, dv = (torch.zeros(y.shape, dtype=lse.dtype, device=y.device) for y in (x.q, x.k, x.v))
    delta = row_products(d_out, out, lse.dtype)
    heads, key_heads, keys = x.selected.shape[1], x.k.shape[1], x.k.shape[2]
    groups = torch.arange(x.q.shape[0] * key_heads, device=x.q.device) * keys
    for chunk in split_queries(x):
        d, deltas, logs = (
            head_groups(y[:, :, chunk.queries].to(lse.dtype), heads, key_heads)
            for y in (d_out, delta, lse)
        )
        weights = (chunk.scores - logs).exp()
        d_scores = weights * (d @ chunk.v.mT - deltas) * x.scale
        dq[:, :, chunk.queries] = (d_scores @ chunk.k).transpose(3, 4).flatten(1, 3)
        index = chunk.columns.unflatten(1, (key_heads, -1)).flatten(0, 1)
        rows = (index + groups[:, None, None, None]).flatten()
        dk.view(-1, dk.shape[3]).index_add_(0, rows, (d_scores.mT @ chunk.q).flatten(0, -2))
        dv.view(-1, dv.shape[3]).index_add_(0, rows, (weights.mT @ d).flatten(0, -2))
    return dq, dk, dv


# -- one new token ---------------------------------------------------------------------------------


@torch.no_grad()
def attend_step(step: SparseStep, best: Best | None = None) -> Tensor:
    """Return the output of one token, ``[B, H, 1, E]``.

    Recent keys are contiguous, so all of them are multiplied, and those that are not attended to
    are masked. ``best`` is that of :func:`select_blocks`.
    """
    call, state = step
    older, recent = state.k.shape[2], state.recent_k.shape[2]
    keys = older + recent
    all_k = call.q.new_empty(0).expand(*state.k.shape[:2], keys, 0)  # only its shape is read
    call = call._replace(k=all_k, lengths=state.length, summary=state.summary, leader=state.leader)
    selected = select_blocks(call, best)
    tensors = SparseTensors(
        call.q, all_k, all_k, selected, state.length, None, call.scale, call.options
    )
    columns, valid = key_slots(tensors, slice(None))
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    heads, key_heads = selected.shape[1], state.k.shape[1]
    q = head_groups(call.q, heads, key_heads).to(dtype)
    old_valid = valid & (columns < older)
    old_index = columns.clamp(max=max(older - 1, 0))
    if older == 0:
        old_index, old_valid = old_index[..., :0], old_valid[..., :0]
    k, v = (gather_keys(x, old_index).to(dtype) for x in (state.k, state.v))
    column = torch.where(valid & (columns >= older), columns - older, recent)
    attended = torch.zeros(*column.shape[:3], recent + 1, dtype=torch.bool, device=q.device)
    attended = attended.scatter(3, column, torch.ones_like(column, dtype=torch.bool))
    recent_k, recent_v = (x[:, :, None, None].to(dtype) for x in (state.recent_k, state.recent_v))
    scores = torch.cat([q @ k.mT, q @ recent_k.mT], 5) * call.scale
    valid = torch.cat([old_valid, attended[..., :recent]], 3).unflatten(1, (key_heads, -1))
    weights = scores.masked_fill(~valid[:, :, :, :, None], -torch.inf).softmax(5)
    split = k.shape[4]
    out = weights[..., :split] @ v + weights[..., split:] @ recent_v
    return out.transpose(3, 4).flatten(1, 3)
