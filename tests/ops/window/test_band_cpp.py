"""The C++ kernel of banded softmax against a dense formula: output, log-sum-exp and gradients."""

from itertools import product

import pytest
import torch

from attnzoo.ops.window.band import LocalOptions
from attnzoo.ops.window.cpu.band import (
    BAND,
    OutsideSums,
    band_attention_cpp,
    band_softmax_cpp_backward,
)
from attnzoo.ops.window.pattern import Band, global_indices
from attnzoo.runtime import cpp

pytestmark = pytest.mark.skipif(
    bool(cpp.unavailable_reason(BAND)), reason=cpp.unavailable_reason(BAND)
)
B, HKV, GROUPS, S, D, E = 2, 2, 2, 150, 8, 6


def draw(*shape):
    """Return random numbers in storage that continues with NaN."""
    x = torch.randn(shape, dtype=torch.float64)
    return torch.cat([x.flatten(), torch.full((999,), torch.nan)])[: x.numel()].view(shape)


def dense(q, k, v, x: LocalOptions, offset: int):
    """Return output, log-sum-exp (0 for a query without keys) and which queries have keys."""
    queries, keys = torch.arange(q.shape[2])[:, None] + offset, torch.arange(k.shape[2])
    distance, (before, after, step) = queries - keys, x.band
    seen = (distance <= before * step) & (distance >= -after * step) & (distance % step == 0)
    seen = seen.expand(len(q), -1, -1)
    if x.segment_ids is not None:
        seen = seen & (x.segment_ids[:, queries[:, 0], None] == x.segment_ids[:, None])
    if x.key_mask is not None:
        seen = seen & x.key_mask[:, None]
    if x.global_indices is not None:
        is_global = torch.zeros(len(q), k.shape[2]).bool().scatter(1, *x.global_indices)[:, None]
        seen = seen | (is_global & (queries >= keys) if x.causal else is_global)
    k, v = (y.repeat_interleave(GROUPS, 1) for y in (k, v))
    scores = (q @ k.mT * x.scale).masked_fill(~seen[:, None], -torch.inf)
    has_keys = seen.any(-1)[:, None, :, None]
    lse = scores.logsumexp(-1, keepdim=True).masked_fill(~has_keys, 0)
    return (scores - lse).exp() @ v, lse * has_keys, has_keys


BANDS = {  # before, after, dilation, position of the first query
    "causal": (40, 0, 1, 0),
    "one key": (0, 0, 1, 0),
    "both sides": (33, 70, 1, 0),
    "continuing": (20, 0, 1, 67),
    "dilated": (9, 4, 3, 0),
    "dilated and continuing": (5, 0, 4, 50),
    "all keys": (S, S, 1, 0),
    "phases of one token": (3, 3, S + 5, 0),
}
MASKS = ["none", "keys", "segments", "globals"]


def inputs(band, mask):
    """Return q, k and v, the options of the call, the position of query 0, d_out and d_lse."""
    torch.manual_seed(4)
    before, after, step, offset = BANDS[band]
    q, k, v = draw(B, HKV * GROUPS, S - offset, D), draw(B, S, HKV, D), draw(B, HKV, S, E)
    k = k.transpose(1, 2)  # strided
    key_mask = ids = indices = None
    if mask in ("keys", "globals"):
        key_mask = torch.rand(B, S) > 0.3
        key_mask[1, 60:140] = False  # some queries see no key
    if mask == "segments":
        ids = (torch.rand(B, S) > 0.9).long().cumsum(1)
    if mask == "globals":
        is_global = torch.rand(B, S) < torch.tensor([[0.1], [0.03]])
        indices, key_mask = global_indices(is_global), key_mask & ~is_global
    x = LocalOptions(Band(before, after, step), after == 0, 0.3, key_mask, indices, ids, True)
    d_out, d_lse = draw(B, HKV * GROUPS, S - offset, E), draw(B, HKV * GROUPS, S - offset, 1)
    return (q, k, v), x, offset, d_out, d_lse


