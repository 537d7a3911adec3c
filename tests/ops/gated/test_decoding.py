"""Decoded tokens of mLSTM and RWKV-6 in C++ and Triton, against the reference in float64."""

import operator

import pytest
import torch
from torch.testing import assert_close

import attnzoo
from attnzoo.contract.states import LinearState, StabilizedState
from attnzoo.ops.gated import common
from attnzoo.ops.gated.mlstm import mlstm_attention
from attnzoo.ops.gated.rwkv6 import rwkv6_attention
from attnzoo.ops.linear.cpu.linear_step import LINEAR_STEP
from attnzoo.runtime import cpp
from tests.helpers import change_implementation
from tests.kernel_device import kernel_device

DEVICE = kernel_device()
B, H, HKV, D, E = 2, 4, 2, 20, 18
CPP = pytest.param("cpp", marks=pytest.mark.skipif(bool(cpp.unavailable_reason(LINEAR_STEP)),
                   reason="no C++ compiler"))  # fmt: skip


def mlstm(x, **options):
    gates = {"log_forget": -x["gate"][..., 0], "log_input": 9 * x["input_gate"]}
    return mlstm_attention(x["q"], x["k"], x["v"], **gates, **options)


def rwkv6(x, **options):
    gates = {"log_decay": -x["gate"], "bonus": x["bonus"], "normalize": False}
    return rwkv6_attention(x["q"].abs(), x["k"].abs(), x["v"], **(gates | options))


def rwkv6_normalized(x, **options):
    return rwkv6(x, normalize=True, **options)


ATTEND = [mlstm, rwkv6, rwkv6_normalized]


def make(dtype, tokens=1, device=DEVICE):
    shapes = {
        "q": (B, H, tokens, D), "k": (B, HKV, tokens, D), "v": (B, HKV, tokens, E),
        "gate": (B, HKV, tokens, D), "input_gate": (B, HKV, tokens), "bonus": (HKV, D),
    }  # fmt: skip
    x = {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}
    return x | {"gate": x["gate"].abs(), "bonus": x["bonus"].abs()}


def state_of(attend, dtype, device=DEVICE):
    kv, z = torch.randn(B, HKV, D, E), torch.rand(B, HKV, D)
    state = LinearState(kv.to(device, dtype), z.to(device, dtype))
    m = 4 * torch.randn(B, HKV).to(device, dtype)
    return StabilizedState(*state, m) if attend is mlstm else state


@torch.no_grad()
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "new state"])
@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("impl", [CPP, "triton"])
def test_equals_the_reference(impl, attend, in_place):
    dtype = torch.float64 if impl == "cpp" else torch.float32
    device = torch.device("cpu") if impl == "cpp" else DEVICE
    x, state = make(dtype, device=device), state_of(attend, dtype, device)
    double = {name: y.double() for name, y in x.items()}
    wide = type(state)(*(y.double() for y in state))
    exact = attend(double, impl="reference", state=wide, return_state=True)
    before = [y.clone() for y in state]
    options = {"state": state, "return_state": True, "reuse_state": in_place}
    found = attend(x, impl="auto" if impl == "cpp" else impl, **options)
    assert found.impl.impl == impl
    assert ("one token; compiled" in found.impl.reason) == (impl == "cpp")
    assert all(map(operator.is_, found.state, state)) == in_place
    assert in_place or all(map(torch.equal, state, before))
    tolerance = 1e-11 if impl == "cpp" else 2e-6
    for ours, expected in zip((found.out, *found.state), (exact.out, *exact.state), strict=True):
        error = (ours.double() - expected).norm() / expected.norm()
        assert error < tolerance


@torch.no_grad()
@pytest.mark.parametrize("attend", [mlstm, rwkv6_normalized])
@pytest.mark.parametrize("impl", [CPP, "triton"])
def test_slots_without_a_token_keep_their_state(impl, attend):
    device = torch.device("cpu") if impl == "cpp" else DEVICE
    x, state = make(torch.float32, device=device), state_of(attend, torch.float32, device)
    expected = attend(x, impl=impl, state=state, return_state=True)
    pool = type(state)(*(torch.cat([torch.full_like(y, 7.0), y]) for y in state))
    slots = torch.tensor([3, -1], device=device)
    moved = type(state)(*(y.clone() for y in pool))  # the token of row 0 continues from state 0
    for y, own in zip(moved, state, strict=True):
        y[3] = own[0]
    for in_place in (False, True):
        given = type(state)(*(y.clone() for y in moved))
        options = {"state": given, "slots": slots, "return_state": True}
        found = attend(x, impl=impl, reuse_state=in_place, **options)
        assert_close(found.out[0], expected.out[0])
        assert not found.out[1].any()
        assert all(map(operator.is_, found.state, given)) == in_place
        for ours, before, right in zip(found.state, moved, expected.state, strict=True):
            assert_close(ours[3], right[0])
            assert torch.equal(ours[:3], before[:3])


@pytest.mark.parametrize("attend", [mlstm, rwkv6])
def test_gradients_do_not_use_the_kernel(attend):
    x, state = make(torch.float32, device="cpu"), state_of(attend, torch.float32, "cpu")
    x["q"].requires_grad_()
    out = attend(x, state=state)
    assert "one token; compiled" not in out.impl.reason
    out.out.sum().backward()
    assert x["q"].grad.abs().sum() > 0


@torch.no_grad()
@pytest.mark.parametrize("attend", [mlstm, rwkv6])
def test_a_state_of_another_dtype_gets_that_of_the_sums(attend):
    x, state = make(torch.float32, device="cpu"), state_of(attend, torch.float64, "cpu")
    narrow = type(state)(*(y.float() for y in state))
    found, right = (attend(x, state=y, return_state=True) for y in (state, narrow))
    assert_close((found.out, *found.state), (right.out, *right.state), atol=0, rtol=0)


@torch.no_grad()
def test_auto_selects_triton_on_a_gpu_that_passed_the_check(monkeypatch):
    x, state = make(torch.float32), state_of(mlstm, torch.float32)
    verdict = ["", "checked on NVIDIA Test"]
    change_implementation(monkeypatch, "gated_step", "triton", devices=(DEVICE.type,))
    change_implementation(monkeypatch, "gated_step", "cpp", automatic="")
    monkeypatch.setattr(common, "own_verdict", lambda *_: tuple(verdict))
    choice = mlstm(x, state=state).impl
    assert (choice.impl, choice.reason) == (
        "triton", "one token; compiled for this GPU; checked on NVIDIA Test",
    )  # fmt: skip
    verdict[0] = "they failed"
    for attend in (mlstm, rwkv6):
        choice = attend(x, state=state_of(attend, torch.float32)).impl
        assert choice.impl == "torch"
        assert "triton is skipped: they failed" in choice.reason


@torch.no_grad()
@pytest.mark.parametrize("gate", ["mlstm", "rwkv6"])
def test_generation_with_a_cache_equals_generation_without(gate):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    tokens, found = torch.randint(1, 32, (1, 9)), []  # 0 is padding
    torch.manual_seed(0)
    model = attnzoo.swap(LlamaForCausalLM(config), "gated_linear", gate=gate).eval()
    for cache in ("dynamic", "static"):
        options = {"cache_implementation": cache, "do_sample": False, "pad_token_id": 0}
        found.append(model.generate(tokens, max_new_tokens=5, **options))
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found[0], tokens)
    assert torch.equal(found[1], tokens)
