"""Programs that tests start."""

import ast
import sys
from pathlib import Path

import pytest

from tests.processes import run

TESTS = Path(__file__).parent
# A child holds the pipes of its parent, so that the end of the parent alone does not close them.
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print("started", flush=True)
time.sleep(600)
"""


def test_a_program_that_hangs_is_killed_with_what_it_started():
    with pytest.raises(AssertionError, match=r"not finished after 2 s: .*\nstarted"):
        run([sys.executable, "-c", HANGS], timeout=2)


def test_output_input_and_exit_code():
    done = run([sys.executable, "-c", "import sys; print(input()); sys.exit(3)"], input="é\n")
    assert (done.returncode, done.stderr) == (3, "")
    with pytest.raises(AssertionError, match="wrong"):
        run([sys.executable, "-c", "import sys; sys.exit('wrong')"], check=True)


def test_every_program_has_a_time_limit():
    """Only these files start programs; `own_model_tests` and other scripts are programs."""
    allowed = {"processes.py", "fresh_python.py"}
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        if path.name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import) and "subprocess" in [name.name for name in node.names]:
                found.append(f"{path.relative_to(TESTS)}:{node.lineno} imports subprocess")
    assert not found, "use tests.processes: " + ", ".join(found)
