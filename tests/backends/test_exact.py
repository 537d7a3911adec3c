"""The exact backends beyond the conformance suite: state, windows, choices and refusals."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import ImplChoice, KVState
from attnzoo.errors import ConfigError, UnsupportedError
from tests.helpers import build, qkv

NAMES = ["softmax", "flash"]
CAUSAL = AttentionMask(causal=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_keys_and_values(name):
    q, k, v = qkv()
    state = build(name)(q, k, v, return_state=True).state
    assert isinstance(state, KVState)
    assert torch.equal(state.k, k)
    assert torch.equal(state.v, v)
    assert state.real.all()
    assert build(name).keeps_all_keys
    assert build(name)(q, k, v).state is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [1, 4])
def test_the_state_of_a_window_drops_earlier_keys(name, window):
    q, k, v = qkv()
    backend = build(name, window=window)
    state = backend(q, k, v, return_state=True).state
    assert torch.equal(state.k, k[:, :, 9 - (window - 1) :])
    assert not backend.keeps_all_keys


@pytest.mark.parametrize("name", NAMES)
def test_the_state_keeps_the_first_tokens(name):
    """Of each row, wherever its padding is; a row that fits into the state has none twice."""
    q, k, v = qkv(batch=3)
    real = torch.ones(3, 9, dtype=torch.bool)
    real[1, :3], real[2, 1:7] = False, False
    backend = build(name, window=3, num_sinks=2)
    mask = AttentionMask(causal=True, padding=real)
    state = backend(q, k, v, mask=mask, return_state=True).state
    assert state.k.shape[2] == 2 + 2
    assert state.real.tolist() == [[True] * 4, [True] * 4, [True, False, True, True]]
    for row, kept in enumerate(([0, 1, 7, 8], [3, 4, 7, 8], [0, 7, 8])):
        assert torch.equal(state.k[row][:, state.real[row]], k[row][:, kept])
    assert not backend.keeps_all_keys


@pytest.mark.parametrize("name", NAMES)
def test_first_tokens_need_a_window(name):
    for options, message in (
        ({"num_sinks": 2}, "num_sinks needs a window, got num_sinks=2 with window=None"),
        ({"num_sinks": -1, "window": 3}, "num_sinks must be at least 0 tokens, got -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(name, **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_window_counts_real_keys_only(name):
    """Right padding of a prompt does not take the place of real keys in the window."""
    q, k, v = qkv()
    real = torch.arange(9) < torch.tensor([[9], [5]])
    backend = build(name, window=4)
    mask = AttentionMask(causal=True, padding=real)
    state = backend(q, k, v, mask=mask, return_state=True).state
    assert torch.equal(state.k[1], k[1, :, 2:5])
    assert torch.equal(state.k[0], k[0, :, 6:])
    assert state.real.all()


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_packed_rows_is_that_of_the_last_segment(name):
    q, k, v = qkv()
    ids = (torch.arange(9) >= 6).long().expand(2, -1)
    mask = AttentionMask(causal=True, segment_ids=ids)
    state = build(name)(q, k, v, mask=mask, return_state=True).state
    assert torch.equal(state.real, ids == 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [True, False])
def test_the_smaller_window_applies(name, causal):
    """The model's window is in the mask, the backend's in the options."""
    q, k, v = qkv()
    plain = build("softmax", causal=causal)
    for own, given in ((3, 5), (5, 3)):
        mask = AttentionMask(causal=causal, window=(given - 1, 0) if causal else (given, given))
        ours = build(name, causal=causal, window=own)(q, k, v, mask=mask).out
        reach = (2, 0) if causal else (3, 3)
        right = plain(q, k, v, mask=AttentionMask(causal=causal, window=reach)).out
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", ["function", "bias"])
def test_a_window_with_a_mask_function_or_a_bias(name, extra):
    """They are given per position, and the window does not count padding there either."""
    q, k, v = qkv()
    real = torch.arange(9) != torch.tensor([[9], [4]])
    rank = real.cumsum(1)
    band = (rank[:, :, None] - rank[:, None, :] < 4)[:, None]
    seen = band & real[:, None, None, :] & torch.ones(9, 9, dtype=torch.bool).tril()
    draw = torch.Generator().manual_seed(1)
    if extra == "function":
        whole = (torch.rand(2, 1, 9, 9, generator=draw) < 0.7) & real[:, None, None, :]
        mask, options = AttentionMask(function=lambda: whole, causal=True, padding=real), {}
        seen = seen & whole
    else:
        mask = AttentionMask(causal=True, padding=real)
        options = {"bias": torch.randn(1, 4, 9, 9, generator=draw, dtype=torch.float64)}
    ours = build(name, window=4)(q, k, v, mask=mask, **options).out
    plain = AttentionMask(function=lambda: seen, padding=real)
    right = build("softmax")(q, k, v, mask=plain, **options).out
    torch.testing.assert_close(ours.transpose(1, 2)[real], right.transpose(1, 2)[real])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"window": 3}], ids=str)
def test_weights_are_in_the_order_of_the_inputs(name, options):
    q, k, v = qkv()
    real = torch.rand(2, 9, generator=torch.Generator().manual_seed(4)) < 0.6
    mask = AttentionMask(causal=True, padding=real)
    output = build(name, **options)(q, k, v, mask=mask, return_weights=True)
    assert not output.weights.masked_select(~real[:, None, None, :]).any()
    repeated = v.repeat_interleave(2, 1)
    torch.testing.assert_close(output.weights @ repeated, output.out)
    torch.testing.assert_close(
        output.weights.sum(-1)[:, 0][real], torch.ones(int(real.sum())).double()
    )


def test_weights_over_a_state():
    q, k, v = qkv()
    rest = [x[:, :, 6:] for x in (q, k, v)]
    first = build("softmax")(*(x[:, :, :6] for x in (q, k, v)), return_state=True)
    weights = build("softmax")(*rest, state=first.state, return_weights=True).weights
    whole = build("softmax")(q, k, v, return_weights=True).weights
    torch.testing.assert_close(weights, whole[:, :, 6:])
    with pytest.raises(UnsupportedError, match=r"layer.attn: .*use_cache=False"):
        build("flash")(*rest, state=first.state, return_weights=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_query_without_keys_by_its_bias_gives_zeros(name):
    """As in PyTorch's SDPA: some models pass -inf at every key of a padding token."""
    q, k, v = (x.requires_grad_() for x in qkv())
    bias = torch.randn(1, 4, 9, 9, dtype=q.dtype)
    bias[:, :, 5] = -torch.inf
    bias[:, :, 4, 2:] = -torch.inf
    options = {"mask": AttentionMask(causal=False), "bias": bias}
    out = build(name, causal=False)(q, k, v, **options).out
    seen = torch.arange(9) != 5
    exact = torch.softmax((q @ k.repeat_interleave(2, 1).mT * 8**-0.5 + bias)[:, :, seen], -1)
    torch.testing.assert_close(out[:, :, seen], exact @ v.repeat_interleave(2, 1))
    assert (out[:, :, 5] == 0).all()
    for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_the_choice_is_recorded():
    for name, impl in (("softmax", "torch"), ("flash", "sdpa")):
        backend = build(name)
        assert backend.ran is None
        output = backend(*qkv())
        assert backend.ran == output.impl
        assert backend.ran.impl == impl
    backend = build("flash", impl="sdpa", window=4)
    padding = torch.arange(9) < torch.tensor([[9], [5]])
    backend(*qkv(), mask=AttentionMask(causal=True, padding=padding))
    assert backend.ran == ImplChoice("sdpa", "named in the options")


