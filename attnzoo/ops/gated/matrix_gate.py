"""Linear attention with a full-matrix gate, token by token in torch.

Letters: B batch, H heads, Hkv key heads, G = H / Hkv, T tokens, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.states import MatrixState

BLOCK = 16  # tokens whose gates are computed at once

MatrixGateResult = tuple[Tensor, MatrixState]  # the output, and the state after the last token


class MatrixGateInputs(NamedTuple):
    """Inputs of :func:`attnzoo.ops.gated.api.matrix_gated_attention`, checked."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D], zero at padding
    v: Tensor  # [B, Hkv, T, E]
    log_decay: Callable[[int, int], Tensor]  # of tokens start to stop: [B, Hkv, n, D, E]
    state: MatrixState  # its dtype is that of all sums
    padding_mask: Tensor | None  # [B, T] bool, true at real tokens
    segment_ids: Tensor | None  # [B, T]
    normalize: bool
    eps: float
    value_weights: Tensor | None = None  # [B, Hkv, T, E], factors of the values and of their ones

    def masked_log_decay(self, start: int, stop: int) -> Tensor:
        """Return the log decays of tokens ``start`` to ``stop``, zero at padding."""
        log_decay = self.log_decay(start, stop).to(self.state.kv.dtype)
        if self.padding_mask is not None:
            is_padding = ~self.padding_mask[:, None, start:stop, None, None]
            log_decay = log_decay.masked_fill(is_padding, 0)
        return log_decay


def run_torch(x: MatrixGateInputs) -> MatrixGateResult:
    """Compute all tokens, one step after another."""
    dtype, (heads, tokens, size) = x.state.kv.dtype, x.v.shape[1:]
    # [B, Hkv, D, 2 E]: the sums of keys are those of values of one
    sums = torch.cat(list(x.state), -1)
    queries = x.q.to(dtype).unflatten(1, (heads, -1)).unbind(3)
    keys = x.k.to(dtype).unsqueeze(-1).unbind(2)
    with_ones = F.pad(x.v.to(dtype), (0, size), value=1.0)
    if x.value_weights is not None:
        with_ones = with_ones * torch.cat([x.value_weights.to(dtype)] * 2, -1)
    values = with_ones.unsqueeze(3).unbind(2)
    outs = []
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        decay = x.masked_log_decay(start, stop).exp()
        if x.segment_ids is not None and stop > 1:
            ids = x.segment_ids[:, max(start, 1) : stop]
            same = ids == x.segment_ids[:, max(start, 1) - 1 : stop - 1]
            same = F.pad(same, (1, 0), value=True) if start == 0 else same
            decay = decay * same[:, None, :, None, None]
        for t, gate in enumerate(torch.cat([decay, decay], -1).unbind(2), start):
            sums = torch.addcmul(keys[t] * values[t], gate, sums)
            outs.append(queries[t] @ sums)
    out = torch.stack(outs, 3) if outs else sums.new_empty(*x.q.shape[:2], 1, 0, 2 * size)
    numerator, denominator = out.chunk(2, -1)
    out = numerator / (denominator + x.eps) if x.normalize else numerator
    return out.flatten(1, 2).to(x.v.dtype), MatrixState(*sums.chunk(2, -1))


def state_of_tokens(x: MatrixGateInputs) -> MatrixState:
    """Return the state after this rank's tokens, from an empty state."""
    return run_torch(x._replace(q=torch.zeros_like(x.k)))[1]


def total_log_decay(x: MatrixGateInputs) -> Tensor:
    """Return the sum of the log decays of all tokens, ``[B, Hkv, D, E]``."""
    starts = range(0, x.k.shape[2], BLOCK)
    blocks = [x.masked_log_decay(t, min(t + BLOCK, x.k.shape[2])).sum(2) for t in starts]
    return torch.stack(blocks).sum(0)
