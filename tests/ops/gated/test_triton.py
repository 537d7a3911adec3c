"""mLSTM and RWKV-6 on the Triton kernels, against the reference in float64.

They run on a GPU if there is one, else interpreted on the CPU.
"""

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import LinearState, StabilizedState
from attnzoo.ops.gated.mlstm import mlstm_attention
from attnzoo.ops.gated.rwkv6 import rwkv6_attention
from tests.helpers import by_sequence
from tests.kernel_device import float32_slack, kernel_device, nan_in_uninitialized_memory

DEVICE = kernel_device()


@pytest.fixture(autouse=True)
def _nan_in_uninitialized_memory():
    with nan_in_uninitialized_memory():
        yield


def mlstm(q, k, v, gates, log_input, state, **options):
    log_forget = -gates[..., 0].exp()
    state = StabilizedState(*state, state[1].new_zeros(state[1].shape[:2]))
    return mlstm_attention(
        q, k, v, log_forget=log_forget, log_input=log_input, state=state, **options
    )


def rwkv6(q, k, v, gates, _, state, **options):
    bonus = torch.ones_like(gates[0, :, 0])
    return rwkv6_attention(
        q.exp(), k.exp(), v, log_decay=-gates.exp(), bonus=bonus, state=LinearState(*state),
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("attend", "options", "masked"),
    [
        (mlstm, {}, True),
        (rwkv6, {"normalize": True}, True),
        (rwkv6, {"normalize": False}, False),
    ],
)
def test_kernels_match_reference_in_float64(attend, options, masked):
    b, heads, key_heads, t, d, e = 1, 2, 1, 37, 16, 20
    shapes = [(b, heads, t, d), (b, key_heads, t, d), (b, key_heads, t, e), (b, key_heads, t, d)]
    shapes += [(b, key_heads, t), (b, key_heads, d, e), (b, key_heads, d)]
    tensors = [torch.randn(shape).to(DEVICE) for shape in shapes]
    tensors[-1] = tensors[-1].abs()
    ids = (torch.arange(t, device=DEVICE) >= 20).long()[None] if masked else None
    padding = torch.arange(t, device=DEVICE)[None] % 5 != 0 if masked else None
    mask = AttentionMask(causal=True, padding=padding, segment_ids=ids)
    weights = torch.randn(b, heads, t, e).to(DEVICE)
    if masked:
        weights *= padding[:, None, :, None]
    found = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        out, state, *_ = by_sequence(attend)(
            *leaves[:5],
            state=LinearState(*leaves[5:]),
            mask=mask,
            impl=impl,
            return_state=True,
            **options,
        )
        total = (out * weights).sum() + 0.1 * (state.kv.sum() + state.k.sum())
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        visible = out * weights.ne(0)
        found.append([visible, state.kv, state.k, *(x for x in grads if x is not None)])
    for i, (actual, expected) in enumerate(zip(*found, strict=True)):
        error = (actual.double() - expected).norm() / (expected.norm() + 1e-12)
        assert error < 1e-5 * float32_slack(), f"{i}: {error:.1e}"


@pytest.mark.parametrize("attend", [mlstm, rwkv6])
def test_bfloat16_gradients_are_accurate_if_values_have_a_mean(attend):
    # Gradients of queries are differences of large sums
    b, t, d = 1, 96, 16
    shapes = [(b, 1, t, d)] * 4 + [(b, 1, t), (b, 1, d, d), (b, 1, d)]
    tensors = [torch.randn(shape) for shape in shapes]
    tensors[0], tensors[1] = tensors[0].abs(), tensors[1].abs()
    tensors[2] += 1
    tensors[3] -= 3  # long memory
    tensors = [x.bfloat16() if i < 3 else x for i, x in enumerate(tensors)]
    weights, found = torch.randn(b, 1, t, d).bfloat16().to(DEVICE), []
    options = {"normalize": True} if attend is rwkv6 else {}
    for impl, dtype in (("triton", None), ("reference", torch.float64)):
        leaves = [x.to(DEVICE, dtype or x.dtype).requires_grad_() for x in tensors]
        out = attend(*leaves[:5], [x * 0 for x in leaves[5:]], impl=impl, **options).out
        grads = torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves[:4])
        found.append([out, *grads])
    for i, (actual, expected) in enumerate(zip(*found, strict=True)):
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < 6e-3, f"{i}: {error:.1e}"
