"""Device of the Triton kernel tests: a GPU if there is one, else the CPU with the interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def interpret_kernels(
    environment: Mapping[str, str] = os.environ, has_gpu: bool | None = None
) -> bool:
    """Return whether kernels are interpreted: without a GPU, or if TRITON_INTERPRET is 1."""
    has_gpu = torch.cuda.is_available() if has_gpu is None else has_gpu
    return not has_gpu or environment.get("TRITON_INTERPRET") == "1"


def kernel_device() -> torch.device:
    """Return the device of the tensors that kernels get in this session."""
    from attnzoo.runtime.triton_interpreter import interpreted

    return torch.device("cpu") if interpreted() else torch.device("cuda", 0)


def require_bool_masks() -> None:
    """Make the interpreter refuse masks that are no blocks of bools, as that of Triton 3.9 does.

    ``block & scalar`` of two conditions is a block of integers.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    for name in ("create_masked_load", "create_masked_store"):
        original = getattr(InterpreterBuilder, name)

        def checked(self: Any, *args: Any, original: Any = original) -> Any:
            mask = args[1] if original.__name__ == "create_masked_load" else args[2]
            assert mask.data.dtype == bool, f"a mask is {mask.data.dtype}; use mask_if()"
            return original(self, *args)

        setattr(InterpreterBuilder, name, checked)


def float32_slack() -> float:
    """Return the factor on error budgets of float32.

    On a GPU, a product is the sum of three tf32 products, which omits the product of the low parts,
    2^-22, and tensor cores truncate sums.
    """
    return 1.0 if kernel_device().type == "cpu" else 10.0


@contextmanager
def nan_in_uninitialized_memory() -> Iterator[None]:
    """Return a context in which empty tensors are filled with NaN."""
    on_gpu = kernel_device().type == "cuda"  # where some operations of torch only warn
    torch.use_deterministic_algorithms(True, warn_only=on_gpu)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
