"""Emulated kernels use the memory of this process, through structures and pointers in them."""

import ctypes

import pytest
import torch

from tests.processes import run
from tools.aarch64 import emulated

SOURCE = """
#include <stdint.h>
#include <string.h>

struct Part { float* x; int64_t size; };
struct Task { const struct Part* parts; int64_t count; float factor; };

int64_t multiply(const struct Task* task) {
    for (int64_t i = 0; i < task->count; ++i)
        for (int64_t j = 0; j < task->parts[i].size; ++j) task->parts[i].x[j] *= task->factor;
    return -task->count;
}

int64_t clear(const struct Task* task) {
    for (int64_t i = 0; i < task->count; ++i)
        memset(task->parts[i].x, 0, task->parts[i].size * sizeof *task->parts[i].x);
    return 0;
}

const char* name(void) { return "multiply"; }
"""


class Part(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("size", ctypes.c_int64)]


class Task(ctypes.Structure):
    _fields_ = [
        ("parts", ctypes.POINTER(Part)),
        ("count", ctypes.c_int64),
        ("factor", ctypes.c_float),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if emulated.missing():
        pytest.skip(emulated.missing())
    folder = tmp_path_factory.mktemp("aarch64")
    source, library = folder / "multiply.c", folder / "multiply.so"
    source.write_text(SOURCE)
    command = [emulated.C_COMPILER, "-shared", "-fPIC", source, "-o", library]
    run(command, check=True)
    opened = emulated.EmulatedLibrary(emulated.driver(folder), library)
    opened.multiply.restype, opened.name.restype = ctypes.c_int64, ctypes.c_char_p
    yield opened
    opened.close()


def task(*tensors):
    parts = (Part * len(tensors))(*(Part(x.data_ptr(), x.numel()) for x in tensors))
    return Task(parts, len(tensors), 2)


def test_a_kernel_changes_tensors_behind_structures(library):
    small, large = torch.arange(5.0), torch.arange(5000.0)  # in pages of others, and in several
    around = torch.arange(100.0)
    assert library.multiply(task(small, large, around[10:20])) == -3
    assert torch.equal(small, 2 * torch.arange(5.0))
    assert torch.equal(large, 2 * torch.arange(5000.0))
    expected = torch.arange(100.0)
    expected[10:20] *= 2
    assert torch.equal(around, expected)
    assert library.name() == b"multiply"


@pytest.mark.parametrize("first", range(4))  # on which bytes of a page are lost depends
def test_a_kernel_clears_memory_of_several_pages(library, first):
    x = torch.ones(10_000)
    library.clear(task(x[4 * first + 1 : -1]))
    assert x.sum() == 4 * first + 2


def test_memory_is_read_again_at_each_call(library):
    x = torch.ones(3)
    library.multiply(task(x))
    x += 1
    library.multiply(task(x))
    assert x.tolist() == [6, 6, 6]


def test_access_to_memory_that_is_not_mapped_is_an_error(library, capfd):
    other = emulated.EmulatedLibrary(library.driver, library.path)
    part = (Part * 1)(Part(64, 1))
    with pytest.raises(RuntimeError, match="exit status 3"):
        other.multiply(Task(part, 1, 2))
    assert "access to unmapped memory" in capfd.readouterr().err
    other.close()


def test_without_the_cross_compiler_the_reason_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"there is no .*apt-get install g.*qemu-user"):
        emulated.install(tmp_path)


def test_the_compiler_leaves_out_flags_for_this_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(emulated, "COMPILER", "echo")
    script = emulated.compiler(tmp_path, "-g")
    command = [script, "-O3", "-march=native", "a file.cpp"]
    assert run(command, check=True).stdout == "-O3 a file.cpp -g\n"
