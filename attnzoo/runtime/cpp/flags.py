"""Flags of the C++ compiler by platform."""

from __future__ import annotations

from attnzoo.runtime.cpp import prebuilt


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
