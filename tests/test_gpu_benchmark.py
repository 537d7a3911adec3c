"""benchmarks/gpu.py without a GPU: rows, calls that are refused, resuming, the table."""

import json
import sys
from pathlib import Path

import pytest

from tests import processes

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks/gpu.py"


def run(*arguments):
    return processes.run([sys.executable, str(SCRIPT), *map(str, arguments)], timeout=300)


@pytest.mark.exhaustive
def test_rows_are_written_and_only_missing_ones_are_measured(tmp_path):
    out = tmp_path / "rows.jsonl"
    known = {"workload": "decay scalar, B1 H2/1 T40 D16, forward + backward", "impl": "torch"}
    others = [known | {"impl": impl, "failed": "known"} for impl in ("triton", "fla")]
    names = [json.dumps(row) for row in [known | {"ms": 7.0}, *others]]
    second = "normalised, B1 H2/2 T40 D16, forward"
    names += [json.dumps({"workload": second, "impl": x, "ms": 1.0}) for x in ("fla", "softmax")]
    out.write_text("\n".join(names) + "\n")
    process = run("--tiny", "--out", out)
    assert process.returncode == 0, process.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    added = {(row["workload"], row["impl"]): row for row in rows[len(names) :]}
    assert set(added) == {(known["workload"], "softmax"), (second, "triton"), (second, "torch")}
    assert added[second, "torch"]["ms"] > 0
    assert "TRITON_INTERPRET=1" in added[second, "triton"]["failed"]
    assert "| failed | failed | 7 |" in process.stdout
    assert f"{known['workload']}, fla: known" in process.stdout


def test_without_a_gpu_the_script_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    process = run("--out", tmp_path / "rows.jsonl")
    assert process.returncode == 1
    assert "--tiny" in process.stderr
