"""What linear attention accepts: every refusal says what came, what is accepted and what to do.

Letters: B batch, H heads, Hkv key heads, T queries, S keys, D key size, E value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.errors import UnsupportedError
from attnzoo.state import LinearState

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: LinearState | None,
    segment_ids: Tensor | None,
    causal: bool,
) -> None:
    """Raise ``UnsupportedError``, a ``ValueError``, for tensors that do not fit each other."""
    _check_qkv(q, k, v, causal)
    if log_decay is not None:
        _check_log_decay(log_decay, k, causal)
    if state is not None:
        _check_state(state, k, v)
    if segment_ids is not None:
        _check_segment_ids(segment_ids, q, k)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    for name, x, letters in (
        ("q", q, "B, H, T, D"),
        ("k", k, "B, Hkv, S, D"),
        ("v", v, "B, Hkv, S, E"),
    ):
        if x.dim() != 4:
            raise UnsupportedError(f"{name} must be [{letters}], got {_shape(x)}.")
        _check_dtype(name, x)
    if k.shape[:3] != v.shape[:3]:
        raise UnsupportedError(
            f"k and v must agree in batch, heads and length, got k {_shape(k)} and v {_shape(v)}."
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise UnsupportedError(
            f"q and k must agree in batch and in key size, got q {_shape(q)} and k {_shape(k)}."
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise UnsupportedError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}: every key head serves as many query "
            "heads, so the first must be a multiple of the second."
        )
    if causal and q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"causal attention reads queries and keys of the same tokens, got {q.shape[2]} queries "
            f"and {k.shape[2]} keys; give earlier tokens as state=, or set causal=False."
        )


def _check_log_decay(log_decay: Tensor, k: Tensor, causal: bool) -> None:
    _check_dtype("log_decay", log_decay)
    if not causal:
        raise UnsupportedError(
            "log_decay fades earlier tokens and has no meaning with causal=False; leave it out."
        )
    batch, heads, keys, size = k.shape
    accepted = [(heads,), (batch, heads, keys), (batch, heads, keys, size)]
    if tuple(log_decay.shape) not in accepted:
        raise UnsupportedError(
            f"log_decay must be [Hkv], [B, Hkv, S] or [B, Hkv, S, D], here "
            f"{', '.join(str(list(shape)) for shape in accepted)}; got {_shape(log_decay)}."
        )


def _check_state(state: LinearState, k: Tensor, v: Tensor) -> None:
    batch, heads, _, size = k.shape
    for name, x, shape in (
        ("state.kv", state[0], (batch, heads, size, v.shape[3])),
        ("state.k", state[1], (batch, heads, size)),
    ):
        if tuple(x.shape) != shape:
            raise UnsupportedError(
                f"{name} must be {list(shape)} for these keys and values, got {_shape(x)}; "
                "it comes from a call with the same heads and sizes."
            )
        if x.dtype not in (torch.float32, torch.float64):
            raise UnsupportedError(
                f"{name} is {x.dtype}: sums are kept in float32 or float64; do not convert a state."
            )


def _check_segment_ids(segment_ids: Tensor, q: Tensor, k: Tensor) -> None:
    if segment_ids.dtype.is_floating_point or segment_ids.dtype.is_complex:
        raise UnsupportedError(f"segment_ids must be integer, got {segment_ids.dtype}.")
    if segment_ids.shape != (k.shape[0], k.shape[2]):
        raise UnsupportedError(
            f"segment_ids must be [B, S], here {[k.shape[0], k.shape[2]]}; "
            f"got {_shape(segment_ids)}."
        )
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"segment_ids name the segment of queries and keys alike, got {q.shape[2]} queries and "
            f"{k.shape[2]} keys; leave them out, or pack both the same way."
        )


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UnsupportedError(
            f"{name} is {str(x.dtype).removeprefix('torch.')}; it must be one of {names}."
        )


def _shape(x: Tensor) -> str:
    return str(list(x.shape))
