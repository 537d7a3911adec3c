"""Selection of key blocks and decoded tokens by the Triton kernels, against torch and float64.

They run on a GPU if there is one, else interpreted on the CPU.
"""

from itertools import product

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.ops.block_sparse.api import block_sparse_attention
from attnzoo.ops.block_sparse.options import SelectionOptions, SparseCall, SparseOptions
from attnzoo.ops.block_sparse.selection import MEAN, select_blocks, summarize
from attnzoo.ops.block_sparse.triton import check as check_triton
from attnzoo.ops.block_sparse.triton import run as module
from attnzoo.ops.block_sparse.triton import step
from attnzoo.ops.block_sparse.triton.check import wrong_selection, wrong_step, wrong_ties
from attnzoo.ops.block_sparse.triton.selection_launch import SelectionLauncher
from tests.helpers import change_implementation
from tests.kernel_device import float32_slack, kernel_device

DEVICE = kernel_device()
OPTIONS = SparseOptions(causal=True, window=3, num_sinks=2, top_k=3, block_size=4, query_block=1)


def integers(*shape):
    return torch.randint(-1, 2, shape, device=DEVICE).float()


def integer_call(name, causal):
    """Return a call all of whose scores are exact, so that many are equal."""
    score, coverage, shared, ragged, leader, sizes = CALLS[name]
    tokens, keys, heads, key_heads = 16, 23, 2, 1
    q, k = integers(2, heads, tokens, 8), integers(2, key_heads, keys, 8)
    lengths = counts = None
    if ragged:
        counts = torch.tensor([16, 9], device=DEVICE)
        lengths = counts + keys - tokens
    options = OPTIONS._replace(causal=causal, **sizes)
    selection = SelectionOptions(score, coverage, shared)
    call = SparseCall(q, k, k, lengths, counts, None, None, 1.0, options, selection)
    if score == "indexer":
        weights = torch.randint(1, 3, (2, 3, tokens, 1), device=DEVICE)
        index_q = torch.cat([integers(2, 3, tokens, 8), weights], 3)
        summary = summarize(integers(2, 1, keys, 8), lengths, options, MEAN)
        return call._replace(index_q=index_q, summary=summary)
    return call._replace(leader=integers(2, heads, 8)) if leader and causal else call


CALLS = {  # score, coverage, selection per key head, padding, state, sizes
    "moments": ("moments", None, False, True, False, {}),
    "mean": ("mean", None, True, False, True, {"query_block": 5, "num_sinks": 5}),
    "bounds": ("bounds", None, False, True, True, {"query_block": 4, "top_k": 2}),
    "indexer": ("indexer", None, False, True, False, {"query_block": 2}),
    "coverage": ("moments", 0.77, True, False, False, {"query_block": 2}),
    "coverage of an indexer": ("indexer", 0.77, False, False, False, {}),
    "one": ("bounds", None, False, False, False, {"top_k": 1, "query_block": 3}),
    "all": ("mean", None, False, True, False, {"top_k": 99, "query_block": 6}),
    "blocks of one": ("mean", None, True, False, False, {"block_size": 1}),
}
QUICK = {("moments", True), ("mean", True), ("bounds", False), ("indexer", True)}
QUICK |= {("coverage", False), ("one", True)}


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        pytest.param(*x, marks=() if x in QUICK else pytest.mark.exhaustive)
        for x in product(CALLS, (True, False))
    ],
)
def test_the_selection_is_that_of_torch_where_scores_are_equal(name, causal):
    call = integer_call(name, causal)
    assert torch.equal(module.select(call), select_blocks(call))


def test_ties_go_to_the_earlier_block():
    k = torch.zeros(1, 1, 24, 8, device=DEVICE)
    k[:, :, 4:8] = -0.0
    k[:, :, 12:16] = 1.0
    q = torch.zeros(1, 1, 24, 8, device=DEVICE)
    q[:, :, 20:] = 1.0
    selection = SelectionOptions("mean", None, False)
    options = OPTIONS._replace(num_sinks=0, top_k=2)
    call = SparseCall(-q, k, k, None, None, None, None, 1.0, options, selection)
    assert module.select(call)[0, 0, -1].tolist() == [0, 1]  # block 3 has the lowest score
    assert module.select(call._replace(q=q))[0, 0, -1].tolist() == [0, 3]


def broken(monkeypatch, function, change):
    run = getattr(SelectionLauncher, function)
    monkeypatch.setattr(SelectionLauncher, function, lambda self: change(run(self)))


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        ("summarize", lambda x: x.roll(1, 2), "lower by"),
        ("pool", lambda x: x.flip(2), "lower by"),
        ("select", lambda x: torch.where(x == 2, 1, x), "no candidate|twice"),
        ("select", lambda x: torch.where(x == 0, 2**30, x), "another number"),
        ("select", lambda x: x + torch.randint(2, x.shape).int(), "two equal calls"),
    ],
)
def test_a_broken_kernel_fails_the_check(function, change, message, monkeypatch):
    q, k = torch.randn(1, 2, 16, 8, device=DEVICE), torch.randn(1, 1, 16, 8, device=DEVICE)
    selection = SelectionOptions("mean", None, True)
    options = OPTIONS._replace(top_k=2, num_sinks=0)
    call = SparseCall(q, k, k, None, None, None, None, 0.3, options, selection)
    assert list(wrong_selection(call, "a call")) == []
    broken(monkeypatch, function, change)
    found = " ".join(wrong_selection(call, "a call"))
    assert any(word in found for word in message.split("|"))


