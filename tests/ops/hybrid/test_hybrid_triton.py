"""The window hybrid on the Triton kernels, against the reference in float64.

They run on a GPU if there is one, else interpreted on the CPU.
"""

import operator
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from attnzoo.contract.sequences import Sequences
from attnzoo.errors import UnsupportedError
from attnzoo.ops.hybrid.api import hybrid_attention
from attnzoo.ops.hybrid.parts import HybridState, LinearBranch
from attnzoo.ops.hybrid.triton.custom_op import hybrid_triton, hybrid_triton_backward
from attnzoo.ops.hybrid.triton.step import hybrid_triton_step_
from tests.helpers import check_operator
from tests.kernel_device import float32_slack, kernel_device, nan_in_uninitialized_memory

DEVICE = kernel_device()
NAMES = ("q", "k", "v", "q_features", "k_features", "log_weight", "log_decay")


@pytest.fixture(autouse=True)
def _nan_in_uninitialized_memory():
    with nan_in_uninitialized_memory():
        yield


@dataclass(frozen=True, kw_only=True)
class HybridCase:
    """Options of a call; ``cut`` continues from the state after that many tokens."""

    decay: str = "none"
    heads: tuple[int, int] = (2, 1)
    length: int = 30
    window: int = 8
    cut: int = 0
    packed: bool = False  # one row of sequences, with NaN between them
    relative: bool = True
    mean: bool = True
    num_sinks: int = 0
    causal: bool = True
    value_mean: float = 0.0
    dtype: torch.dtype = torch.float32


def make(case, size=16, batch=1):
    """Return the tensors of a call, and its sequences."""
    (heads, key_heads), t = case.heads, case.length
    q = torch.randn(batch, heads, t, size)
    k, v = (torch.randn(batch, key_heads, t, size) for _ in range(2))
    features = torch.rand(batch, heads, t, size), torch.rand(batch, key_heads, t, size)
    shape = {"head": (key_heads,), "token": (batch, key_heads, t)}
    shape |= {"channel": (batch, key_heads, t, size), "none": None}
    log_decay = None if shape[case.decay] is None else -torch.rand(shape[case.decay])
    tensors = [x.to(case.dtype) for x in (q, k, v + case.value_mean, *features)]
    sequences = None
    log_weight = torch.randn(1, heads, 1, 1)
    if case.packed:
        starts, lengths = [1, t // 2, t // 2, t // 2 + 4], [t // 2 - 1, 0, 1, t - t // 2 - 5]
        starts, lengths = (torch.tensor(x).to(DEVICE) for x in (starts, lengths))
        sequences = Sequences(starts, lengths, max(lengths.tolist()))
        outside = (sequences.index(t) == sequences.count).cpu()
        log_weight = torch.randn(1, heads, t, 1)
        for x in (*tensors, log_weight, log_decay):
            if x is not None and x.dim() > 1:
                x[:, :, outside] = torch.nan
    tensors += [log_weight, log_decay]
    return [x if x is None else x.to(DEVICE) for x in tensors], sequences


def attend(case, tensors, impl, tokens, state, **options):
    """Compute the output and the state of a range of tokens."""
    q, k, v, *features, log_weight, log_decay = tensors
    q, k, v, *features = (x[:, :, tokens] for x in (q, k, v, *features))
    if log_decay is not None and log_decay.dim() > 1:
        log_decay = log_decay[:, :, tokens]
    branch = LinearBranch(*features, log_weight, log_decay, case.relative, case.mean)
    options |= {"window": case.window, "scale": 0.25, "causal": case.causal, "impl": impl}
    options = {"num_sinks": case.num_sinks, "return_state": case.causal} | options
    return hybrid_attention(q, k, v, branch, state=state, **options)


def results(case, impl, dtype=None):
    """Return results and gradients by name."""
    torch.manual_seed(1)
    tensors, sequences = make(case)
    leaves = [x if x is None else x.to(dtype or x.dtype).requires_grad_() for x in tensors]
    state, outs = None, []
    for tokens in (slice(0, case.cut), slice(case.cut, case.length)):
        if tokens.stop > tokens.start:
            result = attend(case, leaves, impl, tokens, state, sequences=sequences)
            state = result.state
            outs.append(result.out)
    values = {"out": torch.cat(outs, 2)}
    if state is not None:
        values |= {"kv": state.kv, "z": state.z}
    total = (values["out"] * torch.randn(values["out"].shape).to(DEVICE)).sum()
    if not case.value_mean:
        total = total + sum(0.1 * x.sum() for name, x in values.items() if name != "out")
    named = {name: x for name, x in zip(NAMES, leaves, strict=True) if x is not None}
    return values | dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True))


