"""Checks of the tensors that the delta rule takes.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backends.linear.validation import check_log_decay
from attnzoo.backends.validation import check_dtype, check_qkv, format_shape
from attnzoo.errors import UnsupportedError
from attnzoo.masks import AttentionMask
from attnzoo.state import DeltaState


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: DeltaState | None,
    mask: AttentionMask,
) -> None:
    """Raise ``UnsupportedError`` for tensors that do not fit each other."""
    check_qkv(q, k, v, mask)
    if not mask.causal:
        raise UnsupportedError(
            "delta_attention is causal, got a mask that is not; pass AttentionMask(causal=True), "
            "or None."
        )
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"delta_attention needs queries and keys of the same tokens, got {q.shape[2]} queries "
            f"and {k.shape[2]} keys; pass earlier tokens as state=."
        )
    check_dtype("beta", beta)
    if beta.shape != k.shape[:3]:
        raise UnsupportedError(
            f"beta must be [B, Hkv, T], here {list(k.shape[:3])}; got {format_shape(beta)}."
        )
    if log_decay is not None:
        check_log_decay(log_decay, k, causal=True)
    if state is not None:
        check_state(state, k, v)


def check_state(state: DeltaState, k: Tensor, v: Tensor) -> None:
    """Raise ``UnsupportedError`` if a state does not fit the keys and values."""
    shape = (*k.shape[:2], k.shape[3], v.shape[3])
    if tuple(state.kv.shape) != shape:
        raise UnsupportedError(
            f"state.kv must be {list(shape)} for these keys and values, got "
            f"{format_shape(state.kv)}; pass the state of a call with the same heads and sizes."
        )
    if state.kv.dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(
            f"state.kv is {state.kv.dtype}; it must be float32 or float64, so do not convert a "
            "state."
        )
