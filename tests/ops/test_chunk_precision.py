"""The error of chunk forms, at most twice that of the same recurrence in float32.

Each recurrence is written token by token, from the formula of its paper. The key heads have
memories of different lengths: the logits of their forget gates have the means in BIASES.
"""

import pytest
import torch
import torch.nn.functional as F

from attnzoo import ops
from attnzoo.ops.hybrid.api import LinearBranch

BIASES = (0.0, 6.0, 12.0)  # 1 / e of the state remains after 1 token, 400 and 160,000
HKV, G, D, E, WINDOW, SCALE = len(BIASES), 2, 12, 10, 8, 0.3


def per_token(q):
    """Return queries ``[1, H, T, D]`` as a list of ``[1, Hkv, G, D]``."""
    return q.unflatten(1, (HKV, G)).unbind(3)


def outer(k, v):
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def decays(g, tokens):
    """Return the decays of each token, broadcastable to ``[1, Hkv, D]``."""
    if g is None:
        return [1.0] * tokens
    if g.dim() == 1:
        return [g.exp()[:, None]] * tokens
    return g.exp().view(*g.shape[:3], -1).unbind(2)


def join(outs):
    return torch.stack(outs, 3).flatten(1, 2)


def linear(q, k, v, g=None, *, normalize=False):
    state, outs = 0, []
    v = F.pad(v, (0, 1), value=1.0)
    for q_t, k_t, v_t, d in zip(
        per_token(q), k.unbind(2), v.unbind(2), decays(g, k.shape[2]), strict=True
    ):
        decay = d.unsqueeze(-1) if isinstance(d, torch.Tensor) else d
        state = state * decay + outer(k_t, v_t)
        out = q_t @ state
        outs.append(out[..., :-1] / (out[..., -1:] + 1e-6) if normalize else out[..., :-1])
    return join(outs)


def rwkv6(q, k, v, g, bonus):
    state, outs = torch.zeros_like(outer(k[:, :, 0], v[:, :, 0])), []
    for q_t, k_t, v_t, d in zip(
        per_token(q), k.unbind(2), v.unbind(2), decays(g, k.shape[2]), strict=True
    ):
        new = outer(k_t, v_t)
        outs.append(q_t @ (state + bonus.unsqueeze(-1) * new))
        state = state * d.unsqueeze(-1) + new
    return join(outs)


def mlstm(q, k, v, log_forget, log_input):
    m, state, outs = torch.zeros_like(log_input[:, :, 0]), 0, []
    v = F.pad(v, (0, 1), value=1.0)
    for q_t, k_t, v_t, f, i in zip(
        per_token(q),
        k.unbind(2),
        v.unbind(2),
        log_forget.unbind(2),
        log_input.unbind(2),
        strict=True,
    ):
        before, m = f + m, torch.maximum(f + m, i)
        decay, write = (x.exp()[..., None, None] for x in (before - m, i - m))
        state = state * decay + write * outer(k_t, v_t)
        out = q_t @ state
        least = (-m).exp()[..., None, None]
        outs.append(out[..., :-1] / torch.maximum(out[..., -1:].abs(), least))
    return join(outs)


def delta(q, k, v, beta, g=None):
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    state, outs = torch.zeros_like(outer(k[:, :, 0], v[:, :, 0])), []
    for q_t, k_t, v_t, b, d in zip(
        per_token(q), k.unbind(2), v.unbind(2), beta.unbind(2), decays(g, k.shape[2]), strict=True
    ):
        state = state * (d.unsqueeze(-1) if isinstance(d, torch.Tensor) else d)
        held = (k_t.unsqueeze(-2) @ state).squeeze(-2)
        state = state + outer(k_t, b.unsqueeze(-1) * (v_t - held))
        outs.append(q_t @ state)
    return join(outs)


def hybrid(q, k, v, far_q, far_k, g=None):
    state, outs = torch.zeros_like(outer(far_k[:, :, 0], F.pad(v, (0, 1))[:, :, 0])), []
    v, steps = F.pad(v, (0, 1), value=1.0), decays(g, k.shape[2])
    for t, (q_t, far) in enumerate(zip(per_token(q), per_token(far_q), strict=True)):
        if t >= WINDOW:
            d = steps[t]
            state = state * (d.unsqueeze(-1) if isinstance(d, torch.Tensor) else d)
            state = state + outer(far_k[:, :, t - WINDOW], v[:, :, t - WINDOW])
        near = slice(max(t - WINDOW + 1, 0), t + 1)
        weights = (q_t @ k[:, :, near].mT * SCALE).softmax(-1)
        out = weights @ v[:, :, near] + far @ state
        outs.append(out[..., :-1] / out[..., -1:])
    return join(outs)


def normalized_linear(*x):
    return linear(*x, normalize=True)


def attend_linear(q, k, v, g=None, *, normalize=False, **options):
    return ops.linear_attention(q, k, v, log_decay=g, normalize=normalize, **options)


def attend_normalized(*x, **options):
    return attend_linear(*x, normalize=True, **options)


