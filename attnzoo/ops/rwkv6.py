r"""RWKV-6's recurrence: the state is read before it is updated, and a bonus weighs the new token.

Computes :math:`o_t = q_t S_{t-1} + (q_t \cdot u k_t)\, v_t` with
:math:`S_t = e^{g_t} S_{t-1} + k_t v_t^T`, normalised by the same over the keys alone. It is the op
of :mod:`attnzoo.ops.linear` on keys, values and decays that come one token later, so that what is
updated before the read is the token before; no quotient, so nothing overflows. Cost as there.
Source: RWKV-6, Peng et al., 2024, arXiv:2404.05892.
Letters: B batch, H heads, Hkv key heads, G = H / Hkv, T tokens, D key size, E value size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.context_parallel import Shard, earlier_sums
from attnzoo.ops.linear import linear_attention
from attnzoo.ops.linear_reference import empty_state
from attnzoo.state import AttentionOutput, LinearState


def rwkv6_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    bonus: Tensor,
    normalize: bool = False,
    state: LinearState | None = None,
    return_state: bool = False,
    segment_ids: Tensor | None = None,
    eps: float = 1e-6,
    shard: Shard | None = None,
    **options: Any,
) -> AttentionOutput:
    """Attend to the tokens before each, and to itself with a bonus; causal.

    Args:
        q: Queries after the feature map, ``[B, H, T, D]``.
        k: Keys after the feature map, ``[B, Hkv, T, D]``, zero in padding.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: g, ``[B, Hkv, T, D]``: what is left of the state when the token is added; 0 in
            padding.
        bonus: u, ``[Hkv, D]``; not negative where normalised.
        normalize: Divide by the sum of weights plus ``eps``.
        state: Sums over the earlier tokens, the last one included, as ``linear_attention`` has
            them.
        return_state: Whether to return the sums after the last token.
        segment_ids: ``[B, T]``: sequences packed into one row.
        eps: Added to the sum of weights.
        shard: The share of the rows that these tokens are, in place of ``state``.
        **options: ``form``, ``impl`` and ``chunk_size``, as for ``linear_attention``.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; ``state`` where it was asked for.
    """
    wide = torch.promote_types(q.dtype, v.dtype)
    values = v.to(torch.promote_types(wide, torch.float32))
    if shard is not None:
        state = earlier_sums(k, values, log_decay, shard)
    if state is None:
        state = empty_state(q, k, values)
    kv, z = state
    if normalize:  # one more value, of ones: its output is the sum of weights
        values = F.pad(values, (0, 1), value=1.0)
        kv = torch.cat([kv, z.unsqueeze(-1)], -1)
    late_k, late_values, late_decay = _later(k), _later(values), _later(log_decay)
    if segment_ids is not None:
        begins = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))[:, None, :, None]
        late_k, late_decay = late_k.masked_fill(begins, 0), late_decay.masked_fill(begins, 0)
    read, last = linear_attention(
        q,
        late_k,
        late_values,
        log_decay=late_decay,
        state=LinearState(kv, z),
        return_state=return_state,
        segment_ids=segment_ids,
        **options,
    )[:2]
    grouped = q.unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, T, D]
    own = (grouped * (bonus.to(k.dtype).unsqueeze(1) * k).unsqueeze(2)).sum(-1, keepdim=True)
    out = read + (own * values.unsqueeze(2)).flatten(1, 2)
    if normalize:
        out = out[..., :-1] / (out[..., -1:] + eps)
    if last is not None:
        last = _brought_up(last, k, values, log_decay, normalized=normalize)
    return AttentionOutput(out.to(v.dtype), last)


def _later(x: Tensor) -> Tensor:
    """Move every token ``[B, H, T, X]`` one place on; nothing stands first."""
    return F.pad(x[:, :, :-1], (0, 0, 1, 0)) if x.shape[2] else x


def _brought_up(
    state: LinearState, k: Tensor, values: Tensor, log_decay: Tensor, *, normalized: bool
) -> LinearState:
    """Add the last token to the sums over those before it."""
    kv, z = state
    if k.shape[2]:
        kept, key = log_decay[:, :, -1].exp(), k[:, :, -1]
        kv = kv * kept.unsqueeze(-1) + key.unsqueeze(-1) * values[:, :, -1:]
        z = z * kept + key
    return LinearState(kv[..., :-1] if normalized else kv, z)
