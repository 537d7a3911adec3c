"""Measures one case; what goes wrong becomes the status of its row."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from attnzoo.bench import measure_alone
from attnzoo.compare.build import prepare
from attnzoo.compare.cases import Case, Subject
from attnzoo.errors import AttnzooError

OK, OUT_OF_MEMORY, TIMED_OUT = "ok", "out of memory", "timed out"
REFUSED, FAILED, NOT_RUN = "refused", "failed", "not run"
Measured = dict[str, Any]


def measure_case(case: Case, subject: Subject) -> Measured:
    """Return time and peak memory of a case, and what decoding keeps."""
    prepared = prepare(case, subject)
    timing, peak = measure_alone(prepared.run, case.device)
    return {
        "median_ms": round(timing.median_ms, 4),
        "min_ms": round(timing.min_ms, 4),
        "spread": round(timing.spread, 4),
        "rounds": len(timing.rounds_ms),
        "peak_bytes": peak,
        "kept_bytes": prepared.kept_bytes,
    }


def run_limited(
    work: Callable[..., Measured],
    arguments: tuple[Any, ...],
    threads: int,
    memory_bytes: int | None,
    device: str,
    reply: Connection,
) -> None:
    """Do some work in this process, which is its own, and send what came of it.

    Args:
        work: Returns what was measured.
        arguments: Of it.
        threads: Of torch.
        memory_bytes: How much this process may allocate on the device.
        device: Where the work is done.
        reply: Where the result goes: what was measured, and a status; before it, a sign of life.
    """
    reply.send({})
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler prints when it starts and stops
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if memory_bytes is not None:
        limit_memory(memory_bytes, device)
    try:
        result: Measured = {"status": OK, **work(*arguments)}
    except AttnzooError as error:
        result = {"status": REFUSED, "reason": str(error)}
    except (MemoryError, torch.OutOfMemoryError):
        result = {"status": OUT_OF_MEMORY}
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        short = "alloc" in str(error).lower() and "memory" in str(error).lower()
        told = f"{type(error).__name__}: {error}"
        result = {"status": OUT_OF_MEMORY} if short else {"status": FAILED, "reason": told[:600]}
    reply.send({k: v for k, v in result.items() if not _is_nan(v)})
    reply.close()


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def limit_memory(memory_bytes: int, device: str) -> None:
    """Bound what this process can allocate: on Linux by the kernel, on a GPU by torch."""
    if device != "cpu":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total))
    elif sys.platform == "linux":  # elsewhere the limit has no effect, or is not there
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
