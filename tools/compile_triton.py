"""Compile the Triton kernels of linear attention ahead of time, without a GPU, and check the code.

    python -m tools.compile_triton --arch 90    # one line per kernel and config

The launch code of the operators runs unchanged; each launch compiles its kernel for the named
architecture instead of running it, with the first and the last config.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attnzoo.errors import UnsupportedError
from attnzoo.ops.linear.triton.configs import CONFIGS
from attnzoo.ops.linear.triton.launch import KernelLauncher, LinearOptions, LinearTensors
from attnzoo.ops.linear.triton.step import launch_step
from attnzoo.runtime.triton_interpreter import interpreted

SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}  # limit of a block on the smallest GPUs of a kind
DECAYS = ("none", "scalar", "vector")
Found = list[tuple[str, Any]]  # name and constants of a kernel, and the kernel


class _Driver:
    """A driver that reports a GPU of the given compute capability and runs nothing."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda call, quantiles: call() or [0.0] * len(quantiles)


@contextmanager
def compiling(capability: int) -> Iterator[Found]:
    """Compile kernels instead of running them in this context, and yield them."""
    if interpreted():
        raise UnsupportedError("TRITON_INTERPRET is set; unset it and start again")
    found: Found = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        shown = {k: v for k, v in options.items() if k in ("DECAY", "OF", "STATISTICS", "D")}
        found.append((f"{self.__name__} {shown}", kernel))

    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver(capability)),
        mock.patch.object(JITFunction, "run", run),
    ):
        yield found


def launch_all(decay: str, d: int, dtype: torch.dtype) -> None:
    """Launch the forward pass, the backward pass and a decoding step; the fullest kind of calls."""
    t, e = 256, d
    q, k, v = (torch.empty(1, t, heads, d, dtype=dtype).transpose(1, 2) for heads in (2, 1, 1))
    shape = {"none": None, "scalar": (1, 1, t), "vector": (1, 1, t, d)}[decay]
    log_decay = None if shape is None else torch.empty(shape)
    kv, z = torch.empty(1, 1, d, e), torch.empty(1, 1, d)
    row = torch.zeros(1, dtype=torch.long), torch.full((1,), t)
    tensors = LinearTensors(q, k, v, log_decay, kv, z, *row)
    options = LinearOptions("elu+1", 1.0, 1.0, normalize=True, eps=1e-6)
    out, *last = KernelLauncher(tensors, options).forward()
    launcher = KernelLauncher(tensors, options, needs_decay_grad=log_decay is not None)
    launcher.backward(torch.empty_like(out), kv, z, (last[0], last[1]))
    rows = [x if x is None else x[:, :, :1] for x in (q, k, v, log_decay)]
    launch_step(*rows, kv, z, row[0], "elu+1", 1.0, 1.0, True, 1e-6)  # type: ignore[call-arg, arg-type]


def defects(name: str, kernel: Any) -> list[str]:
    """Return what is wrong with a compiled kernel."""
    found = []
    code = kernel.asm["ptx"]
    if "step" not in name and "wgmma.mma_async" not in code and "mma.sync" not in code:
        found.append("no tensor-core instruction")
    if wrong := transposed_products(kernel.asm["ttgir"]):
        found.append(f"{len(wrong)} products are transposed for other products")
    return found


def transposed_products(ttgir: str) -> list[str]:
    """Return the transposed operands of products that are computed from another product.

    Some versions of Triton compile this pattern wrongly for Hopper. An operand is followed back
    through every operation of its region and those around it, as far as loads.
    """
    scopes: list[dict[str, tuple[bool, frozenset[str]]]] = [{}]
    wrong: set[str] = set()
    for line in ttgir.splitlines():
        text = line.partition(" loc(")[0]
        if line.lstrip().startswith("}") and len(scopes) > 1:
            scopes.pop()
        if match := re.match(r"\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?(.*)", text):
            name, operation, rest = match.groups()
            used = [next((x[n] for x in reversed(scopes) if n in x), None)
                    for n in re.findall(r"%\w+", rest)]  # fmt: skip
            operands = [x for x in used if x is not None]
            is_product = operation in ("tt.dot", "ttng.warp_group_dot")
            sources = [] if operation == "tt.load" else operands
            of_product = any(x[0] for x in sources)  # whether a product is among the sources
            flipped = frozenset[str]().union(*(x[1] for x in sources))  # those transposed since
            if operation in ("tt.trans", "ttg.memdesc_trans") and of_product:
                flipped |= {name}
            if is_product:  # the third operand is added
                wrong.update(*(x[1] for x in operands[:2]))
            scopes[-1][name] = is_product or of_product, flipped
        if text.rstrip().endswith("{"):
            scopes.append({})
    return sorted(wrong)


def main() -> int:
    """Print a line for each kernel; return 1 if one has a defect or fits no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=[80, 90], choices=[80, 90])
    args = parser.parse_args()
    del CONFIGS[1:-1]
    failed = 0
    kinds = (128, torch.bfloat16), (256, torch.float32)
    for arch, decay, (d, dtype) in product(args.arch, DECAYS, kinds):
        smallest: defaultdict[str, int] = defaultdict(lambda: 2**30)
        with compiling(arch) as found:
            launch_all(decay, d, dtype)
        for name, kernel in found:
            shared, wrong = kernel.metadata.shared, "; ".join(defects(name, kernel))
            smallest[name] = min(smallest[name], shared)
            failed += bool(wrong)
            print(f"sm_{arch} {name} warps {kernel.metadata.num_warps} shared {shared} {wrong}")
        for name, shared in smallest.items():
            if shared > SHARED_BYTES[arch]:
                failed += 1
                print(f"sm_{arch} {name}: no config fits, {shared} bytes of shared memory")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
