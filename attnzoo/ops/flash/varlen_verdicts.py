"""Verdicts of torch's varlen kernel, by which ``impl="auto"`` selects it.

The check (:mod:`attnzoo.ops.flash.check_varlen`) compares it with torch's plain form. Its
verdict holds for one GPU, driver, torch and source of the calls. The environment variable
``ATTNZOO_VERDICT_VARLEN`` replaces it, as ``ATTNZOO_VERDICT_TRITON`` does for the Triton kernels.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import torch

from attnzoo.ops.flash.call import FlashCall
from attnzoo.runtime.kernel_groups import SECONDS, KernelGroup, auto_verdict, gpu, versions
from attnzoo.runtime.verdicts import Verdict, python_command, run_checks

VARIABLE = "ATTNZOO_VERDICT_VARLEN"  # environment variable: passed or failed
SIZES = (64, 128, 256)  # of heads; torch has a kernel for each
CHECK = "attnzoo.ops.flash.check_varlen"


def varlen_verdict(x: FlashCall) -> tuple[str, str]:
    """Return why ``impl="auto"`` does not select the kernel for a call that it supports, or "".

    The second result is what ``describe`` says about its check, if it selects the kernel.
    """
    found: tuple[str, str]
    size = next(size for size in SIZES if x.q.shape[3] <= size)
    found = _verdict(x.q.device, size)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _verdict(device: torch.device, size: int) -> tuple[str, str]:
    return auto_verdict(kernel_group(device, size))


def kernel_group(device: torch.device, size: int) -> KernelGroup:
    """Return the kernel for heads of up to ``size`` channels, on a device."""
    return KernelGroup(
        key=("varlen", device, size),
        name=f"varlen-{size}",
        kernels="torch's varlen kernel",
        size=size,
        variable=VARIABLE,
        identity=lambda: device_identity(device),
        run=lambda: run_check(device, size),
    )


def kernel_groups(device: torch.device) -> Iterator[KernelGroup]:
    """Yield the kernels of every size on a device."""
    return (kernel_group(device, size) for size in SIZES)


def run_check(device: torch.device, size: int) -> Verdict:
    """Run the check in a process of its own."""
    return run_checks({f"size {size}": python_command(CHECK, str(size), str(device))}, SECONDS)


@cache
def device_identity(device: torch.device) -> Mapping[str, str]:
    """Return the device and the versions of everything that a verdict depends on."""
    folder = Path(__file__).parent
    sources = [*sorted(folder.glob("varlen*.py")), folder / "check_varlen.py"]
    sources.append(folder.parent / "window" / "extra_keys.py")
    calls = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    where = gpu(device) if device.type == "cuda" else {"device": f"a {platform.machine()} CPU"}
    return {**where, **versions(), "calls": calls}
