"""Linear attention: against a dense formula in float64, and its invariants."""

from itertools import product

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import LinearState
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.cpu.linear import LINEAR
from attnzoo.runtime import cpp
from tests.helpers import (
    assert_within,
    by_sequence,
    gradients,
    in_form,
    nan_padded,
)

DECAYS = ("none", "head", "token", "channel")
FORMS = ("parallel", "steps", "chunk")
IMPLS = ("reference", "torch")  # triton and cpp have separate test files
FORMS_AND_IMPLS = list(product(FORMS, IMPLS))
if not cpp.unavailable_reason(LINEAR):
    FORMS_AND_IMPLS += [("steps", "cpp"), ("chunk", "cpp")]
TRAINED = [x for x in FORMS_AND_IMPLS if x != ("steps", "cpp")]  # with a backward pass
B, HKV, D, E = 2, 2, 5, 3  # odd sizes, and keys and values of different size


def formula(q, k, v, log_decay=None, normalize=False, state=None, causal=True, segment_ids=None):
    """Compute the definition, with one weight per query, key and channel."""
    groups = q.shape[1] // k.shape[1]
    gate = k.new_zeros(k.shape[1]) if log_decay is None else log_decay
    gate = gate[None, :, None].expand(k.shape[:3]) if gate.dim() == 1 else gate
    gate = (gate.unsqueeze(-1) if gate.dim() == 3 else gate).expand(k.shape)
    k, v, gate = (x.repeat_interleave(groups, 1) for x in (k, v, gate))
    if state is None:
        state = (
            k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]),
            k.new_zeros(*k.shape[:2], k.shape[3]),
        )
    else:
        state = (x.repeat_interleave(groups, 1) for x in state)
    kv, z = state
    total = gate.cumsum(2) if causal else gate
    visible = torch.ones(k.shape[0], q.shape[2], k.shape[2], dtype=torch.bool)
    in_first, in_last = visible[:, :, 0], visible[:, 0]
    if segment_ids is not None:
        visible = segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)
        in_first, in_last = segment_ids == segment_ids[:, :1], segment_ids == segment_ids[:, -1:]
    visible = (visible.tril() if causal else visible)[:, None, :, :, None]
    weights = (total.unsqueeze(3) - total.unsqueeze(2)) if causal else gate.new_zeros(())
    weights = weights.masked_fill(~visible, -torch.inf).exp()
    scores = torch.einsum("bhid,bhjd,bhijd->bhij", q, k, weights.expand(*q.shape[:3], *k.shape[2:]))
    q_decayed = q * in_first[:, None, :, None] * (total.exp() if causal else 1)
    out = scores @ v + q_decayed @ kv
    if normalize:
        out = out / (scores.sum(-1, keepdim=True) + q_decayed @ z.unsqueeze(-1) + 1e-6)
    state_decay = in_last[:, None, 0, None] * (total[:, :, -1].exp() if causal else 1)
    k_decayed = k * in_last[:, None, :, None] * (weights[:, :, -1] if causal else 1)
    kv, z = state_decay.unsqueeze(-1) * kv + k_decayed.mT @ v, state_decay * z + k_decayed.sum(2)
    return out, kv[:, ::groups], z[:, ::groups]


def make(length, decay="none", groups=1, dtype=torch.float64, strength=1.0, grad=False, d=D, e=E):
    """Return q, k, v and a log decay of the given kind."""
    q = torch.rand(B, HKV * groups, length, d)
    k, v = torch.rand(B, HKV, length, d), torch.randn(B, HKV, length, e)
    shape = {"head": (HKV,), "token": (B, HKV, length), "channel": (B, HKV, length, d)}.get(decay)
    inputs = (q, k, v, None if shape is None else -strength * torch.rand(shape))
    return [x if x is None else x.to(dtype).requires_grad_(grad) for x in inputs]


def make_state(dtype=torch.float64, grad=False):
    """Return a random state."""
    kv, z = torch.randn(B, HKV, D, E, dtype=dtype), torch.rand(B, HKV, D, dtype=dtype)
    return LinearState(kv.requires_grad_(grad), z.requires_grad_(grad))


