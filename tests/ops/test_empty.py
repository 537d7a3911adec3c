"""Ops called with an empty batch, without queries or without keys return zeros."""

import pytest
import torch

from attnzoo import ops
from attnzoo.contract.masks import AttentionMask
from attnzoo.ops.hybrid.api import LinearBranch

HEADS, KEY_HEADS, SIZE, VALUE_SIZE = 4, 2, 6, 5
SELF = [(0, 4), (0, 0), (2, 0)]  # batch and tokens
PAIRS = [(0, 3, 5), (0, 0, 0), (2, 3, 0), (2, 0, 3)]  # batch, queries and keys


def tensors(batch, queries, keys):
    shapes = ((HEADS, queries, SIZE), (KEY_HEADS, keys, SIZE), (KEY_HEADS, keys, VALUE_SIZE))
    return [torch.randn(batch, *shape, requires_grad=True) for shape in shapes]


def rows(*shape):
    return torch.randn(1, *shape, requires_grad=True)


def masks(batch, tokens, causal):
    padding = torch.ones(batch, tokens, dtype=torch.bool)
    return AttentionMask(causal=causal), AttentionMask(causal=causal, padding=padding)


def check(out, inputs):
    (batch, _, queries, _), *_ = (x.shape for x in inputs)
    assert torch.equal(out, torch.zeros(batch, HEADS, queries, VALUE_SIZE))
    for x, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("shape", PAIRS)
def test_bidirectional_ops(shape):
    for mask in masks(shape[0], shape[2], causal=False):
        x, weights = tensors(*shape), torch.randn(8, SIZE)
        check(ops.favor_attention(*x, weights, scale=1.0, mask=mask), x)
        for impl in ("torch", "reference"):
            for pooling in (False, True):
                x = [*tensors(*shape), rows(16, 4), rows(16, 4)]
                check(ops.linformer_attention(*x, mask=mask, pooling=pooling, impl=impl).out, x)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(("batch", "tokens"), SELF)
def test_ops_on_tokens_of_one_sequence(batch, tokens, impl):
    shape = (batch, tokens, tokens)
    for mask in masks(batch, tokens, causal=True):
        x = [*tensors(*shape), rows(8, 2), rows(8, 2)]
        options = {"mask": mask, "impl": impl, "return_state": True}
        out, state, *_ = ops.linformer_block_attention(*x, **options)
        check(out, x)
        _, again, *_ = ops.linformer_block_attention(*x, **options, state=state)
        assert all(map(torch.equal, again, state))
        later = [*tensors(batch, 9, 9), *x[3:]]
        after = ops.linformer_block_attention(*later, state=state, impl=impl).out
        torch.testing.assert_close(after, ops.linformer_block_attention(*later, impl=impl).out)
    for causal in (True, False):
        for mask in masks(batch, tokens, causal):
            x = tensors(*shape)
            check(ops.longformer_attention(*x, window=3, mask=mask, impl=impl).out, x)
        x, mask = tensors(*shape), AttentionMask(causal=causal)
        is_global = torch.ones(batch, tokens, dtype=torch.bool)
        options = {"window": 3, "global_tokens": is_global, "impl": impl}
        check(ops.longformer_attention(*x, mask=mask, **options).out, x)
        branch = LinearBranch(x[0].abs(), x[1].abs(), torch.zeros(1, 1, 1, 1))
        options = {"window": 3, "scale": 1.0, "impl": impl}
        check(ops.hybrid_attention(*x, branch, causal=causal, **options).out, x)
    x = tensors(*shape)
    beta = torch.rand(batch, KEY_HEADS, tokens, requires_grad=True)
    check(ops.delta_attention(*x, beta, impl=impl).out, [*x, beta])

    def log_decay(take):
        return take(torch.zeros(batch, tokens, KEY_HEADS, SIZE, VALUE_SIZE)).transpose(1, 2)

    check(ops.matrix_gated_attention(*x, log_decay=log_decay, impl=impl).out, x)
