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
from torch import Tensor

from attnzoo.ops.linear_reference import state_dtype
from attnzoo.state import AttentionOutput, MatrixState


def matrix_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Callable[[int], Tensor],
    normalize: bool = False,
    state: MatrixState | None = None,
    return_state: bool = False,
    segment_ids: Tensor | None = None,
    eps: float = 1e-6,
) -> AttentionOutput:
    """Attend token by token; causal.

    Args:
        q: Queries after the feature map, ``[B, H, T, D]``.
        k: Keys after the feature map, ``[B, Hkv, T, D]``, zero in padding.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: Returns G of a token, ``[B, Hkv, D, E]``, at most 0; 0 where it is padding. A
            function, for those of all tokens would be T matrices.
        normalize: Divide by the sum of weights plus ``eps``.
        state: Sums over the earlier tokens.
        return_state: Whether to return the sums after the last token.
        segment_ids: ``[B, T]``: sequences packed into one row.
        eps: Added to the sum of weights.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; ``state`` where it was asked for.
    """
    dtype = state_dtype(q, k, v)
    shape = (*k.shape[:2], k.shape[3], v.shape[3])
    if state is None:
        state = MatrixState(*(torch.zeros(shape, dtype=dtype, device=v.device) for _ in range(2)))
    kv, z = (x.to(dtype) for x in state)
    rows = q.to(dtype).unflatten(1, (k.shape[1], -1)).transpose(2, 3)  # [B, Hkv, T, G, D]
    keys, values = k.to(dtype).unsqueeze(-1), v.to(dtype).unsqueeze(3)
    outs = []
    for t in range(k.shape[2]):
        kept = log_decay(t).exp()
        if segment_ids is not None and t > 0:
            same = segment_ids[:, t] == segment_ids[:, t - 1]
            kept = kept * same[:, None, None, None]
        kv = torch.addcmul(keys[:, :, t] * values[:, :, t], kept, kv)
        z = torch.addcmul(keys[:, :, t], kept, z)
        out = rows[:, :, t] @ kv
        outs.append(out / (rows[:, :, t] @ z + eps) if normalize else out)
    if outs:
        result = torch.stack(outs, 3).flatten(1, 2).to(v.dtype)
    else:
        result = v.new_empty(q.shape[0], q.shape[1], 0, v.shape[3])
    return AttentionOutput(result, MatrixState(kv, z) if return_state else None)
