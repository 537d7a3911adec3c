"""Feature maps against their formulas, at their limits, and in their gradients."""

import math

import pytest
import torch

from attnzoo.ops.feature_maps import (
    EXP_BOUND,
    RELU_FLOOR,
    elu_plus_one,
    exp_keys,
    exp_queries,
    hedgehog,
    relu,
)

SCALE = 16**-0.5
RESIDUAL = 0.3 * torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(1))
MAPS = {
    "elu+1": elu_plus_one,
    "relu": relu,
    "exp queries": lambda x: exp_queries(x, SCALE),
    "exp keys": lambda x: exp_keys(x, SCALE),
    "hedgehog": lambda x: hedgehog(x, RESIDUAL),
}


def entries(spread=1.0, dtype=torch.float64):
    return (torch.randn(2, 3, 5, 16, dtype=torch.float64) * spread).to(dtype)


def test_elu_plus_one():
    x = torch.tensor([-700.0, -20.0, -1.0, -0.0, 0.0, 0.5, 300.0], dtype=torch.float64)
    expected = [math.exp(t) if t < 0 else t + 1 for t in x.tolist()]
    torch.testing.assert_close(elu_plus_one(x), x.new_tensor(expected), atol=1e-15, rtol=1e-15)


def test_relu_never_vanishes():
    x = torch.tensor([-5.0, 0.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(relu(x), x.new_tensor([RELU_FLOOR, RELU_FLOOR, 2 + RELU_FLOOR]))


def test_exp_weighs_keys_as_the_naive_formula():
    q, k = entries(3.0), entries(3.0)
    naive = (q[..., :, None, :] + k[..., None, :, :]).mul(math.sqrt(SCALE)).exp().sum(-1)
    ours = exp_queries(q, SCALE) @ exp_keys(k, SCALE).mT
    torch.testing.assert_close(ours / ours.sum(-1, True), naive / naive.sum(-1, True))


def test_exp_follows_the_scaled_product_at_first_order():
    """What depends on query and key together, beside what each gives alone."""
    q, k = entries(), entries()

    def kernel(small_q, small_k):
        factor = (small_q * math.sqrt(SCALE)).amax(-1, keepdim=True).exp()  # taken out of queries
        return (factor * exp_queries(small_q, SCALE) * exp_keys(small_k, SCALE)).sum(-1)

    t, zero = 1e-3, torch.zeros_like(q)
    both = kernel(t * q, t * k) - kernel(t * q, zero) - kernel(zero, t * k) + kernel(zero, zero)
    torch.testing.assert_close(both / t**2, SCALE * (q * k).sum(-1), atol=2e-2, rtol=0)


def test_exp_queries_stay_within_one():
    features = exp_queries(entries(1e4, torch.float32), SCALE)
    assert features.amax(-1).eq(1).all()
    assert features.ge(0).all()


def test_exp_keys_of_a_huge_norm_are_bounded():
    """Exponents go far beyond float32's 88; sums over long sequences and gradients stay finite."""
    k = torch.randn(1, 1, 64, 16)
    k = (1e3 * k / k.norm(dim=-1, keepdim=True)).requires_grad_()
    assert (k * math.sqrt(SCALE)).max() > 3 * 88
    features = exp_keys(k, SCALE)
    assert features.max().item() == pytest.approx(math.exp(EXP_BOUND), rel=1e-5)
    total = (features.sum(2) * 1e6).sum() * 1e5  # 1e6 times as many keys, values of 1e5
    total.backward()
    assert total.isfinite()
    assert k.grad.isfinite().all()


def test_exp_keys_below_the_bound_are_untouched():
    k = entries(5.0)
    torch.testing.assert_close(exp_keys(k, SCALE), (k * SCALE**0.5).exp(), atol=0, rtol=1e-14)


def test_hedgehog_is_two_softmaxes_of_a_map_per_head():
    x, residual = entries(2.0), RESIDUAL.double()
    for head in range(3):
        y = torch.stack([(torch.eye(16) + residual[head]).double() @ t for t in x[0, head]])
        rise, fall = y.exp(), (-y).exp()
        expected = torch.cat([rise / rise.sum(1, True), fall / fall.sum(1, True)], 1)
        torch.testing.assert_close(hedgehog(x, residual)[0, head], expected)


def test_hedgehog_matrix_of_lolcats_is_the_transpose():
    x, residual = entries(), RESIDUAL.double()
    theirs = (torch.eye(16) + residual).mT  # [heads, d, f], applied from the right
    y = torch.einsum("hdf,bhld->bhlf", theirs, x)
    expected = torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
    torch.testing.assert_close(hedgehog(x, residual), expected)


@pytest.mark.parametrize("name", MAPS)
def test_gradients(name):
    x = entries().flatten(0, 1)[:3, :2].reshape(1, 3, 2, 16).requires_grad_()
    assert torch.autograd.gradcheck(MAPS[name], x)


def test_gradients_of_the_hedgehog_weights():
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(hedgehog, (x, residual))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_computed_in_float32(name, dtype):
    """A 16-bit input loses nothing beyond its own rounding."""
    x = entries(4.0, dtype)
    features = MAPS[name](x)
    assert features.dtype == torch.float32
    assert features.isfinite().all()
    assert features.ge(0).all()
    torch.testing.assert_close(features, MAPS[name](x.double()).float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MAPS)
def test_float64_stays(name):
    assert MAPS[name](entries()).dtype == torch.float64
