"""The window hybrid against a dense formula in this file."""

from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.ops.hybrid.api import LinearBranch, hybrid_attention
from attnzoo.ops.softmax.api import softmax_attention

B, H, HKV, D, E, F = 2, 4, 2, 5, 3, 6
SCALE = 0.4
DECAYS = (None, "head", "token", "channel")


def make(length, decay=None, padded=False, *, relative=True, mean=False, dtype=torch.float64):
    """Return q, k, v, the linear branch and the padding mask."""
    q = torch.randn(B, H, length, D, dtype=dtype)
    k, v = (torch.randn(B, HKV, length, n, dtype=dtype) for n in (D, E))
    features = [torch.rand(B, n, length, F, dtype=dtype) for n in (H, HKV)]
    log_decay = {
        None: None,
        "head": -torch.rand(HKV, dtype=dtype),
        "token": -torch.rand(B, HKV, length, dtype=dtype),
        "channel": -torch.rand(B, HKV, length, F, dtype=dtype),
    }[decay]
    padding = None
    if padded:
        padding = torch.rand(B, length) > 0.3
        padding[:, -2:], padding[0, :3] = True, False
        features[1] = features[1] * padding[:, None, :, None]
        if log_decay is not None:
            if log_decay.dim() == 1:
                log_decay = log_decay[None, :, None].expand(B, HKV, length)
            log_decay = log_decay * padding[:, None].view(
                B, 1, length, *[1] * (log_decay.dim() - 3)
            )
    weight = torch.randn(1, H, 1, 1, dtype=dtype)
    return q, k, v, LinearBranch(*features, weight, log_decay, relative, mean), padding


