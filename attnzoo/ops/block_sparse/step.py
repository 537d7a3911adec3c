"""One new token: score the summaries of all blocks, and read the selected blocks only.

Other letters: N key blocks, R recent keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.ops.block_sparse.gather import (
    SparseTensors,
    gather_keys,
    head_groups,
    key_slots,
)
from attnzoo.ops.block_sparse.options import SparseStep
from attnzoo.ops.block_sparse.selection import Best, select_blocks


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
