"""Gates of users: one class works in every backend whose state decays."""

import pytest
import torch

import attnzoo
from attnzoo.backends.gates import decays
from attnzoo.backends.gates.decays import GATES, Decay, Gate
from attnzoo.errors import UnsupportedError
from attnzoo.ops.delta.api import delta_attention
from attnzoo.testing import ConformanceError, check_backend
from tests.helpers import HKV, build, hidden_states, qkv

# Those that only decay, in the shapes that ops take
FIT = [name for name, cls in GATES.items() if issubclass(cls, Gate) and not cls.scales_keys]


class HalfLife(Gate):
    """The state halves every eight tokens; one decay per key head, as in docs/extending.md."""

    def log_decay(self, k, hidden_states):
        return k.new_full((k.shape[1],), -0.6931 / 8)


class Length(Gate):
    """Long keys let the state decay: one decay per token, from the values of keys."""

    reads_keys = True

    def log_decay(self, k, hidden_states):
        return -k.square().mean(-1)


class Channels(Gate):
    """One decay per token and channel, from hidden states and a weight."""

    needs_hidden_states = True

    def __init__(self, config, geometry):
        super().__init__(config, geometry)
        self.weight = torch.nn.Parameter(torch.empty(geometry.num_key_heads, geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.ones_(self.weight)

    def log_decay(self, k, hidden_states):
        rate = hidden_states.to(k.dtype).square().mean(-1)[:, None, :, None]
        return -rate * self.weight.to(k.dtype).abs()[:, None]


@pytest.fixture
def own_gate(monkeypatch):
    """Register a gate as ``"own"`` for one test."""
    monkeypatch.setattr(decays, "GATES", dict(GATES))
    return attnzoo.register_gate("own")


@pytest.mark.parametrize(
    ("gate", "backend"), [(HalfLife, "delta"), (Length, "gated_linear"), (Channels, "delta")]
)
def test_own_gates_pass_the_conformance_suite(own_gate, gate, backend):
    own_gate(gate)
    cls = attnzoo.get_backend(backend)
    check_backend(cls, config=cls.config_class(gate="own"), dtypes=[torch.float64])


class Float32(Channels):
    """Computes in float32, whatever the inputs are."""

    def log_decay(self, k, hidden_states):
        weight = self.weight.float().repeat_interleave(8, 1)[:, : hidden_states.shape[2]]
        logits = torch.nn.functional.linear(hidden_states.float(), weight)
        return torch.nn.functional.logsigmoid(logits).transpose(1, 2)


def test_float32_in_a_wider_trial_is_named(own_gate):
    own_gate(Float32)
    cls = attnzoo.get_backend("gated_linear")
    with pytest.raises(ConformanceError, match="as of float32: a part may return float32"):
        check_backend(cls, config=cls.config_class(gate="own"))


@pytest.mark.parametrize("gate", FIT)
def test_delta_with_every_gate_is_the_delta_rule_with_its_decays(gate):
    backend = build("delta", torch.float64, gate=gate)
    with torch.no_grad():
        for name, x in backend.gate.named_parameters():
            x.add_(torch.randn_like(x))
            if name == "bias" and gate in ("gla", "gated_retention"):
                x.sub_(5)  # a memory of a few tokens
    q, k, v = qkv(20, dtype=torch.float64)
    hidden = hidden_states(20, dtype=torch.float64)
    log_decay = backend.gate(k, hidden).log_decay
    assert log_decay.mean() < -1e-3
    beta = torch.sigmoid(hidden @ backend.write_weight.mT + backend.write_bias).mT
    expected = delta_attention(
        q, k, v, beta, log_decay=log_decay, normalize_qk=True, impl="reference"
    )
    torch.testing.assert_close(backend(q, k, v, hidden_states=hidden).out, expected.out)


def test_a_gate_of_another_shape_is_refused(own_gate):
    @own_gate
    class Rows(Gate):
        """One decay per token, without heads."""

        def log_decay(self, k, hidden_states):
            return -k.new_ones(k.shape[0], k.shape[2])

    for backend in ("gated_linear", "delta"):
        q, k, v = qkv(5)
        with pytest.raises(
            UnsupportedError, match=r"Rows.log_decay must return .* or \[2, 2, 5\] .*got \[2, 5\]"
        ):
            build(backend, gate="own")(q, k, v, hidden_states=hidden_states(5))


def test_the_name_of_no_gate_is_taken(own_gate):
    with pytest.raises(ValueError, match="'none' is the absence of a gate"):
        attnzoo.register_gate("none")(HalfLife)


def test_a_gate_returns_numbers_without_attention():
    backend = build("gated_linear", gate="mamba2")
    decay = backend.gate(qkv(5)[1].float(), hidden_states(5).float())
    assert isinstance(decay, Decay)
    assert decay.log_decay.shape == (2, HKV, 5)
    assert decay.key_scale.shape == (2, HKV, 5, 1)
