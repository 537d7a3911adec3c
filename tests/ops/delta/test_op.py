"""The delta rule: against a recurrence in float64, transformers' functions, and its invariants."""

import inspect
import sys
from importlib import import_module
from itertools import product

import pytest
import torch

from attnzoo.contract.states import DeltaState
from attnzoo.errors import UnsupportedError
from attnzoo.ops.delta.api import delta_attention
from tests.helpers import assert_within, gradients, in_form, nan_padded
from tests.ops.delta.ragged import each_alone, make_sequences, nan_outside, outside, row_length

DECAYS = ("none", "head", "token", "channel")
FORMS = ("parallel", "steps", "chunk")
FORMS_AND_IMPLS = [*product(FORMS, ("torch",)), ("chunk", "reference")]
B, HKV, D, E = 2, 2, 5, 3  # odd sizes, and keys and values of different size


def formula(q, k, v, beta, log_decay=None, state=None):
    """Compute S_t = (I - b k k^T) Diag(a) S_{t-1} + b k v^T and o_t = q S_t in float64."""
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    batch, heads, length, size = k.shape
    gate = k.new_zeros(heads) if log_decay is None else log_decay.double()
    gate = gate[None, :, None].expand(batch, heads, length) if gate.dim() == 1 else gate
    gate = (gate.unsqueeze(-1) if gate.dim() == 3 else gate).expand(k.shape)
    s = k.new_zeros(batch, heads, size, v.shape[3]) if state is None else state.kv.double()
    q = q.unflatten(1, (heads, -1))
    outs = []
    for t in range(length):
        key, b = k[:, :, t, :, None], beta[:, :, t, None, None]
        s = gate[:, :, t].exp().unsqueeze(-1) * s
        s = s + b * key * (v[:, :, t, None] - (key * s).sum(2, keepdim=True))
        outs.append((q[:, :, :, t].unsqueeze(-1) * s.unsqueeze(2)).sum(3).flatten(1, 2))
    empty = q.new_zeros(batch, q.shape[1] * q.shape[2], 0, v.shape[3])
    out = torch.stack(outs, 2) if outs else empty
    return out, s


def make(
    length, decay="none", groups=1, dtype=torch.float64, strength=1.0, grad=False, d=D, e=E, b=B
):
    """Return q, k (of norm 1), v, beta in (0, 2) and a log decay of the given kind."""
    q, k = torch.randn(b, HKV * groups, length, d), torch.randn(b, HKV, length, d)
    k = torch.nn.functional.normalize(k.double(), dim=-1)
    v, beta = torch.randn(b, HKV, length, e), 2 * torch.rand(b, HKV, length)
    shape = {"head": (HKV,), "token": (b, HKV, length), "channel": (b, HKV, length, d)}.get(decay)
    inputs = (q, k, v, beta, None if shape is None else -strength * torch.rand(shape))
    return [x if x is None else x.to(dtype).requires_grad_(grad) for x in inputs]


def make_state(dtype=torch.float64, grad=False, b=B):
    return DeltaState(torch.randn(b, HKV, D, E, dtype=dtype).requires_grad_(grad))


def run(q, k, v, beta, log_decay, form="chunk", **options):
    """Return output and state as one flat tuple."""
    attend = in_form(form, delta_attention)
    options = {"log_decay": log_decay, "return_state": True} | options
    out, state, *_ = attend(q, k, v, beta, **options)
    return out, *state


# -- the formula -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "impl"), FORMS_AND_IMPLS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 21])  # around one chunk of 8
def test_equals_formula(form, impl, decay, length):
    for groups, with_state in ((1, False), (3, True)):
        state = make_state() if with_state else None
        inputs = make(length, decay, groups)
        ours = run(*inputs, state=state, form=form, impl=impl, chunk_size=8)
        torch.testing.assert_close(ours, formula(*inputs, state), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("form", "impl"), FORMS_AND_IMPLS)
