"""The window hybrid against its reference, which computes all pairs, in float64."""

from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck

from attnzoo.contract.sequences import Sequences
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import FIXED, MapWeights
from attnzoo.ops.hybrid.api import LinearBranch, hybrid_attention
from attnzoo.ops.hybrid.parts import HybridState
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.ops.window import flex
from tests.kernel_device import nan_in_uninitialized_memory
from tests.ops.flex_on_cpu import flex_on_cpu

B, H, HKV, D, E, F = 2, 4, 2, 5, 3, 6
SCALE = 0.4
DECAYS = (None, "head", "token", "channel")
KINDS = ({}, {"mean": True}, {"relative": False})
IMPLS = ("torch", "cpp", "compiled", "flex")
GAPS = (2, 0, 3, 0, 1, 2)  # tokens of no sequence before each sequence, and at the end
LENGTHS = (20, 0, 1, 5, 70)


@pytest.fixture(autouse=True)
def _nan_in_uninitialized_memory():
    with nan_in_uninitialized_memory():
        yield


def make(length, decay=None, *, batch=B, relative=True, mean=False, dtype=torch.float64):
    """Return q, k, v and the linear branch."""
    q = torch.randn(batch, H, length, D, dtype=dtype)
    k, v = (torch.randn(batch, HKV, length, n, dtype=dtype) for n in (D, E))
    features = [torch.rand(batch, n, length, F, dtype=dtype) for n in (H, HKV)]
    log_decay = {
        None: None,
        "head": -torch.rand(HKV, dtype=dtype),
        "token": -torch.rand(batch, HKV, length, dtype=dtype),
        "channel": -torch.rand(batch, HKV, length, F, dtype=dtype),
    }[decay]
    weight = torch.randn(1, H, 1, 1, dtype=dtype)
    return q, k, v, LinearBranch(*features, weight, log_decay, relative, mean)


def tokens(x, part):
    """Return some tokens of the result of :func:`make`."""
    q, k, v, branch = x
    decay, weight = branch.log_decay, branch.log_weight
    if decay is not None and decay.dim() > 1:
        decay = decay[:, :, part]
    if weight.dim() > 1 and weight.shape[-2] > 1:
        weight = weight[..., part, :]
    q_features, k_features = branch.q[:, :, part], branch.k[:, :, part]
    branch = branch._replace(q=q_features, k=k_features, log_decay=decay, log_weight=weight)
    return q[:, :, part], k[:, :, part], v[:, :, part], branch


def run(x, window, impl="auto", **options):
    name = "torch" if impl == "compiled" else impl
    return hybrid_attention(*x, window=window, scale=SCALE, impl=name, **options)


def reference(x, window, **options):
    return run(x, window, "reference", **options)


def assert_close(ours, exact):
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


@pytest.fixture
def impl(request, monkeypatch):
    """An implementation; ``compiled`` is the path of torch under ``torch.compile``."""
    if request.param == "compiled":
        monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    if request.param != "flex":
        yield request.param
        return
    monkeypatch.setattr(flex, "flex_reasons", lambda *x: [])  # float64, narrow heads
    with flex_on_cpu(monkeypatch) as masks:
        yield request.param
    assert masks


every_impl = pytest.mark.parametrize("impl", IMPLS, indirect=True)


@pytest.mark.parametrize("impl", ["torch", "cpp", "flex"], indirect=True)
@pytest.mark.parametrize("decay", DECAYS, ids=str)
@pytest.mark.parametrize("window", [1, 4, 16])
def test_causal_rows_equal_the_reference(window, decay, impl):
    for length in (5, 17, 70 if decay is None else 20):
        for kind in KINDS:
            x = make(length, decay, **kind)
            assert_close(run(x, window, impl).out, reference(x, window).out)


@pytest.mark.parametrize("impl", ["torch", "cpp", "flex"], indirect=True)
@pytest.mark.parametrize("window", [1, 4, 16])
def test_bidirectional_rows_equal_the_reference(window, impl):
    for length in (5, 17, 70):
        for kind in KINDS:
            x = make(length, None, **kind)
            exact = reference(x, window, causal=False)
            assert_close(run(x, window, impl, causal=False).out, exact.out)


