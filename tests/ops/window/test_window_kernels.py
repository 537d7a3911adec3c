"""The Triton kernels of softmax attention inside a window, against a dense mask.

They run on a GPU if there is one, else interpreted on the CPU.
"""

import pytest
import torch

from attnzoo.ops.window.triton.window import window_triton
from tests.helpers import nan_padded
from tests.kernel_device import float32_slack, kernel_device, nan_in_uninitialized_memory

DEVICE = kernel_device()

NO_KEYS = -1e30


@pytest.fixture(autouse=True)
def _nan_in_uninitialized_memory():
    with nan_in_uninitialized_memory():
        yield


def dense(q, k, v, ids, before, after, scale):
    """Compute the window with a dense mask; a query without keys gives zeros and NO_KEYS."""
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    position = torch.arange(length, device=q.device)
    distance = position[:, None] - position
    seen = ((distance <= before) & (distance >= -after))[None, None]
    if ids is not None:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None]) & (ids >= 0)[:, None, None]
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    any_key = seen.any(-1).expand(scores.shape[:3])
    lse = torch.where(any_key, scores.logsumexp(-1), NO_KEYS)
    weights = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)
    return weights @ v, lse


@pytest.mark.parametrize(
    ("length", "heads", "sizes", "reach", "packed"),
    [
        (70, (2, 1), (12, 20), (9, 0), False),
        (75, (1, 1), (16, 16), (40, 0), True),
        (50, (4, 2), (16, 16), (20, 13), True),
        (33, (1, 1), (16, 16), (100, 100), False),
    ],
)
def test_window_kernels_match_a_dense_mask(length, heads, sizes, reach, packed):
    shapes = [(1, heads[0], length, sizes[0])]
    shapes += [(1, heads[1], length, size) for size in sizes]
    tensors = [nan_padded(torch.randn(shape).to(DEVICE)) for shape in shapes]
    ids = None
    if packed:  # what tokens of no sequence hold has no effect
        ids = (torch.arange(length, device=DEVICE) >= length // 3).int()[None]
        ids[:, length // 2 : length // 2 + 5] = -1
        for x in tensors:
            x[:, :, ids[0] < 0] = torch.nan
    weights = [torch.randn(1, heads[0], length, sizes[1]), torch.randn(1, heads[0], length)]
    weights = [x.to(DEVICE) for x in weights]
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        if dtype == torch.float64:
            known = leaves
            if ids is not None:
                known = [x.masked_fill((ids < 0)[:, None, :, None], 0) for x in leaves]
            out, lse = dense(*known, ids, *reach, 0.3)
        else:
            out, lse = window_triton(*leaves, ids, *reach, 0.3, True)
        lse = torch.where(lse > NO_KEYS / 2, lse, 0.0)
        total = (out * weights[0]).sum() + (lse * weights[1]).sum()
        found.append([out, lse, *torch.autograd.grad(total, leaves)])
    for name, actual, expected in zip(("out", "lse", "q", "k", "v"), *found, strict=True):
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < 1e-6 * float32_slack(), f"{name}: {error:.1e}"


def test_bfloat16_is_as_accurate_as_its_rounding():
    q, k, v = (torch.randn(1, 2, 70, 16).to(DEVICE, torch.bfloat16) for _ in range(3))
    out, _ = window_triton(q, k, v, None, 15, 0, 0.25, True)
    exact, _ = dense(q.double(), k.double(), v.double(), None, 15, 0, 0.25)
    assert (out - exact).norm() / exact.norm() < 4e-3


def test_operators_pass_opcheck():
    q, k, v = (torch.randn(1, 1, 18, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    torch.library.opcheck(window_triton, (q, k, v, None, 4, 0, 0.25, True))
