"""The delta rule in C++ against the recurrence in float64."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo.contract.states import DeltaState
from attnzoo.errors import UnsupportedError
from attnzoo.ops.delta.api import delta_attention
from attnzoo.ops.delta.cpu.delta import DELTA, SPAN, delta_cpp, delta_cpp_backward
from attnzoo.runtime import cpp
from tests.helpers import check_operator, nan_surrounded
from tests.ops.delta.ragged import each_alone, make_sequences, nan_outside, row_length

REASON = cpp.unavailable_reason(DELTA)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
DECAYS = ("none", "head", "token", "channel")


def make(shape, decay="none", dtype=torch.float64, strength=1.0):
    """Return q, k of norm 1, v, beta in (0, 2), a log decay, and the kv of a state."""
    batch, heads, key_heads, tokens, size, value_size = shape
    q, k = (
        nan_surrounded(torch.randn(batch, n, tokens, size, dtype=dtype)) for n in (heads, key_heads)
    )
    k /= k.norm(dim=-1, keepdim=True)
    v = nan_surrounded(torch.randn(batch, key_heads, tokens, value_size, dtype=dtype))
    beta = 2 * torch.rand(batch, tokens, key_heads, dtype=dtype).transpose(1, 2)
    gate = nan_surrounded(-strength * torch.randn(k.shape, dtype=dtype).abs())
    log_decay = {"none": None, "head": gate[0, :, :1, 0].sum(1), "token": gate[..., 0]}
    kv = torch.randn(batch, key_heads, size, value_size, dtype=dtype)
    return q, k, v, beta, log_decay.get(decay, gate), kv


def run(q, k, v, beta, log_decay, kv, **options):
    """Return the output and the state."""
    options = {"impl": "cpp", "scale": 0.7, "return_state": True} | options
    state = None if kv is None else DeltaState(kv)
    out, state, *_ = delta_attention(q, k, v, beta, log_decay=log_decay, state=state, **options)
    return out, *state


def gradients(inputs, d_results, **options):
    """Return the results, and the gradients of all inputs."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    results = run(*leaves, **options)
    given = [x for x in leaves if x is not None]
    d_results = [d.to(x.dtype) for d, x in zip(d_results, results, strict=True)]
    return results, torch.autograd.grad(results, given, d_results)


SHAPES = [  # batch, heads, key heads, tokens, D, E: chunks are of 16, spans of 128, panels of 128
    (2, 4, 2, 33, 16, 32),
    (1, 6, 2, 70, 20, 65),
    (1, 1, 1, 145, 33, 144),
    (1, 2, 1, 17, 48, 80),
    (3, 2, 2, 1, 32, 16),
]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_recurrence(shape, decay):
    inputs = make(shape, decay)
    d_results = [torch.randn_like(x) for x in run(*inputs)]
    exact = gradients(inputs, d_results, impl="reference")
    ours = gradients(inputs, d_results)
    assert_close(ours[0], exact[0], atol=1e-11, rtol=1e-11)
    assert_close(ours[1], exact[1], atol=1e-10, rtol=1e-10)


LENGTHS = [0, 1, 16, 17, 0, 2, 128, 129, 0, 0, 260, 5]  # around chunks and spans


@pytest.mark.parametrize(  # 144: panels of two widths
    ("decay", "sizes"),
    [("none", (16, 144)), ("head", (20, 40)), ("token", (20, 40)), ("channel", (16, 144))],
    ids=str,
)
def test_sequences_equal_each_alone(sizes, decay):
    """The oracle is the recurrence in float64. The kernel has equal bits for each alone."""
    sequences = make_sequences(LENGTHS)
    *inputs, _ = make((1, 2, 1, row_length(sequences), *sizes), decay)
    inputs = [nan_outside(x, sequences) for x in inputs]
    states = torch.randn(len(LENGTHS), 1, *sizes, dtype=torch.float64)
    for kv in (states, None) if decay == "token" else (states,):
        leaves = [None if x is None else x.detach().requires_grad_() for x in (*inputs, kv)]
        given, results = [x for x in leaves if x is not None], []
        for impl in ("cpp", "reference"):
            results.append(
                each_alone(
                    lambda *x, impl=impl: run(*x, impl=impl), leaves[:5], leaves[5], sequences
                )
            )
        results.append(run(*leaves, sequences=sequences))
        alone, exact, ours = results
        assert_close(ours, exact, atol=1e-10, rtol=1e-10)
        assert all(map(torch.equal, ours, alone))
        d_results = [torch.randn_like(x) for x in ours]
        grads = [torch.autograd.grad(found, given, d_results) for found in (ours, exact)]
        assert_close(*grads, atol=1e-9, rtol=1e-9)


