"""The full-matrix gate against a dense formula and the gate per key channel."""

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.ops.gated.matrix_gate import matrix_gated_attention
from attnzoo.ops.linear.api import linear_attention
from tests.helpers import by_sequence

B, HKV, G, D, E = 2, 2, 2, 5, 3


def make(length):
    q, k = (torch.rand(B, HKV * g, length, D, dtype=torch.float64) for g in (G, 1))
    v = torch.randn(B, HKV, length, E, dtype=torch.float64)
    return q, k, v, -torch.rand(B, HKV, length, D, E, dtype=torch.float64)


def packed(ids):
    return AttentionMask(causal=True, segment_ids=ids)


@by_sequence
def run(q, k, v, decay, **options):
    return matrix_gated_attention(q, k, v, log_decay=lambda take: take(decay, 2), **options)


@pytest.mark.parametrize("normalize", [True, False])
def test_equals_formula(normalize):
    """Each value channel has a matrix of attention weights, from products of decays."""
    q, k, v, decay = make(9)
    ours = run(q, k, v, decay, normalize=normalize, return_state=True, impl="torch")
    assert ours.impl == ("torch", "token by token; named in the options")
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


def test_equal_decays_for_all_values_match_the_gate_per_key_channel():
    q, k, v, decay = make(70)
    decay = decay[..., :1].expand(-1, -1, -1, -1, E)
    ours = run(q, k, v, decay, normalize=True, return_state=True)
    theirs = linear_attention(q, k, v, log_decay=decay[..., 0], normalize=True, return_state=True)
    torch.testing.assert_close(ours.out, theirs.out)
    torch.testing.assert_close(ours.state.kv, theirs.state.kv)
    torch.testing.assert_close(ours.state.k[..., 0], theirs.state.k)


def test_packed_segments_and_parts_equal_separate_calls():
    x = make(40)
    ids = torch.tensor([[0] * 16 + [1] * 24, [2] * 5 + [3] * 35])
    ours = run(*x, normalize=True, mask=packed(ids), return_state=True)
    for row, cut in enumerate((16, 5)):
        for part in slice(cut), slice(cut, 40):
            separate = run(*(t[[row]][:, :, part] for t in x), normalize=True, return_state=True)
            torch.testing.assert_close(ours.out[[row]][:, :, part], separate.out)
        for mine, theirs in zip(ours.state, separate.state, strict=True):
            torch.testing.assert_close(mine[[row]], theirs)
    whole = run(*x, return_state=True)
    rest = run(
        *(t[:, :, 5:] for t in x),
        state=run(*(t[:, :, :5] for t in x), return_state=True).state,
        return_state=True,
    )
    torch.testing.assert_close(rest.out, whole.out[:, :, 5:])
    torch.testing.assert_close(rest.state, whole.state)


def recurrence(q, k, v, decay, kv, z, normalize):
    """Compute one token after another: the output of one row, and the last state."""
    outs = []
    for t in range(k.shape[1]):
        ones = k[:, t, :, None].expand(-1, -1, v.shape[2])
        kv = decay[:, t].exp() * kv + ones * v[:, t, None]
        z = decay[:, t].exp() * z + ones
        query = q[:, t].unflatten(0, (HKV, G))
        out = torch.einsum("hgd,hde->hge", query, kv)
        if normalize:
            out = out / (torch.einsum("hgd,hde->hge", query, z) + 1e-6)
        outs.append(out.flatten(0, 1))
    return torch.stack(outs, 1), (kv, z)


@pytest.mark.parametrize("normalize", [True, False])
def test_equals_the_recurrence(normalize):
    """With padding, packed segments, a state and several blocks of gates."""
    ids = torch.tensor([[0] * 16 + [1] * 24, [2] * 5 + [3] * 35])
    padding = torch.rand(B, 40) > 0.3
    mask = AttentionMask(causal=True, padding=padding, segment_ids=ids)
    x, before = make(40), run(*make(7), return_state=True).state
    options = {"mask": mask, "state": before, "normalize": normalize, "return_state": True}
    ours = run(*x, **options)
    for row in range(B):
        state = [y[row] for y in before]
        for segment in ids[row].unique():
            tokens = padding[row] & (ids[row] == segment)
            given = [y[row][:, tokens] for y in x]
            out, last = recurrence(*given, *state, normalize)
            torch.testing.assert_close(ours.out[row][:, tokens], out)
            state = [torch.zeros_like(y) for y in last]
        torch.testing.assert_close(tuple(y[row] for y in ours.state), last)


def test_padding_does_not_change_the_state():
    q, k, v, decay = make(9)
    padding = torch.tensor([True, False, False, True, True, False, True, True, False])
    mask = AttentionMask(causal=True, padding=padding.expand(B, -1))
    padded = run(q, k, v, decay, mask=mask, normalize=True, return_state=True)
    expected = run(*(t[:, :, padding] for t in (q, k, v, decay)), normalize=True, return_state=True)
    torch.testing.assert_close(padded.out[:, :, padding], expected.out)
    torch.testing.assert_close(padded.state, expected.state)


def test_gradients():
    x = [t.requires_grad_() for t in make(4)]
    assert torch.autograd.gradcheck(lambda *x: run(*x, normalize=True).out, x, fast_mode=True)


def test_empty_sequence():
    ours = run(*make(0), return_state=True)
    assert ours.out.shape == (B, HKV * G, 0, E)
    assert ours.state.kv.eq(0).all()
