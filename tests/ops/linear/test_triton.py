"""The Triton kernels of linear attention against the reference in float64.

They run on a GPU if there is one, else interpreted on the CPU.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import LinearState
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import FIXED, MapWeights
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.triton import run as triton_impl
from attnzoo.ops.linear.triton.configs import CONFIGS
from attnzoo.ops.linear.triton.custom_op import (
    linear_triton,
    linear_triton_backward,
)
from attnzoo.ops.linear.triton.decay import MAX_EXPONENT
from attnzoo.ops.linear.triton.launch import LinearOptions
from attnzoo.ops.linear.triton.step import linear_triton_step, linear_triton_step_
from tests.helpers import check_operator, nan_padded
from tests.kernel_device import float32_slack, kernel_device, nan_in_uninitialized_memory

B, HKV = 1, 1
DEVICE = kernel_device()
NAMES = ("q", "k", "v", "log_decay", "kv", "z")


def set_chunk(tokens):
    """Set the chunks of the interpreter; on a GPU, the autotuner chooses."""
    if DEVICE.type == "cpu":
        CONFIGS[0].kwargs["C"] = tokens


@pytest.fixture(autouse=True)
def _nan_in_uninitialized_memory():
    set_chunk(16)
    with nan_in_uninitialized_memory():
        yield


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """Options of a call; short chunks in the interpreter, so that short inputs have several."""

    decay: str = "none"
    normalize: bool = True
    groups: int = 1
    length: int = 37
    d: int = 12
    e: int = 20
    lengths: tuple[int, ...] = ()  # of sequences in one row, after up to two tokens of none each
    is_dense: bool = False  # whether there are no such tokens
    has_state: bool = True
    return_state: bool = True
    feature_map: str = "elu+1"
    dtype: torch.dtype = torch.float32
    value_mean: float = 0.0
    gate_scale: float = 1.0
    strong_gates: tuple[tuple[int, int], ...] = ()  # ranges of tokens with very strong gates
    chunk_size: int = 16


MIXED = (5, 0, 1, 33, 16, 49)  # up to one chunk, and several of them


def sequences_of(case):
    """Return the sequences of a case, and the number of tokens of the row; None for full rows."""
    if not case.lengths:
        return None, case.length
    starts, end = [], 0
    for i, length in enumerate(case.lengths):
        starts.append(end + (0 if case.is_dense else i % 3))
        end = starts[-1] + length
    tables = (torch.tensor(x, device=DEVICE) for x in (starts, case.lengths))
    return Sequences(*tables, max(case.lengths)), end + (0 if case.is_dense else 4)


def outside(sequences, tokens):
    """Return which tokens are in no sequence, ``[N]``."""
    if sequences is None:
        return torch.zeros(tokens, dtype=torch.bool, device=DEVICE)
    return sequences.index(tokens) == sequences.count


def make(case):
    """Return the six tensors of a call, with NaN outside of its sequences, and these."""
    sequences, t = sequences_of(case)
    b, d, e = B, case.d, case.e
    q = torch.randn(b, HKV * case.groups, t, d)
    k, v = torch.randn(b, HKV, t, d), torch.randn(b, HKV, t, e) + case.value_mean
    shape = {"head": (HKV,), "token": (b, HKV, t), "channel": (b, HKV, t, d)}.get(case.decay)
    log_decay = None if shape is None else -case.gate_scale * torch.rand(shape)
    for first, last in case.strong_gates:
        strong_log_decay = -40 * torch.rand((*shape[:2], last - first, *shape[3:])) - 20
        strong_log_decay[:, :, ::2] = -torch.inf
        log_decay[:, :, first:last] = strong_log_decay
    tensors = [x.to(case.dtype) for x in (q, k, v)] + [log_decay]
    for x in tensors:
        if x is not None and x.dim() > 1:
            x[:, :, outside(sequences, t).cpu()] = torch.nan
    count = b if sequences is None else sequences.count
    state = [torch.randn(count, HKV, d, e), torch.rand(count, HKV, d)]
    tensors += state if case.has_state else [None, None]
    return [x if x is None else nan_padded(x.to(DEVICE)) for x in tensors], sequences


def reference(case, tensors, sequences):
    """Compute a call with ``impl="reference"``, each sequence alone."""
    if sequences is not None:
        return _each_alone(case, tensors, sequences)
    q, k, v, log_decay, *state = tensors
    out, last, *_ = linear_attention(
        q,
        k,
        v,
        log_decay=log_decay,
        normalize=case.normalize,
        scale=0.7,
        impl="reference",
        chunk_size=max(case.length, *case.lengths, 1),
        state=LinearState(*state) if case.has_state else None,
        return_state=True,
        feature_map=case.feature_map,
        feature_scale=0.25,
    )
    return (out, *last) if case.return_state else (out,)


def _each_alone(case, tensors, sequences):
    *rows, kv, z = tensors
    outs, states = [], []
    for i, (first, length) in enumerate(
        zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True)
    ):
        own = [x if x is None or x.dim() == 1 else x[:, :, first : first + length] for x in rows]
        state = [x if x is None else x[i : i + 1] for x in (kv, z)]
        out, *last = reference(replace(case, return_state=True), [*own, *state], None)
        before = first - sum(x.shape[2] for x in outs)
        outs += [out.new_zeros(*out.shape[:2], before, out.shape[3]), out]
        states.append(last)
    missing = rows[0].shape[2] - sum(x.shape[2] for x in outs)
    outs.append(outs[-1].new_zeros(*outs[-1].shape[:2], missing, case.e))
    out = torch.cat(outs, 2)
    return (out, *map(torch.cat, zip(*states, strict=True))) if case.return_state else (out,)


def run_kernels(case, tensors, sequences):
    """Compute a call with the kernels."""
    table = (None, None) if sequences is None else (sequences.starts, sequences.lengths)
    options = (case.feature_map, 0.5, 0.7, case.normalize, 1e-6)
    set_chunk(case.chunk_size)
    found = linear_triton(*tensors, *table, *options, case.return_state)
    return found if case.return_state else found[:1]


def results(case, compute, dtype=None):
    """Return results and gradients by name, for a fixed random sum of the results."""
    torch.manual_seed(1)
    tensors, sequences = make(case)
    tokens, count = tensors[0].shape[2], B if sequences is None else sequences.count
    weights = [torch.randn(B, HKV * case.groups, tokens, case.e)]
    weights += [torch.randn(count, HKV, case.d, case.e), torch.randn(count, HKV, case.d)]
    weights = [x.to(DEVICE) for x in weights]
    if case.value_mean:  # gradients of the state would dominate those that nearly cancel
        weights[1:] = [x * 0 for x in weights[1:]]
    weights[0] = weights[0].to(case.dtype)
    weights[0][:, :, outside(sequences, tokens)] = torch.nan
    leaves = [x if x is None else x.to(dtype or x.dtype).requires_grad_() for x in tensors]
    computed = compute(case, leaves, sequences)
    named = {name: x for name, x in zip(NAMES, leaves, strict=True) if x is not None}
    weights = [w.to(x.dtype) for x, w in zip(computed, weights, strict=False)]
    grads = torch.autograd.grad(computed, list(named.values()), weights)
    values = dict(zip(("out", "state.kv", "state.z"), computed, strict=False))
    return values | dict(zip(named, grads, strict=True))


def errors(case):
    """Return the relative error of each result and gradient, those of float32 over their slack."""
    actual, expected = run_twice(case), results(case, reference, torch.float64)
    slack = float32_slack() if case.dtype == torch.float32 else 1.0
    return {name: relative_error(x, expected[name], 1e-12) / slack for name, x in actual.items()}


def relative_error(x, expected, smallest):
    """Return the norm of the error over that of the expected tensor."""
    return ((x.double() - expected).norm() / (expected.norm() + smallest)).item()


def run_twice(case, compute=run_kernels):
    """Return the kernels' results by name; on a GPU, two runs must agree bit for bit."""
    first = results(case, compute)
    if DEVICE.type == "cuda":  # the interpreter has no order of threads
        for name, x in results(case, compute).items():
            assert torch.equal(first[name], x), f"{name} differs between two equal calls"
    return first


