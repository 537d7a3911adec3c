"""Run each case in a process of its own, with limits of time and memory; errors become statuses."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from attnzoo.compare.cases import CostCase, ModelInfo, cache_size, load, prepare
from attnzoo.errors import AttnzooError
from attnzoo.evaluation.embeddings import EmbeddingEvalBatch, measure_embeddings
from attnzoo.evaluation.generation import (
    RecallEvalBatch,
    measure_generation,
    measure_recall,
    with_reference,
)
from attnzoo.evaluation.process import WorkerError, WorkerProcess
from attnzoo.evaluation.rows import NonFiniteError
from attnzoo.evaluation.timing import measure, measure_beside
from attnzoo.hf.swap import original_attention

OK, OUT_OF_MEMORY, TIMED_OUT = "ok", "out of memory", "timed out"
REFUSED, FAILED, NOT_RUN = "refused", "failed", "not run"
Measured = dict[str, Any]


def measure_cost(
    case: CostCase,
    info: ModelInfo,
    min_run_time: float,
    baseline: CostCase | None = None,
    limit: float = math.inf,
) -> Measured:
    """Return time and peak memory of a case, and the size of the cache in decoding.

    With a baseline, ``rounds_ms`` and ``baseline_ms`` are the times of both in alternating rounds.

    Args:
        case: What is measured.
        info: The model.
        min_run_time: Duration of all timed calls together in seconds.
        baseline: The same with exact attention; ``None`` if there is none, or it takes too long.
        limit: Seconds for all rounds of case and baseline.
    """
    run = prepare(case, info)
    timing, peak = measure(run, case.device, min_run_time=min_run_time)
    pairs = None
    if baseline is not None:
        with suppress(AttnzooError, RuntimeError, MemoryError):  # then there are no pairs
            other = prepare(baseline, info)
            pairs = measure_beside(run, other, case.device, min_run_time=min_run_time, limit=limit)
    timing = timing if pairs is None else pairs[0]
    kept = None
    if case.mode == "decode":
        with suppress(AttnzooError):  # then it is unknown
            kept = cache_size(case, info)
    return {
        "median_ms": round(timing.median_ms, 4),
        "min_ms": round(timing.min_ms, 4),
        "spread": round(timing.spread, 4),
        "rounds": len(timing.rounds_ms),
        "rounds_ms": [round(ms, 4) for ms in timing.rounds_ms],
        "baseline_ms": [] if pairs is None else [round(ms, 4) for ms in pairs[1].rounds_ms],
        "peak_bytes": peak,
        "kept_bytes": kept,
    }


def measure_quality(
    case: CostCase, info: ModelInfo, batch: RecallEvalBatch | EmbeddingEvalBatch
) -> Measured:
    """Return loss, recall and generation, or similarity of embeddings, under a case's attention."""
    model = load(info, case)
    if isinstance(batch, EmbeddingEvalBatch):
        return measure_embeddings(model, batch)
    generated: Measured = {}
    if batch.generation is not None:
        with original_attention(model):
            generation = with_reference(batch.generation, model)
        generated = measure_generation(model, generation)
    return measure_recall(model, batch, info.trained_positions) | {"generation": generated}


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Runs functions in child processes, which have this one's number of torch threads.

    What they raise becomes a status.

    Attributes:
        timeout: Time limit of a call in seconds.
        memory_bytes: Memory limit of a call on a CPU; 0 for none.
        preload: Modules that processes import besides this one.
    """

    timeout: float
    memory_bytes: int
    preload: Sequence[str] = ()

    def run(
        self, function: Callable[..., Measured], *arguments: Any, device: str = "cpu"
    ) -> Measured:
        """Return what ``function(*arguments)`` measures in a new process, with its ``status``."""
        limit = self.memory_bytes if device == "cpu" else 0
        process = WorkerProcess(modules=(__name__, *self.preload))
        try:
            given = (function, arguments, torch.get_num_threads(), limit)
            return process.run(run_limited, *given, timeout=self.timeout)
        except WorkerError as error:
            status = FAILED if error.exit_code is not None else TIMED_OUT
            status = OUT_OF_MEMORY if error.killed else status
            return {"status": status, "reason": str(error)}
        finally:
            process.close()


def run_limited(
    function: Callable[..., Measured], arguments: tuple[Any, ...], threads: int, memory_bytes: int
) -> Measured:
    """Call a function in this process under a memory limit, and return its result with a status.

    Args:
        function: Returns what it measured.
        arguments: Arguments of the function.
        threads: Number of torch threads.
        memory_bytes: Memory that the process may allocate; 0 for no limit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler prints when it starts and stops
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if memory_bytes and sys.platform == "linux":  # other systems ignore the limit or lack it
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        return {"status": OK, **function(*arguments)}
    except NonFiniteError as error:
        return {"status": FAILED, "reason": str(error)}
    except AttnzooError as error:
        return {"status": REFUSED, "reason": str(error)}
    except (MemoryError, torch.OutOfMemoryError):
        return {"status": OUT_OF_MEMORY}
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        message = str(error).lower()
        if "alloc" in message and "memory" in message:
            return {"status": OUT_OF_MEMORY}
        reason = f"{type(error).__name__}: {error}"
        return {"status": FAILED, "reason": reason[:600]}


def free_memory() -> int:
    """Return the bytes of free memory of this machine; 0 if unknown."""
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return 1024 * int(line.split()[1])
    return 0
