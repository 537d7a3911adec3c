"""When the Triton kernels can compute linear attention, and the call of them.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.errors import UnsupportedError
from attnzoo.ops.linear_reference import LinearInputs, Result
from attnzoo.state import LinearState

LARGEST = 256  # key and value size
OLDEST = (3, 6)  # Triton: the version that the kernels were compiled and interpreted with
# ptxas by the version it prints, and what it does to kernels for Hopper
BROKEN_PTXAS = {"13.0.88": "writes shared memory wrongly"}


class Fused(NamedTuple):
    """A feature map that the kernels apply themselves; for other implementations, the op does."""

    name: str = "identity"  # "identity", "elu+1", "relu" or "exp"
    scale: float = 1.0  # s of "exp", which multiplies query-key products in softmax attention
    real: Tensor | None = None  # [B, T] bool: features of padding are zero


def triton_reasons(
    q: Tensor, k: Tensor, v: Tensor, *, form: str = "chunk", causal: bool = True
) -> list[str]:
    """Say why the Triton kernels cannot run a call, all reasons at once; empty if they can.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        form: As in ``linear_attention``.
        causal: Whether a token sees only itself and the tokens before it.
    """
    reasons = []
    if form == "parallel":
        reasons.append("the parallel form is there to compare with (form='chunk' runs)")
    if not causal:
        reasons.append("the kernels are causal (impl='torch' sees all keys)")
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        reasons.append("float64 is given (they take bfloat16, float16 and float32)")
    sizes = (k.shape[3], v.shape[3])
    if max(sizes) > LARGEST:
        reasons.append(f"keys of {sizes[0]} and values of {sizes[1]} are given (up to {LARGEST})")
    narrow = any(x.dtype in (torch.bfloat16, torch.float16) for x in (q, k, v))
    if narrow and any(size % 2 for size in sizes):
        reasons.append(f"sizes {sizes[0]} and {sizes[1]} are given in 16 bit (they must be even)")
    return [*reasons, *_device_reasons(q.device)]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_reasons(device: torch.device) -> tuple[str, ...]:
    """Say why kernels cannot run on a device; asked once, for what it looks at does not change."""
    if device not in _DEVICE_REASONS:
        _DEVICE_REASONS[device] = _ask_device(device)
    return _DEVICE_REASONS[device]


_DEVICE_REASONS: dict[torch.device, tuple[str, ...]] = {}


def _ask_device(device: torch.device) -> tuple[str, ...]:
    if find_spec("triton") is None:
        return ("triton is not installed (pip install triton)",)
    from attnzoo.kernels.triton.interpreter import interpreted

    if interpreted():
        return ()
    if device.type != "cuda":
        return (
            f"the tensors are on {device.type} (kernels run on NVIDIA GPUs, and with "
            "TRITON_INTERPRET=1 set from the start, on the CPU for tests)",
        )
    if torch.version.hip is not None:
        return ("the GPU is AMD's (the kernels are tested for NVIDIA's)",)
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return (f"the GPU has compute capability {capability[0]}.{capability[1]} (8.0 is needed)",)
    return tuple(compiler_reasons(capability[0]))


def compiler_reasons(major: int) -> list[str]:
    """Say why this Triton with its ptxas must not compile for a GPU of this generation.

    Triton 3.4 to 3.7.0 with ptxas 12.8.93 was seen to miscompile, on Hopper, a product whose
    operand is the transpose of another product. No kernel here has one: that pair is let through.
    """
    import triton

    reasons = []
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST:
        reasons.append(f"Triton {triton.__version__} is installed (3.6 or later is needed)")
    why = BROKEN_PTXAS.get(ptxas_version()) if major == 9 else None
    if why:
        reasons.append(
            f"ptxas {ptxas_version()} {why} on Hopper (point TRITON_PTXAS_PATH at 12.8 or 13.1)"
        )
    return reasons


@cache
def ptxas_version() -> str:
    """Return what the assembler that Triton uses calls itself, such as 12.8.93."""
    import re
    import subprocess

    import triton

    path = triton.knobs.nvidia.ptxas.path
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", told)
    return found[1] if found else "unknown"


def refuse_triton(x: LinearInputs, form: str) -> None:
    """Raise with every reason why the kernels cannot run, if there is one."""
    reasons = triton_reasons(x.q, x.k, x.v, form=form, causal=x.causal)
    if reasons:
        raise UnsupportedError(
            f"impl 'triton' cannot run this call: {'; '.join(reasons)}. "
            "Use impl='torch', or 'auto' to have one picked."
        )


def run_triton(x: LinearInputs, fused: Fused, chunk_size: int | None) -> Result:
    """Run the kernels, with the feature map in them.

    A single token without a gradient goes through the step, which reads the state once.
    """
    from attnzoo.kernels.triton.linear import linear_triton
    from attnzoo.kernels.triton.linear_step import linear_triton_step

    kv, z = x.state
    options = (fused.name, fused.scale**0.5, x.scale, x.normalize, x.eps)
    tensors = (x.q, x.k, x.v, x.log_decay, kv, z)
    trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if x.k.shape[2] == 1 and not trained:
        out, kv, z = linear_triton_step(*tensors, fused.real, *options)
        return out, LinearState(kv, z)
    if x.scale == 0:  # by which gradients of the state are divided
        raise UnsupportedError("impl 'triton' takes a scale other than 0; impl='torch' takes any.")
    chunk = _chunk(chunk_size)
    out, kv, z = linear_triton(*tensors, x.segment_ids, fused.real, *options, chunk, 0)
    return out, LinearState(kv, z)


def _chunk(chunk_size: int | None) -> int:
    """Return the chunk size to ask the kernels for; 0 lets them choose."""
    if chunk_size is None:
        return 0
    if chunk_size not in (16, 32, 64):
        raise UnsupportedError(
            f"impl 'triton' takes a chunk_size of 16, 32 or 64, got {chunk_size}; None picks one."
        )
    return chunk_size
