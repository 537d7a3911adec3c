"""Feature map functions: formulas, extreme inputs and gradients."""

import math
import sys
from types import ModuleType

import pytest
import torch

from attnzoo.ops.features.functional import (
    EXP_BOUND,
    RELU_FLOOR,
    cosine,
    dpfp,
    elu_plus_one,
    exp_keys,
    exp_queries,
    hedgehog,
    learned_exp,
    learned_squared_relu,
    random_fourier,
    relu,
    softmax,
    taylor,
)
from attnzoo.ops.features.random_features import random_projection
from attnzoo.runtime import kernel_calls

SCALE = 16**-0.5
RESIDUAL = 0.3 * torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(1))
BIAS = 0.3 * torch.randn(3, 16, generator=torch.Generator().manual_seed(2))
FREQUENCIES = random_projection(32, 16)
ROWS = 0.3 * torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(3))
ROWS_BIAS = 0.3 * torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
MAPS = {
    "elu+1": elu_plus_one,
    "relu": relu,
    "exp queries": lambda x: exp_queries(x, SCALE),
    "exp keys": lambda x: exp_keys(x, SCALE),
    "hedgehog": lambda x: hedgehog(x, RESIDUAL),
    "hedgehog_exp": lambda x: learned_exp(x, ROWS, ROWS_BIAS),
    "squared_relu": lambda x: learned_squared_relu(x, ROWS, ROWS_BIAS),
    "softmax": softmax,
    "cosine": lambda x: cosine(x, torch.arange(x.shape[2]).expand(len(x), -1), 4),
    "taylor": lambda x: taylor(x, SCALE),
    "dpfp": lambda x: dpfp(x, 3),
    "random": lambda x: random_fourier(x, FREQUENCIES),
}
SIGNED = ("taylor", "random")


def draw(spread=1.0, dtype=torch.float64):
    return (torch.randn(2, 3, 5, 16, dtype=torch.float64) * spread).to(dtype)


def test_elu_plus_one_equals_the_formula():
    x = torch.tensor([-700.0, -20.0, -1.0, -0.0, 0.0, 0.5, 300.0], dtype=torch.float64)
    expected = [math.exp(t) if t < 0 else t + 1 for t in x.tolist()]
    torch.testing.assert_close(elu_plus_one(x), x.new_tensor(expected), atol=1e-15, rtol=1e-15)


