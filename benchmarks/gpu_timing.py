"""Time one call for ``gpu.py`` with CUDA events, eager and replayed by a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from gpu_cases import Workload
from gpu_peers import PEERS, inputs_of, prepared, remark
from gpu_rows import Row

BUFFER_BYTES = 2**28  # total size of the input buffers: larger than any cache
ROUNDS = 15


def elapsed_ms(run: Callable[[], Any]) -> float:
    """Return the time of a call in milliseconds, measured with CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def graph_ms(runs: list[Callable[[], Any]]) -> float:
    """Return the median time of one call when a CUDA graph replays all of them in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    return median(elapsed_ms(graph.replay) for _ in range(ROUNDS)) / len(runs)


def time_call(workload: Workload, name: str, device: torch.device, gigabytes: float | None) -> Row:
    """Return the eager and graph times of a call, and its peak memory.

    Calls cycle through several input buffers, so that no input is in the cache.

    Args:
        workload: The call.
        name: One of ``PEERS``.
        device: Without a GPU, the call runs once.
        gigabytes: Bandwidth of a large copy, in GB/s.
    """
    from attnzoo.evaluation.timing import peak_bytes

    on_gpu = device.type == "cuda"
    bytes_each = workload.minimum_bytes() if workload.decode else workload.input_bytes()
    copies = max(2, -(-BUFFER_BYTES // bytes_each)) if on_gpu else 1
    runs = []
    for _ in range(copies):
        inputs = inputs_of(workload, device)
        runs.append(prepared(PEERS[name](workload, inputs), inputs, train=workload.train))
    start = time.monotonic()
    runs[0]()
    if not on_gpu:
        return {"first_seconds": time.monotonic() - start}
    torch.cuda.synchronize()
    row: Row = {"first_seconds": time.monotonic() - start, "remark": remark(name, workload)}
    row["peak_bytes"] = peak_bytes(runs[0], "cuda", warm=True)
    for run in runs:
        run()
    row["eager_ms"] = median(elapsed_ms(runs[i % copies]) for i in range(ROUNDS))
    try:
        row["graph_ms"] = graph_ms(runs)
    except RuntimeError as error:
        if "CUDA error" in str(error) and "capturing" not in str(error):
            raise
        row["graph_refused"] = str(error).strip().partition("\n")[0]
    if gigabytes:
        ms = row.get("graph_ms", row["eager_ms"])
        row["copy_bandwidth_fraction"] = workload.minimum_bytes() / (1e6 * ms) / gigabytes
    return row
