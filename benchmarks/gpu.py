"""Linear attention's kernels on a GPU: first whether they are right, then how fast, beside others.

    python benchmarks/gpu.py                        # an NVIDIA GPU; ends within nine minutes
    python benchmarks/gpu.py --interpret --tiny     # no GPU: that the script itself runs to its end

Everything is printed as a table and written as JSON lines. Times are medians between CUDA events,
over buffers that take turns so that none is found in the cache. Peers (flash-linear-attention,
torch's fastest attention, xformers) are left out with the reason where they do not run, and what
has no time left is said to be so. ``gpu_cases.py`` has the shapes and what is to be reached.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from gpu_cases import CASES, GOALS, PUBLISHED, TINY, Work, accuracy_cases, tiny
from gpu_peers import PEERS, Skip, call, copy_gigabytes, inputs_of, ours
from rich.console import Console
from rich.table import Table

from attnzoo import bench
from attnzoo.bench import machine, write_lines

RESERVE_SECONDS = 15  # for what is running when time is up, and for writing
BUFFER_BYTES = 2**28  # inputs that take turns hold at least this much: more than any cache
ROUNDS = 15


class Session:
    """What is measured, on what, and how much time is left."""

    def __init__(self, minutes: float, interpret: bool) -> None:
        self.end = time.monotonic() + 60 * minutes - RESERVE_SECONDS
        self.device = torch.device("cpu" if interpret else "cuda")
        self.rows: list[dict[str, Any]] = []
        self.console = Console(width=150)

    def say(self, **row: Any) -> None:
        """Keep a row and print it."""
        self.rows.append(row)
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        self.console.print(", ".join(f"{k} {v}" for k, v in shown.items()), highlight=False)

    def late(self) -> bool:
        """Whether time is up."""
        return time.monotonic() > self.end


def median_ms(runs: list[Any], device: torch.device) -> float | None:
    """Return the median time of calls that take turns; ``None`` where there is no GPU to time."""
    if device.type != "cuda":
        runs[0]()
        return None
    for run in runs:
        run()
    torch.cuda.synchronize()
    taken = []
    for i in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        runs[i % len(runs)]()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return median(taken)


def peak_bytes(run: Any, device: torch.device) -> int | None:
    """Return what a call holds at most, beyond its inputs."""
    return bench.peak_bytes(run, "cuda", warm=True) if device.type == "cuda" else None


def check_accuracy(session: Session, small: bool) -> bool:
    """Compare with float64; return whether all errors are within their goals."""
    good = True
    for work, mean, budget in accuracy_cases(small):
        given = inputs_of(work, session.device, mean=mean)
        results = call(ours(work, given), given, train=True)
        exact = [x if x is None else x.detach().double().requires_grad_() for x in given]
        wanted = call(ours(work, exact, impl="reference"), exact, train=True)
        names = ["out", "dq", "dk", "dv", "dg"]
        errors = {
            name: ((a.double() - b).norm() / b.norm()).item()
            for name, a, b in zip(names, results, wanted, strict=False)
        }
        right = all(error <= budget for error in errors.values())
        good &= right
        session.say(
            kind="accuracy", work=work.name, mean=mean, budget=budget, right=right, **errors
        )
    return good


def measure(session: Session, work: Work, gigabytes: float | None) -> dict[str, float]:
    """Time one piece of work by ours and by its peers; return milliseconds by name."""
    bytes_each = work.input_bytes()
    copies = 1 if session.device.type != "cuda" else max(2, -(-BUFFER_BYTES // bytes_each))
    sets = [inputs_of(work, session.device) for _ in range(copies)]
    times: dict[str, float] = {}
    for name in ("ours", *work.peers):
        if session.late():
            session.say(kind="time", work=work.name, by=name, skipped="out of time")
            continue
        try:
            make = ours if name == "ours" else PEERS[name]
            runs = [
                lambda one=one, given=given: call(one, given, train=work.train)
                for given in sets
                for one in [make(work, given)]
            ]
            started = time.monotonic()
            runs[0]()
            first_seconds = time.monotonic() - started
            ms, peak = median_ms(runs, session.device), peak_bytes(runs[0], session.device)
        except Skip as reason:
            session.say(kind="time", work=work.name, by=name, skipped=str(reason))
            continue
        except (RuntimeError, ValueError, TypeError, ImportError, AssertionError) as error:
            told = str(error).strip().partition("\n")[0]
            session.say(
                kind="time", work=work.name, by=name, skipped=f"{type(error).__name__}: {told}"
            )
            continue
        row: dict[str, Any] = {"first_seconds": first_seconds, "peak_bytes": peak}
        if ms is not None:
            times[name] = row["median_ms"] = ms
            if gigabytes:
                row["of_copy_bandwidth"] = work.least_bytes() / (1e6 * ms) / gigabytes
        session.say(kind="time", work=work.name, by=name, **row)
    for name, quoted in PUBLISHED.get(work.name, {}).items():
        session.say(kind="published", work=work.name, by=name, median_ms=quoted, device="H100")
    return times


def conclude(session: Session, times: dict[str, dict[str, float]]) -> None:
    """Print each goal beside what was measured."""
    table = Table("goal", "wanted", "measured", title="Goals", title_justify="left")
    for goal in GOALS:
        found = goal.measured(times, session.rows)
        shown = "not measured" if found is None else f"{found:.2f}"
        table.add_row(goal.what, f"{goal.sign} {goal.wanted}", shown)
        session.rows.append(
            {"kind": "goal", "what": goal.what, "wanted": goal.wanted, "found": found}
        )
    session.console.print(table)


def main(
    interpret: Annotated[bool, typer.Option(help="in Triton's interpreter, on the CPU")] = False,
    small: Annotated[bool, typer.Option("--tiny", help="a few tokens of everything")] = False,
    minutes: Annotated[float, typer.Option(help="to end within")] = 9.0,
    out: Annotated[Path, typer.Option(help="JSON lines")] = Path("gpu.jsonl"),
) -> None:
    """Check, then measure."""
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU; --interpret --tiny runs without one")
    session = Session(minutes, interpret)
    torch.manual_seed(0)
    session.say(kind="machine", **machine(), interpreted=interpret)
    right = check_accuracy(session, small)
    gigabytes = copy_gigabytes(session.device)
    session.say(kind="copy", gigabytes_per_second=gigabytes)
    times = {}
    for work in [tiny(w) for w in TINY] if small else CASES:
        if session.late():
            session.say(kind="time", work=work.name, by="ours", skipped="out of time")
            continue
        times[work.name] = measure(session, work, gigabytes)
    conclude(session, times)
    write_lines(out, [{**row} for row in session.rows])
    session.console.print(
        f"{len(session.rows)} lines in {out}; accuracy {'held' if right else 'MISSED'}"
    )
    raise typer.Exit(0 if right else 1)


if __name__ == "__main__":
    typer.run(main)
