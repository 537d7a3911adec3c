"""Inputs that all implementations of the delta rule share.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.states import DeltaState

CHUNK_SIZE = 64  # tokens per chunk, unless the call sets it
NORM_EPS = 1e-6  # added to squared norms, as in the papers' code

Result = tuple[Tensor, DeltaState]  # the output, and the state after the last token


class DeltaInputs(NamedTuple):
    """Inputs of :func:`attnzoo.ops.delta.api.delta_attention`, checked and complete.

    Each implementation normalises queries and keys if ``normalize`` is true. At padding, queries,
    keys, values, ``beta`` and log decays are 0, so that a padding token changes no state.
    """

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    beta: Tensor  # [B, Hkv, T]
    log_decay: Tensor | None  # [Hkv], [B, Hkv, T] or [B, Hkv, T, D]
    state: DeltaState  # before the first token; its dtype is that of all sums
    segment_ids: Tensor | None  # [B, T]
    scale: float
    chunk_size: int | None
    normalize: bool = False  # q and k

    def tokens(self, start: int, stop: int) -> DeltaInputs:
        """Return the inputs of tokens ``start`` to ``stop``."""
        log_decay, ids = self.log_decay, self.segment_ids
        if log_decay is not None and log_decay.dim() > 1:
            log_decay = log_decay[:, :, start:stop]
        q, k, v, beta = (x[:, :, start:stop] for x in (self.q, self.k, self.v, self.beta))
        ids = None if ids is None else ids[:, start:stop]
        return self._replace(q=q, k=k, v=v, beta=beta, log_decay=log_decay, segment_ids=ids)


def normalized(x: DeltaInputs) -> DeltaInputs:
    """Return the inputs with queries and keys that need no normalisation."""
    if not x.normalize:
        return x
    dtype = x.state.kv.dtype
    return x._replace(
        q=_l2_normalize(x.q.to(dtype)), k=_l2_normalize(x.k.to(dtype)), normalize=False
    )


def _l2_normalize(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (norm.square() + NORM_EPS).rsqrt()
