"""C++ kernels: compiled once, written atomically, and not required without a compiler."""

import errno
import os
import re
import shlex
import shutil
import stat
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from attnzoo.errors import SlowKernelWarning, UnsupportedError
from attnzoo.ops.lsh.api import lsh_attention
from attnzoo.ops.lsh.cpu.lsh import LSH, PIVOTS
from attnzoo.runtime import cpp
from attnzoo.runtime.cache_folder import CACHE

REAL = os.environ.get("CXX") or "c++"


@pytest.fixture
def cold(monkeypatch, tmp_path):
    """Use an empty cache of compiled libraries."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(cpp, "_warned", [])
    cached = (cpp.load, cpp.build_error, cpp.unavailable_reason)
    for function in cached:
        function.cache_clear()
    yield tmp_path / "cache"
    for function in cached:
        function.cache_clear()


def compiler(folder, script):
    path = folder / "cc"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_line_says_what_was_compiled(cold, capfd):
    if cpp.unavailable_reason(PIVOTS):
        pytest.skip(cpp.unavailable_reason(PIVOTS))
    line = r"attnzoo compiled pivots\.cpp for this CPU in \d+\.\d s, kept in " + re.escape(
        str(cold)
    )
    assert re.fullmatch(line + "\n", capfd.readouterr().err)
    cpp.load.cache_clear()
    cpp.load(PIVOTS)
    assert capfd.readouterr().err == ""


def test_the_first_kernel_that_is_missing_warns(cold, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    x = [torch.randn(1, 2, 60, 8) for _ in range(3)]
    with pytest.warns(SlowKernelWarning, match="three times.*no C.. compiler 'no-such-compiler'"):
        lsh_attention(*x, num_hashes=2, chunk_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lsh_attention(*x, num_hashes=2, chunk_size=4)
        assert cpp.unavailable_reason(PIVOTS).startswith("pivots.cpp cannot be compiled: there is")


def test_a_kernel_is_compiled_once(cold, monkeypatch, tmp_path):
    if cpp.unavailable_reason(PIVOTS):
        pytest.skip(cpp.unavailable_reason(PIVOTS))
    (made,) = cold.iterdir()
    assert made.name.startswith("pivots-")
    assert made.suffix == ".so"
    assert stat.S_IMODE(cold.stat().st_mode) == stat.S_IMODE(made.stat().st_mode) == 0o700
    cpp.load.cache_clear()
    script = f'case "$*" in *-dM*) exec {REAL} "$@";; esac; exit 1\n'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    assert cpp.load(PIVOTS).best_pivots  # from the cache: both compilers have the same macros
    assert list(cold.iterdir()) == [made]


def test_concurrent_compilations_leave_one_library(cold):
    if cpp.unavailable_reason(PIVOTS):
        pytest.skip(cpp.unavailable_reason(PIVOTS))
    (made,) = cold.iterdir()
    made.unlink()
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(cpp.load.__wrapped__, PIVOTS) for _ in range(3)]
    assert all(library.result().best_pivots for library in found)
    assert list(cold.iterdir()) == [made]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "lsh.cpp cannot be compiled: there is no C.. compiler .*; install"),
        ("echo wrong >&2; echo more >&2; exit 3\n", "cannot be compiled: .*: wrong$"),
        ("exit 3\n", "cannot be compiled: .*: exit 3$"),
        ('case "$*" in *-dM*) ;; *) exit 4;; esac\n', "cannot be compiled: .*: exit 4$"),
        ('case "$*" in *-dM*) ;; *) for x; do :; done; : > "$x";; esac\n', "file too short"),
    ],
)
def test_without_a_compiler_auto_selects_torch_and_gives_the_reason(
    cold, monkeypatch, tmp_path, script, message
):
    path = str(tmp_path / "none") if script is None else compiler(tmp_path, script)
    monkeypatch.setenv("CXX", path)
    with pytest.raises(cpp.BuildError, match=message):
        cpp.load(LSH)
    x = [torch.randn(1, 2, 60, 8) for _ in range(3)]
    options = {"num_hashes": 2, "chunk_size": 4, "window": 3}
    expected = lsh_attention(*x, **options, impl="torch").out
    out, *_, (impl, reason) = lsh_attention(*x, **options)
    assert impl == "torch"
    assert "cpp cannot: lsh.cpp cannot be compiled" in reason
    assert torch.equal(out, expected)
    with pytest.raises(UnsupportedError, match=r"impl=.cpp. cannot run .*: lsh\.cpp"):
        lsh_attention(*x, **options, impl="cpp")


def test_a_cache_that_is_not_writable_gives_a_reason(cold, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    assert re.search(f"cannot be made .*; set .*{CACHE} to", cpp.unavailable_reason(LSH))


def test_without_a_home_the_reason_names_the_variable(cold, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(CACHE)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(cpp.BuildError, match=f"home directory.*; set .*{CACHE} to"):
        cpp.load(PIVOTS)


@pytest.fixture
def read_only(library, monkeypatch):
    """A cache whose file system is read only; root may write whatever the mode says."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(library.parent / "x"))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    return library


def test_a_read_only_cache_is_read(read_only):
    assert cpp.load(PIVOTS).best_pivots
    read_only.unlink()
    cpp.load.cache_clear()
    with pytest.raises(cpp.BuildError, match=f"cannot be written .*; set .*{CACHE} to"):
        cpp.load(PIVOTS)