def test_a_named_impl_is_never_replaced():
    with pytest.raises(UnsupportedError, match="impl='xformers' cannot run this call"):
        build("flash", impl="xformers")(*qkv(dtype=torch.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[0], k[0], v[0]), r"q must be \[B, H, T, D\], got \[4, 9, 8\]; k"),
        (lambda q, k, v: (q[0, 0, 0], k, v), r"q must be \[B, H, T, D\], got \[8\]\."),
        (lambda q, k, v: (q[:, :3], k, v), "multiple of the number of key heads, got 3 and 2"),
        (lambda q, k, v: (q, k, v[:, :1]), "k and v must agree in batch, heads and length"),
        (lambda q, k, v: (q[..., :5], k, v), "q and k must agree in batch and in key size"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), "k and v must agree in batch, heads and length"),
        (lambda q, k, v: (q[:1], k, v), "q and k must agree in batch and in key size"),
        (lambda q, k, v: (q.long(), k, v), "q is int64, but must be one of bfloat16, float16, "),
        (lambda q, k, v: (q, k, v.to(torch.complex64)), "v is complex64"),
        (lambda q, k, v: (q[:, :3], k[..., :4], v), "q and k must .*; the number of query heads"),
    ],
)
def test_wrong_shapes_and_types_are_refused(name, change, words):
    with pytest.raises(
        UnsupportedError, match=rf"layer.attn: backend '{name}' cannot run .*{words}"
    ):
        build(name)(*change(*qkv()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["padding", "segment_ids"])
def test_a_mask_of_another_length_is_refused(name, field):
    wrong = torch.ones(2, 8, dtype=torch.bool if field == "padding" else torch.long)
    message = rf"{field} of the mask must be \[B, S\], here \[2, 9\], got \[2, 8\]"
    with pytest.raises(UnsupportedError, match=message):
        build(name)(*qkv(), mask=AttentionMask(causal=True, **{field: wrong}))


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_with_a_state_are_refused(name):
    q, k, v = qkv()
    backend = build(name)
    state = backend(q, k, v, return_state=True).state
    mask = AttentionMask(causal=True, segment_ids=torch.zeros(2, 9, dtype=torch.long))
    with pytest.raises(UnsupportedError, match="packed rows cannot continue from a state"):
        backend(q, k, v, mask=mask, state=state)


def test_flash_refuses_a_soft_cap():
    with pytest.raises(UnsupportedError, match=r"a soft cap of 30\.0 is given, which it does not"):
        build("flash")(*qkv(), softcap=30.0)


def test_reasons_come_as_a_list():
    q, k, v = qkv()
    inputs = AttentionInputs(q=q, k=k.long(), v=v, mask=CAUSAL, scale=1.0, softcap=2.0)
    reasons = build("flash").unsupported_reasons(inputs)
    assert len(reasons) == 2
    assert build("flash").unsupported_reasons(inputs._replace(k=k, softcap=None)) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_sinks", [0, 2])
def test_a_window_counts_the_query_under_4d_masks(name, num_sinks):
    """A causal layer has one window, whether the mask says that it is causal or is a 4-D tensor."""
    q, k, v = qkv()
    backend = build(name, window=3, num_sinks=num_sinks)
    seen = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    expected = backend(q, k, v).out
    found = backend(q, k, v, mask=AttentionMask(function=lambda: seen)).out
    bias = torch.zeros(1, 1, 9, 9).masked_fill(~seen, -torch.inf)
    added = backend(q, k, v, mask=AttentionMask(), bias=bias).out
    assert_close(found, expected)
    assert_close(added, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("of_model", [None, (4, 0)], ids=["", "window of the model"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("inside", [False, True], ids=["", "padding inside"])
@pytest.mark.parametrize("num_sinks", [0, 1])
def test_steps_after_padding(name, of_model, biased, inside, num_sinks):
    """Padding at the end of a prompt lies between real tokens once others follow."""
    q, k, v = qkv(batch=3)
    real = torch.ones(3, 9, dtype=torch.bool)
    real[1, 4:7], real[2, 2], real[2, 5:7] = False, not inside, False
    draw = torch.Generator().manual_seed(1)
    bias = torch.randn(1, 4, 9, 9, generator=draw, dtype=torch.float64) if biased else None
    backend = build(name, window=3, num_sinks=num_sinks)

    def run(begin, end, state=None):
        part = slice(begin, end)
        mask = AttentionMask(causal=True, padding=real[:, part], window=of_model)
        given = None if bias is None else bias[:, :, part, :end]
        inputs = (x[:, :, part] for x in (q, k, v))
        return backend(*inputs, mask=mask, bias=given, state=state, return_state=True)

    whole, state, parts = run(0, 9).out, None, []
    for begin, end in ((0, 7), (7, 8), (8, 9)):
        output = run(begin, end, state)
        state = output.state
        parts.append(output.out)
    ours = torch.cat(parts, 2)
    torch.testing.assert_close(ours.transpose(1, 2)[real], whole.transpose(1, 2)[real])
    assert state.k.shape[2] == 2 + num_sinks


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_packed_rows_with_padding_inside(name):
    q, k, v = qkv()
    ids = (torch.arange(9) >= 6).long().expand(2, 9)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[:, 2] = real[:, 7] = False
    mask = AttentionMask(causal=True, padding=real, segment_ids=ids, window=(5, 0))
    state = build(name, window=4)(q, k, v, mask=mask, return_state=True).state
    assert state.positions.tolist() == [[-1, 6, 8]] * 2
    assert torch.equal(state.k[:, :, 1:], k[:, :, [6, 8]])
