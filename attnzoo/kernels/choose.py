"""Choose the configs that are shipped, without a GPU: the first preferred one that fits the chip.

    python -m attnzoo.kernels.choose            # compiles everything, writes shipped.json; an hour
    python -m attnzoo.kernels.choose --arch 90 --decay vector    # some rows, the others stay

Preferred are large chunks and tiles, which read, map and multiply least for each token; a config
fits if no kernel spills registers or takes more shared memory than a block may have. Where none
fits, the one that spills least is taken. How many instructions a token costs then,
``python -m attnzoo.kernels.ahead`` says.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from unittest import mock

import torch

from attnzoo.kernels.ahead import Case, compiling, launch, resources, wrong
from attnzoo.kernels.configs import (
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
from attnzoo.kernels.triton import linear_launch

SHARING = {"dq", "dk"}  # of one tile with a decay per token: one reads what the other writes


# chunk, warps, stages, tile: the preferred first. Four warps leave room for a second block on a
# processor, which works while the first waits; products of 64 rows take a whole warp group.
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
    """Yield configs, the preferred first."""
    small = capability < 90 or kind in ("any", "wide")
    preferred = PREFERRED["small" if small else "vector" if decay == "vector" else "none"]
    for text in preferred.split():
        chosen = Config(*map(int, text.split(",")))
        if size * chosen.tile <= 2048 * chosen.warps:
            yield chosen


def cases(decay: str, kind: str, size: int) -> tuple[Case, ...]:
    """Return calls that take most of a chip among those that a row of the table serves."""
    case = Case(d=size, e=size, decay=decay)
    if kind == "bare":
        return (case._replace(feature_map="identity", normalize=False),)
    if kind == "mapped":
        return case, case._replace(feature_map="exp"), case._replace(groups=4)
    if kind == "any":
        return case._replace(groups=4, packed=True, padded=True), case._replace(d=size - 8)
    return case._replace(dtype=torch.float32), case._replace(dtype=torch.float16)


def misfits(case: Case, chosen: Config, capability: int, wanted: set[str]) -> dict[str, int]:
    """Return by how much each kernel of a call exceeds the chip with a config; 0 where it fits.

    In bytes that are spilled; a kernel that cannot run at all is as bad as a gigabyte of them.
    """
    found: dict[str, int] = {}
    with (
        mock.patch.object(linear_launch, "config", return_value=chosen),
        compiling(capability, wanted) as kernels,
    ):
        launch(case)
    for compiled in kernels:
        row = resources("", compiled)
        excess = row.stack_bytes if row.stack_bytes or not wrong(row) else 2**30
        excess += 2**30 * (row.shared_bytes > SHARED_BYTES[capability])
        found[compiled.name] = max(excess, found.get(compiled.name, 0))
    return found


def choose(decay: str, kind: str, size: int, capability: int) -> Iterator[tuple[str, Config]]:
    """Yield the kernels of a kind of call and their configs: the first that fits, or fits best."""
    names = {"span_sums" if kernel == "sums" else kernel: kernel for kernel in KERNELS}
    left = set(names) - ({"shared"} if kind == "bare" else set())  # which it does not run
    best: dict[str, tuple[int, Config]] = {}
    for chosen in candidates(decay, kind, size, capability):
        worst = dict.fromkeys(left, 0)
        for case in cases(decay, kind, size):
            hopeful = {name for name in left if worst[name] == 0 or name not in best}
            for name, excess in misfits(case, chosen, capability, hopeful).items():
                worst[name] = max(worst[name], excess)
        if decay == "scalar" and left >= SHARING:
            worst |= dict.fromkeys(SHARING, max(worst[name] for name in SHARING))
        for name, excess in worst.items():
            if name not in best or excess < best[name][0]:
                best[name] = excess, chosen
        left = {name for name in left if best[name][0]}
        if not left:
            break
    for name, (excess, chosen) in best.items():
        assert excess < 2**30, f"add smaller configs to PREFERRED: {name} {decay} {kind} {size}"
        yield names[name], chosen


def main() -> int:
    """Choose and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=[80, 90], choices=[80, 90])
    parser.add_argument("--decay", nargs="*", default=DECAYS, choices=DECAYS)
    given = parser.parse_args()
    for capability, decay, kind, size in product(given.arch, given.decay, KINDS, SIZES):
        chosen = {
            key(Shape(kernel, decay, kind, size), capability): config
            for kernel, config in choose(decay, kind, size, capability)
        }
        rows = json.loads(SHIPPED.read_text("utf-8"))["configs"] if SHIPPED.exists() else {}
        lines = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted((rows | chosen).items()))
        SHIPPED.write_text('{"configs": {\n' + ",\n".join(lines) + "\n}}\n", "utf-8")
        print(*(f"{k}: {tuple(v)}" for k, v in chosen.items()), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
