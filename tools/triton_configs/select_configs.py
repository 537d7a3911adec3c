"""Select the configs to ship, without a GPU: the candidates that issue the fewest instructions.

    python -m tools.triton_configs.select_configs     # all rows; hours
    python -m tools.triton_configs.select_configs --arch 90 --decay vector --size 128    # some rows

A candidate is compiled for the calls of a row. It is excluded if a kernel exceeds the shared memory
of a block or has no tensor-core instruction. The others are ranked by the issue cycles per token of
the first call, spilled registers included: a config that spills a few registers can issue half as
many instructions as one that does not. Only time on a GPU is a better measure, and
``python -m tools.triton_configs.tune`` ranks by it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from unittest import mock

import torch

from attnzoo.ops.linear.triton import launch as linear_launch
from attnzoo.ops.linear.triton.configs import (
    DECAYS,
    KERNELS,
    KINDS,
    SHIPPED,
    SIZES,
    Config,
    Shape,
    avoid_defects,
    key,
)
from tools.triton_configs.compile_aot import (
    CompileCase,
    compiling,
    kernel_resources,
    launch_case,
    limit_violations,
)
from tools.triton_configs.ranking import cheapest_configs

# Configs (chunk, warps, stages, tile), the preferred one of equal cost first. With four warps, two
# blocks fit on a processor and hide each other's latency; products of 64 rows use a warp group. A
# tile of 128 reads queries, keys and values once.
CANDIDATES = {
    "large": "64,4,2,64  64,8,3,128  64,8,2,128  64,4,2,32  32,4,2,64",
    "256": "64,8,2,128  64,8,2,64  64,4,2,32  32,8,2,64  16,8,2,32  16,8,1,16",
    "small": "64,4,2,64  32,4,2,64  32,8,2,64  32,8,2,32  16,8,2,32  16,8,1,32  16,8,1,16",
}


def candidates(kind: str, size: int, capability: int) -> Iterator[Config]:
    """Yield the configs to compile for a row, in order of preference."""
    small = capability < 90 or kind in ("any", "wide")
    for text in CANDIDATES["small" if small else "256" if size > 128 else "large"].split():
        candidate = Config(*map(int, text.split(",")))
        too_large = size * candidate.tile > 4096 * candidate.warps
        if not too_large and candidate == avoid_defects(candidate, capability):
            yield candidate


def cases(decay: str, kind: str, size: int) -> tuple[CompileCase, ...]:
    """Return calls that use a row of the table: a typical one, and the most demanding ones."""
    case = CompileCase(d=size, e=size, decay=decay)
    if kind == "bare":
        return (case._replace(feature_map="identity", normalize=False),)
    if kind == "mapped":
        return case, case._replace(feature_map="exp"), case._replace(groups=4, varlen=True)
    if kind == "any":
        return case._replace(d=size - 8), case._replace(d=size - 8, groups=4, varlen=True)
    return case._replace(dtype=torch.float32), case._replace(dtype=torch.float16)


def issue_cycles(
    case: CompileCase, candidate: Config, capability: int, kernel_names: set[str]
) -> dict[str, float]:
    """Return the issue cycles per token of each kernel of a call that can run with a config."""
    cycles: dict[str, float] = {}
    with (
        mock.patch.object(linear_launch, "config", return_value=candidate),
        compiling(capability, kernel_names) as compiled_kernels,
    ):
        launch_case(case)
    for compiled in compiled_kernels:
        row = kernel_resources("", compiled)
        worst = float("inf") if limit_violations(row) else row.issue_cycles_per_token
        cycles[compiled.name] = max(worst, cycles.get(compiled.name, 0.0))
    return {name: cost for name, cost in cycles.items() if cost < float("inf")}


def select_configs(decay: str, kind: str, size: int, capability: int) -> dict[str, Config]:
    """Return the config of each kernel of a kind of call."""
    names = set(KERNELS) - ({"shared"} if kind == "bare" else set())  # bare does not run it
    first, *others = cases(decay, kind, size)
    costs = {
        candidate: issue_cycles(first, candidate, capability, names)
        for candidate in candidates(kind, size, capability)
    }
    while True:  # exclude configs that fail in the other calls, and select again
        selected = cheapest_configs(costs, decay)
        missing = names - set(selected)
        assert not missing, f"add smaller configs to CANDIDATES: {missing} {decay} {kind} {size}"
        excluded = [
            (name, candidate)
            for case in others
            for candidate in set(selected.values())
            for used in [{name for name, config in selected.items() if config == candidate}]
            for name in used - set(issue_cycles(case, candidate, capability, used))
        ]
        if not excluded:
            return selected
        for name, candidate in excluded:
            costs[candidate].pop(name, None)


def main() -> int:
    """Select configs and write them to ``shipped.json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=[80, 90], choices=[80, 90])
    parser.add_argument("--decay", nargs="*", default=DECAYS, choices=DECAYS)
    parser.add_argument("--kind", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--size", type=int, nargs="*", default=SIZES, choices=SIZES)
    args = parser.parse_args()
    for capability, decay, kind, size in product(args.arch, args.decay, args.kind, args.size):
        selected = {
            key(Shape(kernel, decay, kind, size), capability): config
            for kernel, config in select_configs(decay, kind, size, capability).items()
        }
        rows = json.loads(SHIPPED.read_text("utf-8"))["configs"] if SHIPPED.exists() else {}
        lines = (
            f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted((rows | selected).items())
        )
        SHIPPED.write_text('{"configs": {\n' + ",\n".join(lines) + "\n}}\n", "utf-8")
        print(*(f"{k}: {tuple(v)}" for k, v in selected.items()), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
