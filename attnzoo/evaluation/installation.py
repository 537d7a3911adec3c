"""Checks of an installation: versions, kernels, fused attention and the seam to transformers.

Each check is one row: ``"ok"``, ``"failed"``, or ``"unavailable"`` with the reason. A failure means
that something is installed and wrong; what is not installed is unavailable.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor

import attnzoo
from attnzoo.autoload import FAILED_PATCHES
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.evaluation import check_cpp
from attnzoo.evaluation.gpu_kernels import CASES, check_gpu
from attnzoo.evaluation.timing import machine
from attnzoo.hf import seam
from attnzoo.hf.names import NAME
from attnzoo.hf.patches import PATCHES
from attnzoo.hf.release_check import check_release, installed_versions, untested
from attnzoo.ops import flash_attention
from attnzoo.ops.linear.triton.run import device_reasons
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.runtime.cpp import prebuilt
from attnzoo.runtime.gpu_verdicts import KernelVerdict, driver_version
from attnzoo.runtime.verdicts import FAILED

OK, WRONG, UNAVAILABLE = "ok", "failed", "unavailable"
PACKAGES = ("torch", "transformers", "accelerate", "triton", "xformers", "peft")


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One row."""

    check: str
    status: str  # OK, WRONG or UNAVAILABLE
    detail: str
    seconds: float = 0.0


class Unavailable(Exception):
    """A requirement of a check is missing; the message says which."""


class Failed(Exception):
    """A check found something wrong; the message says what."""