def hide(leaves, x):
    """Return new leaves, in which keys and values that ``key_mask`` hides are NaN."""
    hidden = torch.zeros(()).bool() if x.key_mask is None else ~x.key_mask[:, None, :, None]
    if x.global_indices is not None:  # they are hidden from the band alone
        hidden = torch.zeros(()).bool()
    q, *others = (y.detach() for y in leaves)
    return [y.requires_grad_() for y in (q, *(y.masked_fill(hidden, torch.nan) for y in others))]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("band", BANDS)
def test_equals_the_dense_formula(band, mask):
    leaves, x, offset, d_out, d_lse = inputs(band, mask)
    leaves = [y.detach().requires_grad_() for y in leaves]
    out, lse, has_keys = dense(*leaves, x, offset)
    expected = torch.autograd.grad((out * d_out).sum() + (lse * d_lse).sum(), leaves)
    leaves = hide(leaves, x)
    found, found_lse = band_attention_cpp(*leaves, x, offset)
    torch.testing.assert_close(found, out)
    torch.testing.assert_close(found_lse * has_keys, lse)
    assert found_lse.isfinite().all()
    total = (found * d_out).sum() + (found_lse * has_keys * d_lse).sum()
    torch.testing.assert_close(torch.autograd.grad(total, leaves), expected)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("band", BANDS)
def test_bfloat16_is_as_accurate_as_the_dense_formula(band, mask):
    """Errors are of all elements, relative to those of the dense formula in bfloat16."""
    leaves, x, offset, d_out, d_lse = inputs(band, mask)
    leaves = [y.bfloat16() for y in (*leaves[:2], leaves[2] + 5)]
    d_out, d_lse = d_out.bfloat16(), d_lse.bfloat16()
    results = []
    for dtype, ours in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        given = [y.to(dtype).requires_grad_() for y in leaves]
        out, lse, has_keys = dense(*given, x, offset)
        if ours:
            given = hide(given, x)
            out, lse = band_attention_cpp(*given, x, offset)
            out, lse = out.bfloat16(), lse * has_keys
        total = (out.double() * d_out).sum() + (lse.double() * d_lse).sum()
        results.append([y.double() for y in (out, lse, *torch.autograd.grad(total, given))])
    for exact, plain, found in zip(*results, strict=True):
        assert (found - exact).norm() <= 2 * (plain - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(("offset", "rows"), [(0, 90), (30, 120)])
def test_sums_outside_the_band_share_the_denominator(offset, rows, relative):
    torch.manual_seed(6)
    heads, queries = HKV * GROUPS, S - offset
    q, k, v = draw(B, heads, queries, D), draw(B, HKV, S, D), draw(B, HKV, S, E)
    options = LocalOptions(Band(9, 0, 1), True, 0.3)
    total = torch.rand(B, heads, rows, dtype=torch.float64) * 20
    total[:, :, ::7] = 0
    sums, logit = draw(B, heads, rows, E), draw(B, heads, queries)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sums, total, logit)]

    near, lse, _ = dense(*leaves[:3], options, offset)
    weights = torch.nn.functional.pad(leaves[4], (queries - rows, 0)).unsqueeze(3)
    values = torch.nn.functional.pad(leaves[3], (0, 0, queries - rows, 0)) * (weights > 0)
    near_weight = torch.ones_like(lse) if relative else lse.exp()
    factor = leaves[5].exp()[..., None]
    expected = (near_weight * near + factor * values) / (near_weight + factor * weights)

    outside = OutsideSums(*leaves[3:], relative)
    found, _ = band_attention_cpp(*leaves[:3], options, offset, outside)
    torch.testing.assert_close(found, expected)
    upstream = draw(*found.shape)
    right, ours = (torch.autograd.grad((x * upstream).sum(), leaves) for x in (expected, found))
    has_sums = total > 0  # where s is 0, u does not count
    right = [*right[:3], right[3] * has_sums[..., None], right[4] * has_sums, right[5]]
    torch.testing.assert_close(list(ours), right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_some_inputs_are_those_of_all(dtype):
    """The kernel skips what no input needs; other gradients keep their bits."""
    torch.manual_seed(7)
    heads, rows = HKV * GROUPS, S - 10
    x = [draw(B, n, S, m).to(dtype) for n, m in ((heads, D), (HKV, D), (HKV, E))]
    x += [y.float() for y in (draw(B, heads, rows, E), draw(B, heads, rows), draw(B, heads, S))]
    is_global = torch.rand(B, S) < 0.1
    options = LocalOptions(Band(9, 0, 1), True, 0.3, ~is_global, global_indices(is_global))
    d_out = draw(B, heads, S, E).float()

    def gradients(needed):
        leaves = [y.detach().requires_grad_(n) for y, n in zip(x, needed, strict=True)]
        out, lse = band_attention_cpp(
            *leaves[:3], options, outside=OutsideSums(*leaves[3:], relative=False)
        )
        ((out * d_out).sum() + lse.sum()).backward()
        return [y.grad for y in leaves]

    everything = gradients([True] * 6)
    for needed in product([False, True], repeat=4):
        if not any(needed):
            continue
        needed = (*needed, needed[3], needed[3])
        for found, expected, need in zip(gradients(needed), everything, needed, strict=True):
            assert torch.equal(found, expected) if need else found is None


def test_gradients_that_are_not_needed_have_no_elements():
    q, k, v = (draw(1, 2, 40, 16) for _ in range(3))
    out, lse = band_attention_cpp(q, k, v, LocalOptions(Band(9, 0, 1), True, 0.3))
    given = torch.ones_like(out), None, out, lse[..., 0], q, k, v, *[None] * 7, [9, 0, 1, 0, 1, 0]
    for needed in ([True, False, False], [False, True, True], [False] * 3):
        wanted = [*needed, *[False] * 7]
        found = band_softmax_cpp_backward(*given, 0.3, wanted)
        assert [x.numel() > 0 for x in found] == wanted
        torch.library.opcheck(band_softmax_cpp_backward, (*given, 0.3, wanted))


def test_threads_share_the_queries_of_a_head():
    torch.manual_seed(5)
    x = [draw(1, 1, S, D).requires_grad_() for _ in range(3)]
    options = LocalOptions(Band(20, 20, 2), False, 0.3)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            out = band_attention_cpp(*x, options)[0]
            results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(*results)


def test_large_scores_and_compiled_calls():
    x = [draw(1, 2, 40, 16).float() for _ in range(3)]
    options = LocalOptions(Band(9, 0, 1), True, 1e4)
    out, lse = band_attention_cpp(*x, options)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    compiled = torch.compile(band_attention_cpp, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*x, options)[0], out)