@pytest.mark.parametrize("decay", DECAYS)
def test_gradients_equal_those_of_the_formula(form, impl, decay):
    for groups in (1, 3):
        inputs, state = make(21, decay, groups, grad=True), make_state(grad=True)
        leaves = [*inputs, *state]
        ours = run(*inputs, state=state, form=form, impl=impl, chunk_size=8)
        exact = formula(*inputs, state)
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)
        ours, exact = gradients(ours, leaves), gradients(exact, leaves)
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 64, None])
@pytest.mark.parametrize("decay", DECAYS)
def test_any_chunk_size(decay, chunk_size):
    inputs = make(70, decay, grad=True)
    ours, exact = run(*inputs, chunk_size=chunk_size), run(*inputs, impl="reference")
    torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)
    ours, exact = gradients(ours, inputs), gradients(exact, inputs)
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def qwen3_next():
    """Return transformers' module without flash-linear-attention, which needs a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fla", None)
        return import_module("transformers.models.qwen3_next.modeling_qwen3_next")


@pytest.mark.parametrize("their_form", ["chunk", "recurrent"])
def test_equals_transformers(their_form, qwen3_next):
    theirs = inspect.unwrap(getattr(qwen3_next, f"torch_{their_form}_gated_delta_rule"))
    q, k, v, beta, g = make(150, "token", dtype=torch.float32, d=16, e=8)
    state, k, beta = DeltaState(torch.randn(B, HKV, 16, 8)), 3 * k, beta / 2
    by_token = [x.transpose(1, 2) for x in (q, k, v, g, beta)]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, kv = theirs(*by_token, initial_state=state.kv, **options)
    for form in FORMS:
        options = {"form": form, "state": state, "scale": 16**-0.5, "normalize_qk": True}
        ours = run(q, k, v, beta, g, **options)
        torch.testing.assert_close(ours, (out.transpose(1, 2), kv), rtol=1e-4, atol=1e-5)


def test_equals_flash_linear_attention(naive):
    q, k, v, beta, g = make(150, "channel", dtype=torch.float32, d=16, e=8)
    state = DeltaState(torch.randn(B, HKV, 16, 8))
    by_token = [x.transpose(1, 2) for x in (q, k, v, g, beta)]
    theirs = naive("ops/kda/naive.py").naive_recurrent_kda
    out, kv = theirs(*by_token, initial_state=state.kv, output_final_state=True)
    ours = run(q, k, v, beta, g, state=state, scale=16**-0.5)
    torch.testing.assert_close(ours, (out.transpose(1, 2), kv), rtol=1e-4, atol=1e-5)


# -- sequences -------------------------------------------------------------------------------------


LENGTHS = [0, 1, 7, 8, 0, 9, 21, 0]  # around one chunk of 8


@pytest.mark.parametrize(("form", "impl"), [*FORMS_AND_IMPLS, ("chunk", "cpp")])
@pytest.mark.parametrize("decay", DECAYS)
def test_sequences_equal_each_alone(form, impl, decay):
    """Outputs, states and gradients; other tokens are NaN, and their results zeros."""
    sequences = make_sequences(LENGTHS)
    tokens, count = row_length(sequences), len(LENGTHS)
    inputs = [nan_outside(x, sequences) for x in make(tokens, decay, groups=2, b=1)]
    inputs = [x if x is None else x.requires_grad_() for x in inputs]
    options = {"form": form, "impl": impl, "chunk_size": 8, "normalize_qk": True}
    for state in (make_state(b=count, grad=True), None):
        leaves = [*inputs, *(state or ())]
        ours = run(*inputs, state=state, sequences=sequences, **options)

        def alone(*given):
            *given, kv = given
            given[:2] = (x * (x.square().sum(-1, True) + 1e-6).rsqrt() for x in given[:2])
            return formula(*given, None if kv is None else DeltaState(kv))

        exact = each_alone(alone, inputs, None if state is None else state.kv, sequences)
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)
        grads = gradients(ours, leaves)
        torch.testing.assert_close(grads, gradients(exact, leaves), rtol=1e-10, atol=1e-10)
        nowhere = outside(sequences, tokens)
        assert not ours[0][:, :, nowhere].any()
        assert not any(x[:, :, nowhere].any() for x in grads if x.dim() > 2 and len(x) == 1)


def test_sequences_without_a_token_keep_their_states():
    sequences = make_sequences([0, 0])
    inputs, state = make(5, groups=2, b=1), make_state(b=2)
    for form, impl in (*FORMS_AND_IMPLS, ("chunk", "cpp")):
        out, kv = run(*inputs, state=state, sequences=sequences, form=form, impl=impl)
        assert torch.equal(kv, state.kv)
        assert out.shape == (1, 2 * HKV, 5, E)
        assert not out.any()


SLOTS = torch.tensor([4, -1, 0, 2])


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("impl", ["torch", "cpp", "reference"])
@pytest.mark.parametrize("decay", DECAYS)
def test_slots_read_and_write_rows_of_a_pool(impl, decay, reuse):
    inputs, pool = make(1, decay, groups=2, b=4), make_state(b=6)
    for x in inputs:
        if x is not None and x.dim() > 2:
            x[1] = torch.nan
    before = pool.kv.clone()
    exact = formula(*inputs, DeltaState(pool.kv[SLOTS]))
    options = {"impl": impl, "normalize_qk": False, "reuse_state": reuse}
    with torch.no_grad():
        out, kv = run(*inputs, state=pool, slots=SLOTS, **options)
    rows = SLOTS >= 0
    torch.testing.assert_close(out[rows], exact[0][rows], rtol=1e-11, atol=1e-11)
    assert not out[1].any()
    expected = before.index_copy(0, SLOTS[rows], exact[1][rows])
    torch.testing.assert_close(kv, expected, rtol=1e-11, atol=1e-11)
    assert torch.equal(kv[[1, 3, 5]], before[[1, 3, 5]])
    assert torch.equal(pool.kv, kv if reuse else before)


def test_slots_have_gradients():
    inputs, pool = make(1, "token", b=4, grad=True), make_state(b=6, grad=True)
    results = []
    for impl in ("torch", "cpp"):
        found = run(*inputs, state=pool, slots=SLOTS, impl=impl)
        results.append(gradients(found, [*inputs, *pool]))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("impl", ["torch", "cpp"])
def test_a_step_overwrites_the_state_only_if_it_may(impl):
    inputs, state = make(1, "token"), make_state()
    before = state.kv.clone()
    exact = formula(*inputs, state)
    with torch.no_grad():
        ours = run(*inputs, state=state, impl=impl)
        assert torch.equal(state.kv, before)
        reused = run(*inputs, state=state, impl=impl, reuse_state=True)
    torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(reused, exact, rtol=1e-11, atol=1e-11)
    assert reused[1].data_ptr() == state.kv.data_ptr()


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_low_precision_stays_within_budget(decay, dtype):
    eps = torch.finfo(dtype).eps
    for groups, form in ((1, "steps"), (1, "chunk"), (3, "chunk")):
        inputs = make(40, decay, groups, dtype, grad=True, d=16, e=16)
        wide = [x if x is None else x.detach().double().requires_grad_() for x in inputs]
        exact = formula(*wide)
        plain = run(*inputs, impl="reference")
        ours = run(*inputs, form=form, chunk_size=16)
        assert ours[0].dtype == dtype
        assert ours[1].dtype == torch.float32
        for triple in zip(ours, plain, exact, strict=True):
            assert_within(*triple, eps)
        exact, plain, ours = (
            gradients(x, y) for x, y in ((exact, wide), (plain, inputs), (ours, inputs))
        )
        for triple in zip(ours, plain, exact, strict=True):
            assert_within(*triple, eps)


@pytest.mark.parametrize("length", [1024, pytest.param(8192, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_long_gradients_are_accurate_if_values_have_a_mean(dtype, decay, length):
    inputs = make(length, decay, dtype=dtype, strength=1e-2, d=16, e=16)
    with torch.no_grad():
        inputs[2] += 1
    results = []
    for kind in (torch.float64, dtype):
        leaves = [x if x is None else x.detach().to(kind).requires_grad_() for x in inputs]
        results.append(gradients(run(*leaves)[:1], leaves))
    for exact, ours in zip(*results, strict=True):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < max(torch.finfo(dtype).eps / 2, 1e-5), f"relative error {error:.1e}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", ["head", "token", "channel"])
@pytest.mark.parametrize("gates", [(20.0,), (1e4,), (0.0, 0.01, 3.0, 20.0, 1e4)], ids=str)
def test_strong_gates_neither_overflow_nor_cancel(form, decay, gates):
    inputs = make(37, decay, dtype=torch.float32)
    inputs[4] = -torch.tensor(gates)[torch.randint(len(gates), inputs[4].shape)]
    narrow = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    ours, exact = run(*narrow, form=form, chunk_size=16), formula(*wide)
    torch.testing.assert_close([x.double() for x in ours], [*exact], rtol=1e-5, atol=1e-5)
    ours, exact = gradients(ours, narrow), gradients(exact, wide)
    torch.testing.assert_close([x.double() for x in ours], [*exact], rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize(("form", "impl"), FORMS_AND_IMPLS)
@pytest.mark.parametrize("decay", ["head", "token", "channel"])
def test_minus_infinity_resets_the_state(form, impl, decay):
    inputs, state = make(12, decay), make_state()
    inputs[4].view(-1)[0] = -torch.inf
    options = {"form": form, "impl": impl, "chunk_size": 8, "state": state}
    leaves = [x.clone().requires_grad_() for x in inputs]
    ours = run(*leaves, **options)
    torch.testing.assert_close(ours, formula(*inputs, state), rtol=1e-11, atol=1e-11)
    assert all(x.isfinite().all() for x in gradients(ours, leaves))


# -- invariants ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "impl"), FORMS_AND_IMPLS)
@pytest.mark.parametrize("decay", DECAYS)
def test_later_tokens_do_not_change_earlier_outputs(form, impl, decay):
    q, k, v, beta, log_decay = make(37, decay, groups=2, dtype=torch.float32)
    for cut in (1, 16, 20):
        later = [x.clone() for x in (q, k, v, beta)]
        for x, factor in zip(later, (6, -1, 6, 0.5), strict=True):
            x[:, :, cut:] *= factor
        gates = log_decay
        if decay in ("token", "channel"):
            gates = log_decay.clone()
            gates[:, :, cut:] *= 6
        options = {"form": form, "impl": impl, "chunk_size": 16}
        before, *_ = run(q, k, v, beta, log_decay, **options)
        after, *_ = run(*later, gates, **options)
        assert torch.equal(before[:, :, :cut], after[:, :, :cut])
        assert not torch.equal(before[:, :, cut:], after[:, :, cut:])


@pytest.mark.parametrize(("form", "impl"), FORMS_AND_IMPLS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cut", [0, 1, 11])
def test_prefill_and_decode_equal_one_pass(form, impl, decay, cut):
    *inputs, log_decay = make(20, decay, groups=2)
    one_pass = run(*inputs, log_decay)
    outs, state = [], None
    for start, stop in [(0, cut), *((t, t + 1) for t in range(cut, 20))]:
        part = slice(start, stop)
        gates = log_decay[:, :, part] if decay in ("token", "channel") else log_decay
        parts = [x[:, :, part] for x in inputs]
        form_now = "steps" if start >= cut else form
        options = {"form": form_now, "impl": impl, "chunk_size": 8}
        out, *state = run(*parts, gates, state=state and DeltaState(*state), **options)
        outs.append(out)
    torch.testing.assert_close((torch.cat(outs, 2), *state), one_pass, rtol=1e-11, atol=1e-11)


def test_a_beta_of_one_replaces_the_value_of_a_key():
    k = torch.eye(4, dtype=torch.float64)[[0, 1, 0, 1, 0, 2]][None, None]
    v, beta = torch.randn(1, 1, 6, 3, dtype=torch.float64), torch.ones(1, 1, 6).double()
    for form in FORMS:
        attend = in_form(form, delta_attention)
        _, state, *_ = attend(k, k, v, beta, return_state=True)
        expected = torch.cat([v[0, 0, [4, 3, 5]], torch.zeros(1, 3, dtype=v.dtype)])
        torch.testing.assert_close(state.kv[0, 0], expected)


def test_the_incoming_state_does_not_change():
    inputs, state = make(20, "token"), make_state()
    before = state.kv.clone()
    for form in FORMS:
        run(*inputs, state=state, form=form)
        assert torch.equal(state.kv, before)


@pytest.mark.parametrize("decay", DECAYS)
def test_no_read_past_the_inputs(decay):
    inputs = [
        x if x is None or x.dim() < 3 else nan_padded(x).requires_grad_()
        for x in make(21, decay, groups=2)
    ]
    for form in FORMS:
        ours = run(*inputs, form=form, chunk_size=8)
        assert all(x.isfinite().all() for x in (*ours, *gradients(ours, inputs[:4])))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("decay", DECAYS)
def test_results_do_not_depend_on_strides(decay, groups):
    """Inputs and gradients with heads after tokens in memory, as in a model's projections."""

    def heads_after_tokens(x):
        return x if x is None or x.dim() < 3 else x.transpose(1, 2).contiguous().transpose(1, 2)

    inputs, state = make(21, decay, groups), make_state(grad=True)
    d_out = torch.randn(B, groups * HKV, 21, E, dtype=torch.float64)
    results = []
    for change in (lambda x: x, heads_after_tokens):
        leaves = [x if x is None else change(x).detach().requires_grad_() for x in inputs]
        out, *_ = run(*leaves, state=state, chunk_size=8)
        given = [x for x in (*leaves, *state) if x is not None]
        results.append((out, *torch.autograd.grad(out, given, change(d_out), retain_graph=True)))
        torch.autograd.grad(out.sum(), given)  # an expanded gradient
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_results_are_deterministic_and_use_no_random_numbers():
    inputs = make(40, "channel", dtype=torch.float32)
    before = torch.get_rng_state()
    assert all(map(torch.equal, run(*inputs), run(*inputs)))
    assert torch.equal(before, torch.get_rng_state())


