"""Linear attention in Triton: which calls the kernels support, and the call itself."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import LinearState, check_slots, run_on_slots
from attnzoo.errors import UnsupportedError
from attnzoo.ops.linear.common import LinearInputs, Result, map_inputs
from attnzoo.runtime.compilers import assembler, compiler_reasons, gpu_capability
from attnzoo.runtime.kernel_calls import (
    autocast_disabled,
    check_reverse_mode,
)

LARGEST = 256  # key and value size


def triton_reasons(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, chunk_size: int | None = None
) -> list[str]:
    """Return every reason why the Triton kernels do not support a call.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        causal: Whether a token sees only itself and earlier tokens.
        chunk_size: The one that the caller wants.
    """
    reasons = []
    if chunk_size is not None:
        reasons.append(f"chunk_size is {chunk_size} (the kernels choose it; leave it out)")
    if not causal:
        reasons.append("attention is bidirectional (the kernels are causal)")
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        reasons.append("an input is float64 (the kernels support bfloat16, float16 and float32)")
    sizes = (k.shape[3], v.shape[3])
    if max(sizes) > LARGEST:
        reasons.append(f"key size is {sizes[0]} and value size {sizes[1]} (at most {LARGEST})")
    has_16_bit = any(x.dtype in (torch.bfloat16, torch.float16) for x in (q, k, v))
    if has_16_bit and any(size % 2 for size in sizes):
        reasons.append(
            f"key size is {sizes[0]} and value size {sizes[1]} in 16 bits (both must be even)"
        )
    return [*reasons, *device_reasons(q.device)]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def device_reasons(device: torch.device) -> tuple[str, ...]:
    """Return every reason why kernels do not run on a device, computed once per assembler."""
    if not _has_triton():
        return ("triton is not installed (pip install triton)",)
    key = device, assembler(device)
    if key not in _DEVICE_REASONS:
        _DEVICE_REASONS[key] = _find_device_reasons(device)
    return _DEVICE_REASONS[key]


_DEVICE_REASONS: dict[tuple[torch.device, str], tuple[str, ...]] = {}


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _find_device_reasons(device: torch.device) -> tuple[str, ...]:
    from attnzoo.runtime.triton_interpreter import interpreted

    if interpreted():
        return ()
    if device.type == "cpu":
        return (
            "the tensors are on cpu (the kernels run on NVIDIA GPUs, and on the CPU for tests if "
            "TRITON_INTERPRET=1 is set before Triton is imported)",
        )
    if device.type != "cuda":
        return ()  # the registry knows the devices of an implementation
    if torch.version.hip is not None:
        return ("the GPU is from AMD (the kernels are tested on NVIDIA GPUs only)",)
    capability = gpu_capability(device)
    if capability < (8, 0):
        found = f"{capability[0]}.{capability[1]}"
        return (f"the GPU has compute capability {found} (8.0 or later is needed)",)
    return tuple(compiler_reasons(capability[0]))


def round_features(features: Tensor, v: Tensor) -> Tensor:
    """Return features that a module has computed in float32 in bfloat16, if the values are.

    Products of float32 operands take six times as many instructions. Rounded the same in the
    numerator and the denominator, features cost gradients of queries and keys 2e-3, as much as the
    rounding of the gradients themselves (hedgehog, 2,048 tokens, values of mean 1).
    """
    is_wide = features.dtype == torch.float32 and v.dtype == torch.bfloat16
    return features.to(torch.bfloat16) if is_wide else features


def run_triton(x: LinearInputs) -> Result:
    """Run the kernels, which apply the feature map unless it is learned."""
    from attnzoo.ops.linear.triton.custom_op import linear_triton

    with autocast_disabled(x.q.device):
        x = _with_features(x)
        tensors, options = _arguments(x)
        check_reverse_mode("linear_attention", *tensors)
        if x.scale == 0:  # the backward pass divides by it
            raise UnsupportedError(
                "impl='triton' needs a scale other than 0, got 0; impl='torch' supports any."
            )
        table = _table(x.sequences)
        out, kv, z = linear_triton(*tensors, *table, *options, x.return_state)
    return out, LinearState(kv, z) if x.return_state else None


def run_step_triton(x: LinearInputs) -> Result:
    """Run the kernel of one token; with gradients, those of a sequence."""
    from attnzoo.ops.linear.triton.step import linear_triton_step, linear_triton_step_

    assert x.state is not None
    if x.slots is not None:
        check_slots(x.slots, x.state.kv.shape[0])
    if x.slots is not None and not all(y.is_contiguous() for y in x.state):
        return run_on_slots(x, run_step_triton)
    with autocast_disabled(x.q.device):
        x = _with_features(x)
        tensors, options = _arguments(x)
        if x.reuse_state and x.state.kv.is_contiguous() and x.state.k.is_contiguous():
            check_reverse_mode("linear_attention", *tensors)
            return linear_triton_step_(*tensors, x.slots, *options), x.state
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return _run_token(x)
        check_reverse_mode("linear_attention", *tensors)
        out, kv, z = linear_triton_step(*tensors, x.slots, *options)
    return out, LinearState(kv, z)


def _run_token(x: LinearInputs) -> Result:
    """Run the kernels of a sequence, which have a backward pass, on one token of each."""
    if x.slots is None:
        return run_triton(x)
    is_token = x.slots >= 0

    def clear(y: Tensor) -> Tensor:
        return torch.where(is_token.view(-1, *(1,) * (y.dim() - 1)), y, 0)

    decays = x.log_decay
    decays = decays if decays is None or decays.dim() == 1 else clear(decays)
    tokens = x._replace(q=clear(x.q), k=clear(x.k), v=clear(x.v), log_decay=decays)
    return run_on_slots(tokens, run_triton)


def _with_features(x: LinearInputs) -> LinearInputs:
    """Apply a learned map, which the kernels do not compute, and round features."""
    if x.map_weights is not None:
        x = map_inputs(x)
    if x.feature_map == "identity":
        x = x._replace(q=round_features(x.q, x.v), k=round_features(x.k, x.v))
    return x


def _arguments(x: LinearInputs) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """Return the tensors and the options that all kernels take."""
    tensors = (x.q, x.k, x.v, x.log_decay, *(x.state or (None, None)))
    return tensors, (x.feature_map, x.feature_scale**0.5, x.scale, x.normalize, x.eps)


def _table(sequences: Sequences | None) -> tuple[Tensor | None, Tensor | None]:
    """Return starts and lengths of sequences as the kernels take them."""
    return (None, None) if sequences is None else (sequences.starts, sequences.lengths)
