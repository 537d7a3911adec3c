"""Load C++ kernels; compile them once per CPU and compiler where a wheel carries none.

Wheels for Linux carry compiled libraries (``prebuilt.py``), which need neither a compiler nor a
cache. Otherwise, and with ``ATTNZOO_COMPILE=native``, the rest of this page holds.

The compiler is ``$CXX`` or ``c++``. Libraries are cached in ``$ATTNZOO_CACHE`` or
``~/.cache/attnzoo``; the file name contains a hash of the source, the flags and the compiler's
predefined macros, which describe compiler and CPU, and a checksum of the library. A library runs
with all rights of the process, so it is loaded only if no other user can write it or its folder,
and compiled again if it does not match its checksum. Compilation takes seconds, because kernels
include only headers of the standard library and of this folder.

One line on standard error says what was compiled; ``attnzoo doctor`` compiles all of them
ahead. If a kernel cannot be had, the first call warns, once per process.

A library that this environment cannot load is not compiled again for a day: a file beside the
libraries keeps the reason.

Structures that C++ and Python both declare are compared when a library is loaded (``layout.py``).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attnzoo.errors import SlowKernelWarning
from attnzoo.runtime.cache_folder import (
    cache_folder,
    check_private,
    refuse_noexec,
    replace_file,
    unusable,
)
from attnzoo.runtime.cpp import prebuilt
from attnzoo.runtime.cpp.layout import DESCRIBE, Function, declare_functions


def compiler_flags(system: str, machine: str) -> tuple[str, ...]:
    """Return the flags that compile a kernel for this CPU to a shared library, with GCC or Clang.

    Args:
        system: ``sys.platform``.
        machine: ``platform.machine()``.
    """
    return (*prebuilt.FLAGS, *_cpu_flags(system, machine))


def _cpu_flags(system: str, machine: str) -> tuple[str, ...]:
    if machine not in ("arm64", "aarch64"):
        return ("-march=native",)
    # Clang before 16 refuses -march=native on ARM. On a Mac it compiles for the M1 without a flag,
    # and the kernels use no instructions that later CPUs added.
    return () if system == "darwin" else ("-mcpu=native",)


FLAGS = compiler_flags(sys.platform, platform.machine())
HEADERS = Path(__file__).parent  # folder of the headers of all kernels
COMPILER_SECONDS = 300.0  # time limit of one run of the compiler
FAILURE_SECONDS = 24 * 3600.0  # for how long a library that cannot be loaded is not compiled again
UNFINISHED = ".compile-"  # prefix of the folders in which libraries are compiled


class BuildError(RuntimeError):
    """A kernel cannot be compiled or loaded; the message gives the reason."""


@dataclass(frozen=True, eq=False)
class Source:
    """A C++ file, which may include headers of this folder and its own, and what it exports."""

    path: Path
    functions: Mapping[str, Function]


def read_code(source: Path) -> bytes:
    """Return the content of a C++ file and of all headers that it may include."""
    included = (*sorted(HEADERS.glob("*.h")), *sorted(source.parent.glob("*.h")))
    return b"".join(x.read_bytes() for x in (source, *included))


@cache
def load(source: Source) -> ctypes.CDLL:
    """Return the shared library of a C++ file.

    It is the one that the wheel carries for this CPU, or else compiled, if the cache does not
    contain it.

    Raises:
        BuildError: The compiler is missing or fails, or the cache is not writable, or other users
            can write it; or the wheel's library does not load, or belongs to another source.
        LayoutError: C++ and Python declare a function or a structure differently.
    """
    code, verb = read_code(source.path), "loaded"
    try:
        library = prebuilt.find(source.path, code)
        if library is not None:
            return _open(library, source)
        verb = "compiled"
        return _load_compiled(source, code)
    except (OSError, ValueError) as error:  # ValueError: CXX has one quote
        raise BuildError(f"{source.path.name} cannot be {verb}: {error}") from error


def _load_compiled(source: Source, code: bytes) -> ctypes.CDLL:
    """Return the library of a C++ file that is compiled for this CPU."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    macros = _run(*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull)
    key = hashlib.sha256(code + repr((*FLAGS, macros)).encode()).hexdigest()[:16]
    folder = cache_folder()
    refuse_noexec(folder)
    name = f"{source.path.stem}-{key}"
    for library in folder.glob(f"{name}-*.so"):
        if _is_valid(library, name):
            return _open(library, source)
    failure = folder / f"{name}-{_environment()}.failed"
    _refuse_failed(failure)
    _remove_unfinished(folder)
    with _temporary_folder(folder) as temporary:
        compiled, start = Path(temporary, f"{name}.so"), time.monotonic()
        _run(*compiler, *FLAGS, f"-I{HEADERS}", str(source.path), "-o", str(compiled))
        compiled.chmod(0o700)
        try:
            opened = _open(compiled, source)  # raises before the library enters the cache
        except OSError as error:
            replace_file(failure, str(error))
            raise
        compiled.replace(folder / _file_name(name, compiled))  # atomic; others may compile it too
    seconds = time.monotonic() - start
    line = f"attnzoo compiled {source.path.name} for this CPU in {seconds:.1f} s, kept in {folder}"
    print(line, file=sys.stderr)
    return opened