def test_autocast_does_not_change_results():
    inputs = make(20, "token", dtype=torch.float32, grad=True)
    for form, impl in FORMS_AND_IMPLS:
        options = {"form": form, "impl": impl, "chunk_size": 8, "normalize_qk": True}
        plain = run(*inputs, **options)
        with torch.autocast("cpu", torch.bfloat16):
            ours = run(*inputs, **options)
            if (form, impl) == ("chunk", "torch"):  # its backward pass disables autocast too
                assert all(map(torch.equal, gradients(ours, inputs), gradients(plain, inputs)))
        assert all(map(torch.equal, ours, plain))


def test_empty_inputs_give_empty_outputs():
    state = make_state()
    for form, impl in FORMS_AND_IMPLS:
        *inputs, _ = make(0, groups=3)
        out, kv = run(*inputs, None, form=form, impl=impl, state=state)
        assert out.shape == (B, 3 * HKV, 0, E)
        assert torch.equal(kv, state.kv)
        out, kv = run(*(x[:0] for x in inputs), None, form=form, impl=impl)
        assert out.shape == (0, 3 * HKV, 0, E)


def test_a_key_of_zeros_gives_finite_gradients():
    """The gradient of a norm is not finite at zeros."""
    q, k, v, beta, _ = make(9)
    k[:, :, 4] = 0
    k.requires_grad_()
    ours = run(q, k, v, beta, None, normalize_qk=True)
    assert all(x.isfinite().all() for x in (*ours, *gradients(ours, [k])))


