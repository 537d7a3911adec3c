"""The Triton kernels of linear attention, interpreted, against the plain operations in float64."""

from dataclasses import dataclass, replace

import pytest
import torch

from attnzoo.errors import UnsupportedError
from attnzoo.kernels.triton.linear import linear_triton, linear_triton_backward
from attnzoo.kernels.triton.linear_step import linear_triton_step
from attnzoo.ops import linear_triton as ops_triton
from attnzoo.ops.linear import choose_impl, linear_attention
from attnzoo.state import LinearState

B, HKV = 1, 1
NAMES = ("q", "k", "v", "log_decay", "kv", "z")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of the operator; spans of 32 tokens in chunks of 16, so that small ones have many."""

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
    mean: float = 0.0  # of the values
    strength: float = 1.0  # of the gates
    strong: tuple[tuple[int, int], ...] = ()  # tokens whose gates are stronger than any
    span: int = 32
    chunk: int = 16


def fenced(x):
    """Copy a tensor into storage that goes on with NaN, so that a read past the end shows."""
    room = torch.full((x.numel() + 4096,), torch.nan, dtype=x.dtype)
    room[: x.numel()] = x.flatten()
    return room[: x.numel()].view(x.shape)


def make(case):
    """Return the six tensors of a call, and what masks it."""
    b, t, d, e = B, case.length, case.d, case.e
    q = torch.randn(b, HKV * case.groups, t, d)
    k, v = torch.randn(b, HKV, t, d), torch.randn(b, HKV, t, e) + case.mean
    shape = {"head": (HKV,), "token": (b, HKV, t), "channel": (b, HKV, t, d)}.get(case.decay)
    log_decay = None if shape is None else -case.strength * torch.rand(shape)
    for first, last in case.strong:
        stronger = -40 * torch.rand((*shape[:2], last - first, *shape[3:])) - 20
        stronger[:, :, ::2] = -torch.inf
        log_decay[:, :, first:last] = stronger
    given = [x.to(case.dtype) for x in (q, k, v)]
    given += [log_decay, torch.randn(b, HKV, d, e), torch.rand(b, HKV, d)]
    ids = real = None
    if case.packed:
        borders = torch.tensor([[t // 3, t // 2 + 1]])
        ids = (torch.arange(t) >= borders[..., None]).sum(1)
    if case.padded:
        real = torch.rand(b, t) > 0.3
    return [x if x is None else fenced(x) for x in given], ids, real


def plain(case, tensors, ids, real):
    """Compute a call by plain operations."""
    q, k, v, log_decay, *state = tensors
    out, last, _ = linear_attention(
        q,
        k,
        v,
        log_decay=log_decay,
        normalize=case.normalize,
        scale=0.7,
        impl="reference",
        chunk_size=case.length,
        state=LinearState(*state),
        return_state=True,
        segment_ids=ids,
        feature_map=case.feature_map,
        feature_scale=0.25,
        real=real,
    )
    return out, *last


def kernels(case, tensors, ids, real):
    """Compute it by the kernels."""
    options = (case.feature_map, 0.5, 0.7, case.normalize, 1e-6, case.chunk, case.span)
    return linear_triton(*tensors, ids, real, *options)


def results(case, compute, dtype=None):
    """Return results and gradients by name, for a fixed random sum of the results."""
    torch.manual_seed(1)
    tensors, ids, real = make(case)
    weights = [torch.randn(B, HKV * case.groups, case.length, case.e)]
    weights += [torch.randn(tensors[4].shape), torch.randn(tensors[5].shape)]
    if case.mean:  # gradients of the state would hide those that nearly cancel
        weights[1:] = [x * 0 for x in weights[1:]]
    if real is not None:
        weights[0] = weights[0] * real[:, None, :, None]
    weights[0] = weights[0].to(case.dtype)
    leaves = [x if x is None else x.to(dtype or x.dtype).requires_grad_() for x in tensors]
    made = compute(case, leaves, ids, real)
    if real is not None:
        made = (made[0] * real[:, None, :, None], *made[1:])
    total = sum((x * w.to(x.dtype)).sum() for x, w in zip(made, weights, strict=True))
    named = {name: x for name, x in zip(NAMES, leaves, strict=True) if x is not None}
    grads = torch.autograd.grad(total, list(named.values()))
    found = dict(zip(("out", "state.kv", "state.z"), made, strict=True))
    return found | dict(zip(named, grads, strict=True))


def errors(case):
    """Return the relative error of each result and gradient."""
    ours, exact = results(case, kernels), results(case, plain, torch.float64)
    return {
        name: ((x.double() - exact[name]).norm() / (exact[name].norm() + 1e-12)).item()
        for name, x in ours.items()
    }


CASES = (
    Case(normalize=False),
    Case(),
    Case(decay="head", groups=3, packed=True, padded=True),
    Case(decay="token", normalize=False, span=128),
    Case(decay="token", groups=2, packed=True),
    Case(decay="channel", normalize=False, groups=2, padded=True),
    Case(decay="channel", packed=True),
    Case(packed=True, padded=True, groups=2, normalize=False),
    Case(feature_map="relu", decay="token"),
    Case(feature_map="exp", decay="channel", groups=2),
    Case(feature_map="exp", normalize=False),
    Case(feature_map="identity", normalize=False, decay="head"),
    Case(d=60, e=100, length=17, decay="token"),
    Case(d=100, e=60, length=17, decay="channel"),
    Case(d=16, e=256, length=17),
    Case(d=256, e=16, length=17, decay="token"),
    *(Case(length=length, decay="token") for length in (1, 15, 16, 17)),
    *(
        Case(decay=decay, packed=True, length=150, d=16, e=32, chunk=chunk, span=64, strength=0.3)
        for decay, chunk in (("none", 64), ("token", 64), ("channel", 32), ("channel", 64))
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_plain_operations_in_float64(case):
    budget = {"q": 2e-5, "log_decay": 2e-5}  # sums of terms that cancel
    for name, error in errors(case).items():
        assert error < budget.get(name, 2e-6), f"{name}: {error:.1e}"


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_bfloat16_keeps_its_gradients_where_values_have_a_mean(decay):
    # rounding the state would leave errors of tens of percent in dq
    case = Case(decay=decay, mean=1.0, dtype=torch.bfloat16, length=96, d=16, e=16, strength=0.1)
    found = errors(case)
    for name in ("out", "q", "k", "v", "log_decay"):
        assert found.get(name, 0) < 5e-3, f"{name}: {found[name]:.1e}"


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_float16_stays_finite(decay):
    case = Case(decay=decay, mean=100.0, dtype=torch.float16, length=48)
    for name, error in errors(case).items():
        assert error < 2e-3, f"{name}: {error:.1e}"  # NaN fails, too


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
@pytest.mark.parametrize("gate", [-float("inf"), -30.0])
def test_strong_gates_neither_overflow_nor_cancel(decay, gate):
    # a head that forgets every token has a normalised output without gradients
    case = Case(decay=decay, normalize=decay != "head", length=21)

    def some_strong(case, tensors, ids, real):
        log_decay = tensors[3]
        strong = torch.arange(log_decay.numel()).view(log_decay.shape) % 5 == 0
        tensors = [*tensors[:3], torch.where(strong, gate, log_decay), *tensors[4:]]
        return (plain if log_decay.dtype == torch.float64 else kernels)(case, tensors, ids, real)

    ours = results(case, some_strong)
    exact = results(case, some_strong, torch.float64)
    for name, x in ours.items():
        error = (x.double() - exact[name]).norm() / (exact[name].norm() + 1e-6)
        assert error < 1e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    "strong",
    [
        ((0, 1),),
        ((31, 32), (33, 34)),  # the last of a chunk, and soon after another's first
        ((32, 33), (79, 80)),
        ((64, 66), (90, 95)),  # the first of a span
        ((40, 62),),
        ((10, 11), (12, 13), (14, 15), (95, 96)),
    ],
    ids=str,
)
@pytest.mark.parametrize("decay", ["token", "channel"])
@pytest.mark.parametrize("normalize", [False, True])
def test_chunks_with_strong_gates_are_walked_in_windows(decay, strong, normalize):
    case = Case(
        decay=decay, strong=strong, normalize=normalize, length=96, span=64, chunk=32, strength=0.2,
        groups=1 + normalize, packed=normalize,
    )  # fmt: skip
    ours, exact = results(case, kernels), results(case, plain, torch.float64)
    for name, x in ours.items():
        error = (x.double() - exact[name]).norm() / (exact[name].norm() + 1e-6)
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_gates_at_the_edge_of_what_is_mild(decay):
    # in chunks of 32, some columns come to sums a little below and above what is walked whole
    case = Case(decay=decay, length=96, span=96, chunk=32, strength=3.7)
    for name, error in errors(case).items():
        assert error < {"log_decay": 2e-5}.get(name, 1e-5), f"{name}: {error:.1e}"


def test_what_stands_in_padding_never_matters():
    case = Case(decay="token", padded=True)
    tensors, ids, real = make(case)
    spoiled = [x.clone() for x in tensors]
    for x in spoiled[1:3]:
        x[~real[:, None].expand(x.shape[:3])] = torch.nan
    clean, other = (kernels(case, x, ids, real)[0] for x in (tensors, spoiled))
    seen = real[:, None, :, None].expand_as(clean)
    assert torch.equal(clean[seen], other[seen])


def test_later_tokens_change_no_bit_of_earlier_ones():
    case = Case(decay="channel", length=40)
    tensors, ids, real = make(case)
    changed = [x if x is None else x.clone() for x in tensors]
    for x in changed[:3]:
        x[:, :, 23:] *= 6
    first, second = (kernels(case, x, ids, real)[0][:, :, :23] for x in (tensors, changed))
    assert torch.equal(first, second)


def test_any_strides():
    case = Case(decay="token", groups=2)
    tensors, ids, real = make(case)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:4]]
    first, second = (
        kernels(case, tensors, ids, real),
        kernels(case, [*turned, *tensors[4:]], ids, real),
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_step_equals_plain_operations(decay, normalize):
    feature_map = "exp" if normalize else "elu+1"
    case = Case(decay=decay, normalize=normalize, groups=3, length=1, padded=True, d=20, e=36)
    case = replace(case, feature_map=feature_map)
    tensors, _, real = make(case)
    options = (feature_map, 0.5, 0.7, normalize, 1e-6)
    ours = linear_triton_step(*tensors, real, *options)
    doubles = [x if x is None else x.double() for x in tensors]
    for name, a, b in zip(("out", "kv", "z"), ours, plain(case, doubles, None, real), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, msg=name)


def test_decoding_goes_on_from_a_prompt():
    case = Case(decay="channel", length=21, padded=False)
    (q, k, v, log_decay, kv, z), _, _ = make(case)
    options = {"normalize": True, "impl": "triton", "feature_map": "elu+1", "return_state": True}
    whole = linear_attention(q, k, v, log_decay=log_decay, state=LinearState(kv, z), **options)
    state, outs = LinearState(kv, z), []
    for part in (slice(0, 17), slice(17, 18), slice(18, 19), slice(19, 21)):
        now = [x[:, :, part] for x in (q, k, v, log_decay)]
        form = "recurrent" if part.stop - part.start == 1 else "chunk"
        out, state, _ = linear_attention(
            *now[:3], log_decay=now[3], state=state, form=form, **options
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole.out)
    torch.testing.assert_close(state, whole.state)


def test_operators_pass_opcheck():
    case = Case(decay="token", length=18, packed=True, padded=True)
    (*tensors,), ids, real = make(case)
    for x in tensors:
        x.requires_grad_()
    options = ("elu+1", 0.5, 0.7, True, 1e-6, 16, 32)
    torch.library.opcheck(linear_triton, (*tensors, ids, real, *options))
    with torch.no_grad():
        out, kv, z = linear_triton(*tensors, ids, real, *options)
        tensors = [x.detach() for x in tensors]
        args = (torch.randn_like(out), kv, z, kv, z, *tensors, ids, real, *options, True)
        torch.library.opcheck(linear_triton_backward, args)
        one = [x[:, :, :1] if x.dim() > 2 and i < 4 else x for i, x in enumerate(tensors)]
        torch.library.opcheck(
            linear_triton_step, (*one, real[:, :1], "elu+1", 0.5, 0.7, True, 1e-6)
        )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"form": "parallel"}, "parallel form"),
        ({"causal": False}, "causal"),
        ({"chunk_size": 48}, "16, 32 or 64"),
        ({"scale": 0.0}, "other than 0"),
    ],
)
def test_what_kernels_cannot_is_refused(changes, match):
    tensors, _, _ = make(Case())
    with pytest.raises(UnsupportedError, match=match):
        linear_attention(*tensors[:3], impl="triton", **changes)


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((1, 1, 8, 300), torch.float32, "up to 256"),
        ((1, 1, 8, 8), torch.float64, "float64"),
        ((1, 1, 8, 7), torch.bfloat16, "even"),
    ],
)
def test_inputs_that_kernels_cannot_take_are_refused(shape, dtype, match):
    x = torch.randn(shape).to(dtype)
    with pytest.raises(UnsupportedError, match=match):
        linear_attention(x, x, x, impl="triton")


@pytest.fixture
def _no_interpreter(monkeypatch):
    monkeypatch.setattr("attnzoo.kernels.triton.interpreter.interpreted", lambda: False)
    ops_triton._DEVICE_REASONS.clear()
    yield
    ops_triton._DEVICE_REASONS.clear()


@pytest.mark.usefixtures("_no_interpreter")
def test_without_a_gpu_or_an_interpreter_kernels_are_refused_and_auto_goes_on():
    x = torch.randn(1, 1, 8, 8)
    with pytest.raises(UnsupportedError, match=r"on cpu .*TRITON_INTERPRET=1"):
        linear_attention(x, x, x, impl="triton")
    assert choose_impl("chunk", x, x, x)[0] in ("cpp", "torch")
    torch.testing.assert_close(
        linear_attention(x, x, x).out, linear_attention(x, x, x, impl="reference").out
    )


@pytest.mark.parametrize(
    ("version", "ptxas", "match"),
    [("3.5.1", "12.8.93", "3.6 or later"), ("3.6.0", "13.0.88", "shared memory wrongly")],
)
def test_compilers_known_to_be_broken_are_refused(version, ptxas, match, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(ops_triton, "ptxas_version", lambda: ptxas)
    (reason,) = ops_triton.compiler_reasons(9)
    assert match in reason


def test_the_assembler_says_its_version():
    assert ops_triton.ptxas_version().count(".") == 2
