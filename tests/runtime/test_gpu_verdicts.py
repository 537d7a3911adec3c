"""impl="auto" selects attnzoo's own kernels only where doctor has found them right and fastest."""

import re
from types import SimpleNamespace

import pytest
import torch

from attnzoo.ops import linear_attention
from attnzoo.runtime import compilers, gpu_verdicts
from attnzoo.runtime.cache_folder import CACHE
from attnzoo.runtime.gpu_verdicts import KernelVerdict, store_verdicts, stored_verdicts
from tests.helpers import change_implementation
from tests.kernel_device import kernel_device

DEVICE = kernel_device()
X = torch.randn(1, 1, 20, 8, device=DEVICE)
GATES = -torch.rand(1, 1, 20, device=DEVICE)
CASE = "linear attention, decay none"
GPU = {"device": "NVIDIA Test", "driver": "580.1"}


@pytest.fixture(autouse=True)
def identity(monkeypatch, tmp_path):
    """This device is a GPU without verdicts, whose identity is the value."""
    found = dict(GPU)
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_verdicts, "identity", lambda device: found)
    for op in ("linear_attention", "linear_step"):
        change_implementation(monkeypatch, op, "triton", devices=(DEVICE.type,))
        change_implementation(monkeypatch, op, "cpp", automatic="")
    stored_verdicts.cache_clear()
    yield found
    stored_verdicts.cache_clear()


def attend(**options):
    """Return the implementation of a call, and why."""
    return linear_attention(X, X, X, **options).impl


def test_without_a_verdict_the_next_implementation_runs_and_describe_says_why():
    found = attend()
    assert found.impl == "torch"
    assert (
        "triton is skipped: `attnzoo doctor` has not found them right and fast on" in found.reason
    )
    assert attend(impl="triton").impl == "triton"


@pytest.mark.parametrize(
    ("rows", "impl", "reason"),
    [
        ([("triton", "", "", 2.0), ("fla", "", "", 3.0)], "triton", "right and fastest on NVIDIA"),
        ([("triton", "", "", 2.0), ("fla", "", "", 1.5)], "torch", r"2 ms on .* \(fla 1.5 ms\)"),
        ([("triton", "", "", 2.0), ("fla", "dq is wrong", "", 1.5)], "triton", "fastest"),
        ([("triton", "dv differs", "", None)], "torch", "wrong on NVIDIA Test .dv differs"),
        ([("triton", "", "no memory", None)], "torch", "has not found them"),
        ([("triton", "", "", None)], "torch", "has not found them"),
        ([("fla", "", "", 1.0)], "torch", "has not found them"),
    ],
)
def test_own_kernels_are_selected_where_they_are_right_and_fastest(rows, impl, reason):
    store_verdicts(DEVICE, [KernelVerdict(CASE, *row) for row in rows])
    found = attend()
    assert found.impl == impl
    assert re.search(reason, found.reason)
    assert attend(log_decay=GATES).impl == "torch"  # a kind of calls of its own
    assert attend(normalize=True).impl == "torch"


def test_describe_shows_a_caution_about_the_compiler(monkeypatch):
    store_verdicts(DEVICE, [KernelVerdict(CASE, "triton", ms=1.0)])
    monkeypatch.setattr(gpu_verdicts, "assembler", lambda device: "ptxas")
    monkeypatch.setattr(gpu_verdicts, "gpu_capability", lambda device: (9, 0))
    monkeypatch.setattr(compilers, "ptxas_version", lambda major: "12.8.93")
    assert "(1 ms); other kernels report that ptxas 12.8.93" in attend().reason


def test_a_verdict_holds_for_one_identity(identity):
    store_verdicts(DEVICE, [KernelVerdict(CASE, "triton", ms=1.0)])
    assert attend().impl == "triton"
    stored_verdicts.cache_clear()
    identity["driver"] = "580.2"
    assert attend().impl == "torch"


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"identity": {}, "rows": []}'])
def test_a_damaged_file_is_no_verdict(damage, tmp_path):
    store_verdicts(DEVICE, [KernelVerdict(CASE, "triton", ms=1.0)])
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text(damage)
    stored_verdicts.cache_clear()
    assert attend().impl == "torch"


def test_torch_compile_reads_a_verdict_while_it_traces():
    store_verdicts(DEVICE, [KernelVerdict(CASE, "triton", ms=1.0)])
    found = []

    def call(x):
        output = linear_attention(x, x, x)
        found.append(output.impl.impl)
        return output.out

    torch._dynamo.reset()
    torch.compile(call, backend="eager", fullgraph=False)(X)
    assert found == ["triton"]


def test_the_identity_has_the_versions_of_all_that_kernels_are_made_from(monkeypatch):
    monkeypatch.undo()
    properties = SimpleNamespace(name="NVIDIA Test", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(gpu_verdicts, "driver_version", lambda: "580.1")
    found = gpu_verdicts._identity(torch.device("cuda", 7), "ptxas")
    assert found["ptxas"].count(".") == 2
    assert (found["device"], found["capability"]) == ("NVIDIA Test", "9.0")
    assert {"attnzoo", "torch", "triton", "driver", "fla-core"} < set(found)
