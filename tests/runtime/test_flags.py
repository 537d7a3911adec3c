"""The flags of the C++ compiler that a platform accepts."""

import platform
import sys

import pytest

from attnzoo.runtime import cpp
from attnzoo.runtime.cpp import compiler_flags


@pytest.mark.parametrize(
    ("system", "machine", "cpu"),
    [
        ("linux", "x86_64", ["-march=native"]),
        ("linux", "aarch64", ["-mcpu=native"]),
        ("darwin", "arm64", []),  # Clang before 16 refuses -march=native
        ("darwin", "x86_64", ["-march=native"]),
    ],
)
def test_the_flag_for_this_cpu(system, machine, cpu):
    assert [x for x in compiler_flags(system, machine) if x.startswith("-m")] == cpu


def test_kernels_are_compiled_with_the_flags_of_this_platform():
    assert compiler_flags(sys.platform, platform.machine()) == cpp.FLAGS
