"""One decoded token of linear attention in C++, against the plain recurrence in float64."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo.contract.states import LinearState
from attnzoo.ops.features.functional import MapWeights
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.common import LinearInputs, StepGate
from attnzoo.ops.linear.cpu.linear_step import LINEAR_STEP, run_step_cpp
from attnzoo.runtime import cpp
from tests.helpers import nan_surrounded
from tests.ops.linear.test_cpp import make

REASON = cpp.unavailable_reason(LINEAR_STEP)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

STEP_IN_CPP = ("cpp", "one token; compiled for this CPU")
SHAPES = [(2, 4, 2, 1, 16, 32), (1, 14, 2, 1, 20, 65), (3, 1, 1, 1, 5, 3), (2, 8, 8, 1, 128, 128)]
DECAYS = ("none", "head", "token", "channel")


def log_decay(kind, k):
    if kind == "none":
        return None
    log = nan_surrounded(-torch.rand(k.shape, dtype=k.dtype))
    return log if kind == "channel" else log[..., 0] if kind == "token" else log[0, :, 0, 0]


@torch.no_grad()
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_recurrence(shape, decay):
    q, k, v, state = make(*shape)
    v[0, 0, 0, 0] = -1e3
    options = {"log_decay": log_decay(decay, k), "state": state, "return_state": True}
    before = [x.clone() for x in state]
    for feature_map in ("identity", "elu+1", "relu", "exp"):
        for more in ({"normalize": True, "eps": 0.1, "scale": 0.7}, {"normalize": False}):
            options |= {"feature_map": feature_map, "feature_scale": 0.3, **more}
            found = linear_attention(q - 0.5, k - 0.5, v, **options)
            exact = linear_attention(q - 0.5, k - 0.5, v, impl="reference", **options)
            assert found.impl == STEP_IN_CPP
            assert_close(found.out, exact.out, atol=1e-11, rtol=1e-11)
            assert_close(tuple(found.state), tuple(exact.state), atol=1e-12, rtol=1e-12)
            assert all(map(torch.equal, state, before))


@torch.no_grad()
def test_results_do_not_depend_on_the_number_of_threads():
    q, k, v, state = make(2, 8, 8, 1, 128, 128)
    num_threads, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(linear_attention(q, k, v, state=state, return_state=True))
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(found[0].out, found[1].out)
    assert all(map(torch.equal, found[0].state, found[1].state))


@torch.no_grad()
def test_a_state_is_overwritten_only_on_request():
    q, k, v, state = make(*SHAPES[0])
    options = {"log_decay": log_decay("channel", k), "return_state": True, "normalize": True}
    expected = linear_attention(q, k, v, state=state, **options)
    in_place = linear_attention(q, k, v, state=state, reuse_state=True, **options)
    assert (in_place.state.kv is state.kv, in_place.state.k is state.k) == (True, True)
    assert torch.equal(in_place.out, expected.out)
    assert all(map(torch.equal, in_place.state, expected.state))
    strided = LinearState(*(torch.stack([x, x], 2)[:, :, 0] for x in state))  # not contiguous
    exact = linear_attention(q, k, v, state=strided, impl="torch", **options)
    found = linear_attention(q, k, v, state=strided, **options)
    assert_close(found.out, exact.out, atol=1e-12, rtol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_errors_are_at_most_twice_those_of_torch(dtype):
    q, k, v, state = make(*SHAPES[0], torch.float32)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    options = {"log_decay": log_decay("token", k), "feature_map": "elu+1", "normalize": True}
    wide = [x.double() for x in (q, k, v)]
    more = options | {"log_decay": options["log_decay"].double()}
    exact = linear_attention(*wide, state=state, impl="reference", **more).out
    plain = linear_attention(q, k, v, state=state, impl="torch", **options).out
    found = linear_attention(q, k, v, state=state, impl="cpp", **options).out
    assert found.dtype == dtype
    budget = 2 * (plain - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= budget


@torch.no_grad()
def test_learned_maps_equal_the_reference():
    q, k, v = make(2, 4, 2, 1, 16, 8)[:3]
    weights = MapWeights(torch.randn(4, 16, 16).double(), torch.randn(2, 16, 16).double())
    options = {"feature_map": "hedgehog", "map_weights": weights}
    options |= {"normalize": True, "return_state": True, "eps": 1e-3}
    found, exact = (linear_attention(q, k, v, impl=x, **options) for x in ("auto", "reference"))
    assert found.impl == STEP_IN_CPP
    assert_close(found.out, exact.out, atol=1e-12, rtol=1e-12)
    assert_close(tuple(found.state), tuple(exact.state), atol=1e-12, rtol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("reuse_state", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_states_of_a_pool(decay, reuse_state):
    """Each row equals a call of its own from the state at its slot; -1 has no state."""
    slots = torch.tensor([3, -1, 0, 5])
    q, k, v, _ = make(4, 4, 2, 1, 16, 20)
    pool = make(6, 4, 2, 1, 16, 20)[3]
    for x in (q, k, v):
        x[1] = torch.nan
    log = log_decay(decay, k.nan_to_num(1.0))
    before = [x.clone() for x in pool]
    options = {"normalize": True, "eps": 0.1, "scale": 0.7, "return_state": True}
    options |= {"feature_map": "elu+1"}
    more = {"slots": slots, "reuse_state": reuse_state, "log_decay": log}
    found = linear_attention(q, k, v, state=pool, **more, **options)
    assert found.impl == STEP_IN_CPP
    assert (found.state.kv is pool.kv) == reuse_state
    assert not found.out[1].any()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        one = slice(row, row + 1)
        own = log if log is None or log.dim() == 1 else log[one]
        exact = linear_attention(
            *(x[one] for x in (q, k, v)),
            state=LinearState(*(x[slot : slot + 1] for x in before)),
            log_decay=own,
            impl="reference",
            **options,
        )
        assert_close(found.out[one], exact.out, atol=1e-12, rtol=1e-12)
        for x, y in zip(found.state, exact.state, strict=True):
            assert_close(x[slot], y[0], atol=1e-12, rtol=1e-12)
    for slot in (1, 2, 4):
        assert all(torch.equal(x[slot], y[slot]) for x, y in zip(found.state, before, strict=True))
    if not reuse_state:
        assert all(map(torch.equal, pool, before))


@torch.no_grad()
def test_states_of_a_pool_with_a_stabilizer():
    """The gates of mLSTM are those of the row, and m is that of the slot."""
    slots, (q, k, v, _) = torch.tensor([2, -1, 0]), make(3, 4, 2, 1, 16, 20)
    pool = make(4, 4, 2, 1, 16, 20)[3]
    log, log_input, m = -torch.rand(3, 2, 1).double(), torch.randn(3, 2).double(), torch.randn(4, 2)
    m = m.double()

    def run(rows, state, m, slots=None):
        x = LinearInputs(
            *(q[rows], k[rows], v[rows], log[rows], LinearState(*(y.clone() for y in state))),
            *(True, False, 1.0, 0.0, None, "identity", 1.0),
            slots=slots,
        )
        gate = StepGate(None, log_input[rows].contiguous(), m.clone())
        return *run_step_cpp(x, gate), gate.m

    out, last, last_m = run(slice(None), pool, m, slots)
    assert not out[1].any()
    for slot in (1, 3):
        assert torch.equal(last.kv[slot], pool.kv[slot])
        assert torch.equal(last_m[slot], m[slot])
    for row, slot in ((0, 2), (2, 0)):
        at = slice(slot, slot + 1)
        own = LinearState(*(x[at] for x in pool))
        found, state, own_m = run(slice(row, row + 1), own, m[at])
        assert torch.equal(out[row], found[0])
        assert torch.equal(last_m[slot], own_m[0])
        assert not torch.equal(own_m[0], m[slot])
        assert all(torch.equal(x[slot], y[0]) for x, y in zip(last, state, strict=True))


def test_gradients_and_bidirectional_calls_do_not_use_the_step():
    q, k, v, state = make(*SHAPES[0])
    q.requires_grad_()
    out = linear_attention(q, k, v, state=state)
    assert out.impl.impl == "torch"  # the kernel has no backward pass
    assert "cpp cannot: the kernel of one token has no derivative" in out.impl.reason
    out.out.sum().backward()
    assert q.grad.abs().sum() > 0
    assert linear_attention(q, k, v, causal=False).impl.impl == "torch"
    assert linear_attention(q.detach(), k, v, causal=False).impl.impl == "torch"


@torch.no_grad()
def test_nan_inputs_give_nan_outputs_of_the_same_head():
    for position in range(3):
        x = [torch.randn(1, 2, 1, 4) for _ in range(3)]
        x[position][0, 0, 0, 1] = torch.nan
        for feature_map in ("identity", "elu+1", "relu", "exp"):
            out = linear_attention(*x, feature_map=feature_map).out
            assert out[0, 0].isnan().any(), (position, feature_map)
            assert not out[0, 1].isnan().any()
