"""What the implementations of linear attention share: their inputs, and small helpers.

Letters: B batch, H heads, Hkv key heads, G = H / Hkv, T queries, S keys, D key size, E value size,
F decays per token (1 or D).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.linear.impl.fused_maps import MapWeights
from attnzoo.state import LinearState

CHUNK_SIZE = 64  # tokens per chunk, unless the call sets it

Result = tuple[Tensor, LinearState]  # the output, and the state after the last token


class LinearInputs(NamedTuple):
    """Inputs of :func:`attnzoo.backends.linear.op.linear_attention`, checked and complete."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    log_decay: Tensor | None  # [Hkv], [B, Hkv, S] or [B, Hkv, S, D]
    state: LinearState  # before the first token; its dtype is that of all sums
    padding_mask: Tensor | None  # [B, S] bool, true at real keys
    segment_ids: Tensor | None  # [B, S]
    causal: bool
    form: str
    normalize: bool
    scale: float
    eps: float
    chunk_size: int | None
    feature_map: str  # still to be applied to q and k
    feature_scale: float
    map_weights: MapWeights | None = None  # of a learned map
    reuse_state: bool = False  # whether the tensors of the state may be overwritten

    def tokens(self, start: int, stop: int) -> LinearInputs:
        """Return the inputs of tokens ``start`` to ``stop`` of a causal call."""
        log_decay, ids = self.log_decay, self.segment_ids
        if log_decay is not None and log_decay.dim() > 1:
            log_decay = log_decay[:, :, start:stop]
        q, k, v = (x[:, :, start:stop] for x in (self.q, self.k, self.v))
        ids = None if ids is None else ids[:, start:stop]
        return self._replace(q=q, k=k, v=v, log_decay=log_decay, segment_ids=ids)


def log_decay_per_token(log_decay: Tensor, k: Tensor) -> Tensor:
    """Return log decays of any accepted shape as ``[B, Hkv, S, F]``."""
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(k.shape[:3])
    return log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(3)


def empty_state(q: Tensor, k: Tensor, v: Tensor) -> LinearState:
    """Return the state before the first token: zeros."""
    dtype = state_dtype(q, k, v)
    kv = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=dtype, device=v.device)
    return LinearState(kv, kv.new_zeros(kv.shape[:3]))


def state_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """Return the dtype of the sums: float64 if any input is float64, else float32."""
    return torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
