"""The vector functions of C++, compiled for this CPU and without AVX-512."""

import ctypes
import shutil

import pytest
import torch

from attnzoo.runtime import cpp
from tests import processes

SOURCE = """
#include "tiles.h"
extern "C" void run(const float* x, float* out, int64_t size) {
    using T = Tiles<float>;
    for (int64_t i = 0; i < size; i += T::LANES) T::store(out + i, T::exp(T::load(x + i)));
}
"""


@pytest.fixture(scope="module", params=["", "-mno-avx512f"], ids=["this CPU", "without AVX-512"])
def exp(request, tmp_path_factory):
    """Return the function ``exp`` of C++ on a float32 tensor."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("tiles")
    source, library = folder / "exp.cpp", folder / "exp.so"
    source.write_text(SOURCE)
    headers = cpp.__path__[0]
    command = ["g++", *cpp.FLAGS, *request.param.split(), f"-I{headers}", source, "-o", library]
    processes.run(command, check=True)
    run = ctypes.CDLL(str(library)).run

    def function(x):
        out = torch.empty_like(x)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, out))
        run(*pointers, ctypes.c_int64(len(x)))
        return out

    return function


def test_exp_equals_float64(exp):
    x = torch.linspace(-87, 88, 1 << 20)
    expected = x.double().exp()
    assert ((exp(x).double() - expected).abs() / expected).max() < 2**-23


def test_exp_outside_of_the_range_of_float32(exp):
    x = torch.tensor([-torch.inf, -1e30, -200, -87.5, 89, 1e30, torch.inf, torch.nan]).repeat(2)
    largest = torch.tensor(88.0).exp().item()
    expected = torch.tensor([0, 0, 0, 0, largest, largest, largest, torch.nan]).repeat(2)
    torch.testing.assert_close(exp(x), expected, rtol=2**-23, atol=0, equal_nan=True)