CASES = (
    KernelCase(normalize=False),
    KernelCase(),
    KernelCase(has_state=False, return_state=False),
    KernelCase(decay="head", groups=3, lengths=MIXED),
    KernelCase(decay="token", normalize=False),
    KernelCase(decay="token", groups=2, lengths=MIXED),
    KernelCase(decay="token", lengths=MIXED, has_state=False),
    KernelCase(decay="token", lengths=(12, 25), return_state=False),
    KernelCase(decay="channel", normalize=False, groups=2, lengths=MIXED),
    KernelCase(decay="channel", lengths=(12, 7, 18), is_dense=True),
    KernelCase(decay="channel", lengths=(20, 0, 34), has_state=False, return_state=False),
    KernelCase(lengths=MIXED, groups=2, normalize=False),
    KernelCase(lengths=(20, 17, *[0] * 35), is_dense=True, has_state=False, return_state=False),
    KernelCase(lengths=(0, 0)),
    KernelCase(lengths=(1, 64, 2, 65), is_dense=True, feature_map="exp"),
    KernelCase(feature_map="relu", decay="token"),
    KernelCase(feature_map="exp", decay="channel", groups=2),
    KernelCase(feature_map="exp", normalize=False),
    KernelCase(feature_map="identity", normalize=False, decay="head"),
    *(KernelCase(feature_map=name, normalize=name != "identity", length=17) for name in FIXED),
    KernelCase(d=60, e=100, length=17, decay="token"),
    KernelCase(d=100, e=60, length=17, decay="channel"),
    KernelCase(d=16, e=256, length=17),
    KernelCase(d=256, e=16, length=17, decay="token"),
    *(KernelCase(length=length, decay="token") for length in (1, 16, 17)),
    *(
        KernelCase(
            decay=decay,
            lengths=(50, 26, 74),
            d=16,
            e=32,
            chunk_size=chunk_size,
            gate_scale=0.3,
        )
        for decay, chunk_size in (("none", 64), ("token", 64), ("channel", 32), ("channel", 64))
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_match_reference_in_float64(case):
    budget = {"q": 2e-5, "log_decay": 2e-5}  # sums of terms that cancel
    for name, error in errors(case).items():
        assert error < budget.get(name, 2e-6), f"{name}: {error:.1e}"


LONG = {"length": 2048, "d": 32, "e": 32, "chunk_size": 64}


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
@pytest.mark.parametrize(
    "sizes",
    [{"length": 96, "d": 16, "e": 16}, pytest.param(LONG, marks=pytest.mark.exhaustive)],
    ids=["short", "long"],
)
def test_bfloat16_gradients_are_accurate_if_values_have_a_mean(decay, sizes):
    # Rounding the state would give errors of tens of percent in dq
    case = KernelCase(decay=decay, value_mean=1.0, dtype=torch.bfloat16, gate_scale=0.1, **sizes)
    found = errors(case)
    for name in ("out", "q", "k", "v", "log_decay"):
        assert found.get(name, 0) < 5e-3, f"{name}: {found[name]:.1e}"


def test_float32_features_of_bfloat16_values_are_rounded():
    v = torch.randn(1, 1, 40, 16, device=DEVICE, dtype=torch.bfloat16)
    features = [torch.rand(1, 1, 40, 32, device=DEVICE, requires_grad=True) for _ in range(2)]
    found = []
    for q, k in (features, [x.bfloat16() for x in features]):
        out = linear_attention(q, k, v, normalize=True, impl="triton").out
        found.append([out, *torch.autograd.grad(out.float().square().sum(), features)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][1].dtype == torch.float32


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_float16_stays_finite(decay):
    case = KernelCase(decay=decay, value_mean=100.0, dtype=torch.float16, length=48)
    for name, error in errors(case).items():
        assert error < 2e-3, f"{name}: {error:.1e}"  # NaN fails, too


@pytest.mark.parametrize(
    ("decay", "gate"), [("head", -30.0), ("token", -float("inf")), ("channel", -float("inf"))]
)
def test_strong_gates_neither_overflow_nor_cancel(decay, gate):
    # With decay 0 at every token, the normalised output has no gradients
    case = KernelCase(decay=decay, normalize=decay != "head", length=21)

    def with_strong_gates(case, tensors, sequences):
        log_decay = tensors[3]
        is_strong = torch.arange(log_decay.numel(), device=DEVICE).view(log_decay.shape) % 5 == 0
        tensors = [*tensors[:3], torch.where(is_strong, gate, log_decay), *tensors[4:]]
        return (reference if log_decay.dtype == torch.float64 else run_kernels)(
            case, tensors, sequences
        )

    actual = run_twice(case, with_strong_gates)
    expected = results(case, with_strong_gates, torch.float64)
    for name, x in actual.items():
        error = relative_error(x, expected[name], 1e-6)
        assert error < 1e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    "strong_gates",
    [
        pytest.param(((0, 1),), marks=pytest.mark.exhaustive),
        ((31, 32), (33, 34)),  # the last of a chunk, and the second of the next
        pytest.param(((32, 33), (79, 80)), marks=pytest.mark.exhaustive),
        ((64, 66), (90, 95)),  # the first of a chunk
        pytest.param(((40, 62),), marks=pytest.mark.exhaustive),
        ((10, 11), (12, 13), (14, 15), (95, 96)),
    ],
    ids=str,
)
@pytest.mark.parametrize("decay", ["token", "channel"])
@pytest.mark.parametrize("normalize", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_chunks_with_strong_gates_are_processed_in_windows(decay, strong_gates, normalize):
    case = KernelCase(
        decay=decay, strong_gates=strong_gates, normalize=normalize, length=96,
        chunk_size=32, gate_scale=0.2, groups=1 + normalize, is_dense=True,
        lengths=(32, 17, 47) if normalize else (),
    )  # fmt: skip
    actual, expected = run_twice(case), results(case, reference, torch.float64)
    for name, x in actual.items():
        error = relative_error(x, expected[name], 1e-6) / float32_slack()
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_chunks_after_strong_gates_are_not_processed_in_windows(decay):
    # Twelve chunks, more than a run of chunks
    case = KernelCase(decay=decay, strong_gates=((40, 42), (150, 151)), length=185, gate_scale=0.2)
    for name, error in errors(case).items():
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_decays_near_the_limit_of_factored_chunks(decay):
    # In chunks of 32, decays of some channels are slightly below and above the limit
    case = KernelCase(decay=decay, length=96, chunk_size=32, gate_scale=3.7)
    for name, error in errors(case).items():
        assert error < 1e-5 or name == "log_decay", f"{name}: {error:.1e}"


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_decay_gradients_near_the_limit_of_factored_chunks(decay):
    """They are sums over later tokens of q dq - k dk, which cancel.

    Each term has the error of a weight, whose exponent of up to 80 is rounded.
    """
    case = KernelCase(decay=decay, length=96, chunk_size=32, gate_scale=3.7)
    case = replace(case, feature_map="identity", normalize=False)
    actual, exact = run_twice(case), results(case, reference, torch.float64)
    torch.manual_seed(1)  # as in results
    (q, k, *_), _ = make(case)
    terms = ((q * exact["q"]).abs() + (k * exact["k"]).abs()).sum(2)  # [B, H, D]
    error = (actual["log_decay"] - exact["log_decay"]).abs().amax(2)
    of_weights = MAX_EXPONENT.value * math.log(2) * torch.finfo(torch.float32).eps / 2
    budget = 2 * of_weights * (terms if decay == "channel" else terms.sum(2))
    assert (error <= budget).all(), (error / budget).max()


def test_other_sequences_do_not_change_the_results_of_one():
    case = KernelCase(decay="token", lengths=MIXED)
    (*rows, kv, z), sequences = make(case)
    found = run_kernels(case, (*rows, kv, z), sequences)
    for i in range(sequences.count):
        own = slice(sequences.starts[i], sequences.ends[i])
        if case.lengths[i]:
            alone = [x[:, :, own] for x in rows]
            expected = run_kernels(case, [*alone, kv[i : i + 1], z[i : i + 1]], None)
            ours = (found[0][:, :, own], *(x[i : i + 1] for x in found[1:]))
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
        else:
            assert torch.equal(found[1][i], kv[i])
            assert torch.equal(found[2][i], z[i])


def test_later_tokens_do_not_change_earlier_ones():
    case = KernelCase(decay="channel", length=40)
    tensors, sequences = make(case)
    changed = [x if x is None else x.clone() for x in tensors]
    for x in changed[:3]:
        x[:, :, 23:] *= 6
    first, second = (run_kernels(case, x, sequences)[0][:, :, :23] for x in (tensors, changed))
    assert torch.equal(first, second)


def test_results_do_not_depend_on_strides():
    case = KernelCase(decay="token", groups=2, lengths=(20, 34))
    tensors, sequences = make(case)
    restrided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:4]]
    first, second = (
        run_kernels(case, tensors, sequences),
        run_kernels(case, [*restrided, *tensors[4:]], sequences),
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("normalize", [False, True])
def test_step_matches_reference(decay, normalize):
    feature_map = "exp" if normalize else "elu+1"
    case = KernelCase(decay=decay, normalize=normalize, groups=3, length=1, d=20, e=36)
    case = replace(case, feature_map=feature_map)
    tensors, _ = make(case)
    options = (feature_map, 0.5, 0.7, normalize, 1e-6)
    actual = linear_triton_step(*tensors, None, *options)
    doubles = [x if x is None else x.double() for x in tensors]
    for name, a, b in zip(("out", "kv", "z"), actual, reference(case, doubles, None), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, msg=name)


SLOTS = (4, -1, 0, 2, -1)  # of a pool of 6 states


def make_steps(decay):
    """Return one token of five sequences, NaN for those without a slot, and a pool of states."""
    # Several tiles of a head, all of which read z
    rows, slots = 5, torch.tensor(SLOTS, device=DEVICE)
    shapes = [(rows, 2, 1, 128), (rows, 1, 1, 128), (rows, 1, 1, 70)]
    tensors = [torch.randn(shape, device=DEVICE) for shape in shapes]
    shape = {"token": (rows, 1, 1), "channel": (rows, 1, 1, 128)}.get(decay)
    tensors.append(None if shape is None else -torch.rand(shape, device=DEVICE))
    for x in tensors:
        if x is not None:
            x[slots < 0] = torch.nan
    pool = torch.randn(6, 1, 128, 70, device=DEVICE), torch.rand(6, 1, 128, device=DEVICE)
    return tensors, slots, LinearState(*pool)


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
@pytest.mark.parametrize("in_place", [False, True])
def test_step_of_slots_equals_the_step_of_their_states(decay, in_place):
    (q, k, v, log_decay), slots, pool = make_steps(decay)
    options = {"normalize": True, "impl": "triton", "return_state": True}
    real = slots >= 0
    rows = [x if x is None else x[real] for x in (q, k, v, log_decay)]
    states = LinearState(*(x[slots[real]] for x in pool))
    own = linear_attention(*rows[:3], log_decay=rows[3], state=states, **options)
    expected = LinearState(*(x.clone() for x in pool))
    for x, y in zip(expected, own.state, strict=True):
        x[slots[real]] = y
    before = LinearState(*(x.clone() for x in pool))
    with torch.no_grad():
        found = linear_attention(
            q, k, v, log_decay=log_decay, state=pool, slots=slots, reuse_state=in_place, **options
        )
    assert torch.equal(found.out[real], own.out)
    assert torch.equal(found.out[~real], torch.zeros_like(found.out[~real]))
    assert all(map(torch.equal, found.state, expected))
    assert all(map(torch.equal, pool, expected if in_place else before))
    assert (found.state.kv is pool.kv) == in_place


def test_gradients_of_a_step_of_slots():
    (q, k, v, log_decay), slots, pool = make_steps("channel")
    found = []
    for impl, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.to(dtype) for x in (q, k, v, log_decay, *pool)]
        real = (slots >= 0).view(-1, 1, 1, 1)
        leaves[:4] = [torch.where(real, x, 1) if impl == "torch" else x for x in leaves[:4]]
        leaves = [x.requires_grad_() for x in leaves]
        out, last, *_ = linear_attention(
            *leaves[:3], log_decay=leaves[3], state=LinearState(*leaves[4:]), slots=slots,
            normalize=True, feature_map="elu+1", impl=impl, return_state=True,
        )  # fmt: skip
        total = out.sin().sum() + last.kv.sin().sum() + last.k.sin().sum()
        grads = torch.autograd.grad(total, leaves)
        found.append([x if x.shape[0] == 6 else x[slots >= 0] for x in (out, *grads)])
    for ours, exact in zip(*found, strict=True):
        assert relative_error(ours, exact, 1e-12) < 1e-5 * float32_slack()


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_step_in_place_equals_the_step_with_a_new_state(decay):
    # Several tiles of a head, all of which read z
    case = KernelCase(decay=decay, groups=2, length=1, d=128, e=70)
    (*rows, kv, z), _ = make(case)
    options = {"normalize": True, "impl": "triton", "return_state": True}
    call = partial(linear_attention, *rows[:3], log_decay=rows[3], **options)
    expected = call(state=LinearState(kv.clone(), z.clone()))
    with torch.no_grad():
        found = call(state=LinearState(kv, z), reuse_state=True)
    assert found.state.kv is kv
    assert found.state.k is z
    assert torch.equal(found.out, expected.out)
    assert torch.equal(kv, expected.state.kv)
    assert torch.equal(z, expected.state.k)


def test_prefill_then_decode_matches_one_pass():
    case = KernelCase(decay="channel", length=21)
    (q, k, v, log_decay, kv, z), _ = make(case)
    options = {"normalize": True, "impl": "triton", "feature_map": "elu+1", "return_state": True}
    full = linear_attention(q, k, v, log_decay=log_decay, state=LinearState(kv, z), **options)
    state, outs = LinearState(kv, z), []
    for part in (slice(0, 17), slice(17, 18), slice(18, 19), slice(19, 21)):
        inputs = [x[:, :, part] for x in (q, k, v, log_decay)]
        out, state, *_ = linear_attention(*inputs[:3], log_decay=inputs[3], state=state, **options)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), full.out)
    torch.testing.assert_close(state, full.state)


