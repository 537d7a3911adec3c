"""Feature maps that linear attention in C++ computes, against dense formulas in float64."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo.backends.feature_maps.base import get_feature_map
from attnzoo.contract.config import Geometry
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import LEARNED, NAMES, MapWeights
from attnzoo.ops.hybrid.api import LinearBranch, hybrid_attention
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.cpu.linear import LINEAR
from attnzoo.registry import build_backend
from attnzoo.runtime import cpp
from tests.ops.linear.test_cpp import fill_gaps, make_sequences, run_alone

REASON = cpp.unavailable_reason(LINEAR)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
B, H, HKV, D, E = 2, 4, 2, 16, 20


def make_weights(name, size=D, rows=32, dtype=torch.float64):
    """Return random weights of a learned map; ``None`` for a fixed one."""
    if name not in LEARNED:
        return None
    rows = size if LEARNED[name].is_residual else rows
    matrices = [0.3 * torch.randn(n, rows, size, dtype=dtype) for n in (H, HKV)]
    if name in ("learned_linear", "hedgehog"):
        return MapWeights(*matrices)
    return MapWeights(*matrices, *(torch.randn(n, rows, dtype=dtype) for n in (H, HKV)))


def features(x, name, scale, weight=None, bias=None, *, of_keys=False):
    """Compute the features from their formulas."""
    y = x
    if weight is not None:
        if name != "hedgehog_exp":
            weight = weight + torch.eye(weight.shape[2], dtype=x.dtype)
        y = torch.einsum("hnd,bhtd->bhtn", weight, x)
        y = y if bias is None else y + bias[:, None]
    if name == "elu+1":
        return torch.where(y > 0, y + 1, y.exp())
    if name == "relu":
        return y.clamp(min=0) + 1e-3
    if name == "exp":
        y = y * scale**0.5
        return y.clamp(max=30).exp() if of_keys else (y - y.amax(-1, keepdim=True)).exp()
    if name == "hedgehog":
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
    return y.clamp(max=30).exp() if name == "hedgehog_exp" else y


def dense(q, k, v, name, scale, weights, log_decay=None):
    """Compute every weight of rows."""
    q_weight, k_weight, q_bias, k_bias = weights or (None,) * 4
    fq = features(q, name, scale, q_weight, q_bias)
    fk = features(k, name, scale, k_weight, k_bias, of_keys=True)
    fk, v = (x.repeat_interleave(H // HKV, 1) for x in (fk, v))
    products = fq.unsqueeze(3) * fk.unsqueeze(2)
    if log_decay is not None:
        total = log_decay.cumsum(2).repeat_interleave(H // HKV, 1)
        products = products * (total.unsqueeze(3) - total.unsqueeze(2)).clamp(max=0).exp()
    matrix = products.sum(-1).tril()
    if name not in ("identity", "learned_linear"):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + 1e-6)
    return matrix @ v


@pytest.mark.parametrize("decay", [False, True], ids=["no decay", "channel"])
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_equal_the_formula(name, decay):
    """Of each sequence, if the tokens of none are NaN."""
    torch.manual_seed(0)
    tokens, weights = 74, make_weights(name)
    q, k, v = (
        torch.randn(1, n, tokens, m, dtype=torch.float64) for n, m in ((H, D), (HKV, D), (HKV, E))
    )
    parts = ((2, 30), (30, 31), (37, 73))
    sequences = make_sequences(tokens, (*parts, (73, 73)))
    size = D if weights is None else weights.k.shape[1] * LEARNED[name].features
    gates = -torch.rand(1, HKV, tokens, size, dtype=torch.float64) if decay else None
    fill_gaps(sequences, *(x for x in (q, k, v, gates) if x is not None))
    leaves = [x for x in (q, k, v, *(weights or ()), gates) if x is not None]
    leaves = [x.requires_grad_() for x in leaves]
    options = {"feature_map": name, "feature_scale": 0.3, "map_weights": weights}
    options |= {"normalize": name not in ("identity", "learned_linear"), "log_decay": gates}
    ours = linear_attention(q, k, v, sequences=sequences, impl="cpp", **options)
    assert ("fused" in ours.impl.reason) == (name != "identity")
    exact = torch.zeros_like(ours.out)
    for part in parts:
        at = slice(*part)
        own = (None if x is None else x[:, :, at] for x in (q, k, v, gates))
        *x, log_decay = own
        exact[:, :, at] = dense(*x, name, 0.3, weights, log_decay)
    assert_close(ours.out, exact, rtol=1e-11, atol=1e-11)
    d_out = torch.randn_like(exact)
    grads = [torch.autograd.grad((x * d_out).sum(), leaves) for x in (ours.out, exact)]
    assert_close(*grads, rtol=1e-9, atol=1e-11)


def test_equal_largest_exponents_share_their_gradient():
    q = torch.zeros(1, 1, 20, D, dtype=torch.float64)
    q[..., 3], q[..., 7] = 2, 2
    k, v = (torch.rand(1, 1, 20, D, dtype=torch.float64) for _ in range(2))
    x = [y.requires_grad_() for y in (q, k, v)]
    options = {"feature_map": "exp", "feature_scale": 0.5}  # not normalised, so the maximum matters
    grads = [
        torch.autograd.grad(linear_attention(*x, impl=impl, **options).out.sum(), x)
        for impl in ("cpp", "reference")
    ]
    assert_close(*grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("name", ["hedgehog", "hedgehog_exp"])
def test_gradients_of_weights_do_not_depend_on_frozen_inputs(name, window):
    """The kernels skip gradients that no input needs; the others are bitwise equal."""
    torch.manual_seed(3)
    x = [torch.randn(B, n, 40, m) for n, m in ((H, D), (HKV, D), (HKV, E))]
    weights = make_weights(name, dtype=torch.float32)
    x += [y for y in weights if y is not None]

    def gradients(needed):
        q, k, v, *rest = (
            y.detach().requires_grad_(bool(n)) for y, n in zip(x, needed, strict=True)
        )
        maps, options = MapWeights(*rest), {"feature_map": name}
        if window is None:
            out = linear_attention(q, k, v, map_weights=maps, normalize=True, **options).out
        else:
            branch = LinearBranch(q, k, torch.zeros(()), map_weights=maps, **options)
            out = hybrid_attention(q, k, v, branch, window=window, scale=0.3).out
        out.square().sum().backward()
        return [y.grad for y in (q, k, v, *rest)]

    of_all_inputs = gradients([True] * len(x))
    count = len(x) - 3
    cases = ((0, 0, 0, *[1] * count), (0, 1, 0, *[0] * count), (1, 0, 0, 0, *[1] * (count - 1)))
    for needed in cases:
        for found, expected, need in zip(gradients(needed), of_all_inputs, needed, strict=True):
            assert torch.equal(found, expected) if need else found is None


@pytest.mark.parametrize("name", ["hedgehog", "hedgehog_exp"])
def test_gradients_of_weights_are_sums_over_sequences(name):
    """Of short ones that begin close to each other, and of several spans of a long one."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1400, m).double() for n, m in ((H, D), (HKV, D), (HKV, E)))
    weights = MapWeights(*(None if x is None else x.requires_grad_() for x in make_weights(name)))
    leaves = [x for x in weights if x is not None]
    sequences = make_sequences(1400, ((0, 70), (70, 100), (130, 1300), (1300, 1301), (1310, 1399)))
    options = {"sequences": sequences, "feature_map": name, "map_weights": weights}
    options |= {"normalize": True}
    found = linear_attention(q, k, v, impl="cpp", **options).out
    exact, *_ = run_alone(q, k, v, **options)
    assert_close(found, exact, rtol=1e-11, atol=1e-11)
    grads = (torch.autograd.grad(x.square().sum(), leaves) for x in (found, exact))
    assert_close(*grads, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["elu+1", "hedgehog"])
