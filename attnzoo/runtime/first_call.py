"""Compare the kernels of other projects with torch, once a process, before ``"auto"`` takes them.

The projects check their kernels themselves; what is found here is a wrong build, compiler or driver
on the user's GPU. The first call of a kind on a device computes one small case with the kernels,
and in float64 on the CPU. Kernels that differ or fail are not selected in this process, and a
warning says so. Kernels that a user names are not compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from attnzoo.runtime.kernel_calls import autocast_disabled, is_transformed

BUDGET = 0.03  # of the norm: what 16-bit products cost gradients of gates, with a margin
LEAST = 1e-30  # error of what decays to nothing
NOT_NOW = "they are compared with torch on the first call outside of "  # a transform, a capture

_FOUND: dict[Hashable, tuple[str, str]] = {}  # verdicts of this process


def first_call_verdict(
    kernels: str, kind: Hashable, device: torch.device, compare: Callable[[], list[str]]
) -> tuple[str, str]:
    """Return why ``impl="auto"`` skips kernels that support a call, or "", and what describe adds.

    Made for ``Implementation.verdict``.

    Args:
        kernels: Their name in messages.
        kind: Of which calls ``compare`` computes one: one comparison for each.
        device: The device of the call.
        compare: Returns what differs, as :func:`differences` does; draws no random numbers from
            torch's generators.
    """
    key = (kernels, kind, device)
    if key in _FOUND:
        return _FOUND[key]
    if is_transformed():
        return f"{NOT_NOW}torch.func", ""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return f"{NOT_NOW}a CUDA graph", ""
    try:
        wrong = _outside_of_contexts(compare, device)
    except torch.OutOfMemoryError:
        return "there was no memory to compare them with torch", ""
    except Exception as error:  # whatever a compiler or a driver raises
        lines = str(error).strip().splitlines()
        wrong = [f"{type(error).__name__}: {lines[0][:300] if lines else ''}"]
    name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else str(device)
    _FOUND[key] = "", f"compared with torch on {name}"
    if wrong:
        reason = f"they are wrong on {name} ({'; '.join(wrong)})"
        _FOUND[key] = reason, ""
        warnings.warn(f"impl='auto' does not select {kernels}: {reason}.", stacklevel=2)
    return _FOUND[key]


def differences(
    found: Mapping[str, Tensor], exact: Mapping[str, Tensor], budget: float = BUDGET
) -> list[str]:
    """Return a message for each result whose error exceeds the budget, as a part of its norm."""
    wrong = []
    for name, y in exact.items():
        norm = torch.linalg.vector_norm(y).item()
        error = torch.linalg.vector_norm(found[name].to(y) - y).item()
        if not error <= budget * norm + LEAST:  # NaN, too
            wrong.append(f"{name} differs from float64 by {error:.2g}, and its norm is {norm:.2g}")
    return wrong


def _outside_of_contexts(compare: Callable[[], list[str]], device: torch.device) -> list[str]:
    """Run a comparison as if the call were made outside of all contexts, which it must not enter.

    Checkpointing counts the tensors that a layer saves, and fake tensors hold no numbers.
    """
    with (
        _disable_current_modes(),
        saved_tensors_hooks(lambda x: x, lambda x: x),
        torch.inference_mode(False),
        torch.enable_grad(),
        autocast_disabled(device),
    ):
        return compare()
