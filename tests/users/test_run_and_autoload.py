"""``attnzoo run`` and ``attnzoo autoload``: programs that do not import attnzoo themselves."""

import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from attnzoo.commands.environment import AUTOLOAD, AUTOLOAD_FILE
from tests.processes import run

PROGRAM = """
import sys
print(sys.argv[1:], __name__, sys.path[0] == {folder!r}, "attnzoo" in sys.modules)
from attnzoo.errors import SpecError
if "fail" in sys.argv: raise {error}("its own error")
sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format(folder=str(tmp_path), error="SpecError"))
    return tmp_path


def attnzoo(*arguments, **options):
    return run([sys.executable, "-m", "attnzoo", *arguments], **options)


@pytest.mark.parametrize("program", [["program.py"], ["-m", "program"]])
def test_run_passes_arguments_and_exit_code(folder, program):
    done = attnzoo("run", *program, "--epochs", "2", "-m", "x", cwd=folder)
    assert done.stdout == "['--epochs', '2', '-m', 'x'] __main__ True True\n", done.stderr
    assert done.returncode == 3


@pytest.mark.parametrize("error", ["SpecError", "FileNotFoundError"])
def test_run_shows_the_traceback_of_the_program(folder, error):
    (folder / "program.py").write_text(PROGRAM.format(folder=str(folder), error=error))
    done = attnzoo("run", folder / "program.py", "fail")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().endswith(f"{error}: its own error")


def test_run_refuses_what_is_no_script(folder):
    done = attnzoo("run", "program", cwd=folder)
    assert done.returncode == 2
    assert "for a module, give -m" in done.stderr


@pytest.fixture
def environment(tmp_path):
    """A virtual environment that sees the packages of this one, and its Python."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(run(command, check=True).stdout.strip())
    root = str(Path(__file__).resolve().parents[2])
    (site / "packages.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")
    return python, site


def test_autoload_is_switched_on_and_off(environment):
    python, site = environment

    def printed(*arguments):
        return run([python, *arguments], check=True).stdout

    program = """
import sys
before = "attnzoo" in sys.modules
from transformers.masking_utils import AttentionMaskInterface
print(before, "attnzoo" in sys.modules, "attnzoo" in AttentionMaskInterface().valid_keys())
"""
    check = ("-c", program)
    assert printed(*check) == "False False False\n"
    assert printed("-m", "attnzoo", "autoload").startswith("autoload is off")
    assert printed("-m", "attnzoo", "autoload", "on").startswith("autoload is on")
    assert (site / AUTOLOAD_FILE).read_text() == AUTOLOAD
    assert printed("-m", "attnzoo", "autoload", "status").startswith("autoload is on")
    assert printed(*check) == "False True True\n"
    assert printed("-m", "attnzoo", "autoload", "off").startswith("autoload is off")
    assert printed(*check) == "False False False\n"


def test_autoload_is_harmless_without_attnzoo(tmp_path):
    """The file remains after attnzoo is uninstalled."""
    (tmp_path / "transformers.py").write_text("")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n{AUTOLOAD}import transformers; "
    program += "print('imported', 'attnzoo' in sys.modules)"
    command = [sys.executable, "-S", "-I", "-c", program]  # without site-packages
    done = run(command)
    assert done.stdout == "imported False\n", done.stderr
