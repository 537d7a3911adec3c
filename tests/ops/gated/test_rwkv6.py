"""RWKV-6 against its recurrence in float64 and against flash-linear-attention."""

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import LinearState
from attnzoo.ops.gated.rwkv6 import rwkv6_attention
from tests.helpers import by_sequence, in_form

B, HKV, G, D, E = 2, 2, 2, 5, 3
FORMS_AND_IMPLS = [
    ("chunk", "torch"), ("chunk", "reference"), ("steps", "torch"), ("parallel", "torch"),
    ("steps", "reference"), ("steps", "auto"), ("chunk", "auto"),
]  # fmt: skip


def make(length, *, positive=True, strength=1.0):
    q, k = (
        torch.rand(B, HKV * g, length, D, dtype=torch.float64) - (0 if positive else 0.5)
        for g in (G, 1)
    )
    v = torch.randn(B, HKV, length, E, dtype=torch.float64)
    decay = -strength * torch.rand(B, HKV, length, D, dtype=torch.float64)
    return q, k, v, decay, torch.rand(HKV, D, dtype=torch.float64)


def formula(q, k, v, decay, bonus, normalize, kv=0, z=0, eps=1e-6):
    """Compute one token after another: read with the bonus, then update."""
    q, bonus = q.unflatten(1, (HKV, G)), bonus[None, :, None]
    kv, z = torch.zeros(B, HKV, D, E).double() + kv, torch.zeros(B, HKV, D).double() + z
    outs = []
    for t in range(q.shape[2] if q.ndim == 4 else q.shape[3]):
        new = k[:, :, t, :, None] * v[:, :, t, None, :]
        kv_read = kv + bonus[:, :, 0, :, None] * new
        out = torch.einsum("bhgd,bhde->bhge", q[:, :, :, t], kv_read)
        if normalize:
            z_read = z + bonus[:, :, 0] * k[:, :, t]
            out = out / (torch.einsum("bhgd,bhd->bhg", q[:, :, :, t], z_read) + eps)[..., None]
        outs.append(out)
        state_decay = decay[:, :, t].exp()
        kv, z = kv * state_decay[..., None] + new, z * state_decay + k[:, :, t]
    return torch.stack(outs, 3).flatten(1, 2), kv, z


def packed(ids):
    return AttentionMask(causal=True, segment_ids=ids)


def run(q, k, v, decay, bonus, form="chunk", **options):
    attend = in_form(form, rwkv6_attention)
    output = by_sequence(attend)(
        q, k, v, log_decay=decay, bonus=bonus, return_state=True, **options
    )
    return output.out, *output.state


@pytest.mark.parametrize(("form", "impl"), FORMS_AND_IMPLS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("length", [1, 2, 8, 31])
def test_equals_formula(form, impl, normalize, length):
    x = make(length, positive=normalize)
    for state in (
        None,
        LinearState(torch.randn(B, HKV, D, E).double(), torch.rand(B, HKV, D).double()),
    ):
        ours = run(*x, normalize=normalize, form=form, impl=impl, chunk_size=8, state=state)
        torch.testing.assert_close(ours, formula(*x, normalize, *(state or ())))


def test_packed_segments_do_not_see_each_other():
    x = make(20)
    ids = torch.tensor([[0] * 7 + [1] + [2] * 12, [3] * 19 + [4]])
    ours, *state = run(*x, normalize=True, mask=packed(ids), chunk_size=8)
    for row, bounds in enumerate(([0, 7, 8, 20], [0, 19, 20])):
        for i in range(len(bounds) - 1):
            part = slice(bounds[i], bounds[i + 1])
            separate, *last = formula(*(t[:, :, part] for t in x[:4]), x[4], True)
            torch.testing.assert_close(ours[row, :, part], separate[row])
        for mine, theirs in zip(state, last, strict=True):
            torch.testing.assert_close(mine[row], theirs[row])


def test_padding_does_not_change_the_state():
    x, padding = make(9), torch.tensor([True, False, False, True, True, False, True, True, False])
    mask = AttentionMask(causal=True, padding=padding.expand(B, -1))
    out, *state = run(*x, normalize=True, mask=mask)
    exact, *last = formula(*(t[:, :, padding] for t in x[:4]), x[4], True)
    torch.testing.assert_close(out[:, :, padding], exact)
    torch.testing.assert_close(state, last)


def test_strong_decay_neither_overflows_nor_cancels():
    x = make(50, strength=1e4)
    leaves = [t.float().requires_grad_() for t in x]
    out, *_ = run(*leaves, normalize=True)
    torch.testing.assert_close(out, formula(*x, True)[0].float(), atol=1e-5, rtol=1e-5)
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves)


def test_gradients():
    x = [t.requires_grad_() for t in make(5)]
    ids = torch.tensor([[0, 0, 0, 1, 1]]).expand(B, -1)

    def call(*x):
        out, kv, z = run(*x, normalize=True, mask=packed(ids), chunk_size=2)
        return out, kv, z

    assert torch.autograd.gradcheck(call, x, fast_mode=True)


def test_equals_flash_linear_attention(naive):
    """100 tokens are several chunks; the bonus has either sign."""
    reference = naive("ops/rwkv6/recurrent_naive.py").naive_recurrent_rwkv6
    q, k, v, decay, bonus = (t.float() for t in make(100, positive=False))
    bonus = bonus - 0.5
    start = torch.randn(B, HKV, D, E)
    k2, v2, decay2 = (t.repeat_interleave(G, 1) for t in (k, v, decay))
    theirs, last = reference(
        q, k2, v2, decay2, bonus.repeat_interleave(G, 0), 1.0, start.repeat_interleave(G, 1), True
    )
    state = LinearState(start, torch.zeros(B, HKV, D))
    out, kv, _ = run(q, k, v, decay, bonus, state=state, chunk_size=32)
    torch.testing.assert_close(out, theirs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(kv, last[:, ::G], atol=1e-5, rtol=1e-4)


def test_empty_sequence():
    x = make(0)
    state = LinearState(torch.randn(B, HKV, D, E).double(), torch.rand(B, HKV, D).double())
    out, *last = run(*x, normalize=True, state=state)
    assert out.shape == (B, HKV * G, 0, E)
    assert all(torch.equal(mine, given) for mine, given in zip(last, state, strict=True))
