"""Checks of what only linear attention takes; kernels read it by address."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.states import LinearState, MatrixState, StabilizedState
from attnzoo.contract.validation import (
    check_device,
    check_dtype,
    check_state_field,
    format_shape,
)
from attnzoo.errors import UnsupportedError


def check_log_decay(
    log_decay: Tensor, k_shape: tuple[int, ...], device: torch.device, causal: bool
) -> None:
    """Raise ``UnsupportedError`` if log decays do not fit keys ``[B, Hkv, S, D]`` and the mask."""
    check_dtype("log_decay", log_decay)
    check_device("log_decay", log_decay, device)
    if not causal:
        raise UnsupportedError(
            "log_decay decays earlier tokens, so it needs a causal mask; leave it out without one."
        )
    accepted = [k_shape[1:2], k_shape[:3], k_shape]
    if log_decay.shape not in accepted:
        raise UnsupportedError(
            f"log_decay must be [Hkv], [B, Hkv, S] or [B, Hkv, S, D], here "
            f"{', '.join(str(list(shape)) for shape in accepted)}; got {format_shape(log_decay)}."
        )
    check_is_log_decay(log_decay, k_shape[2])


def check_is_log_decay(log_decay: Tensor, length: int) -> None:
    """Raise ``UnsupportedError`` if a log decay is above 0, so that it is no decay.

    Checked on CPUs, where reading the values does not wait for a device, for several tokens.
    """
    is_known = type(log_decay) in (Tensor, torch.nn.Parameter) and log_decay.device.type == "cpu"
    if length < 2 or not log_decay.numel() or not is_known or torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:  # vmap has no single value
        return
    largest = log_decay.detach().amax().item()
    if largest > 0:
        raise UnsupportedError(
            f"log_decay is up to {largest:.3g}, but the logarithm of a decay, which is between 0 "
            "and 1, is at most 0; pass decay.log(), or logsigmoid of a gate's output."
        )


AnyState = LinearState | StabilizedState | MatrixState


def check_state(
    kind: type[AnyState], state: AnyState, k: Tensor, v: Tensor, batch: int | None = None
) -> None:
    """Raise ``UnsupportedError`` if a state is not of a kind, or does not fit keys and values.

    ``batch`` is the number of states, if it is not that of rows.
    """
    if len(state) != len(kind._fields):
        raise UnsupportedError(
            f"state must be a {kind.__name__} of {', '.join(kind._fields)}, got "
            f"{type(state).__name__} of length {len(state)}; pass the state that the same op "
            "returned."
        )
    rows, heads, _, size = k.shape
    batch = rows if batch is None else batch
    shape = (batch, heads, size, v.shape[3])
    check_state_field("state.kv", state[0], shape, k.device)
    check_state_field("state.k", state[1], shape if kind is MatrixState else shape[:3], k.device)
    if len(state) == 3:
        check_state_field("state.m", state[2], shape[:2], k.device)
