"""block_sparse_attention against its definition, softmax attention, and itself in pieces."""

from itertools import product

import pytest
import torch
from torch.testing import assert_close

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.ops.block_sparse.api import block_sparse_attention
from attnzoo.ops.block_sparse.cpu.block_sparse import BLOCK_SPARSE, best_blocks
from attnzoo.ops.block_sparse.selection import (
    MEAN,
    NO_BLOCK,
    _best,
    candidates,
    first_positions,
    select_blocks,
    summarize,
)
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.ops.window import flex
from attnzoo.runtime import cpp, first_call
from tests.helpers import draw, qkv
from tests.ops.flex_on_cpu import flex_on_cpu

NO_KERNEL = cpp.unavailable_reason(BLOCK_SPARSE)
CPP = pytest.param("cpp", marks=pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL))
SIZES = [  # window, first tokens, selected blocks, block size
    {"window": 5, "num_sinks": 2, "top_k": 3, "block_size": 4},
    {"window": 1, "num_sinks": 5, "top_k": 2, "block_size": 8},
    {"window": 8, "num_sinks": 0, "top_k": 100, "block_size": 2},
    {"window": 2, "num_sinks": 3, "top_k": 0, "block_size": 4},
]
SELECTIONS = [
    {},
    {"score": "mean", "coverage": 0.5, "query_block": 3},
    {"score": "bounds", "per_key_head": True},
    {"coverage": 0.7, "query_block": 4, "per_key_head": True},
]