def test_results_do_not_depend_on_the_number_of_threads(name, packed):
    """Threads divide the five spans of 2100 tokens, and the 32 key channels of elu+1."""
    q, k, v = (torch.randn(1, n, 2100, 32) for n in (2, 1, 1))
    sequences = make_sequences(2100) if packed else None
    weights = MapWeights(torch.randn(2, 32, 32), torch.randn(1, 32, 32))
    learned = name == "hedgehog"
    leaves = [x.requires_grad_() for x in (q, k, v, *(weights[:2] if learned else ()))]
    options = {"feature_map": name, "map_weights": weights if learned else None}
    options["sequences"] = sequences
    num_threads, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = linear_attention(*leaves[:3], **options, normalize=True, impl="cpp").out
            found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    finally:
        torch.set_num_threads(num_threads)
    assert all(
        torch.equal(x, y) for other in found[1:] for x, y in zip(other, found[0], strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["elu+1", "hedgehog_exp"])
def test_16_bit_results_equal_those_in_float32_rounded_once(name, dtype):
    weights = make_weights(name, dtype=torch.float32)
    x = [torch.randn(B, n, 40, m).to(dtype) for n, m in ((H, D), (HKV, D), (HKV, E))]
    options = {"feature_map": name, "map_weights": weights, "normalize": True, "impl": "cpp"}
    results = []
    for leaves in (x, [y.float() for y in x]):
        leaves = [y.requires_grad_() for y in leaves]
        out = linear_attention(*leaves, **options).out
        d_out = torch.ones_like(out)
        results.append((out, *torch.autograd.grad(out, leaves, d_out)))
    for ours, wide in zip(*results, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, wide.to(dtype))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", ["exp", "hedgehog", "hedgehog_exp"])
def test_a_window_hybrid_with_a_map_equals_that_of_computed_features(name, packed):
    """In one call with gradients of inputs and weights, and in three parts with a state."""
    torch.manual_seed(0)
    tokens, weights = 60, make_weights(name)
    batch, sequences = B, None
    if packed:
        batch, sequences = 1, make_sequences(tokens, ((0, 9), (9, 9), (10, 30), (30, 59)))
    q, k, v = (
        torch.randn(batch, n, tokens, m, dtype=torch.float64)
        for n, m in ((H, D), (HKV, D), (HKV, E))
    )
    leaves = [x.requires_grad_() for x in (q, k, v, *(weights or ())) if x is not None]
    log_weight = torch.randn(1, H, 1, 1, dtype=torch.float64)
    decay = -torch.rand(batch, HKV, tokens, dtype=torch.float64)

    def run(impl, start, stop, state):
        at = slice(start, stop)
        maps = {"feature_map": name, "feature_scale": 0.3, "map_weights": weights}
        branch = LinearBranch(
            q[:, :, at], k[:, :, at], log_weight, decay[:, :, at], mean=True, **maps
        )
        if impl == "torch":
            q_weight, k_weight, q_bias, k_bias = weights or (None,) * 4
            branch = LinearBranch(
                features(q, name, 0.3, q_weight, q_bias)[:, :, at],
                features(k, name, 0.3, k_weight, k_bias, of_keys=True)[:, :, at],
                *(log_weight, decay[:, :, at]),
                mean=True,
            )
        inputs = q[:, :, at], k[:, :, at], v[:, :, at]
        options = {"window": 7, "scale": 0.3, "state": state, "return_state": True, "impl": impl}
        return hybrid_attention(*inputs, branch, sequences=sequences, **options)

    exact, ours = (run(impl, 0, tokens, None) for impl in ("torch", "cpp"))
    assert ours.impl.impl == "cpp"
    assert_close(ours.out, exact.out, rtol=1e-10, atol=1e-10)
    assert_close(tuple(ours.state), tuple(exact.state), rtol=1e-10, atol=1e-10)
    d_out = torch.randn_like(exact.out)
    grads = [torch.autograd.grad((x.out * d_out).sum(), leaves) for x in (ours, exact)]
    assert_close(*grads, rtol=1e-8, atol=1e-10)
    if packed:
        return
    state, outs = None, []
    for start, stop in ((0, 3), (3, 25), (25, tokens)):
        piece = run("cpp", start, stop, state)
        state = piece.state
        outs.append(piece.out)
    assert_close(torch.cat(outs, 2), exact.out, rtol=1e-10, atol=1e-10)
    assert_close(tuple(state), tuple(exact.state), rtol=1e-10, atol=1e-10)


def test_maps_with_hooks_and_subclasses_of_maps_are_not_fused():
    geometry = Geometry(num_heads=2, num_key_heads=1, head_dim=16)
    x = [torch.randn(1, n, 20, 16) for n in (2, 1, 1)]
    for window in (None, 5):
        backend = build_backend("linear", {"feature_map": "hedgehog", "window": window}, geometry)
        calls = []
        out = backend(*x).out
        assert backend.fused_feature_map() == "hedgehog"
        backend.feature_map.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        assert_close(backend(*x).out, out)
        assert len(calls) == 2

    class Own(get_feature_map("hedgehog")):
        """A map with other features."""

    assert Own.fused == ""


def test_weights_that_do_not_fit_the_map_are_refused():
    x = torch.rand(1, 1, 20, 16)
    weights = MapWeights(torch.rand(1, 16, 16), torch.rand(1, 16, 16))
    with pytest.raises(UnsupportedError, match="'hedgehog' needs map_weights"):
        linear_attention(x, x, x, feature_map="hedgehog")
    with pytest.raises(UnsupportedError, match="'relu' has no weights"):
        linear_attention(x, x, x, feature_map="relu", map_weights=weights)
