"""Child processes: results, time limits, crashes."""

import operator
import os
import signal
import time

import pytest

from attnzoo.evaluation.process import WorkerError, WorkerProcess


@pytest.fixture(params=[None, time.time], ids=["fork server", "spawn"])
def worker(request):
    worker = WorkerProcess(initializer=request.param)
    yield worker
    worker.close()


def test_one_process_runs_several_functions(worker):
    assert worker.run(operator.add, 1, 2, timeout=30) == 3
    first = worker.run(os.getpid, timeout=30)
    assert first != os.getpid()
    assert worker.run(os.getpid, timeout=30) == first


def test_a_timeout_ends_the_process_and_the_next_call_starts_another(worker):
    first = worker.run(os.getpid, timeout=30)
    with pytest.raises(WorkerError, match=r"more than 0\.2 s") as late:
        worker.run(time.sleep, 60, timeout=0.2)
    assert late.value.exit_code is None
    assert worker.run(os.getpid, timeout=30) != first


def test_a_crash_has_its_exit_code(worker):
    with pytest.raises(WorkerError, match="ended with 3") as died:
        worker.run(os._exit, 3, timeout=30)
    assert not died.value.killed
    pid = worker.run(os.getpid, timeout=30)
    with pytest.raises(WorkerError) as died:
        worker.run(os.kill, pid, signal.SIGKILL, timeout=30)
    assert died.value.killed
    assert worker.run(operator.add, 1, 2, timeout=30) == 3