def test_relu_has_a_floor():
    x = torch.tensor([-5.0, 0.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(relu(x), x.new_tensor([RELU_FLOOR, RELU_FLOOR, 2 + RELU_FLOOR]))


def test_exp_weights_match_the_naive_formula():
    q, k = draw(3.0), draw(3.0)
    naive = (q[..., :, None, :] + k[..., None, :, :]).mul(math.sqrt(SCALE)).exp().sum(-1)
    ours = exp_queries(q, SCALE) @ exp_keys(k, SCALE).mT
    torch.testing.assert_close(ours / ours.sum(-1, True), naive / naive.sum(-1, True))


def test_exp_kernel_equals_the_scaled_product_to_lowest_order():
    """In the part that depends on both query and key."""
    q, k = draw(), draw()

    def kernel(small_q, small_k):
        factor = (small_q * math.sqrt(SCALE)).amax(-1, keepdim=True).exp()  # removed from queries
        return (factor * exp_queries(small_q, SCALE) * exp_keys(small_k, SCALE)).sum(-1)

    t, zero = 1e-3, torch.zeros_like(q)
    both = kernel(t * q, t * k) - kernel(t * q, zero) - kernel(zero, t * k) + kernel(zero, zero)
    torch.testing.assert_close(both / t**2, SCALE * (q * k).sum(-1), atol=2e-2, rtol=0)


def test_exp_queries_are_at_most_one():
    features = exp_queries(draw(1e4, torch.float32), SCALE)
    assert features.amax(-1).eq(1).all()
    assert features.ge(0).all()


def test_exp_keys_are_bounded():
    """Exponents are far above float32's limit of 88; sums and gradients are finite."""
    k = torch.randn(1, 1, 64, 16)
    k = (1e3 * k / k.norm(dim=-1, keepdim=True)).requires_grad_()
    assert (k * math.sqrt(SCALE)).max() > 3 * 88
    features = exp_keys(k, SCALE)
    assert features.max().item() == pytest.approx(math.exp(EXP_BOUND), rel=1e-5)
    total = (features.sum(2) * 1e6).sum() * 1e5  # 1e6 times as many keys, values of 1e5
    total.backward()
    assert total.isfinite()
    assert k.grad.isfinite().all()


def test_exp_keys_below_the_bound_do_not_change():
    k = draw(5.0)
    torch.testing.assert_close(exp_keys(k, SCALE), (k * SCALE**0.5).exp(), atol=0, rtol=1e-14)


def test_hedgehog_is_two_softmaxes_per_head():
    x, residual = draw(2.0), RESIDUAL.double()
    for head in range(3):
        y = torch.stack([(torch.eye(16) + residual[head]).double() @ t for t in x[0, head]])
        positive, negative = y.exp(), (-y).exp()
        expected = torch.cat(
            [positive / positive.sum(1, True), negative / negative.sum(1, True)], 1
        )
        torch.testing.assert_close(hedgehog(x, residual)[0, head], expected)


def test_hedgehog_matrix_of_lolcats_is_the_transpose():
    x, residual = draw(), RESIDUAL.double()
    theirs = (torch.eye(16) + residual).mT  # [heads, d, f], applied from the right
    y = torch.einsum("hdf,bhld->bhlf", theirs, x)
    expected = torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
    torch.testing.assert_close(hedgehog(x, residual), expected)


def test_blocks_of_tokens_give_the_same_features(monkeypatch):
    monkeypatch.setattr(kernel_calls, "BLOCK_BYTES", 2 * 3 * 16 * 8)  # blocks of one token
    x = torch.randn(2, 3, 40, 16, dtype=torch.float64)
    function = MAPS["hedgehog"]
    whole = function(x.clone().requires_grad_())
    torch.testing.assert_close(function(x), whole)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(function(strided), whole)


@pytest.mark.parametrize("function", [hedgehog, learned_exp])
def test_features_of_one_token_equal_those_of_many(function):
    torch.manual_seed(0)
    x, *weights = torch.randn(3, 2, 5, 4).double(), torch.randn(2, 4, 4).double()
    weights += [torch.randn(2, 4).double()] if function is learned_exp else []
    many = function(x, *weights)
    one = torch.cat([function(token, *weights) for token in x.split(1, 2)], 2)
    torch.testing.assert_close(one, many)


def test_learned_exp_is_bounded():
    x, weight, bias = draw(2.0), ROWS.double(), ROWS_BIAS.double()
    for head in range(3):
        expected = (x[0, head] @ weight[head].mT + bias[head]).exp()
        torch.testing.assert_close(learned_exp(x, weight, bias)[0, head], expected)
    large = learned_exp(1e3 * x, weight, bias)
    assert large.max() == math.exp(EXP_BOUND)


def test_cosine_weights_depend_on_the_distance():
    """relu(q_i) relu(k_j) cos(pi (i - j) / 2M), with positions clamped at M - 1."""
    q, k, length = draw(), draw(), 3
    positions = torch.tensor([[0, 1, 2, 3, 9], [4, 5, 6, 7, 8]])
    ours = cosine(q, positions, length) @ cosine(k, positions, length).mT
    clamped = positions.clamp(max=2).double()
    distance = clamped[:, :, None] - clamped[:, None, :]
    expected = relu(q) @ relu(k).mT * (math.pi * distance / (2 * length)).cos()[:, None]
    torch.testing.assert_close(ours, expected)
    assert ours.gt(0).all()


def test_taylor_kernel_equals_the_polynomial():
    q, k = draw(2.0), draw(2.0)
    score = SCALE * (q @ k.mT)
    features = taylor(q, SCALE)
    assert features.shape[-1] == 1 + 16 + 16 * 17 // 2
    torch.testing.assert_close(features @ taylor(k, SCALE).mT, 1 + score + score**2 / 2)


def test_taylor_weights_of_large_rows_keep_their_sign():
    q, k = (30 * torch.nn.functional.normalize(torch.randn(1, 1, 500, 64), dim=-1) for _ in "qk")
    scale = 3000 / 900
    assert (taylor(q, scale) * taylor(k, scale)).sum(-1).gt(0).all()


def test_dpfp_equals_the_formula():
    """r_i r_{i - j} entry by entry, with cyclic indices, as in the paper."""
    x = draw()[0, 0, 0]
    r = [max(t, 0.0) for t in x.tolist()] + [max(-t, 0.0) for t in x.tolist()]
    expected = [r[i] * r[i - j] for j in (1, 2, 3) for i in range(32)]
    torch.testing.assert_close(dpfp(x, 3), x.new_tensor(expected))


def test_random_features_estimate_the_exponential_of_the_cosine():
    """Unbiased over 100 draws, with an error inversely proportional to the frequencies."""
    q, k = (torch.randn(6, 16, dtype=torch.float64) * 3 for _ in "qk")
    exact = (
        torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).T
    ).exp()

    def draws(frequencies):
        generator = torch.Generator().manual_seed(0)
        for _ in range(100):
            drawn = torch.randn(frequencies, 16, generator=generator, dtype=torch.float64)
            yield random_fourier(q, drawn) @ random_fourier(k, drawn).T

    errors = []
    for frequencies in 32, 128:
        found = torch.stack(list(draws(frequencies)))
        spread = found.std(0) / 100**0.5
        assert ((found.mean(0) - exact).abs() < 4.5 * spread).all()
        errors.append((found - exact).square().mean())
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)


