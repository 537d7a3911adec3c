r"""Selection by an indexer: scores of blocks, and summaries of index keys.

The score of a block for a query t is that of DeepSeek-V3.2's lightning indexer,

.. math:: I_{tj} = \sum_{i} w_{ti} \max(q_{ti} \cdot k_j, 0),

with index queries :math:`q_{ti}` and weights :math:`w_{ti}` of a few heads i, and the mean
:math:`k_j` of the index keys of block j. All heads of the layer share the selection. Source:
DeepSeek-AI, 2025, arXiv:2512.02556. Other letters: N key blocks, C keys of a block, I indexer
heads, P size of index queries and keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.block_sparse.options import (
    BlockSparseState,
    IndexTensors,
    SparseCall,
    SparseOptions,
)
from attnzoo.ops.block_sparse.selection import MEAN, align_tokens, summarize


def pack_queries(index: IndexTensors) -> Tensor:
    """Return index queries and the weights of their heads, ``[B, I, T, P + 1]``, float32 or wider.

    As one tensor they are pooled, aligned and stored like the queries of a layer.
    """
    wide = torch.promote_types(index.q.dtype, torch.float32)
    return torch.cat([index.q.to(wide), index.weights[..., None].to(wide)], 3)


def add_index(
    call: SparseCall,
    index: IndexTensors,
    order: Tensor | None = None,
    key_order: Tensor | None = None,
    state: BlockSparseState | None = None,
) -> SparseCall:
    """Return the call with the index queries, the summaries of index keys, and the latest of them.

    Args:
        call: The call after alignment.
        index: Index tensors before alignment.
        order: Index of each query before alignment, from :func:`align_rows`.
        key_order: That of each key.
        state: State of the earlier tokens.
    """
    queries, keys = pack_queries(index), index.k
    if order is not None:
        assert call.counts is not None
        queries = align_tokens(queries, order, call.counts)
    if state is not None:
        if order is not None and call.counts is not None:
            keys = align_tokens(keys, order, call.counts)
        summary, tail = extend_summary(state, keys, call.counts, call.options)
        return call._replace(index_q=queries, summary=summary, tail=tail)
    if key_order is not None:
        assert call.lengths is not None
        keys = align_tokens(keys, key_order, call.lengths)
        keys = keys[:, :, keys.shape[2] - call.k.shape[2] :]
    summary = summarize(keys, call.lengths, call.options, MEAN)
    tail = latest_keys(keys, call.options.block_size)
    return call._replace(index_q=queries, summary=summary, tail=tail)


def latest_keys(keys: Tensor, size: int) -> Tensor:
    """Return the last ``size - 1`` of index keys ``[B, 1, S, P]``, after zeros if there are fewer.

    Those of the unfinished block are among them.
    """
    keys = F.pad(keys, (0, 0, size - 1, 0))
    return keys[:, :, keys.shape[2] - size + 1 :].contiguous()


def extend_summary(
    state: BlockSparseState, keys: Tensor, counts: Tensor | None, options: SparseOptions
) -> tuple[Tensor, Tensor]:
    """Return the summaries of finished blocks after new index keys, and the latest index keys.

    Args:
        state: State of the earlier tokens.
        keys: ``[B, 1, T, P]``, whose rows are aligned at their ends.
        counts: New keys of each row, ``[B]``; ``None`` means T.
        options: Sizes.
    """
    size, length, before = options.block_size, keys.shape[2], state.tail.shape[2]
    if counts is None:
        counts = torch.full_like(state.length, length)
    unfinished = state.length % size
    position = torch.arange(before + length, device=keys.device)
    is_key = torch.where(
        position < before,
        position >= before - unfinished[:, None],
        position >= before + length - counts[:, None],
    )
    tail = state.tail.to(torch.promote_types(state.tail.dtype, keys.dtype))
    joined = torch.cat([tail, keys.to(tail.dtype)], 2)
    order = is_key.int().argsort(dim=1, stable=True)
    lengths = unfinished + counts
    joined = align_tokens(joined, order, lengths)
    new = summarize(joined, lengths, options, MEAN).to(state.summary.dtype)
    finished = state.length // size
    blocks = int((finished + lengths // size).max()) if len(finished) else 0
    block = torch.arange(blocks, device=keys.device) - finished[:, None]  # [B, N], of the new ones
    if new.shape[2] == 0:
        return state.summary[:, :, :blocks], latest_keys(joined, size)
    found = gather_tokens(new, block.clamp(0, new.shape[2] - 1))
    old = F.pad(state.summary[:, :, :blocks], (0, 0, 0, max(0, blocks - state.summary.shape[2])))
    summary = torch.where((block >= 0)[:, None, :, None], found, old)
    return summary, latest_keys(joined, size)
