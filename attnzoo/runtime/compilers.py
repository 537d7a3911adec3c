"""Versions of Triton and ptxas that are reported to miscompile kernels, and the consequences.

ptxas assembles the code that Triton generates. All reports concern Hopper (compute capability 9.x):

| version | report | consequence |
|---|---|---|
| ptxas 13.0.88 | invalid writes to shared memory (fla-org/flash-linear-attention#1262) | refused |
| ptxas 12.8.93 | the same, and wrong gradients of values (there) | caution |
| ptxas before 13.3 | registers of asynchronous products are overwritten too early (triton-lang/triton#9433, #11781) | caution |
| Triton 3.6.0 to 3.8.0 | invalid reads of shared memory, with tiles of 32 columns and 4 warps (triton-lang/triton#11366) | 8 warps |

``attnzoo.describe`` and ``attnzoo doctor`` show a caution. With any version, ``impl="auto"``
selects the kernels only if they have passed a check on the device.
"""  # noqa: E501 (a table)

from __future__ import annotations

import os
import re
import subprocess
from functools import cache

import torch

MIN_TRITON = (3, 6)  # the oldest version that the kernels are compiled and tested with
HOPPER, BLACKWELL = 9, 10  # major compute capabilities
REFUSED_PTXAS = {"13.0.88": "writes shared memory wrongly"}
WRONG_PTXAS = {"12.8.93": "returned wrong gradients and wrote shared memory wrongly"}
FIXED_PTXAS = (13, 3)
NEW_PTXAS_TRITON = (3, 9, 0)  # from this version on, ptxas-blackwell assembles for Hopper too
# Triton versions that read shared memory wrongly, with tiles of 32 columns and 4 warps
WRONG_TILES_TRITON = ((3, 6, 0), (3, 8, 0))


def compiler_reasons(major: int) -> list[str]:
    """Return every reason why Triton and its ptxas do not compile correctly for a GPU.

    ``major`` is that of the GPU's compute capability.
    """
    import triton

    reasons = []
    if triton_version()[:2] < MIN_TRITON:
        reasons.append(f"Triton {triton.__version__} is installed (3.6 or later is needed)")
    try:
        version = ptxas_version(major)
    except RuntimeError as error:
        return [*reasons, f"Triton finds no ptxas ({error}; set {ptxas_variable(major)})"]
    defect = REFUSED_PTXAS.get(version) if major == HOPPER else None
    if defect:
        reasons.append(f"ptxas {version} {defect} on Hopper ({_advice()})")
    return reasons


def compiler_caution(major: int) -> str:
    """Return a caution about the versions in use, or ""."""
    version = ptxas_version(major)
    if major != HOPPER or _numbers(version)[:2] >= FIXED_PTXAS or version in REFUSED_PTXAS:
        return ""
    defect = WRONG_PTXAS.get(version, "may overwrite operands of products too early")
    return f"other kernels report that ptxas {version} {defect} on Hopper; {_advice()}"


def miscompiles_tile(tile: int, warps: int, capability: int) -> bool:
    """Return whether Triton is reported to compile a pair of tile and warps wrongly for a GPU."""
    if capability // 10 != HOPPER or (tile, warps) != (32, 4):
        return False
    first, last = WRONG_TILES_TRITON
    return first <= triton_version() <= last


@cache
def triton_version() -> tuple[int, int, int]:
    """Return the version of Triton as three numbers."""
    import triton

    return (*_numbers(triton.__version__), 0, 0, 0)[:3]


def ptxas_variable(major: int) -> str:
    """Return the environment variable from which Triton takes the path of a GPU's ptxas."""
    first = HOPPER if triton_version() >= NEW_PTXAS_TRITON else BLACKWELL
    return "TRITON_PTXAS_BLACKWELL_PATH" if major >= first else "TRITON_PTXAS_PATH"


def _advice() -> str:
    return (
        f"point {ptxas_variable(HOPPER)} at ptxas 13.3 or later, for example of the package "
        "nvidia-cuda-nvcc"
    )


@cache
def gpu_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def assembler(device: torch.device) -> str:
    """Return the path of the ptxas that the next kernel for a GPU is assembled by, or ""."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    try:
        return ptxas_path(gpu_capability(device)[0])
    except RuntimeError:  # compiler_reasons gives the reason
        return ""


def ptxas_path(major: int) -> str:
    """Return the path of the ptxas that the next compilation runs.

    It can change within a process: ``torch.compile`` sets ``TRITON_PTXAS_PATH``.

    Raises:
        RuntimeError: Triton finds none.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(10 * major).path


def ptxas_version(major: int) -> str:
    """Return the version of the ptxas that the next compilation runs, such as ``"12.8.93"``."""
    path = ptxas_path(major)
    return _version_of(path, os.stat(path).st_mtime_ns)


@cache
def _version_of(path: str, changed_ns: int) -> str:
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", output)
    return found[1] if found else "unknown"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (3, 7, 0) for ``"3.7.0+git1"``."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()
