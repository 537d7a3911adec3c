"""Bytes that backends exchange under context parallelism, and their time relative to one process.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py

Predictions for one float32 layer with 8 heads of size 64 and T tokens, half on each process.
The first process sends a state of 64 (64 + 1) numbers per head, 133,120 bytes at any T; for a
window of 256, it sends 256 keys and values, 1 MiB; all keys and values of 8,192 tokens are 32 MiB,
252 times the state. The time of a collective should be proportional to the bytes. A layer with a
state should take 0.6 of the time of one process, half of it and a fifth of that half, because each
process first sums the keys of its shard. If queries attend to all earlier keys, the second process
does three quarters of the work. Layers are measured in CPU time, which other load on the machine
does not affect, and collectives in wall-clock time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from attnzoo.contract import context_parallel as cp
from attnzoo.contract.config import Geometry
from attnzoo.registry import build_backend

HEADS, SIZE = 8, 64
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "gated_linear (gla)": ("gated_linear", {"gate": "gla"}),
    "performer, 128 features": ("performer", {"num_features": 128}),
    "longformer, window 256": ("longformer", {"window": 256}),
    "linear, window 256": ("linear", {"window": 256}),
    "flash, all keys": ("flash", {}),
}


class AllToAllCounter:
    """Counts the bytes that this process sends, and its collectives."""

    def __init__(self) -> None:
        self.bytes = self.calls = 0
        self.send = cp._all_to_all

    def __call__(self, flat: Tensor, *how: Any) -> Tensor:
        """Send the tensor, and count its bytes."""
        self.bytes, self.calls = self.bytes + flat.numel() * flat.element_size(), self.calls + 1
        return self.send(flat, *how)


def median_seconds(
    work: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median over ``repeats`` of the slowest process's time, measured by ``clock``."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = clock()
        work()
        slowest = torch.tensor(clock() - start)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(float(slowest))
    return statistics.median(times[1:])


def make_layer(
    name: str, options: dict[str, Any], tokens: int, shard: Any
) -> Callable[[bool], None]:
    """Return a function that runs a layer: the forward pass, or forward + backward."""
    torch.manual_seed(0)
    geometry = Geometry(
        num_heads=HEADS,
        num_key_heads=HEADS,
        head_dim=SIZE,
        hidden_size=HEADS * SIZE,
        causal=True,
        name="a layer",
    )
    backend = build_backend(name, options, geometry)
    inputs = [torch.randn(1, HEADS, tokens, SIZE, requires_grad=True) for _ in range(3)]
    hidden, d_out = torch.randn(1, tokens, HEADS * SIZE), torch.randn(1, HEADS, tokens, SIZE)

    def run(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            out = backend(*inputs, hidden_states=hidden, shard=shard).out
        if backward:
            out.backward(d_out)

    return run


def count_sent(run: Callable[[bool], None]) -> tuple[int, int]:
    """Return the number of bytes and of collectives that this process sends in a forward pass."""
    counter = AllToAllCounter()
    cp._all_to_all = counter
    run(False)
    cp._all_to_all = counter.send
    return counter.bytes, counter.calls


def make_transfer(sent: int, rank: int) -> Callable[[], Any]:
    """Return a function that sends ``sent`` bytes from the first process to the second."""
    count = torch.tensor(sent // 4)
    dist.broadcast(count, 0)
    flat = torch.zeros(int(count) if rank == 0 else 0)
    to, got = ([0, int(count)], [0, 0]) if rank == 0 else ([0, 0], [int(count), 0])
    return lambda: cp._all_to_all(flat, None, to, got)


def measure_case(
    name: str, options: dict[str, Any], shard: cp.SequenceShard, repeats: int
) -> list[str]:
    """Measure a case and return its table cells."""
    run = make_layer(name, options, shard.length, shard)
    whole = make_layer(name, options, shard.length * shard.size, None)
    sent, calls = count_sent(run)
    cells = [str(calls), f"{sent:,}"]
    cells.append(f"{1000 * median_seconds(make_transfer(sent, shard.rank), repeats):.2f}")
    for backward in (False, True):
        sharded = median_seconds(partial(run, backward), repeats, time.process_time)
        alone = partial(whole, backward) if shard.rank == 0 else bool
        one = median_seconds(alone, repeats, time.process_time)
        cells.append(f"{1000 * one:.0f}, {1000 * sharded:.0f} ({sharded / one:.2f})")
    return cells


def main(
    length: Annotated[int, typer.Option(help="T, tokens per row, over both processes")] = 16384,
    repeats: Annotated[int, typer.Option(help="number of runs; the median is reported")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="cases (repeatable)")] = None,
) -> None:
    """Print bytes and times of every case, and of gathering all keys and values."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = cp.SequenceShard(group=None, rank=rank, size=size, length=length // size)
    times = "CPU ms of one process, of the busier of two (ratio)"
    columns = "collectives", "bytes sent", "ms", f"forward, {times}", f"forward + backward, {times}"
    table = Table("layer", *columns)
    for case, (name, options) in CASES.items():
        if not only or case in only:
            table.add_row(case, *measure_case(name, options, shard, repeats))
    keys = torch.zeros(HEADS * shard.length * SIZE * 2)
    gathered = [torch.empty_like(keys) for _ in range(size)]
    taken = median_seconds(lambda: dist.all_gather(gathered, keys), repeats)
    table.add_row("all_gather of all keys", "1", f"{4 * keys.numel():,}", f"{1000 * taken:.2f}")
    if rank == 0:
        Console(width=120).print(table)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
