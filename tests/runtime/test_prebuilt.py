"""Libraries that a wheel carries: selected by CPU, trusted as the package is, never stale."""

import os
import platform
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from attnzoo.evaluation import check_cpp
from attnzoo.ops.lsh.cpu.lsh import PIVOTS
from attnzoo.runtime import cpp
from attnzoo.runtime.cache_folder import CACHE
from attnzoo.runtime.cpp import prebuilt
from tools.wheels.kernels import kernel_sources

if platform.machine() not in {level.machine for level in prebuilt.LEVELS}:
    pytest.skip("wheels carry no kernels for this machine", allow_module_level=True)

ONE = [x for x in prebuilt.LEVELS if x.machine == platform.machine()][-1]


def name_of(code: bytes) -> str:
    return prebuilt.file_name(PIVOTS.path, code, ONE)


@pytest.fixture
def installed(compiled, monkeypatch, tmp_path):
    """Install it as a wheel does, where there is neither a compiler nor a usable cache."""
    package = tmp_path / "cpp"
    folder = package / "libraries"
    folder.mkdir(parents=True)
    (package / "prebuilt.py").write_text("")
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setattr(prebuilt, "__file__", str(package / "prebuilt.py"))
    monkeypatch.setattr(prebuilt, "cpu_flags", lambda: frozenset(ONE.needed.split()))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    for variable in (prebuilt.COMPILE, prebuilt.CPU):
        monkeypatch.delenv(variable, raising=False)
    return Path(shutil.copy2(compiled, folder / name_of(cpp.read_code(PIVOTS.path))))


def load():
    return cpp.load.__wrapped__(PIVOTS)


def test_a_library_of_the_wheel_needs_no_compiler_and_no_cache(installed, tmp_path, capfd):
    assert load().best_pivots
    assert not (tmp_path / "cache").exists()
    assert capfd.readouterr().err == ""
    assert prebuilt.origin() == f"prebuilt for {ONE.title}"
    installed.unlink()
    installed.parent.rmdir()
    assert prebuilt.origin() == "compiled for this CPU"
    with pytest.raises(cpp.BuildError, match=r"cannot be compiled: there is no C.. compiler"):
        load()


def test_native_compiles_in_its_place(installed, monkeypatch):
    monkeypatch.setenv(prebuilt.COMPILE, "native")
    assert prebuilt.origin() == "compiled for this CPU"
    with pytest.raises(cpp.BuildError, match=r"cannot be compiled: there is no C.. compiler"):
        load()
    monkeypatch.setenv(prebuilt.COMPILE, "fast")
    with pytest.raises(cpp.BuildError, match="ATTNZOO_COMPILE must be native or unset, got 'fast'"):
        load()


def test_a_library_of_another_source_is_refused(installed):
    installed.rename(installed.with_name(name_of(b"another")))
    message = "cannot be loaded.*another version of pivots.cpp.*ATTNZOO_COMPILE=native"
    with pytest.raises(cpp.BuildError, match=message):
        load()


def test_a_package_of_others_may_have_a_source_of_the_same_name(installed, tmp_path):
    source = Path(shutil.copy2(PIVOTS.path, tmp_path))
    source.write_text("")
    assert prebuilt.find(source, b"") is None


def test_a_damaged_library_is_not_replaced_silently(installed):
    installed.write_bytes(b"text")
    with pytest.raises(cpp.BuildError, match=r"pivots.cpp cannot be loaded: .*file too short"):
        load()


@pytest.mark.parametrize(
    ("code", "library", "trusted"),
    [(0o644, 0o755, True), (0o664, 0o775, True), (0o644, 0o775, False), (0o664, 0o757, False)],
)
def test_a_library_is_trusted_as_the_code_beside_it(installed, code, library, trusted):
    """A umask that lets a group write does so for all files; a single file is another matter."""
    Path(prebuilt.__file__).chmod(code)
    installed.chmod(library)
    if trusted:
        assert load().best_pivots
    else:
        with pytest.raises(cpp.BuildError, match=f"users can write {installed} who cannot"):
            load()