@pytest.mark.parametrize("scale", [1e6, 1e9, 1e15])
def test_large_scores_in_bfloat16_select_one_key(scale):
    """The weight of the largest score is 1, also where scores are rounded by more than 1."""
    x = [draw(1, heads, 200, 32).bfloat16().requires_grad_() for heads in (GROUPS, 1, 1)]
    options = LocalOptions(Band(200, 0, 1), True, scale)
    out, _ = band_attention_cpp(*x, options)
    expected, *_ = dense(*(y.double() for y in x), options, 0)
    first, second = (x[0] @ x[1].mT).float().tril().topk(2).values.unbind(-1)
    is_clear = first - second > 0.1 * first
    torch.testing.assert_close(out[is_clear], expected[is_clear].float())
    assert all(y.isfinite().all() for y in torch.autograd.grad(out.sum(), x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_of_16_bits_are_those_in_float32(dtype):
    options = LocalOptions(Band(9, 3, 1), False, 0.3)
    x = [draw(B, n, S, m).to(dtype) for n, m in ((4, D), (2, D), (2, E))]
    results = []
    for leaves in (x, [y.float() for y in x]):
        leaves = [y.detach().requires_grad_() for y in leaves]
        out, lse = band_attention_cpp(*leaves, options)
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
        results.append((out, lse, *(y.to(dtype) for y in grads)))
    assert all(map(torch.equal, *results))