def test_a_nan_stays_in_its_sequence():
    """Short sequences share buffers."""
    sequences = make_sequences([20, 3, 17, 5])
    *inputs, _ = make((1, 2, 1, row_length(sequences), 16, 16), "token", torch.float32)
    inputs[2][:, :, : int(sequences.ends[0])] = torch.nan
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, kv = run(*leaves, None, sequences=sequences)
    rest = int(sequences.starts[1])
    grads = torch.autograd.grad(out[:, :, rest:].sum() + kv[1:].sum(), leaves)
    assert out[:, :, rest:].isfinite().all()
    assert kv[1:].isfinite().all()
    assert all(x[:, :, rest:].isfinite().all() for x in grads)


def test_the_state_is_returned_only_on_request():
    inputs = make((2, 2, 1, 150, 16, 16), "token")
    exact = gradients(inputs, [torch.ones(2, 2, 150, 16), torch.zeros(2, 1, 16, 16)])[1]
    leaves = [x.detach().requires_grad_() for x in inputs]
    found = delta_attention(
        *leaves[:4], log_decay=leaves[4], state=DeltaState(leaves[5]), impl="cpp", scale=0.7
    )
    assert found.state is None
    ours = torch.autograd.grad(found.out.sum(), leaves)
    assert all(map(torch.equal, ours, exact))