def run(q, k, v, log_decay, causal=True, segment_ids=None, form="chunk", **options):
    """Return output and state as one flat tuple."""
    attend = in_form(form, linear_attention)
    mask = AttentionMask(causal=causal, segment_ids=segment_ids)
    options = {"mask": mask, "log_decay": log_decay, "return_state": True} | options
    out, state, *_ = by_sequence(attend)(q, k, v, **options)
    return out, *state


# -- the formula -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "impl"), FORMS_AND_IMPLS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 8, 9, 31])  # around one chunk of 8
def test_equals_formula(form, impl, decay, length):
    for groups, normalize, with_state in product((1, 3), (False, True), (False, True)):
        state = make_state() if with_state else None
        inputs = make(length, decay, groups)
        options = {"form": form, "impl": impl, "chunk_size": 8}
        ours = run(*inputs, normalize=normalize, state=state, **options)
        torch.testing.assert_close(ours, formula(*inputs, normalize, state), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("form", "impl"), TRAINED)
@pytest.mark.parametrize("decay", DECAYS)
def test_gradients_equal_those_of_the_formula(form, impl, decay):
    for groups, normalize, packed in product((1, 3), (False, True), (False, True)):
        inputs, state = make(21, decay, groups, grad=True), make_state(grad=True)
        ids = torch.tensor([[0] * 9 + [1] * 7 + [4] * 5, [2] * 20 + [3]]) if packed else None
        options = {"form": form, "impl": impl, "chunk_size": 8, "segment_ids": ids}
        ours = gradients(
            run(*inputs, normalize=normalize, state=state, **options), [*inputs, *state]
        )
        exact = formula(*inputs, normalize, state, segment_ids=ids)
        exact = gradients(exact, [*inputs, *state])
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", ["parallel", "chunk"])
@pytest.mark.parametrize("queries", [1, 6, 13])
def test_bidirectional_equals_formula(form, impl, queries):
    for groups, normalize, packed in product((1, 3), (False, True), (False, True)):
        keys = queries if packed else 13
        (q, *_), (_, k, v, _) = make(queries, groups=groups, grad=True), make(keys, grad=True)
        state, ids = make_state(grad=True), None
        if packed:
            ids = torch.tensor([[0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 5, 5, 5], [1] * 13])[:, :keys]
        options = {"normalize": normalize, "state": state, "causal": False, "segment_ids": ids}
        ours = run(q, k, v, None, form=form, impl=impl, chunk_size=4, scale=0.7, **options)
        exact = formula(0.7 * q, k, v, **options)
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)
        leaves = [q, k, v, *state]
        ours, exact = gradients(ours, leaves), gradients(exact, leaves)
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk_size", [1, 12, 64, None])
@pytest.mark.parametrize("decay", DECAYS)
def test_any_chunk_size(decay, chunk_size):
    inputs = make(70, decay, grad=True)
    ours = run(*inputs, chunk_size=chunk_size, normalize=True)
    exact = formula(*inputs, normalize=True)
    torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)
    ours, exact = gradients(ours, inputs), gradients(exact, inputs)
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_low_precision_stays_within_budget(decay, dtype):
    eps = torch.finfo(dtype).eps
    for normalize in (False, True):
        inputs = make(40, decay, 3, dtype, grad=True)
        wide = [x if x is None else x.detach().double().requires_grad_() for x in inputs]
        exact = formula(*wide, normalize)
        plain = run(*inputs, normalize=normalize, form="parallel", impl="reference")
        gradients_of = gradients(exact, wide), gradients(plain, inputs)
        for form, impl in TRAINED:
            ours = run(*inputs, normalize=normalize, form=form, impl=impl, chunk_size=16)
            assert ours[0].dtype == dtype
            assert ours[1].dtype == ours[2].dtype == torch.float32
            for triple in zip(ours, plain, exact, strict=True):
                assert_within(*triple, eps)
            exact_gradients, plain_gradients = gradients_of
            for triple in zip(
                gradients(ours, inputs), plain_gradients, exact_gradients, strict=True
            ):
                assert_within(*triple, eps)