def check_installation() -> Iterator[CheckResult]:
    """Yield a result per check."""
    for name, check in _checks():
        start = time.monotonic()
        try:
            status, detail = OK, check()
        except Unavailable as reason:
            status, detail = UNAVAILABLE, str(reason)
        except Failed as reason:
            status, detail = WRONG, str(reason)
        except Exception as error:  # a defect of any library is a result here
            status, detail = WRONG, f"{type(error).__name__}: {_first_line(error)}"
        yield CheckResult(
            check=name, status=status, detail=detail, seconds=round(time.monotonic() - start, 1)
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each check, and the function that returns its detail."""
    yield "machine", _machine
    for package in PACKAGES:
        yield package, partial(_package, package)
    for kernel in check_cpp.KERNELS:
        yield f"C++ kernels of {kernel.name}", partial(_cpp, kernel)
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices or [torch.device("cpu")]:
        place = f" on {device}" if len(devices) > 1 else ""
        checks = _device_checks(device)
        yield from ((name + place, check) for name, check in checks)
    yield "patches of transformers", _patches
    yield "swapped models in transformers", _release


def _device_checks(device: torch.device) -> Iterator[tuple[str, Callable[[], str]]]:
    def unavailable(*reasons: str) -> str:
        raise Unavailable("; ".join(reasons))

    if device.type == "cuda":
        if triton := device_reasons(device):
            yield "Triton kernels", partial(unavailable, *triton)
        found = cache(lambda: tuple(check_gpu(device)))
        yield from ((case.name, partial(_case, found, case.name)) for case in CASES)
    else:
        yield "GPU kernels", partial(unavailable, "there is no NVIDIA GPU, so nothing to check")
    yield "xformers attention", partial(_xformers, device)


# -- versions --------------------------------------------------------------------------------------


def _machine() -> str:
    found = machine()
    parts = [f"attnzoo {attnzoo.__version__}", f"Python {found['python']}", platform.platform()]
    parts += [found["cpu"], f"{found['threads']} threads"]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        capability = f"{properties.major}.{properties.minor}"
        memory = properties.total_memory / 2**30
        parts.append(f"{properties.name} ({capability}, {memory:.0f} GiB)")
    if torch.cuda.is_available():
        parts.append(f"driver {driver_version()}")
    return ", ".join(parts)


def _package(name: str) -> str:
    """Return the version of a package, which must not be older than attnzoo supports."""
    try:
        found = version(name)
    except PackageNotFoundError:
        raise Unavailable("not installed") from None
    try:
        needed = [Requirement(text) for text in requires("attnzoo") or ()]
    except PackageNotFoundError:  # run from a checkout
        return found
    for each in needed:
        if each.name == name and not each.specifier.contains(found, prereleases=True):
            raise Failed(f"{found} is not supported, attnzoo needs {name}{each.specifier}")
    if name in untested(installed_versions()):
        tested = ", ".join(seam.TESTED[name])
        return f"{found}, which is not tested (tested: {tested}); see the checks of transformers"
    if name == "triton":
        from attnzoo.runtime.compilers import ptxas_version

        return f"{found}, ptxas {ptxas_version(9)}"
    return found


# -- kernels ---------------------------------------------------------------------------------------


def _cpp(kernel: check_cpp.CppKernel) -> str:
    reason = check_cpp.unavailable(kernel)
    if reason:
        raise Unavailable(reason)
    wrong = list(check_cpp.wrong_results(kernel))
    if wrong:
        raise Failed("; ".join(wrong))
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"results and gradients agree with torch ({instructions}, {prebuilt.origin()})"


def _case(found: Callable[[], Sequence[KernelVerdict]], name: str) -> str:
    """Return the times of the implementations of one kind of calls, and what fails."""
    rows = [row for row in found() if row.case == name]
    if not rows:
        raise Failed("the check ended before any implementation ran")
    texts = []
    for row in rows:
        time = "not timed" if row.ms is None else f"{row.ms:.3g} ms"
        result = f"WRONG, {row.wrong}" if row.wrong else row.refused or f"right, {time}"
        texts.append(f"{row.impl}: {result}")
    right = [row for row in rows if row.ms is not None]
    if wrong := [row.impl for row in rows if row.wrong]:
        others = [row.impl for row in sorted(right, key=lambda row: row.ms or 0.0)]
        texts.append(f"take impl={others[0]!r} instead of {', '.join(wrong)}" if others else "")
        raise Failed("; ".join(filter(None, texts)))
    return "; ".join(texts)


# -- softmax attention -----------------------------------------------------------------------------


def _agrees(device: torch.device, attend: Callable[..., Tensor], **mask: Any) -> str:
    """Compare causal attention and its gradients with float64."""

    def run(x: Tensor, attend: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [each.detach().clone().requires_grad_() for each in x]
        out = attend(*inputs)
        return [out, *torch.autograd.grad(out.sum() + out[..., 0].sum(), inputs)]

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax_attention(q, k, v, mask=AttentionMask(causal=True, **mask)).out

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 2, 4, 96, 64, generator=generator).to(device, dtype)
    expected, tolerance = run(inputs.double(), exact), 4 * torch.finfo(dtype).eps
    results = run(inputs, attend)
    for name, x, y in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        error = ((x.double() - y).norm() / y.norm()).item()
        if not error <= tolerance:
            raise Failed(f"{name} differs from float64 by {error:.1e} (allowed {tolerance:.1e})")
    return f"results and gradients of {str(dtype).removeprefix('torch.')} agree with float64"


def _xformers(device: torch.device) -> str:
    if find_spec("xformers") is None:
        raise Unavailable("not installed")
    window = (31, 0)
    mask = AttentionMask(causal=True, window=window)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, mask=mask, impl="xformers").out

    try:
        return _agrees(device, attend, window=window)
    except UnsupportedError as error:
        raise Unavailable(_first_line(error)) from None


# -- transformers ----------------------------------------------------------------------------------


def _patches() -> str:
    """Check that each module that attnzoo patches exists and is patched."""
    from transformers import AttentionInterface, AttentionMaskInterface

    patched = []
    for name in PATCHES:
        if find_spec(name.partition(".")[0]) is None:
            continue
        import_module(name)
        patched.append(name.rpartition(".")[2])
    if FAILED_PATCHES:
        raise Failed("; ".join(FAILED_PATCHES.values()))
    for interface in (AttentionInterface, AttentionMaskInterface):
        if NAME not in interface():
            raise Failed(f"{interface.__name__} does not contain {NAME!r}")
    return f"applied: {', '.join(patched)}"


def _release() -> str:
    """Run tiny models in every cache mode, as the first swap does with an untested version."""
    verdict = check_release()
    if verdict.outcome == FAILED:
        raise Failed(verdict.reason)
    return "softmax equals the stock model; prompt, decoding, static cache, padding equal one pass"
