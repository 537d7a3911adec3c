"""Gates initialised from softmax attention, against plain formulas."""

import pytest
import torch

from attnzoo.contract.config import Geometry
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.masks import AttentionMask
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.registry import build_backend
from attnzoo.training.calibrate import (
    MIN_RATE,
    GateCalibration,
    LeastSquares,
    new_calibration,
    set_gates,
)

B, H, HKV, D, M, T, W = 2, 4, 2, 8, 6, 40, 5


def inputs(mask=None, *, rows=B, scale=D**-0.5):
    torch.manual_seed(0)
    q, k = torch.randn(rows, H, T, D), torch.randn(rows, HKV, T, D)
    x = torch.randn(rows, T, M)
    mask = mask or AttentionMask(causal=True)
    return AttentionInputs(q, k, torch.randn(rows, HKV, T, D), mask, scale, hidden_states=x)


def far_weights_of(x, num_sinks=0):
    """Return the softmax weights outside the window, the mask of these keys, and distances."""
    seen = x.mask.dense(T, T, x.q.device).expand(len(x.q), 1, T, T)
    identity = torch.eye(T).expand(len(x.q), HKV, T, T)
    weights = softmax_attention(x.q, x.k, identity, mask=seen, scale=x.scale).out
    rank = seen[:, 0].diagonal(dim1=1, dim2=2).cumsum(1)
    distance = rank[:, :, None] - rank[:, None, :]
    far = seen[:, 0] & (distance >= W) & seen[:, 0].diagonal(dim1=1, dim2=2)[:, :, None]
    for row, far_of_row in enumerate(far):
        ids = x.mask.segment_ids[row] if x.mask.segment_ids is not None else torch.zeros(T)
        for segment in ids.unique():
            far_of_row[:, (ids == segment).nonzero()[:num_sinks, 0]] = False
    return weights * far[:, None], far, distance


def masks():
    padding = torch.ones(B, T, dtype=torch.bool)
    padding[0, :7] = padding[0, 20:23] = padding[1, 33:] = False
    ids = (torch.arange(T) >= 17).int().expand(B, T)
    return {
        "plain": AttentionMask(causal=True),
        "padding": AttentionMask(causal=True, padding=padding),
        "packed": AttentionMask(causal=True, segment_ids=ids),
    }


@pytest.mark.parametrize(
    ("name", "num_sinks"), [("plain", 0), ("padding", 0), ("packed", 0), ("packed", 2)]
)
def test_far_shares_and_ages_equal_those_of_dense_weights(name, num_sinks):
    x, found = inputs(masks()[name]), GateCalibration(W, H // HKV, M, num_sinks)
    found.add(x)
    far_weights, far, distance = far_weights_of(x, num_sinks)
    has_far_keys = far.any(2)
    share = far_weights.sum(3).transpose(0, 1)[:, has_far_keys].mean(1)
    torch.testing.assert_close(found.mean_far_share(), share.double(), rtol=1e-5, atol=1e-6)
    of_key_head = far_weights.unflatten(1, (HKV, -1)).sum(2)
    total = of_key_head.sum((0, 2, 3))
    age = (of_key_head * distance[:, None]).sum((0, 2, 3)) / total
    torch.testing.assert_close(found.mean_age(), age.double(), rtol=1e-5, atol=1e-5)
    uniform_age = (far * distance).sum(2) / far.sum(2).clamp(min=1)
    uniform_age = (of_key_head.sum(3) * uniform_age[:, None]).sum((0, 2)) / total
    rates = (1 / (age - W + 1) - 1 / (uniform_age - W + 1)).clamp(min=MIN_RATE)
    torch.testing.assert_close(found.decay_rates(), rates.double(), rtol=1e-4, atol=1e-6)


def test_uniform_attention_gives_the_minimum_decay():
    x, found = inputs(scale=0.0), GateCalibration(W, H // HKV, M)
    found.add(x)
    assert (found.decay_rates() == MIN_RATE).all()


def test_least_squares_equals_ridge_regression():
    torch.manual_seed(0)
    x, y = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 2, dtype=torch.float64)
    squares = LeastSquares(3)
    squares.add(x[:20], y[:20])
    squares.add(x[20:], y[20:])
    found, residual = squares.solve()
    ridge = (3 * x.var(0, correction=0).mean()).sqrt()
    rows = torch.cat([x, ridge * torch.eye(3, dtype=torch.float64)])
    rows = torch.cat([rows, torch.ones(53, 1, dtype=torch.float64)], 1)
    rows[50:, 3] = 0
    targets = torch.cat([y, torch.zeros(3, 2, dtype=torch.float64)])
    expected = torch.linalg.lstsq(rows, targets).solution
    torch.testing.assert_close(found, expected)
    error = targets - rows @ expected
    torch.testing.assert_close(residual, error.mT @ error)


@pytest.mark.parametrize("gate", ["none", "scalar", "vector", "gated_retention", "gla"])
def test_calibrated_gates_reproduce_the_measured_statistics(gate):
    """Mixing weights equal the far share if hidden states determine it."""
    sizes = {"num_heads": H, "num_key_heads": HKV, "head_dim": D, "hidden_size": H + HKV}
    backend = build_backend("delta", {"window": W, "gate": gate}, Geometry(**sizes))
    x = inputs(rows=32)
    far_weights, far, _ = far_weights_of(x)
    share = far_weights.sum(3)  # [B, H, T]
    received = far_weights.unflatten(1, (HKV, -1)).sum((2, 3))  # [B, Hkv, T]
    rate = (received / far.sum(1).clamp(min=1)[:, None]).clamp(min=1e-9).log()
    logits = torch.logit(share.clamp(1e-6, 1 - 1e-6))
    x = x._replace(hidden_states=torch.cat([logits, rate], 1).transpose(1, 2).contiguous())
    found = new_calibration(backend)
    found.add(x)
    set_gates(backend, found)
    lse = (x.q @ x.k.repeat_interleave(2, 1).mT * x.scale).masked_fill(
        ~(torch.ones(T, T).tril() * torch.ones(T, T).triu(1 - W)).bool(), -torch.inf
    )
    mixing = backend.mixing_weight(x, lse.logsumexp(-1, keepdim=True))[..., 0]
    late = slice(W, None)
    error = (mixing - share)[..., late].abs().mean()
    spread = (share - share.mean((0, 2), keepdim=True))[..., late].abs().mean()
    assert error < 0.1 * spread
    beta = x.hidden_states @ backend.write_weight.mT + backend.write_bias
    early = slice(0, T - 2 * W)
    centred = [y - y.mean(1, keepdim=True) for y in (beta[:, early].mT, rate[..., early])]
    for head in range(HKV):
        pair = torch.stack([y[:, head].flatten() for y in centred])
        assert torch.corrcoef(pair)[0, 1] > 0.9
    if gate != "none":
        decay = -backend.gate(x.k, x.hidden_states).log_decay
        rates = found.decay_rates().float().view(1, HKV, 1)
        decay = decay.mean(-1) if decay.ndim == 4 else decay
        torch.testing.assert_close(decay, rates.expand_as(decay), rtol=1e-4, atol=1e-7)
