"""Tune block configs on a GPU, and write a table of the fastest ones.

    python -m tools.triton_configs.tune table.json
    ATTNZOO_KERNEL_TABLE=table.json python train.py

For each kernel, decay and head size, every candidate runs in a call of the operator, with the tile
of the shipped config. Candidates that spill registers are excluded, unless all do. Calls with
masks, grouped heads or float32 keep the shipped configs. This takes a few minutes.
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

from attnzoo.backends.linear.kernels import launch as linear_launch
from attnzoo.backends.linear.kernels.configs import (
    DECAYS,
    SIZES,
    Config,
    Shape,
    default_config,
    key,
)
from attnzoo.errors import UnsupportedError

CANDIDATES = tuple(product((16, 32, 64), (4, 8), (1, 2, 3)))  # chunk, warps, stages


def make_launcher(
    decay: str, kind: str, size: int, device: torch.device
) -> linear_launch.KernelLauncher:
    """Return the launcher of a call that fills a GPU: 64 heads of 4096 tokens."""
    shape = (1, 4096, 64, size)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn(shape, **options).transpose(1, 2) for _ in range(3))
    decay_shape = {"none": None, "scalar": (1, 64, 4096), "vector": (1, 64, 4096, size)}[decay]
    log_decay = None if decay_shape is None else -torch.rand(decay_shape, device=device) / 16
    state = torch.zeros(1, 64, size, size, device=device), torch.zeros(1, 64, size, device=device)
    tensors = linear_launch.LinearTensors(q, k, v, log_decay, *state, None, None)
    feature_map = "elu+1" if kind == "mapped" else "identity"
    return linear_launch.KernelLauncher(
        tensors,
        feature_map,
        1.0,
        1.0,
        kind == "mapped",
        1e-6,
        0,
        1024,
        needs_decay_grad=decay_shape is not None,
    )


def launches(launcher: linear_launch.KernelLauncher) -> Iterator[tuple[Shape, Any]]:
    """Yield the config key of each kernel, and a function that times it with a config."""
    recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        recorded.append((self, args, options))
        return launch(self, *args, **options)

    with mock.patch.object(JITFunction, "run", run):
        out, *last = launcher.forward()
        launcher.backward(torch.randn_like(out), *last, (last[0], last[1]))
    seen = set()
    for kernel, args, options in recorded:
        if "C" not in options:  # split_scan_kernel has no config
            continue
        name = options.get("MODE", "sums")
        if name in seen:
            continue
        seen.add(name)

        def time_config(
            chosen: Config, kernel: Any = kernel, args: Any = args, options: Any = options
        ) -> tuple[float, bool]:
            blocks = {"C": chosen.chunk, "num_warps": chosen.warps, "num_stages": chosen.stages}
            compiled = launch(kernel, *args, **{**options, **blocks})
            median = triton.testing.do_bench(
                lambda: launch(kernel, *args, **{**options, **blocks}), return_mode="median"
            )
            return float(median), bool(compiled.n_spills)

        yield launcher.config_shape(name), time_config


def fastest_config(shape: Shape, time_config: Any, capability: int) -> tuple[Config, float, float]:
    """Return the fastest candidate, its time and that of the shipped config, in milliseconds."""
    shipped = default_config(shape, capability)
    times: dict[Config, tuple[bool, float]] = {}
    for chosen in {shipped, *(Config(*blocks, shipped.tile) for blocks in CANDIDATES)}:
        try:
            median_ms, spills = time_config(chosen)
        except OutOfResources:
            continue
        times[chosen] = (spills, median_ms)
    best = min(times, key=lambda chosen: times[chosen])
    return best, times[best][1], times[shipped][1]


def main() -> int:
    """Measure the candidates and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", type=Path, help="file to write, JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "tuning measures kernels on a GPU, and torch sees none; the shipped configs need no "
            "tuning (python -m tools.triton_configs.compile_aot prints them)"
        )
    device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability(device)
    capability, rows = 10 * major + minor, {}
    for decay, kind, size in product(DECAYS, ("bare", "mapped"), SIZES):
        for shape, time_config in launches(make_launcher(decay, kind, size, device)):
            best, best_ms, shipped_ms = fastest_config(shape, time_config, capability)
            name = key(shape, capability)
            print(f"{name}: {best} {best_ms:.3f} ms (shipped {shipped_ms:.3f} ms)", flush=True)
            rows[name] = list(best)
    args.table.write_text(
        json.dumps({"device": torch.cuda.get_device_name(device), "configs": rows}, indent=1),
        "utf-8",
    )
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UnsupportedError as error:
        raise SystemExit(f"error: {error}") from None