def test_random_features_do_not_depend_on_the_norm():
    x = draw()
    torch.testing.assert_close(random_fourier(x, FREQUENCIES), random_fourier(9 * x, FREQUENCIES))


@pytest.fixture
def published(naive, monkeypatch):
    """The feature maps of flash-linear-attention, without the kernels that they import."""
    for name, members in {
        "fla.modules.activations": ("fast_gelu_impl", "sigmoid", "sqrelu", "swish"),
        "fla.modules.layernorm": ("layer_norm",),
        "fla.utils": ("checkpoint",),
    }.items():
        module = ModuleType(name)
        vars(module).update({member: lambda function: function for member in members})
        monkeypatch.setitem(sys.modules, name, module)
    return naive("modules/feature_map.py")


def test_maps_equal_those_of_flash_linear_attention(published):
    x = draw()[:, 0]
    torch.testing.assert_close(dpfp(x, 3), published.DPFPFeatureMap(16, nu=3)(x))
    theirs = published.TaylorFeatureMap(16)(x)  # scaled by D ** -0.5, which is SCALE
    ours = taylor(x, SCALE)
    torch.testing.assert_close(ours.sort(-1).values, theirs.sort(-1).values)


@pytest.mark.parametrize("name", MAPS)
def test_gradients(name):
    x = draw().flatten(0, 1)[:3, :2].reshape(1, 3, 2, 16).requires_grad_()
    assert torch.autograd.gradcheck(MAPS[name], x, fast_mode=name == "taylor")


def test_gradients_of_the_hedgehog_weights():
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(hedgehog, (x, residual))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_features_are_computed_in_float32(name, dtype):
    """The only error of 16-bit inputs is their own rounding."""
    x = draw(4.0, dtype)
    features = MAPS[name](x)
    assert features.dtype == torch.float32
    assert features.isfinite().all()
    assert name in SIGNED or features.ge(0).all()
    torch.testing.assert_close(features, MAPS[name](x.double()).float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MAPS)
def test_large_inputs_give_finite_results(name):
    """For the largest float16 too; also sums over keys and gradients."""
    x = torch.tensor([65504.0, -65504.0, 1e3, 0.0]).repeat(4).expand(1, 3, 2, 16)
    x = x.clone().requires_grad_()
    total = MAPS[name](x).sum() * 1e6
    total.backward()
    assert total.isfinite()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", MAPS)
def test_float64_inputs_give_float64(name):
    assert MAPS[name](draw()).dtype == torch.float64
