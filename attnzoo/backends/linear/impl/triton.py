"""Linear attention in Triton: which calls the kernels support, and the call itself.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from attnzoo.backends.linear.impl.common import LinearInputs, Result
from attnzoo.errors import UnsupportedError
from attnzoo.kernels.derivatives import check_reverse_mode
from attnzoo.state import LinearState

LARGEST = 256  # key and value size
MIN_TRITON = (3, 6)  # the oldest version that the kernels are compiled and tested with
# Versions of ptxas that miscompile kernels for Hopper, and the defect
BROKEN_PTXAS = {"13.0.88": "writes shared memory wrongly"}


def triton_reasons(
    q: Tensor, k: Tensor, v: Tensor, *, form: str = "chunk", causal: bool = True
) -> list[str]:
    """Return every reason why the Triton kernels do not support a call.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        form: As in ``linear_attention``.
        causal: Whether a token sees only itself and earlier tokens.
    """
    reasons = []
    if form == "parallel":
        reasons.append("the parallel form is for comparison (use form='chunk')")
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
    return [*reasons, *_device_reasons(q.device)]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_reasons(device: torch.device) -> tuple[str, ...]:
    """Return every reason why kernels do not run on a device, computed once per device."""
    if device not in _DEVICE_REASONS:
        _DEVICE_REASONS[device] = _find_device_reasons(device)
    return _DEVICE_REASONS[device]


_DEVICE_REASONS: dict[torch.device, tuple[str, ...]] = {}


def _find_device_reasons(device: torch.device) -> tuple[str, ...]:
    if find_spec("triton") is None:
        return ("triton is not installed (pip install triton)",)
    from attnzoo.kernels.triton_interpreter import interpreted

    if interpreted():
        return ()
    if device.type != "cuda":
        return (
            f"the tensors are on {device.type} (the kernels run on NVIDIA GPUs, and on the CPU for "
            "tests if TRITON_INTERPRET=1 is set before Triton is imported)",
        )
    if torch.version.hip is not None:
        return ("the GPU is from AMD (the kernels are tested on NVIDIA GPUs only)",)
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        found = f"{capability[0]}.{capability[1]}"
        return (f"the GPU has compute capability {found} (8.0 or later is needed)",)
    return tuple(compiler_reasons(capability[0]))


def compiler_reasons(major: int) -> list[str]:
    """Return every reason why Triton and its ptxas do not compile correctly for a GPU.

    ``major`` is that of the GPU's compute capability.

    On Hopper, Triton 3.4 to 3.7.0 with ptxas 12.8.93 miscompiles a product whose operand is the
    transpose of another product. No kernel here has such a product, so that pair is accepted.
    """
    import triton

    reasons = []
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < MIN_TRITON:
        reasons.append(f"Triton {triton.__version__} is installed (3.6 or later is needed)")
    defect = BROKEN_PTXAS.get(ptxas_version()) if major == 9 else None
    if defect:
        reasons.append(
            f"ptxas {ptxas_version()} {defect} on Hopper (point TRITON_PTXAS_PATH at 12.8 or 13.1)"
        )
    return reasons


@cache
def ptxas_version() -> str:
    """Return the version of Triton's ptxas, such as ``"12.8.93"``."""
    import re
    import subprocess

    import triton

    path = triton.knobs.nvidia.ptxas.path
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", output)
    return found[1] if found else "unknown"


def run_triton(x: LinearInputs) -> Result:
    """Run the kernels, which apply the feature map; one token without gradients takes the step."""
    from attnzoo.backends.linear.kernels.custom_op import linear_triton
    from attnzoo.backends.linear.kernels.step import linear_triton_step

    kv, z = x.state
    options = (x.feature_map, x.feature_scale**0.5, x.scale, x.normalize, x.eps)
    tensors = (x.q, x.k, x.v, x.log_decay, kv, z)
    check_reverse_mode("linear_attention", *tensors)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if x.k.shape[2] == 1 and not needs_grad:
        out, kv, z = linear_triton_step(*tensors, x.padding_mask, *options)
        return out, LinearState(kv, z)
    if x.scale == 0:  # the backward pass divides by it
        raise UnsupportedError(
            "impl='triton' needs a scale other than 0, got 0; impl='torch' supports any."
        )
    chunk_size = x.chunk_size or 0  # 0: the kernels' own choice
    if chunk_size not in (0, 16, 32, 64):
        raise UnsupportedError(
            f"impl='triton' takes a chunk_size of 16, 32 or 64, got {chunk_size}; None picks one."
        )
    ids = x.segment_ids
    out, kv, z = linear_triton(*tensors, ids, x.padding_mask, *options, chunk_size, 0)
    return out, LinearState(kv, z)
