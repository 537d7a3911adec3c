"""Time and peak memory of calls, and a description of the machine, as JSON lines."""

from __future__ import annotations

import json
import math
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
MAX_ROUNDS = 9  # of a call; fast calls are repeated within a round
PAIRED_ROUNDS = 7  # least number of rounds of a call beside its baseline, if time allows


@dataclass(frozen=True, kw_only=True)
class BenchmarkCase:
    """One measurement of an operation: shapes, data type, implementation and device."""

    op: str
    impl: str = "auto"
    mode: str = "forward"  # or "train" (forward + backward), "decode" (one token after T)
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
    """Milliseconds of one call, measured in several rounds."""

    rounds_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Median over the rounds."""
        return median(self.rounds_ms)

    @property
    def spread(self) -> float:
        """Longest minus shortest round, divided by the median."""
        return (max(self.rounds_ms) - self.min_ms) / self.median_ms

    @property
    def min_ms(self) -> float:
        """Shortest round."""
        return min(self.rounds_ms)

    def times_faster_than(self, other: Timing) -> float:
        """Return the median over rounds of the other time divided by this one."""
        pairs = zip(other.rounds_ms, self.rounds_ms, strict=True)
        return median(theirs / ours for theirs, ours in pairs)


def time_together(
    runs: Mapping[str, Run], *, rounds: int = 5, seconds: float = 0.1
) -> dict[str, Timing]:
    """Time several calls in alternation, so that other load on the machine affects all of them.

    Args:
        runs: Functions to time, by name.
        rounds: Number of measurements of each function.
        seconds: Minimum duration of a measurement; a single call may take longer.
    """
    threads = torch.get_num_threads()
    timers = {
        name: Timer("run()", globals={"run": run}, num_threads=threads)
        for name, run in runs.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, timer in timers.items():
            measurement = timer.blocked_autorange(min_run_time=seconds)
            taken[name].append(1e3 * measurement.median)
    return {name: Timing(rounds_ms=tuple(ms)) for name, ms in taken.items()}


def measure(run: Run, device: str = "cpu", *, min_run_time: float = 0.5) -> tuple[Timing, int]:
    """Return the time and the peak memory (see ``peak_bytes``) of a call.

    If a call takes more than half of ``min_run_time``, its memory is measured during the warm-up.

    Args:
        run: Function to measure; CUDA work is synchronized.
        device: Device on which it runs.
        min_run_time: Duration of all rounds together in seconds; slow calls exceed it, because two
            rounds are the minimum.
    """
    peaks: list[int] = []
    first = _seconds(lambda: peaks.append(peak_bytes(run, device, warm=True)), 1, device)
    if first < min_run_time / 2:  # again, without the buffers that the first call allocated
        peaks.append(peak_bytes(run, device, warm=True))
    once = _seconds(run, 1, device)
    taken = [once] if once > min_run_time else []
    rounds = max(2, min(MAX_ROUNDS, int(min_run_time / max(once, 1e-9)))) - len(taken)
    repeats = max(1, int(min_run_time / (MAX_ROUNDS * max(once, 1e-9))))
    taken += [_seconds(run, repeats, device) for _ in range(rounds)]
    return Timing(rounds_ms=tuple(1e3 * each for each in taken)), peaks[-1]


def measure_beside(
    run: Run,
    baseline: Run,
    device: str = "cpu",
    *,
    min_run_time: float = 0.5,
    limit: float = math.inf,
) -> tuple[Timing, Timing] | None:
    """Return the times of a call and of a baseline in alternating rounds, so that they are pairs.

    Other load on the machine affects both calls of a round.

    Args:
        run: Function to measure, called before; CUDA work is synchronized.
        baseline: The function that it is compared with.
        device: Device on which both run.
        min_run_time: Duration of all rounds of ``run`` in seconds; slow calls exceed it.
        limit: Seconds for all rounds; there are fewer rounds than :data:`PAIRED_ROUNDS` if calls
            are slow.

    Returns:
        The times of both; ``None`` if the limit leaves time for fewer than 3 rounds.
    """
    _seconds(baseline, 1, device)
    both = _seconds(run, 1, device), _seconds(baseline, 1, device)
    rounds = max(PAIRED_ROUNDS, min(MAX_ROUNDS, int(min_run_time / max(*both, 1e-9))))
    rounds = min(rounds, int(min(limit / max(sum(both), 1e-9), rounds)))
    if rounds < 3:
        return None
    repeats = [max(1, int(min_run_time / (MAX_ROUNDS * max(once, 1e-9)))) for once in both]
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        for index in order:
            seconds = _seconds((run, baseline)[index], repeats[index], device)
            taken[index].append(1e3 * seconds)
    return Timing(rounds_ms=tuple(taken[0])), Timing(rounds_ms=tuple(taken[1]))


def _seconds(run: Run, repeats: int, device: str) -> float:
    """Return the mean seconds of a call, without the warm-up that torch's Timer adds each time."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def peak_bytes(run: Run, device: str = "cpu", *, warm: bool = False) -> int:
    """Return the peak memory of a call in bytes, including its result, above the current usage.

    On a CPU this sums the profiler's allocation events; on a GPU it reads the caching allocator.

    Args:
        run: Function to measure.
        device: Device on which it runs.
        warm: Whether it has been called before.
    """
    if not warm:
        run()  # the first call allocates persistent buffers
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return profile_allocations(run)[0]


def profile_allocations(run: Run) -> tuple[int, int]:
    """Return the peak memory of a call on the CPU and the memory of its result, in bytes.

    Both are sums of the profiler's allocation events, above the current usage.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        result = run()
    del result
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak, current


def machine() -> dict[str, Any]:
    """Return processor, GPU, threads and versions; no host or user names."""
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
    """Return the processor's name and the vector instructions that torch uses on it."""
    name = platform.processor() or platform.machine()
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def as_row(case: BenchmarkCase, timing: Timing, **measured: Any) -> dict[str, Any]:
    """Return a case and its measurements as one flat row, without the machine."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in measured.items()}
    return {
        **asdict(case),
        "median_ms": round(timing.median_ms, 4),
        "min_ms": round(timing.min_ms, 4),
        **rounded,
    }