def with_gradients(inputs, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = block_sparse_attention(*leaves, **options).out
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize(
    ("causal", "dtype"), [(True, torch.bfloat16), (False, torch.float16)], ids=str
)
@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_16_bit_tensors_select_as_the_same_numbers_in_float64(selection, causal, dtype):
    """Another block changes an output by 2% and more; rounding by half of eps, below 0.4%."""
    inputs = [x.to(dtype) for x in qkv(120)]
    options = {"mask": AttentionMask(causal=causal), "window": 8, "top_k": 3, "block_size": 4}
    options = {**options, **selection, "num_sinks": 1}
    exact = block_sparse_attention(*(x.double() for x in inputs), impl="reference", **options).out
    for impl in ("torch",) if NO_KERNEL else ("torch", "cpp"):
        found = block_sparse_attention(*inputs, impl=impl, **options).out
        assert found.dtype is dtype
        row_error = (found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert row_error.max() < torch.finfo(dtype).eps


@pytest.mark.parametrize("impl", ["torch", CPP])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_output_and_gradients_are_those_of_the_definition(selection, causal, impl):
    for sizes, (length, padded) in product(SIZES, ((1, False), (29, False), (29, True))):
        inputs = qkv(length)
        padding = torch.rand(2, length) < 0.7 if padded else None
        mask = AttentionMask(causal=causal, padding=padding)
        options = {"mask": mask, **sizes, **selection}
        expected = with_gradients(inputs, impl="reference", **options)
        for ours, right in zip(with_gradients(inputs, impl=impl, **options), expected, strict=True):
            assert_close(ours, right, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("selection", [*SELECTIONS, {"score": "indexer"}], ids=str)
def test_flex_computes_the_definition(selection, causal, monkeypatch):
    monkeypatch.setattr(flex, "flex_reasons", lambda *x: [])  # float64, narrow heads
    inputs = qkv(61)
    padding = torch.arange(61) % 7 != torch.tensor([[7], [3]])
    options = {"mask": AttentionMask(causal=causal, padding=padding), **SIZES[0], **selection}
    if selection == {"score": "indexer"}:
        options["index"] = draw(2, 3, 61, 5), draw(2, 1, 61, 5), draw(2, 3, 61)
    expected = with_gradients(inputs, impl="reference", **options)
    with flex_on_cpu(monkeypatch) as masks:
        found = with_gradients(inputs, impl="flex", **options)
    for ours, right in zip(found, expected, strict=True):
        assert_close(ours, right, atol=1e-9, rtol=1e-9)
    assert masks[0].sparsity() > (44 if causal else 3)  # percent of the blocks of 8


def test_flex_continues_from_a_state(monkeypatch):
    inputs, options = [x.float() for x in qkv(61, sizes=(16, 16))], {**SIZES[0], "query_block": 3}
    options["mask"] = AttentionMask(causal=True)
    whole = block_sparse_attention(*inputs, impl="torch", **options).out
    state = block_sparse_attention(*(x[:, :, :40] for x in inputs), return_state=True, **options)
    with flex_on_cpu(monkeypatch):
        monkeypatch.setitem(first_call._FOUND, ("FlexAttention", "", torch.device("cpu")), ("", ""))
        later = [x[:, :, 40:] for x in inputs]
        found = block_sparse_attention(*later, state=state.state, **options)
        assert found.impl.impl == "flex"
        assert_close(found.out, whole[:, :, 40:], atol=1e-5, rtol=1e-5)
        one = [x[:, :, 40:41] for x in inputs]
        assert block_sparse_attention(*one, state=state.state, **options).impl.impl != "flex"
        monkeypatch.setattr("attnzoo.ops.block_sparse.flex.LARGEST_TABLE", 100)
        with pytest.raises(UnsupportedError, match="table of selected blocks has 7808 entries"):
            block_sparse_attention(*inputs, impl="flex", **SIZES[0])


@pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_cpp_computes_what_torch_does(block_size, causal):
    """Over several tiles and panels, with rows of several lengths; also in float32."""
    inputs = qkv(400)
    padding = torch.arange(400) >= torch.tensor([[0], [77]])
    mask = AttentionMask(causal=causal, padding=padding)
    options = {"mask": mask, "block_size": block_size, "top_k": 3, "num_sinks": 5}
    ours, right = (with_gradients(inputs, impl=impl, **options) for impl in ("cpp", "torch"))
    for mine, expected in zip(ours, right, strict=True):
        assert_close(mine, expected, atol=1e-9, rtol=1e-9)
    narrow = [x.float() for x in inputs]
    torch_error, error = (
        (with_gradients(narrow, impl=impl, **options)[0] - right[0]).abs().max()
        for impl in ("torch", "cpp")
    )
    assert error <= 2 * torch_error + 1e-6


@pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL)
def test_the_kernel_selects_as_torch_does():
    """With ties, negative zeros and infinities, and fewer candidates than blocks to select."""
    scores = torch.randint(-3, 4, (2, 3, 90, 90)).float() * torch.tensor([1.0, -1.0]).repeat(45)
    scores[..., 5] = -0.0
    scores[:, 1, :, 20:40] *= 2.0**125  # infinite
    unit = torch.eye(90).expand(2, 3, 90, 90)  # queries whose products with summaries are scores
    for kept in (1, 9, 40, 90):
        call = call_of(unit, unit, unit, block_size=1, top_k=kept, window=3, num_sinks=2)
        allowed = candidates(call, first_positions(call))
        right = _best(scores, allowed, call, kept)
        ours = best_blocks(unit[:, :, None], scores.mT, allowed, call)
        assert torch.equal(ours, right)


@pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL)
@pytest.mark.parametrize("score", ["mean", "moments", "bounds", "indexer"])
def test_the_kernel_scores_as_torch_does(score):
    """Several heads per key head, rows of several lengths, and both directions."""
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, h, 300, 24, generator=draw) for h in (4, 2))
    lengths = torch.tensor([300, 170])
    for causal in (True, False):
        for per_key_head in (True, False) if score != "indexer" else (False,):
            options = {"causal": causal, "per_key_head": per_key_head, "score": score}
            call = call_of(q, k, k, block_size=4, top_k=6, window=9, **options)
            call = call._replace(lengths=lengths, counts=lengths)
            if score == "indexer":  # of three heads, some of whose weights are negative
                index_q, index_k = (
                    torch.randn(2, *x, generator=draw) for x in ((3, 300, 9), (1, 300, 8))
                )
                summary = summarize(index_k, lengths, call.options, MEAN)
                call = call._replace(index_q=index_q, summary=summary)
            ours, right = (select_blocks(call, best) for best in (best_blocks, None))
            assert torch.equal(ours, right)