def test_other_ties_fail_the_check(monkeypatch):
    case = check_triton.SparseCase(d=8, e=8, dtype=torch.float32, B=1, Hkv=1, T=40, score="mean")
    options = OPTIONS._replace(block_size=8, top_k=1, num_sinks=0, query_block=2)
    case = check_triton.replace(case, options=options)
    call = check_triton.Inputs(case, DEVICE).call
    assert list(wrong_ties(call, "a call")) == []
    broken(monkeypatch, "select", lambda x: torch.where(x == 1, 2, x))
    assert list(wrong_ties(call, "a call"))


def test_torch_selects_more_blocks_than_the_kernel_sorts(monkeypatch):
    monkeypatch.setattr(module, "MOST_BLOCKS", {8: 2})
    x = torch.randn(1, 1, 9, 8, device=DEVICE)
    options = {"block_size": 2, "window": 2, "query_block": 3, "impl": "triton"}
    reason = block_sparse_attention(x, x, x, top_k=3, **options).impl.reason
    assert "torch selects 3 blocks, as the kernel sorts at most 2" in reason
    assert "torch selects" not in block_sparse_attention(x, x, x, top_k=2, **options).impl.reason


def test_summaries_are_computed_once_for_selection_and_state(monkeypatch):
    calls = []
    broken(monkeypatch, "summarize", lambda x: calls.append(x) or x)
    x = torch.randn(1, 1, 12, 8, device=DEVICE)
    options = {"mask": AttentionMask(causal=True), "block_size": 4, "window": 2, "impl": "triton"}
    state = block_sparse_attention(x, x, x, return_state=True, **options).state
    assert len(calls) == 1
    assert state.summary.data_ptr() == calls[0].data_ptr()


def tokens_with_state(impl, dtype, options, indexed):
    """Return the outputs of decoded tokens after a prompt; scores are exact, and many are equal."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randint(-1, 2, shape, generator=generator).to(DEVICE, dtype)

    tokens, prompt, state, found = 23, 20, None, []
    q, k = draw(2, 4, tokens, 8), draw(2, 2, tokens, 8)
    v = torch.randn(2, 2, tokens, 12, generator=generator).to(DEVICE, dtype)
    index = draw(2, 3, tokens, 8), draw(2, 1, tokens, 8), draw(2, 3, tokens)
    padding = torch.arange(prompt, device=DEVICE) >= torch.tensor([[0], [7]], device=DEVICE)
    for part in (slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, tokens))):
        piece = [x[:, :, part] for x in (q, k, v)]
        mask = AttentionMask(causal=True, padding=padding if state is None else None)
        if indexed:
            options = options | {"score": "indexer", "index": tuple(x[:, :, part] for x in index)}
        result = block_sparse_attention(
            *piece, mask=mask, state=state, return_state=True, impl=impl, scale=0.5, **options
        )
        state = result.state
        found.append(result.out)
    return torch.cat(found[1:], 2).double().cpu()


STEPS = {
    "moments": {"block_size": 2, "top_k": 3},
    "shared": {"block_size": 4, "query_block": 5, "per_key_head": True, "score": "mean"},
    "coverage": {"block_size": 1, "top_k": 5, "score": "mean", "coverage": 0.7123},
    "bounds": {"block_size": 3, "top_k": 2, "score": "bounds"},
    "indexer": {"block_size": 4, "query_block": 2},
    "window only": {"top_k": 0},
    "few keys": {"block_size": 32},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == "shared" else pytest.mark.exhaustive) for x in STEPS],
)
def test_decoded_tokens_are_those_of_the_definition(name, monkeypatch):
    """In several parts, with padding, sinks and recent keys apart."""
    for constant in ("SPLIT_BLOCKS", "PART_SLOTS", "TILE_BLOCKS"):
        monkeypatch.setattr(step, constant, 16)
    monkeypatch.setattr(step, "SPLIT_BLOCKS", 2)
    options = {"window": 3, "num_sinks": 2, "top_k": 2, **STEPS[name]}
    indexed = name == "indexer"
    exact = tokens_with_state("reference", torch.float64, options, indexed)
    plain = tokens_with_state("torch", torch.float32, options, indexed)
    ours = tokens_with_state("triton", torch.float32, options, indexed)
    budget = 2 * (plain - exact).abs().max() + 1e-6
    assert (ours - exact).abs().max() <= budget * float32_slack()


def test_a_broken_step_fails_the_check(monkeypatch):
    case = check_triton.SparseCase(d=8, e=8, dtype=torch.float32, B=1, Hkv=1, T=20, score="mean")
    case = check_triton.replace(case, options=OPTIONS._replace(top_k=1))
    call = check_triton.Inputs(case, DEVICE).call
    assert list(wrong_step(call, "a call")) == []
    run = step.launch_step
    monkeypatch.setattr(step, "launch_step", lambda *x, **y: 1.1 * run(*x, **y))
    assert any("the token differs" in text for text in wrong_step(call, "a call"))


def test_describe_says_what_computes_a_token(monkeypatch):
    x = torch.randn(1, 1, 9, 8, device=DEVICE)
    options = {"mask": AttentionMask(causal=True), "block_size": 2, "window": 2, "impl": "triton"}
    state = block_sparse_attention(x, x, x, return_state=True, top_k=2, **options).state
    one = x[:, :, :1]
    changes = {"run": lambda step: step.call.v}
    change_implementation(monkeypatch, "block_sparse_step", "triton", **changes)
    found = block_sparse_attention(one, one, one, state=state, top_k=2, **options)
    assert found.impl.reason == (
        "named in the options; one new token scores 5 blocks and reads at most 2 of them"
    )
    assert torch.equal(found.out, one)
    monkeypatch.setattr(module, "MOST_BLOCKS", {8: 2})
    found = block_sparse_attention(one, one, one, state=state, top_k=3, **options)
    assert "; torch selects 3 blocks" in found.impl.reason
    assert not torch.equal(found.out, one)
