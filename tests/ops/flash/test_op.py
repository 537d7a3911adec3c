"""Fused softmax attention against the dense op."""

from types import SimpleNamespace

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.ops.flash import api as flash_cpp
from attnzoo.ops.flash import sdpa as flash_sdpa
from attnzoo.ops.flash import xformers as flash_xformers
from attnzoo.ops.flash.api import flash_attention
from attnzoo.ops.flash.call import FlashCall
from attnzoo.ops.flash.xformers import auto_reasons, xformers_reasons
from attnzoo.ops.softmax.api import softmax_attention
from tests.helpers import qkv


def call(q, k, v, mask=None, **options):
    fields = {"scale": 0.3, "bias": None, "sinks": None, "dropout": 0.0, **options}
    return FlashCall(q, k, v, mask or AttentionMask(), **fields)


def compare(q, k, v, mask, impl="sdpa", **options):
    """Compare output and gradients of the fused op with the dense one."""
    dense = mask.dense(q.shape[2], k.shape[2], q.device)
    results = []
    for attend, given in (
        (lambda *x, **o: flash_attention(*x, mask=mask, impl=impl, **o).out, options),
        (lambda *x, **o: softmax_attention(*x, mask=dense, **o).out, options),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, **given)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-11)


def padding(length, *counts):
    return torch.arange(length) >= length - torch.tensor(counts)[:, None]


MASKS = {
    "plain": {},
    "causal": {"causal": True},
    "padding": {"padding": padding(9, 9, 4)},
    "causal and padding": {"causal": True, "padding": padding(9, 4, 0)},
    "segments": {"causal": True, "segment_ids": (torch.arange(9) >= 4).long().expand(2, -1)},
    "window": {"window": (2, 1)},
    "causal window": {"causal": True, "window": (3, 0)},
    "first tokens": {"causal": True, "window": (2, 0), "num_sinks": 2, "padding": padding(9, 9, 4)},
    "function": {"function": lambda: torch.ones(2, 1, 9, 9).tril().bool()},
}


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("more", ["", "bias", "sinks", "bias and sinks"])
def test_sdpa_equals_the_dense_op(heads, mask, more):
    options = {"scale": 0.3}
    draw = torch.Generator().manual_seed(3)
    if "bias" in more:
        options["bias"] = torch.randn(1, heads[0], 9, 9, generator=draw, dtype=torch.float64)
    if "sinks" in more:
        options["sinks"] = torch.randn(heads[0], generator=draw, dtype=torch.float64)
    compare(*qkv(heads=heads), AttentionMask(**MASKS[mask]), **options)