@pytest.mark.parametrize(
    ("decay", "dtype"),
    [("none", torch.bfloat16), ("token", torch.bfloat16), ("token", torch.float32)],
)
def test_long_normalised_gradients_if_values_have_a_mean(dtype, decay):
    """Gradients of numerator and denominator nearly cancel; other libraries err by 26% in dq."""
    inputs = make(4096, decay, dtype=dtype, strength=1e-4, d=16, e=16)
    with torch.no_grad():
        inputs[2] += 1
    eps = torch.finfo(dtype).eps
    results = {}
    for name, kind, (form, impl) in (
        ("exact", torch.float64, ("chunk", "torch")),
        ("plain", dtype, ("chunk", "reference")),
        ("ours", dtype, ("chunk", "torch")),
    ):
        leaves = [x if x is None else x.detach().to(kind).requires_grad_() for x in inputs]
        out, *_ = run(*leaves, normalize=True, form=form, impl=impl, chunk_size=128)
        results[name] = gradients([out], leaves)
    for ours, plain, exact in zip(*(results[n] for n in ("ours", "plain", "exact")), strict=True):
        assert_within(ours, plain, exact, eps)
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < max(eps, 1e-4), f"relative error {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_bidirectional_gradients_if_values_have_a_mean(dtype):
    inputs = make(8192, dtype=dtype, d=16, e=16)[:3]
    inputs[2] += 1
    results = []
    for kind in (torch.float64, dtype):
        leaves = [x.detach().to(kind).requires_grad_() for x in inputs]
        out, *_ = run(*leaves, None, normalize=True, causal=False)
        results.append(gradients([out], leaves))
    for exact, ours in zip(*results, strict=True):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < max(torch.finfo(dtype).eps, 1e-4), f"relative error {error:.1e}"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", ["head", "token", "channel"])
@pytest.mark.parametrize("gates", [(1e4,), (0.0, 0.01, 3.0, 20.0, 1e4)], ids=str)
def test_strong_gates_neither_overflow_nor_lose_their_gradient(form, impl, decay, gates):
    # no input is negative, so that sums do not cancel and every gradient can be compared
    inputs = [x.abs() if x is not None else x for x in make(37, decay, dtype=torch.float32)]
    choice = torch.randint(len(gates), inputs[3].shape)
    inputs[3] = -torch.tensor(gates)[choice]
    options = {"form": form, "impl": impl, "chunk_size": 16}
    narrow = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    ours, exact = run(*narrow, **options), formula(*wide)
    torch.testing.assert_close([x.double() for x in ours], [*exact], rtol=1e-5, atol=1e-30)
    ours = torch.autograd.grad(sum(x.sum() for x in ours), narrow)
    exact = torch.autograd.grad(sum(x.sum() for x in exact), wide)  # accurate to 1e-15
    torch.testing.assert_close([x.double() for x in ours], [*exact], rtol=1e-5, atol=1e-14)


@pytest.mark.parametrize(("form", "impl"), TRAINED)
@pytest.mark.parametrize("decay", ["head", "token", "channel"])
def test_minus_infinity_resets_the_state(form, impl, decay):
    inputs, state = make(12, decay), make_state()
    inputs[3].view(-1)[0] = -torch.inf
    options = {"form": form, "impl": impl, "chunk_size": 8, "state": state}
    leaves = [x.clone().requires_grad_() for x in inputs]
    ours = run(*leaves, **options)
    exact = formula(*inputs[:3], inputs[3].clamp(min=-1e5), state=state)
    torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)
    assert all(x.isfinite().all() for x in gradients(ours, leaves))


