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
from attnzoo.evaluation import check_cpp, installation, kernel_checks
from attnzoo.evaluation.installation import OK, UNAVAILABLE, WRONG, CheckResult, check_installation
from attnzoo.hf import release_check, seam
from attnzoo.hf.attention.call import ForwardArguments
from attnzoo.ops.linear.triton import verdicts as triton_verdicts
from attnzoo.runtime import kernel_groups
from attnzoo.runtime.cache_folder import CACHE
from attnzoo.runtime.verdicts import FAILED, NOT_RUN, PASSED, Verdict


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
    monkeypatch.setattr(installation, "check_installation", lambda full, fresh: iter(rows))
    found, output = run(monkeypatch, capsys)
    assert int(found) == code
    assert "| check of ok | ok | 0.0 s | [why] |" in output.splitlines()
    assert output.splitlines()[-1] == ", ".join(f"1 {x}" for x in statuses)
    found, output = run(monkeypatch, capsys, "--json")
    assert int(found) == code
    assert [row["status"] for row in json.loads(output)] == list(statuses)


def test_a_terminal_gets_lines_that_fit(monkeypatch, capsys):
    row = CheckResult(check="linear, C++", status=OK, detail="kernels_of_linear_attention " * 9)
    monkeypatch.setattr(installation, "check_installation", lambda full, fresh: iter([row]))
    screen = Console(width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(environment, "console", screen)
    found, output = run(monkeypatch, capsys)
    assert int(found) == 0
    assert max(map(len, output.splitlines())) <= 60
    assert output.split().count("kernels_of_linear_attention") == 9


def test_this_installation_passes(monkeypatch):
    # test_triton_verdicts.py has the check of these kernels, which takes minutes
    for module in (installation, kernel_checks):
        monkeypatch.setattr(module, "device_reasons", lambda device: ("left out",))
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
    monkeypatch.setattr(installation, "_checks", lambda full, fresh: [(name, check)])
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
    monkeypatch.setattr(ForwardArguments, "cache", lambda self, args, kwargs: None)
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


@pytest.fixture
def triton_rows(monkeypatch, tmp_path):
    """Return a function that returns the rows of the Triton kernels, and how many checks ran."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    monkeypatch.setattr(kernel_groups, "_STATE", kernel_groups._State())
    for module in (installation, kernel_checks):
        monkeypatch.setattr(module, "device_reasons", lambda device: ())

    def rows(verdict, fresh=False):
        runs = []
        monkeypatch.setattr(triton_verdicts, "run_check", lambda *x: runs.append(x) or verdict)
        checks = installation._device_checks(torch.device("cpu"), full=False, fresh=fresh)
        checks = [(name, check) for name, check in checks if name.startswith("Triton")]
        monkeypatch.setattr(installation, "_checks", lambda full, fresh: checks)
        return list(check_installation()), len(runs)

    return rows


@pytest.mark.parametrize(
    ("verdict", "status", "detail", "runs_again"),
    [
        (Verdict(PASSED), OK, "results and gradients agree with torch; checked on", 0),
        (Verdict(FAILED, "dv differs"), WRONG, "dv differs", 0),
        (Verdict(NOT_RUN, "out of memory"), UNAVAILABLE, "out of memory", 8),
    ],
)
def test_triton_kernels_are_checked_once(verdict, status, detail, runs_again, triton_rows):
    rows, runs = triton_rows(verdict)
    assert (len(rows), runs) == (8, 8)
    assert rows[0].check == "Triton kernels of linear attention (decay none, sizes up to 64)"
    assert rows[0].status == status
    assert rows[0].detail.startswith(detail)
    assert "earlier" not in rows[0].detail
    rows, runs = triton_rows(verdict)
    assert (rows[0].status, runs) == (status, runs_again)
    assert ("checked earlier, in 0 s; --fresh" in rows[0].detail) == (runs == 0)
    rows, runs = triton_rows(Verdict(PASSED), fresh=True)
    assert (rows[0].status, runs) == (OK, 8)
    assert "earlier" not in rows[0].detail


def test_fresh_is_an_option_of_the_command(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(installation, "check_installation", lambda *x: given.append(x) or iter(()))
    for arguments in ((), ("--fresh",), ("--all", "--fresh")):
        run(monkeypatch, capsys, *arguments)
    assert given == [(False, False), (False, True), (True, True)]


def test_wrong_fused_attention_fails(monkeypatch):
    attend = torch.nn.functional.scaled_dot_product_attention
    wrong = lambda q, k, v: attend(q, k, v * 1.001, is_causal=True)  # noqa: E731
    row = only(monkeypatch, "x", lambda: installation._agrees(torch.device("cpu"), wrong))
    assert row.status == WRONG
    assert "out differs from float64" in row.detail
