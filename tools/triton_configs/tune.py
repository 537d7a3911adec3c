"""Tune block configs on a GPU, and write a table of the fastest ones.

    python -m tools.triton_configs.tune table.json
    ATTNZOO_KERNEL_TABLE=table.json python train.py

For each decay and head size, every candidate runs in a call of the operator, and each kernel takes
the fastest one; whether it spills registers does not matter. Calls with masks, grouped heads or
float32 keep the shipped configs. Compiling the candidates takes most of the time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from attnzoo.errors import UnsupportedError
from attnzoo.ops.linear.triton import launch as linear_launch
from attnzoo.ops.linear.triton.configs import (
    DECAYS,
    SIZES,
    Config,
    Shape,
    key,
)
from tools.triton_configs.compile_aot import kernel_name
from tools.triton_configs.ranking import cheapest_configs

CANDIDATES = tuple(
    Config(*blocks)  # chunk, warps, stages, tile
    for blocks in (
        *product((16, 32, 64), (4, 8), (2, 3), (32, 64)),
        *product((32, 64), (8,), (2, 3), (128,)),
    )
)


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
    tensors = linear_launch.LinearTensors(q, k, v, log_decay, *state)
    call = linear_launch.LinearOptions(eps=1e-6, split_size=1024)
    if kind == "mapped":
        call = call._replace(feature_map="elu+1", normalize=True)
    return linear_launch.KernelLauncher(tensors, call, needs_decay_grad=decay_shape is not None)


def kernel_times(make: Callable[[], linear_launch.KernelLauncher]) -> dict[str, float]:
    """Return the median time of each kernel of a forward and a backward pass, in milliseconds.

    Raises:
        OutOfResources: A kernel does not fit the GPU.
    """
    recorded: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
    launch = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        if "C" in options:  # split_scan_kernel has no config
            recorded.setdefault(kernel_name(self.__name__, options), (self, args, options))
        return launch(self, *args, **options)

    with mock.patch.object(JITFunction, "run", run):
        launcher = make()
        out, kv, z = launcher.forward()
        launcher.backward(torch.randn_like(out), kv, z, (kv, z))
    times = {}
    for name, (kernel, args, options) in recorded.items():
        call = partial(launch, kernel, *args, **options)
        times[name] = float(triton.testing.do_bench(call, return_mode="median"))
    return times


def measure(
    decay: str, kind: str, size: int, device: torch.device
) -> dict[Config, dict[str, float]]:
    """Return the times of all candidates that run, by candidate and kernel."""
    costs = {}
    for chosen in CANDIDATES:
        with mock.patch.object(linear_launch, "config", return_value=chosen):
            try:
                costs[chosen] = kernel_times(partial(make_launcher, decay, kind, size, device))
            except OutOfResources:
                continue
    return costs


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
        costs = measure(decay, kind, size, device)
        for kernel, best in cheapest_configs(costs, decay).items():
            name = key(Shape(kernel, decay, kind, size), capability)
            print(f"{name}: {tuple(best)} {costs[best][kernel]:.3f} ms", flush=True)
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