# -- invariants ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "impl"), FORMS_AND_IMPLS)
@pytest.mark.parametrize("decay", DECAYS)
def test_later_tokens_do_not_change_earlier_outputs(form, impl, decay):
    q, k, v, log_decay = make(37, decay, groups=2, dtype=torch.float32)
    for cut in (1, 15, 16, 20):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[:, :, cut:] *= 6
        gates = log_decay
        if decay in ("token", "channel"):
            gates = log_decay.clone()
            gates[:, :, cut:] *= 6
        options = {"form": form, "impl": impl, "chunk_size": 16, "normalize": True}
        before, *_ = run(q, k, v, log_decay, **options)
        after, *_ = run(*later, gates, **options)
        assert torch.equal(before[:, :, :cut], after[:, :, :cut])
        assert not torch.equal(before[:, :, cut:], after[:, :, cut:])


@pytest.mark.parametrize(("form", "impl"), TRAINED)
@pytest.mark.parametrize("decay", DECAYS)
def test_packed_sequences_equal_separate_ones(form, impl, decay):
    options = {"form": form, "impl": impl, "chunk_size": 8, "normalize": True}
    # inside a chunk, across two chunks, one token, up to the border of a chunk, the rest
    lengths = (3, 13, 1, 8, 7)
    inputs, state = make(sum(lengths), decay, groups=2, grad=True), make_state(grad=True)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(B, -1)
    packed = run(*inputs, state=state, segment_ids=ids, **options)
    outs, start, last = [], 0, state
    for length in lengths:
        part = slice(start, start + length)
        parts = [x[:, :, part] for x in inputs[:3]]
        gates = inputs[3][:, :, part] if decay in ("token", "channel") else inputs[3]
        out, *last = run(*parts, gates, state=state if start == 0 else None, **options)
        outs.append(out)
        start += length
    separate = torch.cat(outs, 2), *last
    torch.testing.assert_close(packed, separate, rtol=1e-10, atol=1e-10)
    leaves = [*inputs, *state]
    ours, exact = gradients(packed, leaves), gradients(separate, leaves)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("form", "impl"), FORMS_AND_IMPLS)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cut", [0, 8, 11])
def test_prefill_and_decode_equal_one_pass(form, impl, decay, cut):
    q, k, v, log_decay = make(20, decay, groups=2)
    one_pass = run(q, k, v, log_decay, normalize=True)
    outs, state = [], None
    for start, stop in [(0, cut), *((t, t + 1) for t in range(cut, 20))]:
        part = slice(start, stop)
        gates = log_decay[:, :, part] if decay in ("token", "channel") else log_decay
        parts = [x[:, :, part] for x in (q, k, v)]
        now = ("steps", impl) if start >= cut else (form, impl)
        options = {"form": now[0], "impl": now[1], "chunk_size": 8, "normalize": True}
        out, *state = run(*parts, gates, state=state and LinearState(*state), **options)
        outs.append(out)
    torch.testing.assert_close((torch.cat(outs, 2), *state), one_pass, rtol=1e-11, atol=1e-11)


def test_the_incoming_state_does_not_change():
    inputs, state = make(20, "token"), make_state()
    before = [x.clone() for x in state]
    for form in FORMS:
        run(*inputs, state=state, form=form)
        assert all(map(torch.equal, state, before))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_no_read_past_the_inputs(form, decay):
    inputs = [
        x if x is None or x.dim() < 3 else nan_padded(x).requires_grad_()
        for x in make(21, decay, groups=2)
    ]
    ours = run(*inputs, form=form, chunk_size=8, normalize=True)
    assert all(x.isfinite().all() for x in ours)
    assert all(x.isfinite().all() for x in gradients(ours, inputs[:3]))


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("decay", [*DECAYS, "bidirectional"])
def test_results_do_not_depend_on_strides(decay, groups, rows):
    """Inputs and gradients with heads after tokens in memory, as in a model's projections."""

    def heads_after_tokens(x):
        return (
            x.transpose(1, 2).contiguous().transpose(1, 2) if x is not None and x.dim() > 2 else x
        )

    inputs = [x if x is None or x.dim() < 3 else x[:rows] for x in make(21, decay, groups)]
    d_out = torch.randn(rows, groups * HKV, 21, E, dtype=torch.float64)
    results = []
    for change in (lambda x: x, heads_after_tokens):
        leaves = [x if x is None else change(x).detach().requires_grad_() for x in inputs]
        out, *_ = run(*leaves, chunk_size=8, normalize=True, causal=decay != "bidirectional")
        given = [x for x in leaves if x is not None]
        results.append((out, *torch.autograd.grad(out, given, change(d_out), retain_graph=True)))
        torch.autograd.grad(out.sum(), given)  # an expanded gradient
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_huge_pages_do_not_change_results(monkeypatch):
    inputs = make(700, "channel", dtype=torch.float32, grad=True)
    results = []
    for threshold in (2**40, 1):
        monkeypatch.setattr("attnzoo.runtime.kernel_calls.HUGE_BYTES", threshold)
        out = run(*inputs)
        results.append((*out, *gradients(out, inputs)))
    assert all(map(torch.equal, *results))


