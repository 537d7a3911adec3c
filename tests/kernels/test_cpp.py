"""Kernels in C++: compiled once and whole, and done without where there is no compiler."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attnzoo.errors import UnsupportedError
from attnzoo.kernels import cpp
from attnzoo.ops.reformer import choose_impl, lsh_attention


@pytest.fixture
def cold(monkeypatch, tmp_path):
    """Forget what was compiled, before the test and after it."""
    monkeypatch.setenv(cpp.CACHE, str(tmp_path / "cache"))
    cpp.load.cache_clear()
    cpp.why_not.cache_clear()
    yield tmp_path / "cache"
    cpp.load.cache_clear()
    cpp.why_not.cache_clear()


def compiler(folder, script):
    path = folder / "cc"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_kernel_is_compiled_once(cold, monkeypatch, tmp_path):
    if cpp.why_not("pivots"):
        pytest.skip(cpp.why_not("pivots"))
    (made,) = cold.iterdir()
    assert made.name.startswith("pivots-")
    assert made.suffix == ".so"
    cpp.load.cache_clear()
    real = os.environ.get("CXX") or "c++"
    script = f'case "$*" in *-dM*) exec {real} "$@";; esac; exit 1\n'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    assert cpp.load("pivots").pivots  # as the other compiler says the same of itself
    assert list(cold.iterdir()) == [made]


def test_processes_that_compile_at_once_leave_one_library(cold):
    if cpp.why_not("pivots"):
        pytest.skip(cpp.why_not("pivots"))
    (made,) = cold.iterdir()
    made.unlink()
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(cpp.load.__wrapped__, "pivots") for _ in range(3)]
    assert all(library.result().pivots for library in found)
    assert list(cold.iterdir()) == [made]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "lsh.cpp cannot be compiled: .*No such file"),
        ("echo wrong >&2; echo more >&2; exit 3\n", "cannot be compiled: .*: wrong$"),
        ("exit 3\n", "cannot be compiled: .*: exit 3$"),
        ('case "$*" in *-dM*) ;; *) exit 4;; esac\n', "cannot be compiled: .*: exit 4$"),
        ('case "$*" in *-dM*) ;; *) for x; do :; done; : > "$x";; esac\n', "file too short"),
    ],
)
def test_without_a_compiler_torch_does_it_and_says_why(
    cold, monkeypatch, tmp_path, script, message
):
    path = str(tmp_path / "none") if script is None else compiler(tmp_path, script)
    monkeypatch.setenv("CXX", path)
    with pytest.raises(cpp.BuildError, match=message):
        cpp.load("lsh")
    x = [torch.randn(1, 2, 60, 8) for _ in range(3)]
    impl, reason = choose_impl("auto", x[0], False, None)
    assert impl == "torch"
    assert reason.startswith("not cpp: lsh.cpp cannot be compiled")
    options = {"rounds": 2, "chunk_size": 4, "window": 3}
    expected = lsh_attention(*x, **options, impl="torch")
    assert torch.equal(lsh_attention(*x, **options), expected)
    with pytest.raises(UnsupportedError, match=r"impl=.cpp. cannot run: lsh\.cpp"):
        lsh_attention(*x, **options, impl="cpp")


def test_a_cache_that_cannot_be_written_is_no_crash(cold, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cpp.CACHE, str(tmp_path / "file"))
    assert "cannot be compiled" in cpp.why_not("lsh")