@pytest.mark.parametrize("has_state", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_operators_pass_opcheck(has_state):
    case = KernelCase(decay="token", lengths=(7, 0, 11), is_dense=True, has_state=has_state)
    tensors, sequences = make(case)
    tensors = [x if x is None else x.requires_grad_() for x in tensors]
    table = sequences.starts, sequences.lengths
    arguments = (*table, "elu+1", 0.5, 0.7, True, 1e-6, has_state)
    check_operator(linear_triton, (*tensors, *arguments), trace=True)
    tensors = [x if x is None else x.detach() for x in tensors]
    with torch.no_grad():
        out, *last = linear_triton(*tensors, *arguments)
        gradients = torch.randn_like(out), *last, *last
        given = (*gradients, *tensors, *arguments, True)
        check_operator(linear_triton_backward, given, trace=False)


@pytest.mark.parametrize("slots", [None, SLOTS])
def test_operators_of_a_step_pass_opcheck(slots):
    rows, found, pool = make_steps("token")
    if slots is None:
        found, pool = None, LinearState(*(x[:5].clone() for x in pool))
        rows = [x.nan_to_num() for x in rows]
    arguments = (*rows, *pool, found, "elu+1", 0.5, 0.7, True, 1e-6)
    with torch.no_grad():
        check_operator(linear_triton_step, arguments, trace=slots is not None)
        check_operator(linear_triton_step_, arguments, trace=slots is not None)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"causal": False}, "causal"),
        ({"chunk_size": 32}, "the kernels choose it"),
        ({"scale": 0.0}, "other than 0"),
    ],
)
def test_unsupported_options_raise(changes, match):
    tensors, _ = make(KernelCase())
    with pytest.raises(UnsupportedError, match=match):
        linear_attention(*tensors[:3], impl="triton", **changes)


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((1, 1, 8, 300), torch.float32, "at most 256"),
        ((1, 1, 8, 8), torch.float64, "float64"),
        ((1, 1, 8, 7), torch.bfloat16, "even"),
    ],
)
def test_unsupported_inputs_raise(shape, dtype, match):
    x = torch.randn(shape).to(DEVICE, dtype)
    with pytest.raises(UnsupportedError, match=match):
        linear_attention(x, x, x, impl="triton")


