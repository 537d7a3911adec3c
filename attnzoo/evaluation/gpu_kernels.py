"""Check and time every implementation that runs on a GPU, in processes of their own.

    python -m attnzoo.evaluation.gpu_kernels check "delta, decay scalar" cuda:0

A wrong kernel can end its process or destroy its CUDA context, so each kind of calls is checked in
a process, all at the same time; the time goes into compilation. Outputs and gradients of a small
call are compared with float64 on the CPU. What is right is then timed, one call after another. A
process prints one line of JSON per implementation, before it runs and after.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from attnzoo import ops
from attnzoo.contract.implementation import implementations
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import LinearState
from attnzoo.errors import UnsupportedError
from attnzoo.runtime.gpu_verdicts import OWN, KernelVerdict, linear_case, store_verdicts

SECONDS = {"check": 90.0, "time": 60.0}  # time limits of all processes of a stage
BUDGET = {torch.bfloat16: 2e-2, torch.float32: 2e-3}  # error as a part of the norm; tf32 takes 1e-3
STRONG = -40.0  # of a gate of which attnzoo's own kernels are exact
ROUNDS = 5
ENDED = "the process ended or took too long"
CHECKED, WIDE = (150, 2, 128), (70, 2, 100)  # tokens, key heads and head size of checked calls
Tensors = dict[str, Tensor]
Attend = Callable[[Tensors, str], Tensor]  # from tensors and the implementation


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of calls."""

    name: str
    op: str  # whose implementations run it
    attend: Attend
    decay: str = "none"
    groups: int = 1  # query heads per key head
    one_token: bool = False  # without gradients
    dtype: torch.dtype = torch.bfloat16

    def tensors(self, tokens: int, heads: int, size: int, *, strong: bool = False) -> Tensors:
        """Return random tensors, the same on every machine; values have mean 1."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        t = 1 if self.one_token else tokens
        found = {"q": draw(2, heads * self.groups, t, size), "k": draw(2, heads, t, size)}
        found["v"] = draw(2, heads, t, size) + 1
        found = {name: x.to(self.dtype) for name, x in found.items()}
        shape = {"none": None, "scalar": (2, heads, t), "vector": (2, heads, t, size)}[self.decay]
        if shape is not None:
            found["log_decay"] = -torch.rand(shape, generator=generator)
        if strong:
            found["log_decay"][:, :, 10:13] = STRONG
            found["log_decay"][:, :, t // 2 :: 31] = STRONG
        found["beta"] = torch.rand(2, heads, t, generator=generator)
        found["kv"], found["z"] = draw(2, heads, size, size), draw(2, heads, size).abs()
        return found


def _linear(x: Tensors, impl: str, *, normalize: bool) -> Tensor:
    scale = x["q"].shape[3] ** -0.5
    out: Tensor = ops.linear_attention(
        *(x["q"], x["k"], x["v"]),
        log_decay=x.get("log_decay"),
        normalize=normalize,
        scale=scale,
        feature_map="elu+1" if normalize else "identity",
        state=LinearState(x["kv"], x["z"]),
        impl=impl,
    ).out
    return out


def _delta(x: Tensors, impl: str) -> Tensor:
    options: Any = {"log_decay": x.get("log_decay"), "normalize_qk": True, "impl": impl}
    return ops.delta_attention(x["q"], x["k"], x["v"], x["beta"], **options).out


def _gated(x: Tensors, impl: str) -> Tensor:
    q, k, gates = x["q"].abs(), x["k"].abs(), x["log_decay"]
    if gates.dim() == 4:
        options: Any = {"log_decay": gates, "bonus": x["z"][0], "impl": impl}
        return ops.rwkv6_attention(q, k, x["v"], **options).out
    options = {"log_forget": gates, "log_input": x["beta"], "impl": impl}
    return ops.mlstm_attention(q, k, x["v"], **options).out


def _softmax(x: Tensors, impl: str) -> Tensor:
    mask = AttentionMask(causal=True, window=(40, 0), num_sinks=4)
    return ops.flash_attention(x["q"], x["k"], x["v"], mask=mask, impl=impl).out


def _block_sparse(x: Tensors, impl: str) -> Tensor:
    mask = AttentionMask(causal=True)
    return ops.block_sparse_attention(x["q"], x["k"], x["v"], mask=mask, impl=impl).out


def _hybrid(x: Tensors, impl: str) -> Tensor:
    from attnzoo.ops.hybrid.api import LinearBranch, hybrid_attention

    q, k = (torch.nn.functional.softplus(x[name]) for name in "qk")
    branch = LinearBranch(q, k, x["q"].new_zeros(1, q.shape[1], 1, 1), x.get("log_decay"))
    options: Any = {"window": 40, "scale": q.shape[3] ** -0.5, "impl": impl}
    return hybrid_attention(x["q"], x["k"], x["v"], branch, **options).out


def _linear_of(normalize: bool) -> Attend:
    return lambda x, impl: _linear(x, impl, normalize=normalize)


DECAYS = ("none", "scalar", "vector")
CASES = (
    *(
        Case(
            name=linear_case(decay, normalize=normalize),
            op="linear_attention",
            attend=_linear_of(normalize),
            decay=decay,
            groups=1 + normalize,
        )
        for decay in DECAYS
        for normalize in (False, True)
    ),
    *(
        Case(name=f"delta, decay {decay}", op="delta_attention", attend=_delta, decay=decay)
        for decay in DECAYS
    ),
    *(
        Case(name=f"{name}, one token", op="gated_step", attend=_gated, decay=d, one_token=True)
        for name, d in (("mlstm", "scalar"), ("rwkv6", "vector"))
    ),
    Case(name="softmax in a window", op="flash_attention", attend=_softmax, groups=2),
    Case(name="window hybrid", op="hybrid_attention", attend=_hybrid, groups=2),
    Case(
        name="block-sparse attention",
        op="block_sparse_attention",
        attend=_block_sparse,
        dtype=torch.float32,  # rounding may select other blocks
    ),
)


# -- in the process of a case ----------------------------------------------------------------------


def impls(case: Case, device: torch.device) -> list[str]:
    """Return the implementations that run a case on a device."""
    case.attend(case.tensors(1, 1, 16), "auto")  # which registers the implementations
    found = [x for x in implementations(case.op) if x.automatic and x.runs_on(device.type)]
    return [x.name for x in found]


def results(case: Case, tensors: Tensors, impl: str, device: torch.device) -> list[Tensor]:
    """Return the output and, of more than one token, all gradients, in float64 on the CPU."""
    train = not case.one_token
    leaves = {name: x.to(device).requires_grad_(train) for name, x in tensors.items()}
    with torch.set_grad_enabled(train):
        out = case.attend(leaves, impl)
    if not train:
        return [out.detach().cpu().double()]
    weights = torch.linspace(-1, 1, out.shape[2], device=device)[:, None].to(out.dtype)
    given = list(leaves.values())
    grads = torch.autograd.grad((out * weights).sum(), given, allow_unused=True)
    return [x.detach().cpu().double() for x in (out, *grads) if x is not None]


def wrong_results(case: Case, impl: str, device: torch.device) -> str:
    """Return what is wrong in the results of an implementation, or ``""``."""
    exact_impl = "torch" if case.op in ("gated_step", "flash_attention") else "reference"
    if case.op == "flash_attention":
        exact_impl = "sdpa"
    own = impl == OWN and not case.one_token
    inputs = [case.tensors(*CHECKED)]
    if own:  # other code of the kernels: strong gates, float32 with padded sizes
        inputs += [case.tensors(*CHECKED, strong=True)] if case.decay != "none" else []
        wide = case.tensors(*WIDE)
        inputs.append({name: x.float() for name, x in wide.items()})
    for tensors in inputs:
        doubles = {name: x.double() for name, x in tensors.items()}
        exact = results(case, doubles, exact_impl, torch.device("cpu"))
        found = results(case, tensors, impl, device)
        budget = BUDGET[tensors["q"].dtype]
        for i, (x, y) in enumerate(zip(found, exact, strict=True)):
            error = ((x - y).norm() / y.norm().clamp(min=1e-30)).item()
            if not error <= budget:  # NaN, too
                name = "the output" if i == 0 else f"gradient {i}"
                return f"{name} differs from float64 by {error:.2g} of its norm"
        if own and not all(map(torch.equal, found, results(case, tensors, impl, device))):
            return "two equal calls differ"
    return ""


def milliseconds(case: Case, impl: str, device: torch.device) -> float:
    """Return the time of a call as in training, forward and backward, or of a token."""
    on_gpu = device.type == "cuda"
    tensors = case.tensors(4096 if on_gpu else 64, 16 if on_gpu else 1, 128 if on_gpu else 16)
    tensors = {name: x.to(device).requires_grad_(not case.one_token) for name, x in tensors.items()}

    def run() -> None:
        with torch.set_grad_enabled(not case.one_token):
            out = case.attend(tensors, impl)
        if not case.one_token:
            out.sum().backward()

    times = []
    for _ in range(ROUNDS + 1):  # the first one compiles and tunes
        if on_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return median(times[1:])


def run_case(stage: str, name: str, device: torch.device, leave_out: Sequence[str] = ()) -> None:
    """Check or time a case; prints a line of JSON before and after each implementation."""
    case = next(x for x in CASES if x.name == name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for impl in impls(case, device):
        if impl in leave_out:
            continue
        print(json.dumps({"impl": impl, "wrong": ENDED}), flush=True)
        row: dict[str, Any] = {"impl": impl, "wrong": ""}
        try:
            if stage == "check":
                row["wrong"] = wrong_results(case, impl, device)
            else:
                row["ms"] = milliseconds(case, impl, device)
        except (UnsupportedError, torch.OutOfMemoryError) as error:
            row["refused"] = str(error)
        except Exception as error:  # of a compiler, a driver or another project
            lines = str(error).strip().splitlines()
            row["wrong"] = f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
        print(json.dumps(row), flush=True)


# -- all cases -------------------------------------------------------------------------------------


def check_gpu(device: torch.device, cases: Sequence[Case] = CASES) -> Iterator[KernelVerdict]:
    """Check all implementations, time the right ones, store and yield what was found."""
    checked: dict[Case, dict[str, Any]] = {case: {} for case in cases}
    unfinished = list(cases)
    while unfinished:  # after a crash, with the other implementations
        jobs = [("check", case, device, list(checked[case])) for case in unfinished]
        for case, found in zip(tuple(unfinished), _run(jobs), strict=True):
            checked[case] |= found
            if not any(row["wrong"] == ENDED for row in found.values()):
                unfinished.remove(case)
    rows: list[KernelVerdict] = []
    end = time.monotonic() + SECONDS["time"]
    for case, found in checked.items():
        bad = [impl for impl, row in found.items() if row["wrong"] or row.get("refused")]
        timed: dict[str, Any] = {}
        if time.monotonic() < end and len(bad) < len(found):
            (timed,) = _run([("time", case, device, bad)], end - time.monotonic())
        for impl, row in found.items():
            row = row if impl in bad else timed.get(impl, row)
            rows.append(KernelVerdict(case=case.name, **row))
    store_verdicts(device, rows)
    yield from rows


COMMAND = (sys.executable, "-m", "attnzoo.evaluation.gpu_kernels")
Job = tuple[str, Case, torch.device, Sequence[str]]


def _run(jobs: Sequence[Job], seconds: float | None = None) -> list[dict[str, Any]]:
    """Run processes at the same time; return the last row of each implementation, for each."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = [
        subprocess.Popen(
            [*COMMAND, stage, case.name, str(device), *leave_out],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for stage, case, device, leave_out in jobs
    ]
    end = time.monotonic() + (SECONDS[jobs[0][0]] if seconds is None else seconds)
    found = []
    for process in running:
        try:
            output, _ = process.communicate(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"impl"')]
        found.append({row["impl"]: row for row in rows})
    return found


if __name__ == "__main__":
    stage, name, device, *leave_out = sys.argv[1:]
    run_case(stage, name, torch.device(device), leave_out)
