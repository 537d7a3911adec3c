"""Kernels compiled ahead of time for sm_80 and sm_90, tuning without a GPU, and config tables."""

import json
import os
import sys
from pathlib import Path

import pytest

from attnzoo.ops.linear.triton.configs import (
    KERNELS,
    Config,
    Shape,
    config,
    default_config,
    key,
)
from tests import processes
from tools.triton_configs.machine_code import transposed_products

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, **environment):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return processes.run([sys.executable, *arguments], cwd=ROOT, env=env, timeout=1800)


@pytest.mark.exhaustive  # `make check` compiles them for sm_90
@pytest.mark.parametrize("arch", ["80", "90"])
def test_kernels_compile_within_the_limits_of_the_gpu(arch, request):
    # Triton compiles what the cache lacks: its keys hash the sources, the options and the compiler
    cache = request.config.rootpath / ".pytest_cache" / "triton"
    process = run(
        "-m", "tools.triton_configs.compile_aot", "--quick", "--json", "--arch", arch,
        "--count", "out",
        TRITON_CACHE_DIR=str(cache),
    )  # fmt: skip
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    assert {row["kernel"] for row in rows} >= set(KERNELS), process.stderr
    assert [row for row in rows if row["violations"]] == []
    assert process.returncode == 0
    assert {row["capability"] for row in rows} == {int(arch)}
    cycles = {row["kernel"]: row["issue_cycles_per_token"] for row in rows}
    assert [name for name, count in cycles.items() if count] == ["out"]


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


def run_module(fresh_python, module, *arguments, **environment):
    program = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return fresh_python(program, *arguments, cwd=ROOT, environment=environment)


def test_interpreted_kernels_do_not_compile(fresh_python):
    module = "tools.triton_configs.compile_aot"
    process = run_module(fresh_python, module, "--quick", "--arch", 90, TRITON_INTERPRET="1")
    assert process.returncode != 0
    assert "unset it and start again" in process.stderr


def test_tuning_needs_a_gpu(tmp_path, fresh_python):
    module, table = "tools.triton_configs.tune", tmp_path / "table.json"
    process = run_module(fresh_python, module, table, CUDA_VISIBLE_DEVICES="")
    assert process.returncode != 0
    assert "torch sees none" in process.stderr
    assert not list(tmp_path.iterdir())


def test_kernel_table_overrides_shipped_configs(tmp_path, monkeypatch):
    shape = Shape("out", "none", "bare", 128)
    custom = Config(16, 4, 3, 64)
    assert custom != default_config(shape, 90)
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"configs": {key(shape, 90): list(custom)}}))
    monkeypatch.setenv("ATTNZOO_KERNEL_TABLE", str(table))
    assert config(shape, 90) == custom
    assert config(shape, 80) == default_config(shape, 80)  # not in the table
