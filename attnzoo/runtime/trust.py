"""Decide whether ``impl="auto"`` may select kernels: only on devices where they passed a check.

A check runs kernels in other processes and compares them with torch. Its verdict is kept in
attnzoo's cache folder (:mod:`attnzoo.runtime.verdicts`). Kernels that a user names need no verdict.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from attnzoo.errors import ConfigError
from attnzoo.runtime.verdicts import FAILED, PASSED, Verdict, decide, stored_verdict

SECONDS = 300.0  # time limit of a check

log = logging.getLogger(__name__)
_VERDICTS: dict[Hashable, Verdict] = {}
_PASSED: dict[Hashable, str] = {}  # what describe says
_WARNED: set[tuple[Hashable, str]] = set()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Kernels on a device that have one verdict.

    Attributes:
        key: Identifies them within this process.
        name: Identifies them in the cache folder, the first part of the file's name.
        kernels: Name of the kernels in messages.
        variable: Environment variable that replaces the check, ``"1"`` or ``"0"``.
        identity: Returns the device and the versions of everything that the kernels are made from.
        run: Runs the check.
        caution: Returns what ``describe`` adds for kernels that passed.
    """

    key: Hashable
    name: str
    kernels: str
    variable: str
    identity: Callable[[], Mapping[str, str]]
    run: Callable[[], Verdict]
    caution: Callable[[], str] = str

    def status(self) -> str:
        """Return what ``describe`` says about kernels that passed their check."""
        checked, caution = f"checked on {self.identity()['device']}", self.caution()
        return f"{checked} ({caution})" if caution else checked


def why_busy(device: torch.device) -> str:
    """Return why a check cannot run now, or ``""``."""
    if torch.compiler.is_compiling():
        return "torch.compile traces"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is captured"
    return ""


def trusted(subject: Subject, busy: str) -> tuple[tuple[str, ...], str]:
    """Return why ``impl="auto"`` does not select kernels that support a call.

    Runs the check if there is no verdict yet, unless ``busy`` gives a reason why it cannot run now.
    If the kernels may be selected, the second result is what ``describe`` says about the check.
    """
    wanted = os.environ.get(subject.variable, "")
    if wanted not in ("", "0", "1"):
        raise ConfigError(
            f"the environment variable {subject.variable} is {wanted!r}; set it to 1 (impl='auto' "
            f"selects {subject.kernels} without a check), to 0 (it never does), or not at all"
        )
    if wanted == "1":
        return (), f"unchecked, because {subject.variable}=1"
    if wanted == "0":
        return (f"{subject.variable}=0 excludes them from impl='auto'",), ""
    status = _PASSED.get(subject.key)
    if status is not None:
        return (), status
    verdict = _VERDICTS.get(subject.key)
    if verdict is None:
        where = subject.identity()
        verdict = stored_verdict(subject.name, where)
        if verdict is None and not busy:
            log.warning(
                "attnzoo checks %s (%s) on %s, once; it takes up to a minute",
                *(subject.kernels, subject.name, where["device"]),
            )
            verdict = check(subject)
        if verdict is not None:
            _VERDICTS[subject.key] = verdict
    if verdict is None or verdict.outcome != PASSED:
        return (_refusal(subject, verdict, busy),), ""
    _PASSED[subject.key] = subject.status()
    return (), _PASSED[subject.key]


def check(subject: Subject, *, again: bool = False) -> Verdict:
    """Return the verdict; runs the check if there is none, or ``again``."""
    identity = subject.identity()
    verdict = decide(subject.name, identity, subject.run, again=again, wait_seconds=2 * SECONDS)
    _VERDICTS[subject.key] = verdict
    _PASSED.pop(subject.key, None)
    return verdict


def _refusal(subject: Subject, verdict: Verdict | None, busy: str) -> str:
    """Return why the kernels are not selected, and warn once."""
    device = subject.identity()["device"]
    if verdict is None:
        reason = (
            f"they are not checked on {device} yet, and a check cannot run while {busy} (run "
            "`attnzoo doctor`, or one call without, before)"
        )
    elif verdict.outcome == FAILED:
        reason = f"they failed their check on {device}: {verdict.reason}"
    else:
        reason = f"their check on {device} could not run: {verdict.reason}"
    if (subject.key, reason) not in _WARNED:
        _WARNED.add((subject.key, reason))
        warnings.warn(
            f"impl='auto' does not select {subject.kernels}: {reason}. It selects torch, which is "
            "slower. `attnzoo doctor` runs all checks again.",
            stacklevel=2,
        )
    return reason


def versions() -> dict[str, str]:
    """Return the versions of attnzoo and torch, on which every verdict depends."""
    return {
        "attnzoo": str(getattr(sys.modules["attnzoo"], "__version__", "")),
        "torch": torch.__version__,
    }


def gpu(device: torch.device) -> dict[str, str]:
    """Return the name, compute capability and driver of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return {"device": properties.name, "capability": capability, "driver": driver_version()}


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
