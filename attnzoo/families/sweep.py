"""Checks all model types in parallel processes, each under a time limit, and writes the record."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 300  # by the clock, for one model type under all backends; most take one or two


def work(channel: Connection, backends: list[str]) -> None:
    """Check the model types that come through a channel, until it closes; runs in its own process.

    Optional kernels of other packages are hidden: some of them run on a GPU only, and transformers
    would choose them because they are installed.
    """
    for name in ("fla", "causal_conv1d", "mamba_ssm", "kernels"):
        sys.modules[name] = None  # type: ignore[assignment]
    import warnings

    import torch
    import transformers

    from attnzoo.families.entry import check_type

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    while True:
        try:
            model_type = channel.recv()
        except EOFError:
            return
        channel.send(check_type(model_type, backends))


class Worker:
    """One process that checks one model type after another, and is replaced when it dies."""

    def __init__(self, backends: list[str]) -> None:
        self.backends = backends
        self.process: Any = None

    def start(self) -> None:
        """Start the process."""
        context = multiprocessing.get_context("spawn")
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, self.backends), daemon=True)
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.channel.close()
            self.process.join(5)
            self.process.kill()
            self.process.join()
            self.process = None

    def check(self, model_type: str) -> dict[str, Any]:
        """Check a model type; a process that hangs or dies is a reason like any other."""
        fresh = self.process is None
        if fresh:
            self.start()
        self.channel.send(model_type)
        try:
            if self.channel.poll(SECONDS + 60 * fresh):  # the first one waits for the imports
                entry: dict[str, Any] = self.channel.recv()
                return entry
            reason = f"it takes more than {SECONDS} seconds"
        except (EOFError, ConnectionError):
            reason = "the process that built it died"
        self.process.kill()
        self.stop()
        return {"outcome": "not built", "reason": reason}


def sweep(
    model_types: Iterable[str],
    backends: list[str],
    jobs: int,
    tell: Callable[[str, dict[str, Any]], None],
) -> dict[str, Any]:
    """Check model types under backends and return the record, as plain data.

    Args:
        model_types: Which to check.
        backends: Names of the backends.
        jobs: Processes that work at the same time.
        tell: Called with each entry when it is done.
    """
    local, workers = threading.local(), []

    def one(model_type: str) -> tuple[str, dict[str, Any]]:
        if not hasattr(local, "worker"):
            local.worker = Worker(backends)
            workers.append(local.worker)
        entry = local.worker.check(model_type)
        tell(model_type, entry)
        return model_type, entry

    try:
        with ThreadPoolExecutor(jobs) as pool:
            entries = dict(pool.map(one, model_types))
    finally:
        for worker in workers:
            worker.stop()
    from attnzoo.families.models import family_name

    for name, entry in entries.items():
        entry.setdefault("family", family_name(name))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "transformers": version("transformers"),
        "torch": version("torch").split("+")[0],
        "cpu_seconds": round(used.ru_utime + used.ru_stime),
        "types": dict(sorted(entries.items())),
    }
