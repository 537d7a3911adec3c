"""The Triton kernels of linear attention, compiled ahead of time for sm_80 and sm_90."""

import os
import sys
from pathlib import Path

import pytest

from tests import processes
from tools.compile_triton import DECAYS, transposed_products

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.exhaustive  # `make check` compiles them for sm_90
@pytest.mark.parametrize("arch", ["80", "90"])
def test_kernels_compile_within_the_limits_of_the_gpu(arch, request):
    # Triton compiles what the cache lacks: its keys hash the sources, the options and the compiler
    cache = request.config.rootpath / ".pytest_cache" / "triton"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = processes.run(
        [sys.executable, "-m", "tools.compile_triton", "--arch", arch],
        cwd=ROOT, env=env | {"TRITON_CACHE_DIR": str(cache)}, timeout=1800,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    kernels = ("out", "query_gradient", "key_gradient", "step")
    for name, decay in ((n, d) for n in kernels for d in DECAYS):
        assert f"sm_{arch} {name}_kernel {{'D': 128, 'DECAY': '{decay}'" in process.stdout


KERNEL = """
  tt.func public @kernel(%q: !tt.ptr<bf16>) {
    %a = tt.load %q : tensor<64x64x!tt.ptr<bf16>> loc(#loc1)
    %t = tt.trans %a {order = array<i32: 1, 0>} : tensor<64x64xbf16>
    %s = tt.dot %a, %t, %a : tensor<64x64xbf16>
    %o:2 = scf.for %i = %q to %q step %q iter_args(%x = %s, %y = %a) -> (i32) {
      %s2 = arith.truncf %s : tensor<64x64xbf16>
      %m = ttg.local_alloc OPERAND : (tensor<64x64xbf16>) -> !ttg.memdesc<64x64xbf16>
      %n = ttg.memdesc_trans %m {order = array<i32: 1, 0>} : !ttg.memdesc<64x64xbf16>
      %d = ttng.warp_group_dot %a, %n, %s : tensor<64x64xf32> loc(#loc2)
      scf.yield %d, %a
    }
    scf.if %q {
      %n = tt.dot %a, %t, %s : tensor<64x64xbf16>
    }
"""


@pytest.mark.parametrize(("operand", "wrong"), [("%a", []), ("%s2", ["%n"])])
def test_a_transposed_product_as_an_operand_is_found(operand, wrong):
    assert transposed_products(KERNEL.replace("OPERAND", operand)) == wrong


def test_interpreted_kernels_do_not_compile(fresh_python):
    program = "import runpy; runpy.run_module('tools.compile_triton', run_name='__main__')"
    process = fresh_python(program, cwd=ROOT, environment={"TRITON_INTERPRET": "1"})
    assert process.returncode != 0
    assert "unset it and start again" in process.stderr
