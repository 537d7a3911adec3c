r"""Linear attention under a full-matrix gate: every pair of channels forgets at its own pace.

Computes :math:`S_t = e^{G_t} \odot S_{t-1} + k_t v_t^T` and :math:`o_t = q_t S_t`, with
:math:`G_t` a matrix; normalised, value channel by value channel, by the same sum with ones for
values. No product of the kind that makes a chunk form can carry such a gate: it runs token by
token, prompts and training too. Time O(T D E) in T steps; the backward pass keeps every step's
state, O(T D E) of memory.
Source: the general gate of Yang et al., 2024, arXiv:2312.06635, table 1; Mao, 2022,
arXiv:2210.04243.
Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.context_parallel import Shard, earlier_matrices
from attnzoo.ops.linear_reference import state_dtype
from attnzoo.state import AttentionOutput, MatrixState

TOKENS = 16  # whose gates are made at a time


def matrix_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Callable[[int, int], Tensor],
    normalize: bool = False,
    state: MatrixState | None = None,
    return_state: bool = False,
    segment_ids: Tensor | None = None,
    eps: float = 1e-6,
    shard: Shard | None = None,
) -> AttentionOutput:
    """Attend token by token; causal.

    Args:
        q: Queries after the feature map, ``[B, H, T, D]``.
        k: Keys after the feature map, ``[B, Hkv, T, D]``, zero in padding.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: Returns G of the tokens from one to before another, ``[B, Hkv, n, D, E]``, at
            most 0; 0 where one is padding. A function, for those of all would be T matrices.
        normalize: Divide by the sum of weights plus ``eps``.
        state: Sums over the earlier tokens.
        return_state: Whether to return the sums after the last token.
        segment_ids: ``[B, T]``: sequences packed into one row.
        eps: Added to the sum of weights.
        shard: The share of the rows that these tokens are, in place of ``state``; its tokens are
            taken twice, first for what they leave to the next.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; ``state`` where it was asked for.
    """
    dtype, (heads, tokens, size) = state_dtype(q, k, v), v.shape[1:]
    if shard is not None:
        state = _earlier(k, v, log_decay, segment_ids, shard)
    if state is None:
        empty = torch.zeros(*k.shape[:2], k.shape[3], size, dtype=dtype, device=v.device)
        state = MatrixState(empty, empty)
    both = torch.cat([x.to(dtype) for x in state], -1)  # [B, Hkv, D, 2 E]: z is of values of one
    rows = q.to(dtype).unflatten(1, (heads, -1)).unbind(3)
    keys = k.to(dtype).unsqueeze(-1).unbind(2)
    values = F.pad(v.to(dtype), (0, size), value=1.0).unsqueeze(3).unbind(2)
    outs = []
    for start in range(0, tokens, TOKENS):
        stop = min(start + TOKENS, tokens)
        kept = log_decay(start, stop).to(dtype).exp()
        if segment_ids is not None and stop > 1:
            later = segment_ids[:, max(start, 1) : stop]
            same = later == segment_ids[:, max(start, 1) - 1 : stop - 1]
            same = F.pad(same, (1, 0), value=True) if start == 0 else same
            kept = kept * same[:, None, :, None, None]
        for t, gate in enumerate(torch.cat([kept, kept], -1).unbind(2), start):
            both = torch.addcmul(keys[t] * values[t], gate, both)
            outs.append(rows[t] @ both)
    out = torch.stack(outs, 3) if outs else both.new_empty(*q.shape[:2], 1, 0, 2 * size)
    above, below = out.chunk(2, -1)
    out = above / (below + eps) if normalize else above
    last = MatrixState(*both.chunk(2, -1)) if return_state else None
    return AttentionOutput(out.flatten(1, 2).to(v.dtype), last)


def _earlier(
    k: Tensor,
    v: Tensor,
    log_decay: Callable[[int, int], Tensor],
    segment_ids: Tensor | None,
    shard: Shard,
) -> MatrixState:
    """Return the state that the tokens of earlier processes leave for this share."""
    none = torch.zeros_like(k)
    left = matrix_gated_attention(
        none, k, v, log_decay=log_decay, return_state=True, segment_ids=segment_ids
    ).state
    assert left is not None
    starts = range(0, k.shape[2], TOKENS)
    stretches = [log_decay(t, min(t + TOKENS, k.shape[2])).sum(2) for t in starts]
    return earlier_matrices(left, torch.stack(stretches).sum(0).to(left.kv.dtype), shard)