def test_the_reference_computes_the_formula_of_one_query():
    """Query 9 of a window of 3 with 2 first tokens, written out for one head."""
    x = make(10, "token", relative=False)
    q, k, v = (y[1, 0].double() for y in x[:3])
    branch, i = x[3], 9
    near = [0, 1, 7, 8, 9]
    weights = (SCALE * k[near] @ q[i]).exp()
    values, total = weights @ v[near], weights.sum()
    factor = branch.log_weight[0, 0, 0, 0].exp()
    for j in range(2, 7):  # key j leaves the window at token j + 3
        decay = branch.log_decay[1, 0, j + 4 : i + 1].sum().exp()
        weight = factor * decay * (branch.q[1, 0, i] @ branch.k[1, 0, j])
        values, total = values + weight * v[j], total + weight
    assert_close(reference(x, 3, num_sinks=2).out[1, 0, i], values / total)


# -- one row of sequences --------------------------------------------------------------------------


def row_of_sequences(decay=None, **options):
    """Return a row with gaps of NaN, and its sequences."""
    starts, end = [], 0
    for gap, length in zip(GAPS, LENGTHS, strict=False):
        starts.append(end + gap)
        end = starts[-1] + length
    total = end + GAPS[-1]
    sequences = Sequences(torch.tensor(starts), torch.tensor(LENGTHS), max(LENGTHS))
    q, k, v, branch = make(total, decay, batch=1, **options)
    branch = branch._replace(log_weight=torch.randn(1, H, total, 1, dtype=q.dtype))
    outside = sequences.index(total) == sequences.count
    for y in (q, k, v, branch.q, branch.k, branch.log_weight):
        y[:, :, outside] = torch.nan
    if decay in ("token", "channel"):
        branch.log_decay[:, :, outside] = torch.nan
    return (q, k, v, branch), sequences


def each_alone(x, sequences, window, states=None, **options):
    """Return the output of a row and the states, each sequence run alone by the reference."""
    out = x[2].new_zeros(1, H, x[2].shape[2], E)
    after = []
    for i, (start, length) in enumerate(zip(sequences.starts, sequences.lengths, strict=True)):
        part = slice(int(start), int(start + length))
        state = None if states is None else HybridState._make(y[i : i + 1] for y in states)
        found = reference(tokens(x, part), window, state=state, **options)
        out[:, :, part] = found.out
        after.append(found.state)
    if after[0] is None:
        return out, None
    return out, HybridState._make(map(torch.cat, zip(*after, strict=True)))


@pytest.mark.parametrize("num_sinks", [0, 3])
@pytest.mark.parametrize("impl", [*IMPLS, "reference"], indirect=True)
@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_sequences_equal_each_alone(decay, impl, num_sinks):
    """Without and then with states, of which some windows are not full."""
    for window, kind in zip((4, 1, 16), KINDS, strict=True):
        options = {"return_state": True, "num_sinks": num_sinks}
        states = None
        for _ in range(2):
            x, sequences = row_of_sequences(decay, **kind)
            exact, after = each_alone(x, sequences, window, states, **options)
            found = run(x, window, impl, sequences=sequences, state=states, **options)
            assert_close(found.out, exact)
            assert_close(found.state, after)
            states = after


@pytest.mark.parametrize("impl", [*IMPLS, "reference"], indirect=True)
def test_bidirectional_sequences_equal_each_alone(impl):
    for window, kind in zip((4, 1, 16), KINDS, strict=True):
        x, sequences = row_of_sequences(**kind)
        exact, _ = each_alone(x, sequences, window, causal=False)
        assert_close(run(x, window, impl, sequences=sequences, causal=False).out, exact)


def leaves_of(x):
    branch = x[3]
    found = [*x[:3], branch.q, branch.k, branch.log_weight]
    found += [] if branch.log_decay is None else [branch.log_decay]
    return [y.detach().clone().requires_grad_() for y in found]


