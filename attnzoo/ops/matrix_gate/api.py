"""Linear attention with a full-matrix gate: one decay per pair of key and value channels; causal.

A decay per head, token or key channel needs it not: :func:`attnzoo.ops.linear.api.linear_attention`
takes it as ``log_decay``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.implementation import TORCH, Implementation, register_implementation, select
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, MatrixState, run_at_slots
from attnzoo.contract.validation import check_shape, empty_output, is_empty_call
from attnzoo.ops.gated.common import check_gated
from attnzoo.ops.linear.common import state_dtype
from attnzoo.ops.matrix_gate.reference import run_reference
from attnzoo.ops.matrix_gate.torch import (
    MatrixGateInputs,
    TakeTokens,
    run_torch,
    state_from_earlier_ranks,
)


def matrix_gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Callable[[TakeTokens], Tensor],
    value_weights: Tensor | None = None,
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
        value_weights: w, ``[B, Hkv, T, E]``: the weight of a token in each value channel, by which
            its value is multiplied, and its ones if normalised; all 1 when ``None``.
        sequences: As in ``linear_attention``.
        normalize: Divide by the sum of weights plus ``eps``.
        impl: ``"torch"``, ``"reference"`` or ``"auto"``.
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
    if value_weights is not None:
        check_shape("value_weights", value_weights, tuple(v.shape), "B, Hkv, T, E", q.device)
    dtype = state_dtype(q, k, v)
    if state is None:
        rows = k.shape[0] if sequences is None else sequences.count
        empty = torch.zeros(rows, k.shape[1], k.shape[3], v.shape[3], dtype=dtype, device=v.device)
        state = MatrixState(empty, empty)
    state = MatrixState(*(x.to(dtype) for x in state))
    call = MatrixGateInputs(q, k, v, log_decay, state, normalize, eps, value_weights).rows(
        sequences
    )
    if shard is not None:
        call = call._replace(state=state_from_earlier_ranks(call, shard, sequences))
    chosen, choice = select("matrix_gated_attention", call, impl)
    if is_empty_call(q, k):
        gates = call.decays(0, 0)  # of no token: a path to what computes them
        out, last = empty_output(q, k, v, value_weights, gates), call.state
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


register_implementation(
    Implementation(
        op="matrix_gated_attention",
        **TORCH,
        run=run_torch,
        form="token by token",
    ),
    Implementation(
        op="matrix_gated_attention", name="reference", form="token by token", run=run_reference
    ),
)
