"""mLSTM against its unstabilised formula in float64, and against transformers' xLSTM."""

import pytest
import torch

from attnzoo.ops.mlstm import NOTHING, mlstm_attention, stabilizer
from attnzoo.state import StabilizedState

B, HKV, G, D, E = 2, 2, 2, 5, 3
WAYS = [("chunk", "torch"), ("chunk", "reference"), ("recurrent", "torch"), ("parallel", "torch")]


def make(length, spread=2.0):
    q, k = (torch.randn(B, HKV * g, length, D, dtype=torch.float64) for g in (G, 1))
    v = torch.randn(B, HKV, length, E, dtype=torch.float64)
    forget = torch.nn.functional.logsigmoid(torch.randn(B, HKV, length).double() * spread)
    return q, k, v, forget, torch.randn(B, HKV, length).double() * spread


def formula(q, k, v, log_forget, log_input):
    """Take token after token, without a stabiliser."""
    q = q.unflatten(1, (HKV, G))
    kv, z, outs = torch.zeros(B, HKV, D, E).double(), torch.zeros(B, HKV, D).double(), []
    for t in range(k.shape[2]):
        forget, write = (x[:, :, t, None].exp() for x in (log_forget, log_input))
        z = z * forget + write * k[:, :, t]
        kv = kv * forget[..., None] + (write * k[:, :, t])[..., None] * v[:, :, t, None]
        above = torch.einsum("bhgd,bhde->bhge", q[:, :, :, t], kv)
        below = torch.einsum("bhgd,bhd->bhg", q[:, :, :, t], z).abs().clamp(min=1)
        outs.append(above / below[..., None])
    return torch.stack(outs, 3).flatten(1, 2), kv, z


def run(q, k, v, forget, write, **options):
    return mlstm_attention(q, k, v, log_forget=forget, log_input=write, **options)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("length", [1, 2, 8, 31])
def test_equals_formula(way, length):
    x = make(length)
    out, kv, z = formula(*x)
    ours = run(*x, form=way[0], impl=way[1], chunk_size=8, return_state=True)
    torch.testing.assert_close(ours.out, out)
    lifted = ours.state.m.exp()
    torch.testing.assert_close(ours.state.kv * lifted[..., None, None], kv)
    torch.testing.assert_close(ours.state.k * lifted[..., None], z)


@pytest.mark.parametrize("cut", [1, 8, 19])
def test_cut_anywhere(cut):
    x = make(20, spread=5.0)
    one = run(*x, return_state=True, chunk_size=8)
    first = run(*(t[:, :, :cut] for t in x), return_state=True, chunk_size=8)
    rest = run(*(t[:, :, cut:] for t in x), state=first.state, return_state=True, chunk_size=8)
    torch.testing.assert_close(torch.cat([first.out, rest.out], 2), one.out)
    for mine, theirs in zip(rest.state, one.state, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_packed_sequences_stay_apart():
    """Also where the first one's gates are huge: its stabiliser must not press on the second."""
    x = make(20)
    x[4][:, :, :7] += 1500
    ids = torch.tensor([[0] * 7 + [1] + [2] * 12, [3] * 7 + [4] * 13])
    ours = run(*x, segment_ids=ids, chunk_size=8, return_state=True)
    for row, bounds in enumerate(([0, 7, 8, 20], [0, 7, 20])):
        for i in range(len(bounds) - 1):
            part = slice(bounds[i], bounds[i + 1])
            alone = run(*(t[:, :, part] for t in x), return_state=True)
            torch.testing.assert_close(ours.out[row, :, part], alone.out[row])
        for mine, theirs in zip(ours.state, alone.state, strict=True):
            torch.testing.assert_close(mine[row], theirs[row])


@pytest.mark.parametrize("size", [1e3, -1e3])
def test_extreme_input_gates(size):
    """Exponentials of 1,000 have no number: unstabilised, one overflows and the other vanishes."""
    x = [t.float().requires_grad_() for t in make(30)]
    out = run(*x[:4], x[4] + size).out
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in x)
    if size < 0:
        assert out.eq(0).all()  # less than exp(-900) beside the 1 that it is divided by
    else:
        first = x[2][:, :, 0].repeat_interleave(G, 1)  # of one token, its value, of either sign
        torch.testing.assert_close(out[:, :, 0].abs(), first.abs(), atol=1e-4, rtol=1e-3)


def test_padding_keeps_the_state():
    q, k, v, forget, write = make(9)
    gone = torch.tensor([True, False, False, True, True, False, False, True, False])
    real = ~gone
    padded = run(
        q,
        k.masked_fill(gone[:, None], 0),
        v,
        forget.masked_fill(gone, 0),
        write.masked_fill(gone, NOTHING),
        return_state=True,
    )
    alone = run(*(t[:, :, real] for t in (q, k, v, forget, write)), return_state=True)
    torch.testing.assert_close(padded.out[:, :, real], alone.out)
    torch.testing.assert_close(padded.state, alone.state)


def test_stabilizer_is_the_largest_weight():
    _, _, _, forget, write = make(37, spread=5.0)
    m, expected = torch.zeros(B, HKV).double(), []
    for t in range(37):
        m = torch.maximum(forget[:, :, t] + m, write[:, :, t])
        expected.append(m)
    ours = stabilizer(forget, write, torch.zeros(B, HKV).double(), None)
    torch.testing.assert_close(ours, torch.stack(expected, 2))


def test_gradients():
    x = [t.requires_grad_() for t in make(5)]
    ids = torch.tensor([[0, 0, 0, 1, 1]]).expand(B, -1)

    def call(*x):
        return run(*x, segment_ids=ids, chunk_size=2).out

    assert torch.autograd.gradcheck(call, x, fast_mode=True)


def test_equals_transformers():
    """It scales the queries and takes logits for gates; over 100 tokens, so several chunks."""
    from transformers.models.xlstm.modeling_xlstm import mlstm_recurrent_sequence_native

    q, k, v, _, write = make(100)
    gate = torch.randn(B, HKV, 100).double() + 2
    k2, v2, write2, gate2 = (t.repeat_interleave(G, 1) for t in (k, v, write, gate))
    theirs = mlstm_recurrent_sequence_native(
        q * D**0.5, k2, v2, write2, gate2, eps=0.0, dtype_state=torch.float64
    )
    ours = run(q, k, v, torch.nn.functional.logsigmoid(gate), write, chunk_size=32).out
    torch.testing.assert_close(ours, theirs)


def test_no_token():
    state = StabilizedState(*(torch.randn(B, HKV, *s).double() for s in ((D, E), (D,), ())))
    ours = run(*make(0), state=state, return_state=True)
    assert ours.out.shape == (B, HKV * G, 0, E)
    torch.testing.assert_close(ours.state, state)
