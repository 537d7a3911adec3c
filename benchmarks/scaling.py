"""Speed of linear attention: 16-bit inputs against float32, and two threads against one.

``python benchmarks/scaling.py [--tokens 16384]`` prints ratios of times from one run: the median
over rounds, and the ratio of the fastest rounds, which depends less on other load. The product of
two square matrices, a copy and new memory show the speed-up of two threads on this machine.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from ops import OPS, make_run
from rich.console import Console
from rich.table import Table

from attnzoo.evaluation.timing import BenchmarkCase, Run, Timing, time_together

MODES = ("forward", "train")
MAPPED = ("linear, elu+1", "hedgehog, window 32", "gla, window 32")
Ratio = tuple[float, float]


def make(op: str, mode: str, tokens: int, heads: int = 8, dtype: str = "float32") -> Run:
    """Return a call of an op with heads of size 64."""
    sizes = {"H": heads, "Hkv": heads, "D": 64, "E": 64}
    return make_run(BenchmarkCase(op=op, mode=mode, T=tokens, dtype=dtype, **sizes), OPS[op])[0]


def times_as_fast(ours: Timing, other: Timing) -> Ratio:
    """Return the other time divided by ours: the median over rounds, and of the fastest rounds."""
    return ours.times_faster_than(other), min(other.rounds_ms) / min(ours.rounds_ms)


def narrow_inputs(tokens: int, rounds: int) -> dict[str, Ratio]:
    """Return how many times as fast bfloat16 inputs are as float32, on one thread."""
    torch.set_num_threads(1)
    found = {}
    for mode in MODES:
        for op in MAPPED:
            runs = {name: make(op, mode, tokens, dtype=name) for name in ("float32", "bfloat16")}
            taken = time_together(runs, rounds=rounds)
            found[f"{op}, {mode}: bfloat16"] = times_as_fast(taken["bfloat16"], taken["float32"])
    return found


def two_threads(tokens: int, rounds: int) -> dict[str, Ratio]:
    """Return how many times as fast two threads are as one."""
    square, numbers = torch.randn(2048, 2048), torch.randn(2**25)
    target = torch.empty_like(numbers)
    runs: dict[str, Run] = {
        "matrix product": lambda: square @ square,
        "copy": lambda: target.copy_(numbers),
        "new memory": lambda: torch.empty(2**24).zero_(),
    }
    for heads in (8, 1):
        for mode in MODES:
            runs[f"linear, {heads} heads, {mode}"] = make("linear", mode, tokens, heads)

    def with_threads(run: Run, threads: int) -> Run:
        def call() -> object:
            torch.set_num_threads(threads)
            return run()

        return call

    found = {}
    for name, run in runs.items():
        both = {str(threads): with_threads(run, threads) for threads in (1, 2)}
        taken = time_together(both, rounds=rounds)
        found[f"{name}: two threads"] = times_as_fast(taken["2"], taken["1"])
    return found


def main(
    tokens: Annotated[int, typer.Option(help="Length of the sequence.")] = 16384,
    rounds: Annotated[int, typer.Option(help="Number of measurements of each call.")] = 7,
) -> None:
    """Measure, and print one ratio per line."""
    table = Table("case", "times as fast", "fastest rounds")
    for name, ratios in (narrow_inputs(tokens, rounds) | two_threads(tokens, rounds)).items():
        table.add_row(name, *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
