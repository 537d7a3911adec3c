"""The full-matrix gate against a dense formula, and in the case where it is a vector's."""

import pytest
import torch

from attnzoo.ops.linear import linear_attention
from attnzoo.ops.matrix_gate import matrix_gated_attention

B, HKV, G, D, E = 2, 2, 2, 5, 3


def make(length):
    q, k = (torch.rand(B, HKV * g, length, D, dtype=torch.float64) for g in (G, 1))
    v = torch.randn(B, HKV, length, E, dtype=torch.float64)
    return q, k, v, -torch.rand(B, HKV, length, D, E, dtype=torch.float64)


def run(q, k, v, decay, **options):
    return matrix_gated_attention(
        q, k, v, log_decay=lambda start, stop: decay[:, :, start:stop], **options
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_equals_formula(normalize):
    """Every value channel attends with a matrix of its own, of products of what is kept."""
    q, k, v, decay = make(9)
    ours = run(q, k, v, decay, normalize=normalize, return_state=True)
    k, v, decay = (t.repeat_interleave(G, 1) for t in (k, v, decay))
    total = decay.cumsum(2)
    since = (total[:, :, :, None] - total[:, :, None]).exp()  # [B, H, T, S, D, E]
    since = since * torch.ones(9, 9).tril()[:, :, None, None]
    weights = torch.einsum("bhtd,bhsd,bhtsde->bhets", q, k, since)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(ours.out, torch.einsum("bhets,bhse->bhte", weights, v))
    kv = torch.einsum("bhsd,bhse,bhsde->bhde", k, v, since[:, :, -1])
    torch.testing.assert_close(ours.state.kv, kv[:, ::G])


def test_alike_for_all_values_it_is_the_vector_gate():
    q, k, v, decay = make(70)
    decay = decay[..., :1].expand(-1, -1, -1, -1, E)
    ours = run(q, k, v, decay, normalize=True, return_state=True)
    theirs = linear_attention(q, k, v, log_decay=decay[..., 0], normalize=True, return_state=True)
    torch.testing.assert_close(ours.out, theirs.out)
    torch.testing.assert_close(ours.state.kv, theirs.state.kv)
    torch.testing.assert_close(ours.state.k[..., 0], theirs.state.k)


def test_packing_and_cuts():
    x = make(40)
    ids = torch.tensor([[0] * 16 + [1] * 24, [2] * 5 + [3] * 35])
    ours = run(*x, normalize=True, segment_ids=ids, return_state=True)
    for row, cut in enumerate((16, 5)):
        for part in slice(cut), slice(cut, 40):
            alone = run(*(t[[row]][:, :, part] for t in x), normalize=True, return_state=True)
            torch.testing.assert_close(ours.out[[row]][:, :, part], alone.out)
        for mine, theirs in zip(ours.state, alone.state, strict=True):
            torch.testing.assert_close(mine[[row]], theirs)
    whole = run(*x, return_state=True)
    rest = run(
        *(t[:, :, 5:] for t in x),
        state=run(*(t[:, :, :5] for t in x), return_state=True).state,
        return_state=True,
    )
    torch.testing.assert_close(rest.out, whole.out[:, :, 5:])
    torch.testing.assert_close(rest.state, whole.state)


def test_gradients():
    x = [t.requires_grad_() for t in make(4)]
    assert torch.autograd.gradcheck(lambda *x: run(*x, normalize=True).out, x, fast_mode=True)


def test_no_token():
    ours = run(*make(0), return_state=True)
    assert ours.out.shape == (B, HKV * G, 0, E)
    assert ours.state.kv.eq(0).all()
