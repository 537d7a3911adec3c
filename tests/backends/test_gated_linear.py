"""The gated linear backend against a dense formula written here, and what else is its own."""

import math

import pytest
import torch
from torch import nn

from attnzoo.backends.config import Geometry
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.masks import AttentionMask
from attnzoo.registry import build_backend

H, HKV, D, E, M = 4, 2, 8, 6, 12
GATES = ["retnet", "alibi", "gated_retention", "gla"]
LEARNED = ["gated_retention", "gla"]


def geometry(**changes):
    shape = {"num_heads": H, "num_key_heads": HKV, "head_dim": D, "value_dim": E, "hidden_size": M}
    return Geometry(**{**shape, "name": "layer.attn", **changes})


def build(dtype=torch.float64, *, strong=True, **options):
    backend = build_backend("gated_linear", options, geometry())
    if strong:  # away from the initial values, to gates that forget within a few tokens
        with torch.no_grad():
            for name, x in backend.named_parameters():
                x.add_(torch.randn_like(x))
                if name == "gate.bias":
                    x.sub_(5.0)
    return backend.to(dtype)


def inputs(length, dtype=torch.float64, batch=2):
    """Return q, k and v, and the hidden states apart."""
    shapes = (batch, H, length, D), (batch, HKV, length, D), (batch, HKV, length, E)
    x = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    return x, torch.randn(batch, length, M, dtype=torch.float64).to(dtype)


def log_decay(backend, hidden, features):
    """Write out the decay of each token and feature, [B, HKV, T, features]."""
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
    gate = torch.as_tensor(gate, dtype=hidden.dtype).expand(batch, length, HKV)
    return gate.transpose(1, 2)[..., None].expand(batch, HKV, length, features)


def phi(name, x):
    if name == "hedgehog":
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def dense(backend, q, k, v, hidden):
    """Attend token by token: every weight is a product of what each step in between keeps."""
    name, group = backend.config.feature_map, H // HKV
    q, k = phi(name, q), phi(name, k).repeat_interleave(group, 1)
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
def test_dense(gate, normalize):
    backend, (x, hidden) = build(gate=gate, normalize=normalize), inputs(37)
    ours = backend(*x, hidden_states=hidden).out
    torch.testing.assert_close(ours, dense(backend, *x, hidden))


@pytest.mark.parametrize("gate", GATES)
def test_gates_have_the_size_of_the_features(gate):
    backend, (x, hidden) = build(gate=gate, feature_map="hedgehog", strong=False), inputs(20)
    ours = backend(*x, hidden_states=hidden).out
    torch.testing.assert_close(ours, dense(backend, *x, hidden))


def test_alibi_is_the_bias_of_the_exponential_kernel():
    """Features whose products are exp(score), decayed by ALiBi, are softmax with ALiBi's bias."""
    backend = build_backend(
        "gated_linear",
        {"gate": "alibi", "feature_map": "exp"},
        Geometry(num_heads=2, num_key_heads=2, head_dim=1),
    )
    q, k, v = (torch.randn(1, 2, 12, 1, dtype=torch.float64) for _ in range(3))
    distance = (torch.arange(12)[:, None] - torch.arange(12)).double()
    slopes = torch.tensor([2.0**-4, 2.0**-8]).view(2, 1, 1)
    scores = (q + k.mT) - slopes * distance  # of one channel: exp(q + k), a score of q + k
    scores = scores.masked_fill(distance < 0, -torch.inf)
    torch.testing.assert_close(backend(q, k, v).out, scores.softmax(-1) @ v)


@pytest.mark.parametrize("gate", GATES)
def test_padding_anywhere_neither_shows_nor_decays(gate):
    """Left, right, interior, full of NaN: outputs and state are those of the unpadded tokens."""
    backend, (x, hidden) = build(gate=gate), inputs(12)
    real = torch.ones(2, 12, dtype=torch.bool)
    real[0, [0, 1, 5, 6, 11]] = False
    poisoned = [t.masked_fill(~real[:, None, :, None], torch.nan) for t in x]
    ours = backend(
        *poisoned,
        hidden_states=hidden.masked_fill(~real[:, :, None], torch.nan),
        mask=AttentionMask(causal=True, padding=real),
        return_state=True,
    )
    for row in range(2):
        alone = backend(
            *(t[row : row + 1, :, real[row]] for t in x),
            hidden_states=hidden[row : row + 1, real[row]],
            return_state=True,
        )
        torch.testing.assert_close(ours.out[row : row + 1, :, real[row]], alone.out)
        for mine, theirs in zip(ours.state, alone.state, strict=True):
            torch.testing.assert_close(mine[row : row + 1], theirs)


