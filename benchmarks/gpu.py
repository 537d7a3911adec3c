"""Time linear attention on a GPU: attnzoo's kernels, flash-linear-attention, torch and softmax.

    python benchmarks/gpu.py            # about ten minutes; rows in gpu.jsonl, then a table
    python benchmarks/gpu.py --tiny     # small calls on the CPU: tests the script

`attnzoo doctor` checks the results; run it first. Each call runs in a process of its own, so that
an illegal memory access ends one call only, and is one JSON line. The same command again measures
what the file does not have yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attnzoo.ops.linear.api import linear_attention

IMPLS = ("triton", "fla", "torch", "softmax")
SECONDS = 120  # of one call, compilation and tuning included
Row = dict[str, Any]


class Workload(NamedTuple):
    """One call: B batch, H heads, Hkv key heads, T tokens, D key and value size."""

    B: int
    H: int
    Hkv: int
    T: int
    D: int
    decay: str = "none"  # "none", "scalar" (per token) or "vector" (per key channel)
    normalize: bool = False
    train: bool = True

    def __str__(self) -> str:
        kind = "normalised" if self.normalize else f"decay {self.decay}"
        passes = "forward + backward" if self.train else "forward"
        return f"{kind}, B{self.B} H{self.H}/{self.Hkv} T{self.T} D{self.D}, {passes}"


SHAPES = ((4, 64, 64, 4096, 128), (1, 96, 96, 8192, 128), (1, 8, 8, 16384, 128))
WORKLOADS = (
    *(Workload(*shape, decay) for decay in ("none", "scalar", "vector") for shape in SHAPES),
    *(Workload(*shape, train=False) for shape in SHAPES),
    Workload(2, 32, 8, 4096, 128, normalize=True),
)
TINY = (Workload(1, 2, 1, 40, 16, "scalar"), Workload(1, 2, 2, 40, 16, normalize=True, train=False))


def call_of(workload: Workload, impl: str, device: torch.device) -> Callable[[], object]:
    """Return a function that computes a workload with an implementation."""
    torch.manual_seed(0)
    b, h, key_heads, t, d, decay, normalize, train = workload
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def rows(heads: int, size: int = d) -> torch.Tensor:
        x = torch.randn(b, t, heads, size, device=device, dtype=dtype).transpose(1, 2)
        return x.requires_grad_(train)

    q, k, v = rows(h), rows(key_heads), rows(key_heads)
    leaves, log_decay = [q, k, v], None
    if decay != "none" and impl != "softmax":
        shape = k.shape if decay == "vector" else k.shape[:3]
        log_decay = (-torch.rand(shape, device=device) / 16).requires_grad_(train)
        leaves.append(log_decay)
    feature_map = "elu+1" if normalize else "identity"

    def forward() -> torch.Tensor:
        if impl == "softmax":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return linear_attention(
            q, k, v, log_decay=log_decay, normalize=normalize, feature_map=feature_map, impl=impl
        ).out

    if not train:
        return torch.no_grad()(forward)
    weights = torch.randn(b, h, t, d, device=device, dtype=dtype)
    return lambda: torch.autograd.grad(forward(), leaves, weights)


def measure(workload: Workload, impl: str, device: torch.device) -> Row:
    """Return the median time of a call in milliseconds, its peak memory, and that of its start."""
    run, start = call_of(workload, impl, device), time.monotonic()
    run()
    if device.type != "cuda":
        return {"ms": 1e3 * (time.monotonic() - start)}
    from triton.testing import do_bench

    torch.cuda.synchronize()
    first = time.monotonic() - start
    torch.cuda.reset_peak_memory_stats()
    run()
    peak = torch.cuda.max_memory_allocated()
    ms = do_bench(run, quantiles=[0.5])
    return {"ms": ms, "peak_bytes": peak, "first_seconds": first}


def in_own_process(index: int, impl: str, *, tiny: bool) -> Row:
    """Return what :func:`measure` returns in a process of its own, or why it returns nothing."""
    command = [sys.executable, __file__, "--one", str(index), impl, *(["--tiny"] if tiny else [])]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished after {SECONDS} s"}
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    lines = process.stderr.strip().splitlines()
    return {"failed": lines[-1][:300] if lines else f"exit code {process.returncode}"}


def table(rows: list[Row], device: str) -> str:
    """Return a table in Markdown: milliseconds of each implementation, by workload."""
    lines = [f"| ms on {device} | {' | '.join(IMPLS)} |", "|---" * (len(IMPLS) + 1) + "|"]
    for name in dict.fromkeys(row["workload"] for row in rows):
        found = {row["impl"]: row for row in rows if row["workload"] == name}
        times = [found.get(impl, {}).get("ms") for impl in IMPLS]
        cells = ["failed" if ms is None else f"{ms:.3g}" for ms in times]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    failures = [f"{x['workload']}, {x['impl']}: {x['failed']}" for x in rows if "failed" in x]
    return "\n".join([*lines, "", *failures])


def main() -> int:
    """Measure what the file of rows does not have, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="file of rows")
    parser.add_argument("--tiny", action="store_true", help="small calls on the CPU")
    parser.add_argument("--one", nargs=2, metavar=("INDEX", "IMPL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    workloads, device = (TINY, "cpu") if args.tiny else (WORKLOADS, "cuda")
    if args.one:
        index, impl = args.one
        print(json.dumps(measure(workloads[int(index)], impl, torch.device(device))))
        return 0
    if not args.tiny and not torch.cuda.is_available():
        print("torch sees no GPU; --tiny runs small calls on the CPU", file=sys.stderr)
        return 1
    rows = [json.loads(x) for x in args.out.read_text().splitlines()] if args.out.exists() else []
    known = {(row["workload"], row["impl"]) for row in rows}
    with args.out.open("a") as file:
        for index, workload in enumerate(workloads):
            for impl in IMPLS:
                if (str(workload), impl) in known:
                    continue
                row = {"workload": str(workload), "impl": impl}
                rows.append(row | in_own_process(index, impl, tiny=args.tiny))
                print(json.dumps(rows[-1]), file=file, flush=True)
    print(table(rows, "cpu" if args.tiny else torch.cuda.get_device_name()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
