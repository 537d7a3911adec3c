"""The error of ops with gates: that of rounding their inputs and results, in every dtype."""

import pytest
import torch

from attnzoo import ops

B, H, HKV, T, D = 1, 4, 2, 256, 8
TOKENS, CHANNELS, QUERIES = (B, HKV, T), (B, HKV, T, D), (B, H, T, D)
ALL = ("cpp", "torch", "reference")


def error(found, exact):
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


def recurrence(q, k, v, g, beta):
    """Compute linear attention, or the delta rule with ``beta``, token by token."""
    groups, decay = H // HKV, g.exp()
    if beta is not None:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, outs = torch.zeros(B, HKV, D, D, dtype=torch.float64), []
    for t in range(q.shape[2]):
        state = state * decay[:, :, t].reshape(B, HKV, -1, 1)
        key, value = k[:, :, t], v[:, :, t]
        if beta is not None:
            value = beta[:, :, t, None] * (value - torch.einsum("bhd,bhde->bhe", key, state))
        state = state + torch.einsum("bhd,bhe->bhde", key, value)
        query = q[:, :, t].unflatten(1, (HKV, groups))
        outs.append(torch.einsum("bhgd,bhde->bhge", query, state).flatten(1, 2))
    return torch.stack(outs, 2), state


DECAYS = {
    "minus infinity": lambda x: torch.where(x < 0.1, -torch.inf, -0.1 * x),
    "nearly minus infinity": lambda x: torch.where(x < 0.1, -1e4, -0.1 * x),
    "strong": lambda x: -50 * x,
    "weak": lambda x: -0.01 * x,
}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", [TOKENS, CHANNELS], ids=["per token", "per channel"])
@pytest.mark.parametrize("form", ["chunk", "recurrent", "parallel"])
@pytest.mark.parametrize("impl", ALL)
def test_decays_of_any_size_do_not_cancel_in_float64(impl, form, shape, decay):
    if (impl, form) == ("cpp", "parallel"):
        pytest.skip("C++ has no parallel form")
    generator = torch.Generator().manual_seed(0)
    shapes = QUERIES, CHANNELS, CHANNELS, shape, TOKENS
    q, k, v, x, beta = (
        torch.rand(x, generator=generator, dtype=torch.float64)[:, :, :100] for x in shapes
    )
    q, k, v, g = q - 0.5, k - 0.5, v - 0.5, DECAYS[decay](x)
    options = {"log_decay": g, "form": form, "impl": impl, "return_state": True}
    for op, strength in ((ops.linear_attention, None), (ops.delta_attention, beta)):
        given = (q, k, v) if strength is None else (q, k, v, strength)
        found = op(*given, **options, **({} if strength is None else {"normalize_qk": True}))
        exact = recurrence(q, k, v, g, strength)
        for ours, right in zip((found.out, found.state.kv), exact, strict=True):
            assert error(ours, right) < 1e-14
