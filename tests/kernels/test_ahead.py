"""Kernels compiled ahead of time for real GPUs, and what cannot be measured without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnzoo.kernels.configs import KERNELS, Config, Shape, config, default_config, key

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, **environment):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90"])
def test_kernels_compile_without_spills_within_a_chips_limits(arch, tmp_path):
    # a cache of its own: what an earlier run left must not stand for this one
    told = run(
        "-m", "attnzoo.kernels.ahead", "--quick", "--json", "--arch", arch,
        TRITON_CACHE_DIR=str(tmp_path),
    )  # fmt: skip
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    assert {row["kernel"] for row in rows} >= set(KERNELS) - {"sums"}, told.stderr
    assert [row for row in rows if row["wrong"]] == []
    assert told.returncode == 0
    assert {row["capability"] for row in rows} == {int(arch)}


def test_kernels_do_not_compile_where_they_are_interpreted():
    told = run("-m", "attnzoo.kernels.ahead", "--quick", "--arch", "90", TRITON_INTERPRET="1")
    assert told.returncode != 0
    assert "unset it and start again" in told.stderr


def test_tuning_needs_a_gpu(tmp_path):
    told = run("-m", "attnzoo.kernels.tune", str(tmp_path / "table.json"), CUDA_VISIBLE_DEVICES="")
    assert told.returncode != 0
    assert "torch sees none" in told.stderr
    assert not list(tmp_path.iterdir())


def test_a_table_of_ones_own_is_used(tmp_path, monkeypatch):
    shape = Shape("out", "none", "bare", 128)
    own = Config(16, 4, 3, 64)
    assert own != default_config(shape, 90)
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"configs": {key(shape, 90): list(own)}}))
    monkeypatch.setenv("ATTNZOO_KERNEL_TABLE", str(table))
    assert config(shape, 90) == own
    assert config(shape, 80) == default_config(shape, 80)  # which the table does not have
