"""Compile the C++ kernels ahead, for each level of CPUs of a machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attnzoo.runtime.cpp import HEADERS, prebuilt, read_code

COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}  # Debian names them so
GLIBC = Path(__file__).with_name("glibc.h")
FLAGS = (*prebuilt.FLAGS, "-Wl,--strip-all", "-include", str(GLIBC), f"-I{HEADERS}")


def compiler_of(machine: str) -> str:
    """Return the compiler for a machine, a value of ``platform.machine()``.

    Raises:
        SystemExit: It is not installed.
    """
    compiler = COMPILERS[machine]
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"wheels for {machine} need {compiler}; on Debian, install g++-{machine}-linux-gnu"
        )
    return compiler


def kernel_sources() -> list[Path]:
    """Return all C++ files of the package."""
    return sorted(prebuilt.PACKAGE.glob("ops/*/cpu/*.cpp"))


def compile_kernels(machine: str, folder: Path) -> list[Path]:
    """Compile all kernels for each level of a machine, on all cores, and return the libraries.

    Args:
        machine: A value of ``platform.machine()``.
        folder: Where the libraries are written.
    """
    compiler = compiler_of(machine)
    levels = [level for level in prebuilt.LEVELS if level.machine == machine]
    pairs = [(source, level) for source in kernel_sources() for level in levels]

    def build(pair: tuple[Path, prebuilt.Level]) -> Path:
        source, level = pair
        library = folder / prebuilt.file_name(source, read_code(source), level)
        command = (compiler, *level.flags, *FLAGS, str(source), "-o", str(library))
        subprocess.run(command, check=True)
        return library

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(build, pairs))
