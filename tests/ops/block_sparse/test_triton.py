"""Block-sparse attention on the Triton kernels, against the definition in float64.

They run on a GPU if there is one, else interpreted on the CPU.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.ops.block_sparse.api import block_sparse_attention
from attnzoo.ops.block_sparse.custom_ops import TRITON
from attnzoo.ops.block_sparse.options import SparseOptions
from attnzoo.ops.block_sparse.selection import NO_BLOCK
from attnzoo.ops.block_sparse.triton import check as check_triton
from attnzoo.ops.block_sparse.triton import launch
from attnzoo.ops.block_sparse.triton import run as module
from attnzoo.ops.block_sparse.triton.check import SparseCase, wrong_results
from tests.helpers import change_implementation, qkv
from tests.kernel_device import float32_slack, kernel_device

DEVICE = kernel_device()
SMALL = SparseOptions(True, 3, 3, 2, 4, 6)
CASE = SparseCase(
    d=12, e=20, dtype=torch.float32, groups=2, options=SMALL, per_key_head=True, B=1, Hkv=1, T=21
)


def with_gradients(inputs, dtype, **options):
    leaves = [x.detach().to(DEVICE, dtype).requires_grad_() for x in inputs]
    out = block_sparse_attention(*leaves, **options).out
    weights = torch.linspace(-1, 1, out.numel(), dtype=dtype, device=DEVICE).view(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), leaves)
    return [x.detach().double().cpu() for x in (out, *grads)]


def index_tensors(tokens, heads=3, size=4):
    queries, keys = torch.randn(2, heads, tokens, size), torch.randn(2, 1, tokens, size)
    return queries, keys, torch.rand(2, heads, tokens)


CALLS = {
    "moments": {"query_block": 5, "per_key_head": True, "num_sinks": 2, "window": 5},
    "mean": {"score": "mean", "coverage": 0.5, "query_block": 3, "block_size": 3, "num_sinks": 7},
    "bounds": {"score": "bounds", "query_block": 20, "block_size": 3, "top_k": 5, "num_sinks": 0},
    "indexer": {"score": "indexer", "query_block": 7, "block_size": 5, "window": 2},
    "window only": {"top_k": 0, "query_block": 2, "per_key_head": True},
    "all keys": {"top_k": 100, "query_block": 7, "num_sinks": 40},
}


QUICK = {("moments", True), ("bounds", False), ("indexer", True)}


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        pytest.param(*x, marks=() if x in QUICK else pytest.mark.exhaustive)
        for x in product(CALLS, (True, False))
    ],
)
def test_output_and_gradients_are_those_of_the_definition(name, causal):
    """With padding and heads that share keys."""
    inputs = qkv(27, heads=(4, 2) if name == "moments" else (2, 1))
    padding = torch.arange(27) >= torch.tensor([[0], [11]])
    padding[0, 5:7] = False
    options = {"block_size": 4, "top_k": 2, "window": 3, "num_sinks": 3} | CALLS[name]
    options["mask"] = AttentionMask(causal=causal, padding=padding.to(DEVICE))
    if options.get("score") == "indexer":
        options["index"] = tuple(x.to(DEVICE) for x in index_tensors(27))
    exact = with_gradients(inputs, torch.float64, impl="reference", **options)
    plain = with_gradients(inputs, torch.float32, impl="torch", **options)
    ours = with_gradients(inputs, torch.float32, impl="triton", **options)
    for mine, other, right in zip(ours, plain, exact, strict=True):
        rounding = torch.finfo(torch.float32).eps * right.abs().max()
        budget = 2 * (other - right).abs().max() + 2 * rounding
        assert (mine - right).abs().max() <= budget * float32_slack()


def test_every_query_and_head_selects_by_default():
    """The rest of a row after a state, too: fewer queries than keys."""
    inputs = [x[:1] for x in qkv(16, heads=(2, 1))]
    mask = AttentionMask(causal=True)
    options = {"mask": mask, "window": 3, "num_sinks": 1, "top_k": 2, "block_size": 4}
    exact = block_sparse_attention(*inputs, impl="reference", **options).out
    float32 = [x.to(DEVICE, torch.float32) for x in inputs]
    pieces, state = [], None
    for part in (slice(0, 13), slice(13, 16)):
        piece = [x[:, :, part] for x in float32]
        found = block_sparse_attention(
            *piece, impl="triton", state=state, return_state=True, **options
        )
        pieces.append(found.out.double().cpu())
        state = found.state
    assert (torch.cat(pieces, 2) - exact).abs().max() <= 2e-6 * float32_slack()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", check_triton.KINDS)
def test_the_kernels_pass_their_check(kind):
    for case in check_triton.cases("none", 64, kind, small=DEVICE.type != "cuda"):
        assert list(wrong_results(case, DEVICE)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    assert list(wrong_results(replace(CASE, dtype=dtype), DEVICE)) == []


def test_many_selections_of_one_block_are_added_in_parts(monkeypatch):
    """And sums for the sinks, in parts of the queries and tiles of keys."""
    monkeypatch.setattr(launch, "PART_ROWS", 16)
    monkeypatch.setattr(launch, "LARGEST_TILE", 16)
    options = SMALL._replace(num_sinks=18, block_size=17, top_k=1, query_block=4)
    assert list(wrong_results(replace(CASE, options=options, T=60, padded=True), DEVICE)) == []


@pytest.mark.parametrize(
    ("function", "broken"),
    [
        ("_attend", {"out", "d_q"}),
        ("_selection_sums", {"d_k", "d_v"}),
        ("_sink_sums", {"d_k", "d_v"}),
        ("_key_gradients", {"d_k", "d_v"}),
    ],
)
def test_a_broken_kernel_fails_the_check(function, broken, monkeypatch):
    run = getattr(launch.SparseLauncher, function)

    def scaled(self, *args, **options):
        result = run(self, *args, **options)
        sums = (
            args[:2] if function == "_key_gradients" else args[:1] if result is None else result[0]
        )
        for x in sums:
            x.mul_(1.1)
        return result

    monkeypatch.setattr(launch.SparseLauncher, function, scaled)
    assert broken <= {text.split()[0] for text in wrong_results(CASE, DEVICE)}


def test_selections_are_sorted_by_key_block():
    generator = torch.Generator().manual_seed(0)
    selected = torch.rand(2, 4, 9, 6, generator=generator).argsort(3)[..., :3].int()
    selected[:, :, ::2, 2] = NO_BLOCK
    for size in (1, 4, 100):
        inverted = launch.invert_selection(selected.to(DEVICE), 2, 6, size)
        pairs, first_pair, first_item, item_block = inverted
        of_item = {}
        for item, block in enumerate(item_block.tolist()):
            begin = first_pair[block] + (item - first_item[block]) * size
            end = min(begin + size, first_pair[block + 1])
            of_item.setdefault(block, []).extend(pairs[begin:end].tolist())
        for block in range(2 * 2 * 6):
            b, h, j = block // 12, block // 6 % 2, block % 6
            right = [
                (b * 4 + a) * 9 + m
                for a in (2 * h, 2 * h + 1)
                for m in range(9)
                if j in selected[b, a, m]
            ]
            assert of_item.get(block, []) == right


def test_the_operator_passes_opcheck():
    rows = [torch.randn(1, heads, 9, 4).to(DEVICE).requires_grad_() for heads in (2, 1, 1)]
    selected = torch.zeros(1, 1, 3, 1, dtype=torch.int32, device=DEVICE)
    options = [1, 2, 0, 1, 2, 4]
    selected[:, :, :1] = NO_BLOCK
    torch.library.opcheck(TRITON.forward, (*rows, selected, None, None, 0.5, options))


def test_auto_selects_the_kernels_only_if_they_passed_a_check(monkeypatch):
    verdict = ["not checked", ""]
    monkeypatch.setattr(module, "own_verdict", lambda *_: tuple(verdict))
    change_implementation(monkeypatch, "block_sparse_attention", "triton", devices=(DEVICE.type,))
    change_implementation(monkeypatch, "block_sparse_attention", "cpp", automatic="")
    x = torch.randn(1, 1, 3, 16, device=DEVICE)
    assert block_sparse_attention(x, x, x).impl.impl == "torch"
    verdict[:] = "", "checked on this device"
    choice = block_sparse_attention(x, x, x).impl
    assert choice.impl == "triton"
    assert "checked on this device" in choice.reason


def test_unsupported_calls_raise():
    x = torch.randn(1, 1, 3, 16, dtype=torch.float64, device=DEVICE)
    with pytest.raises(UnsupportedError, match="an input is float64"):
        block_sparse_attention(x, x, x, impl="triton")
    wide = torch.randn(1, 1, 3, 272, device=DEVICE)
    with pytest.raises(UnsupportedError, match="key size is 272"):
        block_sparse_attention(wide, wide, wide, impl="triton")
