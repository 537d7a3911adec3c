"""The gated_linear backend: against dense formulas, its gates, weights and errors."""

import math

import pytest
import torch
from torch import nn

import attnzoo
from attnzoo.backends.feature_maps import base as feature_maps
from attnzoo.backends.feature_maps.base import register_feature_map
from attnzoo.backends.gates import base as gates
from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.registry import build_backend
from tests import helpers
from tests.helpers import HKV, D, E, H, M, geometry, hidden_states, qkv


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


@pytest.mark.parametrize("gate", GATES)
def test_padding_changes_neither_output_nor_state(gate):
    """Padding on the left, on the right and inside, filled with NaN."""
    backend, (x, hidden) = build_gated(gate=gate), inputs(12)
    padding_mask = torch.ones(2, 12, dtype=torch.bool)
    padding_mask[0, [0, 1, 5, 6, 11]] = False
    poisoned = [t.masked_fill(~padding_mask[:, None, :, None], torch.nan) for t in x]
    ours = backend(
        *poisoned,
        hidden_states=hidden.masked_fill(~padding_mask[:, :, None], torch.nan),
        mask=AttentionMask(causal=True, padding=padding_mask),
        return_state=True,
    )
    for row in range(2):
        separate = backend(
            *(t[row : row + 1, :, padding_mask[row]] for t in x),
            hidden_states=hidden[row : row + 1, padding_mask[row]],
            return_state=True,
        )
        torch.testing.assert_close(ours.out[row : row + 1, :, padding_mask[row]], separate.out)
        for mine, theirs in zip(ours.state, separate.state, strict=True):
            torch.testing.assert_close(mine[row : row + 1], theirs)


@pytest.mark.parametrize("gate", GATES)
def test_packed_segments_do_not_see_each_other(gate):
    backend, (x, hidden) = build_gated(gate=gate), inputs(14)
    segments = torch.tensor([[0] * 5 + [1] * 9, [3] * 13 + [4]])
    mask = AttentionMask(causal=True, segment_ids=segments)
    ours = backend(*x, hidden_states=hidden, mask=mask).out
    for row, cut in enumerate((5, 13)):
        for part in slice(cut), slice(cut, 14):
            separate = [t[row : row + 1, :, part] for t in x]
            expected = backend(*separate, hidden_states=hidden[row : row + 1, part]).out
            torch.testing.assert_close(ours[row : row + 1, :, part], expected)


