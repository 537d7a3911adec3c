"""Feature maps in the linear backend: formulas, sizes, options, positions, custom maps."""

import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnzoo
from attnzoo.backends.feature_maps import base as feature_maps
from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.registry import build_backend
from tests import helpers
from tests.helpers import HKV, D, E, H, qkv

OPTIONS = {
    "identity": {"normalize": False},
    "softmax": {},
    "cosine": {"max_length": 30},
    "taylor": {},
    "dpfp": {"nu": 2},
    "random": {"num_features": 64, "seed": 3},
    "hedgehog_exp": {"num_features": 12, "seed": 3},
    "squared_relu": {"num_features": 12, "seed": 3},
}
SIZES = {
    "identity": D,
    "softmax": D,
    "cosine": 2 * D,
    "taylor": 1 + D + D * (D + 1) // 2,
    "dpfp": 4 * D,
    "random": 64,
    "hedgehog_exp": 12,
    "squared_relu": 12,
}


build = partial(helpers.build, "linear", noise=0.3)


def weights(backend, q, k):
    """Return the weight of each key for each query, [B, H, T, S]."""
    k = k.repeat_interleave(H // HKV, 1)
    w = {name.removeprefix("feature_map."): x for name, x in backend.state_dict().items()}

    match backend.config.feature_map:
        case "identity":
            return q @ k.mT
        case "softmax":
            return q.softmax(-1) @ k.softmax(-1).mT
        case "cosine":
            positions = torch.arange(q.shape[2]).clamp(max=29).double()
            angle = math.pi * (positions[:, None] - positions) / 60
            return (q.relu() + 1e-3) @ (k.relu() + 1e-3).mT * angle.cos()
        case "taylor":
            score = q @ k.mT / D**0.5
            return 1 + score + score**2 / 2
        case "dpfp":
            q, k = (torch.cat([x.relu(), (-x).relu()], -1) for x in (q, k))
            return sum((q * q.roll(j, -1)) @ (k * k.roll(j, -1)).mT for j in (1, 2))
        case "random":
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
            between = q[:, :, :, None] - k[:, :, None]  # cos a cos b + sin a sin b = cos(a - b)
            return math.e * (between @ w["frequencies"].mT).cos().mean(-1)
        case "hedgehog_exp" | "squared_relu":
            q, k = (
                torch.einsum("hfd,bhtd->bhtf", w[f"{name}_weight"].repeat_interleave(n, 0), x)
                + w[f"{name}_bias"].repeat_interleave(n, 0)[:, None]
                for name, x, n in (("query", q, 1), ("key", k, H // HKV))
            )
            if backend.config.feature_map == "squared_relu":
                return (q.relu() ** 2 + 1e-3) @ (k.relu() ** 2 + 1e-3).mT
            return (q[:, :, :, None] + k[:, :, None]).exp().sum(-1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("name", "normalize"),
    [(n, z) for n in OPTIONS for z in (True, False) if OPTIONS[n].get("normalize", z) == z],
)
def test_output_equals_dense_attention(name, normalize, causal):
    """The 70 tokens exceed the maximum length of ``cosine``."""
    options = {**OPTIONS[name], "normalize": normalize}
    backend = build(feature_map=name, causal=causal, **options)
    q, k, v = qkv(70)
    matrix = weights(backend, q, k)
    matrix = matrix.tril() if causal else matrix
    if normalize:
        matrix = matrix / (matrix.sum(-1, keepdim=True) + 1e-12)
    expected = matrix @ v.repeat_interleave(H // HKV, 1)
    torch.testing.assert_close(backend(q, k, v).out, expected)


def test_builtin_names_cannot_be_registered_again(fresh_python):
    """In a new process, before a backend is imported."""
    code = "import attnzoo\n"
    for base, decorator, name in (
        ("FeatureMap", "register_feature_map", "hedgehog"),
        ("Gate", "register_gate", "rwkv6"),
    ):
        code += f"""
try:
    attnzoo.{decorator}({name!r})(type('Own', (attnzoo.{base},), {{}}))
except ValueError as error:
    print(error)
"""
    words = fresh_python(code).stdout
    assert "'hedgehog' belongs to attnzoo.backends." in words
    assert "'rwkv6' belongs to attnzoo.backends." in words


@pytest.mark.parametrize("options", [{}, {"window": 4}])
def test_signed_weights_cannot_be_normalised(options):
    with pytest.raises(ConfigError, match=r"'identity' needs normalize=False and no window"):
        build(feature_map="identity", **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_sizes_and_pickling(name):
    backend, x = build(feature_map=name, **OPTIONS[name]), qkv(5)
    output = backend(*x, return_state=True)
    assert backend.feature_map.size == SIZES[name] == output.state.kv.shape[2]
    again = pickle.loads(pickle.dumps(backend))
    assert torch.equal(again(*x).out, output.out)


def test_forward_hooks_of_the_map_run():
    """Once for queries and once for keys; offloading loads weights in such hooks."""
    backend, seen = build(feature_map="hedgehog"), []
    backend.feature_map.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    backend(*qkv(3))
    assert seen == [(2, H, 3, 2 * D), (2, HKV, 3, 2 * D)]


# -- positions -----------------------------------------------------------------------------------


def test_positions_do_not_count_padding():
    """With padding in a prompt and in decoding, beyond the maximum length."""
    backend, x = build(feature_map="cosine", max_length=9), qkv(14)
    padding_mask = torch.ones(2, 14, dtype=torch.bool)
    padding_mask[0, [0, 1, 5, 6, 10]] = False
    padding_mask[1, 11:] = False
    outs, state = [], None
    for start, stop in (0, 4), (4, 8), *((t, t + 1) for t in range(8, 14)):
        now = slice(start, stop)
        output = backend(
            *(t[:, :, now] for t in x),
            mask=AttentionMask(causal=True, padding=padding_mask[:, now]),
            state=state,
            return_state=True,
        )
        outs.append(output.out)
        state = output.state
    assert state.tokens.tolist() == padding_mask.sum(1).tolist()
    for row in range(2):
        separate = backend(*(t[[row]][:, :, padding_mask[row]] for t in x)).out[0]
        torch.testing.assert_close(torch.cat(outs, 2)[row][:, padding_mask[row]], separate)


def test_positions_restart_in_packed_segments():
    backend, x = build(feature_map="cosine", max_length=20), qkv(14)
    ids = torch.tensor([[0] * 5 + [1] * 9, [3] * 13 + [4]])
    output = backend(*x, mask=AttentionMask(causal=True, segment_ids=ids), return_state=True)
    assert output.state.tokens.tolist() == [9, 1]
    for row, cut in enumerate((5, 13)):
        for part in slice(cut), slice(cut, 14):
            separate = backend(*(t[[row]][:, :, part] for t in x)).out
            torch.testing.assert_close(output.out[[row]][:, :, part], separate)


def test_cosine_uses_the_maximum_length_of_the_model():
    backend = build(feature_map="cosine", sizes={"max_length": 30})
    x = qkv(70)
    assert torch.equal(backend(*x).out, build(feature_map="cosine", max_length=30)(*x).out)


def test_cosine_refuses_unsupported_layers():
    with pytest.raises(UnsupportedError, match=r"layer\.attn.*set max_length, in tokens"):
        build(feature_map="cosine")
    with pytest.raises(UnsupportedError, match="cross-attention does not define"):
        build(feature_map="cosine", max_length=9, cross_attention=True, causal=False)
    backend = build(feature_map="cosine", max_length=9, causal=False)
    q, k, v = qkv(5)
    with pytest.raises(UnsupportedError, match="2 queries and 5 keys"):
        backend(q[:, :, :2], k, v)


# -- options -------------------------------------------------------------------------------------


def test_frequencies_depend_on_seed_and_layer():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, layer, seed = (
        build(feature_map="random", **options).feature_map.frequencies
        for options in ({}, {"seed": 0}, {"layer": 1}, {"seed": 1})
    )
    assert one.shape == (128, D)
    assert torch.equal(one, same)
    assert not torch.equal(one, layer)
    assert not torch.equal(one, seed)
    assert torch.equal(before, torch.get_rng_state())


def test_directions_depend_on_seed_layer_and_key_head():
    layer = {"num_heads": H, "num_key_heads": HKV, "head_dim": D, "value_dim": E, "name": "attn"}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other, seed = (
        build_backend(
            "linear", {"feature_map": "hedgehog_exp", **options}, Geometry(**layer, **given)
        ).feature_map
        for given, options in (({}, {}), ({}, {}), ({"layer": 1}, {}), ({}, {"seed": 1}))
    )
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.key_weight, same.key_weight)
    for different in (other.key_weight, seed.key_weight, one.key_weight.flip(0)):
        assert not torch.equal(one.key_weight, different)
    assert torch.equal(one.query_weight, one.key_weight.repeat_interleave(2, 0))
    block = one.key_weight[0, :D]
    torch.testing.assert_close(block @ block.mT, torch.eye(D), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nu": 2}, "LinearConfig.nu is an option of feature_map='dpfp', got 2"),
        (
            {"feature_map": "dpfp", "seed": 0},
            "seed is an option of feature_map='random' or 'hedgehog_exp' or 'squared_relu', got 0",
        ),
        ({"feature_map": "dpfp", "nu": 0}, "nu must be at least 1, got 0"),
        ({"feature_map": "dpfp", "nu": 1.5}, "LinearConfig.nu must be int or None, got 1.5"),
        (
            {"feature_map": "random", "num_features": 7},
            "num_features must be even, for every frequency has a cosine and a sine, got 7",
        ),
        ({"feature_map": "random", "num_features": -2}, "num_features must be at least 2, got -2"),
        (
            {"feature_map": "random", "seed": -1},
            "seed must be at least 0, got -1; leave it out to have 0",
        ),
        ({"feature_map": "cosine", "max_length": 0}, "max_length must be at least 1, got 0"),
        ({"feature_map": "hedgehog_ex"}, "Did you mean 'hedgehog_exp'"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match="Backend 'linear'") as caught:
        build(**options)
    assert message in str(caught.value)


def test_nu_above_its_limit_is_refused():
    with pytest.raises(UnsupportedError, match=r"layer\.attn.*nu is 16.*at most 15"):
        build(feature_map="dpfp", nu=16)
    build(feature_map="dpfp", nu=15)


# -- custom maps ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_new_maps")
@pytest.mark.parametrize("given", [F.relu, nn.ReLU, "torch.nn.functional:relu6", "os:system"])
def test_maps_have_a_registered_name(given):
    with pytest.raises(
        ConfigError, match=r"'linear': LinearConfig\.feature_map.*(be str|register_feature_map)"
    ):
        attnzoo.AttentionSpec("linear", feature_map=given)
    attnzoo.register_feature_map("own")(F.relu6)
    backend = build(feature_map="own")
    again, (q, k, v) = pickle.loads(pickle.dumps(backend)), qkv(9)
    assert torch.equal(again(q, k, v).out, backend(q, k, v).out)


@pytest.mark.usefixtures("no_new_maps")
def test_custom_map_with_options():
    @attnzoo.register_feature_map("powers")
    class Powers(feature_maps.SameMap):
        options = {"nu": 2}  # noqa: RUF012

        def features(self, x, scale, positions=None):
            return x.abs() ** self.option("nu")

    for options, power in (({}, 2), ({"nu": 3}, 3)):
        backend, (q, k, v) = build(feature_map="powers", normalize=False, **options), qkv(6)
        k = k.repeat_interleave(2, 1)
        matrix = (q.abs() ** power @ (k.abs() ** power).mT).tril()
        torch.testing.assert_close(backend(q, k[:, ::2], v).out, matrix @ v.repeat_interleave(2, 1))
    with pytest.raises(ConfigError, match="seed is an option of feature_map='random' or"):
        build(feature_map="powers", seed=1)
