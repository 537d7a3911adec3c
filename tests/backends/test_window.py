"""The option ``window`` of linear, gated_linear and performer."""

import math

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.registry import get_backend
from attnzoo.testing import check_backend
from tests.helpers import HKV, D, E, H, M, build

WINDOWED = [
    ("linear", {"window": 5}),
    ("linear", {"feature_map": "hedgehog", "window": 20, "chunk_size": 16}),
    ("linear", {"feature_map": "exp", "window": 5, "impl": "reference"}),
    ("gated_linear", {"window": 5, "chunk_size": 16}),
    ("gated_linear", {"gate": "retnet", "window": 20}),
    ("gated_linear", {"gate": "mamba2", "window": 5, "feature_map": "taylor"}),
    ("gated_linear", {"gate": "hgrn2", "window": 5}),
    ("performer", {"num_features": 16, "window": 5}),
]
WITH_SINKS = [  # sinks with a linear state and with decays
    pytest.param("linear", {"window": 4, "num_sinks": 2}),
    pytest.param(
        "gated_linear",
        {"gate": "mamba2", "window": 5, "num_sinks": 2},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "performer",
        {"num_features": 16, "window": 5, "num_sinks": 2},
        marks=pytest.mark.exhaustive,
    ),
]
WINDOW_5 = [(name, options) for name, options in WINDOWED if options["window"] == 5]
RELATIVE = [(name, options) for name, options in WINDOW_5 if name != "performer"]


def inputs(length, dtype=torch.float64):
    q = torch.randn(2, H, length, D, dtype=dtype)
    k, v = (torch.randn(2, HKV, length, n, dtype=dtype) for n in (D, E))
    return q, k, v, {"hidden_states": torch.randn(2, length, M, dtype=dtype)}


EXHAUSTIVE = [pytest.param(*case, marks=pytest.mark.exhaustive) for case in WINDOWED[2:]]


@pytest.mark.parametrize(("name", "options"), [WINDOWED[1], *EXHAUSTIVE, *WITH_SINKS], ids=str)
def test_conformance(name, options):
    cls = get_backend(name)
    report = check_backend(cls, config=cls.config_class.from_options(name, options))
    assert {"padding", "packing", "decoding"} <= set(report.passed)


@pytest.mark.parametrize(
    ("name", "options", "causal"),
    [(*x, causal) for causal in (True, False) for x in RELATIVE if causal or x[0] == "linear"],
    ids=str,
)
def test_the_initial_output_is_close_to_window_attention(name, options, causal):
    backend = build(name, **options, far_weight=0.01, causal=causal)
    for length in (20, 700):
        q, k, v, more = inputs(length)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        in_window = (distance >= 0) & (distance < 5) if causal else distance.abs() <= 5
        window = softmax_attention(q, k, v, mask=in_window).out
        out = backend(q, k, v, **more).out
        error = (out - window).norm() / window.norm()
        assert 1e-5 < error < 0.05, f"{error:.1e} at {length} tokens"


def test_a_performer_of_full_weight_converges_to_softmax():
    """More features reduce the error of the hybrid relative to softmax attention."""
    q, k, v, _ = inputs(40)
    q, k = 0.5 * q, 0.5 * k
    exact = softmax_attention(q, k, v, mask=torch.ones(40, 40, dtype=torch.bool).tril()).out
    errors = []
    for features in (64, 4096):
        options = {"num_features": features, "window": 5, "far_weight": 1.0}
        out = build("performer", **options)(q, k, v).out.detach()
        errors.append(float((out - exact).norm() / exact.norm()))
    assert errors[1] < 0.02
    assert errors[1] < errors[0] / 3


def test_an_initial_performer_is_as_close_to_softmax_as_the_window():
    backend = build("performer", num_features=16, window=5)
    for length in (20, 500):
        q, k, v, _ = inputs(length)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        exact = softmax_attention(q, k, v, mask=distance >= 0).out
        window = softmax_attention(q, k, v, mask=(distance >= 0) & (distance < 5)).out
        out = backend(q, k, v).out.detach()
        assert (out - exact).norm() < 1.01 * (window - exact).norm()


def test_the_output_equals_the_formula():
    """The formula reads the weight of the linear branch from the state dict."""
    backend = build("linear", feature_map="elu+1", window=5)
    q, k, v, _ = inputs(30)
    out, weight = backend(q, k, v).out, backend.state_dict()["far_log_weight"][:, None, None]
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    distance = torch.arange(30)[:, None] - torch.arange(30)
    in_window = (distance >= 0) & (distance < 5)
    softmax = (q @ k.mT * D**-0.5).masked_fill(~in_window, -math.inf).softmax(-1)
    phi = [torch.nn.functional.elu(x) + 1 for x in (q, k)]
    count = (torch.arange(30) - 4).clamp(min=1)[:, None]
    far = (phi[0] @ phi[1].mT).masked_fill(distance < 5, 0) * weight.exp() / count
    exact = (softmax + far) @ v / (1 + far.sum(-1, keepdim=True))
    torch.testing.assert_close(out, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "options"), WINDOW_5, ids=str)
