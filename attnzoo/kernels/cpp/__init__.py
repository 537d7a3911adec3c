"""Kernels in C++, compiled once for the CPU at hand.

A library stands in ``$ATTNZOO_CACHE`` or ``~/.cache/attnzoo``, under a name made of its source and
of all that the compiler says of itself and of this CPU; so another one makes its own. That takes
seconds, as no header but the standard library's is read. ``$CXX``, or ``c++``, is the compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread")
CACHE = "ATTNZOO_CACHE"  # environment variable: a folder


class BuildError(RuntimeError):
    """A kernel cannot be had here; says why."""


@cache
def load(name: str) -> ctypes.CDLL:
    """Return the library of ``<name>.cpp`` beside this file, compiled if it has not been yet.

    Raises:
        BuildError: There is no compiler, or it fails, or nothing can be written.
    """
    source = Path(__file__).with_name(f"{name}.cpp")
    code = b"".join(x.read_bytes() for x in (source, *sorted(source.parent.glob("*.h"))))
    compiler = os.environ.get("CXX") or "c++"
    try:
        about = _run(compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull)
        told = (*FLAGS, about)
        made_of = hashlib.sha256(code + repr(told).encode()).hexdigest()[:16]
        folder = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "attnzoo")
        library = folder / f"{name}-{made_of}.so"
        if not library.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as room:
                made = Path(room, library.name)
                _run(compiler, *FLAGS, str(source), "-o", str(made))
                made.replace(library)  # whole or not at all, whoever else compiles it too
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        raise BuildError(f"{source.name} cannot be compiled: {error}") from error


def _run(*command: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        lines = found.stderr.strip().splitlines() or [f"exit {found.returncode}"]
        raise OSError(f"{command[0]}: {lines[0]}")
    return found.stdout


@cache
def why_not(name: str) -> str:
    """Say why a kernel cannot be had here; empty if it can."""
    try:
        load(name)
    except BuildError as error:
        return str(error)
    return ""


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Return fields of one kind for a structure that a kernel takes."""
    return [(name, kind) for name in names.split()]
