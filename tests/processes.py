"""Programs that tests start: each has a time limit, and ends with all processes that it started.

A test that waits for a program without a limit stops the whole suite when the program hangs, as a
process group does where the network's loopback is down. ``subprocess.run`` does not suffice: it
kills the program, and then waits for those that it has started.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from subprocess import DEVNULL, PIPE, CalledProcessError
from typing import Any

__all__ = ["DEVNULL", "PIPE", "SECONDS", "CalledProcessError", "kill", "run", "running"]

SECONDS = 300.0  # time limit of a program


@contextmanager
def running(command: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a program in a process group of its own, and kill the group at the end.

    Args:
        command: The program and its arguments.
        options: Those of ``subprocess.Popen``.
    """
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            kill(process)


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill the process group of a program; it may have ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(
    command: Sequence[Any], *, timeout: float = SECONDS, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program; returns its exit code and what it printed.

    Args:
        command: The program and its arguments.
        timeout: Time limit in seconds.
        check: Whether another exit code than 0 is an error.
        options: Those of ``subprocess.Popen``; output is text unless they say otherwise.

    Raises:
        AssertionError: The program takes longer, or ends with another exit code.
    """
    command = [str(part) for part in command]
    pipes = {"stdout": PIPE, "stderr": PIPE, "stdin": DEVNULL}
    given = options.pop("input", None)
    if given is not None:
        pipes["stdin"] = PIPE
    if not options.keys() & {"encoding", "errors", "text"}:
        options["encoding"] = "utf-8"
    with running(command, **(pipes | options)) as process:
        try:
            out, errors = process.communicate(given, timeout=timeout)
        except subprocess.TimeoutExpired:
            kill(process)
            out, errors = process.communicate(timeout=SECONDS)
            raise AssertionError(
                f"not finished after {timeout:g} s: {command}\n{out[-4000:]}\n{errors[-4000:]}"
            ) from None
    if check:
        assert process.returncode == 0, f"{command}\n{out}\n{errors}"
    return subprocess.CompletedProcess(command, process.returncode, out, errors)
