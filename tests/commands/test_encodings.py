"""The command line on terminals and pipes that are not UTF-8."""

import io
import os
import sys
from pathlib import Path

import pytest

from attnzoo.cli import app, main
from attnzoo.commands import terminal
from attnzoo.evaluation import installation
from attnzoo.evaluation.installation import CheckResult
from attnzoo.registry import available_backends
from tests import processes

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = [("ascii", "strict"), ("latin-1", "strict"), ("ascii", "surrogateescape")]


@pytest.fixture(params=OUTPUTS, ids=" ".join)
def printed(request, monkeypatch):
    """A function that returns what a command prints on 40 columns, and the encoding."""
    encoding, errors = request.param
    monkeypatch.setattr(terminal.console, "width", 40)

    def printed(*arguments):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
        monkeypatch.setattr(sys, "argv", ["attnzoo", *arguments])
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            with pytest.raises(SystemExit) as stop:
                main()
        assert (stop.value.code, stream.errors) == (0, errors)
        stream.flush()
        return stream.buffer.getvalue().decode(encoding), encoding

    return printed


def test_help(printed):
    for command in app.registered_commands:
        assert "--help" in printed(command.name, "--help")[0]


def test_list(printed):
    for name in available_backends():
        assert f"{name}: " in printed("list", name)[0]


def test_describe(printed):
    text, _ = printed("describe", "embedded")
    assert "model.layers.3.self_attn" in text
    assert "~" not in text


def test_doctor(printed, monkeypatch):
    row = CheckResult(check="é", status="ok", detail="85 ± 3 → …")
    monkeypatch.setattr(installation, "check_installation", lambda full, fresh: [row])
    text, encoding = printed("doctor")
    latin = encoding == "latin-1"
    assert ("| é | ok | 0.0 s | 85 ± 3 ? ~ |" if latin else "85 +- 3 ? ~ |") in text


def run(*arguments, **variables):
    return processes.run(
        [sys.executable, "-m", "attnzoo", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "60", **variables},
        encoding="latin-1",
    )


def test_a_process_prints_an_odd_path(tmp_path):
    out = tmp_path / "sö me → this"
    done = run(
        "swap", "embedded", "--attention", "flash", "--output-dir", out, PYTHONIOENCODING="latin-1"
    )
    assert done.returncode == 0, done.stderr
    assert "s\xf6 me ? this" in done.stdout
    assert (out / "config.json").is_file()


def test_a_handler_that_was_chosen_remains():
    done = run("list", "linear", PYTHONIOENCODING="ascii:xmlcharrefreplace")
    assert "&#183;" in done.stdout, done.stderr


def test_a_program_of_the_user_has_its_own_output(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.stdout.encoding, sys.stdout.errors)")
    done = run("run", str(script), PYTHONIOENCODING="ascii")
    assert done.stdout.split() == ["ascii", "strict"], done.stderr
