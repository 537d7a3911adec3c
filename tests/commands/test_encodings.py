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
from tests import processes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def printed(monkeypatch):
    """A function that returns what a command prints on 40 columns of an ASCII terminal."""
    monkeypatch.setattr(terminal.console, "width", 40)

    def printed(*arguments):
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="surrogateescape")
        monkeypatch.setattr(sys, "argv", ["attnzoo", *arguments])
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            with pytest.raises(SystemExit) as stop:
                main()
        assert stop.value.code == 0
        stream.flush()
        return stream.buffer.getvalue().decode("ascii")

    return printed


def test_help(printed):
    for command in app.registered_commands:
        assert "--help" in printed(command.name, "--help")


def test_tables(printed, monkeypatch):
    assert "linear: " in printed("list", "linear")
    row = CheckResult(check="é", status="ok", detail="85 ± 3 → …")
    monkeypatch.setattr(installation, "check_installation", lambda: [row])
    assert "85 ? 3 ? ?" in printed("doctor")


def run(*arguments, **variables):
    return processes.run(
        [sys.executable, "-m", "attnzoo", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "60", **variables},
        encoding="latin-1",
    )


def test_a_handler_that_was_chosen_remains():
    done = run("swap", "--help", PYTHONIOENCODING="ascii:xmlcharrefreplace")
    assert "&#8230;" in done.stdout, done.stderr


def test_a_program_of_the_user_has_its_own_output(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.stdout.encoding, sys.stdout.errors)")
    done = run("run", str(script), PYTHONIOENCODING="ascii")
    assert done.stdout.split() == ["ascii", "strict"], done.stderr
