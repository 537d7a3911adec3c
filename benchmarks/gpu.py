"""Check the accuracy of the linear-attention kernels on a GPU, then time them against peers.

    python benchmarks/gpu.py                        # needs an NVIDIA GPU; at most nine minutes
    python benchmarks/gpu.py --interpret --tiny     # without a GPU: tests the script itself

Results are printed and written as JSON lines. Times are medians between CUDA events; calls cycle
through several input buffers, so that no input is in the cache. Peers are flash-linear-attention,
torch's fastest softmax attention and xformers. A peer that does not run, or a workload for which no
time is left, is recorded with the reason. ``gpu_cases.py`` has the shapes and the goals.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

if "--interpret" in sys.argv:  # Triton reads the variable when it is imported
    os.environ["TRITON_INTERPRET"] = "1"

from gpu_cases import CASES, GOALS, PUBLISHED, TINY, Workload, accuracy_cases, shrink
from gpu_peers import PEERS, PeerUnavailable, attnzoo_kernels, call, copy_gigabytes, inputs_of
from rich.console import Console
from rich.table import Table

from attnzoo.evaluation import timing
from attnzoo.evaluation.timing import machine, write_lines

RESERVE_SECONDS = 15  # for the last measurement and the output
BUFFER_BYTES = 2**28  # total size of the input buffers: larger than any cache
ROUNDS = 15


class Session:
    """Device, time limit and recorded rows of one benchmark run."""

    def __init__(self, minutes: float, interpret: bool) -> None:
        self.end = time.monotonic() + 60 * minutes - RESERVE_SECONDS
        self.device = torch.device("cpu" if interpret else "cuda")
        self.rows: list[dict[str, Any]] = []
        self.console = Console(width=150)

    def record(self, **row: Any) -> None:
        """Store a row and print it."""
        self.rows.append(row)
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        self.console.print(", ".join(f"{k} {v}" for k, v in shown.items()), highlight=False)

    def out_of_time(self) -> bool:
        """Return whether the time limit has passed."""
        return time.monotonic() > self.end


def median_ms(runs: list[Any], device: torch.device) -> float | None:
    """Return the median time of calls, which run in turn; ``None`` without a GPU."""
    if device.type != "cuda":
        runs[0]()
        return None
    for run in runs:
        run()
    torch.cuda.synchronize()
    times = []
    for i in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        runs[i % len(runs)]()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def peak_bytes(run: Any, device: torch.device) -> int | None:
    """Return the peak memory of a call beyond its inputs; ``None`` without a GPU."""
    return timing.peak_bytes(run, "cuda", warm=True) if device.type == "cuda" else None


def check_accuracy(session: Session, small: bool) -> bool:
    """Compare with float64; return whether all errors are within their tolerances."""
    accurate = True
    for workload, mean, tolerance in accuracy_cases(small):
        inputs = inputs_of(workload, session.device, mean=mean)
        results = call(attnzoo_kernels(workload, inputs), inputs, train=True)
        inputs_float64 = [x if x is None else x.detach().double().requires_grad_() for x in inputs]
        expected = call(
            attnzoo_kernels(workload, inputs_float64, impl="reference"), inputs_float64, train=True
        )
        names = ["out", "dq", "dk", "dv", "dg"]
        errors = {
            name: ((a.double() - b).norm() / b.norm()).item()
            for name, a, b in zip(names, results, expected, strict=False)
        }
        within_tolerance = all(error <= tolerance for error in errors.values())
        accurate &= within_tolerance
        session.record(
            kind="accuracy",
            workload=workload.name,
            mean=mean,
            tolerance=tolerance,
            within_tolerance=within_tolerance,
            **errors,
        )
    return accurate


def measure(session: Session, workload: Workload, gigabytes: float | None) -> dict[str, float]:
    """Time the kernels and their peers on a workload; return milliseconds by implementation."""
    bytes_each = workload.input_bytes()
    copies = 1 if session.device.type != "cuda" else max(2, -(-BUFFER_BYTES // bytes_each))
    input_sets = [inputs_of(workload, session.device) for _ in range(copies)]
    times: dict[str, float] = {}
    for name in ("attnzoo", *workload.peers):
        if session.out_of_time():
            session.record(
                kind="time", workload=workload.name, implementation=name, skipped="out of time"
            )
            continue
        try:
            make = attnzoo_kernels if name == "attnzoo" else PEERS[name]
            runs = [
                lambda run=run, inputs=inputs: call(run, inputs, train=workload.train)
                for inputs in input_sets
                for run in [make(workload, inputs)]
            ]
            started = time.monotonic()
            runs[0]()
            first_seconds = time.monotonic() - started
            ms, peak = median_ms(runs, session.device), peak_bytes(runs[0], session.device)
        except PeerUnavailable as reason:
            session.record(
                kind="time", workload=workload.name, implementation=name, skipped=str(reason)
            )
            continue
        except (RuntimeError, ValueError, TypeError, ImportError, AssertionError) as error:
            message = str(error).strip().partition("\n")[0]
            session.record(
                kind="time",
                workload=workload.name,
                implementation=name,
                skipped=f"{type(error).__name__}: {message}",
            )
            continue
        row: dict[str, Any] = {"first_seconds": first_seconds, "peak_bytes": peak}
        if ms is not None:
            times[name] = row["median_ms"] = ms
            if gigabytes:
                row["copy_bandwidth_fraction"] = workload.minimum_bytes() / (1e6 * ms) / gigabytes
        session.record(kind="time", workload=workload.name, implementation=name, **row)
    for name, published_ms in PUBLISHED.get(workload.name, {}).items():
        session.record(
            kind="published",
            workload=workload.name,
            implementation=name,
            median_ms=published_ms,
            device="H100",
        )
    return times


def compare_with_goals(session: Session, times: dict[str, dict[str, float]]) -> None:
    """Print and record each goal with its measured value."""
    table = Table("goal", "target", "measured", title="Goals", title_justify="left")
    for goal in GOALS:
        measured = goal.measured(times, session.rows)
        text = "not measured" if measured is None else f"{measured:.2f}"
        table.add_row(goal.name, f"{goal.comparison} {goal.target}", text)
        session.rows.append(
            {"kind": "goal", "goal": goal.name, "target": goal.target, "measured": measured}
        )
    session.console.print(table)


def main(
    interpret: Annotated[
        bool, typer.Option(help="run in Triton's interpreter, on the CPU")
    ] = False,
    small: Annotated[bool, typer.Option("--tiny", help="a few tokens per workload")] = False,
    minutes: Annotated[float, typer.Option(help="time limit")] = 9.0,
    out: Annotated[Path, typer.Option(help="output file, JSON lines")] = Path("gpu.jsonl"),
) -> None:
    """Check accuracy, then measure."""
    if not interpret and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU; --interpret --tiny runs without one")
    session = Session(minutes, interpret)
    torch.manual_seed(0)
    session.record(kind="machine", **machine(), interpreted=interpret)
    within_tolerance = check_accuracy(session, small)
    gigabytes = copy_gigabytes(session.device)
    session.record(kind="copy", gigabytes_per_second=gigabytes)
    times = {}
    for workload in [shrink(w) for w in TINY] if small else CASES:
        if session.out_of_time():
            session.record(
                kind="time", workload=workload.name, implementation="attnzoo", skipped="out of time"
            )
            continue
        times[workload.name] = measure(session, workload, gigabytes)
    compare_with_goals(session, times)
    write_lines(out, [{**row} for row in session.rows])
    session.console.print(
        f"{len(session.rows)} lines in {out}; accuracy "
        f"{'within tolerance' if within_tolerance else 'OUT OF TOLERANCE'}"
    )
    raise typer.Exit(0 if within_tolerance else 1)


if __name__ == "__main__":
    typer.run(main)