@pytest.mark.parametrize("gate", GATES)
def test_packed_sequences_stay_apart(gate):
    backend, (x, hidden) = build(gate=gate), inputs(14)
    segments = torch.tensor([[0] * 5 + [1] * 9, [3] * 13 + [4]])
    mask = AttentionMask(causal=True, segment_ids=segments)
    ours = backend(*x, hidden_states=hidden, mask=mask).out
    for row, cut in enumerate((5, 13)):
        for part in slice(cut), slice(cut, 14):
            alone = [t[row : row + 1, :, part] for t in x]
            expected = backend(*alone, hidden_states=hidden[row : row + 1, part]).out
            torch.testing.assert_close(ours[row : row + 1, :, part], expected)


@pytest.mark.parametrize("cut", [1, 7, 16])
@pytest.mark.parametrize("gate", GATES)
def test_decoding_equals_one_pass(gate, cut):
    backend, (x, hidden) = build(gate=gate), inputs(20)
    output = backend(*(t[:, :, :cut] for t in x), hidden_states=hidden[:, :cut], return_state=True)
    outs = [output.out]
    for t in range(cut, 20):
        now, its_hidden = [y[:, :, t : t + 1] for y in x], hidden[:, t : t + 1]
        output = backend(*now, hidden_states=its_hidden, state=output.state, return_state=True)
        outs.append(output.out)
    one = backend(*x, hidden_states=hidden, return_state=True)
    torch.testing.assert_close(torch.cat(outs, 2), one.out)
    for ours, theirs in zip(output.state, one.state, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("gate", GATES)
def test_gradients(gate):
    backend, (x, hidden) = build(gate=gate, strong=False), inputs(5, batch=1)
    weights = list(backend.parameters())
    real = torch.tensor([[True, True, False, True, True]])

    def call(q, k, v, hidden, *_):
        mask = AttentionMask(causal=True, padding=real)
        return backend(q, k, v, hidden_states=hidden, mask=mask).out

    given = [t.requires_grad_() for t in (*x, hidden)]
    assert torch.autograd.gradcheck(call, (*given, *weights), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_16_bit_output_is_as_good_as_its_dtype(gate, dtype):
    """Weights, gates and features lose nothing beyond the rounding of what they are given."""
    backend, (x, hidden) = build(dtype, gate=gate), inputs(90, dtype, batch=1)
    double = build(gate=gate)
    double.load_state_dict(backend.state_dict())
    exact = dense(double, *(t.double() for t in x), hidden.double())
    plain = dense(double.float(), *(t.float() for t in x), hidden.float()).to(dtype).double()
    budget = 2 * (plain - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    worst = (backend(*x, hidden_states=hidden).out.double() - exact).abs().max()
    assert worst <= budget, f"error {worst:.2e} exceeds {budget:.2e}"


@pytest.mark.parametrize("gate", GATES)
def test_bfloat16_gradients_with_values_around_one(gate):
    backend, (x, hidden) = build(torch.bfloat16, gate=gate, strong=False), inputs(1024, batch=1)
    x[2] = x[2] * 0.1 + 1
    x, hidden = [t.bfloat16() for t in x], hidden.bfloat16()
    target = torch.randn(1, H, 1024, E).bfloat16()
    double = build(gate=gate, strong=False)
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


def test_autocast_does_not_narrow():
    backend, (x, hidden) = build(torch.float32), inputs(30, torch.float32)
    plain = backend(*x, hidden_states=hidden).out
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(backend(*x, hidden_states=hidden).out, plain)


@pytest.mark.parametrize("length", [20, 1])
def test_compiles_whole(length):
    backend = build(torch.float32, gate="gla", feature_map="hedgehog", strong=False)
    x, hidden = inputs(length, torch.float32)
    mask = AttentionMask(causal=True, padding=torch.rand(2, length) > 0.3)
    options = {"hidden_states": hidden, "mask": mask, "return_state": True}
    plain = backend(*x, **options)
    whole = torch.compile(backend, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = whole(*x, **options)
    torch.testing.assert_close(ours, plain)


# -- weights ------------------------------------------------------------------------------------


def test_a_raw_swap_remembers_long():
    """The same memory for every token, and 1/e of a token's weight after 126 others."""
    for gate in LEARNED:
        backend, (x, hidden) = build(torch.float32, gate=gate, strong=False), inputs(5)
        k = backend.feature_map.keys(x[1].float(), 1.0)
        decay = backend.gate.log_decay(k, hidden.float())
        assert decay.unique().numel() == 1
        assert -1 / decay.unique().item() == pytest.approx(126.06, rel=1e-3)


@pytest.mark.parametrize(
    ("gate", "shapes"),
    [
        ("retnet", {}),
        ("alibi", {}),
        ("gated_retention", {"gate.weight": (HKV, M), "gate.bias": (HKV,)}),
        ("gla", {"gate.down": (16, M), "gate.up": (HKV * D, 16), "gate.bias": (HKV, D)}),
    ],
)
def test_reset_after_meta(gate, shapes):
    with torch.device("meta"):
        backend = build_backend("gated_linear", {"gate": gate}, geometry())
    assert {name: tuple(x.shape) for name, x in backend.named_parameters()} == shapes
    assert all(x.is_meta for x in backend.parameters())
    backend.to_empty(device="cpu")
    for x in backend.parameters():
        nn.init.constant_(x, torch.nan)
    backend.reset_parameters()
    fresh = build(torch.float32, gate=gate, strong=False)
    for name, x in backend.named_parameters():
        assert torch.equal(x, fresh.get_parameter(name))
        if name == "gate.bias":
            assert x.eq(2).all()


def test_loaded_weights_survive_a_guarded_reset():
    """Transformers flags what it loaded, and makes torch's initialisers respect the flag."""
    from transformers.initialization import guard_torch_init_functions

    backend = build()
    before = {name: x.detach().clone() for name, x in backend.named_parameters()}
    for x in backend.parameters():
        x._is_hf_initialized = True
    with guard_torch_init_functions():
        backend.reset_parameters()
    for name, x in backend.named_parameters():
        assert torch.equal(x, before[name])


@pytest.mark.parametrize("gate", LEARNED)
def test_every_weight_learns(gate):
    """From the second step on; in the first, the gate's output weights are zero."""
    backend, (x, hidden) = build(torch.float32, gate=gate, strong=False), inputs(9, torch.float32)
    optimizer = torch.optim.Adam(backend.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        backend(*x, hidden_states=hidden).out.square().sum().backward()
        optimizer.step()
    for name, parameter in backend.named_parameters():
        assert parameter.grad.count_nonzero() > 0, name


def test_no_global_random_state_is_touched():
    x, hidden = inputs(5)
    before = torch.random.get_rng_state()
    build(strong=False)(*x, hidden_states=hidden)
    assert torch.equal(torch.random.get_rng_state(), before)


# -- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize("gate", GATES)
def test_hidden_states_only_where_needed(gate):
    backend, (x, _) = build(gate=gate), inputs(3)
    assert backend.needs_hidden_states == (gate in LEARNED)
    if gate in LEARNED:
        with pytest.raises(UnsupportedError, match="hidden_states are missing"):
            backend(*x)
        with pytest.raises(UnsupportedError, match=r"shape \(2, 3, 5\).*takes \(2, 3, 12\)"):
            backend(*x, hidden_states=torch.randn(2, 3, 5))
    else:
        backend(*x)


@pytest.mark.parametrize("gate", GATES)
def test_hidden_size_only_where_needed(gate):
    layer = geometry(hidden_size=None)
    if gate in LEARNED:
        with pytest.raises(UnsupportedError, match=r"layer\.attn.*hidden size is unknown"):
            build_backend("gated_linear", {"gate": gate}, layer)
    else:
        build_backend("gated_linear", {"gate": gate}, layer)


def test_causal_only():
    backend, (x, hidden) = build(), inputs(3)
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
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match="Backend 'gated_linear'") as caught:
        build(**options)
    assert message in str(caught.value)
