"""Random features: the projection, the estimate of softmax, and large inputs."""

import math

import pytest
import torch
from torch.testing import assert_close

from attnzoo.contract.padding import fill_padding
from attnzoo.ops.features.random_features import (
    KEY_BOUND,
    key_shift,
    measured_shift,
    positive_keys,
    positive_queries,
    random_projection,
)
from attnzoo.ops.linear.api import linear_attention

D, M, SCALE = 8, 24, 0.3


def draw(*shape, size=1.0, dtype=torch.float64):
    return (size * torch.randn(shape, dtype=torch.float64)).to(dtype)


def phi(x, projection, scale=SCALE):
    """Return the features of the paper without their common factor."""
    x = math.sqrt(scale) * x.double()
    return (x @ projection.double().T - x.square().sum(-1, keepdim=True) / 2).exp()


def dense(q, k, v, projection, seen=None, scale=SCALE):
    """Compute dense attention in float64; ``seen`` is broadcastable to [B, H, T, S]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    weights = phi(q, projection, scale) @ phi(k, projection, scale).mT
    if seen is not None:
        weights = weights * seen
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, 0) @ v


# -- the projection ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 8, 20])
def test_rows_of_a_block_are_orthogonal(rows):
    projection = random_projection(rows, D).double()
    assert projection.shape == (rows, D)
    for block in projection.split(D):
        products = block @ block.T
        assert_close(products, products.diag().diag(), atol=1e-5, rtol=0)


def test_row_lengths_match_those_of_normal_rows():
    squares = random_projection(12_800, D).double().square().sum(1)
    assert abs(squares.mean() - D) < 4 * math.sqrt(2 * D / len(squares))
    # the variance of chi squared; it is 0 if all rows have length sqrt(D)
    assert abs(squares.var() - 2 * D) < 0.1 * 2 * D


def test_directions_of_rows_are_uniform():
    """Without the signs of R's diagonal, the diagonal of LAPACK's Q has one sign."""
    drawn = random_projection(400 * D, D).double().view(400, D, D)
    directions = drawn / drawn.norm(dim=2, keepdim=True)
    spread = 1 / math.sqrt(D * len(drawn))
    assert directions.mean(0).abs().max() < 4.5 * spread


def test_draws_depend_only_on_their_seed():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = random_projection(M, D, seed=(0, 3, 1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(random_projection(M, D, seed=(0, 3, 1)), first)
    with torch.device("meta"):  # as in from_pretrained
        assert torch.equal(random_projection(M, D, seed=(0, 3, 1)), first)
    for other in ((0, 3, 2), (0, 4, 1), (1, 3, 1), (2**32, 3, 1)):
        assert not torch.equal(random_projection(M, D, seed=other), first)


# -- the estimate --------------------------------------------------------------------------------


def independent_rows(features, size, seed):
    return torch.randn(features, size, generator=torch.Generator().manual_seed(*seed))


def estimates(draws, features, size=0.4, rows=random_projection):
    """Return estimates of the kernel of some queries and keys from many draws, and the kernel."""
    q, k = draw(2, 1, 1, 16, 16, size=size)
    no_shift = torch.zeros(features, dtype=torch.float64)
    found = []
    for n in range(draws):
        w = rows(features, 16, seed=(n,)).double()
        mapped = [positive_keys(x, w, no_shift, scale=0.25) for x in (q, k)]
        found.append(mapped[0] @ mapped[1].mT / features)
    return torch.stack(found), (q @ k.mT / 4).exp()


def test_the_estimate_is_unbiased():
    found, exact = estimates(200, 256)
    errors = found / exact - 1
    standard = errors.std(0) / math.sqrt(len(errors))
    assert (errors.mean(0) / standard).square().mean() < 1.6  # 1 for a normal distribution
    assert abs(errors.mean()) < 0.0035
    assert (errors.mean(0) / standard).abs().max() < 5


def test_the_error_is_inversely_proportional_to_the_features():
    few, many = (
        (found - exact).square().mean()
        for found, exact in (estimates(100, m, rows=independent_rows) for m in (64, 512))
    )
    assert 5.5 < few / many < 11.5  # 8 in expectation


def test_orthogonal_rows_have_a_lower_error_than_independent_ones():
    found, exact = estimates(200, 16)
    independent, _ = estimates(200, 16, rows=independent_rows)
    ours, theirs = ((x / exact - 1).square().mean() for x in (found, independent))
    assert ours < 0.9 * theirs


# -- the features --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 700])
def test_features_match_the_formula_up_to_factors_that_cancel(length):
    projection = random_projection(M, D).double()
    q, k = draw(2, 4, length, D), draw(2, 2, length, D)
    for shift in (key_shift(projection), measured_shift(k, projection, scale=SCALE)):
        keys = positive_keys(k, projection, shift, scale=SCALE)
        assert_close(keys, phi(k, projection) * (-shift).exp())
        queries = positive_queries(q, projection, shift, scale=SCALE)
        per_head = shift if shift.dim() == 1 else shift.repeat_interleave(2, 1)
        expected = phi(q, projection) * per_head.exp()
        assert_close(queries, expected / expected.sum(-1, keepdim=True))


def test_gradients_of_features():
    projection = random_projection(6, 4).double()
    shift = key_shift(projection)
    x = draw(2, 2, 5, 4).requires_grad_()
    for features in (positive_queries, positive_keys):
        assert torch.autograd.gradcheck(
            lambda y, make=features: make(y, projection, shift, scale=SCALE), [x]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_key_exceeds_the_bound(dtype):
    """The largest features are those of keys equal to a row of the projection."""
    for size in (16, 64, 256):
        projection = random_projection(32, size).to(dtype)
        worst = projection / size**-0.25
        k = torch.stack([worst * factor for factor in (0.5, 1.0, 1.1, 30.0)])[None]
        x = k.clone().requires_grad_()
        keys = positive_keys(x, projection, key_shift(projection), scale=size**-0.5)
        assert keys.max() <= math.exp(KEY_BOUND) * 1.01
        keys.sum().backward()
        assert torch.isfinite(x.grad).all()


# -- bidirectional attention ---------------------------------------------------------------------


def make_padding_mask(keys):
    padding_mask = torch.rand(3, keys) > 0.4
    padding_mask[0] = True
    padding_mask[1] = False
    return padding_mask


def attend(q, k, v, projection, *, scale, padding_mask=None):
    """Return bidirectional attention as the backend computes it."""
    shift = measured_shift(k, projection, scale=scale, padding_mask=padding_mask)
    q = positive_queries(q, projection, shift, scale=scale)
    k = fill_padding(positive_keys(k, projection, shift, scale=scale), padding_mask)
    return linear_attention(q, k, v, causal=False, normalize=True, eps=1e-30).out


@pytest.mark.parametrize("padded", [False, True])
def test_attention_matches_the_dense_formula(padded):
    projection = random_projection(M, D).double()
    q, k, v = draw(3, 4, 13, D), draw(3, 2, 29, D), draw(3, 2, 29, 6)
    k = k * torch.linspace(3, 0.1, 29, dtype=torch.float64)[:, None]  # the maximum grows
    padding_mask = make_padding_mask(29) if padded else None
    out = attend(q, k, v, projection, scale=SCALE, padding_mask=padding_mask)
    seen = None if padding_mask is None else padding_mask[:, None, None, :]
    assert_close(out, dense(q, k, v, projection, seen))
    if padding_mask is not None:
        assert not out[1].any()


@pytest.mark.parametrize("size", [1.0, 10.0, 100.0])
def test_large_keys_neither_overflow_nor_underflow(size):
    """At 100, exponents reach -1e6: without a shift, all features of a key are 0 in float32."""
    projection = random_projection(64, 32)
    leaves = [
        draw(1, 2, 50, 32, size=n, dtype=torch.float32).requires_grad_() for n in (size, size, 1.0)
    ]
    out = attend(*leaves, projection, scale=32**-0.5)
    q, k, v = (x.detach().double() for x in leaves)
    exponents = [
        x * 32**-0.25 @ projection.double().T - x.square().sum(-1, keepdim=True) * 32**-0.5 / 2
        for x in (q, k)
    ]
    weights = torch.logsumexp(exponents[0].unsqueeze(3) + exponents[1].unsqueeze(2), -1)
    assert_close(out.double(), weights.softmax(-1) @ v, atol=1e-3, rtol=1e-3)
    out.square().sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in leaves)
