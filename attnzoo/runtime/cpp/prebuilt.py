"""Libraries that a wheel carries: compiled ahead, for each C++ file and level of CPUs.

``tools/wheels`` compiles them into the folder ``libraries`` beside this file. A file name
contains a hash of the source and of the flags, so that a library of another source is not loaded.
``ATTNZOO_COMPILE=native`` compiles for this CPU instead, and ``ATTNZOO_CPU`` limits the level, for
example to compare levels on one machine.

A library in the package is trusted as far as the Python code beside it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).with_name("libraries")
PACKAGE = Path(__file__).parents[2]
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")  # of every library
COMPILE = "ATTNZOO_COMPILE"  # environment variable: NATIVE or nothing
NATIVE = "native"
CPU = "ATTNZOO_CPU"  # environment variable: name of a level or nothing
CPU_INFO = Path("/proc/cpuinfo")  # Linux; lists only instructions that the system enables

_AVX2 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"


class Level(NamedTuple):
    """CPUs that share a library.

    Attributes:
        name: Its name, in file names and in ``ATTNZOO_CPU``.
        title: What people call it.
        machine: The value of ``platform.machine()``.
        flags: Flags of the compiler.
        needed: Flags that ``/proc/cpuinfo`` lists on such a CPU, separated by spaces.
    """

    name: str
    title: str
    machine: str
    flags: tuple[str, ...]
    needed: str = ""


LEVELS = (  # of a machine, from the widest registers down
    Level("avx512", "AVX-512", "x86_64", ("-march=x86-64-v4",), _AVX512),
    Level("avx2", "AVX2", "x86_64", ("-march=x86-64-v3",), _AVX2),
    Level("neon", "NEON", "aarch64", ("-march=armv8-a",)),
)


def file_name(source: Path, code: bytes, level: Level) -> str:
    """Return the name of the library of a C++ file.

    Args:
        source: The C++ file.
        code: Its content and that of all headers that it may include.
        level: The CPUs that it is compiled for.
    """
    key = hashlib.sha256(code + repr((*FLAGS, *level.flags)).encode()).hexdigest()[:16]
    return f"{source.stem}-{key}-{level.name}.so"


def find(source: Path, code: bytes) -> Path | None:
    """Return the library of a C++ file for this CPU; ``None`` if it has to be compiled.

    Raises:
        OSError: A library was compiled from another state of the source, or users can write it
            who cannot write the package, or an environment variable has an unknown value.
    """
    levels = usable_levels()
    for level in levels:
        library = FOLDER / file_name(source, code, level)
        if library.is_file():
            _check_trusted(library)
            return library
    for level in levels if PACKAGE in source.parents else ():  # others bring no libraries
        for other in FOLDER.glob(f"{source.stem}-{'[0-9a-f]' * 16}-{level.name}.so"):
            raise OSError(
                f"the library {other.name} of this installation was compiled from another version "
                f"of {source.name}; install attnzoo again, or set {COMPILE}={NATIVE} to compile it"
            )
    return None


def usable_levels() -> list[Level]:
    """Return the levels whose libraries run on this CPU, from the widest down.

    They are empty if libraries are to be compiled, or if this installation carries none.

    Raises:
        OSError: An environment variable has an unknown value.
    """
    chosen = os.environ.get(COMPILE)
    if chosen and chosen != NATIVE:
        raise OSError(f"{COMPILE} must be {NATIVE} or unset, got {chosen!r}")
    if chosen or not FOLDER.is_dir():
        return []
    machine, found = platform.machine(), cpu_flags()
    usable = [x for x in LEVELS if x.machine == machine and found.issuperset(x.needed.split())]
    limit = os.environ.get(CPU)
    if not limit:
        return usable
    names = [x.name for x in usable]
    if limit not in names:
        accepted = ", ".join(names) or f"none; set {COMPILE}={NATIVE} instead"
        raise OSError(f"{CPU}={limit!r} is no level of this CPU (its levels: {accepted})")
    return usable[names.index(limit) :]


def origin() -> str:
    """Return where the kernels of this installation come from, in words for ``describe``."""
    try:
        levels = usable_levels()
    except OSError:  # no kernel is available; its reason says why
        levels = []
    return f"prebuilt for {levels[0].title}" if levels else "compiled for this CPU"


@cache
def cpu_flags() -> frozenset[str]:
    """Return the instructions that the first CPU of this machine has, in the words of Linux."""
    try:
        with CPU_INFO.open(encoding="utf-8", errors="replace") as file:
            for line in file:  # all CPUs have the same, and a machine may have hundreds
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:  # not on Linux, or hidden from this process
        pass
    return frozenset()


def _check_trusted(library: Path) -> None:
    """Raise ``OSError`` if users can write a library who cannot write the code beside it.

    Installers keep the mode that the user's umask gives to all files, so a package that a group can
    write is loaded whole or not at all; only a library that is more open than the code is refused.
    """
    if os.name != "posix":
        return
    for path, code in ((library, Path(__file__)), (FOLDER, Path(__file__).parent)):
        found, trusted = path.stat(), code.stat()
        open_to = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        same_group = found.st_gid == trusted.st_gid or not open_to & stat.S_IWGRP
        same_owner = found.st_uid in (0, os.geteuid(), trusted.st_uid)
        if open_to & ~trusted.st_mode or not same_group or not same_owner:
            raise OSError(
                f"users can write {path} who cannot write attnzoo's code (owner {found.st_uid}, "
                f"mode {stat.S_IMODE(found.st_mode):o}), so it is not loaded; install attnzoo again"
            )
