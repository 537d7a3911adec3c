"""Child processes that run functions under a time limit and survive neither hangs nor crashes."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, TypeVar

R = TypeVar("R")
START_SECONDS = 120.0  # limit for a process to start and import its modules


class WorkerError(Exception):
    """A call did not return.

    Attributes:
        exit_code: That of the process; ``None`` if it exceeded its time limit and was killed.
        killed: Whether SIGKILL ended the process, as the kernel does when memory runs out.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code, self.killed = exit_code, exit_code in (-9, 137)


class WorkerProcess:
    """A child process that runs functions one after another.

    The process starts at the first call. A call that times out or crashes ends it; the next call
    starts another one.

    Args:
        modules: Imported in the child before the first call, outside of its time limit. Where the
            platform has a fork server, they are imported once for all children.
        initializer: Called first in the child, before ``modules`` are imported; no fork server is
            used, whose modules it would share.
    """

    def __init__(
        self, *, modules: Sequence[str] = (), initializer: Callable[[], None] | None = None
    ) -> None:
        use = initializer is None and "forkserver" in multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if use else "spawn")
        if use:
            self._context.set_forkserver_preload([__name__, *modules])
        self._arguments = (initializer, tuple(modules))
        self._process: Any = None
        self._connection: Any = None

    def run(self, function: Callable[..., R], *arguments: Any, timeout: float) -> R:
        """Return ``function(*arguments)``, computed in the child process.

        Raises:
            WorkerError: It takes more than ``timeout`` seconds, the process ended, or ``function``
                raised an exception.
        """
        if self._process is None:
            self._connection, child = self._context.Pipe()
            self._process = self._context.Process(
                target=_serve, args=(child, *self._arguments), daemon=True
            )
            self._process.start()
            child.close()
            self._receive(START_SECONDS, "its process takes more than {:g} s to start")
        call = pickle.dumps((function, arguments))  # tensors by value
        result: R = self._receive(timeout, "it takes more than {:g} s", call)
        return result

    def _receive(self, seconds: float, too_slow: str, call: bytes | None = None) -> Any:
        """Send a call if there is one, and return what the process sends within some seconds."""
        try:
            if call is not None:
                self._connection.send_bytes(call)
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, ConnectionError):
            code = self._end()
            raise WorkerError(f"its process ended with {code}", code) from None
        self._end(wait=0)
        raise WorkerError(too_slow.format(seconds))

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._connection.close()
            self._end(wait=5)

    def _end(self, wait: float = 10) -> int | None:
        """Wait for the process to end, kill it after ``wait`` seconds, and return its exit code."""
        process, self._process = self._process, None
        process.join(wait)
        process.kill()
        process.join()
        self._connection.close()
        exit_code: int | None = process.exitcode
        return exit_code


def _serve(
    connection: Connection, initializer: Callable[[], None] | None, modules: Sequence[str]
) -> None:
    """Run the functions that arrive through a connection until it closes."""
    if initializer is not None:
        initializer()
    for name in modules:
        import_module(name)
    connection.send(None)  # ready
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        connection.send(function(*arguments))