@pytest.mark.parametrize("chunk_size", [1, 3, 16])
def test_any_chunk_size(chunk_size):
    inputs = make((1, 2, 1, 35, 16, 16), "channel")
    ours = run(*inputs, chunk_size=chunk_size)
    assert_close(ours, run(*inputs, impl="reference"), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_rounding_errors_are_at_most_twice_those_of_the_recurrence(decay, dtype):
    narrow = [None if x is None else x.to(dtype) for x in make((1, 2, 1, 60, 32, 32), decay)]
    narrow[5] = narrow[5].float()
    wide = [None if x is None else x.double() for x in narrow]
    d_results = [torch.randn_like(x) for x in run(*narrow)]
    exact, plain, ours = (
        gradients(x, d_results, impl=impl)
        for x, impl in ((wide, "reference"), (narrow, "reference"), (narrow, "cpp"))
    )
    for e, p, o in zip(*((*x[0], *x[1]) for x in (exact, plain, ours)), strict=True):
        assert o.dtype == p.dtype
        budget = 2 * (p.double() - e).abs().max() + 4 * torch.finfo(dtype).eps * e.abs().max()
        assert (o.double() - e).abs().max() <= budget


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
@pytest.mark.parametrize("gates", [(30.0,), (1e4,), (torch.inf,), (0, 1e-3, 3, 500, torch.inf)])
def test_strong_gates_neither_overflow_nor_cancel(gates, decay):
    inputs = list(make((1, 2, 2, 40, 16, 16), decay))
    gate = -torch.tensor(gates, dtype=torch.float64)
    inputs[4] = gate[torch.randint(len(gates), inputs[4].shape)]
    narrow = [x.float() for x in inputs]
    d_results = [torch.randn_like(x) for x in run(*inputs)]
    wide = [x.double() for x in narrow]
    exact = gradients(wide, d_results, impl="reference")
    for x, tolerance in ((wide, 1e-10), (narrow, 2e-5)):
        ours = gradients(x, d_results)
        for a, b in zip((*ours[0], *ours[1]), (*exact[0], *exact[1]), strict=True):
            assert (a.double() - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_bfloat16_gradients_are_accurate_if_values_have_a_mean(decay):
    shape = (1, 2, 1, 1024, 16, 16)
    inputs = list(make(shape, decay, torch.float32, strength=1e-2))
    inputs[2] = inputs[2] + 1
    narrow = [None if x is None else x.bfloat16() for x in inputs[:5]]
    wide = [None if x is None else x.double() for x in narrow]
    d_results = [torch.randn(1, 2, 1024, 16), torch.zeros(1, 1, 16, 16)]
    exact = gradients([*wide, inputs[5].double()], d_results)[1]
    ours = gradients([*narrow, inputs[5]], d_results)[1]
    for a, b in zip(ours, exact, strict=True):
        assert (a.double() - b).norm() <= 5e-3 * b.norm()


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_later_tokens_do_not_change_earlier_outputs(decay):
    q, k, v, beta, log_decay, kv = make((1, 2, 1, 150, 16, 32), decay, torch.float32)
    log_decay = None if decay == "none" else log_decay
    out = run(q, k, v, beta, log_decay, kv)[0]
    for cut in (1, 15, 16, 17, 128, 140):
        later = [x.clone() for x in (q, k, v, beta)]
        for x in later:
            x[:, :, cut:] *= -0.5
        gate = None if log_decay is None else log_decay.clone()
        if gate is not None:
            gate[:, :, cut:] *= 2
        found = run(*later, gate, kv)[0]
        assert torch.equal(found[:, :, :cut], out[:, :, :cut])
        assert not torch.equal(found[:, :, cut:], out[:, :, cut:])


@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("value_size", [40, 64, 256])  # in panels of 32, 64 or 128 columns
@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_results_do_not_depend_on_the_number_of_threads(decay, value_size, heads):
    inputs = make((1, 2 * heads, heads, 150, 16, value_size), decay, torch.float32)
    d_results = [torch.randn_like(x) for x in run(*inputs)]
    num_threads, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 16):
            torch.set_num_threads(threads)
            results, grads = gradients(inputs, d_results)
            found.append((*results, *grads, *run(*inputs)))
    finally:
        torch.set_num_threads(num_threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_decoding_equals_one_pass():
    inputs = make((2, 4, 2, 20, 16, 24), "channel")
    one_pass = run(*inputs)
    kv, outs = inputs[5], []
    for t in range(20):
        out, kv = run(*(x[:, :, t : t + 1] for x in inputs[:5]), kv)
        outs.append(out)
    assert_close((torch.cat(outs, 2), kv), one_pass)
    none = run(*(x[:, :, :0] for x in inputs[:5]), kv)
    assert none[0].shape == (2, 4, 0, 24)
    assert torch.equal(none[1], kv)


def test_results_do_not_depend_on_strides():
    inputs = list(make((2, 3, 3, 30, 16, 16), "token"))
    inputs[0] = inputs[0][:, :1].expand(2, 3, 30, 16)
    inputs[1] = inputs[1][:1].expand(2, 3, 30, 16)
    inputs[3] = inputs[3][:, :, :1].expand(2, 3, 30)
    inputs[2] = inputs[2].transpose(2, 3).contiguous().transpose(2, 3)
    assert_close(run(*inputs), run(*(x.contiguous() for x in inputs)))


def test_operators_pass_opcheck():
    tokens = 140
    q, k, v, beta, log_decay, kv = make((1, 2, 1, tokens, 16, 16), "channel")
    inputs = [x.requires_grad_() for x in (q, k, v, beta, log_decay, kv)]
    for keep in (False, True):  # if False, there is no backward pass
        given = inputs if keep else [x.detach() for x in inputs]
        check_operator(delta_cpp, (*given, None, None, 0, 0.7, 16, True, keep), trace=keep)
    bounds = torch.tensor([0, 5]), torch.tensor([5, tokens - 5])
    given = (*inputs[:5], None, *bounds, tokens, 0.7, 16, False, True)
    check_operator(delta_cpp, given, trace=True)
    kept = delta_cpp(*inputs, None, None, 0, 0.7, 16, True, True)[2].detach()
    assert kept.shape == (1, (tokens - 1) // SPAN, 1, 16, 16)
    given = [x.detach() for x in inputs]
    d_out = torch.randn(1, 2, tokens, 16).double()
    arguments = (d_out, None, None, kept, *given, None, None, 0, 0.7, 16, False, True)
    for needed in ([True] * 6, [True, False] * 3, [False] * 6):
        wanted = [*needed, False, False]
        check_operator(delta_cpp_backward, (*arguments, wanted), trace=False)
        found = delta_cpp_backward(*arguments, wanted)
        assert [x.numel() > 0 for x in found] == wanted


def test_auto_selects_cpp_for_supported_calls():
    q, k, v, beta, _, _ = make((1, 2, 1, 20, 16, 16))
    assert delta_attention(q, k, v, beta).impl.impl == "cpp"
    choice = delta_attention(q, k, v, beta, chunk_size=32).impl
    assert choice.impl == "torch"
    assert "chunk_size is 32 (at most 16)" in choice.reason


def test_unsupported_calls_are_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match="chunk_size is 32"):
        run(*make((1, 2, 1, 20, 16, 16)), chunk_size=32)


def test_compiles_without_a_graph_break():
    inputs = make((1, 2, 1, 40, 16, 16), "token", torch.float32)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_close(compiled(*inputs), run(*inputs))
