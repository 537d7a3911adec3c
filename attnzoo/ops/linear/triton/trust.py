"""Whether ``impl="auto"`` may select the Triton kernels: only on devices where they passed a check.

A check runs the kernels of an op with one decay and size in other processes and compares them with
torch: :mod:`attnzoo.ops.linear.triton.check` for linear attention,
:mod:`attnzoo.ops.hybrid.triton.check` for the window hybrid,
:mod:`attnzoo.ops.delta.triton.check` for the delta rule, and
:mod:`attnzoo.ops.block_sparse.triton.check` for block-sparse attention. Its verdict is kept in
attnzoo's cache folder, for one GPU, driver, torch, Triton, ptxas and source of the kernels.
``impl="triton"`` needs no verdict.

The environment variable ``ATTNZOO_TRUST_TRITON`` replaces the check: with 1, ``"auto"`` selects the
kernels unchecked, and with 0 never.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from attnzoo.ops.linear.triton.compilers import compiler_caution, ptxas_version
from attnzoo.ops.linear.triton.configs import TABLE
from attnzoo.ops.linear.triton.run import LARGEST, assembler
from attnzoo.runtime import trust as shared
from attnzoo.runtime.trust import SECONDS, Subject, gpu, trusted, versions, why_busy
from attnzoo.runtime.verdicts import Verdict, python_command, run_checks

TRUST = "ATTNZOO_TRUST_TRITON"  # environment variable: 1 or 0
SIZES = (64, 128, LARGEST)  # a check uses the smallest of these that keys and values fit
CHECKS = {  # module by op
    "linear": "attnzoo.ops.linear.triton.check",
    "hybrid": "attnzoo.ops.hybrid.triton.check",
    "delta": "attnzoo.ops.delta.triton.check",
    "block_sparse": "attnzoo.ops.block_sparse.triton.check",
}
KINDS = {  # of calls, by op; the check runs one process each
    "linear": ("bare", "mapped", "any", "wide"),  # as in the table of configs
    "hybrid": ("plain", "learned", "state", "any", "wide"),
    "delta": ("plain", "any", "wide"),
    "block_sparse": ("plain", "shared", "any", "wide"),
}
DECAYS = {  # of calls, by op
    **dict.fromkeys(("linear", "hybrid", "delta"), ("none", "scalar", "vector")),
    "block_sparse": ("none",),
}
KERNELS = {  # in messages
    "linear": "linear attention",
    "hybrid": "the window hybrid",
    "delta": "the delta rule",
    "block_sparse": "block-sparse attention",
}


def trust(
    op: str, log_decay: Tensor | None, k: Tensor, *others: Tensor
) -> tuple[tuple[str, ...], str]:
    """Return why ``impl="auto"`` does not select the kernels for a call that they support.

    Runs the check if there is no verdict yet; not while ``torch.compile`` traces or a CUDA graph is
    captured. If there is no reason, the second result is what ``describe`` says about the check.

    Args:
        op: Which kernels, one of :data:`CHECKS`.
        log_decay: As in ``linear_attention``.
        k: Keys, ``[B, Hkv, T, D]``.
        others: Other tensors whose last dimension the check must cover.
    """
    found: tuple[tuple[str, ...], str]
    decay = "none" if log_decay is None else "vector" if log_decay.dim() == 4 else "scalar"
    largest = max(x.shape[3] for x in (k, *others))
    size = next((size for size in SIZES if largest <= size), LARGEST)
    found = _trust(k.device, op, decay, size, why_busy(k.device))
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _trust(
    device: torch.device, op: str, decay: str, size: int, busy: str
) -> tuple[tuple[str, ...], str]:
    return trusted(subject(device, op, decay, size), busy)


def subject(device: torch.device, op: str, decay: str, size: int) -> Subject:
    """Return the kernels of an op with a decay and sizes up to ``size``, on a device."""
    return Subject(
        key=(device, assembler(device), op, decay, size),
        name=f"triton-{op}-{decay}-{size}",
        kernels=f"the Triton kernels of {KERNELS[op]}",
        variable=TRUST,
        identity=lambda: device_identity(device),
        run=lambda: run_check(device, decay, size, op),
        caution=lambda: compiler_caution(_major(device)) if device.type == "cuda" else "",
    )


def passed_status(device: torch.device) -> str:
    """Return what ``describe`` says about kernels that passed their check on a device."""
    return subject(device, "linear", "none", LARGEST).status()


def check(
    device: torch.device, decay: str, size: int, op: str = "linear", *, again: bool = False
) -> Verdict:
    """Return the verdict for a decay and a size on a device; runs the check if there is none.

    Args:
        device: The device.
        decay: ``"none"``, ``"scalar"`` or ``"vector"``.
        size: One of :data:`SIZES`.
        op: One of :data:`CHECKS`.
        again: Run it even if there is a verdict.
    """
    return shared.check(subject(device, op, decay, size), again=again)


def run_check(device: torch.device, decay: str, size: int, op: str = "linear") -> Verdict:
    """Run the check, one process per kind of calls."""
    commands = {
        f"{kind} calls" if len(DECAYS[op]) == 1 else f"{decay} decay, {kind} calls": python_command(
            CHECKS[op], decay, str(size), kind, str(device)
        )
        for kind in KINDS[op]
    }
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if device.type != "cuda":
        environment["TRITON_INTERPRET"] = "1"
    return run_checks(commands, SECONDS, environment)


def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def device_identity(device: torch.device) -> Mapping[str, str]:
    """Return the device and the versions of everything that the kernels are made from."""
    return _identity(device, assembler(device), os.environ.get(TABLE, ""))


@cache
def _identity(device: torch.device, ptxas: str, table: str) -> Mapping[str, str]:
    import triton

    found = {**versions(), "kernels": _source_hash(table), "triton": triton.__version__}
    if device.type != "cuda":  # the interpreter
        return {"device": "Triton's interpreter", "cpu": platform.machine(), **found}
    options = [triton.knobs.nvidia.ptxas_options, triton.knobs.nvidia.disable_ptxas_opt]
    assembled = {"ptxas": ptxas_version(_major(device)), "ptxas options": repr(options)}
    return {**gpu(device), **assembled, **found}


@cache
def _source_hash(table: str) -> str:
    """Return a hash of the kernels, their configs, the calls of the hybrid and the checks."""
    ops = Path(__file__).parents[2]
    files = sorted(p for p in ops.glob("*/triton/*") if p.suffix in (".py", ".json"))
    files += [ops / "window" / "extra_keys.py", ops.parent / "runtime" / "triton_products.py"]
    files += [Path(table)] if table else []
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
