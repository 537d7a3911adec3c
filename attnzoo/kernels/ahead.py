"""Compile every kernel ahead of time, without a GPU, and read what it takes of one.

    python -m attnzoo.kernels.ahead                  # all shipped configs, sm_80 and sm_90: a table
    python -m attnzoo.kernels.ahead --quick --json   # those of head size 128, as JSON lines

What runs is the code that launches kernels in a real call; only the launch itself is replaced by a
compilation for a named architecture. So the variants are the very ones that a GPU would get.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attnzoo.errors import UnsupportedError
from attnzoo.kernels.configs import SHARED_BYTES
from attnzoo.kernels.machine_code import loop_instructions, registers
from attnzoo.kernels.triton import linear_launch
from attnzoo.kernels.triton.interpreter import interpreted
from attnzoo.kernels.triton.linear_step import take_step

SCHEDULERS = 4  # of one processor, each issues an instruction a cycle
LENGTH = 2048  # tokens: several spans, so that their kernels are launched too


class Case(NamedTuple):
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


class Compiled(NamedTuple):
    """A kernel, and what it was launched with."""

    name: str
    kernel: Any
    options: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes of a GPU."""

    capability: int
    kernel: str
    case: str
    warps: int
    stages: int
    chunk: int
    tile: int
    registers: int
    stack_bytes: int  # above zero where registers are spilled
    shared_bytes: int
    tensor_core: str  # "wgmma", "mma" or ""
    products: int  # tensor-core instructions in the text
    slots: float  # instructions that each of a processor's schedulers issues for a token of a head


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
def compiling(capability: int, only: Container[str] | None = None) -> Iterator[list[Compiled]]:
    """Compile and collect what is launched inside, or those kernels only; nothing is computed."""
    if interpreted():
        raise UnsupportedError(
            "kernels cannot be compiled where TRITON_INTERPRET is set, which settles that they are "
            "interpreted; unset it and start again"
        )
    found: list[Compiled] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = options.get("MODE", self.__name__.removesuffix("_kernel"))
        if only is None or name in only:
            kernel = launch(self, *args, grid=grid, warmup=True, **options)
            found.append(Compiled(name, kernel, options))

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


def resources(case: str, found: Compiled) -> Resources:
    """Read a compiled kernel's demands from its machine code."""
    name, kernel, options = found
    used, stack = registers(kernel.asm["cubin"])
    counts = {
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        "mma": kernel.asm["ptx"].count("mma.sync"),
    }
    best = next((kind for kind, count in counts.items() if count), "")
    warps, slots = kernel.metadata.num_warps, 0.0
    if "C" in options:
        tokens = options["C"] * (options["G"] if name in ("out", "shared", "dq") else 1)
        issued = loop_instructions(kernel.asm["cubin"]) * warps / SCHEDULERS
        slots = issued * options["TILES"] / tokens
    return Resources(
        kernel.metadata.target.arch,
        name,
        case,
        warps,
        kernel.metadata.num_stages,
        options.get("C", 0),
        options.get("BU", 0),
        used,
        stack,
        kernel.metadata.shared,
        best,
        counts.get(best, 0),
        round(slots, 1),
    )


def sweep(cases: tuple[Case, ...], capability: int) -> Iterator[Resources]:
    """Compile all kernels of some cases for an architecture; each variant once."""
    seen = set()
    for case in cases:
        with compiling(capability) as found:
            launch(case)
        default = Case()._asdict()
        changed = {k: v for k, v in case._asdict().items() if v != default[k]}
        label = " ".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items())
        for compiled in found:
            if compiled.kernel.hash not in seen:
                seen.add(compiled.kernel.hash)
                yield resources(label or "plain", compiled)


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
                    f"sm_{row.capability} {row.kernel:10} {row.case:45} chunk {row.chunk:2} "
                    f"tile {row.tile:3} warps {row.warps} stages {row.stages} registers "
                    f"{row.registers:3} shared {row.shared_bytes:6} {row.tensor_core:5} "
                    f"{row.products:4} slots {row.slots:6.1f} {'; '.join(reasons)}",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
