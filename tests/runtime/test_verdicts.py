"""Which verdicts of checks are kept."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import FileLock

from attnzoo.runtime import verdicts
from attnzoo.runtime.cache_folder import CACHE
from attnzoo.runtime.verdicts import FAILED, NOT_RUN, PASSED, Verdict, decide

GPU = {"device": "a GPU", "driver": "1"}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


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


OTHER = '{"identity": {}, "outcome": "failed", "reason": "of another GPU", "seconds": 2.5}'


@pytest.mark.parametrize("damage", ["", "{", '{"outcome": "passed"}', "[1]", OTHER, None])
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
