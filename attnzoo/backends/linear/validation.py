"""Checks of the tensors that only linear attention takes: log decays, state, segment ids.

Letters: B batch, H heads, Hkv key heads, T queries, S keys, D key size, E value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backends.validation import check_dtype, format_shape
from attnzoo.errors import UnsupportedError
from attnzoo.state import LinearState


def check_log_decay(log_decay: Tensor, k: Tensor, causal: bool) -> None:
    """Raise ``UnsupportedError`` if log decays do not fit the keys and the mask."""
    check_dtype("log_decay", log_decay)
    if not causal:
        raise UnsupportedError(
            "log_decay decays earlier tokens, so it needs a causal mask; leave it out without one."
        )
    batch, heads, keys, size = k.shape
    accepted = [(heads,), (batch, heads, keys), (batch, heads, keys, size)]
    if tuple(log_decay.shape) not in accepted:
        raise UnsupportedError(
            f"log_decay must be [Hkv], [B, Hkv, S] or [B, Hkv, S, D], here "
            f"{', '.join(str(list(shape)) for shape in accepted)}; got {format_shape(log_decay)}."
        )


def check_state(state: LinearState, k: Tensor, v: Tensor) -> None:
    """Raise ``UnsupportedError`` if a state does not fit the keys and values."""
    batch, heads, _, size = k.shape
    for name, x, shape in (
        ("state.kv", state[0], (batch, heads, size, v.shape[3])),
        ("state.k", state[1], (batch, heads, size)),
    ):
        if tuple(x.shape) != shape:
            raise UnsupportedError(
                f"{name} must be {list(shape)} for these keys and values, got {format_shape(x)}; "
                "pass the state of a call with the same heads and sizes."
            )
        if x.dtype not in (torch.float32, torch.float64):
            raise UnsupportedError(
                f"{name} is {x.dtype}; it must be float32 or float64, so do not convert a state."
            )


def check_packed_tokens(q: Tensor, k: Tensor) -> None:
    """Raise ``UnsupportedError`` if packed queries and keys are not the same tokens."""
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            "segment_ids give the segments of queries and keys, which must be the same tokens, got "
            f"{q.shape[2]} queries and {k.shape[2]} keys; leave them out, or pack both the same "
            "way."
        )
