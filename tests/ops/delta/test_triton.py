"""The delta rule on the Triton kernels, against the recurrence in float64.

They run on a GPU if there is one, else interpreted on the CPU.
"""

from dataclasses import replace

import pytest
import torch

from attnzoo.contract.config import Geometry
from attnzoo.contract.states import DeltaState
from attnzoo.errors import UnsupportedError
from attnzoo.ops.delta.api import delta_attention
from attnzoo.ops.delta.triton import check as check_triton
from attnzoo.ops.delta.triton import custom_op
from attnzoo.ops.delta.triton import run as module
from attnzoo.ops.delta.triton.check import DeltaCase, Inputs, results, wrong_results
from attnzoo.ops.delta.triton.custom_op import delta_triton
from attnzoo.ops.delta.triton.step import delta_triton_step, delta_triton_step_
from attnzoo.registry import build_backend
from tests.helpers import change_implementation, check_operator
from tests.kernel_device import kernel_device
from tests.ops.delta.ragged import each_alone, make_sequences, nan_outside, outside, row_length

DEVICE = kernel_device()
DECAYS = ("none", "scalar", "vector")
SMALL = DeltaCase(decay="none", d=12, e=24, B=1, Hkv=1, T=37, dtype=torch.float32, largest_beta=2.0)


@pytest.mark.parametrize("decay", DECAYS)
def test_sequences_match_reference_in_float64(decay):
    """Outputs, states and all gradients; some log decays are minus infinity."""
    case = replace(SMALL, decay=decay, groups=2, ragged=True, strong_gates=True)
    assert list(wrong_results(replace(case, T=70), DEVICE)) == []