def with_leaves(x, leaves):
    q, k, v, far_q, far_k, weight, *decay = leaves
    return (
        q,
        k,
        v,
        x[3]._replace(q=far_q, k=far_k, log_weight=weight, log_decay=next(iter(decay), None)),
    )


@every_impl
@pytest.mark.parametrize(
    ("decay", "options"),
    [("channel", {}), ("head", {"num_sinks": 2}), (None, {"causal": False})],
    ids=str,
)
def test_gradients_of_sequences_are_those_of_each_alone(decay, options, impl):
    x, sequences = row_of_sequences(decay, relative=False)
    upstream = torch.randn(1, H, x[0].shape[2], E, dtype=torch.float64)
    states = None
    if decay == "channel":  # gradients of states too
        states = each_alone(*row_of_sequences(decay), 4, return_state=True)[1]
    gradients = []
    for alone in (False, True):
        leaves = leaves_of(x)
        given = None
        if states is not None:  # the last column of kv is z
            parts = (*states[:3], states.kv[..., :-1], states.z)
            parts = [y.clone().requires_grad_() for y in parts]
            kv = torch.cat([parts[3], parts[4].unsqueeze(3)], 3)
            given = HybridState(*parts[:3], kv, parts[4], states.seen)
            leaves += parts
        changed = with_leaves(x, leaves[: len(leaves) - (0 if given is None else 5)])
        if alone:
            out, _ = each_alone(changed, sequences, 4, given, **options)
        else:
            out = run(changed, 4, impl, sequences=sequences, state=given, **options).out
        gradients.append(torch.autograd.grad((out * upstream).sum(), leaves))
    assert_close(*gradients)


@every_impl
def test_sequences_of_unknown_number_equal_each_alone(impl):
    """In a compiled graph there are as many entries as tokens; in torch, rows are one sequence."""
    ends = torch.tensor([5, 13, 22] if impl == "cpp" else [11, 22])
    lengths = ends.diff(prepend=ends.new_zeros(1))
    known = Sequences(ends - lengths, lengths, 11)
    rest = torch.zeros(22 - len(ends), dtype=torch.int64)
    unknown = Sequences(torch.cat([known.starts, rest + 22]), torch.cat([lengths, rest]), 11, 2)
    for decay in (None, "token", "head"):
        x = make(22, decay, batch=1, mean=True)
        exact, _ = each_alone(x, known, 4)
        assert_close(run(x, 4, impl, sequences=unknown).out, exact)


@pytest.mark.parametrize("num_sinks", [0, 2])
@pytest.mark.parametrize("impl", ["torch", "cpp"])
def test_the_feature_map_of_sequences(impl, num_sinks):
    """With gradients of its weights, then with states whose windows are all full, and are not."""
    (q, k, v, branch), sequences = row_of_sequences("token")
    q, k = (torch.cat([x, x, x, x[..., :1]], -1) for x in (q, k))  # 16 channels: C++ maps them
    leaves = [torch.randn(n, 16, 16, dtype=torch.float64) for n in (H, HKV)]
    leaves = [x.requires_grad_() for x in (*leaves, q, k, v)]
    upstream = torch.randn(1, H, q.shape[2], E, dtype=torch.float64)

    def call(attend, window, part=slice(None), **options):
        options = {"num_sinks": num_sinks, "return_state": True} | options
        q_weight, k_weight, *qkv = leaves
        maps = {"feature_map": "hedgehog", "map_weights": MapWeights(q_weight, k_weight)}
        x = (*qkv, branch._replace(q=qkv[0], k=qkv[1], **maps))
        return attend(tokens(x, part), window, **options)

    given = {"sequences": sequences, "impl": impl}
    exact, states = call(lambda x, *y, **z: each_alone(x, sequences, *y, **z), 4)
    found = call(run, 4, **given)
    assert_close(found.out, exact)
    assert_close(found.state, states)
    gradients = [torch.autograd.grad((x * upstream).sum(), leaves) for x in (found.out, exact)]
    assert_close(*gradients)
    exact, _ = call(lambda x, *y, **z: each_alone(x, sequences, *y, **z), 4, states=states)
    assert_close(call(run, 4, state=states, **given).out, exact)
    start = GAPS[0]
    for tokens_before in (3, 9):
        first = slice(start, start + tokens_before)
        second = slice(first.stop, start + LENGTHS[0])
        exact = call(reference, 4, slice(start, second.stop))
        state = call(run, 4, first, impl=impl).state
        found = call(run, 4, second, state=state, impl=impl)
        assert_close(found.out, exact.out[:, :, tokens_before:])
        assert_close(found.state, exact.state)