def test_results_are_deterministic_and_use_no_random_numbers():
    inputs = make(40, "channel", dtype=torch.float32)
    before = torch.get_rng_state()
    first, second = run(*inputs), run(*inputs)
    assert all(map(torch.equal, first, second))
    assert torch.equal(before, torch.get_rng_state())


def test_scale_multiplies_queries():
    q, k, v, _ = make(20)
    for form, impl in FORMS_AND_IMPLS:
        scaled = run(q, k, v, None, form=form, impl=impl, scale=0.3)
        torch.testing.assert_close(scaled, run(0.3 * q, k, v, None), rtol=1e-11, atol=1e-11)
    scaled = run(q, k, v, None, causal=False, scale=0.3)
    torch.testing.assert_close(scaled, run(0.3 * q, k, v, None, causal=False))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(  # steps are always causal
    ("form", "causal"), [x for x in product(FORMS, [True, False]) if x != ("steps", False)]
)
def test_autocast_does_not_change_results(form, impl, causal):
    inputs = make(20, "token" if causal else "none", dtype=torch.float32, grad=True)
    options = {"form": form, "impl": impl, "causal": causal, "normalize": True, "chunk_size": 8}
    plain = run(*inputs, **options)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(*inputs, **options)
        if (form, impl) == ("chunk", "torch") and causal:  # its backward pass disables autocast too
            assert all(map(torch.equal, gradients(ours, inputs), gradients(plain, inputs)))
    assert all(map(torch.equal, ours, plain))


def test_features_can_have_a_wider_dtype_than_values():
    q, k, v, _ = make(20, dtype=torch.float32)
    out, kv, _ = run(q, k, v.bfloat16(), None)
    assert out.dtype == torch.bfloat16
    assert kv.dtype == torch.float32
    assert run(q.double(), k, v, None)[1].dtype == torch.float64


@pytest.mark.parametrize("causal", [True, False])
def test_empty_inputs_give_empty_outputs(causal):
    state = make_state()
    pairs = [x for x in FORMS_AND_IMPLS if causal or not ("steps" in x or "cpp" in x)]
    for form, impl in pairs:
        options = {"form": form, "impl": impl, "causal": causal, "state": state}
        q, k, v, _ = make(0, groups=3)
        out, *last = run(q, k, v, None, **options)
        assert out.shape == (B, 3 * HKV, 0, E)
        assert all(map(torch.equal, last, state))
        out, *_ = run(q[:0], k[:0], v[:0], None, **options | {"state": None})
        assert out.shape == (0, 3 * HKV, 0, E)
        if not causal:  # all keys are in the state already
            q, *_ = make(4, groups=3)
            out, *_ = run(q, k, v, None, **options)
            expected = q @ state.kv.repeat_interleave(3, 1)
            torch.testing.assert_close(out, expected)


def test_fully_masked_rows_give_zeros():
    q, k, v, _ = make(20, dtype=torch.float32)
    k[:, :, :5] = 0  # how a backend masks padding
    for form, impl in FORMS_AND_IMPLS:
        out, *_ = run(q, k, v, None, form=form, impl=impl, normalize=True)
        assert torch.equal(out[:, :, :5], torch.zeros_like(out[:, :, :5]))