def test_only_inputs_and_errors_are_saved_for_the_backward_pass():
    inputs = make(512, "channel", dtype=torch.float32, grad=True, d=16, e=16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        run(*inputs)
    known = {x.data_ptr() for x in inputs}
    extra = sum(x.nbytes for x in kept if x.data_ptr() not in known)
    assert extra <= 4 * B * HKV * 16 * (16 + 512)  # the initial state, and the prediction errors


# -- invalid input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": torch.rand(B, HKV, 6)}, r"beta must be \[B, Hkv, T\]"),
        ({"beta": torch.ones(B, HKV, 7, dtype=torch.long)}, "beta is int64"),
        ({"log_decay": -torch.rand(B, 7)}, "log_decay must be"),
        ({"state": DeltaState(torch.zeros(B, HKV, D, D))}, "state.kv must be"),
        ({"state": DeltaState(torch.zeros(B, HKV, D, E).half())}, "do not convert a state"),
        ({"slots": torch.zeros(3)}, "slots must be"),
        ({"slots": torch.zeros(B, dtype=torch.long)}, "one token of each row, got 7 tokens"),
        ({"sequences": make_sequences([3, 4])}, "sequences are of one row, got 2 rows"),
        ({"impl": "trition"}, "has no impl 'trition'"),
        ({"chunk_size": 0}, "chunk_size must be an integer"),
        ({"q": torch.rand(B, HKV, 3, D)}, "3 queries and 7 keys"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_invalid_input_raises_with_the_reason(change, message):
    q, k, v, beta, _ = make(7, dtype=torch.float32)
    call = {"q": q, "k": k, "v": v, "beta": beta} | change
    with pytest.raises(UnsupportedError, match=message):
        delta_attention(**call)
