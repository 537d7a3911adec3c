"""The gated_linear backend: against dense formulas, its gates, weights and errors."""

import math

import pytest
import torch

from attnzoo.backends.feature_maps import base as feature_maps
from attnzoo.backends.feature_maps.base import register_feature_map
from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.registry import build_backend
from tests import helpers
from tests.helpers import HKV, D, E, H, geometry, hidden_states, qkv


def inputs(length, dtype=torch.float64, batch=2):
    """Return q, k and v, and the hidden states."""
    x = qkv(length, batch=batch, dtype=dtype)
    return x, hidden_states(length, batch=batch, dtype=dtype)


GATES = ["retnet", "alibi", "gated_retention", "gla", "mamba2", "hgrn2"]  # only decay the state
LEARNED = ["gated_retention", "gla", "mamba2", "hgrn2"]
OWN_RECURRENCE = ["rwkv6", "mlstm", "matrix"]  # gates with a recurrence of their own


def build_gated(dtype=torch.float64, *, strong=True, **options):
    backend = helpers.build("gated_linear", torch.float32, **options)
    if strong:  # change the initial values to gates with a memory of a few tokens
        with torch.no_grad():
            for name, x in backend.named_parameters():
                x.add_(torch.randn_like(x))
                if name == "gate.bias":
                    x.add_(5.0 if backend.config.gate == "mamba2" else -5.0)
    return backend.to(dtype)


def log_decay(backend, hidden, features):
    """Return the log decay of each token and feature, [B, HKV, T, features]."""
    batch, length, _ = hidden.shape
    w = {name: x.to(hidden.dtype) for name, x in backend.gate.named_parameters()}
    match backend.config.gate:
        case "retnet":
            gate = [math.log(1 - 2.0 ** (-5 - h)) for h in range(HKV)]
        case "alibi":
            gate = [-(2.0 ** (-8 * h / HKV)) for h in range(1, HKV + 1)]
        case "gated_retention":
            gate = torch.sigmoid(hidden @ w["weight"].mT + w["bias"]).log() / 16
        case "gla":  # alpha = sigmoid(x W1 W2 + b)^(1/16)
            alpha = torch.sigmoid(hidden @ w["down"].mT @ w["up"].mT + w["bias"].flatten()) ** (
                1 / 16
            )
            return alpha.log().view(batch, length, HKV, features).transpose(1, 2)
        case "mamba2":
            gate = -w["log_rate"].exp() * step(w, hidden)
        case "hgrn2":
            return (1 - hgrn2_key(w, hidden, features)).log()
    gate = torch.as_tensor(gate, dtype=hidden.dtype).expand(batch, length, HKV)
    return gate.transpose(1, 2)[..., None].expand(batch, HKV, length, features)


def step(w, hidden):
    """Return Mamba-2's step, [B, T, HKV]."""
    return (1 + (hidden @ w["weight"].mT + w["bias"]).exp()).log()


def hgrn2_key(w, hidden, features):
    """Return HGRN-2's key, 1 - f, [B, HKV, T, features]."""
    bound = torch.sigmoid(w["bound"])
    logits = (hidden @ w["down"].mT @ w["up"].mT).unflatten(2, (HKV, features)) + w["bias"]
    return (1 - (bound + (1 - bound) * torch.sigmoid(logits))).transpose(1, 2)


def key_factor(backend, hidden, features):
    """Return the factor of the keys, broadcastable to [B, HKV, T, features]."""
    w = {name: x.to(hidden.dtype) for name, x in backend.gate.named_parameters()}
    match backend.config.gate:
        case "mamba2":
            return step(w, hidden).transpose(1, 2)[..., None]
        case "hgrn2":
            return hgrn2_key(w, hidden, features)
    return hidden.new_ones(())


def phi(name, x):
    if name == "hedgehog":
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def dense(backend, q, k, v, hidden):
    """Compute one query after another; weights are multiplied by the decays since the key."""
    name, group = backend.config.feature_map, H // HKV
    q, k = phi(name, q), phi(name, k)
    k = (k * key_factor(backend, hidden, k.shape[-1])).repeat_interleave(group, 1)
    decay = log_decay(backend, hidden, k.shape[-1]).repeat_interleave(group, 1)
    v, out = v.repeat_interleave(group, 1), []
    for t in range(q.shape[2]):
        since = decay[:, :, : t + 1].flip(2).cumsum(2).flip(2) - decay[:, :, : t + 1]
        weights = (q[:, :, t : t + 1] * k[:, :, : t + 1] * since.exp()).sum(-1)
        if backend.config.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out.append((weights[..., None] * v[:, :, : t + 1]).sum(2))
    return torch.stack(out, 2)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("gate", GATES)