@pytest.mark.parametrize("shape", [(1,), (20, 1), (H, 1, 1), (H, 20, 1), (1, H, 20, 1)], ids=str)
def test_a_log_weight_is_broadcast(shape):
    *x, branch = make(20)
    weight = torch.randn(shape, dtype=torch.float64)
    outs = [
        run((*x, branch._replace(log_weight=each)), 4).out
        for each in (weight, weight.expand(B, H, 20, 1))
    ]
    assert_close(*outs)
    (q, k, v, branch), sequences = row_of_sequences()
    length = q.shape[2]
    weight = torch.randn([length if n == 20 else n for n in shape], dtype=torch.float64)
    x = q, k, v, branch._replace(log_weight=weight)
    exact, _ = each_alone(x, sequences, 4)
    for num_sinks in (0, 2):
        exact, _ = each_alone(x, sequences, 4, num_sinks=num_sinks)
        assert_close(run(x, 4, sequences=sequences, num_sinks=num_sinks).out, exact)


# -- first tokens and states of rows ---------------------------------------------------------------


@every_impl
@pytest.mark.parametrize("num_sinks", [0, 3])
@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_parts_with_a_state_equal_one_pass(decay, num_sinks, impl):
    """Also parts that end before, among and after the first tokens, and steps of one token."""
    for window, length, kind in (
        (4, 20, {"mean": True}),
        (1, 17, {"relative": False}),
        (16, 18, {"relative": False}),
        (4, 2, {"mean": True}),
    ):
        x = make(length, decay, **kind)
        options = {"num_sinks": num_sinks, "return_state": True}
        exact = reference(x, window, **options)
        whole = run(x, window, impl, **options)
        assert_close(whole.out, exact.out)
        assert_close(whole.state, exact.state)
        for cuts in ((0, 1, 2, 3, length), (0, 2, length), (0, 5, 6, 11, 12, length)):
            state, outs = None, []
            for start, stop in pairwise(sorted({min(cut, length) for cut in cuts})):
                part = tokens(x, slice(start, stop))
                output = run(part, window, impl, state=state, **options)
                state = output.state
                outs.append(output.out)
            assert_close(torch.cat(outs, 2), exact.out)
            assert_close(state, exact.state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_with_sinks_in_cpp_equal_those_in_torch(dtype):
    """The C++ step against the same step in torch, from the first token on."""
    for decay, kind in ((None, {"mean": True}), ("channel", {}), ("token", {"relative": False})):
        x = make(24, decay, dtype=dtype, **kind)
        states = [None, None]
        for t in range(24):
            token = tokens(x, slice(t, t + 1))
            steps = [
                run(token, 5, impl=impl, num_sinks=4, state=state, return_state=True)
                for impl, state in zip(("cpp", "torch"), states, strict=True)
            ]
            states = [step.state for step in steps]
            if t:
                assert "one token; " in steps[0].impl.reason
            tolerance = 1e-10 if dtype == torch.float64 else 1e-5
            pairs = [(steps[0].out, steps[1].out), *zip(*states, strict=True)]
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@every_impl
def test_gradients_with_sinks(impl):
    q, k, v, branch = make(9, relative=False)
    leaves = [x[:1].detach().requires_grad_() for x in (q, k, v, branch.q, branch.k)]

    def call(q, k, v, far_q, far_k):
        changed = branch._replace(q=far_q, k=far_k)
        name = "torch" if impl == "compiled" else impl
        return hybrid_attention(q, k, v, changed, window=3, scale=SCALE, impl=name, num_sinks=2).out

    assert gradcheck(call, leaves, fast_mode=True)


def test_the_size_of_the_state_does_not_depend_on_the_length():
    sizes = {
        tuple(field.shape for field in run(make(n), 4, return_state=True).state)
        for n in (1, 3, 4, 9, 40)
    }
    assert len(sizes) == 1


@pytest.mark.parametrize("relative", [True, False])
def test_a_branch_of_weight_zero_gives_window_attention(relative):
    x = make(12, relative=relative)
    x = (*x[:3], x[3]._replace(log_weight=torch.tensor(-1e4)))
    window = torch.ones(12, 12, dtype=torch.bool).tril().triu(-3)
    exact = softmax_attention(*x[:3], scale=SCALE, mask=window).out
    assert_close(run(x, 4).out, exact)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients(causal, relative):
    """Without ``relative``, gradients also flow through the window's log-sum-exp."""
    q, k, v, branch = make(9, "token" if causal else None, relative=relative)
    decay = branch.log_decay
    leaves = [q, k, v, branch.q, branch.k, branch.log_weight, *([] if decay is None else [decay])]
    leaves = [x[:1] if x.shape[0] == B else x for x in leaves]
    leaves = [x.detach().requires_grad_() for x in leaves]

    def call(q, k, v, far_q, far_k, weight, decay=None):
        branch = LinearBranch(far_q, far_k, weight, decay, relative, mean=decay is None)
        return hybrid_attention(q, k, v, branch, window=3, scale=SCALE, causal=causal).out

    assert gradcheck(call, leaves, fast_mode=True)


def test_large_scores_stay_finite():
    for relative in (True, False):
        q, k, v, branch = make(30, relative=relative, dtype=torch.float32)
        branch = branch._replace(log_weight=torch.full((1, H, 1, 1), 60.0 if relative else 200.0))
        out = hybrid_attention(100 * q, 100 * k, v, branch, window=4, scale=1.0).out
        assert out.isfinite().all()
        assert out.abs().max() <= v.abs().max() * 1.0001


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_errors_are_at_most_twice_those_of_the_reference(dtype):
    x = make(100, dtype=torch.float64)
    low = [*(t.to(dtype) for t in x[:3]), x[3]._replace(q=x[3].q.float(), k=x[3].k.float())]
    low[3] = low[3]._replace(log_weight=low[3].log_weight.float())
    exact = run(
        [*(t.double() for t in low[:3]), LinearBranch(*(t.double() for t in low[3][:3]))],
        8,
        "reference",
    )
    plain, ours = run(low, 8, impl="torch"), run(low, 8)
    budget = 2 * (plain.out - exact.out).abs().max() + 2 * torch.finfo(dtype).eps
    assert (ours.out - exact.out).abs().max() <= budget


def test_flex_rounds_as_little_as_torch(monkeypatch):
    monkeypatch.setattr(flex, "flex_reasons", lambda *x: [])
    low = [t.bfloat16() for t in make(100)[:3]]
    branch = make(100)[3]
    branch = branch._replace(q=branch.q.float(), k=branch.k.float(), log_weight=torch.tensor(0.3))
    exact = LinearBranch(*(t.double() for t in branch[:3]))
    exact = run([*(t.double() for t in low), exact], 8, "reference").out
    plain = run([*low, branch], 8, "torch").out
    with flex_on_cpu(monkeypatch):
        ours = run([*low, branch], 8, "auto")
    assert ours.impl.impl == "flex"
    budget = 2 * (plain - exact).abs().max() + 2 * torch.finfo(torch.bfloat16).eps
    assert (ours.out - exact).abs().max() <= budget


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_the_output_names_its_implementation(impl):
    for causal in (True, False):
        choice = run(make(12), 4, causal=causal, impl=impl).impl
        assert choice.impl == impl or (impl == "auto" and choice.impl in ("cpp", "torch"))
        assert choice.reason.startswith("softmax window + linear form; ")


def test_an_unknown_implementation_is_refused_with_all_names():
    with pytest.raises(
        UnsupportedError, match=r"no impl 'xformers'.* auto, flex, cpp, torch, reference"
    ):
        run(make(12), 4, impl="xformers")


# -- one token in C++ ------------------------------------------------------------------------------


def decode(x, prompt, window, impl="auto"):
    """Return the outputs of the tokens after a prompt, and the implementations that ran."""
    out, impls = [], set()
    state = run(tokens(x, slice(prompt)), window, return_state=True).state
    with torch.no_grad():
        for t in range(prompt, x[0].shape[2]):
            new = tokens(x, slice(t, t + 1))
            step = run(new, window, impl=impl, state=state, return_state=True)
            state = step.state
            out.append(step.out)
            impls.add(step.impl.impl)
    return torch.cat(out, 2), impls


@pytest.mark.parametrize("decay", DECAYS, ids=str)
@pytest.mark.parametrize("window", [1, 4, 16])
def test_step_equals_the_reference(window, decay):
    prompt = 7
    for options in ({}, {"mean": True}, {"relative": False}):
        x = make(24, decay, **options)
        out, impls = decode(x, prompt, window)
        assert impls == {"cpp"}
        assert_close(out, reference(x, window).out[:, :, prompt:])


@pytest.mark.parametrize("name", [name for name in FIXED if name != "identity"])
@pytest.mark.parametrize("impl", ["torch", "cpp"])
def test_step_with_a_feature_map(name, impl):
    """Its inputs, of a size that is no multiple of a vector, are those of the window."""
    q, k, v, branch = make(24, mean=True)
    branch = branch._replace(q=q, k=k, feature_map=name, feature_scale=0.7)
    x = (q, k, v, branch)
    out, impls = decode(x, 7, 4, impl)
    assert impls == {impl}
    assert_close(out, reference(x, 4).out[:, :, 7:])


def test_step_of_wider_heads_and_strided_tokens():
    x = make(9, "channel")
    q, k, v, branch = (torch.cat([y] * 8, -1) if torch.is_tensor(y) else y for y in x)
    q, k, v = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (q, k, v))
    x = (q, k, v, branch)
    out, impls = decode(x, 3, 4)
    assert impls == {"cpp"}
    assert_close(out, reference(x, 4).out[:, :, 3:])


