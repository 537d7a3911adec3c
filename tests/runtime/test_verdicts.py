"""Checks of kernels in processes of their own: how they end, and which verdicts are kept."""

import errno
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from attnzoo.runtime import verdicts
from attnzoo.runtime.cache_folder import CACHE
from attnzoo.runtime.verdicts import FAILED, NOT_RUN, PASSED, Verdict, decide, run_checks

GPU = {"device": "a GPU", "driver": "1"}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def process(*lines):
    """Return a command that writes events, or runs a statement where a line is none."""
    code = ["import json, os, sys, time"]
    for line in lines:
        event, _, text = line.partition(":")
        known = event in ("ready", "case", "wrong", "done")
        row = json.dumps({"event": event, "text": text})
        code.append(f"print({row!r}, flush=True)" if known else line)
    return [sys.executable, "-S", "-c", "\n".join(code)]


SEGFAULT = "os.kill(os.getpid(), 11)"


@pytest.mark.parametrize(
    ("lines", "outcome", "reason"),
    [
        (("ready", "case:few", "done"), PASSED, ""),
        (("ready", "case:few", "wrong:dv is wrong", "done"), FAILED, "scalar: dv is wrong"),
        (
            ("ready", "case:few", SEGFAULT),
            FAILED,
            "scalar, few: the process ended (killed by SIGSEGV)",
        ),
        (
            ("ready", "case:few", "wrong:dv is wrong", "sys.exit('CUDA error: illegal address')"),
            FAILED,
            "scalar: dv is wrong; scalar, few: the process ended (CUDA error: illegal address)",
        ),
        (("ready", "case:few"), FAILED, "scalar, few: the process ended (exit code 0)"),
        (("sys.exit('no device')",), NOT_RUN, "scalar: no device"),
        ((SEGFAULT,), NOT_RUN, "scalar: killed by SIGSEGV"),
        (
            ("ready", "sys.exit('torch.OutOfMemoryError: CUDA out of memory.')"),
            NOT_RUN,
            "scalar: torch.OutOfMemoryError: CUDA out of memory.",
        ),
        (
            ("ready", *(f"wrong:{name}" for name in "abcde"), "done"),
            FAILED,
            "scalar: a; scalar: b; scalar: c; 2 more",
        ),
    ],
)
def test_the_end_of_a_process_is_part_of_the_verdict(lines, outcome, reason):
    assert run_checks({"scalar": process(*lines)}, 60)[:2] == (outcome, reason)


def test_a_process_that_does_not_end_is_killed_with_those_it_started(tmp_path):
    start, child = time.monotonic(), tmp_path / "child"
    sleep = "'import time; time.sleep(60)'"
    lines = (
        "ready",
        "case:few",
        "import subprocess",
        f"pid = subprocess.Popen([sys.executable, '-S', '-c', {sleep}]).pid",
        f"open({str(child)!r}, 'w').write(str(pid))",
        "time.sleep(60)",
    )
    verdict = run_checks({"scalar": process(*lines), "none": process("time.sleep(60)")}, 3.0)
    assert verdict[:2] == (FAILED, "scalar, few: not finished after 3 s")
    status = Path(f"/proc/{child.read_text()}/stat")
    while is_running(status) and time.monotonic() - start < 30:  # a killed process ends later
        time.sleep(0.1)
    assert time.monotonic() - start < 30


def is_running(status):
    """Return whether a process has neither ended nor been collected by its parent."""
    try:
        return status.read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_one_failed_part_fails_the_check():
    parts = {"a": process("ready", "done"), "b": process("ready", "wrong:x", "done")}
    assert run_checks(parts, 60)[:2] == (FAILED, "b: x")
    parts = {"a": process("ready", "done"), "b": process("sys.exit('busy')")}
    assert run_checks(parts, 60)[:2] == (NOT_RUN, "b: busy")


def counted(*found):
    """Return a check that returns these verdicts one after another, and its number of runs."""
    runs = []

    def check():
        runs.append(1)
        return found[len(runs) - 1]

    return check, runs


@pytest.mark.parametrize("outcome", [PASSED, FAILED])
def test_a_verdict_is_kept_for_its_identity(outcome):
    check, runs = counted(Verdict(outcome, "why", 1.5), Verdict(PASSED), Verdict(PASSED))
    assert [decide("linear", GPU, check) for _ in range(3)] == [Verdict(outcome, "why", 1.5)] * 3
    assert len(runs) == 1
    decide("linear", {**GPU, "driver": "2"}, check)
    assert len(runs) == 2
    assert decide("linear", GPU, check, fresh=True) == Verdict(PASSED)
    assert verdicts.stored_verdict("linear", GPU) == Verdict(PASSED)


def test_a_check_that_could_not_run_is_not_kept():
    check, runs = counted(Verdict(NOT_RUN, "busy"), Verdict(PASSED))
    assert [decide("linear", GPU, check).outcome for _ in range(2)] == [NOT_RUN, PASSED]
    assert len(runs) == 2


@pytest.mark.parametrize("damage", ["", "{", '{"outcome": "passed"}', "[1]", None])
def test_a_damaged_verdict_is_replaced(damage):
    check, runs = counted(Verdict(FAILED, "why"), Verdict(PASSED))
    decide("linear", GPU, check)
    file = verdicts.verdict_file("linear", GPU)
    if damage is None:
        file.chmod(0o666)  # others can write it
    else:
        file.write_text(damage)
    assert decide("linear", GPU, check) == Verdict(PASSED)
    assert len(runs) == 2


def test_one_of_several_callers_runs_the_check():
    runs = []

    def check():
        runs.append(1)
        time.sleep(0.3)
        return Verdict(PASSED)

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(decide, "linear", GPU, check) for _ in range(4)]
    assert [each.result() for each in found] == [Verdict(PASSED)] * 4
    assert len(runs) == 1


@pytest.fixture
def logged(monkeypatch):
    found = []
    monkeypatch.setattr(verdicts.log, "warning", lambda text, *args: found.append(text % args))
    return found


def test_without_a_cache_folder_the_check_runs_each_time(folder, logged):
    folder.write_text("a file")
    check, runs = counted(Verdict(PASSED), Verdict(FAILED, "why"))
    assert [decide("linear", GPU, check).outcome for _ in range(2)] == [PASSED, FAILED]
    assert len(runs) == 2
    assert all(f"set the environment variable {CACHE} to" in text for text in logged)
    assert len(logged) == 2


@pytest.mark.parametrize("what", ["acquire", "replace_file"])
def test_in_a_read_only_cache_folder_the_check_runs_each_time(folder, logged, monkeypatch, what):
    """Or on a full disk; root may write whatever the mode says."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(FileLock if what == "acquire" else verdicts, what, refuse)
    check, runs = counted(Verdict(PASSED), Verdict(FAILED, "why"))
    assert [decide("linear", GPU, check).outcome for _ in range(2)] == [PASSED, FAILED]
    assert len(runs) == 2
    assert all("the check linear holds for this process only" in text for text in logged)
    assert all(f"{folder} cannot be written" in text and CACHE in text for text in logged)
    assert len(logged) == 2
