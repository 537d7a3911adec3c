"""Checks of the tensors that the delta rule takes.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import DeltaState
from attnzoo.contract.validation import (
    check_qkv,
    check_sequences,
    check_shape,
    check_state_field,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.linear.validation import check_log_decay


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: DeltaState | None,
    sequences: Sequences | None,
    slots: Tensor | None,
) -> None:
    """Raise ``UnsupportedError`` for tensors that do not fit each other."""
    check_qkv(q, k, v)
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"delta_attention needs queries and keys of the same tokens, got {q.shape[2]} queries "
            f"and {k.shape[2]} keys; pass earlier tokens as state=."
        )
    check_shape("beta", beta, tuple(k.shape[:3]), "B, Hkv, T", q.device)
    if log_decay is not None:
        check_log_decay(log_decay, k.shape, k.device, causal=True)
    batch = check_sequences(sequences, slots, q, k)
    if state is not None:
        batch = batch if slots is None else state.kv.shape[0]
        shape = (batch, k.shape[1], k.shape[3], v.shape[3])
        check_state_field("state.kv", state.kv, shape, q.device)