def test_step_with_bfloat16_keys():
    q, k, v, branch = make(20, "token", mean=True, dtype=torch.float32)
    q, k, v = (y.bfloat16() for y in (q, k, v))
    exact = reference((*(y.double() for y in (q, k, v)), _double(branch)), 4).out[:, :, 6:]
    ours, impls = decode((q, k, v, branch), 6, 4)
    plain, others = decode((q, k, v, branch), 6, 4, impl="torch")
    assert (impls, others) == ({"cpp"}, {"torch"})
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_step_with_a_feature_map_of_bfloat16_keys():
    q, k, v = (x.bfloat16() for x in make(20, dtype=torch.float32)[:3])
    weight = torch.randn(1, H, 1, 1)
    x = q, k, v, LinearBranch(q, k, weight, mean=True, feature_map="elu+1")
    wide = [y.double() for y in (q, k, v)]
    branch = x[3]._replace(q=wide[0], k=wide[1], log_weight=weight.double())
    exact = reference((*wide, branch), 4).out[:, :, 6:]
    ours, impls = decode(x, 6, 4)
    plain, others = decode(x, 6, 4, impl="torch")
    assert (impls, others) == ({"cpp"}, {"torch"})
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()


def _double(branch):
    return branch._replace(
        **{name: getattr(branch, name).double() for name in ("q", "k", "log_weight", "log_decay")}
    )