@pytest.mark.parametrize("cut", [1, 7, 16])
@pytest.mark.parametrize("gate", GATES)
def test_decoding_matches_one_pass(gate, cut):
    backend, (x, hidden) = build_gated(gate=gate), inputs(20)
    output = backend(*(t[:, :, :cut] for t in x), hidden_states=hidden[:, :cut], return_state=True)
    outs = [output.out]
    for t in range(cut, 20):
        token, token_hidden = [y[:, :, t : t + 1] for y in x], hidden[:, t : t + 1]
        output = backend(*token, hidden_states=token_hidden, state=output.state, return_state=True)
        outs.append(output.out)
    one = backend(*x, hidden_states=hidden, return_state=True)
    torch.testing.assert_close(torch.cat(outs, 2), one.out)
    for ours, theirs in zip(output.state, one.state, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("gate", GATES)
def test_gradients(gate):
    backend, (x, hidden) = build_gated(gate=gate, strong=False), inputs(5, batch=1)
    weights = list(backend.parameters())
    padding_mask = torch.tensor([[True, True, False, True, True]])

    def call(q, k, v, hidden, *_):
        mask = AttentionMask(causal=True, padding=padding_mask)
        return backend(q, k, v, hidden_states=hidden, mask=mask).out

    given = [t.requires_grad_() for t in (*x, hidden)]
    assert torch.autograd.gradcheck(call, (*given, *weights), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_16_bit_error_is_within_the_rounding_of_the_dtype(gate, dtype):
    """Weights, gates and features are computed in float32."""
    backend, (x, hidden) = build_gated(dtype, gate=gate), inputs(90, dtype, batch=1)
    double = build_gated(gate=gate)
    double.load_state_dict(backend.state_dict())
    exact = dense(double, *(t.double() for t in x), hidden.double())
    plain = dense(double.float(), *(t.float() for t in x), hidden.float()).to(dtype).double()
    budget = 2 * (plain - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    worst = (backend(*x, hidden_states=hidden).out.double() - exact).abs().max()
    assert worst <= budget, f"error {worst:.2e} exceeds {budget:.2e}"


@pytest.mark.parametrize("gate", GATES)
def test_bfloat16_gradients_with_values_around_one(gate):
    backend, (x, hidden) = (
        build_gated(torch.bfloat16, gate=gate, strong=False),
        inputs(1024, batch=1),
    )
    x[2] = x[2] * 0.1 + 1
    x, hidden = [t.bfloat16() for t in x], hidden.bfloat16()
    target = torch.randn(1, H, 1024, E).bfloat16()
    double = build_gated(gate=gate, strong=False)
    double.load_state_dict(backend.state_dict())
    grads = []
    for layer, dtype in (backend, torch.bfloat16), (double, torch.float64):
        given = [t.detach().to(dtype).requires_grad_() for t in (*x, hidden)]
        (layer(*given[:3], hidden_states=given[3]).out * target.to(dtype)).sum().backward()
        tensors = (*given[:3], *(given[3:] if gate in LEARNED else ()), *layer.parameters())
        grads.append({i: t.grad.double() for i, t in enumerate(tensors)})
    for i, exact in grads[1].items():
        error = (grads[0][i] - exact).norm() / exact.norm().clamp(min=1e-12)
        assert error < 5e-3, f"error {error:.1e} of gradient {i}"


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


def test_custom_gate(monkeypatch):
    monkeypatch.setattr(gates, "GATES", dict(gates.GATES))

    @attnzoo.register_gate("halving")
    class Halving(gates.Gate):
        def log_decay(self, k, hidden_states):
            return k.new_full((k.shape[1],), math.log(0.5))

    backend, (x, _) = build_gated(gate="halving", normalize=False), inputs(9)
    q, k, v = phi("elu+1", x[0]), phi("elu+1", x[1]), x[2]
    since = (torch.arange(9)[:, None] - torch.arange(9)).double()
    matrix = q @ k.repeat_interleave(2, 1).mT * (0.5**since).tril()
    torch.testing.assert_close(backend(*x).out, matrix @ v.repeat_interleave(2, 1))
    with pytest.raises(ValueError, match="gate 'gla' belongs to"):
        attnzoo.register_gate("gla")(Halving)


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


@pytest.mark.parametrize(
    ("gate", "shapes"),
    [
        ("retnet", {}),
        ("alibi", {}),
        ("gated_retention", {"gate.weight": (HKV, M), "gate.bias": (HKV,)}),
        ("gla", {"gate.down": (16, M), "gate.up": (HKV * D, 16), "gate.bias": (HKV, D)}),
        (
            "mamba2",
            {"gate.weight": (HKV, M), "gate.bias": (HKV,), "gate.log_rate": (HKV,)},
        ),
        (
            "hgrn2",
            {
                "gate.down": (16, M),
                "gate.up": (HKV * D, 16),
                "gate.bias": (HKV, D),
                "gate.bound": (HKV, D),
            },
        ),
        (
            "rwkv6",
            {
                "gate.down": (16, M),
                "gate.up": (HKV * D, 16),
                "gate.bias": (HKV, D),
                "gate.log_bonus": (HKV, D),
            },
        ),
        (
            "mlstm",
            {
                "gate.forget_weight": (HKV, M),
                "gate.forget_bias": (HKV,),
                "gate.input_weight": (HKV, M),
            },
        ),
        (
            "matrix",
            {
                "gate.down": (16, M),
                "gate.up": (HKV * D * E, 16),
                "gate.bias": (HKV, D, E),
            },
        ),
    ],
)
def test_reset_initialises_a_backend_from_the_meta_device(gate, shapes):
    with torch.device("meta"):
        backend = build_backend("gated_linear", {"gate": gate}, geometry())
    assert {name: tuple(x.shape) for name, x in backend.named_parameters()} == shapes
    assert all(x.is_meta for x in backend.parameters())
    backend.to_empty(device="cpu")
    for x in backend.parameters():
        nn.init.constant_(x, torch.nan)
    backend.reset_parameters()
    fresh = build_gated(torch.float32, gate=gate, strong=False)
    for name, x in backend.named_parameters():
        assert torch.equal(x, fresh.get_parameter(name))
        if name == "gate.bias" and gate in ("gla", "gated_retention", "matrix"):
            assert x.eq(2).all()


def test_loaded_weights_survive_a_guarded_reset():
    """Transformers marks loaded weights, and its guard makes torch's initialisers skip them."""
    from transformers.initialization import guard_torch_init_functions

    backend = build_gated()
    before = {name: x.detach().clone() for name, x in backend.named_parameters()}
    for x in backend.parameters():
        x._is_hf_initialized = True
    with guard_torch_init_functions():
        backend.reset_parameters()
    for name, x in backend.named_parameters():
        assert torch.equal(x, before[name])


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


def test_the_global_random_state_does_not_change():
    x, hidden = inputs(5)
    before = torch.random.get_rng_state()
    build_gated(strong=False)(*x, hidden_states=hidden)
    assert torch.equal(torch.random.get_rng_state(), before)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", GATES)
def test_only_learned_gates_need_hidden_states(gate):
    backend, (x, _) = build_gated(gate=gate), inputs(3)
    assert backend.capabilities.needs_hidden_states == (gate in LEARNED)
    if gate in LEARNED:
        with pytest.raises(UnsupportedError, match="hidden_states are missing"):
            backend(*x)
        with pytest.raises(UnsupportedError, match=r"shape \(2, 3, 5\).*takes \(2, 3, 12\)"):
            backend(*x, hidden_states=torch.randn(2, 3, 5))
    else:
        backend(*x)


@pytest.mark.parametrize("gate", GATES)
def test_only_learned_gates_need_the_hidden_size(gate):
    layer = geometry(hidden_size=None)
    if gate in LEARNED:
        with pytest.raises(UnsupportedError, match=r"layer\.attn.*hidden size is unknown"):
            build_backend("gated_linear", {"gate": gate}, layer)
    else:
        build_backend("gated_linear", {"gate": gate}, layer)


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
