"""mLSTM against its unstabilised formula in float64, and against transformers' xLSTM."""

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import StabilizedState
from attnzoo.errors import UnsupportedError
from attnzoo.ops.gated.mlstm import mlstm_attention, stabilizer
from tests.helpers import by_sequence, in_form

B, HKV, G, D, E = 2, 2, 2, 5, 3
FORMS_AND_IMPLS = [
    ("chunk", "torch"), ("chunk", "reference"), ("steps", "torch"), ("parallel", "torch"),
    ("steps", "reference"), ("steps", "auto"), ("chunk", "auto"),
]  # fmt: skip


def make(length, spread=2.0):
    q, k = (torch.randn(B, HKV * g, length, D, dtype=torch.float64) for g in (G, 1))
    v = torch.randn(B, HKV, length, E, dtype=torch.float64)
    log_forget = torch.nn.functional.logsigmoid(torch.randn(B, HKV, length).double() * spread)
    return q, k, v, log_forget, torch.randn(B, HKV, length).double() * spread


def formula(q, k, v, log_forget, log_input):
    """Compute one token after another, without a stabiliser."""
    q = q.unflatten(1, (HKV, G))
    kv, z, outs = torch.zeros(B, HKV, D, E).double(), torch.zeros(B, HKV, D).double(), []
    for t in range(k.shape[2]):
        forget_gate, input_gate = (x[:, :, t, None].exp() for x in (log_forget, log_input))
        z = z * forget_gate + input_gate * k[:, :, t]
        kv = kv * forget_gate[..., None] + (input_gate * k[:, :, t])[..., None] * v[:, :, t, None]
        numerator = torch.einsum("bhgd,bhde->bhge", q[:, :, :, t], kv)
        denominator = torch.einsum("bhgd,bhd->bhg", q[:, :, :, t], z).abs().clamp(min=1)
        outs.append(numerator / denominator[..., None])
    return torch.stack(outs, 3).flatten(1, 2), kv, z


def packed(ids):
    return AttentionMask(causal=True, segment_ids=ids)


def run(q, k, v, log_forget, log_input, form="chunk", **options):
    attend = in_form(form, mlstm_attention)
    return by_sequence(attend)(q, k, v, log_forget=log_forget, log_input=log_input, **options)


@pytest.mark.parametrize(("form", "impl"), FORMS_AND_IMPLS)
@pytest.mark.parametrize("length", [1, 2, 8, 31])
def test_equals_formula(form, impl, length):
    x = make(length)
    out, kv, z = formula(*x)
    ours = run(*x, form=form, impl=impl, chunk_size=8, return_state=True)
    torch.testing.assert_close(ours.out, out)
    factor = ours.state.m.exp()
    torch.testing.assert_close(ours.state.kv * factor[..., None, None], kv)
    torch.testing.assert_close(ours.state.k * factor[..., None], z)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 8])
def test_16_bit_gates_at_padding(length, dtype):
    q, k, v, *gates = (x.to(dtype) for x in make(length))
    mask = AttentionMask(causal=True, padding=torch.arange(length).expand(B, -1) != 0)
    expected = run(q, k, v, *(x.float() for x in gates), mask=mask, return_state=True)
    found = run(q, k, v, *gates, mask=mask, return_state=True)
    for ours, right in zip((found.out, *found.state), (expected.out, *expected.state), strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=0)


