"""Measure calls against each other: time, peak memory, the machine, one JSON line per case."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.benchmark import Timer

Run = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of a curve; letters as in every docstring."""

    op: str
    impl: str = "auto"
    mode: str = "forward"  # or "train" (forward and backward), "decode" (one token after T)
    B: int = 1
    H: int = 8
    Hkv: int = 8
    T: int = 4096
    D: int = 64
    E: int = 64
    dtype: str = "float32"
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of the same call, one per round."""

    rounds_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The middle round."""
        return median(self.rounds_ms)

    @property
    def spread(self) -> float:
        """The distance from the shortest round to the longest, as a share of the median."""
        return (max(self.rounds_ms) - self.min_ms) / self.median_ms

    @property
    def min_ms(self) -> float:
        """The round that was disturbed least."""
        return min(self.rounds_ms)

    def times_faster_than(self, other: Timing) -> float:
        """Return how many times less this takes, round against round: both saw the same machine."""
        pairs = zip(other.rounds_ms, self.rounds_ms, strict=True)
        return median(theirs / ours for theirs, ours in pairs)


def time_together(
    runs: Mapping[str, Run], *, rounds: int = 5, seconds: float = 0.1
) -> dict[str, Timing]:
    """Time several calls in turns, so that what disturbs the machine disturbs all of them.

    Args:
        runs: What to call, by name.
        rounds: How often each gets its turn.
        seconds: How long a turn lasts at least; a single call may take longer.
    """
    threads = torch.get_num_threads()
    timers = {
        name: Timer("run()", globals={"run": run}, num_threads=threads)
        for name, run in runs.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, timer in timers.items():
            turn = timer.blocked_autorange(min_run_time=seconds)
            taken[name].append(1e3 * turn.median)
    return {name: Timing(rounds_ms=tuple(ms)) for name, ms in taken.items()}


def measure_alone(
    run: Run, device: str = "cpu", *, seconds: float = 0.5, most: int = 9
) -> tuple[Timing, int]:
    """Time one call by itself, and return the most memory it holds, as ``peak_bytes`` does.

    A call that takes more than half of ``seconds`` has its memory measured while it warms up.

    Args:
        run: What to call; a GPU is waited for.
        device: Where it runs.
        seconds: How long all rounds last together; two take longer where they must.
        most: Rounds at most; a quick call is repeated within a round.
    """
    peaks: list[int] = []
    first = _seconds(lambda: peaks.append(peak_bytes(run, device, warm=True)), 1, device)
    if first < seconds / 2:  # measured again, without buffers that the first call made
        peaks.append(peak_bytes(run, device, warm=True))
    once = _seconds(run, 1, device)
    taken = [once] if once > seconds else []
    rounds = max(2, min(most, int(seconds / max(once, 1e-9)))) - len(taken)
    repeats = max(1, int(seconds / (most * max(once, 1e-9))))
    taken += [_seconds(run, repeats, device) for _ in range(rounds)]
    return Timing(rounds_ms=tuple(1e3 * each for each in taken)), peaks[-1]


def _seconds(run: Run, repeats: int, device: str) -> float:
    """Return how long a call takes; one timed by torch's Timer would warm up anew every time."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def peak_bytes(run: Run, device: str = "cpu", *, warm: bool = False) -> int:
    """Return the most memory that a call holds at once, its results included, beyond what was held.

    On a CPU this sums what torch's allocator gives and takes back; on a GPU it asks the allocator.

    Args:
        run: What to call.
        device: Where it runs.
        warm: Whether it was called before.
    """
    if not warm:
        run()  # buffers that live on are made by the first call
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        kept = run()
    del kept
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def machine() -> dict[str, Any]:
    """Describe what was measured on: models and versions, nothing that names a host or a person."""
    described: dict[str, Any] = {
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def _cpu_model() -> str:
    """Return the processor's name, with what vector instructions torch uses on it."""
    name = platform.processor() or platform.machine()
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_row(case: Case, timing: Timing, **measured: Any) -> dict[str, Any]:
    """Join a case and what was measured of it into one flat line, without the machine."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in measured.items()}
    return {
        **asdict(case),
        "median_ms": round(timing.median_ms, 4),
        "min_ms": round(timing.min_ms, 4),
        **rounded,
    }
