"""The oracle of block-sparse attention: every score, and a dense mask.

Other letters: N key blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.ops.block_sparse.options import SelectionOptions, SparseCall, SparseOptions
from attnzoo.runtime.kernel_calls import check_not_mapped


def reference_attention(call: SparseCall) -> Tensor:
    """Return the output, ``[B, H, T, E]``, in float32 or wider; takes memory O(H T (S + N^2))."""
    check_not_mapped("block_sparse_attention", call.q, call.k, call.v, instead="impl='torch'")
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    heads = call.q.shape[1]
    rows = []
    for b in range(call.q.shape[0]):
        q, k, v = (x[b].to(dtype) for x in (call.q, call.k, call.v))
        keys = k.shape[1] if call.lengths is None else int(call.lengths[b])
        queries = q.shape[1] if call.counts is None else int(call.counts[b])
        leader = None if call.leader is None else call.leader[b].to(dtype)
        nothing = 0 * (q.sum() + k.sum() + v.sum())  # so that gradients are zeros, not None
        out = q.new_zeros(heads, q.shape[1], v.shape[2]) + nothing
        if queries:
            real_k, real_v = (x[:, x.shape[1] - keys :] for x in (k, v))
            real_q = q[:, q.shape[1] - queries :]
            asking, index_keys = real_q, None
            if call.index_q is not None:
                assert call.summary is not None
                asking = call.index_q[b, :, q.shape[1] - queries :].to(dtype)
                index_keys = call.summary[b, 0].to(dtype)
            mask = _mask(asking, real_k, leader, index_keys, call)
            attended = _attend_row(real_q, real_k, real_v, mask, call.scale)
            out = torch.cat([out[:, queries:], attended], 1)
        rows.append(out)
    return torch.stack(rows)


def _attend_row(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend in one sequence: queries ``[H, T, D]`` are its last positions."""
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(2) @ v


def _mask(
    q: Tensor, k: Tensor, leader: Tensor | None, index_keys: Tensor | None, call: SparseCall
) -> Tensor:
    """Return which keys each query attends to, ``[H, T, S]``, or ``[1, T, S]`` with an indexer.

    With an indexer, ``q`` are its queries, ``[I, T, P + 1]``, and ``index_keys`` the mean keys of
    blocks, ``[N, P]``.
    """
    options, (heads, length, _), keys = call.options, q.shape, k.shape[1]
    start, size, share = keys - length, options.block_size, options.query_block
    heads = heads if index_keys is None else 1
    mask = torch.zeros(heads, length, keys, dtype=torch.bool, device=q.device)
    position = torch.arange(keys, device=q.device)
    for first in range(start // share * share, keys, share):
        members = [t for t in range(first, first + share) if start <= t < keys]
        if not members:
            continue
        if options.causal:
            low, high = max(first - options.window + 1, 0), keys
        else:
            low, high = max(first - options.window, 0), first + share + options.window
        low, high = low // size * size, -(-high // size) * size
        query = _query(q, leader, first, members, start, options)
        chosen = _chosen(query, k, index_keys, low, high, call)  # [H, N]
        allowed = chosen.repeat_interleave(size, 1)[:, :keys]
        allowed = allowed | ((position >= low) & (position < high)) | (position < options.num_sinks)
        for t in members:
            mask[:, t - start] = allowed & (position <= t) if options.causal else allowed
    return mask


def _query(
    q: Tensor,
    leader: Tensor | None,
    first: int,
    members: list[int],
    start: int,
    options: SparseOptions,
) -> Tensor:
    """Return the query that selects for a query block, ``[H, D]``."""
    if not options.causal:
        return torch.stack([q[:, t - start] for t in members]).mean(0)
    if first >= start:
        return q[:, first - start]
    assert leader is not None
    return leader


def _chosen(
    query: Tensor, k: Tensor, index_keys: Tensor | None, low: int, high: int, call: SparseCall
) -> Tensor:
    """Return the selected blocks, ``[H, N]`` bool."""
    options, selection, keys = call.options, call.selection, k.shape[1]
    size, groups = options.block_size, query.shape[0] // k.shape[0]
    if selection.per_key_head:
        query = query.unflatten(0, (-1, groups)).mean(1).repeat_interleave(groups, 0)
    blocks = -(-keys // size)
    heads = query.shape[0] if index_keys is None else 1
    scores = query.new_full((heads, blocks), -torch.inf)
    for j in range(blocks):
        begin, end = j * size, min((j + 1) * size, keys)
        outside = end <= low or begin >= high
        finished = end - begin == size or not options.causal
        if not (outside and finished and end > options.num_sinks):
            continue
        if index_keys is not None:
            products = (query[:, :-1] * index_keys[j]).sum(1)  # [I]
            scores[0, j] = (query[:, -1] * products.clamp(min=0)).sum()
        else:
            part = k[:, begin:end].repeat_interleave(groups, 0)  # [H, C, D]
            scores[:, j] = _score(query, part, call.scale, selection)
    better = scores[:, None, :] > scores[:, :, None]  # [H, N, N], whether n beats m
    index = torch.arange(blocks, device=k.device)
    better = better | ((scores[:, None] == scores[:, :, None]) & (index[None, :] < index[:, None]))
    chosen = (better.sum(2) < options.top_k) & (scores > -torch.inf)
    if selection.coverage is not None:
        weights = (scores - scores.amax(1, keepdim=True)).nan_to_num(-torch.inf).exp()
        before = (better * weights[:, None]).sum(2)
        chosen = chosen & (before < selection.coverage * weights.sum(1, keepdim=True))
    return chosen


def _score(query: Tensor, keys: Tensor, scale: float, selection: SelectionOptions) -> Tensor:
    """Return the score of one block for each head, ``[H]``, times the scale of the products."""
    if selection.score == "bounds":
        products = torch.maximum(query * keys.amin(1), query * keys.amax(1))
        return products.sum(1) * scale
    score = (query * keys.mean(1)).sum(1) * scale
    if selection.score == "moments":
        variance = keys.var(1, unbiased=False)
        score = score + ((query * scale) ** 2 * variance).sum(1) / 2
    return score