def errors(case, impl="triton"):
    """Return the relative error of each result and gradient."""
    actual = results(case, impl)
    expected = results(case, "reference", torch.float64)
    return {
        name: ((x.double() - expected[name]).norm() / (expected[name].norm() + 1e-12)).item()
        for name, x in actual.items()
    }


@pytest.mark.parametrize(
    "case",
    [
        HybridCase(relative=False, heads=(4, 2)),
        HybridCase(decay="channel", packed=True),
        HybridCase(decay="head", packed=True, num_sinks=3),
        HybridCase(packed=True, relative=False, mean=False),
        HybridCase(decay="token", cut=11),
        HybridCase(length=6),  # shorter than the window
        HybridCase(causal=False, heads=(4, 2), relative=False),
        HybridCase(causal=False, packed=True, window=4, heads=(2, 2)),
        HybridCase(num_sinks=3, heads=(4, 2), relative=False),
        HybridCase(num_sinks=12, decay="token", cut=9),
        pytest.param(
            HybridCase(num_sinks=2, decay="channel", cut=11),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(HybridCase(decay="head", mean=False, cut=5), marks=pytest.mark.exhaustive),
        pytest.param(HybridCase(packed=True, length=140), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_hybrid_kernels_match_reference_in_float64(case):
    for name, error in errors(case).items():
        assert error < 5e-6 * float32_slack(), f"{name}: {error:.1e}"


@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_gradients_are_accurate_if_values_have_a_mean(causal):
    # Gradients of queries and keys are differences of large sums that nearly cancel
    case = HybridCase(
        value_mean=1.0, dtype=torch.bfloat16, length=96, window=16, causal=causal, relative=causal
    )
    for name, error in errors(case).items():
        assert error < 6e-3, f"{name}: {error:.1e}"


@pytest.mark.exhaustive
def test_bfloat16_gradients_with_sinks_are_as_accurate_as_in_torch():
    case = HybridCase(value_mean=1.0, dtype=torch.bfloat16, length=96, window=16, num_sinks=4)
    ours, plain = errors(case), errors(case, "torch")
    for name, error in ours.items():
        assert error <= 2 * plain[name] + 1e-6, f"{name}: {error:.1e}, {plain[name]:.1e} in torch"


def decode(case, impl, dtype, in_place, slots):
    """Return outputs of all tokens after the prompt, and the state after them, by name.

    With slots, the two rows are sequences that read and write rows 2 and 0 of a pool of four, and
    every third token is of the first one only.
    """
    torch.manual_seed(1)
    tensors, _ = make(case, batch=2)
    tensors = [x if x is None else x.to(dtype) for x in tensors]
    prefill_impl = "reference" if dtype == torch.float64 else "torch"
    options, outs = {"reuse_state": in_place}, []
    with torch.no_grad():
        state = attend(case, tensors, prefill_impl, slice(case.cut), None).state
        if slots:
            pool = [x.new_full((4, *x.shape[1:]), 7) for x in state]
            for x, rows in zip(pool, state, strict=True):
                x[[2, 0]] = rows
            state = HybridState._make(pool)
        for start in range(case.cut, case.length):
            if slots:
                second = -1 if start % 3 == 0 else 0
                options["slots"] = torch.tensor([2, second], device=DEVICE)
            step = attend(case, tensors, impl, slice(start, start + 1), state, **options)
            assert step.impl.impl == impl
            if in_place and impl != "reference":
                assert all(map(operator.is_, step.state, state))
            outs.append(step.out)
            state = step.state
    return {"out": torch.cat(outs, 2), **state._asdict()}


@pytest.mark.parametrize(
    ("case", "in_place", "slots"),
    [
        (HybridCase(cut=3, length=14, num_sinks=2, decay="channel"), True, False),
        (HybridCase(cut=3, length=14, num_sinks=2, decay="channel"), True, True),
        (HybridCase(cut=2, length=12, heads=(4, 2), decay="token", mean=False), False, True),
        (HybridCase(cut=5, length=12, relative=False), True, False),
        pytest.param(
            HybridCase(cut=1, length=20, decay="head", num_sinks=12),
            *(True, False),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            HybridCase(cut=20, length=90, window=70, num_sinks=3),  # more than one tile
            *(True, False),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_decoding_matches_reference_in_float64(case, in_place, slots):
    exact = decode(case, "reference", torch.float64, False, slots)
    for name, x in decode(case, "triton", torch.float32, in_place, slots).items():
        error = (x.double() - exact[name]).norm() / (exact[name].double().norm() + 1e-12)
        assert error < 5e-6 * float32_slack(), f"{name}: {error:.1e}"


def test_one_token_with_gradients_matches_reference_in_float64():
    case = HybridCase(length=12, cut=11, decay="token", num_sinks=2)
    for name, error in errors(case).items():
        assert error < 5e-6 * float32_slack(), f"{name}: {error:.1e}"


OPERATORS = {x._name: x for x in (hybrid_triton, hybrid_triton_backward, hybrid_triton_step_)}


class CountLaunches(TorchDispatchMode):
    """Count the operations that would launch a kernel on a GPU, those in custom operators too."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if custom := OPERATORS.get(function._opname):
            with self:
                return custom._init_fn(*args, **(kwargs or {}))
        name = str(function)
        if not function.is_view and not any(x in name for x in ("empty", "detach", "promote")):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def counted_launches(monkeypatch):
    """Return a context that collects the names of operations and kernels."""
    count, run = CountLaunches(), GridExecutor.__call__

    def counted(self, *args, **kwargs):
        count.names.append(self.fn.__name__)
        with _disable_current_modes():  # the interpreter's own operations
            return run(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    torch.use_deterministic_algorithms(False)
    return count


INTERPRETED_ONLY = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="launches are counted in the interpreter"
)


@INTERPRETED_ONLY
def test_decoding_a_token_launches_two_kernels(monkeypatch):
    case = HybridCase(length=10, heads=(2, 1), decay="channel", num_sinks=2)
    tensors, *_ = make(case)
    state = attend(case, tensors, "torch", slice(0, 9), None).state
    with torch.no_grad(), counted_launches(monkeypatch) as count:
        attend(case, tensors, "triton", slice(9, 10), state, reuse_state=True)
    assert count.names == ["hybrid_step_kernel", "hybrid_store_kernel"]


@INTERPRETED_ONLY
@pytest.mark.parametrize(("forward", "both"), [(12, 24)])
def test_hybrid_launches_few_kernels(forward, both, monkeypatch):
    case = HybridCase(length=80, heads=(1, 1))
    tensors, *_ = make(case)
    leaves = [x if x is None else x.requires_grad_() for x in tensors]
    count = counted_launches(monkeypatch)
    with count:
        q, k, v, *features, log_weight, log_decay = leaves
        branch = LinearBranch(*features, log_weight, log_decay, mean=True)
        out = hybrid_attention(q, k, v, branch, window=8, scale=0.25, impl="triton").out
        assert len(count.names) <= forward, count.names
        out.backward(out.detach())
    assert len(count.names) <= both, count.names


def test_hybrid_operator_passes_opcheck():
    (q, k, v, *features, _, _), *_ = make(HybridCase(length=18))
    tensors = [x.requires_grad_() for x in (q, k, v, *features, torch.randn(1, 2, 18).to(DEVICE))]
    state = [torch.randn(1, 1, 16, 16).to(DEVICE), torch.rand(1, 1, 16).to(DEVICE)]
    sinks = (torch.randn(1, 1, 2, 16).to(DEVICE).requires_grad_() for _ in range(2))
    visible_sinks = torch.rand(1, 18, 2).to(DEVICE) > 0.5
    for sink_options in ((None, None, None), (*sinks, visible_sinks)):
        options = (*[None] * 4, *sink_options, 8, 0.25, True, True, 1e-30)
        given = (*tensors, None, *state, *options, True)
        check_operator(hybrid_triton, given, trace=sink_options[0] is not None)
    places = torch.tensor([0, 4, 10]), torch.tensor([4, 0, 0])
    ids = torch.tensor([[0] * 12 + [-1, -1] + [2] * 4], dtype=torch.int32)
    given = (None, None, None, *(x.to(DEVICE) for x in (ids, *places)), *[None] * 4)
    options = (8, 0.25, True, True, 1e-30, False)
    check_operator(hybrid_triton, (*tensors, *given, *options), trace=False)


def test_decoding_operator_passes_opcheck():
    x = [torch.rand(1, heads, 1, 16).to(DEVICE) for heads in (2, 1, 1, 2, 1)]
    state = [torch.rand(1, 1, rows, 16) for rows in (5, 5, 4)]
    state += [torch.rand(1, 1, 16, 17), torch.rand(1, 1, 16), torch.tensor([7])]
    weight = torch.rand(1, 2, 1, 1).to(DEVICE)
    options = (None, weight, None, *(y.to(DEVICE) for y in state), 0.25, True, True, 1e-30)
    check_operator(hybrid_triton_step_, (*x, *options), trace=True)


def test_unsupported_calls_raise():
    tensors, *_ = make(HybridCase())
    q, k, v, *features, log_weight, _ = tensors
    branch = LinearBranch(*features, log_weight)
    options = {"window": 8, "scale": 1.0, "impl": "triton"}
    with pytest.raises(UnsupportedError, match="float64"):
        hybrid_attention(q.double(), k, v, branch, **options)
