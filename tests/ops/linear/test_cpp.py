"""Linear attention in C++ against the dense form in float64."""

from itertools import product

import pytest
import torch
from torch.testing import assert_close

from attnzoo.contract.config import Geometry
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import LinearState
from attnzoo.errors import UnsupportedError
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.cpu.linear import LINEAR, linear_cpp, linear_cpp_backward, weighted_sums
from attnzoo.registry import build_backend
from attnzoo.runtime import cpp
from tests.helpers import check_operator, nan_surrounded

REASON = cpp.unavailable_reason(LINEAR)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

DENSE = {"impl": "reference", "chunk_size": 10**4}  # all keys in one chunk


# First tokens and ends of sequences; (75, ...) has several spans if there are enough tokens
PARTS = ((0, 1), (1, 2), (2, 2), (2, 15), (17, 20), (20, 32), (32, 33), (33, 69), (69, 74))
PARTS += ((75, 10**6), (10**6, 10**6))


def make_sequences(tokens, parts=PARTS):
    """Return sequences with gaps of tokens of none, of which the last token is one."""
    starts, ends = torch.tensor(parts).clamp(max=tokens - 1).unbind(1)
    return Sequences(starts.contiguous(), ends - starts, int((ends - starts).max()))


def fill_gaps(sequences, *tensors):
    """Set tokens of none, ``[1, H, N, ...]``, to NaN."""
    for x in tensors:
        outside = sequences.index(x.shape[2]) == sequences.count
        x.detach()[:, :, outside] = torch.nan


def run_alone(q, k, v, *, sequences, state=None, log_decay=None, **options):
    """Run the reference on each sequence; return the output, and the sums of all states."""
    pieces, states, before = [], [], 0
    options |= DENSE | {"return_state": True}

    def zeros(tokens):
        return v.new_zeros(1, q.shape[1], tokens, v.shape[3])

    for i, (start, length) in enumerate(
        zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True)
    ):
        at = slice(start, start + length)
        own = None if state is None else LinearState(*(x[i : i + 1] for x in state))
        decay = log_decay if log_decay is None or log_decay.dim() == 1 else log_decay[:, :, at]
        x = (y[:, :, at] for y in (q, k, v))
        found = linear_attention(*x, state=own, log_decay=decay, **options)
        pieces += [zeros(start - before), found.out]
        states.append(found.state)
        before = start + length
    out = torch.cat([*pieces, zeros(q.shape[2] - before)], 2)
    return out, *(torch.cat(x) for x in zip(*states, strict=True))


def make(batch, heads, key_heads, tokens, size, value_size, dtype=torch.float64, states=None):
    q, k = (
        nan_surrounded(torch.rand(batch, n, tokens, size, dtype=dtype)) for n in (heads, key_heads)
    )
    v = nan_surrounded(torch.rand(batch, key_heads, tokens, value_size, dtype=dtype) - 0.3)
    count = batch if states is None else states.count
    kv = torch.rand(count, key_heads, size, value_size, dtype=dtype)
    return q, k, v, LinearState(kv, torch.rand(count, key_heads, size, dtype=dtype))


