"""The decayed sums of a rank: forward and backward against the plain formula, for any gate."""

import pytest
import torch

from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.context_parallel import decayed_sums


def inputs(tokens, features, dtype=torch.float64, strength=0.3):
    k, v = torch.randn(2, 2, 3, tokens, 4, dtype=dtype)
    log_decay = -strength * torch.rand(2, 3, tokens, features, dtype=dtype)
    return k, v, log_decay


def plain(k, v, log_decay):
    later = log_decay.sum(2, keepdim=True) - log_decay.cumsum(2)
    k_decayed = k * later.exp()
    return k_decayed.mT @ v, k_decayed.sum(2), log_decay.sum(2)


@pytest.mark.parametrize("features", [1, 4])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])  # around a block of 128
def test_sums_and_gradients_equal_the_formula(tokens, features):
    leaves = [x.requires_grad_() for x in inputs(tokens, features)]
    ours, expected = decayed_sums(*leaves), plain(*leaves)
    torch.testing.assert_close(ours, expected)
    d_sums = [torch.randn_like(x) for x in expected]
    for found, exact in zip(
        torch.autograd.grad(ours, leaves, d_sums),
        torch.autograd.grad(expected, leaves, d_sums),
        strict=True,
    ):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("features", [1, 4])
def test_strong_gates_stay_finite_and_accurate(features):
    """Sums in float32 agree with the op in float64, and gradients are finite."""
    k, v, log_decay = inputs(400, features, strength=30.0)
    log_decay[:, :, 390] = -torch.inf
    exact = linear_attention(
        k, k, v, log_decay=log_decay.expand(k.shape), return_state=True, impl="reference"
    ).state
    leaves = [x.float().requires_grad_() for x in (k, v, log_decay)]
    kv, z, total = decayed_sums(*leaves)
    assert bool((total.exp() == 0).all())
    torch.testing.assert_close(kv.double(), exact.kv, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(z.double(), exact.k, rtol=1e-5, atol=1e-6)
    (kv.sum() + z.sum() + total.exp().sum()).backward()
    assert all(bool(x.grad.isfinite().all()) for x in leaves)
