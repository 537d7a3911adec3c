"""benchmarks/gpu.py: every stage without a GPU, processes that crash or hang, resuming, tables."""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from attnzoo.runtime.triton_interpreter import interpreted
from tests import processes

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the script sets it, too


def script(name):
    return import_module(name)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- driver ----------------------------------------------------------------------------------------

WRITE = """
import json, os, sys, time
def write(**row):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({"group": "G", **row}) + "\\n")
def start(name):
    write(kind="start", key=["G", "time", name, ""])
"""


@pytest.fixture
def stage(tmp_path):
    """Return a function that runs groups, each a program, and the file of rows."""
    out = tmp_path / "rows.jsonl"
    gpu = script("gpu")

    def run(programs, seconds=30.0, limits=1):
        args = gpu.arguments(["--out", str(out)])
        args.command = lambda name, args: [
            sys.executable, "-S", "-c", WRITE.replace('"G"', repr(name)) + programs[name], str(out)
        ]  # fmt: skip
        return gpu.run_stage(dict.fromkeys(programs, limits), time.monotonic() + seconds, args)

    return run, out


def test_a_crash_ends_one_group_and_names_its_measurement(stage):
    run, out = stage
    crash = "start('a'); write(kind='time', workload='a'); start('b'); os.kill(os.getpid(), 11)"
    assert run({"one": crash, "two": "write(kind='time', workload='c')"})
    rows = rows_of(out)
    (found,) = (row for row in rows if row["kind"] == "crash")
    assert found == {
        "kind": "crash",
        "group": "one",
        "key": ["one", "time", "b", ""],
        "reason": "killed by SIGSEGV",
    }
    assert [row["group"] for row in rows if row["kind"] == "done"] == ["two"]
    run({"one": "sys.exit('torch sees no GPU')", "two": "write(kind='again')"})
    assert rows_of(out)[-1]["reason"] == "torch sees no GPU"  # "two" is done and does not run
    assert "again" not in {row["kind"] for row in rows_of(out)}


def test_a_stage_ends_within_its_time(stage):
    run, out = stage
    begin = time.monotonic()
    hang = dict.fromkeys(("one", "two"), "print('x' * 100000, file=sys.stderr); time.sleep(60)")
    assert not run(hang, seconds=1.0)
    assert time.monotonic() - begin < 20
    assert {row["group"]: row["kind"] for row in rows_of(out)} == dict.fromkeys(hang, "timeout")


def test_groups_without_timings_run_in_parallel(stage):
    run, out = stage
    # each waits until the other has started
    wait = "write(kind='x')\nwhile open(sys.argv[1]).read().count('x') < 2: time.sleep(0.01)"
    assert run({"one": wait, "two": wait}, limits=2)
    assert sorted(row["kind"] for row in rows_of(out)) == ["done", "done", "x", "x"]


def test_rows_are_measured_once_and_survive_half_a_line(tmp_path):
    gpu_rows, out = script("gpu_rows"), tmp_path / "rows.jsonl"
    runs = []

    def measured():
        runs.append(1)
        return {"ms": 1.0}

    def refused():
        raise gpu_rows.PeerUnavailable("not installed")

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    for _ in range(2):
        recorder = gpu_rows.Recorder(out, "G")
        recorder.measure(measured, kind="time", workload="a")
        recorder.measure(refused, kind="time", workload="b")
        with out.open("a") as file:
            file.write('{"kind": "ti')  # a process that was killed
    with pytest.raises(SystemExit, match="illegal memory access"):
        gpu_rows.Recorder(out, "G").measure(lost, kind="time", workload="c")
    gpu_rows.append_row(out, {"kind": "crash", "group": "G", "key": ["G", "time", "d", ""]})
    gpu_rows.Recorder(out, "G").measure(measured, kind="time", workload="d")
    assert len(runs) == 1
    started = [row["key"][2] for row in gpu_rows.read_rows(out) if row["kind"] == "start"]
    assert started == ["a", "b", "c"]
    rows = [row for row in gpu_rows.read_rows(out) if row["kind"] == "time"]
    assert [row["workload"] for row in rows] == ["a", "b", "c"]
    assert rows[1]["unavailable"] == "not installed"
    assert rows[2]["error"] == "RuntimeError: CUDA error: an illegal memory access"


# -- every stage -----------------------------------------------------------------------------------