@pytest.mark.skipif(not hasattr(os, "ST_NOEXEC"), reason="this system does not tell how it mounts")
def test_on_a_noexec_mount_nothing_is_compiled(cold, library, monkeypatch, tmp_path):
    library.unlink()
    monkeypatch.setenv("CXX", compiler(tmp_path, f'echo "$*" >> {shlex.quote(f"{tmp_path}/log")}'))
    real = os.statvfs

    def noexec(path):
        found = list(real(path))
        found[8] |= os.ST_NOEXEC  # f_flag
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", noexec)
    with pytest.raises(cpp.BuildError, match=f"mounted noexec.*set .*{CACHE} to another"):
        cpp.load(PIVOTS)
    assert "-o" not in (tmp_path / "log").read_text()


def test_a_library_that_cannot_be_loaded_is_compiled_once(cold, library, monkeypatch, tmp_path):
    """As where the C++ library of this Python is older than that of the compiler."""
    library.unlink()
    log = tmp_path / "log"
    script = f'case "$*" in *-dM*) exec {REAL} "$@";; esac\n'
    script += f'echo run >> {shlex.quote(str(log))}\nfor x; do :; done; echo text > "$x"\n'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    for _ in range(2):  # two processes
        cpp.load.cache_clear()
        with pytest.raises(cpp.BuildError, match="file too short"):
            cpp.load(PIVOTS)
    assert log.read_text() == "run\n"
    with pytest.raises(cpp.BuildError, match=r"remove .*\.failed to compile it again"):
        cpp.load(PIVOTS)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))  # may change what can be loaded
    with pytest.raises(cpp.BuildError, match="file too short"):
        cpp.load(PIVOTS)
    assert log.read_text() == "run\n" * 2
    for failure in cold.glob("*.failed"):
        os.utime(failure, (0, 0))
    with pytest.raises(cpp.BuildError, match="file too short"):
        cpp.load(PIVOTS)
    assert log.read_text() == "run\n" * 3


@pytest.fixture
def library(cold, compiled, monkeypatch, tmp_path):
    """Return the kernel in the cold cache; the compiler copies it to where it is asked to."""
    script = f'case "$*" in *-dM*) exec {REAL} "$@";; esac\n'
    script += f'for x; do :; done; exec cp {shlex.quote(str(compiled))} "$x"\n'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    cold.mkdir(mode=0o700)
    return Path(shutil.copy2(compiled, cold))


@pytest.mark.parametrize("content", [b"", b"short", b"\x7fELF" + bytes(4000), "half"])
def test_a_damaged_library_is_compiled_again(cold, library, content):
    good = library.read_bytes()
    library.write_bytes(good[: len(good) // 2] if content == "half" else content)
    assert cpp.load(PIVOTS).best_pivots
    assert [x.read_bytes() for x in cold.iterdir()] == [good]


@pytest.mark.parametrize("what", ["folder", "library"])
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_cache_that_others_can_write_is_refused(cold, library, what, mode):
    path = cold if what == "folder" else library
    path.chmod(mode)
    message = f"other users can write {path} .*mode {mode:o}.*chmod"
    with pytest.raises(cpp.BuildError, match=message):
        cpp.load(PIVOTS)
    path.chmod(0o700)
    assert cpp.load(PIVOTS).best_pivots


@pytest.mark.parametrize("what", ["folder", "library"])
def test_a_cache_of_another_user_is_refused(cold, library, monkeypatch, what):
    path = cold if what == "folder" else library
    if os.geteuid() == 0:
        os.chown(path, 1, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(cpp.BuildError, match="other users can write"):
        cpp.load(PIVOTS)


def test_a_library_without_the_functions_is_not_cached(cold, library, monkeypatch, tmp_path):
    library.unlink()
    script = f'case "$*" in *-dM*) exec {REAL} "$@";; esac\n'
    script += f'for x; do :; done; exec {REAL} -shared -x c++ {os.devnull} -o "$x"\n'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(cpp.BuildError, match="has no function best_pivots"):
        cpp.load(PIVOTS)
    assert list(cold.iterdir()) == []


def test_leftovers_of_killed_compilations_are_removed(cold, library):
    library.unlink()
    killed, running = cold / f"{cpp.UNFINISHED}a", cold / f"{cpp.UNFINISHED}b"
    for folder in (killed, running):
        folder.mkdir()
        (folder / "pivots.so").write_text("")
    os.utime(killed, (0, 0))
    cpp.load(PIVOTS)
    assert {x.name for x in cold.iterdir()} == {running.name, library.name}


def test_the_compiler_may_have_arguments(cold, library, monkeypatch):
    monkeypatch.setenv("CXX", f"{REAL} -g0")
    assert cpp.load(PIVOTS)
    cpp.load.cache_clear()
    monkeypatch.setenv("CXX", f"{REAL} 'unbalanced")
    with pytest.raises(cpp.BuildError, match="No closing quotation"):
        cpp.load(PIVOTS)


def test_a_compiler_that_hangs_is_killed(cold, monkeypatch, tmp_path):
    monkeypatch.setattr(cpp, "COMPILER_SECONDS", 0.2)
    monkeypatch.setenv("CXX", compiler(tmp_path, "sleep 60\n"))  # the child holds the pipes
    with pytest.raises(cpp.BuildError, match=r"did not finish within .* seconds; set CXX"):
        cpp.load(PIVOTS)