SHAPES = [  # batch, heads, key heads, tokens, D, E: chunks are of 32, vectors of 4 to 16 numbers
    (2, 4, 2, 100, 16, 32),
    (1, 14, 2, 70, 20, 65),
    (1, 6, 1, 33, 64, 64),
    (1, 1, 1, 32, 48, 80),
    (3, 2, 2, 7, 32, 16),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_dense_form(shape, normalize, decay, packed):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)  # three threads divide the six heads of one key head
    try:
        sequences = make_sequences(shape[3]) if packed else None
        q, k, v, state = make(*((1, *shape[1:]) if packed else shape), states=sequences)
        options = {"normalize": normalize, "scale": 0.7, "eps": 0.1, "return_state": True}
        if decay != "none":
            gate = (
                nan_surrounded(-torch.rand(k.shape, dtype=torch.float64))
                if decay == "channel"
                else -torch.rand(k.shape[:3]).double()
            )
            options["log_decay"] = gate[0, :, 0] if decay == "head" else gate
        if packed:
            decays = (options["log_decay"],) if decay in ("token", "channel") else ()
            fill_gaps(sequences, q, k, v, *decays)
            options["sequences"] = sequences
        for before in (state, None):
            found = linear_attention(q, k, v, state=before, impl="cpp", **options)
            if packed:
                out, *last = run_alone(q, k, v, state=before, **options)
            else:
                out, last, *_ = linear_attention(q, k, v, state=before, **options | DENSE)
            assert_close(found.out, out, atol=1e-12, rtol=1e-12)
            assert_close(tuple(found.state), tuple(last), atol=1e-11, rtol=1e-12)
            alone = linear_attention(
                q, k, v, state=before, impl="cpp", **options | {"return_state": False}
            )
            assert torch.equal(alone.out, found.out)
    finally:
        torch.set_num_threads(num_threads)


def test_heads_of_the_output_are_merged_without_a_copy():
    q, k, v, _ = make(2, 4, 2, 20, 16, 32)
    assert linear_attention(q, k, v, impl="cpp").out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("normalize", [True, False])
def test_rounding_errors_are_at_most_twice_those_of_torch(normalize):
    x = make(1, 4, 2, 3000, 64, 64)[:3]
    exact = linear_attention(*x, normalize=normalize).out
    narrow = [t.float() for t in x]
    plain, ours = (
        linear_attention(*narrow, normalize=normalize, impl=impl).out for impl in ("torch", "cpp")
    )
    budget = (
        2 * (plain - exact).abs().max() + 2 * torch.finfo(torch.float32).eps * exact.abs().max()
    )
    assert (ours - exact).abs().max() <= budget


def make_call(shape, decay, packed, dtype=torch.float64, **options):
    """Return a function that computes all results of a call, and its inputs."""
    sequences = make_sequences(shape[3]) if packed else None
    shape = (1, *shape[1:]) if packed else shape
    batch, _, key_heads, tokens, size, _ = shape
    q, k, v, state = make(*shape, dtype=dtype, states=sequences)
    gate = {
        "none": None,
        "head": -torch.rand(key_heads, dtype=dtype),
        "token": -torch.rand(batch, tokens, key_heads, dtype=dtype).transpose(1, 2),
        "channel": nan_surrounded(-torch.rand(batch, key_heads, tokens, size, dtype=dtype)),
    }[decay]
    if packed:
        fill_gaps(sequences, q, k, v, *((gate,) if decay in ("token", "channel") else ()))
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *state, gate) if x is not None]

    def run(q, k, v, kv, z, gate=None, **more):
        state = LinearState(kv, z)
        given = {"state": state, "log_decay": gate, "return_state": True, "eps": 0.1, "scale": 0.7}
        given |= {"sequences": sequences} | options | more
        if packed and given.get("impl") == "reference":
            return run_alone(q, k, v, **given)
        output = linear_attention(q, k, v, **given)
        return output.out, *output.state

    return run, leaves


def make_gradients(results, packed):
    """Return random gradients of results; those of outputs of no sequence are NaN."""
    d_results = [torch.randn_like(x) for x in results]
    if packed:
        fill_gaps(make_sequences(results[0].shape[2]), d_results[0])
    return d_results