def test_steps_that_cpp_does_not_support_run_in_torch():
    x = make(6)
    state = run(tokens(x, slice(5)), 4, return_state=True).state
    new = tokens(x, slice(5, 6))
    expected = reference(x, 4).out[:, :, 5:]
    with_grad = (new[0].clone().requires_grad_(), *new[1:])
    for given, impl in ((with_grad, "torch"), (new, "cpp")):
        step = run(given, 4, state=state)
        assert step.impl.impl == impl
        assert_close(step.out, expected)


@pytest.mark.parametrize("impl", ["torch", "cpp"])
@pytest.mark.parametrize("num_sinks", [0, 2])
def test_a_step_overwrites_the_state_only_without_gradients(num_sinks, impl):
    x = make(9, "channel", mean=True)
    options = {"num_sinks": num_sinks, "return_state": True}
    state = run(tokens(x, slice(3)), 4, **options).state
    options |= {"reuse_state": True, "impl": impl}
    exact = reference(x, 4, num_sinks=num_sinks).out
    for t in range(3, 9):
        given, before = state, [y.clone() for y in state]
        leaf = (x[0].clone().requires_grad_(), *x[1:])
        run(tokens(leaf, slice(t, t + 1)), 4, state=state, **options)
        assert all(map(torch.equal, state, before))
        with torch.no_grad():
            step = run(tokens(x, slice(t, t + 1)), 4, state=state, **options)
        state = step.state
        assert all(a is b for a, b in zip(state, given, strict=True))
        assert step.impl.impl == impl
        assert_close(step.out, exact[:, :, t : t + 1])