def test_sequences_equal_each_alone():
    """Without states before and after; other tokens are NaN, and their results zeros."""
    sequences = make_sequences([0, 1, 32, 0, 33, 0], DEVICE)  # around chunks
    x = Inputs(replace(SMALL, decay="scalar", T=row_length(sequences), groups=2), DEVICE)
    inputs = [x.tensors[i] for i in (0, 1, 2, 3, 5)]
    inputs = [nan_outside(y, sequences) for y in inputs]
    leaves = [None if y is None else y.requires_grad_() for y in inputs]
    given = [y for y in leaves if y is not None]

    def run(*args, sequences=None):
        *args, log_decay, _ = args
        options = {"log_decay": log_decay, "impl": "triton", "sequences": sequences}
        return delta_attention(*args, **options).out, x.tensors[0].new_zeros(1)

    weights, found = x.weights[0], []
    alone, _ = each_alone(run, leaves, None, sequences)
    ours, _ = run(*leaves, None, sequences=sequences)
    for out in (ours, alone):
        found.append((out, *torch.autograd.grad((out * weights).sum(), given)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    nowhere = outside(sequences, ours.shape[2])
    assert not any(y[:, :, nowhere].any() for y in found[0])


@pytest.mark.parametrize("decay", DECAYS)
def test_one_token_matches_reference_in_float64(decay):
    for dtype in (torch.float32, torch.bfloat16):
        case = replace(SMALL, decay=decay, T=1, groups=2, B=3, Hkv=2, dtype=dtype)
        for ragged in (False, True):
            assert list(wrong_results(replace(case, ragged=ragged), DEVICE)) == []


@pytest.mark.parametrize("slots", [None, [2, -1, 0]], ids=["rows", "slots"])
def test_a_step_may_overwrite_the_state(slots):
    x = Inputs(replace(SMALL, T=1, B=3, decay="scalar"), DEVICE)
    q, k, v, beta, kv, log_decay = x.tensors
    slots = None if slots is None else torch.tensor(slots, device=DEVICE)
    options = {"log_decay": log_decay, "impl": "triton", "return_state": True, "slots": slots}
    pool, before = DeltaState(kv.contiguous()), kv.clone()
    with torch.no_grad():
        exact = delta_attention(q, k, v, beta, state=pool, **options)
        assert torch.equal(pool.kv, before)
        found = delta_attention(q, k, v, beta, state=pool, reuse_state=True, **options)
    assert torch.equal(found.out, exact.out)
    assert torch.equal(pool.kv, exact.state.kv)
    assert found.state.kv.data_ptr() == pool.kv.data_ptr()
    if slots is not None:
        assert torch.equal(pool.kv[1], before[1])
        assert not torch.equal(pool.kv[0], before[0])


def test_a_small_scale_does_not_overflow_float16():
    case = replace(SMALL, dtype=torch.float16, scale=1e-4, T=20)
    assert list(wrong_results(case, DEVICE)) == []


def test_the_gradient_of_write_strengths_is_summed_in_float32():
    """Values in bfloat16 have mean 1; products of rounded factors would exceed this budget."""
    case = DeltaCase(decay="none", d=64, e=64, B=1, Hkv=1, T=70, mean=1.0)
    x = Inputs(case, DEVICE)
    exact = results(x, "reference", torch.float64)["d_beta"]
    plain, ours = (results(x, impl)["d_beta"] - exact for impl in ("torch", "triton"))
    assert ours.norm() <= 2 * plain.norm()
    assert ours.norm() <= 5e-3 * exact.norm()


def test_gradients_of_one_token_match_reference_in_float64():
    torch.manual_seed(0)
    x = [torch.randn(1, 1, 1, 16, dtype=torch.float64) for _ in range(3)]
    leaves = [*x, torch.rand(1, 1, 1, dtype=torch.float64)]
    found = {}
    for impl, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        args = [y.to(DEVICE, dtype).requires_grad_() for y in leaves]
        found[impl] = torch.autograd.grad(delta_attention(*args, impl=impl).out.sum(), args)
    for ours, exact in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


CASES = [(decay, kind) for decay in DECAYS for kind in check_triton.KINDS]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("decay", "kind"), CASES)
def test_the_kernels_pass_their_check(decay, kind):
    for case in check_triton.cases(decay, 64, kind, small=DEVICE.type != "cuda"):
        assert list(wrong_results(case, DEVICE)) == []


@pytest.mark.parametrize(
    ("function", "result", "broken"),
    [
        ("errors", 1, {"out", "state", "d_q"}),
        ("transposed_errors", 0, {"d_beta"}),
        ("transposed_errors", 1, {"d_v", "d_k"}),
    ],
)
def test_a_broken_kernel_fails_the_check(function, result, broken, monkeypatch):
    run = getattr(custom_op.DeltaLauncher, function)

    def scaled(self, *args):
        results = list(run(self, *args))
        results[result] = results[result] * 1.1
        return tuple(results)

    monkeypatch.setattr(custom_op.DeltaLauncher, function, scaled)
    wrong = {text.split()[0] for text in wrong_results(replace(SMALL, T=33), DEVICE)}
    assert broken <= wrong
    assert function == "errors" or "out" not in wrong


def test_operators_pass_opcheck():
    rows = [torch.randn(1, heads, 2, 16).to(DEVICE).requires_grad_() for heads in (2, 1, 1)]
    beta, gates = torch.rand(1, 1, 2).to(DEVICE), -torch.rand(1, 1, 2).to(DEVICE)
    state = torch.randn(1, 1, 16, 16).to(DEVICE)
    check_operator(delta_triton, (*rows, beta, gates, state, None, None, 0.5, True), trace=True)
    bounds = torch.tensor([0, 1], device=DEVICE), torch.tensor([1, 1], device=DEVICE)
    check_operator(delta_triton, (*rows, beta, gates, None, *bounds, 0.5, False), trace=False)
    first = [x[:, :, :1].detach() for x in (*rows, beta, gates)]
    check_operator(delta_triton_step, (*first, state, None, 0.5), trace=False)
    slots = torch.zeros(1, dtype=torch.long, device=DEVICE)
    check_operator(delta_triton_step_, (*first, state.clone(), slots, 0.5), trace=True)


def test_auto_selects_the_kernels_only_if_they_passed_a_check(monkeypatch):
    verdicts = {"delta": ("not checked", "")}
    monkeypatch.setattr(module, "kernel_verdict", lambda op, *_: verdicts[op])
    change_implementation(monkeypatch, "delta_attention", "triton", devices=(DEVICE.type,))
    change_implementation(monkeypatch, "delta_attention", "cpp", automatic="")
    x = torch.randn(1, 1, 3, 16, device=DEVICE)
    call = (x, x, x, torch.rand(1, 1, 3, device=DEVICE))
    assert delta_attention(*call).impl.impl == "torch"
    verdicts["delta"] = "", "checked on this device"
    choice = delta_attention(*call).impl
    assert choice.impl == "triton"
    assert "checked on this device" in choice.reason


def test_unsupported_calls_raise():
    x = torch.randn(1, 1, 3, 16, device=DEVICE)
    call = (x, x, x, torch.rand(1, 1, 3, device=DEVICE))
    with pytest.raises(UnsupportedError, match="chunk_size is 32"):
        delta_attention(*call, chunk_size=32, impl="triton")
    with pytest.raises(UnsupportedError, match="input is float64"):
        delta_attention(*(y.double() for y in call), impl="triton")
    assert not delta_attention(*call, scale=0.0, impl="triton").out.any()
    with pytest.raises(UnsupportedError, match="scale other than 0"):
        delta_attention(x.clone().requires_grad_(), *call[1:], scale=0.0, impl="triton")


def test_a_window_is_refused():
    geometry = Geometry(num_heads=2, num_key_heads=2, head_dim=16, hidden_size=32, causal=True)
    with pytest.raises(UnsupportedError, match=r"impl='triton' does not support a window"):
        build_backend("delta", {"impl": "triton", "window": 4}, geometry)
    build_backend("delta", {"impl": "triton"}, geometry)