# -- cost ------------------------------------------------------------------------------------------


def test_only_inputs_outputs_and_sums_are_saved_for_the_backward_pass():
    """A model saves the output anyway, as an input of the next layer."""
    inputs = make(512, "channel", dtype=torch.float32, grad=True, d=16, e=16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = run(*inputs, normalize=True)[0]
    known = {x.data_ptr() for x in (*inputs, out)}
    extra = sum(x.nbytes for x in kept if x.data_ptr() not in known)
    # the initial state, and the sums
    assert extra <= 4 * B * HKV * (16 * 16 + 16) + 4 * out[..., 0].numel()


def test_torch_keeps_inputs_and_the_states_between_chunks_for_the_backward_pass():
    inputs = make(513, "channel", dtype=torch.float32, grad=True, d=16, e=16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        run(*inputs, normalize=True, impl="torch")
    storages = {x.untyped_storage() for x in inputs}
    known = {storage.data_ptr() for storage in storages}
    extra = {y.data_ptr(): y.nbytes for y in kept if y.untyped_storage().data_ptr() not in known}
    assert sum(extra.values()) <= 9 * 4 * B * HKV * (16 * 16 + 16)


def test_state_is_returned_only_on_request():
    assert linear_attention(*make(4)[:3]).state is None
    assert isinstance(linear_attention(*make(4)[:3], return_state=True).state, LinearState)


@pytest.mark.parametrize("decay", ["none", "channel"])
def test_compiles_to_one_graph_without_unrolling(decay):
    nodes = []

    def backend(graph, _):
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    inputs = make(200, decay, groups=2, dtype=torch.float32, grad=True)
    options = {"segment_ids": torch.arange(200).div(70, rounding_mode="floor").expand(B, -1)}

    def call(*inputs):
        return run(*inputs, chunk_size=8, normalize=True, **options)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*inputs), call(*inputs))
    assert sum("attnzoo" in name for name in nodes) == 1
    assert len(nodes) < 60  # most of them make sequences of the mask, once for all layers


@pytest.mark.parametrize(
    ("form", "impl"), [("chunk", "auto"), ("chunk", "torch"), ("steps", "auto")]
)
def test_compiled_gradients_equal_eager_ones(form, impl):
    inputs = make(12 if form == "chunk" else 1, "token", dtype=torch.float32, grad=True)
    state = make_state(torch.float32, grad=True)

    def call(*given):
        *inputs, kv, z = given
        options = {"form": form, "impl": impl, "state": LinearState(kv, z)}
        return run(*inputs, chunk_size=8, normalize=True, **options)

    given = [*inputs, *state]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    exact = gradients(call(*given), given)
    torch.testing.assert_close(gradients(compiled(*given), given), exact)
    if (form, impl) == (
        "chunk",
        "auto",
    ):  # torch compiles the backward pass of plain operations under autocast
        with torch.autocast("cpu", torch.bfloat16):
            results = compiled(*given)
        torch.testing.assert_close(gradients(results, given), exact)


def test_a_named_implementation_has_no_fallback(monkeypatch):
    def broken(*_):
        raise RuntimeError("ran")

    monkeypatch.setattr("attnzoo.ops.linear.torch.scan_chunks", broken)
    inputs = make(20)
    with pytest.raises(RuntimeError, match="ran"):
        run(*inputs, impl="torch")
    run(*inputs, impl="reference")


@pytest.mark.parametrize("form", FORMS)
def test_the_output_names_its_implementation(form):
    for impl in ("auto", *IMPLS):
        attend = in_form(form, linear_attention)
        choice = attend(*make(4)[:3], impl=impl).impl
        assert choice.impl == impl or (impl == "auto" and choice.impl in (*IMPLS, "cpp"))
        words = "one token; " if form == "steps" and impl != "reference" else "chunk form; "
        assert choice.reason.startswith(words)


