"""Custom operators under tracing: their fakes have the shapes, strides and dtypes of results.

torch.compile plans views by the strides of fakes. Other strides end in errors of the backward pass.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from attnzoo import ops
from attnzoo.contract.masks import AttentionMask
from attnzoo.ops.hybrid.parts import LinearBranch

B, H, HKV, T = 2, 4, 2, 40
CAUSAL = AttentionMask(causal=True)
# Of keys and values, whole SIMD vectors and not, and dtypes
SIZES = ((16, 16), torch.float32), ((8, 6), torch.bfloat16)


class CompareWithFakes(TorchDispatchMode):
    """Runs every operator of attnzoo on fake tensors too, and compares the results."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not func.name().startswith("attnzoo::"):
            return func(*args, **kwargs)
        mode = FakeTensorMode()
        given = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        with mode:
            fake = func(*given[0], **given[1])
        found = func(*args, **kwargs)
        self.names.add(func.name().removeprefix("attnzoo::"))
        for ours, expected in zip(tree_leaves(fake), tree_leaves(found), strict=True):
            assert layout(ours) == layout(expected), func.name()
        return found


def layout(x):
    steps = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return x.shape, x.dtype, steps if x.numel() else []


def linear(q, k, v, g, impl, causal):
    options = {"causal": causal, "log_decay": g if causal else None, "impl": impl}
    return ops.linear_attention(q, k, v, normalize=True, **options)


def hybrid(q, k, v, g, impl, causal):
    branch = LinearBranch(q.exp(), k.exp(), torch.zeros(()), g if causal else None)
    options = {"window": 4, "scale": 0.3, "causal": causal, "impl": impl}
    return ops.hybrid_attention(q, k, v, branch, **options)


def delta(q, k, v, g, impl, causal):
    beta = (g if g.dim() == 3 else g.mean(-1)).exp()
    return ops.delta_attention(q, k, v, beta, log_decay=g, normalize_qk=True, impl=impl)


def with_mask(op, **options):
    return lambda q, k, v, g, impl, causal: op(
        q, k, v, mask=AttentionMask(causal=causal), impl=impl, **options
    )


EITHER, CAUSAL_ONLY = (True, False), (True,)
CASES = {
    "linear": (linear, EITHER, ("cpp",)),
    "hybrid": (hybrid, EITHER, ("cpp",)),
    "delta": (delta, CAUSAL_ONLY, ("cpp",)),
    "flash": (with_mask(ops.flash_attention), EITHER, ("cpp",)),
    "longformer": (with_mask(ops.longformer_attention, window=4), EITHER, ("cpp",)),
    "lsh": (
        with_mask(ops.lsh_attention, num_hashes=2, chunk_size=4, window=2),
        EITHER,
        ("cpp", "torch", "reference"),
    ),
    "block_sparse": (
        with_mask(ops.block_sparse_attention, window=4, top_k=2, block_size=4),
        EITHER,
        ("cpp", "torch"),
    ),
}


@pytest.mark.parametrize(("sizes", "dtype"), SIZES, ids=str)
@pytest.mark.parametrize(
    ("case", "causal", "impl"),
    [
        (case, causal, impl)
        for case, (_, masks, impls) in CASES.items()
        for causal in masks
        for impl in impls
        if (case, causal, impl) != ("linear", False, "cpp")
    ],
)
def test_fakes_have_the_layout_of_results(case, causal, impl, sizes, dtype):
    size, value_size = sizes
    gates = [(B, HKV, T), (B, HKV, T, size)]
    for gate in gates if case in ("linear", "hybrid", "delta") else gates[:1]:
        for transposed in (False, True):
            shapes = (B, H, T, size), (B, HKV, T, size), (B, HKV, T, value_size), gate
            x = [torch.rand(shape).to(dtype) for shape in shapes]
            if transposed:
                x = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]
            leaves = [*(y.requires_grad_() for y in x[:3]), (-x[3]).requires_grad_()]
            with CompareWithFakes() as mode:
                out = CASES[case][0](*leaves, impl, causal).out
                upstream = torch.randn_like(out.transpose(1, 2)).transpose(1, 2)
                out.backward(upstream)
            assert any("backward" in name for name in mode.names) or impl == "reference"
