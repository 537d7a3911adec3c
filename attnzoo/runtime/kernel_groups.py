"""Decide whether ``impl="auto"`` may select kernels: only on devices where they passed a check.

A call of an op reads the verdict of the last check, a file in attnzoo's cache folder
(:mod:`attnzoo.runtime.verdicts`). It never runs a check: ``attnzoo doctor``, the commands that run
models on a GPU, and ``attnzoo.check_kernels`` do. Kernels that a user names need no verdict.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from attnzoo.errors import ConfigError
from attnzoo.runtime.verdicts import FAILED, PASSED, Verdict, decide, stored_verdict

SECONDS = 300.0  # time limit of a check
DOCTOR_SIZE = 128  # the largest that `attnzoo doctor` checks without --all


@dataclass(frozen=True, kw_only=True)
class KernelGroup:
    """Kernels on a device that have one verdict.

    Attributes:
        key: Identifies them within this process.
        name: Identifies them in the cache folder, the first part of the file's name.
        kernels: Name of the kernels in messages.
        decay: Decay of the calls that the check covers, if it depends on that.
        size: Largest head size of these calls.
        variable: Environment variable that replaces the verdict, ``"passed"`` or ``"failed"``.
        identity: Returns the device and the versions of everything that the kernels are made from.
        run: Runs the check.
        caution: Returns what ``describe`` adds for kernels that passed.
    """

    key: Hashable
    name: str
    kernels: str
    size: int
    decay: str = ""
    variable: str
    identity: Callable[[], Mapping[str, str]]
    run: Callable[[], Verdict]
    caution: Callable[[], str] = str

    def __str__(self) -> str:
        """Return the name of the kernels, and the calls that the check covers."""
        decay = f"decay {self.decay}, " if self.decay else ""
        return f"{self.kernels} ({decay}sizes up to {self.size})"

    @property
    def command(self) -> str:
        """The command that checks the kernels."""
        return "attnzoo doctor" if self.size <= DOCTOR_SIZE else "attnzoo doctor --all"

    @property
    def device(self) -> str:
        """The name of the device."""
        return self.identity()["device"]

    def status(self) -> str:
        """Return what ``describe`` says about kernels that passed their check."""
        checked, caution = f"checked on {self.device}", self.caution()
        return f"{checked} ({caution})" if caution else checked

    def stored_verdict(self) -> Verdict | None:
        """Return the verdict in the cache folder, or ``None``."""
        return stored_verdict(self.name, self.identity())

    def check(self, *, fresh: bool = False) -> Verdict:
        """Return the verdict; runs the check if there is none, or ``fresh``."""
        wait = 2 * SECONDS
        verdict = decide(self.name, self.identity(), self.run, fresh=fresh, wait_seconds=wait)
        _STATE.verdicts[self.key] = verdict
        _STATE.passed.pop(self.key, None)
        return verdict


class _State:
    """What this process knows about kernel groups, by key."""

    def __init__(self) -> None:
        self.verdicts: dict[Hashable, Verdict | None] = {}  # ``None``: there is no file
        self.passed: dict[Hashable, str] = {}  # what describe says
        self.warned: set[tuple[Hashable, str]] = set()
        self.collected: dict[Hashable, KernelGroup] | None = None  # in collect_groups


_STATE = _State()


def auto_verdict(group: KernelGroup) -> tuple[str, str]:
    """Return why ``impl="auto"`` does not select kernels that support a call, or ``""``.

    Reads the verdict once per process; runs no check. If the kernels may be selected, the second
    result is what ``describe`` says about their check.
    """
    replaced = os.environ.get(group.variable, "")
    if replaced not in ("", PASSED, FAILED):
        raise ConfigError(
            f"the environment variable {group.variable} is {replaced!r}; set it to {PASSED} "
            f"(impl='auto' selects {group.kernels} without a check), to {FAILED} (it never does), "
            "or not at all"
        )
    if replaced == PASSED:
        return "", f"unchecked, because {group.variable}={PASSED}"
    if replaced == FAILED:
        return f"{group.variable}={FAILED} excludes them from impl='auto'", ""
    if _STATE.collected is not None:
        _STATE.collected[group.key] = group
    status = _STATE.passed.get(group.key)
    if status is not None:
        return "", status
    if group.key not in _STATE.verdicts:
        _STATE.verdicts[group.key] = group.stored_verdict()
    verdict = _STATE.verdicts[group.key]
    if verdict is None or verdict.outcome != PASSED:
        return _refusal(group, verdict), ""
    _STATE.passed[group.key] = group.status()
    return "", _STATE.passed[group.key]


@contextmanager
def collect_groups() -> Iterator[list[KernelGroup]]:
    """Return a context that collects the groups whose verdicts calls of ``impl="auto"`` read.

    The list is complete at the end of the context. A missing verdict causes no warning in it.
    """
    groups: list[KernelGroup] = []
    outer, _STATE.collected = _STATE.collected, {}
    try:
        yield groups
    finally:
        groups += _STATE.collected.values()
        _STATE.collected = outer


def _refusal(group: KernelGroup, verdict: Verdict | None) -> str:
    """Return why the kernels are not selected, and warn once."""
    if verdict is None:
        reason = f"they are not checked on {group.device} yet; `{group.command}` checks them, once"
        if _STATE.collected is not None:
            return reason
    elif verdict.outcome == FAILED:
        reason = f"they failed their check on {group.device}: {verdict.reason}"
    else:
        reason = f"their check on {group.device} could not run: {verdict.reason}"
    if (group.key, reason) not in _STATE.warned:
        _STATE.warned.add((group.key, reason))
        again = "" if verdict is None else f" `{group.command} --fresh` checks them again."
        warnings.warn(
            f"impl='auto' does not select {group}, which would be faster: {reason}.{again}",
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
