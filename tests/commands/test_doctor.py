"""attnzoo doctor: a row per check, and exit code 1 if one fails."""

import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import attnzoo
from attnzoo.cli import main
from attnzoo.commands import environment
from attnzoo.evaluation import check_cpp, installation
from attnzoo.evaluation.gpu_kernels import CASES
from attnzoo.evaluation.installation import OK, UNAVAILABLE, WRONG, CheckResult, check_installation
from attnzoo.hf import release_check, seam
from attnzoo.hf.attention import call
from attnzoo.runtime.gpu_verdicts import KernelVerdict


def run(monkeypatch, capsys, *arguments):
    """Call the command in this process; returns exit code and output."""
    monkeypatch.setattr(sys, "argv", ["attnzoo", "doctor", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("statuses", "code"), [((OK, UNAVAILABLE), 0), ((OK, WRONG, UNAVAILABLE), 1)]
)
def test_the_exit_code_says_whether_something_failed(statuses, code, monkeypatch, capsys):
    rows = [CheckResult(check=f"check of {x}", status=x, detail="[why]") for x in statuses]
    monkeypatch.setattr(installation, "check_installation", lambda: iter(rows))
    found, output = run(monkeypatch, capsys)
    assert int(found) == code
    assert "| check of ok | ok | 0.0 s | [why] |" in output.splitlines()
    assert output.splitlines()[-1] == ", ".join(f"1 {x}" for x in statuses)
    found, output = run(monkeypatch, capsys, "--json")
    assert int(found) == code
    assert [row["status"] for row in json.loads(output)] == list(statuses)


def test_a_terminal_gets_lines_that_fit(monkeypatch, capsys):
    row = CheckResult(check="linear, C++", status=OK, detail="kernels_of_linear_attention " * 9)
    monkeypatch.setattr(installation, "check_installation", lambda: iter([row]))
    screen = Console(width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(environment, "console", screen)
    found, output = run(monkeypatch, capsys)
    assert int(found) == 0
    assert max(map(len, output.splitlines())) <= 60
    assert output.split().count("kernels_of_linear_attention") == 9


def test_this_installation_passes(monkeypatch):
    monkeypatch.setattr(installation, "device_reasons", lambda device: ("left out",))
    monkeypatch.setattr(installation, "CASES", ())  # test_gpu_kernels.py has them
    rows = {row.check: row for row in check_installation()}
    assert [row for row in rows.values() if row.status == WRONG] == []
    for name in ("machine", "torch", "transformers"):
        assert rows[name].status == OK, rows[name]
    if torch.cuda.is_available():
        row, detail = rows["Triton kernels"], "left out"
    else:
        row, detail = rows["GPU kernels"], "there is no NVIDIA GPU, so nothing to check"
    assert (row.status, row.detail) == (UNAVAILABLE, detail)
    assert attnzoo.__version__ in rows["machine"].detail
    assert "equals the stock model" in rows["swapped models in transformers"].detail
    assert "modeling_utils" in rows["patches of transformers"].detail


def only(monkeypatch, name, check):
    """Return the row of one check."""
    monkeypatch.setattr(installation, "_checks", lambda: [(name, check)])
    (row,) = check_installation()
    return row


def test_an_error_of_a_library_is_a_failed_check(monkeypatch):
    def check():
        raise RuntimeError("CUDA error: no kernel image\nmore")

    row = only(monkeypatch, "x", check)
    assert (row.status, row.detail) == (WRONG, "RuntimeError: CUDA error: no kernel image")


def test_a_version_that_is_too_old_fails(monkeypatch):
    monkeypatch.setattr(installation, "requires", lambda name: ["transformers>=5.17"])
    monkeypatch.setattr(installation, "version", lambda name: "5.16.1")
    row = only(monkeypatch, "x", lambda: installation._package("transformers"))
    assert row.status == WRONG
    assert "5.16.1 is not supported, attnzoo needs transformers>=5.17" in row.detail


def test_an_untested_version_is_named_and_passes(monkeypatch):
    monkeypatch.setattr(seam, "TESTED", {"transformers": ("5.17.0",)})
    monkeypatch.setattr(release_check, "version", lambda name: "7.0.0")
    row = only(monkeypatch, "x", lambda: installation._package("transformers"))
    assert row.status == OK
    assert "not tested (tested: 5.17.0)" in row.detail


def test_a_release_in_which_states_are_lost_fails(monkeypatch):
    monkeypatch.setattr(call, "state_layer", lambda *arguments: None)
    row = only(monkeypatch, "x", lambda: installation._release())
    assert row.status == WRONG
    assert "a dynamic cache holds no states" in row.detail


def test_every_cpp_source_is_checked():
    checked = {source.path.resolve() for kernel in check_cpp.KERNELS for source in kernel.sources}
    folder = Path(attnzoo.__file__).parent
    assert checked == {path.resolve() for path in folder.rglob("*.cpp")}


def test_wrong_cpp_kernels_fail(monkeypatch):
    (linear,) = (x for x in check_cpp.KERNELS if x.name == "linear")

    def wrong(q, k, v, gates, impl):
        return linear.call(q, k * (1.001 if impl == "cpp" else 1), v, gates, impl)

    row = only(monkeypatch, "x", lambda: installation._cpp(linear._replace(call=wrong)))
    assert row.status == WRONG
    assert "out of float32 differs by" in row.detail


def test_kinds_of_calls_on_a_gpu_are_rows_with_times_and_what_is_wrong(monkeypatch):
    runs = []
    case, other = (x.name for x in CASES[:2])
    found = [
        KernelVerdict(case, "triton", wrong="gradient 1 differs"),
        KernelVerdict(case, "fla", ms=2.5),
        KernelVerdict(case, "torch", ms=1.25),
        KernelVerdict(other, "triton", ms=1.0),
        KernelVerdict(other, "fla", refused="normalised states"),
    ]
    monkeypatch.setattr(installation, "check_gpu", lambda device: runs.append(device) or found)
    monkeypatch.setattr(installation, "device_reasons", lambda device: ())
    gpu = torch.device("cuda", 0)
    checks = [x for x in installation._device_checks(gpu) if x[0] != "xformers attention"]
    monkeypatch.setattr(installation, "_checks", lambda: checks)
    rows = {row.check: row for row in check_installation()}
    assert runs == [gpu]
    assert list(rows) == [x.name for x in CASES]
    assert rows[case].status == WRONG
    assert rows[case].detail == (
        "triton: WRONG, gradient 1 differs; fla: right, 2.5 ms; torch: right, 1.25 ms; "
        "take impl='torch' instead of triton"
    )
    assert rows[other].status == OK
    assert rows[other].detail == "triton: right, 1 ms; fla: normalised states"
    assert rows[CASES[2].name].status == WRONG  # its process ended at once


def test_wrong_fused_attention_fails(monkeypatch):
    attend = torch.nn.functional.scaled_dot_product_attention
    wrong = lambda q, k, v: attend(q, k, v * 1.001, is_causal=True)  # noqa: E731
    row = only(monkeypatch, "x", lambda: installation._agrees(torch.device("cpu"), wrong))
    assert row.status == WRONG
    assert "out differs from float64" in row.detail
