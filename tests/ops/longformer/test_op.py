"""Sliding windows and global tokens, against a dense formula and transformers' own Longformer."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.ops.longformer import by_band
from attnzoo.ops.longformer import decode as decoding
from attnzoo.ops.longformer.api import GlobalTokens, longformer_attention
from attnzoo.ops.longformer.call import LongformerCall
from attnzoo.ops.longformer.reference import run_reference
from attnzoo.ops.window.pattern import Pattern, global_indices
from tests.helpers import D, E, H, draw, qkv
from tests.ops.flex_on_cpu import flex_on_cpu

B, T = 2, 45
PATHS = ["reference", "torch", "cpp"]


@pytest.fixture(params=PATHS)
def attend(request, monkeypatch):
    """Return the op by one of its paths, with blocks so short that there are several."""
    monkeypatch.setattr("attnzoo.ops.window.band.MIN_BLOCK", 8)
    impl = request.param
    return lambda *args, **options: run(*args, impl=impl, **options)


def run(q, k, v, *, causal=False, padding=None, segment_ids=None, limit=None, **options):
    """Return the output of the op, which takes the mask as one value."""
    mask = AttentionMask(causal=causal, padding=padding, segment_ids=segment_ids, window=limit)
    return longformer_attention(q, k, v, mask=mask, **options).out


def dense(
    q,
    k,
    v,
    *,
    window,
    dilation=1,
    causal=False,
    real=None,
    where=None,
    own=None,
    segments=None,
    bias=0,
    limit=T,
):
    """Fill the mask pair by pair over the real tokens, and apply softmax."""
    batch, heads, length, _ = q.shape
    windows = [window] * heads if isinstance(window, int) else window
    dilations = [dilation] * heads if isinstance(dilation, int) else dilation
    nobody = torch.zeros(batch, length, dtype=torch.bool)
    real, where = ~nobody if real is None else real, nobody if where is None else where
    marked, parts = where.tolist(), (nobody.long() if segments is None else segments).tolist()
    sees = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    for b in range(batch):
        places = real[b].nonzero()[:, 0].tolist()  # padding does not count
        for h in range(heads):
            found = []
            for i, query in enumerate(places):
                for j, key in enumerate(places):
                    steps, rest = divmod(abs(i - j), dilations[h])
                    near = rest == 0 and steps <= windows[h] - (1 if causal else 0)
                    near = near and abs(query - key) <= limit  # padding counts
                    hidden = (causal and j > i) or parts[b][query] != parts[b][key]
                    if (near or marked[b][key] or marked[b][query]) and not hidden:
                        found.append((query, key))
            sees[b, h, *zip(*found, strict=True)] = True

    def attention(q, k, v):
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT * D**-0.5 + bias).masked_fill(~sees, -torch.inf)
        return scores.softmax(-1).nan_to_num() @ v

    local = attention(q, k, v)
    return local if own is None else torch.where(where[:, None, :, None], attention(*own), local)


def padding(place):
    real = torch.ones(B, T, dtype=torch.bool)
    if place == "left":
        real[0, :11] = False
    elif place == "right":
        real[0, 30:] = False
    elif place == "interior":
        real[0, 5:9] = real[0, 20] = real[1, ::6] = False
    return real


def global_tokens():
    where = torch.zeros(B, T, dtype=torch.bool)
    where[0, [0, 12, 13]] = where[1, 40] = True
    return where


WINDOWS = {
    "plain": {"window": 5, "dilation": 1},
    "one": {"window": 1, "dilation": 1},
    "per head": {"window": [1, 3, 3, 9], "dilation": [1, 3, 3, 2]},
    "key head of two bands": {"window": [2, 4, 4, 4], "dilation": 2},
    "longer than the sequence": {"window": 50, "dilation": [1, 1, 60, 2]},
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("sizes", WINDOWS)
def test_every_path_equals_the_dense_formula(attend, sizes, causal):
    x, options = qkv(T), {**WINDOWS[sizes], "causal": causal}
    torch.testing.assert_close(attend(*x, **options), dense(*x, **options))
    own, where = qkv(T), global_tokens()
    for place in ("none", "interior"):
        real = None if place == "none" else padding(place)
        seen = where if real is None else where & real
        found = attend(*x, **options, padding=real, global_tokens=GlobalTokens(where, None, *own))
        expected = dense(*x, **options, real=real, where=seen, own=own)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("place", ["left", "right", "interior"])
def test_padding_is_not_counted(attend, place, causal):
    x, real, where = qkv(T), padding(place), global_tokens()
    options = {"window": [5, 5, 2, 2], "dilation": [1, 1, 1, 3], "causal": causal}
    expected = dense(*x, **options, real=real, where=where & real)
    clean = [t.masked_fill(~real[:, None, :, None], 0) for t in x]
    found = attend(*clean, **options, padding=real, global_tokens=where)
    torch.testing.assert_close(found, expected)
    assert (found.transpose(1, 2)[~real] == 0).all()


@pytest.mark.parametrize("place", ["none", "interior"])
def test_segments_are_separate(attend, place):
    x, real = qkv(T), padding(place)
    ids = torch.stack([torch.arange(T) // 16, (torch.arange(T) >= 3).long()])
    options = {"window": [9, 9, 4, 2], "dilation": [1, 1, 1, 3]}
    found = attend(*x, **options, padding=real, segment_ids=ids)
    torch.testing.assert_close(found, dense(*x, **options, real=real, segments=ids))


OWN = {  # which of the global tokens' queries, keys and values are their own
    "no global tokens": None,
    "none": (False, False, False),
    "all": (True, True, True),
    "queries": (True, False, False),
    "values": (False, False, True),
}
SIZES = {"window": [5, 5, 2, 2], "dilation": [1, 1, 1, 3]}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("place", ["none", "left", "interior"])
def test_fewer_queries_equal_their_rows(place, own, monkeypatch):
    """Queries are given from ``q_offset`` on, global queries for all tokens."""
    monkeypatch.setattr(by_band, "QUERY_BLOCK", 8)
    x, others, scores = qkv(T), qkv(T), draw(1, H, T, T)
    where, real = global_tokens(), None if place == "none" else padding(place)
    tokens = dense_own = None
    if (given := OWN[own]) is not None:
        seen = where if real is None else where & real
        tokens = GlobalTokens(
            where, None, *(y if has else None for y, has in zip(others, given, strict=True))
        )
        dense_own = [y if has else z for y, z, has in zip(others, x, given, strict=True)]
    for (first, count), bias in product([(44, 1), (12, 1), (13, 9), (16, 29)], [None, scores]):
        shared = {"bias": 0 if bias is None else bias, "causal": True, "real": real, **SIZES}
        if tokens is not None:
            shared |= {"where": seen, "own": dense_own}
        expected = dense(*x, **shared)[:, :, first : first + count]
        impls = ["auto", "torch", "reference"]
        calls = list(product(impls, [first, torch.tensor(first)]))
        if (place, own, bias) == ("none", "no global tokens", None):  # cpp refuses the others
            calls.append(("cpp", first))
        for impl, offset in calls:
            found = longformer_attention(
                x[0][:, :, first : first + count],
                *x[1:],
                **SIZES,
                mask=AttentionMask(causal=True, padding=real, q_offset=offset),
                global_tokens=tokens,
                bias=None if bias is None else bias[:, :, first : first + count],
                impl=impl,
            ).out
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("own", ["no global tokens", "none", "all"])
@pytest.mark.parametrize("place", ["none", "left", "interior"])
def test_decoding_equals_the_rows_of_the_dense_formula(place, own, monkeypatch):
    monkeypatch.setattr(decoding, "STEP_TOKENS", 8)
    x, others, real = qkv(T), qkv(T), padding(place)
    positions = () if OWN[own] is None else (0, 3, 14)
    where = real & torch.isin(real.cumsum(1) - 1, torch.tensor(positions))
    limit = T if positions else 6  # of the model's window, which rules out global tokens
    expected = dense(
        *x,
        **SIZES,
        causal=True,
        real=real,
        where=where,
        own=others if own == "all" else x,
        limit=limit,
    )
    for cuts in ([10, 20, 21, T], [2, 19, T]):
        state, outs = None, []
        for start, stop in zip([0, *cuts], cuts, strict=False):
            new, own_qkv = ([y[:, :, start:stop] for y in z] for z in (x, others))
            call = decoding.DecodingInputs(
                *new,
                own_qkv if own == "all" else None,
                None if place == "none" else real[:, start:stop],
                Pattern.of(SIZES["window"], SIZES["dilation"], heads=H, causal=True),
                D**-0.5,
                positions,
                None if positions else limit,
            )
            if state is None:
                state = decoding.update_state(call, None)
                continue
            out, state = decoding.decode(call, state)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 2), expected[:, :, cuts[0] :])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_a_window_over_all_keys_is_softmax(attend, causal):
    """A global key within the window is seen once."""
    x = qkv(T)
    repeated = [t.repeat_interleave(H // t.shape[1], 1) for t in x]
    full = torch.nn.functional.scaled_dot_product_attention(*repeated, is_causal=causal)
    found = attend(*x, window=T, causal=causal, global_tokens=global_tokens())
    torch.testing.assert_close(found, full)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_short_sequences(attend, length):
    x = qkv(length)
    where = torch.zeros(B, length, dtype=torch.bool)
    where[1, length // 2] = True
    options = {"window": 3, "dilation": [1, 2, 5, 1]}
    found = attend(*x, **options, global_tokens=where)
    torch.testing.assert_close(found, dense(*x, **options, where=where))


def test_the_window_of_the_mask_limits_every_head(attend):
    x = qkv(T)
    found = attend(*x, window=[9, 3, 2, 9], dilation=[1, 1, 2, 2], limit=(5, 5))
    torch.testing.assert_close(found, dense(*x, window=[5, 3, 2, 2], dilation=[1, 1, 2, 2]))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_the_window_of_the_mask_counts_padding(causal, monkeypatch):
    """A window of the op counts real tokens, and one of the mask all; states keep both counts."""
    monkeypatch.setattr(by_band, "QUERY_BLOCK", 8)
    x, real, ids = qkv(T), padding("interior"), (torch.arange(T) > 30)[None].long().expand(B, T)
    options = {"window": [9, 3, 2, 9], "dilation": [1, 1, 2, 2], "causal": causal}
    for segments in (None, ids):
        expected = dense(*x, **options, real=real, segments=segments, limit=5)
        for impl in ("auto", "torch", "reference"):
            given = {"padding": real, "segment_ids": segments, "limit": (5, 5), "impl": impl}
            torch.testing.assert_close(run(*x, **options, **given), expected)
    with pytest.raises(UnsupportedError, match="padding inside a sequence counts"):
        run(*x, **options, padding=real, limit=(5, 5), impl="cpp")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_gradients_are_those_of_the_dense_form(attend, causal):
    inputs = [t.clone().requires_grad_() for t in (*qkv(T), *qkv(T))]
    upstream, real, where = draw(B, H, T, E), padding("interior"), global_tokens()
    options = {"window": [5, 2, 5, 5], "dilation": [1, 1, 2, 2], "causal": causal, "padding": real}
    found = []
    for function in (attend, run):
        own = GlobalTokens(where, None, *inputs[3:])
        impl = {} if function is attend else {"impl": "reference"}
        out = function(*inputs[:3], **options, global_tokens=own, **impl)
        found.append(torch.autograd.grad(out, inputs, upstream))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("impl", ["torch", "cpp"])
def test_gradcheck(impl):
    x = [t[:1, :, :19].clone().requires_grad_() for t in qkv(T)]
    where = torch.arange(19)[None] == 3

    def function(q, k, v):
        return run(q, k, v, window=3, dilation=2, causal=True, global_tokens=where, impl=impl)

    assert torch.autograd.gradcheck(function, x, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [63, 64, 65, 200])  # around one block
@pytest.mark.parametrize("impl", ["torch", "cpp"])
def test_budget(dtype, length, impl):
    """The error is at most twice that of the dense form in the same dtype."""
    x = qkv(length, dtype=dtype)
    options = {"window": 20, "global_tokens": torch.arange(length)[None] == 1}
    exact = run(*(t.double() for t in x), **options, impl="reference")
    plain = run(*x, **options, impl="reference")
    ours = run(*x, **options, impl=impl)
    assert ours.dtype == dtype
    budget = 2 * (plain - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    worst = (ours - exact).abs().max()
    assert worst <= budget, f"error {worst:.2e} exceeds {budget:.2e}"


def test_causality_holds_bit_for_bit(attend):
    x, where = qkv(T, dtype=torch.float32), global_tokens()
    options = {"window": 6, "dilation": [1, 1, 2, 4], "causal": True, "global_tokens": where}
    louder = [torch.cat([t[:, :, :30], 6 * t[:, :, 30:]], 2) for t in x]
    before, after = attend(*x, **options), attend(*louder, **options)
    assert torch.equal(before[:, :, :30], after[:, :, :30])
    assert not torch.equal(before[:, :, 30:], after[:, :, 30:])


# -- cost ----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the number of entries of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("attend", ["torch", "cpp"], indirect=True)
def test_memory_is_linear(attend):
    sizes, kept = {}, {}
    for length in (256, 1024):
        x = [torch.randn(1, 2, length, 4).requires_grad_() for _ in range(3)]
        saved: dict[int, int] = {}
        where, real = torch.arange(length)[None] == 0, torch.ones(1, length, dtype=torch.bool)

        def keep(t, saved=saved):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = attend(*x, window=8, dilation=[1, 2], global_tokens=where, padding=real)
        out.sum().backward()
        sizes[length], kept[length] = largest.numel, sum(saved.values())
    assert sizes[1024] <= 4.5 * sizes[256]
    assert kept[1024] <= 4.5 * kept[256]
    assert sizes[1024] < 1024 * 1024 / 4


# -- transformers' own ---------------------------------------------------------------------------


@pytest.mark.parametrize("marked", ["none", "some", "padded"])
@pytest.mark.parametrize("impl", ["reference", "torch", "cpp"])
def test_equals_transformers(impl, marked):
    length, window, heads, size = 96, 16, 4, 8
    config = LongformerConfig(
        hidden_size=heads * size,
        num_attention_heads=heads,
        attention_window=[window],  # in all, half of it to either side
        num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )
    layer = LongformerSelfAttention(config, 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(2, length, heads * size)
    real = torch.ones(2, length, dtype=torch.bool)
    where = torch.zeros_like(real)
    if marked != "none":
        where[0, [0, 5, 50]] = where[1, 70] = True
    if marked == "padded":
        real[0, 60:] = real[1, 90:] = False
    theirs = layer(
        hidden,
        attention_mask=torch.where(real, 0.0, -10000.0) + 10000.0 * where,
        is_index_masked=~real,
        is_index_global_attn=where,
        is_global_attn=bool(where.any()),
    )[0]

    def project(*maps):
        return [m(hidden).view(2, length, heads, size).transpose(1, 2) for m in maps]

    own = project(layer.query_global, layer.key_global, layer.value_global)
    ours = run(
        *project(layer.query, layer.key, layer.value),
        window=window // 2,
        padding=real if marked == "padded" else None,
        global_tokens=GlobalTokens(where, None, *own) if marked != "none" else None,
        impl=impl,
    )
    ours = ours.transpose(1, 2).flatten(2)
    assert (ours - theirs).abs().max() <= 1e-5
    assert theirs.abs().max() > 0.5


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1.*got 0"),
        ({"window": [3, 3, -1, 3]}, r"window must be at least 1.*got \[3, 3, -1, 3\]"),
        ({"window": []}, r"window must be at least 1.*got \[\]"),
        ({"window": [3, 3]}, r"window is a list of 2 numbers.*has 4 heads"),
        ({"window": 3, "dilation": 0}, "dilation must be at least 1.*got 0"),
        ({"window": 3, "dilation": [1]}, "dilation is a list of 1 numbers.*has 4 heads"),
    ],
)
def test_sizes_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        longformer_attention(*qkv(T), **options)


def test_impl_is_checked():
    with pytest.raises(UnsupportedError, match=r"'torhc'.*Did you mean 'torch'.*reference"):
        longformer_attention(*qkv(T), window=3, impl="torhc")


def test_packed_global_tokens_are_refused():
    ids = torch.zeros(B, T, dtype=torch.long)
    with pytest.raises(UnsupportedError, match="together with segment_ids"):
        run(*qkv(T), window=3, segment_ids=ids, global_tokens=global_tokens())


def test_a_mask_function_is_refused():
    mask = AttentionMask(function=lambda: None, function_name="a tree")
    with pytest.raises(UnsupportedError, match=r"the mask is a tree, .* use softmax_attention"):
        longformer_attention(*qkv(T), window=3, mask=mask)


def test_the_choice_is_returned():
    assert longformer_attention(*qkv(T), window=3).impl == ("cpp", "compiled for this CPU")
    impl = longformer_attention(*qkv(T), window=3, bias=torch.zeros(T)).impl
    assert impl.impl == "torch"
    assert "blocks of queries" in impl.reason
    assert "a bias is given" in impl.reason
    one = longformer_attention(
        qkv(T)[0][:, :, :1], *qkv(T)[1:], window=3, mask=AttentionMask(causal=True, q_offset=T - 1)
    )
    assert one.impl.impl == "torch"


def test_indices_of_global_tokens():
    where = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    positions, valid = global_indices(where)
    assert positions.tolist() == [[1, 3], [4, 0]]
    assert valid.tolist() == [[True, True], [True, False]]
    assert global_indices(where, max_count=1).positions.tolist() == [[1], [4]]
    assert global_indices(torch.zeros(1, 3, dtype=torch.bool)) is None


# -- FlexAttention ---------------------------------------------------------------------------------


UNDILATED, DILATED, FAR = (1, 1, 1, 1), (1, 2, 3, 3), (50, 2, 2, 2)
FLEX_CALLS = [  # limit, dilations, whether there are global tokens
    ("fewer queries", UNDILATED, False),
    *(("segments", dilations, False) for dilations in (UNDILATED, DILATED)),
    *product(("", "padding", "gaps"), (UNDILATED, DILATED), (False, True)),
    *(("padding", FAR, has_global) for has_global in (False, True)),
    ("", FAR, True),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("limit", "dilations", "has_global"), FLEX_CALLS)
def test_flex_equals_the_reference(limit, dilations, has_global, causal, monkeypatch):
    causal = causal or limit == "fewer queries"
    queries, token = 9 if limit == "fewer queries" else T, torch.arange(T)
    padding = ids = tokens = None
    if limit == "padding":
        padding = token >= torch.tensor([[0], [13]])
    if limit == "gaps":
        padding = (token + torch.tensor([[0], [2]])) % 5 != 1
    if limit == "segments":
        ids = (token >= 17).long().expand(B, -1)
    q, k, v = qkv(T)
    leaves = [x.clone().requires_grad_() for x in (q[:, :, T - queries :], k, k + v[..., :1])]
    if has_global:  # fewer in one row; they have queries, keys and values of their own
        leaves += [x.detach().flip(2).clone().requires_grad_() for x in leaves]
        is_global = token % 9 == torch.tensor([[4], [11]]).clamp(max=8)
        is_global[1, 20:] = False
        is_global = is_global if padding is None else is_global & padding
        tokens = GlobalTokens(is_global, None, *leaves[3:])
    found = []
    with flex_on_cpu(monkeypatch) as masks:
        for path in ("flex", "reference"):
            call = LongformerCall(
                *leaves[:3], Pattern.of([4, 4, 9, 9], dilations, heads=H, causal=causal), 0.3,
                padding, ids, T - queries, tokens, None, 0.0,
            )  # fmt: skip
            out = (by_band.run_flex if path == "flex" else run_reference)(call)
            weights = torch.linspace(-1, 1, out.numel()).view_as(out)
            found.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)
    assert len(masks) == 1  # of all bands


def test_flex_refuses_what_it_does_not_compute(monkeypatch):
    x = torch.randn(1, 2, 20, 16).bfloat16()
    with flex_on_cpu(monkeypatch):
        for options in ({}, {"dilation": 2}, {"global_tokens": torch.arange(20)[None] < 2}):
            found = longformer_attention(x, x, x, window=3, impl="flex", **options)
            assert found.impl.impl == "flex"
        for options, reason in (
            ({"dropout": 0.1}, "dropout"),
            ({"bias": torch.zeros(1, 2, 20, 20)}, "a bias"),
        ):
            with pytest.raises(UnsupportedError, match=f"impl='flex' cannot run .*{reason}"):
                longformer_attention(x, x, x, window=3, impl="flex", **options)


@pytest.mark.parametrize("causal", [True, False])
def test_more_queries_than_keys_are_refused(causal):
    q, k, v = torch.randn(1, 2, 5, 4), *torch.randn(2, 1, 2, 3, 4)
    with pytest.raises(UnsupportedError, match="5 queries and 3 keys are given"):
        longformer_attention(q, k, v, window=2, mask=AttentionMask(causal=causal))
