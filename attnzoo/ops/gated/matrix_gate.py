"""Linear attention with a full-matrix gate: one decay per pair of key and value channels; causal.

A decay per head, token or key channel needs it not: :func:`attnzoo.ops.linear.api.linear_attention`
takes it as ``log_decay``.
"""

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
from attnzoo.contract.implementation import TORCH, Implementation, register_implementation, select
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, MatrixState, run_at_slots
from attnzoo.contract.validation import empty_output, is_empty_call
from attnzoo.ops.gated.common import check_gated
from attnzoo.runtime.kernel_calls import state_dtype

BLOCK = 16  # tokens whose gates are computed at once

TakeTokens = Callable[..., Tensor]  # take(x, dim=1): some tokens of a tensor, batch first
MatrixGateResult = tuple[Tensor, MatrixState]  # the output, and the state after the last token


class MatrixGateInputs(NamedTuple):
    """Inputs of :func:`matrix_gated_attention`, checked."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    log_decay: Callable[[TakeTokens], Tensor]  # of n tokens: [B, Hkv, n, D, E]
    state: MatrixState  # its dtype is that of all sums
    normalize: bool
    eps: float
    sequences: Sequences | None = None  # whose tokens ``log_decay`` has, if it has one row

    def rows(self, sequences: Sequences | None) -> MatrixGateInputs:
        """Return the inputs with one row a sequence; ``log_decay`` keeps the one row."""
        if sequences is None:
            return self
        q, k, v = (sequences.to_rows(x) for x in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v, sequences=sequences)

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


def matrix_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Callable[[TakeTokens], Tensor],
    sequences: Sequences | None = None,
    normalize: bool = False,
    impl: str = "auto",
    state: MatrixState | None = None,
    return_state: bool = False,
    eps: float = 1e-6,
    shard: SequenceShard | None = None,
    reuse_state: bool = False,
    slots: Tensor | None = None,
) -> AttentionOutput:
    r"""Compute linear attention with one decay per pair of key and value channels.

    Computes :math:`S_t = e^{G_t} \odot S_{t-1} + k_t v_t^T` and :math:`o_t = q_t S_t` with a matrix
    :math:`G_t`; normalised, each value channel is divided by the same sum with ones for values. No
    chunk form exists for such a gate, so prefill and training run token by token too. Time
    O(T D E) in T steps; the backward pass stores the state of every step, O(T D E) of memory.
    Source: the general gate of Yang et al., 2024, arXiv:2312.06635, table 1; Mao, 2022,
    arXiv:2210.04243.

    Args:
        q: Queries after the feature map, ``[B, H, T, D]``.
        k: Keys after the feature map, ``[B, Hkv, T, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: Returns G of n tokens, ``[B, Hkv, n, D, E]``, at most 0. It is a function because
            G of all tokens would take T matrices per head. It gets a function ``take(x, dim)``,
            which takes these tokens from a tensor whose dimension ``dim`` is the tokens' and whose
            first one is the batch.
        sequences: As in ``linear_attention``.
        normalize: Divide by the sum of weights plus ``eps``.
        impl: ``"torch"`` or ``"auto"``.
        state: Sums over the earlier tokens.
        return_state: Whether to return the state after the last token.
        eps: Added to the sum of weights.
        shard: This rank's part of sequences that several ranks hold, in place of ``state``. Its
            tokens are computed twice: first for the state that they leave to later ranks.
        reuse_state: Whether the tensors of a pool are overwritten; without gradients.
        slots: As in ``linear_attention``.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; also ``state`` and ``impl``.

    Raises:
        ValueError: Shapes, dtypes or options are not supported; the message says which are.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 100, 8)
        >>> log_decays = -torch.rand(1, 4, 100, 8, 8)
        >>> decay = lambda take: take(log_decays, 2)
        >>> attnzoo.ops.matrix_gated_attention(q, k, v, log_decay=decay).out.shape
        torch.Size([1, 4, 100, 8])
    """
    check_gated("matrix_gated_attention", MatrixState, q, k, v, sequences, slots, state, shard)
    dtype = state_dtype(q, k, v)
    if state is None:
        rows = k.shape[0] if sequences is None else sequences.count
        empty = torch.zeros(rows, k.shape[1], k.shape[3], v.shape[3], dtype=dtype, device=v.device)
        state = MatrixState(empty, empty)
    state = MatrixState(*(x.to(dtype) for x in state))
    call = MatrixGateInputs(q, k, v, log_decay, state, normalize, eps).rows(sequences)
    if shard is not None:
        call = call._replace(state=_state_from_earlier_ranks(call, shard, sequences))
    chosen, choice = select("matrix_gated_attention", call, impl)
    if is_empty_call(q, k):
        gates = call.decays(0, 0)  # of no token: a path to what computes them
        out, last = empty_output(q, k, v, gates), call.state
    elif slots is not None:
        out, pool = run_at_slots(
            lambda rows: chosen.run(call._replace(state=MatrixState(*rows))),
            *(state, slots),
            in_place=reuse_state and not torch.is_grad_enabled(),
        )
        last = MatrixState._make(pool)
    else:
        out, last = chosen.run(call)
        out = out if sequences is None else sequences.to_row(out, q.shape[2])
    return AttentionOutput(out, last if return_state else None, None, choice)


def _run(x: MatrixGateInputs) -> MatrixGateResult:
    """Compute all tokens, one step after another."""
    dtype, (heads, tokens, size) = x.state.kv.dtype, x.v.shape[1:]
    # [B, Hkv, D, 2 E]: the sums of keys are those of values of one
    sums = torch.cat(list(x.state), -1)
    queries = x.q.to(dtype).unflatten(1, (heads, -1)).unbind(3)
    keys = x.k.to(dtype).unsqueeze(-1).unbind(2)
    values = F.pad(x.v.to(dtype), (0, size), value=1.0).unsqueeze(3).unbind(2)
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


def _state_from_earlier_ranks(
    x: MatrixGateInputs, shard: SequenceShard, sequences: Sequences | None
) -> MatrixState:
    """Return the states before this rank's tokens, one for each of its sequences.

    Args:
        x: This rank's tokens, one row a sequence, from empty states.
        shard: This rank's part of the sequences.
        sequences: Those of the tokens, if they are one row; the rows are in ``shard.layout``.
    """
    last, starts = _run(x._replace(q=torch.zeros_like(x.k)))[1], range(0, x.k.shape[2], BLOCK)
    decays = (x.decays(t, min(t + BLOCK, x.k.shape[2])).sum(2) for t in starts)
    log_decay = torch.stack(list(decays)).sum(0)
    if shard.layout is not None and sequences is not None:
        last, log_decay = (
            MatrixState(*shard.layout.state_to_rows(last, sequences.count)),
            shard.layout.state_to_rows(MatrixState(log_decay, log_decay), sequences.count).kv,
        )
    decay = log_decay_across_shard(log_decay, shard).exp()
    total = fold_earlier_states(torch.cat(list(last), 3), torch.cat([decay, decay], 3), shard)
    states = shard.states(MatrixState(*total.chunk(2, 3)), sequences)
    return MatrixState(*(y.to(x.state.kv.dtype) for y in states))


register_implementation(
    Implementation(op="matrix_gated_attention", **TORCH, run=_run, form="token by token")
)
