"""The fixture ``fresh_python``, with which tests run programs in other processes."""

import signal

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
