"""The check of every implementation that doctor runs on a GPU, here on a CPU and interpreted."""

import json
import sys

import pytest
import torch

from attnzoo.evaluation import gpu_kernels
from attnzoo.evaluation.gpu_kernels import CASES, ENDED, check_gpu, run_case, wrong_results
from attnzoo.ops.linear.triton import launch
from attnzoo.runtime import gpu_verdicts
from attnzoo.runtime.cache_folder import CACHE
from attnzoo.runtime.gpu_verdicts import KernelVerdict, stored_verdicts
from tests.helpers import change_implementation
from tests.kernel_device import kernel_device

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "CHECKED", (50, 1, 32))
    monkeypatch.setattr(gpu_kernels, "WIDE", (30, 1, 20))


def rows_of(stage, name, capsys, leave_out=()):
    """Return the last row of each implementation that a process prints."""
    run_case(stage, name, CPU, leave_out)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[::2] == [{"impl": row["impl"], "wrong": ENDED} for row in rows[1::2]]
    return {row["impl"]: row for row in rows[1::2]}


@pytest.mark.parametrize("name", [x for x in BY_NAME if not x.startswith("linear")])
def test_implementations_of_a_cpu_pass(name, capsys, monkeypatch):
    rows = rows_of("check", name, capsys, leave_out=["triton"])
    assert len(rows) >= 2
    assert {row["wrong"] for row in rows.values()} == {""}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "linear attention, normalised, decay vector",
        *(
            pytest.param(x, marks=pytest.mark.exhaustive)
            for x in BY_NAME
            if x.startswith("linear") and x != "linear attention, normalised, decay vector"
        ),
    ],
)
def test_own_kernels_pass(name):
    assert wrong_results(BY_NAME[name], "triton", kernel_device()) == ""


def test_wrong_gradients_of_own_kernels_are_found(monkeypatch):
    backward = launch.KernelLauncher.backward

    def broken(self, *arguments):
        dq, dk, dv, *rest = backward(self, *arguments)
        return dq, dk * 1.05, dv, *rest

    monkeypatch.setattr(launch.KernelLauncher, "backward", broken)
    case = BY_NAME["linear attention, decay scalar"]
    assert wrong_results(case, "triton", kernel_device()).startswith("gradient 2 differs")


def test_errors_and_refusals_are_rows(capsys, monkeypatch):
    name = "delta, decay none"
    rows_of("check", name, capsys)  # which registers the implementations

    def fail(x):
        raise RuntimeError("no kernel image\nis available")

    change_implementation(monkeypatch, "delta_attention", "torch", run=fail)
    change_implementation(monkeypatch, "delta_attention", "cpp", reasons=lambda x: ["too new"])
    rows = rows_of("check", name, capsys, leave_out=["triton"])
    assert rows["torch"]["wrong"] == "RuntimeError: no kernel image"
    assert (rows["cpp"]["wrong"], "too new" in rows["cpp"]["refused"]) == ("", True)


def test_calls_are_timed(capsys):
    rows = rows_of("time", "rwkv6, one token", capsys, leave_out=["triton"])
    assert all(row["ms"] > 0 for row in rows.values())


@pytest.fixture
def _no_verdicts(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    stored_verdicts.cache_clear()
    yield
    stored_verdicts.cache_clear()


SCRIPT = """
import json, os, sys
stage, name, device, *leave_out = sys.argv[1:]
for impl in ("triton", "fla", "torch"):
    if impl in leave_out:
        continue
    print(json.dumps({"impl": impl, "wrong": ENDED}), flush=True)
    if stage == "check" and impl == "triton":
        os.kill(os.getpid(), 11)
    row = {"impl": impl, "wrong": "dq differs" if impl == "fla" else ""}
    if stage == "time":
        row["ms"] = 2.5
    print(json.dumps(row), flush=True)
"""


@pytest.mark.usefixtures("_no_verdicts")
def test_a_crash_is_a_row_and_the_others_are_checked_and_stored(monkeypatch):
    code = SCRIPT.replace("ENDED", repr(ENDED))
    monkeypatch.setattr(gpu_kernels, "COMMAND", (sys.executable, "-S", "-c", code))
    found = list(check_gpu(CPU, CASES[:1]))
    name = CASES[0].name
    assert found == [
        KernelVerdict(name, "triton", wrong=ENDED),
        KernelVerdict(name, "fla", wrong="dq differs"),
        KernelVerdict(name, "torch", ms=2.5),
    ]
    assert stored_verdicts(CPU) == tuple(found)
    assert gpu_verdicts.own_verdict(CPU, name) == (f"they are wrong on cpu ({ENDED})", "")


@pytest.mark.usefixtures("_no_verdicts")
def test_a_process_that_takes_too_long_is_killed(monkeypatch):
    code = 'import time; print(\'{"impl": "torch", "wrong": "late"}\', flush=True); time.sleep(60)'
    monkeypatch.setattr(gpu_kernels, "COMMAND", (sys.executable, "-S", "-c", code))
    monkeypatch.setitem(gpu_kernels.SECONDS, "check", 1.0)
    (row,) = check_gpu(CPU, CASES[:1])
    assert row == KernelVerdict(CASES[0].name, "torch", wrong="late")
