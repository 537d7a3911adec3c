"""Measure other block shapes than the shipped ones, on a GPU, and write a table of the fastest.

    python -m attnzoo.kernels.tune table.json
    ATTNZOO_KERNEL_TABLE=table.json python train.py

For each kernel, kind of decay and head size, every candidate runs alone in a real call, with the
tile of the shipped config; one that spills registers is left out, unless all do. Calls that are
masked, grouped or of float32 keep the shipped configs. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from attnzoo.errors import UnsupportedError
from attnzoo.kernels.configs import DECAYS, SIZES, Config, Shape, default_config, key
from attnzoo.kernels.triton import linear_launch

CANDIDATES = tuple(product((16, 32, 64), (4, 8), (1, 2, 3)))  # chunk, warps, stages


def call(decay: str, kind: str, size: int, device: torch.device) -> linear_launch.Call:
    """Return a call of a kind whose kernels have enough to do: 64 heads of 4096 tokens."""
    shape = (1, 4096, 64, size)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(shape, **options).transpose(1, 2) for _ in range(3))
    gates = {"none": None, "scalar": (1, 64, 4096), "vector": (1, 64, 4096, size)}[decay]
    log_decay = None if gates is None else -torch.rand(gates, device=device) / 16
    state = torch.zeros(1, 64, size, size, device=device), torch.zeros(1, 64, size, device=device)
    given = linear_launch.Given(q, k, v, log_decay, *state, None, None)
    feature_map = "elu+1" if kind == "mapped" else "identity"
    return linear_launch.Call(
        given, feature_map, 1.0, 1.0, kind == "mapped", 1e-6, 0, 1024, want_decay=gates is not None
    )


def launches(call: linear_launch.Call) -> Iterator[tuple[Shape, Any]]:
    """Yield each kernel's shape, and a function that launches it with a config."""
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        found.append((self, args, options))
        return launch(self, *args, **options)

    with mock.patch.object(JITFunction, "run", run):
        out, *last = call.forward()
        call.backward(torch.randn_like(out), *last, (last[0], last[1]))
    seen = set()
    for kernel, args, options in found:
        if "C" not in options:  # the scan has no chunks
            continue
        name = options.get("MODE", "sums")
        if name in seen:
            continue
        seen.add(name)

        def timed(
            chosen: Config, kernel: Any = kernel, args: Any = args, options: Any = options
        ) -> tuple[float, bool]:
            blocks = {"C": chosen.chunk, "num_warps": chosen.warps, "num_stages": chosen.stages}
            compiled = launch(kernel, *args, **{**options, **blocks})
            median = triton.testing.do_bench(
                lambda: launch(kernel, *args, **{**options, **blocks}), return_mode="median"
            )
            return float(median), bool(compiled.n_spills)

        yield call._shape(name), timed


def fastest(shape: Shape, timed: Any, capability: int) -> tuple[Config, float, float]:
    """Return the fastest candidate, its milliseconds, and those of the shipped config."""
    shipped = default_config(shape, capability)
    times: dict[Config, tuple[bool, float]] = {}
    for chosen in {shipped, *(Config(*blocks, shipped.tile) for blocks in CANDIDATES)}:
        try:
            median_ms, spills = timed(chosen)
        except OutOfResources:
            continue
        times[chosen] = (spills, median_ms)
    best = min(times, key=lambda chosen: times[chosen])
    return best, times[best][1], times[shipped][1]


def main() -> int:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", type=Path, help="file to write, JSON")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "tuning measures kernels on a GPU, and torch sees none; the shipped configs need no "
            "tuning (python -m attnzoo.kernels.ahead shows them)"
        )
    device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability(device)
    capability, rows = 10 * major + minor, {}
    for decay, kind, size in product(DECAYS, ("bare", "mapped"), SIZES):
        for shape, timed in launches(call(decay, kind, size, device)):
            best, best_ms, shipped_ms = fastest(shape, timed, capability)
            name = key(shape, capability)
            print(f"{name}: {best} {best_ms:.3f} ms (shipped {shipped_ms:.3f} ms)", flush=True)
            rows[name] = list(best)
    given.table.write_text(
        json.dumps({"device": torch.cuda.get_device_name(device), "configs": rows}, indent=1),
        "utf-8",
    )
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UnsupportedError as error:
        raise SystemExit(f"error: {error}") from None
