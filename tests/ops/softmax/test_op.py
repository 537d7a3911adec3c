"""The dense op against the formula, number by number."""

import math

import pytest
import torch

from attnzoo.ops.softmax.api import softmax_attention

B, H, HKV, T, S, D, E = 2, 4, 2, 5, 7, 3, 6


def inputs(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    shapes = (B, H, T, D), (B, HKV, S, D), (B, HKV, S, E)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def by_hand(q, k, v, *, scale, mask=None, bias=None, softcap=None, sinks=None):
    """Sum what each query takes from each key, in plain Python."""
    out, weights = torch.zeros(B, H, T, E), torch.zeros(B, H, T, S)
    for b, h, t in [(b, h, t) for b in range(B) for h in range(H) for t in range(T)]:
        g = h * HKV // H
        parts = {}
        for s in range(S):
            score = scale * sum(float(q[b, h, t, d] * k[b, g, s, d]) for d in range(D))
            score = score if softcap is None else softcap * math.tanh(score / softcap)
            score += 0 if bias is None else float(bias[b, h, t, s])
            if mask is None or mask[b, 0, t, s]:
                parts[s] = math.exp(score)
        total = sum(parts.values()) + (0 if sinks is None or not parts else math.exp(sinks[h]))
        for s, part in parts.items():
            weights[b, h, t, s] = part / total
            out[b, h, t] += part / total * v[b, g, s]
    return out, weights


def masks():
    seen = torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(1)) < 0.6
    seen[0, 0, 2] = False  # this query sees nothing
    return seen


@pytest.fixture(autouse=True)
def _wide():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.2},
        {"mask": masks()},
        {"bias": torch.randn(B, H, T, S, generator=torch.Generator().manual_seed(2)).double()},
        {"softcap": 1.5},
        {"sinks": torch.linspace(-1, 2, H).double()},
        {"sinks": torch.linspace(-1, 2, H).double(), "mask": masks(), "softcap": 2.0},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_it_is_the_formula(options):
    q, k, v = inputs()
    ours = softmax_attention(q, k, v, **options)
    out, weights = by_hand(q, k, v, **{"scale": D**-0.5, **options})
    torch.testing.assert_close(ours.out, out)
    torch.testing.assert_close(ours.weights, weights)
    assert ours.state is None


def test_a_row_that_sees_nothing_gives_zeros_and_finite_gradients():
    q, k, v = (x.requires_grad_() for x in inputs())
    output = softmax_attention(q, k, v, mask=masks())
    assert not output.out[0, :, 2].any()
    assert not output.weights[0, :, 2].any()
    output.out.sum().backward()
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all()
    assert not q.grad[0, :, 2].any()


def test_transposed_queries_are_taken():
    q, k, v = inputs()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(
        softmax_attention(*strided).out, softmax_attention(q, k, v).out, rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_bits_round_inputs_and_output_only(dtype):
    q, k, v = inputs(dtype)
    output = softmax_attention(q, k, v)
    assert output.out.dtype == output.weights.dtype == dtype
    exact = softmax_attention(*(x.double() for x in (q, k, v))).out
    worst = (output.out - exact).abs().max()
    assert worst <= torch.finfo(dtype).eps * exact.abs().max()


def test_dropout_keeps_the_mean():
    q, k, v = (x.expand(64, *x.shape[1:]) for x in (y[:1] for y in inputs()))
    plain = softmax_attention(q, k, v).out[0]
    dropped = softmax_attention(q, k, v, dropout=0.5)
    assert (dropped.weights == 0).double().mean() == pytest.approx(0.5, abs=0.05)
    mean, spread = dropped.out.mean(0), dropped.out.std(0) / 8
    assert ((mean - plain).abs() < 5 * spread).all()
