r"""The loss that trains an indexer: divergence of its scores from softmax's weights of blocks.

With :math:`p_{tj}` the weight of softmax attention on block j, averaged over the heads, and
:math:`I_{tj}` the indexer's score, the loss of a query is

.. math:: \sum_j p_{tj} \log \frac{p_{tj} / \sum_i p_{ti}}{\mathrm{softmax}_j(I_t)},

over the blocks that the query may select. That is the part of the divergence of all weights that
the selection determines: blocks of the window and the first tokens are attended to in any case.
Source: the warm-up of DeepSeek-AI, 2025, arXiv:2512.02556, which takes all keys. Other letters: N
key blocks, C keys of a block, I indexer heads, P size of index queries and keys.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.block_sparse.index_keys import add_index
from attnzoo.ops.block_sparse.options import (
    IndexTensors,
    SelectionOptions,
    SparseCall,
    SparseOptions,
)
from attnzoo.ops.block_sparse.selection import (
    Candidates,
    align_rows,
    candidates,
    first_positions,
    index_scores,
)
from attnzoo.runtime.kernel_calls import autocast_disabled

MAX_SCORES = 2**24  # of softmax, computed at a time


def selection_loss(
    q: Tensor,
    k: Tensor,
    index: IndexTensors,
    *,
    mask: AttentionMask,
    scale: float,
    options: SparseOptions,
) -> Tensor:
    """Return the divergence of an indexer from softmax, in nats, a float32 scalar or wider.

    The mean is over real queries. Every query has its own scores, also with ``query_block``.
    Time O(T S D) and memory O(T S); long sequences compute scores again in the backward pass.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        index: Index tensors, which get a gradient; queries and keys get none.
        mask: Causality and padding.
        scale: Multiplies query-key products.
        options: Sizes.
    """
    options = options._replace(query_block=1)
    choice = SelectionOptions("indexer", None, False)
    with autocast_disabled(q.device):
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = q.detach().to(wide), k.detach().to(wide)
        call = SparseCall(q, k, k, None, None, None, None, scale, options, choice)
        call, order, key_order = align_rows(call, mask)
        call = add_index(call, index, order, key_order)
        assert call.index_q is not None
        assert call.summary is not None
        keys, position = _blocks_of_keys(call), first_positions(call)
        allowed = candidates(call, position)
        (batch, heads, length, _), count = call.q.shape, keys.shape[2]
        step = max(1, MAX_SCORES // max(1, batch * heads * count))
        total = call.summary.new_zeros(())
        for start in range(0, length, step):
            rows = slice(start, start + step)
            part = call._replace(q=call.q[:, :, rows], index_q=call.index_q[:, :, rows])
            some = allowed._replace(end=allowed.end[:, rows], begin=allowed.begin[:, rows])
            loss = partial(_divergence, part, keys, position[:, rows], some)
            if step < length and torch.is_grad_enabled():
                total = total + checkpoint(loss, use_reentrant=False)
            else:
                total = total + loss()
        queries = batch * length if call.counts is None else call.counts.sum().clamp(min=1)
        return total / queries


def _blocks_of_keys(call: SparseCall) -> Tensor:
    """Return the keys of each row from its first real one, ``[B, Hkv, N C, D]``, then zeros."""
    size, keys = call.options.block_size, call.k.shape[2]
    k = F.pad(call.k, (0, 0, 0, -keys % size))
    if call.lengths is None:
        return k
    position = torch.arange(k.shape[2], device=k.device)[None]
    index = (position + keys - call.lengths[:, None]).clamp(0, keys - 1)
    real = (position < call.lengths[:, None])[:, None, :, None]
    return gather_tokens(call.k, index).masked_fill(~real, 0)


def _divergence(
    part: SparseCall, keys: Tensor, position: Tensor, candidate_blocks: Candidates
) -> Tensor:
    """Return the sum of the divergences of some queries.

    Args:
        part: The call with these queries only, and their index queries.
        keys: Keys from :func:`_blocks_of_keys`.
        position: Position of each query, ``[1 or B, c]``; negative at padding.
        candidate_blocks: Blocks that each query may select.
    """
    assert part.summary is not None
    assert part.index_q is not None
    blocks = part.summary.shape[2]
    allowed = candidate_blocks.mask(blocks) & (position >= 0)[..., None]
    weights = _block_weights(part, keys, position)[..., :blocks].masked_fill(~allowed, 0)
    share = weights / weights.sum(2, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    scores = index_scores(part.index_q, part.summary)
    lowest = torch.finfo(scores.dtype).min  # not infinity: a query may have no candidate
    log_scores = scores.masked_fill(~allowed, lowest).log_softmax(2)
    log_share = share.clamp(min=torch.finfo(share.dtype).tiny).log()
    return (weights * (log_share - log_scores.masked_fill(~allowed, 0))).sum()


@torch.no_grad()
def _block_weights(part: SparseCall, keys: Tensor, position: Tensor) -> Tensor:
    """Return the mean over heads of softmax's weight on each block, ``[B, c, N]``.

    Without the weight of the first tokens, which are not selected.
    """
    options, heads, count = part.options, part.q.shape[1], keys.shape[2]
    column = torch.arange(count, device=keys.device)
    lengths = column.new_full((1,), part.k.shape[2]) if part.lengths is None else part.lengths
    seen = column < lengths[:, None, None]  # [1 or B, 1 or c, S]
    if options.causal:
        seen = seen & (column <= position[..., None])
    groups = heads // keys.shape[1]
    scores = part.q.unflatten(1, (-1, groups)) @ keys[:, :, None].mT * part.scale
    scores = scores.flatten(1, 2).masked_fill(~seen[:, None], -torch.inf)
    weights: Tensor = scores.softmax(3).nan_to_num(0.0).mean(1)
    weights = weights.masked_fill(column < options.num_sinks, 0)
    return weights.view(*weights.shape[:2], -1, options.block_size).sum(3)
