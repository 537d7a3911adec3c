"""Fused attention against the dense op, which the formula is checked with."""

import pytest
import torch

from attnzoo.errors import UnsupportedError
from attnzoo.masks import AttentionMask
from attnzoo.ops import flash, flash_packed
from attnzoo.ops.flash import FlashInputs, choose_impl, flash_attention, xformers_reasons
from attnzoo.ops.softmax import softmax_attention


def qkv(length=9, keys=None, heads=(4, 2), batch=2, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    keys = length if keys is None else keys
    shapes = (heads[0], length, 8), (heads[1], keys, 8), (heads[1], keys, 6)
    return [torch.randn(batch, *shape, generator=draw, dtype=dtype) for shape in shapes]


def call(q, k, v, mask=None, **options):
    fields = {"scale": 0.3, "bias": None, "sinks": None, "dropout": 0.0, **options}
    return FlashInputs(q, k, v, mask or AttentionMask(), **fields)


def compare(q, k, v, mask, **options):
    """Hold the fused op to the dense one; gradients too."""
    dense = mask.dense(q.shape[2], k.shape[2], q.device)
    results = []
    for attend, given in (
        (lambda *x, **o: flash_attention(*x, mask=mask, impl="sdpa", **o), options),
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
    "function": {"function": lambda: torch.ones(2, 1, 9, 9).tril().bool()},
}


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("more", ["", "bias", "sinks", "bias and sinks"])
def test_it_equals_the_dense_op(heads, mask, more):
    options = {"scale": 0.3}
    draw = torch.Generator().manual_seed(3)
    if "bias" in more:
        options["bias"] = torch.randn(1, heads[0], 9, 9, generator=draw, dtype=torch.float64)
    if "sinks" in more:
        options["sinks"] = torch.randn(heads[0], generator=draw, dtype=torch.float64)
    compare(*qkv(heads=heads), AttentionMask(**MASKS[mask]), **options)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("offset", [5, torch.tensor(5), 7, 8], ids=str)
@pytest.mark.parametrize("limit", [{}, {"window": (2, 0)}, {"padding": padding(9, 9, 4)}], ids=list)
def test_queries_may_begin_later(heads, queries, offset, limit):
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
def test_many_queries_after_earlier_keys_go_by_blocks(limit, monkeypatch):
    """No mask is larger than a block of queries times the keys."""
    monkeypatch.setattr(flash, "BLOCK", 8)
    built, dense = [], AttentionMask.dense

    def counted(mask, queries, keys, device):
        built.append((queries, keys))
        return dense(mask, queries, keys, device)

    q, k, v = qkv(21, 30)
    mask = AttentionMask(causal=True, q_offset=9, **limit)
    monkeypatch.setattr(AttentionMask, "dense", counted)
    compare(q, k, v, mask)
    assert built[0] == (21, 30)  # the oracle's
    assert built[1:] == [(8, 17), (8, 25), (5, 30)]


@pytest.mark.parametrize("length", [129, 130, 192, 193, 300])  # blocks of 64 and more
@pytest.mark.parametrize("window", [(0, 0), (5, 0), (31, 31), (64, 3), (100, 0)], ids=str)
@pytest.mark.parametrize("limit", ["", "padding", "segments"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_band_equals_the_square(length, window, limit, causal):
    fields = {}
    if limit == "padding":
        fields["padding"] = torch.rand(2, length, generator=torch.Generator().manual_seed(7)) < 0.7
    if limit == "segments":
        fields["segment_ids"] = (torch.arange(length) // 50).expand(2, -1)
    compare(*qkv(length), AttentionMask(causal=causal, window=window, **fields))


def test_nothing_quadratic_is_built_for_plain_masks_and_bands(monkeypatch):
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


def test_memory_of_a_band_grows_with_its_width(monkeypatch):
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


def test_rows_that_see_nothing_give_zeros():
    q, k, v = qkv(150)
    hidden = padding(150, 150, 0)
    for mask in (
        AttentionMask(padding=hidden),
        AttentionMask(padding=hidden, window=(3, 3)),
        AttentionMask(function=lambda: hidden[:, None, None].expand(2, 1, 150, 150)),
    ):
        for sinks in (None, torch.zeros(4, dtype=torch.float64)):
            out = flash_attention(q, k, v, mask=mask, sinks=sinks, impl="sdpa")
            assert not out[1].any()
            assert out[0].any()


def test_dropout_drops():
    q, k, v = qkv(64)
    plain = flash_attention(q, k, v, mask=AttentionMask())
    torch.manual_seed(0)
    first = flash_attention(q, k, v, mask=AttentionMask(), dropout=0.5)
    torch.manual_seed(0)
    again = flash_attention(q, k, v, mask=AttentionMask(), dropout=0.5)
    assert torch.equal(first, again)
    assert not torch.allclose(first, plain)


def test_an_unknown_impl_is_refused():
    with pytest.raises(
        UnsupportedError, match=r"no impl 'spda'. Did you mean 'sdpa'\? It has auto"
    ):
        flash_attention(*qkv(), mask=AttentionMask(), impl="spda")


def test_auto_says_why():
    assert choose_impl(call(*qkv())) == ("sdpa", "on cpu, where xformers has no operator")


# -- xformers ------------------------------------------------------------------------------------


def test_xformers_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(flash, "xformers_installed", lambda: False)
    with pytest.raises(
        UnsupportedError, match=r"not installed \(pip install attnzoo\[xformers\]\)"
    ):
        flash_attention(*qkv(), mask=AttentionMask(), impl="xformers")


def test_xformers_is_refused_on_a_cpu_in_its_own_words():
    pytest.importorskip("xformers", reason="xformers is not installed")
    with pytest.raises(
        UnsupportedError, match=r"(?s)impl 'xformers' cannot.*cpu.*impl='sdpa'"
    ) as e:
        flash_attention(*qkv(dtype=torch.float32), mask=AttentionMask(), impl="xformers")
    fmha = pytest.importorskip("xformers.ops.fmha")
    q, k, v = (x.float().transpose(1, 2) for x in qkv(heads=(4, 4)))
    own = fmha.cutlass.FwOp.not_supported_reasons(fmha.Inputs(query=q, key=k, value=v))
    assert any("device=cpu" in reason for reason in own)
    assert all(reason in str(e.value) for reason in own if "device" in reason)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": AttentionMask(padding=padding(9, 9, 3))}, "causal and sliding-window masks only"),
        ({"mask": AttentionMask(causal=True, q_offset=2)}, "not the last of the keys"),
        ({"sinks": torch.zeros(4)}, "a bias or sinks are given"),
        ({"bias": torch.zeros(1, 4, 9, 9)}, "a bias or sinks are given"),
    ],
)
def test_what_xformers_is_not_used_for(monkeypatch, options, words):
    monkeypatch.setattr(flash, "xformers_installed", lambda: True)
    (reason,) = xformers_reasons(call(*qkv(), **options))
    assert words in reason


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=str)
def test_what_xformers_would_be_given(heads):
    """Its layout, undone, is ours; its masks, written out, are ours."""
    pytest.importorskip("xformers", reason="xformers is not installed")
    q, k, v = qkv(dtype=torch.float32, heads=heads)
    laid = flash._xformers_layout(call(q, k, v))
    groups = heads[0] // heads[1]
    repeated = [q, *(x.repeat_interleave(groups, 1) for x in (k, v))]
    for theirs, ours in zip(laid, repeated, strict=True):
        assert torch.equal(theirs.flatten(2, -2).transpose(1, 2), ours)
    for fields in ({}, {"causal": True}, {"causal": True, "window": (3, 0)}, {"window": (3, 2)}):
        mask = AttentionMask(**fields)
        bias = flash._xformers_bias(call(q, k, v, mask))
        dense = mask.dense(9, 9, q.device)
        if dense is None:
            assert bias is None
        else:
            assert torch.equal(bias.materialize((9, 9)) == 0, dense[0, 0])


# -- padding taken out -----------------------------------------------------------------------------


def end_to_end(q, k, v, packed, causal, scale):
    """What the GPU's kernel computes for sequences end to end, one by one."""
    outs = []
    for start, stop in zip(packed.borders[:-1], packed.borders[1:], strict=True):
        assert 0 < stop - start <= packed.longest
        rows = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        mask = AttentionMask(causal=causal)
        out = flash_attention(*rows, mask=mask, scale=scale, impl="sdpa")
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize(
    "mask",
    [
        {"padding": padding(9, 9, 4)},
        {"causal": True, "padding": torch.arange(18).view(2, 9) % 5 % 3 != 1},
        {"causal": True, "padding": padding(9, 3, 0)},
        {"causal": True, "segment_ids": (torch.arange(9) >= torch.tensor([[4], [7]])).long()},
        {"segment_ids": torch.arange(9).expand(2, -1), "padding": padding(9, 9, 6)},
    ],
    ids=str,
)
def test_rows_without_their_padding_give_what_a_mask_gives(mask, monkeypatch):
    monkeypatch.setattr(flash_packed, "end_to_end", end_to_end)
    mask, (q, k, v) = AttentionMask(**mask), qkv()
    ours = flash_packed.packed_attention(q, k, v, mask, 0.3)
    dense = softmax_attention(q, k, v, scale=0.3, mask=mask.dense(9, 9, q.device)).out
    if mask.padding is not None:  # a padded query is no query here
        dense = dense * mask.padding[:, None, :, None]
    torch.testing.assert_close(ours, dense)


def test_torch_is_called_as_this_version_of_it_is(monkeypatch):
    asked = {}

    def older(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        asked.update(is_causal=is_causal, heads=k.shape[1], q=q)
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    q, k = torch.ones(5, 4, 16), torch.ones(5, 2, 16)
    packed = flash_packed.Packed(torch.arange(5), torch.tensor([0, 2, 5]), 3)
    flash_packed.end_to_end(q, k, k, packed, True, 0.5)
    assert asked["is_causal"]
    assert asked["heads"] == 4
    assert torch.equal(asked["q"], 2 * q)  # the kernel multiplies by 16 ** -0.5 itself


def test_only_a_gpu_takes_padding_out():
    (reason,) = flash_packed.packing_reasons(
        *(x[..., :6].repeat(1, 1, 1, 4).to(torch.bfloat16) for x in qkv()),
        AttentionMask(causal=True, padding=padding(9, 4, 0)),
    )
    assert "cpu" in reason


def test_the_kernel_that_ran_has_a_name():
    q, k, v = (x.float() for x in qkv())
    assert "kernel" in flash.ran_kernel(call(q, k, v, AttentionMask(causal=True)))
    assert "kernel" in flash.ran_kernel(call(q, k, v, AttentionMask(padding=padding(9, 4, 0))))
