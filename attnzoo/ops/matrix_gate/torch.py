"""Linear attention with a full-matrix gate, token by token, and the state of earlier ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.context_parallel import (
    SequenceShard,
    fold_earlier_states,
    log_decay_across_shard,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import MatrixState

BLOCK = 16  # tokens whose gates are computed at once

TakeTokens = Callable[..., Tensor]  # take(x, dim=1): some tokens of a tensor, batch first
MatrixGateResult = tuple[Tensor, MatrixState]  # the output, and the state after the last token


class MatrixGateInputs(NamedTuple):
    """Inputs of :func:`attnzoo.ops.matrix_gate.api.matrix_gated_attention`, checked."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    log_decay: Callable[[TakeTokens], Tensor]  # of n tokens: [B, Hkv, n, D, E]
    state: MatrixState  # its dtype is that of all sums
    normalize: bool
    eps: float
    value_weights: Tensor | None = None  # [B, Hkv, T, E], factors of the values and of their ones

    sequences: Sequences | None = None  # whose tokens ``log_decay`` has, if it has one row

    def rows(self, sequences: Sequences | None) -> MatrixGateInputs:
        """Return the inputs with one row a sequence; ``log_decay`` keeps the one row."""
        if sequences is None:
            return self
        q, k, v = (sequences.to_rows(x) for x in (self.q, self.k, self.v))
        weights = self.value_weights
        weights = None if weights is None else sequences.to_rows(weights)
        return self._replace(q=q, k=k, v=v, value_weights=weights, sequences=sequences)

    def decays(self, start: int, stop: int) -> Tensor:
        """Return the log decays of tokens ``start`` to ``stop``, zero after a sequence."""
        dtype, sequences = self.state.kv.dtype, self.sequences
        if sequences is None:
            return self.log_decay(lambda x, dim=1: x.narrow(dim, start, stop - start)).to(dtype)
        place = torch.arange(start, stop, device=self.k.device)
        inside = place < sequences.lengths[:, None]
        index = torch.where(inside, sequences.starts[:, None] + place, 0)

        def take(x: Tensor, dim: int = 1) -> Tensor:
            found = x[0].index_select(dim - 1, index.flatten())
            taken: Tensor = found.unflatten(dim - 1, index.shape).movedim(dim - 1, 0)
            return taken

        return self.log_decay(take).to(dtype).masked_fill(~inside[:, None, :, None, None], 0)


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
        decay = x.decays(start, stop).exp()
        for t, gate in enumerate(torch.cat([decay, decay], -1).unbind(2), start):
            sums = torch.addcmul(keys[t] * values[t], gate, sums)
            outs.append(queries[t] @ sums)
    out = torch.stack(outs, 3) if outs else sums.new_empty(*x.q.shape[:2], 1, 0, 2 * size)
    numerator, denominator = out.chunk(2, -1)
    out = numerator / (denominator + x.eps) if x.normalize else numerator
    return out.flatten(1, 2).to(x.v.dtype), MatrixState(*sums.chunk(2, -1))


def _state_of_tokens(x: MatrixGateInputs) -> MatrixState:
    """Return the state after this rank's tokens, from an empty state."""
    return run_torch(x._replace(q=torch.zeros_like(x.k)))[1]


def _total_log_decay(x: MatrixGateInputs) -> Tensor:
    """Return the sum of the log decays of all tokens, ``[B, Hkv, D, E]``."""
    starts = range(0, x.k.shape[2], BLOCK)
    blocks = [x.decays(t, min(t + BLOCK, x.k.shape[2])).sum(2) for t in starts]
    return torch.stack(blocks).sum(0)


def state_from_earlier_ranks(
    x: MatrixGateInputs, shard: SequenceShard, sequences: Sequences | None
) -> MatrixState:
    """Return the states before this rank's tokens, one for each of its sequences.

    Args:
        x: This rank's tokens, one row a sequence, from empty states.
        shard: This rank's part of the sequences.
        sequences: Those of the tokens, if they are one row; the rows are in ``shard.layout``.
    """
    last, log_decay = _state_of_tokens(x), _total_log_decay(x)
    if shard.layout is not None and sequences is not None:
        last, log_decay = (
            MatrixState(*shard.layout.state_to_rows(last, sequences.count)),
            shard.layout.state_to_rows(MatrixState(log_decay, log_decay), sequences.count).kv,
        )
    decay = log_decay_across_shard(log_decay, shard).exp()
    total = fold_earlier_states(torch.cat(list(last), 3), torch.cat([decay, decay], 3), shard)
    states = shard.states(MatrixState(*total.chunk(2, 3)), sequences)
    return MatrixState(*(y.to(x.state.kv.dtype) for y in states))
