"""Run checks of kernels on a device in separate processes, and store their verdicts.

A wrong kernel can end its process or destroy its CUDA context, so a check runs in other processes,
and the way in which they end is part of the verdict. A verdict is valid for one identity: the
device and the versions of everything that the kernels are made from. It is one file in attnzoo's
cache folder. Of several processes that need the same verdict, one runs the check and the others
wait for it.

A check writes one JSON object per line to its standard output:

    {"event": "ready"}                      the device works; kernels cause any later failure
    {"event": "case", "text": "..."}        the case that runs next
    {"event": "wrong", "text": "..."}       a result that differs
    {"event": "done"}                       all cases ran
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from attnzoo.runtime.cache_folder import (
    CACHE,
    cache_folder,
    check_private,
    replace_file,
    unusable,
)

log = logging.getLogger(__name__)
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
OUT_OF_MEMORY = ("outofmemory", "out of memory")  # in the last line of a traceback, lower case
Case = TypeVar("Case")
SHOWN = 3  # wrong results that a reason lists


class Verdict(NamedTuple):
    """The result of a check."""

    outcome: str  # PASSED, FAILED, or NOT_RUN: the device could not be used
    reason: str = ""  # unless it passed
    seconds: float = 0.0


Identity = Mapping[str, str]  # device, and versions of everything that the kernels are made from


def verdict_file(name: str, identity: Identity) -> Path:
    """Return the file of a verdict; raises ``OSError`` if the cache folder cannot be used."""
    key = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"{name}-{key}.json"


def stored_verdict(name: str, identity: Identity) -> Verdict | None:
    """Return the stored verdict of a check, or ``None``."""
    try:
        path = verdict_file(name, identity)
        check_private(path)
        row = json.loads(path.read_text("utf-8"))
        if row["identity"] == dict(identity) and row["outcome"] in (PASSED, FAILED):
            return Verdict(row["outcome"], str(row["reason"]), float(row["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):  # none, or a damaged one
        return None
    return None


def decide(
    name: str,
    identity: Identity,
    check: Callable[[], Verdict],
    *,
    fresh: bool = False,
    wait_seconds: float = 600.0,
) -> Verdict:
    """Return the stored verdict, or run the check and store its verdict.

    The verdict of a check that could not run is not stored. If the cache folder cannot be used, no
    verdict is stored, and a log message says why.

    Args:
        name: Name of the check, the first part of the file's name.
        identity: Identity for which the verdict is valid.
        check: Runs the check.
        fresh: Run it even if there is a stored verdict.
        wait_seconds: How long to wait for another process that runs the same check.
    """
    from filelock import FileLock, Timeout

    folder = None
    try:
        path = verdict_file(name, identity)
        folder = path.parent
        lock = FileLock(path.with_suffix(".lock"), timeout=wait_seconds)
        lock.acquire()
    except Timeout:
        return Verdict(
            NOT_RUN,
            f"another process has been checking for {wait_seconds:.0f} s; set {CACHE} to another "
            "folder if none is",
        )
    except OSError as error:
        _warn_of_lost_verdict(name, error if folder is None else unusable(folder, "written", error))
        return check()
    with lock:
        found = None if fresh else stored_verdict(name, identity)
        if found is None:
            found = check()
            if found.outcome != NOT_RUN:
                row = {**found._asdict(), "identity": dict(identity)}
                try:
                    replace_file(path, json.dumps(row, indent=1) + "\n")
                except OSError as error:
                    _warn_of_lost_verdict(name, unusable(folder, "written", error))
        return found


def _warn_of_lost_verdict(name: str, error: OSError) -> None:
    log.warning("the verdict of the check %s holds for this process only: %s", name, error)


def run_checks(
    commands: Mapping[str, Sequence[str]],
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Verdict:
    """Run the processes of a check at the same time, and return one verdict.

    Args:
        commands: Command line of each process; the key says what it checks.
        seconds: Time limit for all processes together.
        environment: Environment variables of the processes; ``None`` means those of this one.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        return Verdict(NOT_RUN, "this program has no Python interpreter to start")
    start = time.monotonic()
    with ExitStack() as stack:
        running = {}
        for part, command in commands.items():
            output, errors = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            process = stack.enter_context(_process(command, output, errors, environment))
            running[part] = process, output, errors
        verdicts = []
        for part, (process, output, errors) in running.items():
            try:
                code = process.wait(max(0.0, start + seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(process)
                code = None
            verdicts.append(_judge(part, code, _text(output), _text(errors), seconds))
    for outcome in (FAILED, NOT_RUN, PASSED):
        reasons = [verdict.reason for verdict in verdicts if verdict.outcome == outcome]
        if reasons:
            return Verdict(outcome, "; ".join(filter(None, reasons)), time.monotonic() - start)
    raise AssertionError("a check has at least one process")


def run_cases(
    cases: Iterable[Case], check: Callable[[Case, Any], Iterable[str]], device: Any
) -> None:
    """Check cases on a device, in the process of a check; prints events."""
    import torch

    def print_event(event: str, text: str = "") -> None:
        print(json.dumps({"event": event, "text": text}), flush=True)

    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
    torch.ones(64, 64, device=device).matmul(torch.ones(64, 64, device=device)).sum().item()
    print_event("ready")
    for case in cases:
        print_event("case", str(case))
        for text in check(case, device):
            print_event("wrong", text)
    print_event("done")


def run_check(
    cases: Callable[[str, int, str, bool], Iterable[Case]],
    check: Callable[[Case, Any], Iterable[str]],
    decay: str,
    size: str,
    kind: str,
    device: str,
) -> None:
    """Check one kind of calls of Triton kernels, given by the arguments of a check's process.

    Args:
        cases: Returns the cases of a decay, a size and a kind; small ones if the last argument is
            true, for the interpreter.
        check: As in :func:`run_cases`.
        decay: Decay of the calls.
        size: Largest key and value size.
        kind: Kind of calls.
        device: Name of the device.
    """
    import torch

    target = torch.device(device)
    run_cases(cases(decay, int(size), kind, target.type != "cuda"), check, target)


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this process's Python and import path."""
    code = f"import runpy, sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); "
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", code, os.pathsep.join(sys.path), *arguments]


@contextmanager
def _process(
    command: Sequence[str],
    output: IO[str],
    errors: IO[str],
    environment: Mapping[str, str] | None,
) -> Any:
    """Start a process in a group of its own; kill the group at the end if it still runs."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _judge(part: str, code: int | None, output: str, errors: str, seconds: float) -> Verdict:
    """Return the verdict of one process; ``code`` is ``None`` if it ran out of time."""
    events = [json.loads(line) for line in output.splitlines() if line.startswith('{"event"')]
    seen = {event["event"] for event in events}
    case = next((e["text"] for e in reversed(events) if e["event"] == "case"), "")
    where = f"{part}, {case}" if case else part
    wrong = [f"{part}: {e['text']}" for e in events if e["event"] == "wrong"]
    if len(wrong) > SHOWN:
        wrong[SHOWN:] = [f"{len(wrong) - SHOWN} more"]
    lines = errors.strip().splitlines()
    last_line = lines[-1].strip()[:300] if lines else f"exit code {code}"
    if code is not None and code < 0:
        last_line = f"killed by {signal.Signals(-code).name}"
    if code is None:
        if "ready" in seen:
            return Verdict(FAILED, f"{where}: not finished after {seconds:.0f} s")
        return Verdict(NOT_RUN, f"{part}: the device was not ready after {seconds:.0f} s")
    if "ready" not in seen or any(word in last_line.lower() for word in OUT_OF_MEMORY):
        return Verdict(NOT_RUN, f"{part}: {last_line}")
    if code != 0 or "done" not in seen:
        wrong.append(f"{where}: the process ended ({last_line})")
    return Verdict(FAILED, "; ".join(wrong)) if wrong else Verdict(PASSED)
