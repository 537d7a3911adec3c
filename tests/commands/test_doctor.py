"""attnzoo doctor: a row per check, and exit code 1 if one fails."""

import json
import sys
from pathlib import Path

import pytest
import torch

import attnzoo
from attnzoo.cli import main
from attnzoo.evaluation import check_cpp, installation
from attnzoo.evaluation.installation import OK, UNAVAILABLE, WRONG, CheckResult, check_installation
from attnzoo.hf import release_check, seam
from attnzoo.hf.attention import ForwardArguments
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
    monkeypatch.setattr(installation, "check_installation", lambda full: iter(rows))
    found, output = run(monkeypatch, capsys)
    assert int(found) == code
    assert "| check of ok | ok | 0.0 s | [why] |" in output.splitlines()
    assert output.splitlines()[-1] == ", ".join(f"1 {x}" for x in statuses)
    found, output = run(monkeypatch, capsys, "--json")
    assert int(found) == code
    assert [row["status"] for row in json.loads(output)] == list(statuses)


def test_this_installation_passes(monkeypatch):
    # test_triton_trust.py has the check of these kernels, which takes minutes
    monkeypatch.setattr(installation, "device_reasons", lambda device: ("left out",))
    rows = {row.check: row for row in check_installation()}
    assert [row for row in rows.values() if row.status == WRONG] == []
    for name in ("machine", "torch", "transformers", "SDPA, math", "a saved swap loads"):
        assert rows[name].status == OK, rows[name]
    assert (rows["Triton kernels"].status, rows["Triton kernels"].detail) == (
        UNAVAILABLE,
        "left out",
    )
    assert attnzoo.__version__ in rows["machine"].detail
    assert rows["a swapped model equals the stock model"].detail.startswith("logits within")
    assert "modeling_utils" in rows["patches of transformers"].detail


def only(monkeypatch, name, check):
    """Return the row of one check."""
    monkeypatch.setattr(installation, "_checks", lambda full: [(name, check)])
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


@pytest.mark.parametrize(
    ("verdict", "status", "detail"),
    [
        (Verdict(PASSED), OK, "results and gradients agree with torch; checked on"),
        (Verdict(FAILED, "dv differs"), WRONG, "dv differs"),
        (Verdict(NOT_RUN, "out of memory"), UNAVAILABLE, "out of memory"),
    ],
)
def test_triton_kernels_are_checked_again(verdict, status, detail, monkeypatch):
    again = []

    def checked(*arguments, **options):
        again.append(options["again"])
        return verdict

    monkeypatch.setattr(installation, "device_reasons", lambda device: ())
    monkeypatch.setattr(installation.triton_trust, "check", checked)
    checks = dict(installation._device_checks(torch.device("cpu"), full=False))
    names = [name for name in checks if name.startswith("Triton")]
    assert len(names) == 20
    row = only(monkeypatch, names[0], checks[names[0]])
    assert row.status == status
    assert row.detail.startswith(detail)
    assert again == [True]


def test_wrong_fused_attention_fails(monkeypatch):
    attend = torch.nn.functional.scaled_dot_product_attention
    wrong = lambda q, k, v, **options: attend(q, k, v * 1.001, **options)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
    checks = dict(installation._device_checks(torch.device("cpu"), full=False))
    row = only(monkeypatch, "x", checks["SDPA, math"])
    assert row.status == WRONG
    assert "out differs from float64" in row.detail


def test_a_swap_that_changes_the_model_fails(monkeypatch):
    swap = attnzoo.swap
    monkeypatch.setattr(attnzoo, "swap", lambda model, name: swap(model, "linear"))
    row = only(monkeypatch, "x", installation._swapped_model)
    assert row.status == WRONG
    assert "logits differ by" in row.detail
