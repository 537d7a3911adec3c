"""The error of ops with gates: that of rounding their inputs and results, in every dtype."""

from itertools import product

import pytest
import torch

from attnzoo import ops
from attnzoo.ops.hybrid.parts import LinearBranch
from tests.helpers import in_form

B, H, HKV, T, D = 1, 4, 2, 100, 8
HEADS, TOKENS, CHANNELS = (HKV,), (B, HKV, T), (B, HKV, T, D)
QUERIES, BONUS, MATRICES = (B, H, T, D), (HKV, D), (B, HKV, T, D, D)
CHUNK, STEPS = {"form": "chunk"}, {"form": "steps"}
ALL = ("cpp", "torch", "reference")
STATE_ERROR = 3e-6  # relative to the largest number of a float32 state; it sums T products


def linear(q, k, v, g, form="chunk", **options):
    attend = in_form(form, ops.linear_attention)
    return attend(q, k, v, log_decay=g, return_state=True, **options)


def delta(q, k, v, g, beta, form="chunk", **options):
    attend = in_form(form, ops.delta_attention)
    options = {"normalize_qk": True, "return_state": True, **options}
    return attend(q, k, v, beta, log_decay=g, **options)


def hybrid(q, k, v, g, q_features, k_features, **options):
    branch = LinearBranch(q_features, k_features, q.new_zeros(()), g)
    options = {"window": 8, "scale": 0.3, "return_state": True, **options}
    return ops.hybrid_attention(q, k, v, branch, **options)


def mlstm(q, k, v, g, log_input, form="chunk", **options):
    attend = in_form(form, ops.mlstm_attention)
    options = {"log_forget": g, "log_input": log_input, "return_state": True, **options}
    return attend(q, k, v, **options)


def rwkv6(q, k, v, g, bonus, form="chunk", **options):
    attend = in_form(form, ops.rwkv6_attention)
    return attend(q, k, v, log_decay=g, bonus=bonus, return_state=True, **options)


def matrix_gated(q, k, v, g, **options):
    options = {"log_decay": lambda take: take(g, 2), **options}
    return ops.matrix_gated_attention(q, k, v, return_state=True, **options)


# The op, the shapes of its decay and of other inputs, implementations and forms
CASES = {
    "linear, decay per head": (linear, (HEADS,), ALL, (CHUNK, STEPS)),
    "linear, decay per token": (linear, (TOKENS,), ALL, (CHUNK, STEPS)),
    "linear, decay per channel": (linear, (CHANNELS,), ALL, (CHUNK, STEPS)),
    "delta, decay per head": (delta, (HEADS, TOKENS), ALL, (CHUNK, STEPS)),
    "delta, decay per token": (delta, (TOKENS, TOKENS), ALL, (CHUNK, STEPS)),
    "delta, decay per channel": (delta, (CHANNELS, TOKENS), ALL, (CHUNK, STEPS)),
    "hybrid, decay per head": (hybrid, (HEADS, QUERIES, CHANNELS), ALL, ({},)),
    "hybrid, decay per channel": (hybrid, (CHANNELS, QUERIES, CHANNELS), ALL, ({},)),
    "mlstm": (mlstm, (TOKENS, TOKENS), ALL, (CHUNK, STEPS)),
    "rwkv6": (rwkv6, (CHANNELS, BONUS), ALL, (CHUNK, STEPS)),
    "matrix gate": (matrix_gated, (MATRICES,), ("torch",), ({},)),
}


def draw(shapes):
    """Return q, k, v, a log decay and numbers in [0, 1)."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(x, generator=generator) / 2 for x in (QUERIES, CHANNELS, CHANNELS)]
    decay, *others = (torch.rand(x, generator=generator) for x in shapes)
    return [*qkv, -0.05 * decay, *others]


def results(attend, inputs, options):
    """Return the output, the state and the gradients of all inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    found = attend(*leaves, **options)
    upstream = torch.linspace(-1, 1, T * D).cos().view(T, D).to(found.out.dtype)
    gradients = torch.autograd.grad((found.out * upstream).double().sum(), leaves)
    state = [x for x in found.state if x.is_floating_point()]
    return found.out, state, gradients


def error(found, exact):
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize(("dtype", "last"), [(torch.bfloat16, 2), (torch.float16, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_16_bit_inputs_are_rounded_in_results_only(case, dtype, last):
    """In every form in bfloat16, and in that of a chunk in float16."""
    attend, shapes, impls, forms = CASES[case]
    inputs = [x.to(dtype) for x in draw(shapes)]
    exact = results(attend, [x.double() for x in inputs], {**forms[0], "impl": impls[-1]})
    for impl, form in product(impls, forms[:last]):
        # The kernels of one token have no backward pass, but for the delta rule
        if impl == "cpp" and form == STEPS and not case.startswith("delta"):
            continue
        out, state, gradients = results(attend, inputs, {**form, "impl": impl})
        for ours, right in zip((out, *gradients), (exact[0], *exact[2]), strict=True):
            assert ours.dtype == dtype
            assert error(ours, right) < torch.finfo(dtype).eps
        for ours, right in zip(state, exact[1], strict=True):
            assert error(ours, right) < STATE_ERROR


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


NO_FORM = ("cpp", "parallel")
DECAYS = {
    "minus infinity": lambda x: torch.where(x < 0.1, -torch.inf, -0.1 * x),
    "nearly minus infinity": lambda x: torch.where(x < 0.1, -1e4, -0.1 * x),
    "strong": lambda x: -50 * x,
    "weak": lambda x: -0.01 * x,
}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", [TOKENS, CHANNELS], ids=["per token", "per channel"])
@pytest.mark.parametrize(
    ("impl", "form"), [x for x in product(ALL, ("chunk", "steps", "parallel")) if x != NO_FORM]
)
def test_decays_of_any_size_do_not_cancel_in_float64(impl, form, shape, decay):
    generator = torch.Generator().manual_seed(0)
    shapes = QUERIES, CHANNELS, CHANNELS, shape, TOKENS
    q, k, v, x, beta = (
        torch.rand(x, generator=generator, dtype=torch.float64)[:, :, :70] for x in shapes
    )
    q, k, v, g = q - 0.5, k - 0.5, v - 0.5, DECAYS[decay](x)
    options = {"log_decay": g, "impl": impl, "return_state": True}
    for op, strength in (
        (in_form(form, ops.linear_attention), None),
        (in_form(form, ops.delta_attention), beta),
    ):
        given = (q, k, v) if strength is None else (q, k, v, strength)
        found = op(*given, **options, **({} if strength is None else {"normalize_qk": True}))
        exact = recurrence(q, k, v, g, strength)
        for ours, right in zip((found.out, found.state.kv), exact, strict=True):
            assert error(ours, right) < 1e-14