SLOTS = torch.tensor([3, -1, 0, 4])  # of five states


def pool_and_token(decay, num_sinks, window=4):
    """Return states after 0 to 7 tokens, and one token of four sequences, the second of none."""
    x = make(7, decay, batch=5, mean=True)
    lengths = (7, 2, 5, 1, 6)
    options = {"num_sinks": num_sinks, "return_state": True}
    states = [
        reference(tuple_of_rows(tokens(x, slice(n)), i), window, **options).state
        for i, n in enumerate(lengths)
    ]
    token = make(1, decay, batch=4, mean=True)
    for y in (*token[:3], token[3].q, token[3].k):
        y[1] = torch.nan
    return HybridState._make(map(torch.cat, zip(*states, strict=True))), token


def tuple_of_rows(x, row):
    q, k, v, branch = x
    decay = branch.log_decay
    if decay is not None and decay.dim() > 1:
        decay = decay[row : row + 1]
    part = slice(row, row + 1)
    branch = branch._replace(q=branch.q[part], k=branch.k[part], log_decay=decay)
    return q[part], k[part], v[part], branch


@pytest.mark.parametrize("impl", ["torch", "cpp", "reference"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("num_sinks", [0, 3])
@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_slots_are_rows_of_a_pool(decay, num_sinks, in_place, impl):
    pool, token = pool_and_token(decay, num_sinks)
    before = HybridState._make(y.clone() for y in pool)
    options = {"num_sinks": num_sinks, "return_state": True}
    with torch.no_grad():
        step = run(token, 4, impl, state=pool, slots=SLOTS, reuse_state=in_place, **options)
    assert step.impl.impl == impl
    exact = HybridState._make(y.clone() for y in before)
    for i, slot in enumerate(SLOTS.tolist()):
        if slot < 0:
            assert not step.out[i].any()
            continue
        state = HybridState._make(y[slot : slot + 1] for y in before)
        alone = reference(tuple_of_rows(token, i), 4, state=state, **options)
        assert_close(step.out[i : i + 1], alone.out)
        for y, new in zip(exact, alone.state, strict=True):
            y[slot] = new[0]
    assert_close(step.state, exact)
    assert all(a is b for a, b in zip(step.state, pool, strict=True)) == in_place
    if not in_place:
        assert all(map(torch.equal, pool, before))


def test_slots_have_gradients():
    pool, token = pool_and_token("token", 2)
    token = tuple(y.nan_to_num() if torch.is_tensor(y) else y for y in token)
    token = (*token[:3], token[3]._replace(q=token[3].q.nan_to_num(), k=token[3].k.nan_to_num()))
    kv = pool.kv.clone().requires_grad_()
    out = run(token, 4, state=pool._replace(kv=kv), slots=SLOTS, num_sinks=2).out
    (gradient,) = torch.autograd.grad(out.sum(), kv)
    assert [bool(g.any()) for g in gradient] == [True, False, False, False, True]


def test_slots_without_a_pool_are_refused():
    with pytest.raises(UnsupportedError, match="slots, which are rows of state, without state"):
        run(make(1, batch=4), 4, slots=SLOTS)
