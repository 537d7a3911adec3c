"""Select the configs to ship, without a GPU: the first of a preference list that fits the chip.

    python -m tools.triton_configs.select_configs     # all rows; an hour
    python -m tools.triton_configs.select_configs --arch 90 --decay vector    # some rows

Large chunks and tiles come first, because they load, map and multiply least per token. A config
fits if no kernel spills registers or exceeds the shared memory of a block. If none fits, the one
that spills least is selected. ``python -m tools.triton_configs.compile_aot`` prints how many
instructions the result issues per token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from unittest import mock

import torch

from attnzoo.backends.linear.kernels import launch as linear_launch
from attnzoo.backends.linear.kernels.configs import (
    DECAYS,
    KERNELS,
    KINDS,
    SHARED_BYTES,
    SHIPPED,
    SIZES,
    Config,
    Shape,
    key,
)
from tools.triton_configs.compile_aot import (
    CompileCase,
    compiling,
    kernel_resources,
    launch_case,
    limit_violations,
)

SAME_TILE = {"dq", "dk"}  # with scalar decay, dk reads q_dq per tile as dq writes it


# Configs (chunk, warps, stages, tile) in order of preference. With four warps, two blocks fit on a
# processor and hide each other's latency; products of 64 rows use a warp group.
PREFERRED = {
    "none": """
        64,4,2,64  64,4,2,32  32,4,2,64  64,8,2,64  32,4,2,32  32,8,2,64  32,8,2,32
        16,8,2,32  16,8,1,32  16,8,1,16""",
    "vector": """
        32,8,2,128  32,4,2,64  32,8,2,64  16,8,2,128  16,8,2,64  32,8,2,32  16,4,2,32
        16,8,2,32  16,8,1,32  16,8,1,16""",
    "small": """
        32,4,2,64  32,4,2,32  32,8,2,64  32,8,2,32  16,8,2,64  16,8,2,32  16,8,1,32  16,8,1,16""",
}


def candidates(decay: str, kind: str, size: int, capability: int) -> Iterator[Config]:
    """Yield configs in order of preference."""
    small = capability < 90 or kind in ("any", "wide")
    preferred = PREFERRED["small" if small else "vector" if decay == "vector" else "none"]
    for text in preferred.split():
        candidate = Config(*map(int, text.split(",")))
        if size * candidate.tile <= 2048 * candidate.warps:
            yield candidate


def cases(decay: str, kind: str, size: int) -> tuple[CompileCase, ...]:
    """Return the calls with the largest demands among those that use a row of the table."""
    case = CompileCase(d=size, e=size, decay=decay)
    if kind == "bare":
        return (case._replace(feature_map="identity", normalize=False),)
    if kind == "mapped":
        return case, case._replace(feature_map="exp"), case._replace(groups=4)
    if kind == "any":
        return case._replace(groups=4, packed=True, padded=True), case._replace(d=size - 8)
    return case._replace(dtype=torch.float32), case._replace(dtype=torch.float16)


def excess_bytes(
    case: CompileCase, candidate: Config, capability: int, kernel_names: set[str]
) -> dict[str, int]:
    """Return by how many bytes each kernel of a call exceeds the chip's limits with a config.

    These are spilled bytes; a kernel that cannot run at all counts as 2^30.
    """
    excesses: dict[str, int] = {}
    with (
        mock.patch.object(linear_launch, "config", return_value=candidate),
        compiling(capability, kernel_names) as compiled_kernels,
    ):
        launch_case(case)
    for compiled in compiled_kernels:
        row = kernel_resources("", compiled)
        excess = row.stack_bytes if row.stack_bytes or not limit_violations(row) else 2**30
        excess += 2**30 * (row.shared_bytes > SHARED_BYTES[capability])
        excesses[compiled.name] = max(excess, excesses.get(compiled.name, 0))
    return excesses


def select_configs(
    decay: str, kind: str, size: int, capability: int
) -> Iterator[tuple[str, Config]]:
    """Yield each kernel of a kind of call with its first config that fits, or fits best."""
    remaining = set(KERNELS) - ({"shared"} if kind == "bare" else set())  # bare does not run it
    best: dict[str, tuple[int, Config]] = {}
    for candidate in candidates(decay, kind, size, capability):
        worst = dict.fromkeys(remaining, 0)
        for case in cases(decay, kind, size):
            untested = {name for name in remaining if worst[name] == 0 or name not in best}
            for name, excess in excess_bytes(case, candidate, capability, untested).items():
                worst[name] = max(worst[name], excess)
        if decay == "scalar" and remaining >= SAME_TILE:
            worst |= dict.fromkeys(SAME_TILE, max(worst[name] for name in SAME_TILE))
        for name, excess in worst.items():
            if name not in best or excess < best[name][0]:
                best[name] = excess, candidate
        remaining = {name for name in remaining if best[name][0]}
        if not remaining:
            break
    for name, (excess, candidate) in best.items():
        assert excess < 2**30, f"add smaller configs to PREFERRED: {name} {decay} {kind} {size}"
        yield name, candidate


def main() -> int:
    """Select configs and write them to ``shipped.json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=[80, 90], choices=[80, 90])
    parser.add_argument("--decay", nargs="*", default=DECAYS, choices=DECAYS)
    args = parser.parse_args()
    for capability, decay, kind, size in product(args.arch, args.decay, KINDS, SIZES):
        selected = {
            key(Shape(kernel, decay, kind, size), capability): config
            for kernel, config in select_configs(decay, kind, size, capability)
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