def test_the_weight_of_the_linear_branch_has_gradients(name, options):
    backend = build(name, **options)
    q, k, v, more = inputs(30)
    backend(q, k, v, **more).out.square().sum().backward()
    grad = backend.far_log_weight.grad
    assert grad.shape == (H,)
    assert (grad != 0).all()


def test_the_initial_weight_of_the_linear_branch_is_about_far_weight():
    for name, feature_map in (("linear", "elu+1"), ("linear", "hedgehog"), ("linear", "relu")):
        backend = build(name, window=5, feature_map=feature_map, far_weight=0.1)
        q, k, v, _ = inputs(500)
        ones = torch.ones_like(v)
        ones[:, :, -100:] = 0  # the last queries return the weight of the first 400 keys
        share = backend(q, k, ones).out[:, :, -50:].mean()
        ratio = share / (1 - share) * 495 / 400
        assert 0.07 < ratio < 0.14


def test_invalid_windows_are_refused():
    for name in ("linear", "gated_linear", "performer"):
        with pytest.raises(ConfigError, match=r"window must be at least 1 token, got 0"):
            build(name, window=0)
        with pytest.raises(ConfigError, match=r"far_weight must be above 0, got -1"):
            build(name, window=4, far_weight=-1.0)
        with pytest.raises(ConfigError, match=r"far_weight needs a window"):
            build(name, far_weight=0.5)
    for name in ("linear", "gated_linear"):
        with pytest.raises(ConfigError, match=r"eps has no effect with a window, got eps=0.1"):
            build(name, window=4, eps=0.1)
    with pytest.raises(ConfigError, match=r"window needs normalize=True"):
        build("linear", window=4, normalize=False)
    with pytest.raises(ConfigError, match=r"window does not support feature_map='cosine'"):
        build("linear", window=4, feature_map="cosine", max_length=9)
    with pytest.raises(ConfigError, match=r"window does not support gate='mlstm'"):
        build("gated_linear", window=4, gate="mlstm")
    with pytest.raises(
        UnsupportedError, match=r"the layer is cross-attention, in which queries and keys"
    ):
        build("linear", window=4, causal=False, cross_attention=True)


def test_unsupported_sinks_are_refused():
    for name in ("linear", "gated_linear", "delta"):
        with pytest.raises(ConfigError, match="num_sinks needs a window, got num_sinks=2"):
            build(name, num_sinks=2)
    options = {"window": 4, "num_sinks": 2}
    with pytest.raises(UnsupportedError, match="the layer is bidirectional, where num_sinks=2"):
        build("linear", **options, causal=False)
    q, k, v, more = inputs(8)
    with pytest.raises(UnsupportedError, match="the mask is bidirectional, where num_sinks=2"):
        build("linear", **options)(q, k, v, mask=AttentionMask(), **more)
    for name in ("linear", "flash"):
        assert "num_sinks=2 is unsupported" in "".join(build(name, **options).shard_reasons())


def test_a_state_without_a_causal_mask_is_refused():
    q, k, v, _ = inputs(8)
    with pytest.raises(UnsupportedError, match="only causal calls have it"):
        build("linear", window=4, causal=False)(q, k, v, mask=AttentionMask(), return_state=True)


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {"feature_map": "hedgehog"}),
        ("linear", {"feature_map": "hedgehog_exp"}),  # its weights are inputs of the C++ op
        ("gated_linear", {"feature_map": "hedgehog_exp", "gate": "gla"}),
        ("delta", {"feature_map": "hedgehog_exp"}),
    ],
    ids=str,
)
def test_rows_within_the_window_give_every_parameter_a_gradient(name, options, causal, impl):
    """Of zeros in the linear branch: DistributedDataParallel waits for all of them."""
    if name != "linear" and not causal:
        pytest.skip(f"{name} serves decoders")
    backend = build(name, causal=causal, window=16, impl=impl, **options).float().train()
    q, k, v, extra = inputs(8, torch.float32)
    out = backend(q, k, v, mask=AttentionMask(causal=causal), **extra).out
    out.sum().backward()
    for key, parameter in backend.named_parameters():
        assert parameter.grad is not None, key
        if name != "delta":  # which keeps the state's part of a query without earlier keys, too
            assert not parameter.grad.any(), key  # no key is outside the window


def test_flex_without_a_window_is_refused():
    with pytest.raises(UnsupportedError, match="impl='flex' computes windows, and window=None"):
        build("linear", impl="flex")
