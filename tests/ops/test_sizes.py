"""Sizes beyond any sequence: ops refuse them, or all implementations give equal results."""

import pytest
import torch

from attnzoo import ops
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import AttnzooError
from attnzoo.ops.hybrid.api import LinearBranch
from attnzoo.ops.lsh.cpu.lsh import LSH, PIVOTS
from attnzoo.runtime import cpp
from tests.helpers import by_sequence

GENERATOR = torch.Generator().manual_seed(0)  # module code runs before the fixture that seeds tests
LARGE = 2**24  # accepted: a window or a chunk may be longer than the sequence
TOO_LARGE = (LARGE + 1, 2**62, 2**64, 10**5000)
q, k, v = torch.randn(3, 1, 2, 40, 8, dtype=torch.float64, generator=GENERATOR).unbind()
BRANCH = LinearBranch(q.abs(), k.abs(), torch.zeros(1, 1, 1, 1, dtype=torch.float64))

MASKS = {"causal": AttentionMask(causal=True), "full": AttentionMask()}


def linear(size, impl, option, mask):
    return by_sequence(ops.linear_attention)(q, k, v, mask=mask, impl=impl, **{option: size})


def delta(size, impl, option, mask):
    beta = q[..., 0].sigmoid()
    return ops.delta_attention(q, k, v, beta, normalize_qk=True, impl=impl, **{option: size})


def hybrid(size, impl, option, mask):
    options = {"causal": mask.causal, "scale": 1.0, "impl": impl, option: size}
    return ops.hybrid_attention(q, k, v, BRANCH, **options)


def shared_qk(size, impl, option, mask):
    return ops.shared_qk_attention(q, q, v, mask=mask, impl=impl, **{option: size})


def lsh(size, impl, option, mask):
    return ops.lsh_attention(q, k, v, mask=mask, impl=impl, **{option: size})


def longformer(size, impl, option, mask):
    return ops.longformer_attention(q, k, v, mask=mask, impl=impl, **{"window": 3, option: size})


OPTIONS = [
    (linear, "chunk_size"),
    (delta, "chunk_size"),
    (hybrid, "window"),
    (shared_qk, "chunk_size"),
    *((lsh, name) for name in ("chunk_size", "num_buckets", "window", "first_tokens")),
    *((longformer, name) for name in ("window", "dilation")),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("call", "option"), OPTIONS)
def test_a_huge_size_is_refused_and_a_large_one_computed(call, option, mask):
    def run(size, impl="auto"):
        return call(size, impl, option, MASKS[mask]).out

    for size in TOO_LARGE:
        with pytest.raises(AttnzooError, match=rf"{option} must be .* {LARGE}"):
            run(size)
    expected = run(LARGE, "reference")
    torch.testing.assert_close(run(LARGE, "torch"), expected, atol=1e-10, rtol=1e-10)
    if call is lsh and not (cpp.unavailable_reason(LSH) or cpp.unavailable_reason(PIVOTS)):
        torch.testing.assert_close(run(LARGE, "cpp"), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("option", ["num_hashes", "num_buckets"])
def test_counts_of_hashes_have_a_limit(option):
    for size in (2**20, 2**64):
        with pytest.raises(AttnzooError, match=rf"{option} must be .* from \d to"):
            ops.shared_qk_attention(q, q, v, **{option: size})


@pytest.mark.parametrize("size", [2**62, 2**64])
@pytest.mark.parametrize("op", [ops.flash_attention, ops.softmax_attention])
def test_a_window_longer_than_any_sequence_hides_nothing(op, size):
    for causal in (True, False):
        expected = op(q, k, v, mask=AttentionMask(causal=causal)).out
        out = op(q, k, v, mask=AttentionMask(causal=causal, window=(size, size))).out
        torch.testing.assert_close(out, expected)
