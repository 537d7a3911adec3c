"""Checks of what only linear attention takes; kernels read it by address.

Letters: B batch, H heads, Hkv key heads, T queries, S keys, D key size, E value size.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.backends.validation import (
    check_device,
    check_dtype,
    check_state_field,
    format_shape,
)
from attnzoo.errors import UnsupportedError
from attnzoo.state import LinearState, MatrixState, StabilizedState


def check_log_decay(log_decay: Tensor, k: Tensor, causal: bool) -> None:
    """Raise ``UnsupportedError`` if log decays do not fit the keys and the mask."""
    check_dtype("log_decay", log_decay)
    check_device("log_decay", log_decay, k.device)
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


AnyState = LinearState | StabilizedState | MatrixState


def check_state(kind: type[AnyState], state: AnyState, k: Tensor, v: Tensor) -> None:
    """Raise ``UnsupportedError`` if a state is not of a kind, or does not fit keys and values."""
    if len(state) != len(kind._fields):
        raise UnsupportedError(
            f"state must be a {kind.__name__} of {', '.join(kind._fields)}, got "
            f"{type(state).__name__} of length {len(state)}; pass the state that the same op "
            "returned."
        )
    heads, size, values = tuple(k.shape[:2]), k.shape[3], v.shape[3]
    kv, sums, *rest = state
    sums_shape = (*heads, size, values)[: 4 if kind is MatrixState else 3]
    check_state_field("state.kv", kv, (*heads, size, values), k.device)
    check_state_field("state.k", sums, sums_shape, k.device)
    if kind is StabilizedState:
        check_state_field("state.m", rest[0], heads, k.device)


def check_packed_tokens(q: Tensor, k: Tensor) -> None:
    """Raise ``UnsupportedError`` if packed queries and keys are not the same tokens."""
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            "segment_ids give the segments of queries and keys, which must be the same tokens, got "
            f"{q.shape[2]} queries and {k.shape[2]} keys; leave them out, or pack both the same "
            "way."
        )
