"""Products of bfloat16 matrices in C++: on AMX tiles, and emulated."""

import ctypes
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.ops import flash_attention, linear_attention
from attnzoo.runtime import cpp
from tests import processes

# x [M, K] and y [K, N] are floats; their product is computed from rounded numbers
SOURCE = """
#include "amx.h"
extern "C" int is_available() { return Amx::is_available(); }
extern "C" void product(const float* x, const float* y, float* words, float* out, int64_t m,
                        int64_t n, int64_t k, int64_t add) {
    const Amx amx;
    float *rows = words, *left = rows + m * k / 2, *right = left + k * n / 2;
    for (int64_t i = 0; i < m; ++i) Amx::round_row(x + i * k, k, rows + i * k / 2);
    for (int64_t i = 0; i < k; ++i) Amx::round_row(y + i * n, n, left + i * n / 2);
    for (int64_t i = 0; i < k; i += 2)
        Amx::pair_words(left + i * n / 2, left + (i + 1) * n / 2, n, right + i / 2 * n);
    if (add) Amx::product<true>(out, n, m, rows, k / 2, right, n, n, k);
    else Amx::product(out, n, m, rows, k / 2, right, n, n, k);
}
// pairs of the rows y and of those of the other functions are the same
extern "C" void pairs(const float* y, float* words, int64_t n, int64_t k) {
    using Tile = Tiles<float>;
    for (int64_t i = 0; i < k; i += 2)
        for (int64_t c = 0; c < n; c += Tile::LANES)
            Tile::store(words + i / 2 * n + c,
                        Amx::pairs(Tile::load(y + i * n + c), Tile::load(y + (i + 1) * n + c)));
}
"""
VARIANTS = {
    "this CPU": "",
    "emulated": "-DEMULATE_AMX",
    "emulated without AVX-512": "-DEMULATE_AMX -mno-avx512f",
}


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def library(request, tmp_path_factory):
    """Return the functions of the source above."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("amx")
    source, file = folder / "amx.cpp", folder / "amx.so"
    source.write_text(SOURCE)
    command = ["g++", *cpp.FLAGS, *request.param.split(), f"-I{cpp.__path__[0]}", source]
    processes.run([*command, "-o", file], check=True)
    library = ctypes.CDLL(str(file))
    if not library.is_available():
        pytest.skip("this CPU has no AMX")
    return library


def call(function, *arguments):
    converted = (
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else ctypes.c_int64(x)
        for x in arguments
    )
    function(*converted)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 32, 32), (32, 32, 64), (48, 96, 128), (80, 64, 32)])
def test_product_of_rounded_numbers(library, m, n, k, add):
    x, y = torch.randn(m, k), torch.randn(k, n)
    words = torch.full((m * k + 2 * k * n,), torch.nan)
    out = torch.randn(m, n) if add else torch.full((m, n), torch.nan)
    exact = x.bfloat16().double() @ y.bfloat16().double()
    size = x.abs().double() @ y.abs().double()
    if add:
        exact, size = exact + out, size + out.abs()
    call(library.product, x, y, words, out, m, n, k, int(add))
    assert ((out - exact).abs() / size).max() < k * 2**-24


def test_pairs_of_rows_are_rounded_as_by_torch(library):
    y = torch.randn(4, 32) * 10.0 ** torch.randint(-30, 30, (4, 32))
    y[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    y[1, :3] = torch.tensor([torch.nan, 3.4e38, -3.4e38])
    words = torch.full((2, 32), torch.nan)
    call(library.pairs, y, words, 32, 4)
    found = words.view(torch.bfloat16).view(2, 32, 2).transpose(1, 2).reshape(4, 32)
    torch.testing.assert_close(found, y.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_products_of_pytorch_are_right_beside_the_kernels():
    """PyTorch configures the tiles of a thread for its own products."""
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    a, b = torch.randn(300, 512).bfloat16(), torch.randn(512, 200).bfloat16()
    x = torch.randn(3, 1, 2, 100, 64).bfloat16().unbind()
    product, mask = a @ b, AttentionMask(causal=True)

    def run(_):
        outs = []
        for attend in (flash_attention, linear_attention):
            outs.append(attend(*x, mask=mask, impl="cpp").out)
            assert torch.equal(a @ b, product)
        return outs

    expected = run(0)
    with ThreadPoolExecutor(3) as threads:
        for outs in threads.map(run, range(12)):
            assert all(map(torch.equal, outs, expected))
