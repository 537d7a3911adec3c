"""The vector functions of C++, compiled for this CPU, without AVX-512, and for 64-bit ARM."""

import ctypes
import shutil

import pytest
import torch

from attnzoo.runtime import cpp
from attnzoo.runtime.cpp.layout import Function, declare_functions
from attnzoo.runtime.kernel_calls import DTYPE_NUMBERS
from tests import processes
from tools.aarch64 import emulated

SOURCE = """
#include "rows.h"
#include "tiles.h"

struct Task {
    const float* x;
    float* out;
    int64_t size;

    FIELDS(x, out, size)
};

struct Rounding {
    const float* x;
    char* rounded;
    float* out;
    int64_t size, type;

    FIELDS(x, rounded, out, size, type)
};

using T = Tiles<float>;

template <class Map>
static void map(const Task* task, Map map) {
    for (int64_t i = 0; i < task->size; i += T::LANES)
        T::store(task->out + i, map(T::load(task->x + i)));
}

extern "C" void exp_of(const Task* task) { map(task, T::exp); }
extern "C" void exp2_of(const Task* task) { map(task, T::exp2); }

// The sum of each group of 16 numbers
extern "C" void sums_of(const Task* task) {
    for (int64_t i = 0; i < task->size; i += 16) {
        T::Reals sum{};
        for (int64_t j = i; j < i + 16; j += T::LANES) sum += T::load(task->x + j);
        task->out[i / 16] = T::add_lanes(sum);
    }
}

// A matrix of 32 rows, transposed
extern "C" void transpose(const Task* task) {
    T::transpose(task->x, task->size / 32, 32, task->size / 32, task->out, 32);
}

extern "C" void round_row(const Rounding* task) {
    Rows<float>::store_row(task->x, task->size, task->rounded, task->type);
    Rows<float>::load_row(task->rounded, task->type, task->size, task->size, 1, task->out);
}

CALLED_FROM_PYTHON(exp_of, exp2_of, sums_of, transpose, round_row)
"""


class Task(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("out", ctypes.c_void_p), ("size", ctypes.c_int64)]


class Rounding(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "rounded", "out")),
        *((name, ctypes.c_int64) for name in ("size", "type")),
    ]


MAPS = ("exp_of", "exp2_of", "sums_of", "transpose")
FUNCTIONS = {**dict.fromkeys(MAPS, Function((Task,))), "round_row": Function((Rounding,))}
ARM = "64-bit ARM, emulated"
FLAGS = {"this CPU": (), "without AVX-512": ("-mno-avx512f",), ARM: ()}


@pytest.fixture(scope="module", params=FLAGS)
def library(request, tmp_path_factory):
    """Return a library of the functions of ``SOURCE``."""
    folder, name = tmp_path_factory.mktemp("tiles"), request.param
    source, library = folder / "tiles.cpp", folder / "tiles.so"
    source.write_text(SOURCE)
    if name == ARM and emulated.missing():
        pytest.skip(emulated.missing())
    compiler = emulated.compiler(folder) if name == ARM else "g++"
    if shutil.which(compiler) is None:
        pytest.skip("g++ is not installed")
    headers = cpp.__path__[0]
    command = [compiler, *cpp.FLAGS, *FLAGS[name], f"-I{headers}", source, "-o", library]
    processes.run(command, check=True)
    if name == ARM:
        opened = emulated.EmulatedLibrary(emulated.driver(folder), library)
    else:
        opened = ctypes.CDLL(str(library))
    declare_functions(opened, FUNCTIONS, source.name)
    yield opened
    if name == ARM:
        opened.close()


def call(library, name, x, out=None):
    out = torch.empty_like(x) if out is None else out
    getattr(library, name)(Task(x.data_ptr(), out.data_ptr(), x.numel()))
    return out


@pytest.mark.parametrize(
    ("name", "low", "high", "budget"), [("exp", -87, 88, 2**-23), ("exp2", -126, 126, 2.2e-7)]
)
def test_an_exponential_equals_float64(library, name, low, high, budget):
    x = torch.linspace(low, high, 1 << 20)
    expected = getattr(x.double(), name)()
    error = (call(library, f"{name}_of", x).double() - expected).abs() / expected
    assert error.max() < budget


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("exp", 0, torch.tensor(88.0).exp().item()), ("exp2", 2**-126, 2**126)],
)
def test_exponentials_outside_of_the_range_of_float32(library, name, low, high):
    payload = torch.tensor([0x7FC12345, -0x3FFFF1], dtype=torch.int32).view(torch.float32)
    x = torch.tensor([-torch.inf, -1e30, -200, -126.5, 126.5, 1e30, torch.inf, torch.nan])
    x = torch.cat([x, payload, x[:6]])
    expected = torch.tensor([low] * 4 + [high] * 3 + [torch.nan] * 3 + [low] * 4 + [high] * 2)
    out = call(library, f"{name}_of", x)
    torch.testing.assert_close(out, expected, rtol=2**-23, atol=0, equal_nan=True)


def test_sums_of_lanes(library):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    sums = call(library, "sums_of", x, torch.empty(64))
    torch.testing.assert_close(sums.double(), x.double().sum(1), rtol=0, atol=4e-6)


def test_transpose(library):
    x = torch.arange(32 * 48.0).view(32, 48)
    assert torch.equal(call(library, "transpose", x).view(48, 32), x.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 19, 1 << 12])  # one number, vectors and a rest
def test_rows_of_16_bits_are_rounded_as_by_torch(library, dtype, size):
    bits = torch.randint(-(2**31), 2**31 - 1, (size,), generator=torch.Generator().manual_seed(0))
    x = bits.int().view(torch.float32)  # subnormal numbers, infinities and NaN too
    special = [1 + 2**-9, 1 + 3 * 2**-9, 65519.0, 65520.0, 2**-24, 2**-25, 3e-8, -0.0, torch.inf]
    x = torch.cat([torch.tensor(special), x, torch.randn(size)])
    rounded, out = torch.empty(len(x), dtype=dtype), torch.empty_like(x)
    addresses = (y.data_ptr() for y in (x, rounded, out))
    library.round_row(Rounding(*addresses, len(x), DTYPE_NUMBERS[dtype]))
    expected = x.to(dtype)
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out, expected.float(), rtol=0, atol=0, equal_nan=True)
