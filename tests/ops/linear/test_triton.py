"""The Triton kernels of linear attention against the reference in float64.

They run on a GPU if there is one, else interpreted on the CPU.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import LinearState
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import FIXED
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.triton import launch
from attnzoo.ops.linear.triton import run as triton_impl
from attnzoo.ops.linear.triton.custom_op import linear_triton, linear_triton_backward
from attnzoo.ops.linear.triton.decay import MAX_EXPONENT
from attnzoo.ops.linear.triton.step import linear_triton_step, linear_triton_step_
from tests.helpers import nan_padded
from tests.kernel_device import float32_slack, kernel_device, nan_in_uninitialized_memory

B, HKV = 1, 1
DEVICE = kernel_device()
NAMES = ("q", "k", "v", "log_decay", "kv", "z")


@pytest.fixture(autouse=True)
def _nan_in_uninitialized_memory():
    with nan_in_uninitialized_memory():
        yield


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """Options of a call; splits of 32 tokens in chunks of 16, so that short inputs have several."""

    decay: str = "none"
    normalize: bool = True
    groups: int = 1
    length: int = 37
    d: int = 12
    e: int = 20
    packed: bool = False
    padded: bool = False
    feature_map: str = "elu+1"
    dtype: torch.dtype = torch.float32
    value_mean: float = 0.0
    gate_scale: float = 1.0
    strong_gates: tuple[tuple[int, int], ...] = ()  # ranges of tokens with very strong gates
    split_size: int = 32
    chunk_size: int = 16


def make(case):
    """Return the six tensors of a call, its segment ids and its padding mask."""
    b, t, d, e = B, case.length, case.d, case.e
    q = torch.randn(b, HKV * case.groups, t, d)
    k, v = torch.randn(b, HKV, t, d), torch.randn(b, HKV, t, e) + case.value_mean
    shape = {"head": (HKV,), "token": (b, HKV, t), "channel": (b, HKV, t, d)}.get(case.decay)
    log_decay = None if shape is None else -case.gate_scale * torch.rand(shape)
    for first, last in case.strong_gates:
        strong_log_decay = -40 * torch.rand((*shape[:2], last - first, *shape[3:])) - 20
        strong_log_decay[:, :, ::2] = -torch.inf
        log_decay[:, :, first:last] = strong_log_decay
    tensors = [x.to(case.dtype) for x in (q, k, v)]
    tensors += [log_decay, torch.randn(b, HKV, d, e), torch.rand(b, HKV, d)]
    segment_ids = padding_mask = None
    if case.packed:
        starts = torch.tensor([[t // 3, t // 2 + 1]])
        segment_ids = (torch.arange(t) >= starts[..., None]).sum(1).to(DEVICE)
    if case.padded:
        padding_mask = (torch.rand(b, t) > 0.3).to(DEVICE)
    tensors = [x if x is None else nan_padded(x.to(DEVICE)) for x in tensors]
    return tensors, segment_ids, padding_mask


def reference(case, tensors, segment_ids, padding_mask):
    """Compute a call with ``impl="reference"``."""
    q, k, v, log_decay, *state = tensors
    out, last, *_ = linear_attention(
        q,
        k,
        v,
        mask=AttentionMask(causal=True, padding=padding_mask, segment_ids=segment_ids),
        log_decay=log_decay,
        normalize=case.normalize,
        scale=0.7,
        impl="reference",
        chunk_size=case.length,
        state=LinearState(*state),
        return_state=True,
        feature_map=case.feature_map,
        feature_scale=0.25,
    )
    return out, *last


def run_kernels(case, tensors, segment_ids, padding_mask):
    """Compute a call with the kernels."""
    options = (case.feature_map, 0.5, 0.7, case.normalize, 1e-6, case.chunk_size, case.split_size)
    return linear_triton(*tensors, segment_ids, padding_mask, *options)


def results(case, compute, dtype=None):
    """Return results and gradients by name, for a fixed random sum of the results."""
    torch.manual_seed(1)
    tensors, segment_ids, padding_mask = make(case)
    weights = [torch.randn(B, HKV * case.groups, case.length, case.e)]
    weights += [torch.randn(tensors[4].shape), torch.randn(tensors[5].shape)]
    weights = [x.to(DEVICE) for x in weights]
    if case.value_mean:  # gradients of the state would dominate those that nearly cancel
        weights[1:] = [x * 0 for x in weights[1:]]
    if padding_mask is not None:
        weights[0] = weights[0] * padding_mask[:, None, :, None]
    weights[0] = weights[0].to(case.dtype)
    leaves = [x if x is None else x.to(dtype or x.dtype).requires_grad_() for x in tensors]
    computed = compute(case, leaves, segment_ids, padding_mask)
    if padding_mask is not None:
        computed = (computed[0] * padding_mask[:, None, :, None], *computed[1:])
    total = sum((x * w.to(x.dtype)).sum() for x, w in zip(computed, weights, strict=True))
    named = {name: x for name, x in zip(NAMES, leaves, strict=True) if x is not None}
    grads = torch.autograd.grad(total, list(named.values()))
    values = dict(zip(("out", "state.kv", "state.z"), computed, strict=True))
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
    KernelCase(decay="head", groups=3, packed=True, padded=True),
    KernelCase(decay="token", normalize=False, split_size=128),
    KernelCase(decay="token", groups=2, packed=True),
    KernelCase(decay="channel", normalize=False, groups=2, padded=True),
    KernelCase(decay="channel", packed=True),
    KernelCase(packed=True, padded=True, groups=2, normalize=False),
    KernelCase(feature_map="relu", decay="token"),
    KernelCase(feature_map="exp", decay="channel", groups=2),
    KernelCase(feature_map="exp", normalize=False),
    KernelCase(feature_map="identity", normalize=False, decay="head"),
    *(KernelCase(feature_map=name, normalize=name != "identity", length=17) for name in FIXED),
    KernelCase(d=60, e=100, length=17, decay="token"),
    KernelCase(d=100, e=60, length=17, decay="channel"),
    KernelCase(d=16, e=256, length=17),
    KernelCase(d=256, e=16, length=17, decay="token"),
    *(KernelCase(length=length, decay="token") for length in (1, 15, 16, 17)),
    *(
        KernelCase(
            decay=decay,
            packed=True,
            length=150,
            d=16,
            e=32,
            chunk_size=chunk_size,
            split_size=64,
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


LONG = {"length": 2048, "d": 32, "e": 32, "chunk_size": 64, "split_size": 1024}


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


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
@pytest.mark.parametrize("gate", [-float("inf"), -30.0])
def test_strong_gates_neither_overflow_nor_cancel(decay, gate):
    # With decay 0 at every token, the normalised output has no gradients
    case = KernelCase(decay=decay, normalize=decay != "head", length=21)

    def with_strong_gates(case, tensors, segment_ids, padding_mask):
        log_decay = tensors[3]
        is_strong = torch.arange(log_decay.numel(), device=DEVICE).view(log_decay.shape) % 5 == 0
        tensors = [*tensors[:3], torch.where(is_strong, gate, log_decay), *tensors[4:]]
        return (reference if log_decay.dtype == torch.float64 else run_kernels)(
            case, tensors, segment_ids, padding_mask
        )

    actual = run_twice(case, with_strong_gates)
    expected = results(case, with_strong_gates, torch.float64)
    for name, x in actual.items():
        error = relative_error(x, expected[name], 1e-6)
        assert error < 1e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    "strong_gates",
    [
        ((0, 1),),
        ((31, 32), (33, 34)),  # the last of a chunk, and the second of the next
        ((32, 33), (79, 80)),
        ((64, 66), (90, 95)),  # the first of a split
        ((40, 62),),
        ((10, 11), (12, 13), (14, 15), (95, 96)),
    ],
    ids=str,
)
@pytest.mark.parametrize("decay", ["token", "channel"])
@pytest.mark.parametrize("normalize", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_chunks_with_strong_gates_are_processed_in_windows(decay, strong_gates, normalize):
    case = KernelCase(
        decay=decay, strong_gates=strong_gates, normalize=normalize, length=96, split_size=64,
        chunk_size=32, gate_scale=0.2, groups=1 + normalize, packed=normalize,
    )  # fmt: skip
    actual, expected = run_twice(case), results(case, reference, torch.float64)
    for name, x in actual.items():
        error = relative_error(x, expected[name], 1e-6) / float32_slack()
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_chunks_after_strong_gates_are_not_processed_in_windows(decay):
    # Twelve chunks in one split, more than a run of chunks
    case = KernelCase(
        decay=decay, strong_gates=((40, 42), (150, 151)), length=185, split_size=192, gate_scale=0.2
    )
    for name, error in errors(case).items():
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_decays_near_the_limit_of_factored_chunks(decay):
    # In chunks of 32, decays of some channels are slightly below and above the limit
    case = KernelCase(decay=decay, length=96, split_size=96, chunk_size=32, gate_scale=3.7)
    for name, error in errors(case).items():
        assert error < 1e-5 or name == "log_decay", f"{name}: {error:.1e}"


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_decay_gradients_near_the_limit_of_factored_chunks(decay):
    """They are sums over later tokens of q dq - k dk, which cancel.

    Each term has the error of a weight, whose exponent of up to 80 is rounded.
    """
    case = KernelCase(decay=decay, length=96, split_size=96, chunk_size=32, gate_scale=3.7)
    case = replace(case, feature_map="identity", normalize=False)
    actual, exact = run_twice(case), results(case, reference, torch.float64)
    torch.manual_seed(1)  # as in results
    (q, k, *_), _, _ = make(case)
    terms = ((q * exact["q"]).abs() + (k * exact["k"]).abs()).sum(2)  # [B, H, D]
    error = (actual["log_decay"] - exact["log_decay"]).abs().amax(2)
    of_weights = MAX_EXPONENT.value * math.log(2) * torch.finfo(torch.float32).eps / 2
    budget = 2 * of_weights * (terms if decay == "channel" else terms.sum(2))
    assert (error <= budget).all(), (error / budget).max()


def test_padding_tokens_do_not_change_real_ones():
    case = KernelCase(decay="token", padded=True)
    tensors, segment_ids, padding_mask = make(case)
    with_nan = [x.clone() for x in tensors]
    for x in with_nan[1:3]:
        x[~padding_mask[:, None].expand(x.shape[:3])] = torch.nan
    first, second = (
        run_kernels(case, x, segment_ids, padding_mask)[0] for x in (tensors, with_nan)
    )
    real_tokens = padding_mask[:, None, :, None].expand_as(first)
    assert torch.equal(first[real_tokens], second[real_tokens])


def test_later_tokens_do_not_change_earlier_ones():
    case = KernelCase(decay="channel", length=40)
    tensors, segment_ids, padding_mask = make(case)
    changed = [x if x is None else x.clone() for x in tensors]
    for x in changed[:3]:
        x[:, :, 23:] *= 6
    first, second = (
        run_kernels(case, x, segment_ids, padding_mask)[0][:, :, :23] for x in (tensors, changed)
    )
    assert torch.equal(first, second)


def test_results_do_not_depend_on_strides():
    case = KernelCase(decay="token", groups=2)
    tensors, segment_ids, padding_mask = make(case)
    restrided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:4]]
    first, second = (
        run_kernels(case, tensors, segment_ids, padding_mask),
        run_kernels(case, [*restrided, *tensors[4:]], segment_ids, padding_mask),
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("normalize", [False, True])
def test_step_matches_reference(decay, normalize):
    feature_map = "exp" if normalize else "elu+1"
    case = KernelCase(decay=decay, normalize=normalize, groups=3, length=1, padded=True, d=20, e=36)
    case = replace(case, feature_map=feature_map)
    tensors, _, padding_mask = make(case)
    options = (feature_map, 0.5, 0.7, normalize, 1e-6)
    actual = linear_triton_step(*tensors, padding_mask, *options)
    doubles = [x if x is None else x.double() for x in tensors]
    for name, a, b in zip(
        ("out", "kv", "z"), actual, reference(case, doubles, None, padding_mask), strict=True
    ):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_step_in_place_equals_the_step_with_a_new_state(decay):
    # Several tiles of a head, all of which read z
    case = KernelCase(decay=decay, groups=2, length=1, d=128, e=70, padded=True)
    (*rows, kv, z), _, padding_mask = make(case)
    options = {"normalize": True, "impl": "triton", "return_state": True}
    call = partial(
        linear_attention, *rows[:3], log_decay=rows[3], mask=AttentionMask(
            causal=True, padding=padding_mask), **options,
    )  # fmt: skip
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
    (q, k, v, log_decay, kv, z), _, _ = make(case)
    options = {"normalize": True, "impl": "triton", "feature_map": "elu+1", "return_state": True}
    full = linear_attention(q, k, v, log_decay=log_decay, state=LinearState(kv, z), **options)
    state, outs = LinearState(kv, z), []
    for part in (slice(0, 17), slice(17, 18), slice(18, 19), slice(19, 21)):
        inputs = [x[:, :, part] for x in (q, k, v, log_decay)]
        out, state, *_ = linear_attention(*inputs[:3], log_decay=inputs[3], state=state, **options)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), full.out)
    torch.testing.assert_close(state, full.state)


@pytest.mark.parametrize(
    ("programs", "tokens", "splits"),
    [
        (192, 8192, 1),  # one round; splits would only read more
        (16, 8192, 16),  # 256 of at most 264 concurrent programs
        (264, 65536, 1),
        (265, 65536, 25),  # one split takes two rounds, the second nearly empty
        (1, 300, 1),
        (8, 0, 1),
    ],
)
def test_splits_fill_the_gpu(programs, tokens, splits):
    size = launch.choose_split_size(programs, tokens, 264)
    assert size % 64 == 0
    assert max(1, -(-tokens // size)) == splits


def test_operators_pass_opcheck():
    case = KernelCase(decay="token", length=18, packed=True, padded=True)
    (*tensors,), segment_ids, padding_mask = make(case)
    for x in tensors:
        x.requires_grad_()
    options = ("elu+1", 0.5, 0.7, True, 1e-6, 16, 32)
    torch.library.opcheck(linear_triton, (*tensors, segment_ids, padding_mask, *options))
    with torch.no_grad():
        out, kv, z = linear_triton(*tensors, segment_ids, padding_mask, *options)
        tensors = [x.detach() for x in tensors]
        args = (
            torch.randn_like(out),
            kv,
            z,
            kv,
            z,
            *tensors,
            segment_ids,
            padding_mask,
            *options,
            True,
        )
        torch.library.opcheck(linear_triton_backward, args)
        first_token = [x[:, :, :1] if x.dim() > 2 and i < 4 else x for i, x in enumerate(tensors)]
        torch.library.opcheck(
            linear_triton_step_, (*first_token, padding_mask[:, :1], "elu+1", 0.5, 0.7, True, 1e-6)
        )
        torch.library.opcheck(
            linear_triton_step, (*first_token, padding_mask[:, :1], "elu+1", 0.5, 0.7, True, 1e-6)
        )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mask": AttentionMask()}, "causal"),
        ({"chunk_size": 48}, "16, 32 or 64"),
        ({"scale": 0.0}, "other than 0"),
    ],
)
def test_unsupported_options_raise(changes, match):
    tensors, _, _ = make(KernelCase())
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
