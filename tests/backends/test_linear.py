"""The linear backend: against a dense formula in this file, its weights, options and errors."""

import math
from functools import partial

import pytest
import torch

from attnzoo.backends.feature_maps.base import register_feature_map
from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.registry import build_backend
from tests import helpers
from tests.helpers import HKV, D, H, qkv

build = partial(helpers.build, "linear", noise=0.3)

MAPS = ["elu+1", "relu", "exp", "hedgehog"]


def phi(backend, q, k):
    """Return the features of queries and of keys, the latter once per query head."""
    wide = torch.float32 if q.dtype.itemsize < 4 else q.dtype
    q, k = q.to(wide), k.to(wide).repeat_interleave(H // HKV, 1)
    match backend.config.feature_map:
        case "elu+1":
            return [torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k)]
        case "relu":
            return [x.clamp(min=0) + 1e-3 for x in (q, k)]
        case "exp":
            q, k = q / D**0.25, k / D**0.25
            return (q - q.max(-1, keepdim=True).values).exp(), k.clamp(max=30).exp()
        case "hedgehog":
            w = dict(backend.feature_map.named_parameters())
            mapped = []
            for x, name in (q, "query_residual"), (k, "key_residual"):
                matrix = (torch.eye(D) + w[name]).to(wide)
                matrix = matrix if x is q else matrix.repeat_interleave(H // HKV, 0)
                y = torch.einsum("hfd,bhtd->bhtf", matrix, x)
                mapped.append(torch.cat([y.softmax(-1), (-y).softmax(-1)], -1))
            return mapped


def dense(backend, q, k, v, *, seen=None):
    """Attend with a matrix; ``seen`` is broadcastable to [B, H, T, S]."""
    features_q, features_k = phi(backend, q, k)
    weights = features_q @ features_k.mT
    if seen is not None:
        weights = weights * seen
    if backend.config.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + backend.config.eps)
    return (weights @ v.to(weights.dtype).repeat_interleave(H // HKV, 1)).to(v.dtype)


def lower(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_causal_equals_dense_attention(name, normalize):
    backend, x = build(feature_map=name, normalize=normalize), qkv(37)
    torch.testing.assert_close(backend(*x).out, dense(backend, *x, seen=lower(37)))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("length", "keys"), [(21, 21), (5, 33), (33, 5), (1, 12)])
def test_bidirectional_and_cross_attention_equal_dense_attention(name, length, keys):
    backend, x = (
        build(feature_map=name, causal=False, cross_attention=length != keys),
        qkv(length, keys),
    )
    torch.testing.assert_close(backend(*x).out, dense(backend, *x))


@pytest.mark.parametrize("name", ["exp", "hedgehog"])
def test_cross_attention_ignores_padded_keys(name):
    backend, (q, k, v) = build(feature_map=name, causal=False, cross_attention=True), qkv(4, 9)
    padding_mask = torch.rand(2, 9) > 0.5
    padding_mask[1] = False  # a row without visible keys
    expected = dense(backend, q, k, v, seen=padding_mask[:, None, None, :])
    is_padding = ~padding_mask[:, None, :, None]
    k, v = k.masked_fill(is_padding, torch.nan), v.masked_fill(is_padding, torch.nan)
    ours = backend(q, k, v, mask=AttentionMask(padding=padding_mask)).out
    torch.testing.assert_close(ours, expected)
    assert ours[1].eq(0).all()


def test_the_backend_records_the_implementation_of_a_call():
    backend, x = build(), qkv(9)
    backend(*x)
    assert "chunk" in backend.ran.reason
    token = [t[:, :, :1] for t in x]
    backend(*token)
    assert "one token" in backend.ran.reason
    plain = build(impl="torch")
    plain(*token)
    assert "one token" in plain.ran.reason
    reference = build(impl="reference")
    reference(*x)
    assert reference.ran.impl == "reference"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [1, 50])
def test_exp_features_of_keys_of_norm_1000_stay_finite(dtype, length):
    """Without a bound, features overflow: exp(89) is infinite in float32, exp(12) in float16."""
    backend = build(feature_map="exp").to(dtype)
    q, k, v = qkv(length, dtype=torch.float32)
    k = 1e3 * k / k.norm(dim=-1, keepdim=True)
    x = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    out = backend(*x).out
    out.float().square().sum().backward()
    assert out.isfinite().all()
    assert out.abs().max() <= x[2].abs().max() * 1.01  # means of the values
    assert all(t.grad.isfinite().all() for t in x)


@pytest.mark.parametrize("name", ["elu+1", "hedgehog"])
def test_autocast_does_not_change_the_output(name):
    backend, x = build(torch.float32, feature_map=name), qkv(30, dtype=torch.float32)
    plain = backend(*x).out
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(backend(*x).out, plain)


def test_hedgehog_is_initialised_as_two_softmaxes():
    geometry = Geometry(num_heads=H, num_key_heads=HKV, head_dim=D)
    backend, (q, k, _) = build_backend("linear", {"feature_map": "hedgehog"}, geometry), qkv(7)
    assert {name: tuple(x.shape) for name, x in backend.named_parameters()} == {
        "feature_map.query_residual": (H, D, D),
        "feature_map.key_residual": (HKV, D, D),
    }
    k = k.repeat_interleave(2, 1)
    two = [torch.cat([x.softmax(-1), (-x).softmax(-1)], -1) for x in (q, k)]
    torch.testing.assert_close(backend.double().feature_map.queries(q, 1.0), two[0])
    torch.testing.assert_close(backend.feature_map.keys(k[:, ::2], 1.0), two[1][:, ::2])


def test_loaded_weights_survive_a_guarded_reset():
    """Transformers marks loaded weights, and its guard makes torch's initialisers skip them."""
    from transformers.initialization import guard_torch_init_functions

    backend = build(feature_map="hedgehog")
    loaded, missing = backend.feature_map.query_residual, backend.feature_map.key_residual
    loaded._is_hf_initialized = True
    before = loaded.detach().clone()
    with guard_torch_init_functions():
        backend.reset_parameters()
    assert torch.equal(loaded, before)
    assert missing.eq(0).all()


@pytest.mark.usefixtures("no_new_maps")
def test_a_registered_function_is_a_feature_map():
    @register_feature_map("square and one")
    def square(x):
        return torch.cat([x * x, torch.ones_like(x[..., :1])], -1)

    backend, (q, k, v) = build(feature_map="square and one"), qkv(11)
    assert backend.feature_map.size == D + 1
    weights = (square(q) @ square(k.repeat_interleave(2, 1)).mT) * lower(11)
    expected = weights / weights.sum(-1, keepdim=True) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(backend(q, k, v).out, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "hedgehogs"}, "Did you mean 'hedgehog'"),
        ({"feature_map": 3}, "feature_map must be str, got 3"),
        ({"feature_maps": "relu"}, "Did you mean 'feature_map'"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"chunk_size": 2.5}, "chunk_size must be int or None"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"eps": math.nan}, "eps must be float"),
        ({"normalize": 1}, "normalize must be bool"),
        ({"impl": "tritn"}, "impl must be 'auto' or"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match="Backend 'linear'") as caught:
        build(**options)
    assert message in str(caught.value)


def error_message(backend, *x, **options):
    """Return the message of the error that a call raises."""
    with pytest.raises(UnsupportedError, match=r"layer\.attn: backend 'linear'") as caught:
        backend(*x, **options)
    return str(caught.value)


def test_unsupported_calls_are_refused():
    state = build()(*qkv(3), return_state=True).state
    assert "3 queries and 5 keys" in error_message(build(), *qkv(3, 5))
    bidirectional = build(causal=False)
    assert "only causal" in error_message(bidirectional, *qkv(3), return_state=True)
    assert "only causal" in error_message(bidirectional, *qkv(3), state=state)
    q, k, v = qkv(3)
    message = error_message(build(), q[..., :4], k[..., :4], v)
    assert "(the layer has 4 and 2 of size 8)" in message
    assert "4 query and 2 key heads of size 4" in message
    assert "2 query and 2 key heads" in error_message(build(), q[:, :2], k, v)
    assert "(softmax and flash do)" in error_message(build(), q, k, v, softcap=5.0)
