"""Compile every kernel ahead of time, without a GPU, and read what it takes of one.

    python -m attnzoo.kernels.ahead                  # all shipped configs, sm_80 and sm_90: a table
    python -m attnzoo.kernels.ahead --quick --json   # those of head size 128, as JSON lines

What runs is the code that launches kernels in a real call; only the launch itself is replaced by a
compilation for a named architecture. So the variants are the very ones that a GPU would get.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attnzoo.errors import UnsupportedError
from attnzoo.kernels.triton import linear_launch
from attnzoo.kernels.triton.interpreter import interpreted
from attnzoo.kernels.triton.linear_step import take_step

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # that one block may have
LENGTH = 2048  # tokens: several spans, so that their kernels are launched too


@dataclass(frozen=True)
class Case:
    """What a call is given."""

    d: int = 128
    e: int = 128
    groups: int = 1
    decay: str = "none"
    normalize: bool = True
    feature_map: str = "elu+1"
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False
    padded: bool = False


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes of a GPU."""

    capability: int
    kernel: str
    case: str
    warps: int
    stages: int
    registers: int
    stack_bytes: int  # above zero where registers are spilled
    shared_bytes: int
    tensor_core: str  # "wgmma", "mma" or ""
    products: int  # tensor-core instructions in the text


QUICK = tuple(Case(decay=decay) for decay in ("none", "scalar", "vector"))
CASES = (
    *QUICK,
    *(
        Case(decay=decay, normalize=False, feature_map="identity")
        for decay in ("none", "scalar", "vector")
    ),
    *(
        Case(d=size, e=size, decay=decay)
        for size in (16, 64, 100, 256)
        for decay in ("none", "scalar", "vector")
    ),
    *(
        Case(d=64, e=128, groups=4, decay=decay, packed=True, padded=True)
        for decay in ("none", "vector")
    ),
    Case(d=128, e=128, groups=4),
    Case(feature_map="exp"),
    Case(feature_map="relu"),
    *(
        Case(d=size, e=size, decay=decay, dtype=torch.float16)
        for size in (64, 128, 256)
        for decay in ("none", "scalar", "vector")
    ),
    *(
        Case(d=size, e=size, decay=decay, dtype=torch.float32)
        for size in (64, 128, 256)
        for decay in ("none", "scalar", "vector")
    ),
)


class _Driver:
    """Stands for a GPU of the named architecture that kernels are compiled for, not run on."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[list[tuple[str, Any]]]:
    """Compile, and collect by kernel's name, what is launched inside; results are not computed."""
    if interpreted():
        raise UnsupportedError(
            "kernels cannot be compiled where TRITON_INTERPRET is set, which settles that they are "
            "interpreted; unset it and start again"
        )
    found: list[tuple[str, Any]] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        found.append((options.get("MODE", self.__name__.removesuffix("_kernel")), kernel))

    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver(capability)),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(linear_launch, "_device", return_value=(capability, 132)),
    ):
        yield found


def launch(case: Case) -> None:
    """Launch both passes of a case, as a call of the operator would, and a step of decoding."""
    heads, t = 1, LENGTH
    q = torch.empty(1, t, heads * case.groups, case.d, dtype=case.dtype).transpose(1, 2)
    k = torch.empty(1, t, heads, case.d, dtype=case.dtype).transpose(1, 2)
    v = torch.empty(1, t, heads, case.e, dtype=case.dtype).transpose(1, 2)
    shape = {"none": None, "scalar": (1, heads, t), "vector": (1, heads, t, case.d)}[case.decay]
    given = linear_launch.Given(
        q,
        k,
        v,
        None if shape is None else torch.empty(shape),
        torch.empty(1, heads, case.d, case.e),
        torch.empty(1, heads, case.d),
        torch.zeros(1, t, dtype=torch.long) if case.packed else None,
        torch.ones(1, t, dtype=torch.bool) if case.padded else None,
    )
    options = (case.feature_map, 1.0, 1.0, case.normalize, 1e-6, 0, 0)
    out, *last = linear_launch.Call(given, *options).forward()
    call = linear_launch.Call(given, *options, want_decay=shape is not None)
    call.backward(torch.empty_like(out), *last, (last[0], last[1]))
    one = [x[:, :, :1] for x in given[:3]]
    gates = None if given.log_decay is None else given.log_decay[:, :, :1]
    real = None if given.real is None else given.real[:, :1]
    step_options = (case.feature_map, 1.0, 1.0, case.normalize, 1e-6)
    take_step(*one, gates, given.kv, given.z, real, *step_options)


def resources(name: str, case: str, kernel: Any) -> Resources:
    """Read a compiled kernel's demands from its machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None
    ptx = kernel.asm["ptx"]
    counts = {"wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync")}
    best = next((kind for kind, count in counts.items() if count), "")
    return Resources(
        kernel.metadata.target.arch,
        name,
        case,
        kernel.metadata.num_warps,
        kernel.metadata.num_stages,
        int(found[1]),
        int(found[2]),
        kernel.metadata.shared,
        best,
        counts.get(best, 0),
    )


def sweep(cases: tuple[Case, ...], capability: int) -> Iterator[Resources]:
    """Compile all kernels of some cases for an architecture; each variant once."""
    seen = set()
    for case in cases:
        with compiling(capability) as found:
            launch(case)
        default = asdict(Case())
        changed = {k: v for k, v in asdict(case).items() if v != default[k]}
        label = " ".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items())
        for name, kernel in found:
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                yield resources(name, label or "plain", kernel)


def wrong(row: Resources) -> list[str]:
    """Say what is wrong with a kernel's demands."""
    reasons = []
    if row.stack_bytes:
        reasons.append(f"spills ({row.stack_bytes} bytes of stack)")
    if row.shared_bytes > SHARED_BYTES[row.capability]:
        reasons.append(
            f"{row.shared_bytes} bytes of shared memory ({SHARED_BYTES[row.capability]})"
        )
    if row.kernel not in ("span_scan", "step") and not row.tensor_core:
        reasons.append("no tensor-core instruction")
    return reasons


def main() -> int:
    """Print what each kernel takes; fail if one takes too much."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="head size 128 in bfloat16 only")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--arch", type=int, nargs="*", default=[80, 90], choices=[80, 90])
    given = parser.parse_args()
    failed = 0
    for capability in given.arch:
        for row in sweep(QUICK if given.quick else CASES, capability):
            reasons = wrong(row)
            failed += bool(reasons)
            if given.json:
                print(json.dumps({**asdict(row), "wrong": reasons}), flush=True)
            else:
                print(
                    f"sm_{row.capability} {row.kernel:10} {row.case:45} warps {row.warps} "
                    f"stages {row.stages} registers {row.registers:3} shared {row.shared_bytes:6} "
                    f"{row.tensor_core:5} {row.products:4} {'; '.join(reasons)}",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
