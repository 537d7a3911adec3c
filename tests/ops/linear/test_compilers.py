"""Refused versions of Triton and ptxas, and the configs that defects exclude."""

import re
from types import SimpleNamespace

import pytest
import torch
import triton

from attnzoo.ops import linear_attention
from attnzoo.ops.linear.triton import configs
from attnzoo.ops.linear.triton import run as triton_impl
from attnzoo.runtime import compilers
from tests.kernel_device import kernel_device


@pytest.fixture
def ptxas(monkeypatch):
    """Return a function that replaces the version of ptxas."""

    def replace(version):
        monkeypatch.setattr(compilers, "ptxas_version", lambda major: version)

    return replace


@pytest.mark.parametrize(
    ("installed", "version", "major", "match"),
    [
        ("3.5.1", "13.4.92", 9, "3.6 or later"),
        ("3.6.0", "13.0.88", 9, r"on Hopper \(point TRITON_PTXAS_PATH at ptxas 13\.3 or later"),
        ("3.9.0", "13.0.88", 9, r"on Hopper \(point TRITON_PTXAS_BLACKWELL_PATH at ptxas 13\.3"),
        ("3.6.0", "13.0.88", 8, None),
        ("3.6.0", "12.8.93", 9, None),
        ("3.10.0+git1", "13.4.92", 9, None),
    ],
)
def test_defective_compilers_are_refused(installed, version, major, match, monkeypatch, ptxas):
    ptxas(version)
    monkeypatch.setattr(compilers, "triton_version", lambda: compilers._numbers(installed))
    monkeypatch.setattr("triton.__version__", installed)
    reasons = compilers.compiler_reasons(major)
    if match is None:
        assert reasons == []
    else:
        assert len(reasons) == 1
        assert re.search(match, reasons[0])


@pytest.mark.parametrize(
    ("version", "major", "match"),
    [
        ("12.8.93", 9, "wrong gradients"),
        ("12.9.86", 9, "operands of products"),
        ("13.1.80", 9, "operands of products"),
        ("13.3.33", 9, None),
        ("13.10.1", 9, None),
        ("12.8.93", 8, None),
        ("12.8.93", 10, None),
    ],
)
def test_cautions_name_a_version_without_known_defects(version, major, match, ptxas):
    ptxas(version)
    caution = compilers.compiler_caution(major)
    assert (match in caution and "13.3 or later" in caution) if match else caution == ""


@pytest.mark.parametrize("version", [(3, 5, 1), (3, 6, 0), (3, 7, 1), (3, 8, 0), (3, 8, 1)])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_pairs_of_tile_and_warps_that_triton_compiles_wrongly_are_not_tuned(
    version, capability, monkeypatch
):
    monkeypatch.setattr(compilers, "triton_version", lambda: version)
    gpu = SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=capability))
    monkeypatch.setattr(triton.runtime.driver, "_active", gpu)
    affected = capability == 90 and (3, 6, 0) <= version <= (3, 8, 0)
    given = [triton.Config({"C": 64}, num_warps=warps) for warps in (4, 8)]
    for tile, warps in ((32, [8] if affected else [4, 8]), (64, [4, 8])):
        found = configs.usable(given, {}, BU=tile, BX=128, OPERAND=triton.language.bfloat16)
        assert [x.num_warps for x in found] == warps


@pytest.mark.parametrize(
    ("dtype", "size", "largest"),
    [("bfloat16", 64, 64), ("bfloat16", 256, 32), ("float32", 128, 32), ("float32", 256, 16)],
)
def test_chunks_that_take_minutes_to_compile_are_not_tuned(dtype, size, largest, monkeypatch):
    gpu = SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=90))
    monkeypatch.setattr(triton.runtime.driver, "_active", gpu)
    given = [triton.Config({"C": chunk}, num_warps=8) for chunk in (16, 32, 64)]
    operand = getattr(triton.language, dtype)
    found = configs.usable(given, {}, BU=64, BX=size, OPERAND=operand)
    assert max(x.kwargs["C"] for x in found) == largest


@pytest.mark.parametrize(
    ("inner", "outer", "wide", "tile"),
    [(64, 64, False, 64), (128, 100, False, 64), (256, 256, False, 32), (256, 8, True, 16)],
)
def test_tiles_of_a_state_fit_into_registers(inner, outer, wide, tile):
    assert configs.tile_columns(inner, outer, wide=wide) == tile


@pytest.mark.parametrize("major", [8, 9, 10])
def test_ptxas_version_follows_the_environment(major, tmp_path, monkeypatch):
    """Of the installed Triton: another variable than that of the advice changes nothing."""
    shipped = compilers.ptxas_version(major)
    assert shipped.count(".") == 2
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.1, V99.1.5'\n")
    other.chmod(0o700)
    read = compilers.ptxas_variable(major)
    for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.setenv(variable, str(other))  # as torch.compile does with the first
        assert (compilers.ptxas_version(major) == "99.1.5") == (variable == read)
        monkeypatch.delenv(variable)
        assert compilers.ptxas_version(major) == shipped


def test_the_version_is_read_again_when_the_assembler_changes(monkeypatch):
    monkeypatch.setattr("attnzoo.runtime.triton_interpreter.interpreted", lambda: False)
    monkeypatch.setattr(triton_impl, "_DEVICE_REASONS", {})
    monkeypatch.setattr(compilers, "gpu_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_impl, "gpu_capability", lambda device: (9, 0))
    gpu = torch.device("cuda", 0)
    for version, refused in (("13.4.92", False), ("13.0.88", True), ("13.4.92", False)):
        monkeypatch.setattr(compilers, "ptxas_path", lambda major, version=version: version)
        monkeypatch.setattr(compilers, "ptxas_version", lambda major, version=version: version)
        assert bool(triton_impl.device_reasons(gpu)) == refused


def test_a_missing_ptxas_is_a_reason(monkeypatch):
    def missing(major):
        raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(compilers, "ptxas_path", missing)
    (reason,) = compilers.compiler_reasons(9)
    assert f"Cannot find ptxas; set {compilers.ptxas_variable(9)}" in reason


def test_offsets_between_grouped_heads_exceed_32_bits():
    stride = 2**27  # of query heads; a CPU does not allocate memory that is not written
    storage = torch.empty(17 * stride, dtype=torch.bfloat16, device=kernel_device())
    strided = storage.as_strided((1, 17, 16, 16), (0, stride, 16, 1))
    contiguous, k = torch.randn(1, 17, 16, 16).to(strided), torch.randn(1, 1, 16, 16).to(strided)
    strided.copy_(contiguous)
    outs = [linear_attention(x, k, k, impl="triton").out for x in (strided, contiguous)]
    assert torch.equal(*outs)
