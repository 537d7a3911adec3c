"""Whether ``impl="auto"`` may select torch's varlen kernel: where it passed a check.

The check (:mod:`attnzoo.ops.flash.check_varlen`) compares it with torch's plain form. Its
verdict holds for one GPU, driver, torch and source of the calls. The environment variable
``ATTNZOO_TRUST_VARLEN`` replaces it, as ``ATTNZOO_TRUST_TRITON`` does for the Triton kernels.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from attnzoo.ops.flash.call import FlashCall
from attnzoo.runtime.trust import SECONDS, Subject, gpu, trusted, versions, why_busy
from attnzoo.runtime.verdicts import Verdict, python_command, run_checks

TRUST = "ATTNZOO_TRUST_VARLEN"  # environment variable: 1 or 0
SIZES = (64, 128, 256)  # of heads; torch has a kernel for each
CHECK = "attnzoo.ops.flash.check_varlen"


def trust_varlen(x: FlashCall) -> tuple[tuple[str, ...], str]:
    """Return why ``impl="auto"`` does not select the kernel for a call that it supports.

    If there is no reason, the second result is what ``describe`` says about the check.
    """
    found: tuple[tuple[str, ...], str]
    size = next(size for size in SIZES if x.q.shape[3] <= size)
    found = _trust(x.q.device, size, why_busy(x.q.device))
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _trust(device: torch.device, size: int, busy: str) -> tuple[tuple[str, ...], str]:
    return trusted(subject(device, size), busy)


def subject(device: torch.device, size: int) -> Subject:
    """Return the kernel for heads of up to ``size`` channels, on a device."""
    return Subject(
        key=("varlen", device, size),
        name=f"varlen-{size}",
        kernels="torch's varlen kernel",
        variable=TRUST,
        identity=lambda: device_identity(device),
        run=lambda: run_check(device, size),
    )


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
