"""Verdicts of the Triton kernels, by which ``impl="auto"`` selects them.

A check runs the kernels of an op with one decay and size in other processes and compares them with
torch: :mod:`attnzoo.ops.linear.triton.check` for linear attention, and
:mod:`attnzoo.ops.block_sparse.triton.check` for block-sparse attention. Its verdict is kept in
attnzoo's cache folder, for one GPU, driver, torch, Triton, ptxas and source of the kernels.
``impl="triton"`` needs no verdict.

The environment variable ``ATTNZOO_VERDICT_TRITON`` replaces all of them: with ``passed``,
``"auto"`` selects the kernels unchecked, and with ``failed`` never.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from attnzoo.ops.linear.triton.compilers import compiler_caution, ptxas_version
from attnzoo.ops.linear.triton.run import LARGEST, assembler
from attnzoo.runtime.kernel_groups import SECONDS, KernelGroup, auto_verdict, gpu, versions
from attnzoo.runtime.verdicts import Verdict, python_command, run_checks

VARIABLE = "ATTNZOO_VERDICT_TRITON"  # environment variable: passed or failed
SIZES = (64, 128, LARGEST)  # a check uses the smallest of these that keys and values fit
CHECKS = {  # module by op
    "linear": "attnzoo.ops.linear.triton.check",
    "block_sparse": "attnzoo.ops.block_sparse.triton.check",
}
KINDS = {  # of calls, by op; the check runs one process each
    "linear": ("bare", "mapped", "any", "wide"),  # as in the table of configs
    "block_sparse": ("plain", "shared", "any", "wide"),
}
DECAYS = {  # of calls, by op
    "linear": ("none", "scalar", "vector"),
    "block_sparse": ("none",),
}
KERNELS = {  # in messages
    "linear": "linear attention",
    "block_sparse": "block-sparse attention",
}


def kernel_verdict(
    op: str, log_decay: Tensor | None, k: Tensor, *others: Tensor
) -> tuple[str, str]:
    """Return why ``impl="auto"`` does not select the kernels for a call that they support, or "".

    The second result is what ``describe`` says about their check, if it selects them.

    Args:
        op: Which kernels, one of :data:`CHECKS`.
        log_decay: As in ``linear_attention``.
        k: Keys, ``[B, Hkv, T, D]``.
        others: Other tensors whose last dimension the check must cover.
    """
    found: tuple[str, str]
    decay = "none" if log_decay is None else "vector" if log_decay.dim() == 4 else "scalar"
    largest = max(x.shape[3] for x in (k, *others))
    size = next((size for size in SIZES if largest <= size), LARGEST)
    found = _verdict(k.device, op, decay, size)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _verdict(device: torch.device, op: str, decay: str, size: int) -> tuple[str, str]:
    return auto_verdict(kernel_group(device, op, decay, size))


def kernel_group(device: torch.device, op: str, decay: str, size: int) -> KernelGroup:
    """Return the kernels of an op with a decay and sizes up to ``size``, on a device."""
    return KernelGroup(
        key=(device, assembler(device), op, decay, size),
        name=f"triton-{op}-{decay}-{size}",
        kernels=f"the Triton kernels of {KERNELS[op]}",
        size=size,
        decay=decay if len(DECAYS[op]) > 1 else "",
        variable=VARIABLE,
        identity=lambda: device_identity(device),
        run=lambda: run_check(device, decay, size, op),
        caution=lambda: compiler_caution(_major(device)) if device.type == "cuda" else "",
    )


def kernel_groups(device: torch.device) -> Iterator[KernelGroup]:
    """Yield the kernels of every op, decay and size on a device."""
    for op, decays in DECAYS.items():
        for decay, size in product(decays, SIZES):
            yield kernel_group(device, op, decay, size)


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
    return _identity(device, assembler(device))


@cache
def _identity(device: torch.device, ptxas: str) -> Mapping[str, str]:
    import triton

    found = {**versions(), "kernels": _source_hash(), "triton": triton.__version__}
    if device.type != "cuda":  # the interpreter
        return {"device": "Triton's interpreter", "cpu": platform.machine(), **found}
    options = [triton.knobs.nvidia.ptxas_options, triton.knobs.nvidia.disable_ptxas_opt]
    assembled = {"ptxas": ptxas_version(_major(device)), "ptxas options": repr(options)}
    return {**gpu(device), **assembled, **found}


@cache
def _source_hash() -> str:
    """Return a hash of the kernels, their launches and their checks."""
    ops = Path(__file__).parents[2]
    files = sorted(ops.glob("*/triton/*.py"))
    files += [ops.parent / "runtime" / "triton_products.py"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