@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_do_not_depend_on_frozen_inputs(normalize, decay):
    """The kernel skips gradients that no input needs; the others are bitwise equal."""
    run, leaves = make_call((1, 4, 2, 600, 8, 5), decay, True, normalize=normalize)
    d_results = make_gradients(run(*leaves, impl="cpp"), True)
    num_threads = torch.get_num_threads()

    def gradients(needed):
        given = [x.detach().requires_grad_(n) for x, n in zip(leaves, needed, strict=True)]
        torch.autograd.backward(run(*given, impl="cpp"), d_results)
        return [x.grad for x in given]

    of_all_inputs = gradients([True] * len(leaves))
    try:
        for n, (q, k, v, state, gate) in enumerate(product([False, True], repeat=5)):
            torch.set_num_threads(1 + 2 * (n % 2))
            needed = (q, k, v, state, state, gate)[: len(leaves)]
            if not any(needed):
                continue
            for found, expected, need in zip(gradients(needed), of_all_inputs, needed, strict=True):
                assert torch.equal(found, expected) if need else found is None
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "shape", [(2, 4, 2, 33, 16, 32), (1, 6, 2, 70, 20, 65), (1, 2, 1, 580, 5, 3)], ids=str
)
def test_gradients_equal_those_of_the_dense_form(shape, normalize, decay, packed):
    run, leaves = make_call(shape, decay, packed, normalize=normalize)
    results = run(*leaves, **DENSE)
    d_results = make_gradients(results, packed)
    exact = torch.autograd.grad(results, leaves, d_results)
    found = torch.autograd.grad(run(*leaves, impl="cpp"), leaves, d_results)
    assert_close(found, exact, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", [(1, 6, 2, 70, 20, 65), (1, 2, 1, 2100, 37, 20)], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(shape, normalize, decay):
    """Threads divide the query heads of 70 tokens, or the five spans of 2100 tokens.

    The states before the spans are computed in panels of at most 16 of the 37 channels.
    """
    run, leaves = make_call(shape, decay, True, normalize=normalize)
    d_results, found, num_threads = None, [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results = run(*leaves, impl="cpp")
            d_results = d_results or make_gradients(results, True)
            found.append((*results, *torch.autograd.grad(results, leaves, d_results)))
    finally:
        torch.set_num_threads(num_threads)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_sequences_do_not_depend_on_others_in_the_row(decay):
    """Results equal those of each sequence as a call of its own, if another has NaN."""
    run, leaves = make_call((1, 4, 2, 700, 20, 24), decay, True, torch.float32, normalize=True)
    for x in (leaves[1], *leaves[5:]):  # a key and its decay
        x.detach()[:, :, 34] = torch.nan
    results = run(*leaves, impl="cpp")
    d_results = make_gradients(results, True)
    grads = torch.autograd.grad(results, leaves, d_results)
    sequences = make_sequences(700)
    table = zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True)
    for i, (start, length) in enumerate(table):
        at = slice(start, start + length)

        def own(xs, i=i, at=at):
            states = [1, 2] if len(xs) == 3 else [3, 4]
            return [x[i : i + 1] if j in states else x[:, :, at] for j, x in enumerate(xs)]

        q, k, v, kv, z, *gate = mine = [x.detach().requires_grad_() for x in own(leaves)]
        options = {"log_decay": gate[0] if gate else None, "eps": 0.1, "scale": 0.7}
        options |= {"normalize": True, "return_state": True, "impl": "cpp"}
        options |= {"sequences": Sequences(torch.zeros(1).long(), torch.tensor([length]), length)}
        output = linear_attention(q, k, v, state=LinearState(kv, z), **options)
        found = output.out, *output.state
        assert_close(found, tuple(own(results)), rtol=0, atol=0, equal_nan=True)
        d_found = torch.autograd.grad(found, mine, own(d_results))
        assert_close(d_found, tuple(own(grads)), rtol=0, atol=0, equal_nan=True)
        assert results[0][:, :, at].isfinite().all() or start == 33


@pytest.mark.parametrize("threads", [1, 3])
def test_most_sequences_may_be_empty(threads):
    """As in compiled graphs, where there are as many as tokens."""
    q, k, v, _ = make(1, 4, 2, 600, 16, 16)
    sequences, leaves = make_sequences(600), [x.requires_grad_() for x in (q, k, v)]
    more = torch.zeros(600 - sequences.count, dtype=torch.int64)
    starts = torch.cat([sequences.starts, more + 600])
    bound = Sequences(starts, torch.cat([sequences.lengths, more]), 600, rows=1)
    num_threads, found = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        for x in (sequences, bound):
            out = linear_attention(q, k, v, sequences=x, normalize=True, impl="cpp").out
            found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    finally:
        torch.set_num_threads(num_threads)
    assert all(map(torch.equal, *found))


def test_no_sequences_and_empty_ones():
    q, k, v, _ = make(1, 4, 2, 10, 16, 16)
    none = torch.zeros(0, dtype=torch.int64)
    for count in (0, 3):
        sequences = Sequences(none.new_zeros(count), none.new_zeros(count), 0)
        state = make(1, 4, 2, 10, 16, 16, states=sequences)[3]
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *state)]
        found = linear_attention(
            *leaves[:3],
            sequences=sequences,
            state=LinearState(*leaves[3:]),
            return_state=True,
            impl="cpp",
        )
        assert not found.out.any()
        assert_close(tuple(found.state), tuple(state), rtol=0, atol=0)
        results = (found.out, *found.state)
        grads = torch.autograd.grad(results, leaves, list(map(torch.ones_like, results)))
        assert not any(x.any() for x in grads[:3])
        assert all((x == 1).all() for x in grads[3:])