# -- bad input -------------------------------------------------------------------------------------


def make_arguments(**changes):
    """Return the arguments of a valid call with some of them changed."""
    q, k, v, _ = make(6, groups=2, dtype=torch.float32)
    given = {"q": q, "k": k, "v": v} | changes
    return {name: x(q, k, v) if callable(x) else x for name, x in given.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda q, k, v: q[0]}, r"q must be \[B, H, T, D\], got \[4, 6, 5\]"),
        (
            {"v": lambda q, k, v: v[:, :, :4]},
            r"k and v must agree .* k \[2, 2, 6, 5\] and v \[2, 2, 4",
        ),
        ({"q": lambda q, k, v: q[..., :3]}, r"q and k must agree in batch and in key size, got q"),
        ({"q": lambda q, k, v: q[:, :3]}, r"a multiple of the number of key heads, got 3 and 2"),
        (
            {"q": lambda q, k, v: q[:, :, :4]},
            r"got 4 queries and 6 keys; pass earlier .* causal=False",
        ),
        ({"k": lambda q, k, v: k.long()}, r"k is int64, but must be one of bfloat16, .* float64"),
        ({"v": lambda q, k, v: v.to(torch.complex64)}, r"v is complex64, but must be"),
        (
            {"log_decay": torch.zeros(2, 6)},
            r"here \[2\], \[2, 2, 6\], \[2, 2, 6, 5\]; got \[2, 6\]",
        ),
        ({"log_decay": torch.zeros(2, dtype=torch.long)}, r"log_decay is int64"),
        (
            {"log_decay": torch.zeros(2), "causal": False},
            r"needs a causal mask; leave it out",
        ),
        (
            {"state": (torch.zeros(2, 2, 5, 4), torch.zeros(2, 2, 5))},
            r"state.kv must be \[2, 2, 5, 3\]",
        ),
        ({"state": (torch.zeros(2, 2, 5, 3), torch.zeros(2, 2))}, r"state.k must be \[2, 2, 5\]"),
        (
            {"state": (torch.zeros(2, 2, 5, 3).half(), torch.zeros(2, 2, 5))},
            r"state.kv is float16, but must be one of float32, float64; do not convert",
        ),
        (
            {"sequences": Sequences.from_cu_seqlens(torch.tensor([0, 6]))},
            r"sequences are of one row, got 2 rows of keys; put all tokens into one",
        ),
        ({"slots": torch.zeros(2).long()}, r"slots are for one token of each row, got 6 tokens"),
        (
            {"slots": torch.zeros(3).long()},
            r"slots must be \[B\], here \[2\], and int",
        ),
        ({"impl": "tork"}, r"no impl 'tork'. Did you mean 'torch'\? It has auto, triton, fla, c"),
        ({"chunk_size": 0}, r"an integer from 1 to .*, got 0"),
        ({"chunk_size": 2.0}, r"an integer from 1 to .*, got 2.0"),
    ],
)
def test_invalid_input_raises_with_the_reason(changes, message):
    given = make_arguments(**changes)
    with pytest.raises(ValueError, match=message):
        linear_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize("decay", DECAYS)
def test_a_step_overwrites_the_state_only_without_gradients(decay):
    (q, k, v, log_decay), state = make(1, decay, groups=3), make_state()
    copies, options = LinearState(*(x.clone() for x in state)), {"return_state": True}
    options |= {"log_decay": log_decay, "normalize": True, "impl": "torch"}
    expected = linear_attention(q, k, v, state=LinearState(*state), **options)
    kept = linear_attention(q, k, v, state=copies, reuse_state=True, **options)  # with gradients
    assert all(torch.equal(x, y) for x, y in zip(copies, state, strict=True))
    with torch.no_grad():
        found = linear_attention(q, k, v, state=copies, reuse_state=True, **options)
    assert all(x is y for x, y in zip(found.state, copies, strict=True))
    for each in (kept, found):
        torch.testing.assert_close((each.out, *each.state), (expected.out, *expected.state))
