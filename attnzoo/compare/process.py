"""Runs work in processes of its own, one for each, with limits of time and memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnzoo.compare.measure import FAILED, OUT_OF_MEMORY, TIMED_OUT, Measured, run_limited

GRACE = 120.0  # seconds that a process may take to start: torch and transformers are loaded


class Workers:
    """Starts processes that have torch and transformers loaded already, where the system can.

    Args:
        threads: Of torch, in each.
        timeout: Seconds that a piece of work may take.
        memory_bytes: What it may allocate, by device; no bound where none is named.
        preload: Modules to load once for all.
    """

    def __init__(
        self,
        *,
        threads: int,
        timeout: float,
        memory_bytes: Mapping[str, int],
        preload: Sequence[str] = (),
    ) -> None:
        methods = multiprocessing.get_all_start_methods()
        name = "forkserver" if "forkserver" in methods else "spawn"
        self.context: Any = multiprocessing.get_context(name)
        if name == "forkserver":
            self.context.set_forkserver_preload(["attnzoo.compare.measure", *preload])
        self.threads, self.timeout, self.memory_bytes = threads, timeout, memory_bytes

    def run(self, work: Callable[..., Measured], *arguments: Any, device: str = "cpu") -> Measured:
        """Do some work in a process of its own; what becomes of that is the ``status``."""
        limit = self.memory_bytes.get(device)
        mine, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=run_limited,
            args=(work, arguments, self.threads, limit, device, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        try:
            if mine.poll(GRACE):
                mine.recv()  # it has started
            if not mine.poll(self.timeout):
                return {"status": TIMED_OUT, "reason": f"it took more than {self.timeout:g} s"}
            result: Measured = mine.recv()
            return result
        except EOFError:  # it died
            process.join(GRACE)
            if process.exitcode in (-9, 137):  # by the system, which does so when memory ends
                return {"status": OUT_OF_MEMORY, "reason": "the system ended it"}
            return {"status": FAILED, "reason": f"its process ended with {process.exitcode}"}
        finally:
            if process.is_alive():
                process.kill()
            process.join()
            mine.close()