def test_the_definition_query_by_query():
    """Written out for causal attention with one head, without the code of the reference."""
    q, k, v = qkv(37, batch=1, heads=(1, 1))
    window, sinks, top_k, size, scale = 5, 3, 2, 4, 0.3
    out = block_sparse_attention(
        q,
        k,
        v,
        mask=AttentionMask(causal=True),
        window=window,
        num_sinks=sinks,
        top_k=top_k,
        block_size=size,
        scale=scale,
        impl="reference",
    ).out[0, 0]
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    for t in range(37):
        begin = max(t - window + 1, 0) // size * size
        seen = {*range(begin, t + 1), *range(min(sinks, t + 1))}
        scores = {}
        for j in range(begin // size):
            block = k[j * size : (j + 1) * size]
            logits = [float(q[t] @ key) * scale for key in block]
            spread = sum(
                float(q[t, d] * scale) ** 2 * float(block[:, d].var(unbiased=False)) / 2
                for d in range(8)
            )
            scores[j] = sum(logits) / size + spread
        best = sorted(scores, key=lambda j: -scores[j])  # the sort is stable
        best = [j for j in best if (j + 1) * size > sinks][:top_k]
        seen |= {j * size + i for j in best for i in range(size)}
        index = torch.tensor(sorted(seen))
        weights = (k[index] @ q[t] * scale).softmax(0)
        assert_close(out[t], weights @ v[index])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("query_block", [1, 3])
def test_all_blocks_are_softmax_attention(causal, query_block):
    q, k, v = qkv(45)
    options = {"window": 2, "top_k": 45, "block_size": 3, "query_block": query_block}
    mask = AttentionMask(causal=causal)
    ours = block_sparse_attention(q, k, v, mask=mask, **options).out
    assert_close(ours, softmax_attention(q, k, v, mask=mask.dense(45, 45, q.device)).out)


def call_of(q, k, v, **options):
    """Return the selection ``[B, A, M, K]`` of a causal call."""
    from attnzoo.ops.block_sparse import options as inputs

    per_key_head, score = options.pop("per_key_head", False), options.pop("score", "mean")
    sizes = {"causal": True, "window": 1, "num_sinks": 0, "query_block": 1, **options}
    selection = inputs.SelectionOptions(score, None, per_key_head)
    return inputs.SparseCall(
        q, k, v, None, None, None, None, 1.0, inputs.SparseOptions(**sizes), selection
    )


def test_ties_go_to_the_earlier_block():
    q, k, v = torch.ones(1, 1, 24, 4), torch.ones(1, 1, 24, 4), torch.ones(1, 1, 24, 4)
    k[:, :, 8:12] = 2  # block 2 is better than the equal ones
    selected = select_blocks(call_of(q, k, v, block_size=4, top_k=3))
    assert selected[0, 0, 23].tolist() == [0, 1, 2]
    assert selected[0, 0, 11].tolist() == [0, 1, NO_BLOCK]
    assert selected[0, 0, 3].tolist() == [NO_BLOCK] * 3


def test_coverage_selects_as_few_blocks_as_have_the_weight():
    q, k, v = torch.ones(1, 1, 24, 1), torch.zeros(1, 1, 24, 1), torch.ones(1, 1, 24, 1)
    for block, weight in enumerate((1.0, 4.0, 2.0, 1.0)):
        k[:, :, 4 * block : 4 * block + 4] = torch.tensor(weight).log()
    call = call_of(q, k, v, block_size=4, top_k=4)
    for coverage, blocks in ((0.4, [1]), (0.6, [1, 2]), (0.8, [0, 1, 2]), (1.0, [0, 1, 2, 3])):
        given = call._replace(selection=call.selection._replace(coverage=coverage))
        assert [j for j in select_blocks(given)[0, 0, 19].tolist() if j != NO_BLOCK] == blocks


def test_moments_estimate_the_weight_of_a_block():
    """For normal keys, the estimate is exact up to sampling; the mean alone is far below."""
    torch.manual_seed(0)
    k, q = 0.5 * torch.randn(1, 1, 4096, 16, dtype=torch.float64), torch.ones(16).double()
    call = call_of(k, k, k, block_size=4096, top_k=1)
    call = call._replace(selection=call.selection._replace(score="moments"))
    mean, variance = summarize(k, None, call.options, call.selection)[0, 0, 0].split(16)
    exact = (k[0, 0] @ q).exp().mean().log()
    estimate = q @ mean + (q.square() * variance).sum() / 2
    assert abs(float(estimate - exact)) < 0.2
    assert float(exact - q @ mean) > 1.5


def run_in_pieces(inputs, cuts, padding=None, **options):
    """Return the output of calls that continue from each other's state."""
    outs, state, length = [], None, inputs[0].shape[2]
    for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
        part = None if padding is None else padding[:, start:stop]
        mask = AttentionMask(causal=True, padding=part)
        piece = [x[:, :, start:stop] for x in inputs]
        output = block_sparse_attention(
            *piece, mask=mask, state=state, return_state=True, **options
        )
        state = output.state
        outs.append(output.out)
    return torch.cat(outs, 2), state


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_calls_from_a_state_equal_one_pass(selection):
    inputs, sizes = qkv(41), {**SIZES[0], **selection}
    padding = torch.rand(2, 41) < 0.7
    for given in (None, padding):
        mask = AttentionMask(causal=True, padding=given)
        whole = block_sparse_attention(*inputs, mask=mask, **sizes).out
        for cuts in ((1, 2, 3, 20), (17, 30), tuple(range(20, 41))):
            ours, state = run_in_pieces(inputs, cuts, given, **sizes)
            assert_close(ours, whole, atol=1e-9, rtol=1e-9)
            lengths = torch.tensor([41, 41]) if given is None else given.sum(1)
            assert torch.equal(state.length, lengths)


def test_a_long_decode_merges_its_recent_keys(monkeypatch):
    monkeypatch.setattr("attnzoo.ops.block_sparse.selection.MAX_RECENT", 5)
    inputs = qkv(40)
    whole = block_sparse_attention(*inputs, mask=AttentionMask(causal=True), **SIZES[0]).out
    ours, state = run_in_pieces(inputs, tuple(range(7, 40)), **SIZES[0])
    assert_close(ours, whole, atol=1e-9, rtol=1e-9)
    assert state.recent_k.shape[2] < 5


def test_one_token_reads_the_selected_blocks_only():
    """Keys that the token does not attend to are NaN, and its output is unchanged."""
    q, k, v = qkv(400, batch=1)
    _, state = run_in_pieces([x[:, :, :399] for x in (q, k, v)], (), **SIZES[0])
    token = [x[:, :, 399:] for x in (q, k, v)]
    options = {"mask": AttentionMask(causal=True), "state": state, **SIZES[0]}
    output = block_sparse_attention(*token, **options)
    assert output.impl.impl == "torch"
    assert "100 blocks and reads at most 3" in output.impl.reason
    weights = block_sparse_attention(
        q,
        k,
        torch.eye(400).double().expand(1, 2, -1, -1),
        mask=AttentionMask(causal=True),
        **SIZES[0],
    ).out[:, :, 399]
    unread = (weights == 0).all(1)[:, None, :399, None]
    assert int(unread.sum()) > 340
    read = state._replace(k=state.k.masked_fill(unread, torch.nan))
    assert torch.equal(block_sparse_attention(*token, **{**options, "state": read}).out, output.out)


def test_fewer_queries_than_keys():
    q, k, v = qkv(30)
    options = SIZES[0]
    whole = block_sparse_attention(q, k, v, mask=AttentionMask(causal=True), **options).out
    part = block_sparse_attention(
        q[:, :, 20:24], k, v, mask=AttentionMask(causal=True, q_offset=20), **options
    ).out
    assert_close(part, whole[:, :, 20:24])


def test_queries_of_16_bits_are_averaged_in_float32():
    """A query block of a bidirectional layer selects by the mean of its 32 queries."""
    inputs = [x.bfloat16() for x in qkv(256)]
    options = {"causal": False, "query_block": 32, "block_size": 4, "top_k": 8, "window": 4}
    selected = [
        select_blocks(call_of(*(x.to(dtype) for x in inputs), **options))
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert torch.equal(*selected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer from 1"),
        ({"top_k": -1}, "top_k must be an integer from 0"),
        (
            {"score": "exact"},
            "score must be 'mean' or 'moments' or 'bounds' or 'indexer', got 'exact'",
        ),
        ({"coverage": 0.0}, "coverage must be above 0 and at most 1, got 0.0"),
        ({"coverage": 0.5, "score": "bounds"}, "does not estimate the weight"),
        ({"impl": "triton"}, "has no impl 'triton'"),
        ({"mask": AttentionMask(window=(2, 2))}, r"the mask is a sliding window of \(2, 2\)"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(UnsupportedError, match=message):
        block_sparse_attention(*qkv(9), **options)


def test_lengths_that_are_refused():
    q, k, v = qkv(9)
    with pytest.raises(UnsupportedError, match="4 queries and 9 keys are given; fewer queries"):
        block_sparse_attention(q[:, :, 5:], k, v)
    mask = AttentionMask(causal=True, q_offset=5)
    with pytest.raises(UnsupportedError, match="the first query of a query block selects"):
        block_sparse_attention(q[:, :, 5:], k, v, mask=mask, query_block=2)
    with pytest.raises(UnsupportedError, match="q_offset is 7; it must be between 0 and 5"):
        block_sparse_attention(q[:, :, 5:], k, v, mask=AttentionMask(causal=True, q_offset=7))
    state = run_in_pieces((q, k, v), ())[1]
    with pytest.raises(UnsupportedError, match="with a state; it needs a causal mask"):
        block_sparse_attention(q, k, v, state=state)