def test_a_folder_that_others_can_write_is_refused(installed):
    installed.parent.chmod(0o777)
    with pytest.raises(cpp.BuildError, match=f"users can write {installed.parent} who cannot"):
        load()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="chown needs root")
def test_a_library_of_another_user_is_refused_unless_the_package_is_theirs(installed):
    for path in (installed, installed.parent):
        os.chown(path, 1, -1)
    with pytest.raises(cpp.BuildError, match=r"users can write .*owner 1"):
        load()
    package = Path(prebuilt.__file__)
    for path in (package, package.parent):
        os.chown(path, 1, -1)
    assert load().best_pivots


def test_levels_follow_the_instructions_of_the_cpu(installed, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    needed = {level.name: level.needed.split() for level in prebuilt.LEVELS}

    def usable(*flags):
        monkeypatch.setattr(prebuilt, "cpu_flags", lambda: frozenset(flags))
        return [level.name for level in prebuilt.usable_levels()]

    assert usable(*needed["avx512"], "more") == ["avx512", "avx2"]
    assert usable(*(x for x in needed["avx512"] if x != "avx512dq")) == ["avx2"]
    assert usable(*needed["avx2"]) == ["avx2"]
    assert usable(*(x for x in needed["avx2"] if x != "fma")) == []
    monkeypatch.setenv(prebuilt.CPU, "avx2")
    assert usable(*needed["avx512"]) == ["avx2"]
    monkeypatch.setenv(prebuilt.CPU, "avx512")
    with pytest.raises(OSError, match=r"ATTNZOO_CPU='avx512' is no level .*levels: avx2\)"):
        usable(*needed["avx2"])
    monkeypatch.delenv(prebuilt.CPU)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert usable() == ["neon"]
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert usable() == []


def test_instructions_are_those_of_the_first_cpu(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(prebuilt, "CPU_INFO", info)
    prebuilt.cpu_flags.cache_clear()
    assert prebuilt.cpu_flags() == frozenset()
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2\nvmx flags\t: ept\n\nflags\t: other\n")
    prebuilt.cpu_flags.cache_clear()
    assert prebuilt.cpu_flags() == {"fpu", "avx2"}
    prebuilt.cpu_flags.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("level", [x for x in prebuilt.LEVELS if x.machine == "x86_64"])
def test_the_compiler_uses_no_more_instructions_than_a_level_needs(level):
    """Each instruction set that the flags enable and the kernels ask for is one that is checked."""
    if platform.machine() != "x86_64":
        pytest.skip("flags of x86-64")
    command = (*shlex.split(os.environ.get("CXX") or "c++"), *level.flags)
    try:
        macros = cpp._run(*command, "-dM", "-E", "-x", "c++", os.devnull)
    except OSError as error:
        pytest.skip(str(error))
    names = (
        "AVX512F AVX512BW AVX512CD AVX512DQ AVX512VL AVX512VBMI AVX512VNNI AVX512FP16 AVX512BF16"
    )
    names += " AMX_TILE AMX_BF16 AMX_INT8 AVXVNNI GFNI VAES AVX2 FMA F16C BMI BMI2 LZCNT MOVBE"
    linux = {"BMI": "bmi1", "LZCNT": "abm", "AVX512BF16": "avx512_bf16"}
    enabled = {linux.get(name, name.lower()) for name in names.split() if f"__{name}__ " in macros}
    assert enabled <= set(level.needed.split())


def test_wheels_carry_every_kernel():
    """``doctor`` loads all sources, and wheels have those that it loads."""
    loaded = {source.path for kernel in check_cpp.KERNELS for source in kernel.sources}
    assert set(kernel_sources()) == loaded
    stems = [source.stem for source in kernel_sources()]
    assert len(set(stems)) == len(stems)