@pytest.mark.skipif(not interpreted(), reason="a GPU runs the script itself")
def test_every_stage_runs_without_a_gpu_and_resumes(tmp_path, capsys):
    gpu, out = script("gpu"), tmp_path / "rows.jsonl"
    options = ["--interpret", "--tiny", "--out", str(out)]
    assert gpu.main(gpu.arguments(options)) == 0
    rows = script("gpu_rows").read_rows(out)
    kinds = {
        "machine",
        "copy",
        "check",
        "sanitizer",
        "warm",
        "time",
        "accuracy",
        "profile",
        "configs",
    }
    assert {row["kind"] for row in rows} == kinds | {"again", "llama", "tool", "start"}
    assert [row for row in rows if "error" in row] == []
    keys = [tuple(row["key"]) for row in rows if row["kind"] == "start"]
    assert len(set(keys)) == len(keys)
    measured = {row["workload"] for row in rows if row["kind"] == "time" and "first_seconds" in row}
    assert {"hybrid against softmax 1024", "hybrid decode"} <= measured
    assert "delta vector against softmax 1024" in measured
    assert "block_sparse query blocks against softmax 1024" in measured
    expected = {name for n in range(1, 6) for name in script("gpu_cases").groups_of(
        n, tiny=True, second=False)}  # fmt: skip
    assert {row["group"] for row in rows} == expected
    assert gpu.main(gpu.arguments(options)) == 0
    assert len(script("gpu_rows").read_rows(out)) == len(rows)
    capsys.readouterr()
    assert gpu.main(gpu.arguments([*options, "--summary"])) == 0
    table = capsys.readouterr().out
    assert "| linear, normalised, 32 heads on 8 | >= 3.0x | not measured |" in table
    assert "| scalar, config 64,4,2,64 | attnzoo |" in table
    assert "| decode | fla |  |  |  |  | fla runs on a GPU only |" in table


@pytest.mark.exhaustive
def test_the_script_runs_from_a_bare_checkout(tmp_path):
    script = str(BENCHMARKS / "gpu.py")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH",)}
    command = [sys.executable, script, "--interpret", "--stage", "1", "--group", "machine"]
    processes.run(command, cwd=tmp_path, env=environment, check=True)
    (row,) = (row for row in rows_of(tmp_path / "gpu.jsonl") if row["kind"] == "machine")
    assert row["device"] == "Triton's interpreter"


# -- tables ----------------------------------------------------------------------------------------


def test_the_summary_compares_graphs_with_graphs():
    def time_row(implementation, **measured):
        name = "none forward B4 T4096 H64 D128"
        return {"kind": "time", "group": "G", "workload": name, "implementation": implementation,
                **measured}  # fmt: skip

    summary = script("gpu_summary")
    ours = time_row("attnzoo", graph_ms=0.5, eager_ms=1.0, copy_bandwidth_fraction=0.7)
    goal = "| linear, forward, B4 T4096 H64 D128 | >= 1.8x |"
    table = summary.summary([ours, time_row("fla", graph_ms=1.0, eager_ms=3.0, remark="lifted")])
    assert "| none forward B4 T4096 H64 D128 | fla | 1 | 3 |  |  | lifted |" in table
    assert f"{goal} 2.00x |" in table
    assert "| linear, forward, of copy bandwidth | >= 0.6 | 0.70 |" in table
    table = summary.summary([ours, time_row("fla", eager_ms=3.0)])
    assert f"{goal} 3.00x |" in table
    assert f"{goal} not measured |" in summary.summary([ours])


def test_failed_checks_are_named():
    summary = script("gpu_summary")
    rows = [
        {"kind": "check", "group": "check none bare", "workload": "a", "wrong": ["dv differs"]},
        {"kind": "check", "group": "check none bare", "workload": "b", "wrong": []},
        {"kind": "sanitizer", "group": "s", "workload": "memcheck", "sanitizer_errors": 3},
        {"kind": "crash", "group": "check vector any", "key": None, "reason": "SIGSEGV"},
        {"kind": "crash", "group": "hybrid none any", "key": None, "reason": "SIGABRT"},
        {"kind": "crash", "group": "time fla none", "key": None, "reason": "SIGSEGV"},
        {"kind": "timeout", "group": "varlen 64"},
        {"kind": "timeout", "group": "delta none any"},  # finished by a later run
        {"kind": "done", "group": "delta none any"},
    ]
    assert summary.failures(rows) == [
        "check none bare, a: dv differs",
        "s, memcheck: 3 errors",
        "check vector any: the process ended (SIGSEGV)",
        "hybrid none any: the process ended (SIGABRT)",
        "varlen 64: did not finish in time",
    ]
    table = summary.checks(rows)
    assert "| check none bare | 1 | 1 | 0 | ['dv differs'] |" in table
    assert "| check vector any | 0 | 0 | 0 | crash SIGSEGV |" in table