def test_output_equals_the_dense_formula(gate, normalize):
    backend, (x, hidden) = build_gated(gate=gate, normalize=normalize), inputs(37)
    ours = backend(*x, hidden_states=hidden).out
    torch.testing.assert_close(ours, dense(backend, *x, hidden))


@pytest.mark.parametrize("gate", GATES)
def test_gates_have_one_decay_per_feature(gate):
    backend, (x, hidden) = build_gated(gate=gate, feature_map="hedgehog", strong=False), inputs(20)
    ours = backend(*x, hidden_states=hidden).out
    torch.testing.assert_close(ours, dense(backend, *x, hidden))


def test_alibi_equals_the_bias_of_the_exponential_kernel():
    """With a kernel of exp(score), ALiBi's decay equals softmax with ALiBi's bias."""
    backend = build_backend(
        "gated_linear",
        {"gate": "alibi", "feature_map": "exp"},
        Geometry(num_heads=2, num_key_heads=2, head_dim=1),
    )
    q, k, v = (torch.randn(1, 2, 12, 1, dtype=torch.float64) for _ in range(3))
    distance = (torch.arange(12)[:, None] - torch.arange(12)).double()
    slopes = torch.tensor([2.0**-4, 2.0**-8]).view(2, 1, 1)
    scores = (q + k.mT) - slopes * distance  # the kernel of one channel is exp(q + k)
    scores = scores.masked_fill(distance < 0, -torch.inf)
    torch.testing.assert_close(backend(q, k, v).out, scores.softmax(-1) @ v)


def test_autocast_does_not_change_the_output():
    backend, (x, hidden) = build_gated(torch.float32), inputs(30, torch.float32)
    plain = backend(*x, hidden_states=hidden).out
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(backend(*x, hidden_states=hidden).out, plain)