def attend_delta(q, k, v, beta, g=None, **options):
    return ops.delta_attention(q, k, v, beta, log_decay=g, normalize_qk=True, **options)


def attend_hybrid(q, k, v, far_q, far_k, g=None, **options):
    branch = LinearBranch(far_q, far_k, q.new_zeros(()), g)
    return ops.hybrid_attention(q, k, v, branch, window=WINDOW, scale=SCALE, **options)


def attend_mlstm(q, k, v, forget, write, **options):
    return ops.mlstm_attention(q, k, v, log_forget=forget, log_input=write, **options)


def attend_rwkv6(q, k, v, g, bonus, **options):
    return ops.rwkv6_attention(q, k, v, log_decay=g, bonus=bonus, **options)


POSITIVE = "q+ k+ v"
CASES = {  # the op, its recurrence and inputs
    "linear": (attend_linear, linear, "q k v"),
    "linear, per head": (attend_linear, linear, "q k v head"),
    "linear, per token": (attend_normalized, normalized_linear, f"{POSITIVE} token"),
    "linear, per channel": (attend_linear, linear, "q k v channel"),
    "linear, normalised per channel": (attend_normalized, normalized_linear, f"{POSITIVE} channel"),
    "delta": (attend_delta, delta, "q k v beta"),
    "delta, per token": (attend_delta, delta, "q k v beta token"),
    "kda": (attend_delta, delta, "q k v beta channel"),
    "mlstm": (attend_mlstm, mlstm, "q k v token low"),
    "mlstm, positive": (attend_mlstm, mlstm, f"{POSITIVE} token write"),
    "rwkv6": (attend_rwkv6, rwkv6, "q k v channel bonus"),
    "hybrid": (attend_hybrid, hybrid, "q k v q+ k+"),
    "hybrid, per token": (attend_hybrid, hybrid, "q k v q+ k+ token"),
    "hybrid, per channel": (attend_hybrid, hybrid, "q k v q+ k+ channel"),
}
GATES = {
    "head",
    "token",
    "channel",
    "write",
    "low",
    "beta",
    "bonus",
}  # float32, as modules compute them


def draw(tokens):
    """Return all inputs by name, in float64."""
    generator = torch.Generator().manual_seed(tokens)
    bias = torch.tensor(BIASES, dtype=torch.float64)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = normal(1, HKV * G, tokens, D), normal(1, HKV, tokens, D)
    return {
        **{"q": q, "k": k, "v": normal(1, HKV, tokens, E), "q+": F.elu(q) + 1, "k+": F.elu(k) + 1},
        "head": F.logsigmoid(bias + normal(HKV)),
        "token": F.logsigmoid(bias[:, None] + normal(1, HKV, tokens)),
        "channel": F.logsigmoid(bias[:, None, None] + normal(1, HKV, tokens, D)),
        # low: weights of any sign stay below the bound of the denominator: no quotient explodes
        **{"write": 2 * normal(1, HKV, tokens), "low": normal(1, HKV, tokens) - 4},
        **{"beta": normal(1, HKV, tokens).sigmoid()},
        "bonus": normal(HKV, D).exp(),
    }


def error(found, exact):
    """Return the norm of the error of each key head, ``[Hkv]``."""
    return (found.double() - exact).unflatten(1, (HKV, G)).movedim(1, 0).flatten(1).norm(dim=1)


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        *((64, torch.bfloat16), (2048, torch.float32)),
        pytest.param(2048, torch.bfloat16, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_the_error_is_at_most_twice_that_of_the_recurrence(name, tokens, dtype):
    attend, recurrence, names = CASES[name]
    drawn = draw(tokens)
    inputs = [drawn[x].to(torch.float32 if x in GATES else dtype) for x in names.split()]
    exact = recurrence(*(x.double() for x in inputs))
    plain = error(recurrence(*(x.float() for x in inputs)).to(dtype), exact)
    for impl in ("cpp", "torch"):
        found = attend(*inputs, impl=impl).out
        assert found.dtype == dtype
        ratio = error(found, exact) / plain
        assert (ratio <= 2).all(), f"{impl}: {ratio.tolist()} times the error of {plain.tolist()}"


@pytest.mark.parametrize("size", [1, 13])
@pytest.mark.parametrize("name", CASES)
def test_calls_one_after_another_are_as_exact(name, size):
    """Of one token, the step of decoding; of some, chunks that continue a state."""
    attend, recurrence, names = CASES[name]
    drawn = {n: x.float() for n, x in draw(200).items()}
    inputs = [drawn[n] for n in names.split()]
    exact = recurrence(*(x.double() for x in inputs))
    plain = error(recurrence(*inputs), exact)
    for impl in ("auto", "torch"):
        state, outs = None, []
        for start in range(0, 200, size):
            new = (x[:, :, start : start + size] if x.dim() > 2 else x for x in inputs)
            with torch.no_grad():
                out, state, *_ = attend(*new, impl=impl, state=state, return_state=True)
            outs.append(out)
        ratio = error(torch.cat(outs, 2), exact) / plain
        assert (ratio <= 2).all(), f"{impl}: {ratio.tolist()} times the error of {plain.tolist()}"