def _environment() -> str:
    """Return a hash of what decides, beside the library itself, whether it can be loaded."""
    loader = [os.environ.get(name, "") for name in ("LD_LIBRARY_PATH", "LD_PRELOAD")]
    return hashlib.sha256(repr((sys.prefix, loader)).encode()).hexdigest()[:8]


def _refuse_failed(failure: Path) -> None:
    """Raise ``OSError`` if the compiled library could not be loaded in an earlier process."""
    try:
        age = time.time() - failure.stat().st_mtime
        reason = failure.read_text("utf-8", "replace")
    except FileNotFoundError:
        return
    if age < FAILURE_SECONDS:
        raise OSError(f"{reason} (earlier today; remove {failure} to compile it again)")


def _temporary_folder(folder: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder)
    except OSError as error:
        raise unusable(folder, "written", error) from error


def _is_valid(library: Path, name: str) -> bool:
    """Return whether a library matches its checksum; removes one that does not.

    Raises:
        OSError: Other users can write it.
    """
    try:
        check_private(library)
        if library.name == _file_name(name, library):
            return True
    except FileNotFoundError:  # another process has removed it
        return False
    library.unlink(missing_ok=True)
    return False


def _file_name(name: str, library: Path) -> str:
    """Return the file name of a library in the cache."""
    return f"{name}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so"


def _open(library: Path, source: Source) -> ctypes.CDLL:
    """Return a library, whose functions take the structures that ``source`` declares.

    Raises:
        OSError: It cannot be loaded.
        ValueError: It lacks a function.
        LayoutError: It declares a function or a structure differently.
    """
    opened = ctypes.CDLL(str(library))
    missing = [name for name in (*source.functions, DESCRIBE) if not hasattr(opened, name)]
    if missing:
        raise ValueError(f"the compiled library has no function {', '.join(missing)}")
    declare_functions(opened, source.functions, source.path.name)
    return opened


def _remove_unfinished(folder: Path) -> None:
    """Remove the folders of compilations that were killed."""
    for left in folder.glob(f"{UNFINISHED}*"):
        try:
            old = time.time() - left.stat().st_mtime > 2 * COMPILER_SECONDS
        except FileNotFoundError:  # another process has finished its compilation
            continue
        if old:
            shutil.rmtree(left, ignore_errors=True)


def _run(*command: str) -> str:
    """Return the standard output of a command; raise ``OSError`` if it fails or takes too long."""
    if shutil.which(command[0]) is None:
        raise OSError(
            f"there is no C++ compiler {command[0]!r}; install g++ or clang++, or set the "
            "environment variable CXX to one"
        )
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=COMPILER_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise OSError(
                f"{command[0]} did not finish within {COMPILER_SECONDS:.0f} seconds; "
                "set CXX to another compiler"
            ) from None
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit {process.returncode}"]
        raise OSError(f"{command[0]}: {lines[0]}")
    return output


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a compiler and the processes that it started, which hold its pipes open."""
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


@cache
def build_error(source: Source) -> str:
    """Return why the kernel in ``source`` is unavailable, or ""."""
    try:
        load(source)
    except BuildError as error:
        return str(error)
    return ""


@cache
def unavailable_reason(source: Source) -> str:
    """Return why a call cannot run the kernel in ``source``, or ""; warns once per process."""
    reason = build_error(source)
    if reason:
        _warn(reason)
    return reason


_warned: list[str] = []  # the reason that this process has given


def _warn(reason: str) -> None:
    if not _warned:
        _warned.append(reason)
        warnings.warn(
            f"attnzoo computes in torch, which takes up to three times as long as its C++ kernels: "
            f"{reason}. `attnzoo doctor` shows all kernels",
            SlowKernelWarning,
            stacklevel=3,
        )


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Return ``_fields_`` of one type for a :class:`ctypes.Structure`, from names in a string."""
    return [(name, kind) for name in names.split()]