@pytest.mark.parametrize("length", [20, 1])
def test_compiles_without_a_graph_break(length):
    backend = build_gated(torch.float32, gate="gla", feature_map="hedgehog", strong=False)
    x, hidden = inputs(length, torch.float32)
    mask = AttentionMask(causal=True, padding=torch.rand(2, length) > 0.3)
    options = {"hidden_states": hidden, "mask": mask, "return_state": True}
    plain = backend(*x, **options)
    whole = torch.compile(backend, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = whole(*x, **options)
    torch.testing.assert_close(ours[:2], plain[:2])


# -- gates with a recurrence of their own ----------------------------------------------------------


@pytest.mark.parametrize("feature_map", ["elu+1", "hedgehog"])
@pytest.mark.parametrize("gate", OWN_RECURRENCE)
def test_output_equals_the_recurrence(gate, feature_map):
    """One token after another, as in the papers."""
    backend, (x, hidden) = build_gated(gate=gate, feature_map=feature_map, strong=False), inputs(37)
    with torch.no_grad():
        for p in backend.gate.parameters():
            p.add_(0.5 * torch.randn_like(p))
    w, group = dict(backend.gate.named_parameters()), H // HKV
    q, k, v = phi(feature_map, x[0]), phi(feature_map, x[1]), x[2]
    if feature_map == "hedgehog":
        k = backend.feature_map.keys(x[1], 1.0)
    features, outs, kv, z = k.shape[-1], [], 0, 0
    for t in range(37):
        new = k[:, :, t, :, None] * v[:, :, t, None]
        match gate:
            case "rwkv6":
                logits = torch.tanh(hidden[:, t] @ w["down"].mT) @ w["up"].mT
                decay = (-(logits.view(2, HKV, features) + w["bias"]).exp()).exp()[..., None]
                bonus = w["log_bonus"].exp()[..., None]
                kv_read, z_read = kv + bonus * new, z + bonus * k[:, :, t, :, None]
                kv, z = decay * kv + new, decay * z + k[:, :, t, :, None]
            case "mlstm":
                input_gate = (hidden[:, t] @ w["input_weight"].mT).exp()[..., None, None]
                decay = torch.sigmoid(hidden[:, t] @ w["forget_weight"].mT + w["forget_bias"])
                decay = decay[..., None, None]
                kv, z = decay * kv + input_gate * new, decay * z + input_gate * k[:, :, t, :, None]
                kv_read, z_read = kv, z
            case "matrix":
                logits = hidden[:, t] @ w["down"].mT @ w["up"].mT
                decay = torch.sigmoid(logits.view(2, HKV, features, E) + w["bias"]) ** (1 / 16)
                kv, z = decay * kv + new, decay * z + k[:, :, t, :, None]
                kv_read, z_read = kv, z
        rows = q[:, :, t].unflatten(1, (HKV, group))
        denominator = rows @ z_read
        out = rows @ kv_read / (denominator.abs().clamp(min=1) if gate == "mlstm" else denominator)
        outs.append(out.flatten(1, 2))
    ours = backend(*x, hidden_states=hidden).out
    torch.testing.assert_close(ours, torch.stack(outs, 2))


@pytest.mark.parametrize(  # the decays of retnet and alibi are constants
    "gate", [gate for gate in GATES + OWN_RECURRENCE if gate not in ("retnet", "alibi")]
)
def test_initial_gates_have_a_long_memory(gate):
    """After 30 tokens, the first token has at least 3/4 of its weight."""
    backend, (x, hidden) = build_gated(gate=gate, strong=False), inputs(30)
    state = backend(*x, hidden_states=hidden, return_state=True).state
    k = backend.feature_map.keys(x[1], 1.0)
    sums = state.k * (state.m.exp()[..., None] if gate == "mlstm" else 1)
    sums = sums[..., 0] if gate == "matrix" else sums
    if gate in ("mamba2", "hgrn2"):
        sums = sums / key_factor(backend, hidden, D).flatten()[0]
    fraction = sums / k.sum(2)
    assert fraction.min() > 0.75
    assert fraction.max() <= 1 + 1e-9


def assert_close_to_float32(ours, theirs):
    """Compare with a result whose sums are float32."""
    worst = (ours - theirs).abs().max()
    budget = 256 * torch.finfo(torch.float32).eps * theirs.abs().max()
    assert worst <= budget, f"error {worst:.2e} exceeds {budget:.2e}"


def test_hgrn2_with_features_of_one_matches_hgrn2(naive, monkeypatch):
    """The key is then 1 - f; 100 tokens are several chunks."""
    monkeypatch.setattr(feature_maps, "FEATURE_MAPS", dict(feature_maps.FEATURE_MAPS))
    register_feature_map("ones")(torch.ones_like)
    backend = build_gated(gate="hgrn2", normalize=False, feature_map="ones")
    x, hidden = inputs(100)
    with torch.no_grad():
        forget = backend.gate(torch.ones_like(x[1]), hidden).log_decay
        out, (kv, _) = backend(*x, hidden_states=hidden, return_state=True)[:2]
    tokens = [
        y.repeat_interleave(H // HKV, 1).transpose(1, 2) for y in (1 - forget.exp(), x[2], forget)
    ]
    q = torch.ones(2, 100, H, D) * D**0.5  # the reference divides by it
    theirs, last = naive("ops/gla/naive.py").naive_recurrent_gla(q, *tokens, None, True)
    assert_close_to_float32(out.transpose(1, 2), theirs)
    assert_close_to_float32(kv, last[:, :: H // HKV])


@pytest.mark.parametrize("gate", ["retnet", "gated_retention", "mamba2", "gla"])
def test_equals_flash_linear_attention(gate, naive):
    """Without normalisation, on the same features, over 100 tokens in chunks of 32."""
    backend = build_gated(gate=gate, normalize=False, chunk_size=32, strong=gate == "mamba2")
    x, hidden = inputs(100)
    k = phi("elu+1", x[1])
    with torch.no_grad():
        out = backend(*x, hidden_states=hidden).out.transpose(1, 2)
        decay, key_scale = backend.gate(k, hidden)
        k = k if key_scale is None else k * key_scale
    k, v = (y.repeat_interleave(H // HKV, 1).transpose(1, 2) for y in (k, x[2]))
    q = phi("elu+1", x[0]).transpose(1, 2) * D**0.5  # the reference divides by it
    if gate == "retnet":  # the reference has a decay per query head
        parts = [y[:, :, ::2].transpose(1, 2) for y in (q, k, v)]
        theirs = naive("ops/retention/naive.py").naive_retention(*parts).transpose(1, 2)
        out = out[:, :, ::2]
    elif gate == "gla":
        decay = decay.repeat_interleave(2, 1).transpose(1, 2)
        theirs, _ = naive("ops/gla/naive.py").naive_recurrent_gla(q, k, v, decay)
    else:
        decay = decay.repeat_interleave(2, 1).transpose(1, 2)
        theirs, _ = naive("ops/simple_gla/naive.py").naive_recurrent_simple_gla(q, k, v, decay)
    assert_close_to_float32(out, theirs)


def test_matrix_gate_returns_no_attention_weights():
    backend, (x, hidden) = build_gated(gate="matrix"), inputs(5)
    backend(*x, hidden_states=hidden)
    assert "token by token" in backend.ran.reason
    with pytest.raises(UnsupportedError, match=r"layer\.attn.*'gated_linear'.*value channels"):
        backend(*x, hidden_states=hidden, return_weights=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "mlstm", "normalize": False}, "normalize must stay True with gate='mlstm'"),
        ({"gate": "mlstm", "eps": 1e-3}, "divides by max(|q n|, 1) and needs none, got 0.001"),
        ({"gate": "matrix", "chunk_size": 16}, "runs token by token and has no chunks, got 16"),
        ({"gate": "rwkv6", "feature_map": "cosine"}, "counts tokens in the state"),
        ({"feature_map": "identity"}, "'identity' needs normalize=False and no window"),
    ],
)
def test_options_that_a_gate_does_not_support_are_refused(options, message):
    with pytest.raises(ConfigError, match="GatedLinearConfig") as caught:
        build_gated(**options)
    assert message in str(caught.value)


def test_mlstm_supports_signed_features():
    """mLSTM divides by the absolute sum of weights, or by 1."""
    backend, (x, hidden) = build_gated(gate="mlstm", feature_map="identity"), inputs(9)
    output = backend(*x, hidden_states=hidden, return_weights=True)
    assert (output.weights < 0).any()
    assert output.weights.sum(-1).abs().max() <= 1 + 1e-9


def test_hooks_on_the_gate_run():
    """Offloading loads a module's weights in such a hook."""
    backend, (x, hidden) = build_gated(gate="gla"), inputs(3)
    seen = []
    backend.gate.register_forward_pre_hook(lambda module, args: seen.append(module))
    backend(*x, hidden_states=hidden)
    assert seen == [backend.gate]


# -- weights ------------------------------------------------------------------------------------


def test_initial_memory_of_learned_gates():
    """Every token keeps 1/e of its weight after 126 tokens."""
    for gate in LEARNED:
        backend, (x, hidden) = build_gated(torch.float32, gate=gate, strong=False), inputs(5)
        k = backend.feature_map.keys(x[1].float(), 1.0)
        decay = backend.gate(k, hidden.float()).log_decay
        assert decay.unique().numel() == 1
        assert -1 / decay.unique().item() == pytest.approx(126.06, rel=5e-3)


@pytest.mark.parametrize("gate", LEARNED + OWN_RECURRENCE)
def test_every_weight_has_a_gradient(gate):
    """From the second step on; in the first, the gate's projection is zero."""
    backend, (x, hidden) = (
        build_gated(torch.float32, gate=gate, strong=False),
        inputs(9, torch.float32),
    )
    optimizer = torch.optim.Adam(backend.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        backend(*x, hidden_states=hidden).out.square().sum().backward()
        optimizer.step()
    for name, parameter in backend.named_parameters():
        assert parameter.grad.count_nonzero() > 0, name


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", GATES)
def test_only_learned_gates_need_hidden_states(gate):
    backend, (x, _) = build_gated(gate=gate), inputs(3)
    assert backend.capabilities.needs_hidden_states == (gate in LEARNED)
    if gate in LEARNED:
        with pytest.raises(UnsupportedError, match="hidden_states are missing"):
            backend(*x)
        with pytest.raises(UnsupportedError, match=r"shape \(2, 3, 5\).*gates take \(2, 3, 12\)"):
            backend(*x, hidden_states=torch.randn(2, 3, 5))
    else:
        backend(*x)


def test_only_causal_calls_and_layers_are_supported():
    backend, (x, hidden) = build_gated(), inputs(3)
    with pytest.raises(UnsupportedError, match="not causal"):
        backend(*x, hidden_states=hidden, mask=AttentionMask())
    with pytest.raises(UnsupportedError, match="bidirectional"):
        build_backend("gated_linear", {}, geometry(causal=False))
    with pytest.raises(UnsupportedError, match="cross-attention"):
        build_backend("gated_linear", {}, geometry(causal=False, cross_attention=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "retnets"}, "Did you mean 'retnet'"),
        ({"gate": None}, "gate must be str, got None"),
        ({"gates": "gla"}, "Did you mean 'gate'"),
        ({"feature_map": "elu1"}, "Did you mean 'elu+1'"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match="Backend 'gated_linear'") as caught:
        build_gated(**options)
    assert message in str(caught.value)
