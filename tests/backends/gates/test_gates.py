"""Gates against their formulas."""

import math

import pytest
import torch

from attnzoo.backends.gates.decays import (
    alibi_log_decay,
    channel_log_decay,
    hgrn2_gate,
    mamba2_gate,
    retnet_log_decay,
    token_log_decay,
)
from attnzoo.backends.gates.recurrences import rwkv6_log_decay


def hidden(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_retnet(dtype):
    expected = [math.log(1 - 2.0 ** (-5 - h)) for h in range(12)]
    ours = retnet_log_decay(12, dtype=dtype)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=dtype))
    assert ours.dtype == dtype


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_alibi(heads):
    expected = [-(2.0 ** (-8 * h / heads)) for h in range(1, heads + 1)]
    ours = alibi_log_decay(heads, dtype=torch.float64)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64))


def test_alibi_of_eight_heads_matches_the_paper():
    assert alibi_log_decay(8).tolist() == [-(2.0**-h) for h in range(1, 9)]


def test_gated_retention():
    x, w, b = hidden(2, 5, 6), hidden(3, 6), hidden(3)
    ours = token_log_decay(x, w, b)
    for i in range(2):
        for h in range(3):
            for t in range(5):
                gate = 1 / (1 + math.exp(-(float(x[i, t] @ w[h]) + float(b[h]))))
                assert ours[i, h, t].exp() == pytest.approx(gate ** (1 / 16), rel=1e-12)


def test_gla():
    """alpha = sigmoid(x W1 W2 + b)^(1/16)."""
    x, w1, w2, b = hidden(2, 5, 6), hidden(6, 4), hidden(4, 3 * 7), hidden(3 * 7)
    alpha = torch.sigmoid(x @ w1 @ w2 + b) ** (1 / 16)
    ours = channel_log_decay(x, w1.mT, w2.mT, b.view(3, 7))
    assert ours.shape == (2, 3, 5, 7)
    for h in range(3):
        torch.testing.assert_close(ours[:, h].exp(), alpha[:, :, 7 * h : 7 * (h + 1)])


def test_mamba2():
    """Delta = softplus(x w + b), and a decay of exp(-exp(a) Delta)."""
    x, w, b, rate = hidden(2, 5, 6), hidden(3, 6), hidden(3), hidden(3)
    ours, step = mamba2_gate(x, w, b, rate)
    for h in range(3):
        delta = (1 + (x @ w[h] + b[h]).exp()).log()
        torch.testing.assert_close(step[:, h], delta)
        torch.testing.assert_close(ours[:, h].exp(), (-rate[h].exp() * delta).exp())


def test_hgrn2():
    """f = l + (1 - l) sigmoid(x W1 W2 + b), and the key is 1 - f."""
    x, w1, w2, b, c = hidden(2, 5, 6), hidden(6, 4), hidden(4, 3 * 7), hidden(3, 7), hidden(3, 7)
    bound = torch.sigmoid(c)
    forget = bound + (1 - bound) * torch.sigmoid(x @ w1 @ w2 + b.flatten()).view(2, 5, 3, 7)
    ours, write = hgrn2_gate(x, w1.mT, w2.mT, b, c)
    torch.testing.assert_close(ours.exp(), forget.transpose(1, 2))
    torch.testing.assert_close(write, 1 - forget.transpose(1, 2))


def test_rwkv6():
    """w = exp(-exp(tanh(x W1) W2 + b))."""
    x, w1, w2, b = hidden(2, 5, 6), hidden(6, 4), hidden(4, 3 * 7), hidden(3, 7)
    kept = (-(torch.tanh(x @ w1) @ w2 + b.flatten()).exp()).exp().view(2, 5, 3, 7)
    torch.testing.assert_close(rwkv6_log_decay(x, w1.mT, w2.mT, b).exp(), kept.transpose(1, 2))


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_gates_stay_finite(sign):
    x = torch.full((1, 1, 1), 400.0 * sign, requires_grad=True)
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    for results in (
        mamba2_gate(x, one, zero[0], zero[0]),
        hgrn2_gate(x, one, one, zero, zero - 400),
        (rwkv6_log_decay(x, one, 500 * one, zero),),
    ):
        (gradient,) = torch.autograd.grad(sum(result.sum() for result in results), x)
        assert all(result.isfinite().all() for result in results)
        assert gradient.isfinite().all()


def test_strong_gates_stay_finite():
    x = torch.full((1, 1, 1), 400.0, requires_grad=True)
    ours = token_log_decay(x, -torch.ones(1, 1), torch.zeros(1))
    ours.sum().backward()
    assert ours.item() == pytest.approx(-400 / 16)
    assert x.grad.item() == pytest.approx(-1 / 16)


def test_gates_are_computed_in_float32():
    x, w1, w2, b = (
        t.bfloat16() for t in (hidden(1, 3, 8), hidden(4, 8), hidden(6, 4), hidden(2, 3))
    )
    wide = [t.double() for t in (x, w1, w2, b)]
    for ours, exact in (
        (
            mamba2_gate(x, w1[:2], b[:, 0], b[:, 1])[0],
            mamba2_gate(wide[0], wide[1][:2], wide[3][:, 0], wide[3][:, 1])[0],
        ),
        (hgrn2_gate(x, w1, w2, b, b)[0], hgrn2_gate(*wide, wide[3])[0]),
        (rwkv6_log_decay(x, w1, w2, b), rwkv6_log_decay(*wide)),
        (
            channel_log_decay(x, w1, w2, b),
            channel_log_decay(*(t.double() for t in (x, w1, w2, b))),
        ),
        (
            token_log_decay(x, w1[:2], b[:, 0]),
            token_log_decay(x.double(), w1[:2].double(), b[:, 0].double()),
        ),
    ):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, exact.float(), atol=1e-7, rtol=1e-5)


def test_gradients():
    x, down, up, b = (
        t.requires_grad_() for t in (hidden(1, 3, 4), hidden(2, 4), hidden(6, 2), hidden(2, 3))
    )
    assert torch.autograd.gradcheck(channel_log_decay, (x, down, up, b))
    bound = hidden(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(hgrn2_gate, (x, down, up, b, bound))
    assert torch.autograd.gradcheck(rwkv6_log_decay, (x, down, up, b))
    w, bias = hidden(2, 4).requires_grad_(), hidden(2).requires_grad_()
    assert torch.autograd.gradcheck(token_log_decay, (x, w, bias))
    assert torch.autograd.gradcheck(mamba2_gate, (x, w, bias, hidden(2).requires_grad_()))