@pytest.fixture
def _no_interpreter(monkeypatch):
    monkeypatch.setattr("attnzoo.runtime.triton_interpreter.interpreted", lambda: False)
    triton_impl._DEVICE_REASONS.clear()
    yield
    triton_impl._DEVICE_REASONS.clear()


@pytest.mark.usefixtures("_no_interpreter")
def test_without_gpu_and_interpreter_triton_raises_and_auto_selects_another_impl():
    x = torch.randn(1, 1, 8, 8)
    with pytest.raises(UnsupportedError, match=r"on cpu .*TRITON_INTERPRET=1"):
        linear_attention(x, x, x, impl="triton")
    assert linear_attention(x, x, x).impl.impl in ("cpp", "torch")
    torch.testing.assert_close(
        linear_attention(x, x, x).out, linear_attention(x, x, x, impl="reference").out
    )


def test_a_row_without_sequences_gives_zeros():
    (q, k, v, *_), _ = make(KernelCase(length=70))
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    out, kv, z = linear_triton(q, k, v, None, None, None, none, none, *LinearOptions())
    assert torch.equal(out, torch.zeros_like(out))
    assert (len(kv), len(z)) == (0, 0)


def test_nan_between_sequences_has_no_effect_on_a_learned_map():
    (q, k, v, *_), sequences = make(KernelCase(lengths=MIXED))
    matrix = torch.randn(1, 12, 12, device=DEVICE)
    found = []
    for fill in (torch.nan, 1.0):
        leaves = [x.nan_to_num(fill).requires_grad_() for x in (q, k, v, matrix)]
        out = linear_attention(
            *leaves[:3], sequences=sequences, feature_map="hedgehog", impl="triton",
            map_weights=MapWeights(leaves[3], leaves[3]), normalize=True,
        ).out  # fmt: skip
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    assert all(map(torch.equal, *found))
    assert found[0][0].isfinite().all()


@pytest.mark.parametrize("is_row", [False, True])
def test_compiles_to_one_graph(is_row):
    (q, k, v, *_), sequences = make(KernelCase(lengths=(9, 0, 12), is_dense=True))

    def attend(q, k, v, starts, lengths):
        table = Sequences(starts, lengths, 12) if is_row else None
        return linear_attention(
            q, k, v, sequences=table, normalize=True, feature_map="elu+1", impl="triton"
        ).out

    found = []
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        leaves = [x[:, :, :21].clone().requires_grad_() for x in (q, k, v)]
        out = call(*leaves, sequences.starts, sequences.lengths)
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    assert all(map(torch.equal, *found))