@pytest.mark.parametrize("impl", ["sdpa", "cpp"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_first_tokens_beside_a_band(causal, padded, impl):
    """In blocks along the band, and in C++, also for later queries; 3 first tokens, 9 keys."""
    given = {"padding": padding(200, 200, 130)} if padded else {}
    mask = AttentionMask(causal=causal, window=(8, 0 if causal else 8), num_sinks=3, **given)
    compare(*qkv(200, heads=(4, 2)), mask, impl=impl)
    if impl == "cpp" and causal:
        later = AttentionMask(causal=True, window=(8, 0), num_sinks=3, q_offset=40, **given)
        q, k, v = qkv(160, 200, heads=(4, 2))
        compare(q, k, v, later, impl="cpp")


def test_first_tokens_are_refused_by_name():
    q, k, v = qkv()
    segments = MASKS["segments"]["segment_ids"]
    for impl, more, reason in (
        ("cpp", {"segment_ids": segments}, "first tokens of each of several segments"),
        ("xformers", {}, "first tokens are attended to outside the window|not installed"),
    ):
        mask = AttentionMask(causal=True, window=(3, 0), num_sinks=2, **more)
        with pytest.raises(UnsupportedError, match=reason):
            flash_attention(q, k, v, mask=mask, impl=impl)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("offset", [5, torch.tensor(5), 7, 8], ids=str)
@pytest.mark.parametrize("limit", [{}, {"window": (2, 0)}, {"padding": padding(9, 9, 4)}], ids=list)
def test_queries_with_an_offset(heads, queries, offset, limit):
    q, k, v = qkv(queries, 9, heads=heads)
    compare(q, k, v, AttentionMask(causal=True, q_offset=offset, **limit))


@pytest.mark.parametrize(
    "limit",
    [
        {},
        {"window": (6, 0)},
        {"padding": padding(30, 30, 4)},
        {"segment_ids": (torch.arange(30) >= 14).long().expand(2, -1)},
    ],
    ids=list,
)
def test_many_queries_after_earlier_keys_are_computed_in_blocks(limit, monkeypatch):
    """No mask is larger than a block of queries times the keys."""
    monkeypatch.setattr(flash_sdpa, "BLOCK", 8)
    built, dense = [], AttentionMask.dense

    def counted(mask, queries, keys, device):
        built.append((queries, keys))
        return dense(mask, queries, keys, device)

    q, k, v = qkv(21, 30)
    mask = AttentionMask(causal=True, q_offset=9, **limit)
    monkeypatch.setattr(AttentionMask, "dense", counted)
    compare(q, k, v, mask)
    assert built[0] == (21, 30)  # the dense op
    assert built[1:] == [(8, 17), (8, 25), (5, 30)]


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("mask", ["plain", "causal", "padding", "causal and padding", "segments"])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (70, 70), (70, 131)])
def test_compiled_attention_to_all_keys(heads, mask, queries, keys):
    """In C++, without a window; later queries too. The masks are those of 9 tokens, repeated."""
    fields, offset = dict(MASKS[mask]), keys - queries
    for name in ("padding", "segment_ids"):
        if name in fields:
            fields[name] = fields[name].repeat_interleave(-(-keys // 9), 1)[:, :keys]
    if not fields:
        offset = 0  # also keys after the last query
    compare(*qkv(queries, keys, heads=heads), AttentionMask(**fields, q_offset=offset), "cpp")


@pytest.mark.parametrize("length", [129, 192, 300])  # blocks of 64 and more
@pytest.mark.parametrize("window", [(0, 0), (31, 31), (100, 3)], ids=str)
@pytest.mark.parametrize("limit", ["", "padding", "segments"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", ["sdpa", "cpp"])
def test_blocks_of_the_band_equal_the_dense_op(length, window, limit, causal, impl):
    fields = {}
    if limit == "padding":
        fields["padding"] = torch.rand(2, length, generator=torch.Generator().manual_seed(7)) < 0.7
    if limit == "segments":
        fields["segment_ids"] = (torch.arange(length) // 50).expand(2, -1)
    compare(*qkv(length), AttentionMask(causal=causal, window=window, **fields), impl)


@pytest.mark.parametrize("segments", [False, True])
def test_compiled_windows_of_queries_with_an_offset(segments):
    q, k, v = qkv(20, 90)
    ids = {"segment_ids": (torch.arange(90) // 35).expand(2, -1)} if segments else {}
    compare(q, k, v, AttentionMask(causal=True, window=(9, 0), q_offset=70, **ids), "cpp")


def test_calls_that_the_compiled_window_does_not_support():
    q, k, v = qkv(4, 9)
    window = {"causal": True, "window": (2, 0)}
    for mask, options, reason in (
        (AttentionMask(causal=True, q_offset=5), {"bias": q.new_zeros(1, 4, 4, 9)}, "a bias or"),
        (AttentionMask(function=lambda: q.new_ones(1, 1, 4, 9) > 0), {}, "the mask is a function"),
        (AttentionMask(q_offset=6), {}, "4 queries from position 6 on are not among the 9 keys"),
        (AttentionMask(**window, q_offset=7), {}, "4 queries from position 7 on"),
        (AttentionMask(**window, q_offset=torch.tensor(5)), {}, "is a tensor"),
        (AttentionMask(**window, q_offset=5), {"dropout": 0.1}, r"dropout of 0\.1"),
    ):
        with pytest.raises(UnsupportedError, match=f"impl='cpp' cannot run .*{reason}"):
            flash_attention(q, k, v, mask=mask, impl="cpp", **options)


@pytest.mark.parametrize(
    ("length", "mask", "impl", "reason"),
    [
        (64, {"window": (3, 3)}, "cpp", "masks are compiled"),
        (512, {"causal": True}, "cpp", "causal attention and masks are compiled"),
        (600, {"padding": padding(600, 600, 4)}, "cpp", "masks are compiled"),
        (512, {}, "sdpa", "without causality or a mask PyTorch's kernels are as fast"),
        (64, {"causal": True}, "sdpa", "the call is small"),
        (63, {"causal": True}, "sdpa", "there are 63 queries"),
        (8, {"causal": True, "window": (3, 0)}, "sdpa", "there are 8 queries"),
    ],
)
def test_auto_on_cpus(monkeypatch, length, mask, impl, reason):
    monkeypatch.setattr(flash_cpp, "_has_avx512", lambda: True)
    ran = flash_attention(*qkv(length), mask=AttentionMask(**mask)).impl
    assert ran.impl == impl
    assert reason in ran.reason


def test_auto_leaves_transforms_to_torch():
    q, k, v = qkv(512)

    def total(v):
        return flash_attention(q, k, v, mask=AttentionMask(causal=True)).out.square().sum()

    leaf = v.clone().requires_grad_()
    total(leaf).backward()
    torch.testing.assert_close(torch.func.grad(total)(v), leaf.grad)


@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_heads_of_unequal_blocks_on_several_threads(threads):
    """3 heads on 2 threads, and 1 head, whose last queries attend to the most keys."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for heads in ((3, 3), (1, 1), (2, 1)):
            compare(*qkv(200, heads=heads, batch=1), AttentionMask(causal=True), impl="cpp")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("mask", "options", "impl"),
    [
        (AttentionMask(causal=True), {}, "cpp"),
        (AttentionMask(causal=True), {"dtype": torch.bfloat16}, "cpp"),
        (AttentionMask(causal=True), {"dtype": torch.float16, "amx": True, "length": 512}, "sdpa"),
        (AttentionMask(causal=True), {"dtype": torch.bfloat16, "amx": True, "length": 512}, "sdpa"),
        (AttentionMask(causal=True), {"avx512": False}, "sdpa"),
        (AttentionMask(causal=True), {"length": 127}, "sdpa"),
        (AttentionMask(causal=True, q_offset=900), {"length": 63, "keys": 963}, "sdpa"),
        (AttentionMask(padding=padding(128, 128)), {}, "sdpa"),
        (AttentionMask(padding=padding(256, 200)), {"length": 256}, "cpp"),
    ],
    ids=str,
)
def test_auto_computes_calls_without_a_window_in_cpp(monkeypatch, mask, options, impl):
    """Where it was measured to be faster; the named implementations support all of them."""
    monkeypatch.setattr(flash_cpp, "_has_avx512", lambda: options.get("avx512", True))
    monkeypatch.setattr(flash_cpp, "_has_amx", lambda: options.get("amx", False))
    length, dtype = options.get("length", 128), options.get("dtype", torch.float32)
    x = torch.randn(3, 1, 8, options.get("keys", length), options.get("size", 64), dtype=dtype)
    q, k, v = x[0, :, :, :length], x[1], x[2]
    assert flash_attention(q, k, v, mask=mask).impl.impl == impl


def test_auto_leaves_derivatives_that_the_compiled_kernel_lacks_to_torch(monkeypatch):
    monkeypatch.setattr(flash_cpp, "_has_avx512", lambda: True)
    x = torch.randn(1, 8, 128, 64)
    mask = AttentionMask(causal=True)

    def attend(q):
        return flash_attention(q, x, x, mask=mask)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attend(x).impl.impl == "sdpa"
    out = torch.func.vmap(lambda q: attend(q).out)(x.expand(2, -1, -1, -1, -1))
    torch.testing.assert_close(out[0], attend(x).out, rtol=1e-4, atol=1e-5)


def test_causal_and_windowed_masks_are_not_materialised(monkeypatch):
    def dense(*_):
        raise AssertionError("a mask is materialised")

    monkeypatch.setattr(AttentionMask, "dense", dense)
    q, k, v = qkv(300)
    for mask in (
        AttentionMask(causal=True),
        AttentionMask(causal=True, window=(20, 0)),
        AttentionMask(window=(20, 20), padding=padding(300, 300, 200)),
    ):
        flash_attention(q, k, v, mask=mask, impl="sdpa")
    one = q[:, :, -1:]
    flash_attention(one, k, v, mask=AttentionMask(causal=True, q_offset=299), impl="sdpa")


def test_memory_of_a_window_is_linear_in_length(monkeypatch):
    sizes = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watch(q, k, *rest, **options):
        sizes.append(q.shape[0] * q.shape[2] * k.shape[2])  # scores that a plain kernel would make
        return attend(q, k, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    for length in (512, 1024):
        q, k, v = qkv(length, batch=1)
        flash_attention(q, k, v, mask=AttentionMask(causal=True, window=(63, 0)), impl="sdpa")
    assert sizes[1] == 2 * sizes[0]
    assert sizes[1] <= 1024 * 128


def test_queries_that_see_no_key_give_zeros():
    q, k, v = qkv(150)
    hidden = padding(150, 150, 0)
    for mask in (
        AttentionMask(padding=hidden),
        AttentionMask(padding=hidden, window=(3, 3)),
        AttentionMask(function=lambda: hidden[:, None, None].expand(2, 1, 150, 150)),
    ):
        for sinks in (None, torch.zeros(4, dtype=torch.float64)):
            out = flash_attention(q, k, v, mask=mask, sinks=sinks, impl="sdpa").out
            assert not out[1].any()
            assert out[0].any()


def test_dropout_is_random_and_reproducible():
    q, k, v = qkv(64)
    plain = flash_attention(q, k, v).out
    torch.manual_seed(0)
    first = flash_attention(q, k, v, dropout=0.5).out
    torch.manual_seed(0)
    again = flash_attention(q, k, v, dropout=0.5).out
    assert torch.equal(first, again)
    assert not torch.allclose(first, plain)


def test_an_unknown_impl_is_refused():
    with pytest.raises(
        UnsupportedError, match=r"no impl 'spda'. Did you mean 'sdpa'\? It has auto"
    ):
        flash_attention(*qkv(), impl="spda")


def test_disagreeing_shapes_are_refused():
    q, k, v = qkv()
    with pytest.raises(UnsupportedError, match="k and v must agree"):
        flash_attention(q, k, v[:, :, 1:])


def test_auto_gives_its_reason():
    impl = flash_attention(*qkv()).impl
    assert impl.impl == "sdpa"
    assert "cpp is skipped: there are 9 queries" in impl.reason
    assert flash_attention(*qkv(), impl="sdpa").impl == ("sdpa", "named in the options")


def test_auto_considers_xformers_for_windows_on_a_gpu():
    q, k, v = (x.to("meta") for x in qkv())
    with pytest.raises(UnsupportedError, match=r"tensors are on meta \(xformers runs on cuda\)"):
        flash_attention(q, k, v, impl="xformers")
    on_gpu = call(SimpleNamespace(device=torch.device("cuda")), k, v, AttentionMask(causal=True))
    assert auto_reasons(on_gpu) == ["without a sliding window PyTorch's kernels are as fast"]
    assert auto_reasons(on_gpu._replace(mask=AttentionMask(causal=True, window=(3, 0)))) == []


# -- xformers ------------------------------------------------------------------------------------


def test_xformers_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(flash_xformers, "xformers_installed", lambda: False)
    with pytest.raises(
        UnsupportedError, match=r"not installed \(pip install attnzoo\[xformers\]\)"
    ):
        flash_attention(*qkv(), impl="xformers")


def test_xformers_is_refused_on_a_cpu_with_its_own_reasons():
    pytest.importorskip("xformers", reason="xformers is not installed")
    with pytest.raises(UnsupportedError, match=r"(?s)impl='xformers' cannot.*cpu.*'sdpa'") as e:
        flash_attention(*qkv(dtype=torch.float32), impl="xformers")
    fmha = pytest.importorskip("xformers.ops.fmha")
    q, k, v = (x.float().transpose(1, 2) for x in qkv(heads=(4, 4)))
    own = fmha.cutlass.FwOp.not_supported_reasons(fmha.Inputs(query=q, key=k, value=v))
    assert any("device=cpu" in reason for reason in own)
    assert all(reason in str(e.value) for reason in own if "device" in reason)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"mask": AttentionMask(padding=padding(9, 9, 3))},
            "the mask is more than causal and sliding-window",
        ),
        ({"mask": AttentionMask(causal=True, q_offset=2)}, "not the last of the keys"),
        ({"sinks": torch.zeros(4)}, "a bias or sinks are given"),
        ({"bias": torch.zeros(1, 4, 9, 9)}, "a bias or sinks are given"),
    ],
)
def test_calls_that_xformers_does_not_support(monkeypatch, options, words):
    monkeypatch.setattr(flash_xformers, "xformers_installed", lambda: True)
    (reason,) = xformers_reasons(call(*qkv(), **options))
    assert words in reason


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=str)
def test_xformers_layout_and_mask(heads):
    """Transposed back, the layout holds q, k and v; materialised, the masks are the dense ones."""
    pytest.importorskip("xformers", reason="xformers is not installed")
    q, k, v = qkv(dtype=torch.float32, heads=heads)
    layout = flash_xformers._to_xformers_layout(call(q, k, v))
    groups = heads[0] // heads[1]
    repeated = [q, *(x.repeat_interleave(groups, 1) for x in (k, v))]
    for theirs, ours in zip(layout, repeated, strict=True):
        assert torch.equal(theirs.flatten(2, -2).transpose(1, 2), ours)
    for fields in ({}, {"causal": True}, {"causal": True, "window": (3, 0)}, {"window": (3, 2)}):
        mask = AttentionMask(**fields)
        bias = flash_xformers._attn_bias(call(q, k, v, mask))
        dense = mask.dense(9, 9, q.device)
        if dense is None:
            assert bias is None
        else:
            assert torch.equal(bias.materialize((9, 9)) == 0, dense[0, 0])


# -- names of kernels ------------------------------------------------------------------------------


def test_the_kernel_has_a_name():
    q, k, v = (x.float() for x in qkv())
    for mask in (AttentionMask(causal=True), AttentionMask(padding=padding(9, 4, 0))):
        assert flash_sdpa.kernel_name(call(q, k, v, mask)).endswith("kernel")