@pytest.mark.parametrize("with_state", [False, True])
def test_weighted_sums_of_sequences(with_state):
    """Totals are the outputs of values of 1; both are 0 for tokens of no sequence."""
    leaves = make_call((1, 4, 2, 600, 16, 20), "token", True)[1]
    sequences, (q, k, v, kv, z, gate) = make_sequences(600), leaves
    options = {"sequences": sequences, "return_state": with_state, "chunk_size": None}
    state = LinearState(kv, z) if with_state else None
    sums, totals, last = weighted_sums(q, k, v, log_decay=gate, state=state, **options)
    ones = torch.cat([v, torch.ones_like(v[..., :1])], 3)
    if with_state:
        state = LinearState(torch.cat([kv, z.unsqueeze(3)], 3), z)
    exact, *exact_last = run_alone(q, k, ones, sequences=sequences, state=state, log_decay=gate)
    assert_close(sums, exact[..., :-1], atol=1e-11, rtol=1e-11)
    assert_close(totals, exact[..., -1], atol=1e-11, rtol=1e-11)
    assert (last is not None) == with_state
    results, right = [sums, totals], [exact[..., :-1], exact[..., -1]]
    if with_state:
        assert_close(last.kv, exact_last[0][..., :-1], atol=1e-11, rtol=1e-11)
        results, right = [*results, last.k], [*right, exact_last[1]]
    given = leaves if with_state else [q, k, v, gate]
    d_results = [torch.randn_like(x) for x in results]
    grads = (torch.autograd.grad(x, given, d_results) for x in (results, right))
    assert_close(*grads, atol=1e-10, rtol=1e-10)


