"""Whether ``impl="auto"`` may select the Triton kernels: only on devices where they passed a check.

The check (:mod:`attnzoo.backends.linear.check_triton`) runs the kernels of one decay and size in
other processes and compares them with torch. Its verdict is kept in attnzoo's cache folder, for one
GPU, driver, torch, Triton, ptxas and source of the kernels. ``impl="triton"`` needs no verdict.

The environment variable ``ATTNZOO_TRUST_TRITON`` replaces the check: with 1, ``"auto"`` selects the
kernels unchecked, and with 0 never.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from attnzoo.backends.linear.impl.triton import LARGEST, assembler
from attnzoo.backends.linear.kernels.compilers import compiler_caution, ptxas_version
from attnzoo.backends.linear.kernels.configs import TABLE
from attnzoo.errors import ConfigError
from attnzoo.kernels.verdicts import (
    FAILED,
    NOT_RUN,
    PASSED,
    Verdict,
    decide,
    python_command,
    run_checks,
    stored_verdict,
)

TRUST = "ATTNZOO_TRUST_TRITON"  # environment variable: 1 or 0
SIZES = (64, 128, LARGEST)  # a check uses the smallest of these that keys and values fit
CHECK = "attnzoo.backends.linear.check_triton"
KINDS = ("bare", "mapped", "any", "wide")  # of calls, as in the table of configs
SECONDS = 300.0  # time limit of a check

log = logging.getLogger(__name__)
Key = tuple[torch.device, str, str, int]  # device, ptxas, decay, size
_VERDICTS: dict[Key, Verdict] = {}
_PASSED: dict[Key, str] = {}  # what describe says
_WARNED: set[tuple[Key, str]] = set()


def trust(k: Tensor, v: Tensor, log_decay: Tensor | None) -> tuple[tuple[str, ...], str]:
    """Return why ``impl="auto"`` does not select the kernels for a call that they support.

    Runs the check if there is no verdict yet; not while ``torch.compile`` traces or a CUDA graph is
    captured. If there is no reason, the second result is what ``describe`` says about the check.

    Args:
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: As in ``linear_attention``.
    """
    busy = ""
    if torch.compiler.is_compiling():
        busy = "torch.compile traces"
    elif k.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        busy = "a CUDA graph is captured"
    found: tuple[tuple[str, ...], str]
    found = _trust(k.device, *_decay_and_size(k, v, log_decay), busy)
    return found


def _decay_and_size(k: Tensor, v: Tensor, log_decay: Tensor | None) -> tuple[str, int]:
    decay = "none" if log_decay is None else "vector" if log_decay.dim() == 4 else "scalar"
    for size in SIZES:
        if k.shape[3] <= size and v.shape[3] <= size:
            return decay, size
    return decay, LARGEST


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _trust(device: torch.device, decay: str, size: int, busy: str) -> tuple[tuple[str, ...], str]:
    wanted = os.environ.get(TRUST, "")
    if wanted not in ("", "0", "1"):
        raise ConfigError(
            f"the environment variable {TRUST} is {wanted!r}; set it to 1 (impl='auto' selects the "
            "Triton kernels without a check), to 0 (it never does), or not at all"
        )
    if wanted == "1":
        return (), f"unchecked, because {TRUST}=1"
    if wanted == "0":
        return (f"{TRUST}=0 excludes them from impl='auto'",), ""
    key = device, assembler(device), decay, size
    status = _PASSED.get(key)
    if status is not None:
        return (), status
    verdict = _VERDICTS.get(key)
    if verdict is None:
        where = device_identity(device)
        verdict = stored_verdict(_name(decay, size), where)
        if verdict is None and not busy:
            log.warning(
                "attnzoo checks its Triton kernels (decay %s, size %d) on %s, once; it takes up to "
                "a minute",
                *(decay, size, where["device"]),
            )
            verdict = check(device, decay, size)
        if verdict is not None:
            _VERDICTS[key] = verdict
    if verdict is None or verdict.outcome != PASSED:
        return (_refusal(key, verdict, busy),), ""
    _PASSED[key] = passed_status(device)
    return (), _PASSED[key]


def _refusal(key: Key, verdict: Verdict | None, busy: str) -> str:
    """Return why the kernels are not selected, and warn once."""
    device = device_identity(key[0])["device"]
    if verdict is None:
        reason = (
            f"they are not checked on {device} yet, and a check cannot run while {busy} (run "
            "`attnzoo doctor`, or one call without, before)"
        )
    elif verdict.outcome == FAILED:
        reason = f"they failed their check on {device}: {verdict.reason}"
    else:
        reason = f"their check on {device} could not run: {verdict.reason}"
    if (key, reason) not in _WARNED:
        _WARNED.add((key, reason))
        warnings.warn(
            f"impl='auto' does not select the Triton kernels of linear attention: {reason}. It "
            "selects torch, which is slower. `attnzoo doctor` runs all checks again.",
            stacklevel=2,
        )
    return reason


def passed_status(device: torch.device) -> str:
    """Return what ``describe`` says about kernels that passed their check on a device."""
    checked = f"checked on {device_identity(device)['device']}"
    caution = compiler_caution(_major(device)) if device.type == "cuda" else ""
    return f"{checked} ({caution})" if caution else checked


def check(device: torch.device, decay: str, size: int, *, again: bool = False) -> Verdict:
    """Return the verdict for a decay and a size on a device; runs the check if there is none.

    Args:
        device: The device.
        decay: ``"none"``, ``"scalar"`` or ``"vector"``.
        size: One of :data:`SIZES`.
        again: Run it even if there is a verdict.
    """
    verdict = decide(
        _name(decay, size),
        device_identity(device),
        lambda: run_check(device, decay, size),
        again=again,
        wait_seconds=2 * SECONDS,
    )
    key = device, assembler(device), decay, size
    _VERDICTS[key] = verdict
    _PASSED.pop(key, None)
    return verdict


def run_check(device: torch.device, decay: str, size: int) -> Verdict:
    """Run the check, one process per kind of calls."""
    if getattr(sys, "frozen", False) or not sys.executable:
        return Verdict(NOT_RUN, "this program has no Python interpreter to start")
    commands = {
        f"{decay} decay, {kind} calls": python_command(CHECK, decay, str(size), kind, str(device))
        for kind in KINDS
    }
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if device.type != "cuda":
        environment["TRITON_INTERPRET"] = "1"
    return run_checks(commands, SECONDS, environment)


def _name(decay: str, size: int) -> str:
    return f"triton-linear-{decay}-{size}"


def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def device_identity(device: torch.device) -> Mapping[str, str]:
    """Return the device and the versions of everything that the kernels are made from."""
    return _identity(device, assembler(device), os.environ.get(TABLE, ""))


@cache
def _identity(device: torch.device, ptxas: str, table: str) -> Mapping[str, str]:
    import triton

    found = {
        "attnzoo": str(getattr(sys.modules["attnzoo"], "__version__", "")),
        "kernels": _source_hash(table),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if device.type != "cuda":  # the interpreter
        return {"device": "Triton's interpreter", "cpu": platform.machine(), **found}
    properties = torch.cuda.get_device_properties(device)
    options = [triton.knobs.nvidia.ptxas_options, triton.knobs.nvidia.disable_ptxas_opt]
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version(),
        "ptxas": ptxas_version(properties.major),
        "ptxas options": repr(options),
        **found,
    }


@cache
def driver_version() -> str:
    """Return the version of the NVIDIA driver, or that of its CUDA interface."""
    listing = Path("/proc/driver/nvidia/version")
    if listing.exists():
        found = re.search(r"\b(\d{3,}\.\d+[.\d]*)\b", listing.read_text("utf-8"))
        if found:
            return found[1]
    number = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return f"CUDA {number}"


@cache
def _source_hash(table: str) -> str:
    """Return a hash of the kernels, their configs and the check."""
    folder = Path(__file__).parents[1]
    files = sorted(p for p in (folder / "kernels").iterdir() if p.suffix in (".py", ".json"))
    files += [folder.parents[1] / "kernels" / "triton_products.py", folder / "check_triton.py"]
    files += [Path(table)] if table else []
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
