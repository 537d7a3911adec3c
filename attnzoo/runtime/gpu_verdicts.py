"""What ``attnzoo doctor`` has found on a GPU: which kernels are right there, and how fast they are.

One file in attnzoo's cache folder for one GPU, driver, torch, Triton, ptxas, flash-linear-attention
and version of attnzoo. A call of ``impl="auto"`` reads it, once per process, and never runs a
check: attnzoo's own kernels are selected only where they are right and the fastest. Kernels that a
user names need no verdict.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.runtime.cache_folder import replace_file
from attnzoo.runtime.compilers import (
    assembler,
    compiler_caution,
    gpu_capability,
    ptxas_version,
)
from attnzoo.runtime.verdicts import read_stored, verdict_file

FILE = "gpu"  # the first part of its name
OWN = "triton"  # the implementation that needs a verdict
NO_VERDICT = "`attnzoo doctor` has not found them right and fast on {device} yet"


class KernelVerdict(NamedTuple):
    """What an implementation does in one kind of calls."""

    case: str  # the kind of calls
    impl: str
    wrong: str = ""  # what is wrong; "" if it is right
    refused: str = ""  # why it does not support the calls
    ms: float | None = None  # forward and backward, of a call as in training; ``None``: not timed


def decay_kind(log_decay: Tensor | None) -> str:
    """Return the kind of a decay: none, scalar (per token or head) or vector (per channel)."""
    return "none" if log_decay is None else "vector" if log_decay.dim() == 4 else "scalar"


def linear_case(log_decay: Tensor | str | None, *, normalize: bool) -> str:
    """Return the kind of calls of linear attention with a decay, or with a kind of decays."""
    decay = log_decay if isinstance(log_decay, str) else decay_kind(log_decay)
    return f"linear attention, {'normalised, ' if normalize else ''}decay {decay}"


def own_verdict(device: torch.device, case: str) -> tuple[str, str]:
    """Return why ``impl="auto"`` does not select attnzoo's own kernels for a kind of calls, or "".

    The second result is what ``describe`` says about their check. Made for
    ``Implementation.verdict``.
    """
    return _own_verdict(device, case)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _own_verdict(device: torch.device, case: str) -> tuple[str, str]:
    found = {row.impl: row for row in stored_verdicts(device) if row.case == case}
    name = identity(device)["device"]
    own = found.pop(OWN, None)
    if own is None or own.refused or (own.ms is None and not own.wrong):
        return NO_VERDICT.format(device=name), ""
    if own.wrong:
        return f"they are wrong on {name} ({own.wrong})", ""
    assert own.ms is not None
    faster = {
        impl: row.ms
        for impl, row in found.items()
        if row.ms is not None and row.ms < own.ms and not row.wrong
    }
    times = ", ".join(f"{impl} {ms:.3g} ms" for impl, ms in sorted(faster.items()))
    if faster:
        return f"they take {own.ms:.3g} ms on {name} ({times})", ""
    status = f"right and fastest on {name} ({own.ms:.3g} ms)"
    caution = compiler_caution(gpu_capability(device)[0]) if assembler(device) else ""
    return "", f"{status}; {caution}" if caution else status


@cache
def stored_verdicts(device: torch.device) -> tuple[KernelVerdict, ...]:
    """Return what ``attnzoo doctor`` has stored about a device; read once per process."""
    found = read_stored(FILE, identity(device))
    try:
        return tuple(KernelVerdict(**row) for row in found["rows"]) if found else ()
    except (KeyError, TypeError):  # a damaged file
        return ()


def store_verdicts(device: torch.device, rows: Iterable[KernelVerdict]) -> None:
    """Store what was found about a device; raises ``OSError`` without a cache folder."""
    found = {"identity": dict(identity(device)), "rows": [row._asdict() for row in rows]}
    replace_file(verdict_file(FILE, identity(device)), json.dumps(found, indent=1) + "\n")
    stored_verdicts.cache_clear()


def identity(device: torch.device) -> Mapping[str, str]:
    """Return the device and the versions of everything that kernels are made from."""
    return _identity(device, assembler(device))


@cache
def _identity(device: torch.device, ptxas: str) -> Mapping[str, str]:
    found = {name: _version(name) for name in ("triton", "fla-core", "flash-linear-attention")}
    found["torch"] = torch.__version__
    found["attnzoo"] = str(getattr(sys.modules["attnzoo"], "__version__", ""))
    if device.type != "cuda":
        return {"device": device.type, **found}
    properties = torch.cuda.get_device_properties(device)
    found["capability"] = f"{properties.major}.{properties.minor}"
    found |= {"device": properties.name, "driver": driver_version()}
    return found | {"ptxas": ptxas_version(properties.major) if ptxas else ""}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


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
