"""Check all model types in parallel processes, each under a time limit."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from attnzoo.evaluation.process import WorkerError, WorkerProcess
from tools.family_sweep.model_type import check_type
from tools.family_sweep.models import family_name

TIMEOUT_SECONDS = 300  # for one model type under all backends; most take one or two seconds
# Optional kernels of other packages: transformers prefers them, but some run on a GPU only.
HIDDEN_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm", "kernels")


def prepare_process() -> None:
    """Set up a worker process: hide optional kernels, use one thread, silence warnings."""
    for name in HIDDEN_PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]
    import warnings

    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def new_worker() -> WorkerProcess:
    """Return a process that checks one model type after another."""
    return WorkerProcess(initializer=prepare_process, modules=[check_type.__module__])


def check_in(
    worker: WorkerProcess,
    model_type: str,
    backends: list[str],
    windowed: bool = False,
    own_windows: bool = False,
) -> dict[str, Any]:
    """Check a model type in a process; a timeout or a crash is a reason of the entry."""
    try:
        given = model_type, backends, windowed, own_windows
        return worker.run(check_type, *given, timeout=TIMEOUT_SECONDS)
    except WorkerError as error:
        return {"outcome": "not built", "reason": str(error)}


def sweep(
    model_types: Iterable[str],
    backends: list[str],
    jobs: int,
    on_entry: Callable[[str, dict[str, Any]], None],
    windowed: bool = True,
    own_windows: bool = True,
) -> dict[str, Any]:
    """Check model types under backends and return the record as plain data.

    Args:
        model_types: Model types to check.
        backends: Names of the backends.
        jobs: Number of processes.
        on_entry: Called with each entry when it is complete.
        windowed: Whether to check windows of exact backends in the families that decode.
        own_windows: Whether to check backends with a window in families with windows.
    """
    local, workers = threading.local(), []

    def check_one(model_type: str) -> tuple[str, dict[str, Any]]:
        if not hasattr(local, "worker"):
            local.worker = new_worker()
            workers.append(local.worker)
        entry = check_in(local.worker, model_type, backends, windowed, own_windows)
        on_entry(model_type, entry)
        return model_type, entry

    try:
        with ThreadPoolExecutor(jobs) as pool:
            entries = dict(pool.map(check_one, model_types))
    finally:
        for worker in workers:
            worker.close()
    for name, entry in entries.items():
        entry.setdefault("family", family_name(name))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "transformers": version("transformers"),
        "torch": version("torch").split("+")[0],
        "cpu_seconds": round(used.ru_utime + used.ru_stime),
        "types": dict(sorted(entries.items())),
    }
