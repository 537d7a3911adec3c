"""Check the Triton kernels on a GPU, then time them against other implementations, in stages.

    python benchmarks/gpu.py --stage 1        # correctness; compiles and tunes the peers meanwhile
    python benchmarks/gpu.py --stage 2        # attnzoo: graph replay and eager
    python benchmarks/gpu.py --stage 3        # peers, peak memory, accuracy at 8,192 tokens
    python benchmarks/gpu.py --stage 4        # profiles
    python benchmarks/gpu.py --stage 5        # the largest workloads again, a model, torch.compile
    python benchmarks/gpu.py --summary        # tables in Markdown from the rows
    python benchmarks/gpu.py --interpret --tiny    # every stage without a GPU: tests the script

Only torch, Triton and einops are required; a measurement that needs another package is recorded as
unavailable. Each measurement is one JSON line, written immediately. Each group of measurements runs
in its own process, so that an illegal memory access ends one group only and is recorded. Repeating
the command resumes: it measures only what the file does not have yet. Each stage has a time limit.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu_rows import append_row, read_rows  # noqa: E402

MINUTES = {1: 4.0, 2: 7.0, 3: 8.0, 4: 3.0, 5: 8.0}
POLL_SECONDS = 0.05


def group_command(group: str, args: argparse.Namespace) -> list[str]:
    """Return the command of a group's process."""
    flags = [f"--{name}" for name in ("interpret", "tiny") if getattr(args, name)]
    return [sys.executable, str(ROOT / "benchmarks/gpu_groups.py"), group, str(args.out), *flags]


class Group:
    """The process of a group; records how the process ended."""

    def __init__(self, name: str, command: list[str], out: Path, environment: dict[str, str]):
        self.name, self.out = name, out
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            command, env=environment, stderr=self.errors, start_new_session=True
        )

    def finish(self, end: float) -> bool:
        """Return whether the process has ended and record how; kill it if ``end`` has passed."""
        late = time.monotonic() > end
        if self.process.poll() is None:
            if not late:
                return False
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines() or [f"exit code {code}"]
        self.errors.close()
        if code == 0:
            append_row(self.out, {"kind": "done", "group": self.name})
        elif late:
            append_row(self.out, {"kind": "timeout", "group": self.name})
        else:
            reason = lines[-1][:300]
            if code < 0:
                reason = f"killed by {signal.Signals(-code).name}"
            rows = [row for row in read_rows(self.out) if row.get("group") == self.name]
            key = rows[-1]["key"] if rows and rows[-1]["kind"] == "start" else None
            append_row(
                self.out, {"kind": "crash", "group": self.name, "key": key, "reason": reason}
            )
            print(f"{self.name}: {reason}", file=sys.stderr, flush=True)
        return True


def run_stage(groups: dict[str, int], end: float, args: argparse.Namespace) -> bool:
    """Run the groups of a stage; return whether all were started.

    Args:
        groups: Groups, and how many processes may run while each of them runs; 1 for timings.
        end: When the stage ends, in seconds of the monotonic clock.
        args: Options of the command line.
    """
    done = {row["group"] for row in read_rows(args.out) if row["kind"] == "done"}
    waiting = [name for name in groups if name not in done]
    running: list[Group] = []
    while waiting or running:
        running = [group for group in running if not group.finish(end)]
        if time.monotonic() > end:
            if not running:
                break
            continue
        limit = min((groups[group.name] for group in running), default=sys.maxsize)
        if waiting and len(running) < min(limit, groups[waiting[0]]):
            name = waiting.pop(0)
            environment = group_environment(name, args)
            running.append(Group(name, args.command(name, args), args.out, environment))
        else:
            time.sleep(POLL_SECONDS)
    for name in waiting:
        append_row(args.out, {"kind": "timeout", "group": name})
    return not waiting


def group_environment(group: str, args: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables of a group: Triton's caches, ptxas and interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    )
    cache = args.out.resolve().parent / "gpu-cache"
    peer = " fla" in group or group == "again"
    environment["TRITON_CACHE_DIR"] = str(cache / ("fla" if peer else "attnzoo"))
    environment["TRITON_CACHE_AUTOTUNING"] = "1"  # fla tunes in stage 1; stage 3 reads the results
    if "second ptxas" in group and args.ptxas:
        for name in ("PTXAS", "PTXAS_BLACKWELL"):  # Triton reads one of them
            environment[f"TRITON_{name}_PATH"] = args.ptxas
    if args.interpret:
        environment["TRITON_INTERPRET"] = "1"
    return environment


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stage", type=int, nargs="*", choices=MINUTES, default=list(MINUTES))
    parser.add_argument("--group", nargs="*", help="only the groups that contain these words")
    parser.add_argument("--minutes", type=float, help="time limit of each stage")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="rows, JSON lines")
    parser.add_argument("--ptxas", help="path of a second assembler, checked in stage 1")
    parser.add_argument("--interpret", action="store_true", help="Triton's interpreter, on the CPU")
    parser.add_argument("--tiny", action="store_true", help="a few tokens per workload")
    parser.add_argument("--summary", action="store_true", help="print the tables of the rows")
    args = parser.parse_args(given)
    args.command = group_command
    return args


def main(args: argparse.Namespace) -> int:
    """Run stages; return 1 if a check failed."""
    from gpu_cases import groups_of
    from gpu_summary import failures, summary

    if args.summary:
        print(summary(read_rows(args.out)))
        return 0
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # must precede the import of Triton
        from gpu_groups import run_group
    for stage in args.stage:
        end = time.monotonic() + 60 * (args.minutes or MINUTES[stage])
        groups = groups_of(stage, tiny=args.tiny, second=bool(args.ptxas))
        if args.group:
            groups = {k: v for k, v in groups.items() if any(word in k for word in args.group)}
        print(f"stage {stage}: {len(groups)} groups", flush=True)
        if args.interpret:  # in this process: starting another takes longer than a group
            for name in groups:
                run_group(name, args.out, tiny=args.tiny)
        else:
            run_stage(groups, end, args)
    found = failures(read_rows(args.out))
    print("\n".join(found) or "no check failed")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(arguments()))
