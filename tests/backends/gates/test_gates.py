"""Gates of extreme and of 16-bit inputs; test_gated_linear.py has their formulas."""

from dataclasses import replace

import pytest
import torch

from attnzoo.backends.gates.decays import GATES, alibi_log_decay, get_gate
from attnzoo.contract.config import BackendConfig
from tests.helpers import geometry, hidden_states, qkv

LEARNED = [name for name, cls in GATES.items() if cls.needs_hidden_states and name != "matrix"]


def make(name, hidden_size=1):
    torch.manual_seed(2)
    return get_gate(name)(BackendConfig(), replace(geometry(), hidden_size=hidden_size))


def numbers(gate, hidden):
    """Return what a gate or a recurrence gives an op for some tokens."""
    k = qkv(hidden.shape[1], dtype=torch.promote_types(hidden.dtype, torch.float32))[1]
    found = gate(hidden) if not hasattr(gate, "log_decay") else gate(k, hidden)
    return [x for x in (found.values() if isinstance(found, dict) else found) if x is not None]


def test_alibi_of_eight_heads_matches_the_paper():
    assert alibi_log_decay(8).tolist() == [-(2.0**-h) for h in range(1, 9)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", LEARNED)
def test_extreme_gates_stay_finite(name, sign):
    gate = make(name)
    with torch.no_grad():
        for key, parameter in gate.named_parameters():
            parameter.fill_(-400.0 if key == "bound" else 30.0 if key == "up" else 1.0)
    x = torch.full((2, 3, 1), 400.0 * sign, requires_grad=True)
    found = numbers(gate, x)
    (gradient,) = torch.autograd.grad(sum(result.sum() for result in found), x)
    assert all(result.isfinite().all() for result in found)
    assert gradient.isfinite().all()


def test_a_strong_gate_has_a_gradient():
    gate = make("gated_retention")
    torch.nn.init.constant_(gate.weight, -1.0)
    x = torch.full((2, 1, 1), 400.0, requires_grad=True)
    log_decay = numbers(gate, x)[0][:, 0]
    (gradient,) = torch.autograd.grad(log_decay.sum(), x)
    torch.testing.assert_close(log_decay, torch.full_like(log_decay, -398 / 16))  # a bias of 2
    torch.testing.assert_close(gradient, torch.full_like(gradient, -1 / 16))


@pytest.mark.parametrize("name", LEARNED)
def test_gates_are_computed_in_float32(name):
    gate, hidden = make(name, 12), hidden_states(5, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.add_(torch.randn_like(parameter))
    ours = numbers(gate.bfloat16(), hidden)
    for x, exact in zip(ours, numbers(gate.double(), hidden.double()), strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, exact.float(), atol=1e-7, rtol=1e-5)