def dense(q, k, v, branch, window, *, causal=True, padding=None, num_sinks=0):
    """Compute every attention weight. Distances do not count padding."""
    length = q.shape[2]
    padding = torch.ones(B, length, dtype=torch.bool) if padding is None else padding
    k, v, features = (x.repeat_interleave(H // HKV, 1) for x in (k, v, branch.k))
    rank = padding.long().cumsum(1) - 1
    distance = rank[:, :, None] - rank[:, None, :]
    seen = padding[:, None, :] & ((distance >= 0) | (not causal))
    is_near = distance < window if causal else distance.abs() <= window
    is_near = is_near | (rank < num_sinks)[:, None, :]
    in_window, outside = (seen & is_near)[:, None], (seen & ~is_near)[:, None]
    weights = (SCALE * q @ k.mT).exp() * in_window
    f = branch.log_weight + (weights.sum(-1, keepdim=True).log() if branch.relative else 0)
    if branch.mean:
        f = f - outside.sum(-1, keepdim=True).clamp(min=1).to(q.dtype).log()
    products = branch.q.unsqueeze(3) * features.unsqueeze(2)  # [B, H, T, S, F]
    if branch.log_decay is not None:
        decay = branch.log_decay
        decay = decay[None, :, None].expand(B, -1, length) if decay.dim() == 1 else decay
        decay = decay.unsqueeze(-1) if decay.dim() == 3 else decay
        total = decay.cumsum(2).repeat_interleave(H // HKV, 1)
        # a key leaves the window at the token that is `window` real tokens after it
        is_exit = (rank[:, None, :] == rank[:, :, None] + window) & padding[:, None, :]
        exit_token = is_exit.int().argmax(2)[:, None, :, None].expand(B, H, length, total.shape[3])
        decay_since_exit = total.unsqueeze(3) - total.gather(2, exit_token).unsqueeze(2)
        products = products * decay_since_exit.clamp(max=0).exp()
    weights = weights + f.exp() * products.sum(-1) * outside
    out = weights @ v / weights.sum(-1, keepdim=True)
    return out.masked_fill(~padding[:, None, :, None], 0)


def tokens(x, part):
    """Return some tokens of the result of :func:`make`."""
    q, k, v, branch, padding = x
    decay = branch.log_decay
    if decay is not None and decay.dim() > 1:
        decay = decay[:, :, part]
    branch = branch._replace(q=branch.q[:, :, part], k=branch.k[:, :, part], log_decay=decay)
    padding = None if padding is None else padding[:, part]
    return q[:, :, part], k[:, :, part], v[:, :, part], branch, padding


def run(x, window, causal=True, segment_ids=None, **options):
    q, k, v, branch, padding = x
    mask = AttentionMask(causal=causal, padding=padding, segment_ids=segment_ids)
    return hybrid_attention(q, k, v, branch, window=window, scale=SCALE, mask=mask, **options)


def assert_close(ours, exact):
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["reference", "torch", "cpp"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("decay", DECAYS, ids=str)
@pytest.mark.parametrize("window", [1, 4, 16])
def test_causal_equals_formula(window, decay, padded, impl):
    for length in (5, 17, 70 if decay is None else 20):
        for options in ({}, {"mean": True}, {"relative": False}):
            x = make(length, decay, padded, **options)
            assert_close(run(x, window, impl=impl).out, dense(*x[:4], window, padding=x[4]))


@pytest.mark.parametrize("num_sinks", [0, 2])
@pytest.mark.parametrize("impl", ["reference", "torch", "cpp"])
@pytest.mark.parametrize("decay", DECAYS[1:])
def test_padding_decays_nothing(decay, impl, num_sinks):
    """In one call and in steps, whatever the decays and features at padding are."""
    length, window = 20, 4
    x = make(length, decay)
    padding = make(length, padded=True)[4]
    real = padding[:, None, :]
    masked = x[3].log_decay
    if decay == "head":
        masked = masked[None, :, None].expand(B, HKV, length)
    masked = masked * real.view(B, 1, length, *[1] * (masked.dim() - 3))
    branch = x[3]._replace(k=x[3].k * real[..., None], log_decay=masked)
    exact = dense(*x[:3], branch, window, padding=padding, num_sinks=num_sinks)
    options = {"impl": impl, "num_sinks": num_sinks, "return_state": True}
    whole = run((*x[:4], padding), window, **options)
    assert_close(whole.out, exact)
    state, outs = None, []
    for start, stop in pairwise([0, 9, *range(12, length + 1)]):
        part = run(tokens((*x[:4], padding), slice(start, stop)), window, state=state, **options)
        outs.append(part.out)
        state = part.state
    assert_close(torch.cat(outs, 2), exact)
    assert_close(state[3:5], whole.state[3:5])


@pytest.mark.parametrize("shape", [(1,), (20, 1), (H, 1, 1), (H, 20, 1), (1, H, 20, 1)], ids=str)
def test_a_log_weight_is_broadcast(shape):
    *x, padding = make(20, padded=True)
    weight = torch.randn(shape, dtype=torch.float64)
    outs = [
        run((*x[:3], x[3]._replace(log_weight=each), padding), 4).out
        for each in (weight, weight.expand(B, H, 20, 1))
    ]
    assert_close(*outs)


@pytest.mark.parametrize("impl", ["reference", "torch", "cpp", "compiled"])
@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_sinks_are_in_the_window_of_every_query(decay, impl, monkeypatch):
    """In one call, and in parts that end before, among and after the sink tokens."""
    if impl == "compiled":
        monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    options = {"impl": "torch" if impl == "compiled" else impl, "num_sinks": 3}
    for window, length, padded, kind in (
        (4, 20, True, {"mean": True}),
        (1, 17, False, {"relative": False}),
        (16, 18, True, {"relative": False}),
        (4, 2, False, {"mean": True}),
    ):
        x = make(length, decay, padded, **kind)
        exact = dense(*x[:4], window, padding=x[4], num_sinks=3)
        assert_close(run(x, window, **options).out, exact)
        for cuts in ((0, 1, 2, 3, length), (0, 2, length), (0, 5, 6, 11, length)):
            state, outs = None, []
            for start, stop in pairwise(sorted({min(cut, length) for cut in cuts})):
                piece = tokens(x, slice(start, stop))
                output = run(piece, window, state=state, return_state=True, **options)
                state = output.state
                outs.append(output.out)
            assert_close(torch.cat(outs, 2), exact)


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


@pytest.mark.parametrize("impl", ["torch", "cpp", "compiled"])
def test_gradients_with_sinks(impl, monkeypatch):
    if impl == "compiled":
        monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    q, k, v, branch, _ = make(9, relative=False)
    leaves = [x[:1].detach().requires_grad_() for x in (q, k, v, branch.q, branch.k)]

    def call(q, k, v, far_q, far_k):
        changed = branch._replace(q=far_q, k=far_k)
        name = "torch" if impl == "compiled" else impl
        return hybrid_attention(q, k, v, changed, window=3, scale=SCALE, impl=name, num_sinks=2).out

    assert gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("impl", ["reference", "torch", "cpp"])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("window", [1, 4, 16])
def test_bidirectional_equals_formula(window, padded, impl):
    for length in (5, 17, 70):
        for options in ({}, {"mean": True}, {"relative": False}):
            x = make(length, None, padded, **options)
            exact = dense(*x[:4], window, causal=False, padding=x[4])
            assert_close(run(x, window, causal=False, impl=impl).out, exact)


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_parts_with_a_state_equal_one_pass(decay, padded):
    length, window = 20, 4
    x = make(length, decay, padded, mean=decay is None)
    exact = dense(*x[:4], window, padding=x[4])
    for cuts in ((0, 1, 2, 20), (0, 3, 20), (0, 11, 12, 13, 20), (0, 19, 20)):
        state, outs = None, []
        for start, stop in pairwise(cuts):
            piece = run(tokens(x, slice(start, stop)), window, state=state, return_state=True)
            state = piece.state
            outs.append(piece.out)
        assert_close(torch.cat(outs, 2), exact)


@pytest.mark.parametrize("impl", ["reference", "torch", "cpp"])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_equal_separate_ones(causal, impl):
    ids = torch.tensor([[0] * 9 + [3] * 2 + [4] * 11, [1] * 3 + [2] * 19])
    x = make(22, "token" if causal else None, padded=True, mean=True)
    options = {"causal": causal, "impl": impl, "return_state": causal}
    packed = run(x, 4, segment_ids=ids, **options)
    for row, starts in enumerate([(0, 9, 11, 22), (0, 3, 22)]):
        for start, stop in pairwise(starts):
            separate = run(tokens(x, slice(start, stop)), 4, **options)
            assert_close(packed.out[row, :, start:stop], separate.out[row])
        if causal:
            for ours, exact in zip(packed.state[3:], separate.state[3:], strict=True):
                assert_close(ours[row], exact[row])
            later = make(3, "token", mean=True)
            one, other = (run(later, 4, state=given.state).out for given in (packed, separate))
            assert_close(one[row], other[row])


def test_the_size_of_the_state_does_not_depend_on_the_length():
    sizes = {
        tuple(field.shape for field in run(make(n), 4, return_state=True).state)
        for n in (1, 3, 4, 9, 40)
    }
    assert len(sizes) == 1


@pytest.mark.parametrize("relative", [True, False])
def test_a_branch_of_weight_zero_gives_window_attention(relative):
    x = make(12, relative=relative)
    x = (*x[:3], x[3]._replace(log_weight=torch.tensor(-1e4)), None)
    window = torch.ones(12, 12, dtype=torch.bool).tril().triu(-3)
    exact = softmax_attention(*x[:3], scale=SCALE, mask=window).out
    assert_close(run(x, 4).out, exact)


@pytest.mark.parametrize("compiled", [False, True], ids=["blockwise", "band"])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients(causal, relative, compiled, monkeypatch):
    """Without ``relative``, gradients also flow through the window's log-sum-exp."""
    if compiled:
        monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    q, k, v, branch, _ = make(9, "token" if causal else None, relative=relative)
    decay = branch.log_decay
    leaves = [q, k, v, branch.q, branch.k, branch.log_weight, *([] if decay is None else [decay])]
    leaves = [x[:1] if x.shape[0] == B else x for x in leaves]
    leaves = [x.detach().requires_grad_() for x in leaves]

    def call(q, k, v, far_q, far_k, weight, decay=None):
        branch = LinearBranch(far_q, far_k, weight, decay, relative, mean=decay is None)
        mask = AttentionMask(causal=causal)
        return hybrid_attention(q, k, v, branch, window=3, scale=SCALE, mask=mask).out

    assert gradcheck(call, leaves, fast_mode=True)


def test_band_equals_blockwise(monkeypatch):
    x = make(150, padded=True, relative=False)
    blockwise = run(x, 20).out
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    assert_close(run(x, 20).out, blockwise)


def test_large_scores_stay_finite():
    for relative in (True, False):
        q, k, v, branch, _ = make(30, relative=relative, dtype=torch.float32)
        branch = branch._replace(log_weight=torch.full((1, H, 1, 1), 60.0 if relative else 200.0))
        out = hybrid_attention(100 * q, 100 * k, v, branch, window=4, scale=1.0).out
        assert out.isfinite().all()
        assert out.abs().max() <= v.abs().max() * 1.0001


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_errors_are_at_most_twice_those_of_the_reference(dtype):
    x = make(100, dtype=torch.float64)
    low = [*(t.to(dtype) for t in x[:3]), x[3]._replace(q=x[3].q.float(), k=x[3].k.float()), None]
    low[3] = low[3]._replace(log_weight=low[3].log_weight.float())
    exact = run(
        [*(t.double() for t in low[:3]), LinearBranch(*(t.double() for t in low[3][:3])), None], 8
    )
    plain, ours = run(low, 8, impl="reference"), run(low, 8)
    budget = 2 * (plain.out - exact.out).abs().max() + 2 * torch.finfo(dtype).eps
    assert (ours.out - exact.out).abs().max() <= budget


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_the_output_names_its_implementation(impl):
    for causal in (True, False):
        choice = run(make(12), 4, causal=causal, impl=impl).impl
        assert choice.impl == impl or (impl == "auto" and choice.impl in ("cpp", "torch"))
        assert choice.reason.startswith("softmax window + linear form; ")


def test_an_unknown_implementation_is_refused_with_all_names():
    with pytest.raises(
        UnsupportedError, match=r"no impl 'xformers'.* auto, triton, cpp, torch, reference"
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
def test_step_equals_formula(window, decay):
    prompt = 7
    for options in ({}, {"mean": True}, {"relative": False}):
        x = make(24, decay, **options)
        out, impls = decode(x, prompt, window)
        assert impls == {"cpp"}
        assert_close(out, dense(*x[:4], window)[:, :, prompt:])


def test_step_of_wider_heads_and_strided_tokens():
    x = make(9, "channel")
    q, k, v, branch, _ = (torch.cat([y] * 8, -1) if torch.is_tensor(y) else y for y in x)
    q, k, v = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (q, k, v))
    x = (q, k, v, branch, None)
    out, impls = decode(x, 3, 4)
    assert impls == {"cpp"}
    assert_close(out, dense(q, k, v, branch, 4)[:, :, 3:])


def test_step_with_bfloat16_keys():
    q, k, v, branch, _ = make(20, "token", mean=True, dtype=torch.float32)
    q, k, v = (y.bfloat16() for y in (q, k, v))
    exact = dense(*(y.double() for y in (q, k, v)), _double(branch), 4)[:, :, 6:]
    ours, impls = decode((q, k, v, branch, None), 6, 4)
    plain, others = decode((q, k, v, branch, None), 6, 4, impl="torch")
    assert (impls, others) == ({"cpp"}, {"torch"})
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()


def _double(branch):
    return branch._replace(
        **{name: getattr(branch, name).double() for name in ("q", "k", "log_weight", "log_decay")}
    )


def test_steps_that_cpp_does_not_support_run_in_torch():
    x = make(6)
    state = run(tokens(x, slice(5)), 4, return_state=True).state
    new = tokens(x, slice(5, 6))
    expected = dense(*x[:4], 4)[:, :, 5:]
    with_grad = (new[0].clone().requires_grad_(), *new[1:])
    padding = torch.tensor([[True], [False]])
    for given in (with_grad, (*new[:4], padding)):
        step = run(given, 4, state=state)
        assert step.impl.impl == "torch"
        assert_close(step.out[:1], expected[:1])
    assert run((*new[:4], torch.ones(B, 1, dtype=torch.bool)), 4, state=state).impl.impl == "cpp"


@pytest.mark.parametrize("impl", ["torch", "cpp"])
@pytest.mark.parametrize("num_sinks", [0, 2])
def test_a_step_overwrites_the_state_only_without_gradients(num_sinks, impl):
    x = make(9, "channel", mean=True)
    options = {"num_sinks": num_sinks, "return_state": True}
    state = run(tokens(x, slice(3)), 4, **options).state
    options |= {"reuse_state": True, "impl": impl}
    exact = dense(*x[:4], 4, num_sinks=num_sinks)
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


def test_a_step_in_place_keeps_the_state_of_rows_with_padding():
    x = make(8, "token", mean=True)
    padding = torch.ones(B, 8, dtype=torch.bool)
    padding[0, 5], padding[1, 6] = False, False
    decay = x[3].log_decay * padding[:, None]
    x = (*x[:3], x[3]._replace(k=x[3].k * padding[:, None, :, None], log_decay=decay), padding)
    options = {"num_sinks": 1, "return_state": True}
    state = run(tokens(x, slice(3)), 4, **options).state
    outs = []
    for t in range(3, 8):
        new = [y.clone() for y in tokens(x, slice(t, t + 1))[:3]]
        for y in new:
            y[~padding[:, t]] = torch.nan
        with torch.no_grad():
            step = run(
                (*new, *tokens(x, slice(t, t + 1))[3:]), 4, state=state, reuse_state=True, **options
            )
        outs.append(step.out)
    assert_close(torch.cat(outs, 2), dense(*x[:4], 4, padding=padding, num_sinks=1)[:, :, 3:])
