"""The fixture ``fresh_python``, with which tests run programs in other processes."""

import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
assert "torch" in sys.modules
assert "attnzoo" not in sys.modules
assert __name__ == "__main__"
print(sys.argv[1:], os.getcwd())
{end}
"""


@pytest.mark.parametrize(
    ("end", "returncode", "error"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_output_and_exit_code(fresh_python, tmp_path, end, returncode, error):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end))
    done = fresh_python(program, "a b", 1, cwd=tmp_path)
    assert done.returncode == returncode
    assert error in done.stderr
    if returncode >= 0:
        assert done.stdout == f"['a b', '1'] {tmp_path}\n"


@pytest.mark.exhaustive
def test_a_program_that_hangs_is_killed_with_what_it_started(fresh_python, tmp_path):
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print("started", child.pid, flush=True)
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    fresh_python("pass")  # starts the server, outside of the limit
    with pytest.raises(AssertionError, match=r"not finished after 3 s; it printed: started \d+"):
        fresh_python(program, timeout=3)
    wait_for_end(int((tmp_path / "pid").read_text()))
    assert fresh_python("print(1)").stdout == "1\n"  # of another server


def wait_for_end(pid):
    """A killed process ends a little later, and one without a parent may remain as a zombie."""
    start = time.monotonic()
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert time.monotonic() - start < 60
            time.sleep(0.05)


RANKS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
number = torch.tensor(dist.get_rank() + 1)
{end}
dist.all_reduce(number)
print(number.item(), dist.get_world_size(), torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("end", "returncode", "output"),
    [
        ("", 0, "3 2 1\n3 2 1\n"),
        ("if number == 2: sys.exit(3)", 1, ""),  # sys is not imported
    ],
)
def test_ranks_of_a_process_group(fresh_python, end, returncode, output):
    """The rank that waits for one that failed is killed."""
    done = fresh_python(RANKS.format(end=end), processes=2)
    assert (done.returncode, done.stdout) == (returncode, output)
    assert ("NameError" in done.stderr) == bool(returncode)