@pytest.mark.parametrize("cut", [1, 8, 19])
def test_prefill_then_decode_matches_one_pass(cut):
    x = make(20, spread=5.0)
    one = run(*x, return_state=True, chunk_size=8)
    first = run(*(t[:, :, :cut] for t in x), return_state=True, chunk_size=8)
    rest = run(*(t[:, :, cut:] for t in x), state=first.state, return_state=True, chunk_size=8)
    torch.testing.assert_close(torch.cat([first.out, rest.out], 2), one.out)
    for mine, theirs in zip(rest.state, one.state, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_packed_segments_do_not_see_each_other():
    """Even if the first segment has huge gates: its stabiliser must not affect the second."""
    x = make(20)
    x[4][:, :, :7] += 1500
    ids = torch.tensor([[0] * 7 + [1] + [2] * 12, [3] * 7 + [4] * 13])
    ours = run(*x, mask=packed(ids), chunk_size=8, return_state=True)
    for row, bounds in enumerate(([0, 7, 8, 20], [0, 7, 20])):
        for i in range(len(bounds) - 1):
            part = slice(bounds[i], bounds[i + 1])
            separate = run(*(t[:, :, part] for t in x), return_state=True)
            torch.testing.assert_close(ours.out[row, :, part], separate.out[row])
        for mine, theirs in zip(ours.state, separate.state, strict=True):
            torch.testing.assert_close(mine[row], theirs[row])


def test_sequences_of_one_row_continue_from_their_states():
    """One of them is empty, and keeps its state; two tokens belong to none."""
    x, lengths = [t[:1] for t in make(13, spread=5.0)], [4, 0, 7]
    before = [run(*(t[:1] for t in make(5)), return_state=True).state for _ in lengths]
    state = StabilizedState(*map(torch.cat, zip(*before, strict=True)))
    starts, sizes = torch.tensor([0, 5, 5]), torch.tensor(lengths)
    options = {"log_forget": x[3], "log_input": x[4], "return_state": True, "chunk_size": 4}
    sequences = Sequences(starts, sizes, 7)
    ours = mlstm_attention(*x[:3], sequences=sequences, state=state, **options)
    for i, (start, size) in enumerate(zip(starts, lengths, strict=True)):
        part = slice(start, start + size)
        right = run(*(t[:, :, part] for t in x), state=before[i], return_state=True, form="steps")
        torch.testing.assert_close(ours.out[:, :, part], right.out)
        scale = ours.state.m[i].exp() / right.state.m[0].exp()
        torch.testing.assert_close(ours.state.kv[i] * scale[:, None, None], right.state.kv[0])
        torch.testing.assert_close(ours.state.m[i], right.state.m[0])
    assert not ours.out[:, :, [4, 12]].any()


@pytest.mark.parametrize("size", [1e3, -1e3])
def test_extreme_input_gates_stay_finite(size):
    """Without a stabiliser, exp(1000) overflows and exp(-1000) vanishes."""
    x = [t.float().requires_grad_() for t in make(30)]
    out = run(*x[:4], x[4] + size).out
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in x)
    if size < 0:
        assert out.eq(0).all()  # less than exp(-900), divided by 1
    else:
        first = x[2][:, :, 0].repeat_interleave(G, 1)  # one token: its value, of either sign
        torch.testing.assert_close(out[:, :, 0].abs(), first.abs(), atol=1e-4, rtol=1e-3)


def test_padding_does_not_change_the_state():
    q, k, v, log_forget, log_input = make(9)
    padding = ~torch.tensor([True, False, False, True, True, False, False, True, False])
    mask = AttentionMask(causal=True, padding=padding.expand(B, -1))
    padded = run(q, k, v, log_forget, log_input, mask=mask, return_state=True)
    separate = run(*(t[:, :, padding] for t in (q, k, v, log_forget, log_input)), return_state=True)
    torch.testing.assert_close(padded.out[:, :, padding], separate.out)
    torch.testing.assert_close(padded.state, separate.state)


def test_stabilizer_equals_its_recurrence():
    _, _, _, log_forget, log_input = make(37, spread=5.0)
    m, expected = torch.zeros(B, HKV).double(), []
    for t in range(37):
        m = torch.maximum(log_forget[:, :, t] + m, log_input[:, :, t])
        expected.append(m)
    ours = stabilizer(log_forget, log_input, torch.arange(37) == 0, torch.zeros(()))
    torch.testing.assert_close(ours, torch.stack(expected, 2))


def test_gradients():
    x = [t.requires_grad_() for t in make(5)]
    ids = torch.tensor([[0, 0, 0, 1, 1]]).expand(B, -1)

    def call(*x):
        return run(*x, mask=packed(ids), chunk_size=2).out

    assert torch.autograd.gradcheck(call, x, fast_mode=True)


def test_equals_transformers():
    """Transformers scales queries and takes logits of gates; 100 tokens are several chunks."""
    from transformers.models.xlstm.modeling_xlstm import mlstm_recurrent_sequence_native

    q, k, v, _, log_input = make(100)
    gate = torch.randn(B, HKV, 100).double() + 2
    k2, v2, log_input2, gate2 = (t.repeat_interleave(G, 1) for t in (k, v, log_input, gate))
    theirs = mlstm_recurrent_sequence_native(
        q * D**0.5, k2, v2, log_input2, gate2, eps=0.0, dtype_state=torch.float64
    )
    ours = run(q, k, v, torch.nn.functional.logsigmoid(gate), log_input, chunk_size=32).out
    torch.testing.assert_close(ours, theirs)


def test_the_output_names_its_implementation():
    assert run(*make(9), impl="torch").impl == ("torch", "chunk form; named in the options")
    assert run(*make(9), form="steps").impl.impl in ("cpp", "torch")
    assert run(*make(9)).impl.impl in ("cpp", "torch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"impl": "flex"},
            "linear_attention has no impl 'flex'.*auto, triton, fla, cpp, torch",
        ),
        ({"chunk_size": 0}, "chunk_size must be an integer from 1 to"),
    ],
)
def test_unsupported_options_are_refused(options, message):
    with pytest.raises(UnsupportedError, match=message):
        run(*make(3), **options)


def test_empty_sequence():
    state = StabilizedState(*(torch.randn(B, HKV, *s).double() for s in ((D, E), (D,), ())))
    ours = run(*make(0), state=state, return_state=True)
    assert ours.out.shape == (B, HKV * G, 0, E)
    torch.testing.assert_close(ours.state, state)
