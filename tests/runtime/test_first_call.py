"""Kernels of other projects are compared with torch once a process, outside of all contexts."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from attnzoo.contract import implementation as registry
from attnzoo.contract.implementation import Implementation, register_implementation, select
from attnzoo.runtime import first_call
from attnzoo.runtime.first_call import BUDGET, differences, first_call_verdict

CPU = torch.device("cpu")
PASSED = ("", "compared with torch on cpu")


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch):
    monkeypatch.setattr(first_call, "_FOUND", {})


def test_a_kind_of_calls_is_compared_once_a_device():
    calls = []

    def compare():
        calls.append(1)
        return []

    for kind in ("decay", "decay", "none", "decay"):
        assert first_call_verdict("kernels", kind, CPU, compare) == PASSED
    assert len(calls) == 2


@pytest.mark.parametrize("raises", [False, True])
def test_kernels_that_differ_or_fail_are_not_selected(raises):
    def compare():
        if raises:
            raise RuntimeError("no kernel image\nis available")
        return ["out differs", "d_k differs"]

    found = "RuntimeError: no kernel image" if raises else "out differs; d_k differs"
    reason = f"they are wrong on cpu ({found})"
    with pytest.warns(UserWarning, match="impl='auto' does not select kernels: they are wrong"):
        assert first_call_verdict("kernels", 0, CPU, compare) == (reason, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        assert first_call_verdict("kernels", 0, CPU, compare) == (reason, "")


def test_a_comparison_that_had_no_memory_is_repeated():
    def full():
        raise torch.OutOfMemoryError

    assert first_call_verdict("kernels", 0, CPU, full)[0].startswith("there was no memory")
    assert first_call_verdict("kernels", 0, CPU, list) == PASSED


def test_nothing_is_compared_under_torch_func():
    def call(x):
        assert first_call_verdict("kernels", 0, CPU, list)[0].endswith("outside of torch.func")
        return x

    torch.vmap(call)(torch.ones(2))
    assert first_call_verdict("kernels", 0, CPU, list) == PASSED


def compare_with_numbers():
    x = torch.tensor([3.0, -2.0], requires_grad=True)
    (grad,) = torch.autograd.grad((x**2).sum(), x)
    return [] if grad.tolist() == [6.0, -4.0] and (x @ x).dtype == torch.float32 else ["x"]


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, FakeTensorMode, lambda: torch.autocast("cpu")],
    ids=["no_grad", "inference", "fake", "autocast"],
)
def test_contexts_of_the_first_call_do_not_reach_the_comparison(context):
    with context():
        assert first_call_verdict("kernels", 0, CPU, compare_with_numbers) == PASSED


def test_a_checkpointed_layer_may_make_the_first_call():
    def layer(x):
        assert first_call_verdict("kernels", 0, CPU, compare_with_numbers) == PASSED
        return (x * x).exp()

    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.ones(3).exp())


def test_the_first_call_may_be_compiled():
    @torch.compile(fullgraph=True, backend="eager")
    def layer(x):
        refusal, status = verdict()
        return x * 2 if not refusal and status else x

    @torch.compiler.assume_constant_result
    def verdict():
        return first_call_verdict("kernels", 0, CPU, compare_with_numbers)

    assert layer(torch.ones(1)).item() == 2


def test_errors_are_parts_of_the_norm_and_nan_is_one():
    exact = {"out": torch.tensor([30.0, 40.0], dtype=torch.float64), "d_q": torch.ones(1)}
    ulp = BUDGET * 50
    near = {"out": torch.tensor([30.0, 40.0 + 0.99 * ulp]), "d_q": torch.ones(1)}
    assert differences(near, exact) == []
    far = {"out": torch.tensor([30.0, 40.0 + 1.01 * ulp]), "d_q": torch.tensor([torch.nan])}
    assert differences(far, exact) == [
        "out differs from float64 by 1.5, and its norm is 50",
        "d_q differs from float64 by nan, and its norm is 1",
    ]
    assert differences({"state": torch.zeros(2)}, {"state": torch.full((2,), 1e-60).double()}) == []


def test_auto_takes_own_kernels_then_those_of_others_then_torch(monkeypatch):
    monkeypatch.setattr(registry, "_NAMED", {})
    monkeypatch.setattr(registry, "_AUTOMATIC", {})
    own = "they are not checked yet"
    register_implementation(
        Implementation(op="op", run=None, **registry.TORCH),
        Implementation(
            op="op",
            name="fla",
            devices=("cuda",),
            run=None,
            automatic="flash-linear-attention is installed",
            verdict=lambda call: first_call_verdict("fla", 0, CPU, lambda: wrong),
        ),
        Implementation(op="op", run=None, verdict=lambda call: (own, ""), **registry.TRITON),
    )
    call = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda")))
    wrong = []
    assert select("op", call)[1] == (
        "fla",
        "flash-linear-attention is installed; compared with torch on cpu; triton is skipped: "
        "they are not checked yet",
    )
    own = ""
    assert select("op", call)[1].impl == "triton"
    own = "they failed their check"
    first_call._FOUND.clear()
    wrong = ["out differs"]
    with pytest.warns(UserWarning, match="out differs"):
        assert select("op", call)[1] == (
            "torch",
            "runs on every device; triton is skipped: they failed their check; fla is skipped: "
            "they are wrong on cpu (out differs)",
        )
