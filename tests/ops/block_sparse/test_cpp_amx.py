"""block_sparse_attention of bfloat16 tensors in C++, whose products are computed on AMX tiles."""

import pytest
import torch

from attnzoo.ops.block_sparse import custom_ops
from attnzoo.ops.block_sparse.cpu import block_sparse as cpp
from attnzoo.ops.block_sparse.options import SelectionOptions, SparseCall, SparseOptions
from attnzoo.ops.block_sparse.selection import MEAN, select_blocks, summarize
from tests.helpers import assert_within, draw, emulate_amx, gradients

NO_AMX = "" if cpp.has_amx() else "this CPU has no AMX, or the kernel cannot be compiled"
needs_amx = pytest.mark.skipif(bool(NO_AMX), reason=NO_AMX)
CASES = {
    "blocks of 8": {},
    "blocks of 1": {"block_size": 1},
    "blocks of 4, sinks within a block": {"block_size": 4, "num_sinks": 7},
    "blocks of 32": {"block_size": 32, "top_k": 2},
    "blocks of 64": {"block_size": 64, "top_k": 1, "length": 300, "num_sinks": 80},
    "sizes of models": {"sizes": (64, 128), "heads": (2, 2), "num_sinks": 0},
    "a window of several parts": {"window": 150, "length": 260, "num_sinks": 40},
    "shared selections": {"query_block": 3, "window": 9},
    "fewer queries than keys": {"keys": 200, "length": 37},
    "one query": {"keys": 50, "length": 1},
    "bidirectional": {"causal": False},
    "bidirectional, more sinks than window": {"causal": False, "num_sinks": 90, "window": 3},
    "padding": {"lengths": (141, 64), "counts": (141, 64)},
    "bidirectional padding": {"causal": False, "lengths": (33, 141), "counts": (33, 141)},
    "a row of padding": {"lengths": (141, 0), "counts": (141, 0)},
    "values of mean 1": {"mean": 1.0, "sizes": (64, 64)},
}
EMULATED = """
from tests.ops.block_sparse import test_cpp_amx as tests
assert tests.cpp.has_amx()
for name in ("blocks of 8", "blocks of 32", "padding", "bidirectional padding"):
    tests.check(**tests.CASES[name])
tests.check_selection(score="moments", causal=True)
"""


def inputs_of(
    length=141, keys=None, *, heads=(4, 2), sizes=(24, 20), lengths=None, counts=None, mean=0.0,
    causal=True, window=20, num_sinks=3, top_k=4, block_size=8, query_block=1,
):  # fmt: skip
    """Return q, k, v in bfloat16, and the other arguments of the operator."""
    torch.manual_seed(1)
    keys = length if keys is None else keys
    q, k, v = (
        draw(2, count, tokens, size, dtype=torch.bfloat16)
        for count, tokens, size in (
            (heads[0], length, sizes[0]),
            (heads[1], keys, sizes[0]),
            (heads[1], keys, sizes[1]),
        )
    )
    lengths, counts = (None if x is None else torch.tensor(x) for x in (lengths, counts))
    options = SparseOptions(causal, window, num_sinks, top_k, block_size, query_block)
    call = SparseCall(
        q, k, v + mean, lengths, counts, None, None, 0.3, options,
        SelectionOptions("moments", None, False),
    )  # fmt: skip
    rest = select_blocks(call), lengths, counts, 0.3, [int(option) for option in options]
    return [q, k, v + mean], rest


def with_gradients(tensors, rest, impl):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = getattr(custom_ops, impl.upper()).forward(*leaves, *rest)[0]
    return [out.detach(), *gradients([out], leaves)]


def check(**options):
    """Compare with float64, in which the torch implementation attends to the same blocks."""
    tensors, rest = inputs_of(**options)
    exact = with_gradients([x.double() for x in tensors], rest, "torch")
    plain, ours = (with_gradients(tensors, rest, impl) for impl in ("torch", "cpp"))
    for mine, theirs, right in zip(ours, plain, exact, strict=True):
        assert mine.dtype is torch.bfloat16
        assert_within(mine, theirs, right, torch.finfo(torch.bfloat16).eps / 8)


@needs_amx
@pytest.mark.parametrize("name", CASES)
def test_errors_are_those_of_rounding(name):
    check(**CASES[name])


def test_the_algorithm_without_amx(fresh_python, tmp_path):
    if reason := cpp.cpp.unavailable_reason(cpp.BLOCK_SPARSE):
        pytest.skip(reason)
    result = fresh_python(EMULATED, environment=emulate_amx(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr


def check_selection(score, causal, per_key_head=False):
    """Compare selections, of which ties between scores that differ by 2^-16 may decide some."""
    draws = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, h, 300, 24, generator=draws).bfloat16() for h in (4, 2))
    lengths = torch.tensor([300, 170])
    options = SparseOptions(causal, 9, 2, 6, 4, 1)
    selection = SelectionOptions(score, None, per_key_head)
    call = SparseCall(q, k, k, lengths, lengths, None, None, 0.2, options, selection)
    if score == "indexer":
        index_q, index_k = (
            torch.randn(2, *x, generator=draws).bfloat16() for x in ((3, 300, 9), (1, 300, 8))
        )
        summary = summarize(index_k, lengths, options, MEAN)
        call = call._replace(index_q=index_q, summary=summary)
    ours, right = (select_blocks(call, best) for best in (cpp.best_blocks, None))
    assert (ours != right).any(3).float().mean() < 0.002


@needs_amx
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("score", ["mean", "moments", "bounds", "indexer"])
def test_selected_blocks_are_those_of_float32(score, causal):
    check_selection(score, causal)
    if score != "indexer":
        check_selection(score, causal, per_key_head=True)


@needs_amx
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_keys_that_a_query_does_not_attend_to_change_no_bit(bad):
    tensors, rest = inputs_of(lengths=(141, 64), counts=(141, 64))
    expected = with_gradients(tensors, rest, "cpp")
    padded = [x.clone() for x in tensors]
    for x in padded[1:]:
        x[1, :, :-64] = bad
    for mine, right in zip(with_gradients(padded, rest, "cpp"), expected, strict=True):
        assert torch.equal(mine, right)
    for later in (100, 125):  # in the middle of a block
        given = [x.clone() for x in tensors]
        for x in given[1:]:
            x[0, :, later] = bad
        out, dq, *_ = with_gradients(given, rest, "cpp")
        for mine, right in ((out, expected[0]), (dq, expected[1])):
            assert torch.equal(mine[0, :, :later], right[0, :, :later])
            assert torch.equal(mine[1], right[1])
            assert mine[0, :, later].isnan().any()


@needs_amx
def test_results_do_not_depend_on_the_number_of_threads():
    tensors, rest = inputs_of(length=300)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(with_gradients(tensors, rest, "cpp"))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))
