"""The backend of the delta rule: its gates, write strengths, convolution and window."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from attnzoo.backends.gates.decays import DELTA_RATE
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.ops.softmax.api import softmax_attention
from tests.helpers import HKV, D, E, H, M, build

GATES = ("none", "scalar", "vector")


def inputs(length, dtype=torch.float64):
    q = torch.randn(2, H, length, D, dtype=dtype)
    k, v = (torch.randn(2, HKV, length, n, dtype=dtype) for n in (D, E))
    return q, k, v, torch.randn(2, length, M, dtype=dtype)


def near_mask(length, window):
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < window)


def convolved(weight, *tensors):
    """Convolve each channel by ``F.conv1d``."""
    x = torch.cat([y.transpose(2, 3).flatten(1, 2) for y in tensors], 1)
    x = F.conv1d(F.pad(x, (weight.shape[2] - 1, 0)), weight, groups=x.shape[1])
    parts = x.split([y.shape[1] * y.shape[3] for y in tensors], 1)
    return [z.unflatten(1, (y.shape[1], -1)).mT for z, y in zip(parts, tensors, strict=True)]


def formula(weights, q, k, v, x, *, gate, window, negative):
    """Compute outputs token by token from the parameters of a state dict."""
    window_inputs = q, k, v
    if "convolution.weight" in weights:
        q, k, v = convolved(weights["convolution.weight"], q, k, v)
    beta = torch.sigmoid(x @ weights["write_weight"].T + weights["write_bias"]) * (1 + negative)
    length = x.shape[1]
    g = x.new_zeros(2, length, HKV, 1)
    if gate == "scalar":
        y = x @ weights["gate.weight"].T + weights["gate.bias"]
        g = -(weights["gate.log_rate"].exp() * F.softplus(y)).unsqueeze(-1)
    elif gate == "vector":
        y = (x @ weights["gate.down"].T @ weights["gate.up"].T).view(2, length, HKV, D)
        g = -weights["gate.log_rate"].exp()[:, None] * F.softplus(y + weights["gate.bias"])
    unit = [y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k)]
    state, outs = q.new_zeros(2, HKV, D, E), []
    for t in range(length):
        key, b = unit[1][:, :, t, :, None], beta[:, t, :, None, None]
        state = g[:, t].exp().unsqueeze(-1) * state
        state = state + b * key * (v[:, :, t, None] - key.mT @ state)
        outs.append(unit[0][:, :, t, None] @ state.repeat_interleave(H // HKV, 1))
    delta_out = torch.cat(outs, 2)
    if "output_gate.up" in weights:
        y = x @ weights["output_gate.down"].T @ weights["output_gate.up"].T
        y = y.view(2, length, H, E) + weights["output_gate.bias"]
        delta_out = delta_out * (2 * torch.sigmoid(y)).transpose(1, 2)
    q, k, v = window_inputs
    if window is None:
        return delta_out
    scores = q @ k.repeat_interleave(H // HKV, 1).mT * D**-0.5
    scores = scores.masked_fill(~near_mask(length, window), -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    window_out = scores.softmax(-1) @ v.repeat_interleave(H // HKV, 1)
    logit = (x @ weights["mix_weight"].T + weights["far_log_weight"]).mT.unsqueeze(-1)
    mix = torch.sigmoid(logit - weights["mix_lse"].view(H, 1, 1) * lse)
    return (1 - mix) * window_out + mix * delta_out


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("gate", GATES)
def test_the_output_equals_the_formula(gate, window):
    for negative in (False, True):
        options = {"gate": gate, "window": window, "allow_negative_eigenvalues": negative}
        backend = build("delta", noise=0.5, **options, chunk_size=8)
        q, k, v, x = inputs(30)
        out = backend(q, k, v, hidden_states=x).out
        options = {"gate": gate, "window": window, "negative": negative}
        expected = formula(backend.state_dict(), q, k, v, x, **options)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [None, 5])
def test_convolution_and_output_gate_equal_the_formula(window):
    for options in ({"short_convolution": 4}, {"short_convolution": 2, "output_gate": True}):
        backend = build("delta", noise=0.5, **options, window=window, chunk_size=8)
        q, k, v, x = inputs(30)
        out = backend(q, k, v, hidden_states=x).out
        known = {"gate": "scalar", "window": window, "negative": False}
        expected = formula(backend.state_dict(), q, k, v, x, **known)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_initial_convolution_and_output_gate_do_not_change_the_output():
    plain = build("delta", window=5)
    backend = build("delta", window=5, short_convolution=4, output_gate=True)
    q, k, v, x = inputs(30)
    expected = plain(q, k, v, hidden_states=x).out
    torch.testing.assert_close(backend(q, k, v, hidden_states=x).out, expected)


@pytest.mark.parametrize("window", [None, 5])
def test_the_convolution_ignores_padding_and_other_sequences(window):
    """Outputs and state of packed sequences with padding equal those of separate calls."""
    backend = build("delta", noise=0.5, short_convolution=4, window=window, chunk_size=8)
    q, k, v, x = inputs(30)
    ids = torch.bucketize(torch.arange(30), torch.tensor([12, 27])).expand(2, 30)
    padding = torch.ones(2, 30, dtype=torch.bool)
    padding[:, [0, 4, 5, 14, 20, 29]] = False
    mask = AttentionMask(causal=True, padding=padding, segment_ids=ids)
    packed = backend(q, k, v, hidden_states=x, mask=mask, return_state=True)
    for segment in (0, 1, 2):  # the last has one token, fewer than the width of the convolution
        part = padding[0] & (ids[0] == segment)
        separate = backend(
            q[:, :, part], k[:, :, part], v[:, :, part], hidden_states=x[:, part], return_state=True
        )
        torch.testing.assert_close(packed.out[:, :, part], separate.out)
    for name in ("kv", "convolved"):
        torch.testing.assert_close(getattr(packed.state, name), getattr(separate.state, name))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_padded_rows_are_decoded_as_each_alone(window, reuse):
    """A prompt, a part of it after a state, and steps of single tokens; all with padding."""
    backend = build("delta", noise=0.5, short_convolution=4, window=window, chunk_size=8)
    q, k, v, x = inputs(26)
    padding = torch.ones(2, 26, dtype=torch.bool)
    padding[0, :9] = False  # the row has fewer tokens of the second part than the window
    padding[0, [20, 23]] = padding[1, [21, 24, 25]] = False
    for part in (q, k, v, x.unsqueeze(1)):
        part.transpose(1, 2)[~padding] = torch.nan
    state, outs = None, []
    bounds = [0, 6, 13, *range(14, 27)]
    with torch.no_grad():
        for start, stop in pairwise(bounds):
            now = slice(start, stop)
            mask = AttentionMask(causal=True, padding=padding[:, now])
            options = {"mask": mask, "hidden_states": x[:, now], "state": state}
            options |= {"return_state": True, "reuse_state": reuse and state is not None}
            out, state, *_ = backend(q[:, :, now], k[:, :, now], v[:, :, now], **options)
            outs.append(out)
        out = torch.cat(outs, 2)
        for row in (0, 1):
            real = padding[row]
            alone = [y[row : row + 1, :, real] for y in (q, k, v)]
            options = {"hidden_states": x[row : row + 1, real], "return_state": True}
            exact = backend(*alone, **options)
            torch.testing.assert_close(out[row : row + 1, :, real], exact.out)
            assert not out[row, :, ~real].any()
            for name, ours, theirs in zip(state._fields, state, exact.state, strict=True):
                torch.testing.assert_close(ours[row : row + 1], theirs, msg=name)


def test_convolution_and_output_gate_return_no_attention_weights():
    for options in ({"short_convolution": 4}, {"output_gate": True}):
        backend, (q, k, v, x) = build("delta", noise=0.5, **options), inputs(5)
        with pytest.raises(UnsupportedError, match="no single matrix of attention weights"):
            backend(q, k, v, hidden_states=x, return_weights=True)


@pytest.mark.parametrize("gate", GATES)
def test_parameters_have_gradients_and_initial_decays_are_equal(gate):
    options = {"short_convolution": 4, "output_gate": True, "feature_map": "learned_linear"}
    backend = build("delta", gate=gate, window=5, **options)
    q, k, v, x = inputs(30)
    backend(q, k, v, hidden_states=x).out.square().sum().backward()
    without = {n for n, p in backend.named_parameters() if p.grad is None or not p.grad.any()}
    # the first factor of a product of which the second factor is initially 0
    assert without == {"output_gate.down", *(["gate.down"] if gate == "vector" else [])}
    if gate != "none":
        log_decay = backend.gate(k, x).log_decay
        torch.testing.assert_close(log_decay, torch.full_like(log_decay, -DELTA_RATE))


def test_the_initial_output_is_close_to_window_attention():
    backend = build("delta", window=5, far_weight=0.01)
    for length in (20, 400):
        q, k, v, x = inputs(length)
        window = softmax_attention(q, k, v, mask=near_mask(length, 5)).out
        error = (backend(q, k, v, hidden_states=x).out - window).norm() / window.norm()
        assert 1e-4 < error < 0.02


def test_large_window_scores_reduce_the_mixing_weight():
    backend = build("delta", window=5, far_weight=0.5)
    with torch.no_grad():
        backend.mix_lse.fill_(1.0)
    q, k, v, x = inputs(30)
    q[:, :, 20] = 9 * k.repeat_interleave(H // HKV, 1)[:, :, 20]
    window = softmax_attention(q, k, v, mask=near_mask(30, 5)).out
    change = (backend(q, k, v, hidden_states=x).out - window).norm(dim=-1)
    assert (change[:, :, 20] < 0.01 * change[:, :, 21:].mean()).all()


def test_feature_maps_can_have_more_features_than_the_head_size():
    options = {"feature_map": "hedgehog_exp", "num_features": 24, "gate": "vector"}
    backend = build("delta", noise=0.5, chunk_size=8, **options)
    reference = build("delta", impl="reference", **options)
    reference.load_state_dict(backend.state_dict())
    q, k, v, x = inputs(20)
    output = backend(q, k, v, hidden_states=x, return_state=True)
    torch.testing.assert_close(output.out, reference(q, k, v, hidden_states=x).out)
    assert output.state.kv.shape == (2, HKV, 24, E)
    assert output.impl.reason.startswith("chunk form; ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "cosine"}, "feature_map='cosine' depends on positions"),
        ({"gate": "vectors"}, r"DeltaConfig.gate: No gate is called 'vectors'.* 'none' is no gate"),
        ({"gate": "hgrn2"}, "gate='hgrn2' does not fit the delta rule: it multiplies keys"),
        ({"gate": "mlstm"}, "'mlstm' does not fit .* has a state of its own; take one of none, "),
        ({"window": 0}, "window must be at least 1 token, got 0"),
        ({"chunk_size": 0}, "chunk_size must be at least 1 token, got 0"),
        ({"far_weight": 0.2}, "far_weight needs a window"),
        (
            {"short_convolution": 1},
            "short_convolution must be 0 \\(none\\) or a width of at least 2",
        ),
        ({"eps": 0.1}, "has no option 'eps'"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build("delta", noise=0.5, **options)


def test_unsupported_layers_and_calls_are_refused():
    for changes, message in (
        ({"causal": False}, "the layer is bidirectional"),
        ({"hidden_size": None}, "hidden size is unknown, and write strengths"),
        ({"cross_attention": True}, "the layer is cross-attention"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            build("delta", noise=0.5, sizes=changes)
    q, k, v, x = inputs(5)
    with pytest.raises(UnsupportedError, match="hidden_states are missing"):
        build("delta", noise=0.5)(q, k, v)
    with pytest.raises(UnsupportedError, match=r"hidden_states have shape \(2, 4, 12\)"):
        build("delta", noise=0.5)(q, k, v, hidden_states=x[:, :4])