def test_gradients_of_one_result_for_some_inputs():
    run, leaves = make_call((1, 4, 2, 40, 16, 16), "token", False)
    for result in range(3):
        for given in ([0], [1, 2], [5], [3, 4]):
            chosen = [leaves[i] for i in given]
            ours, exact = (
                torch.autograd.grad(
                    run(*leaves, impl=impl)[result],
                    chosen,
                    torch.ones(()).double().expand_as(run(*leaves)[result]),
                    allow_unused=True,
                    materialize_grads=True,
                )
                for impl in ("cpp", "reference")
            )
            assert_close(ours, exact, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_16_bit_results_equal_those_in_float32_rounded_once(decay, dtype):
    """The kernel reads 16-bit inputs exactly, and rounds only its results."""
    run, leaves = make_call((1, 4, 2, 50, 20, 24), decay, True, torch.float32, chunk_size=8)
    leaves = [
        x.detach().to(dtype if x.dim() == 4 and i < 3 else x.dtype).requires_grad_()
        for i, x in enumerate(leaves)
    ]
    wide = [x.detach().float().requires_grad_() for x in leaves]
    results = run(*wide, impl="cpp")
    d_results = make_gradients(results, True)
    d_results[0] = d_results[0].to(dtype)
    exact = torch.autograd.grad(results, wide, [x.float() for x in d_results])
    ours = run(*leaves, impl="cpp")
    found = (*ours, *torch.autograd.grad(ours, leaves, d_results))
    for a, b in zip(found, (*results, *exact), strict=True):
        assert torch.equal(a, b.to(a.dtype))
    assert found[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_all_16_bit_values_are_read_and_written_exactly(dtype):
    """A token that sees only itself returns its value times the product of query and key."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    v = bits.view(torch.float16 if dtype == torch.float64 else dtype).to(dtype).view(1, 1, -1, 32)
    if dtype == torch.bfloat16:  # the kernel treats subnormal float32 numbers as 0
        v = v.masked_fill(v.abs().float() < torch.finfo(torch.float32).tiny, 0)
    q, starts = torch.ones(1, 1, v.shape[2], 16), torch.arange(v.shape[2])
    sequences = Sequences(starts, torch.ones_like(starts), 1)
    for scale in (1.0, 1 / 3):
        out = linear_attention(q / 16, q, v, sequences=sequences, scale=scale, impl="cpp").out
        wide = v.float() if dtype != torch.float64 else v
        expected = (wide * torch.tensor(scale, dtype=wide.dtype)).to(dtype)
        assert out.dtype == dtype
        tiny = torch.finfo(torch.float32).tiny if dtype == torch.bfloat16 else 0
        assert_close(
            out, expected, equal_nan=True, rtol=0 if dtype != torch.float64 else 1e-15, atol=tiny
        )


def test_later_tokens_do_not_change_earlier_outputs():
    q, k, v, _ = make(1, 2, 1, 90, 16, 16, torch.float32)
    out = linear_attention(q, k, v, normalize=True, impl="cpp").out
    for cut in (1, 31, 32, 50):
        later = [torch.cat([x[:, :, :cut], 3 * x[:, :, cut:] + 1], 2) for x in (q, k, v)]
        found = linear_attention(*later, normalize=True, impl="cpp").out
        assert torch.equal(found[:, :, :cut], out[:, :, :cut])
        assert not torch.equal(found[:, :, cut:], out[:, :, cut:])


def test_empty_and_single_token_calls():
    q, k, v, state = make(2, 4, 2, 5, 16, 16)
    options = {"state": state, "return_state": True, "normalize": True, "impl": "cpp"}
    none = linear_attention(*(x[:, :, :0] for x in (q, k, v)), **options)
    assert none.out.shape == (2, 4, 0, 16)
    assert_close(tuple(none.state), tuple(state))
    whole, outs = linear_attention(q, k, v, **options), []
    for t in range(5):
        now = linear_attention(*(x[:, :, t : t + 1] for x in (q, k, v)), **options)
        options["state"] = now.state
        outs.append(now.out)
    assert_close(torch.cat(outs, 2), whole.out)
    assert_close(tuple(now.state), tuple(whole.state))


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_graph_break(packed):
    torch._dynamo.reset()
    x = [t.clone().requires_grad_() for t in make(1, 2, 1, 40, 16, 16)[:3]]
    sequences = make_sequences(40) if packed else None
    run = torch.compile(linear_attention, backend="aot_eager", fullgraph=True)
    for impl in ("auto", "cpp"):
        options = {"normalize": True, "impl": impl, "sequences": sequences}
        expected, found = linear_attention(*x, **options).out, run(*x, **options).out
        assert_close(found, expected)
        assert_close(*(torch.autograd.grad(out.sum(), x) for out in (found, expected)))
    torch._dynamo.reset()


@pytest.mark.parametrize("packed", [False, True])
def test_operators_pass_opcheck(packed):
    sequences = make_sequences(40) if packed else None
    table = (None, None) if sequences is None else (sequences.starts, sequences.lengths)
    q, k, v, state = make(1, 2, 1, 40, 16, 32, torch.float32, states=sequences)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *state)]
    options, maps = (40, 0.5, True, 1e-6, 64, "identity", 1.0), (None,) * 4
    for keep in (False, True):  # if False, there is no backward pass
        given = leaves if keep else [x.detach() for x in leaves]
        for normalize in (True, False):  # if False, totals are returned
            for before in (given[3:], (None, None)):
                more = (*options[:2], normalize, *options[3:], not normalize, keep, keep)
                args = (*given[:3], None, *before, *maps, *table, *more)
                trace = keep and normalize and before[0] is not None
                check_operator(linear_cpp, args, trace=trace)
    args = (*leaves[:3], None, *leaves[3:], *maps, *table, *options)
    out, *_, inverse, kept = (x.detach() for x in linear_cpp(*args, False, True, True))
    assert inverse.shape == (1, 2, 40)
    assert kept.shape == (1, 1, 0, 16 * 33)  # of spans after the first
    given = [x.detach() for x in leaves]
    gate = -torch.rand(1, 1, 40)
    d_out, d_totals = torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40)
    inputs = (*given[:3], gate, *given[3:], *maps, *table, *options, False, True, True)
    args = (d_out, None, None, d_totals, None, kept, out, inverse, *inputs)
    for needed in (range(6), [3], [1, 5], []):
        wanted = [i in needed for i in range(12)]
        check_operator(linear_cpp_backward, (*args, wanted), trace=False)
        found = linear_cpp_backward(*args, wanted)
        assert [x.numel() > 0 for x in found] == wanted


def test_the_option_impl_of_a_backend_selects_cpp():
    """A spec accepts ``cpp``, because ``describe`` reports it."""
    geometry = Geometry(num_heads=4, num_key_heads=2, head_dim=8)
    x = [torch.rand(1, n, 20, 8) for n in (4, 2, 2)]
    for options in ({}, {"feature_map": "hedgehog", "window": 5}):
        outs = []
        for impl in ("auto", "cpp"):
            backend = build_backend("linear", {**options, "impl": impl}, geometry)
            outs.append(backend(*x).out)
            assert backend.ran.impl == "cpp"
        assert torch.equal(*outs)
        backend = build_backend("linear", {**options, "impl": "cpp", "chunk_size": 64}, geometry)
        with pytest.raises(UnsupportedError, match="chunk_size is 64"):
            backend(*x)


def test_auto_selects_cpp_for_supported_calls():
    x = make(1, 2, 1, 40, 16, 16, torch.float32)[:3]

    def choice(**options):
        return linear_attention(*x, **options).impl

    assert choice() == ("cpp", "chunk form; compiled for this CPU")
    assert choice(chunk_size=32).impl == "cpp"
    assert choice(chunk_size=33) == (
        "torch",
        "chunk form; runs on every device; cpp cannot: chunk_size is 33 (at most 32)",
    )
    assert choice(causal=False).impl == "torch"
    found = linear_attention(*x, normalize=True)
    assert torch.equal(found.out, linear_attention(*x, normalize=True, impl="cpp").out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": False}, "attention is bidirectional"),
        ({"chunk_size": 64}, "chunk_size is 64"),
        ({"causal": False, "chunk_size": 64}, "attention is bidirectional.*chunk_size"),
        ({"device": "meta"}, "the tensors are on meta"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_unsupported_calls_raise_with_all_reasons(changes, message):
    device = changes.pop("device", "cpu")
    x = [torch.rand(1, 1, 6, 16, device=device) for _ in range(3)]
    with pytest.raises(UnsupportedError, match=f"impl='cpp' cannot run this call.*{message}"):
        linear_attention(*x, **changes, impl="cpp")


def test_nan_log_decays_give_nan_outputs():
    """The exp of the kernel adds to exponent bits, which must not turn NaN into a number."""
    q, k, v, _ = make(1, 1, 1, 4, 16, 16, dtype=torch.float32)
    for bits in (0x7FC00000, 0x7FC00001, 0x7FC001FF, 0x7F800080, -0x3FFE00):
        log = torch.full((1, 1, 4), bits, dtype=torch.int32).view(torch.float32)
        assert log.isnan().all()
        out = linear_attention(q, k, v, log_decay=log, impl="cpp", chunk_size=4).out
        assert out.isnan().all(), hex(bits)
