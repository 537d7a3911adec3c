"""Windows, first tokens, padding, packing and continuing prompts through FlexAttention."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.ops.flash import api
from attnzoo.ops.flash.api import flash_attention
from attnzoo.ops.flash.call import FlashCall
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.ops.window import flex
from attnzoo.ops.window.pattern import Band
from attnzoo.runtime import first_call
from tests.helpers import assert_within, change_implementation, qkv
from tests.ops.flex_on_cpu import check_lists, dense_blocks, flex_on_cpu

T, B = 37, 2


@pytest.fixture
def masks(monkeypatch):
    with flex_on_cpu(monkeypatch) as found:
        yield found


def padding(*counts, length=T):
    return torch.arange(length) >= length - torch.tensor(counts)[:, None]


SEGMENTS = (
    torch.arange(T)[None, None] >= torch.tensor([[5, 21, 30], [17, 18, 40]])[..., None]
).sum(1)
GAPS = torch.arange(2 * T).view(2, T) % 5 % 3 != 1
LATER = {"causal": True, "q_offset": 25}  # 12 queries, the last of 37 keys
CASES = {
    "padding": {"padding": padding(T, 9)},
    "gaps": {"causal": True, "padding": GAPS},
    "an empty row": {"causal": True, "padding": padding(13, 0)},
    "segments": {"causal": True, "segment_ids": SEGMENTS},
    "segments both ways": {"segment_ids": SEGMENTS, "padding": padding(T, 20)},
    "window": {"window": (5, 2)},
    "causal window": {"causal": True, "window": (11, 5)},
    "own key only": {"causal": True, "window": (0, 0)},
    "wide": {"window": (2**62, 2**40)},
    "window, gaps": {"causal": True, "window": (6, 0), "padding": GAPS},
    "window, right padding": {"causal": True, "window": (9, 0), "padding": ~padding(0, 13)},
    "window, segments": {"window": (4, 7), "segment_ids": SEGMENTS},
    "continuing": LATER,
    "static cache": {"causal": True, "q_offset": 20},
    "continuing, tensor": {"causal": True, "q_offset": torch.tensor(20), "window": (9, 0)},
    "continuing, window, padding": {**LATER, "window": (10, 0), "padding": padding(T, 8)},
    "continuing, segments": {**LATER, "segment_ids": SEGMENTS},
    "first tokens": {"causal": True, "window": (4, 0), "num_sinks": 3},
    "first tokens both ways": {"window": (4, 2), "num_sinks": 3, "padding": padding(T, 0)},
    "first tokens, padding": {
        "causal": True,
        "window": (3, 0),
        "num_sinks": 9,
        "padding": padding(T, 14),
    },
    "first tokens of segments": {
        "causal": True,
        "window": (2, 0),
        "num_sinks": 2,
        "segment_ids": SEGMENTS,
        "padding": padding(T, 31),
    },
    "first tokens, continuing": {**LATER, "window": (2, 0), "num_sinks": 2},
}


def tensors(case, **options):
    queries = T - 25 if "q_offset" in CASES[case] else T
    return qkv(queries, T, heads=(4, 2), **options)


@pytest.mark.parametrize("case", CASES)
def test_flex_equals_a_dense_mask(case, masks):
    mask, found = AttentionMask(**CASES[case]), []
    given = tensors(case)
    for run in (
        lambda *x: api.run_flex(FlashCall(*x, mask, 0.3)),
        lambda *x: softmax_attention(*x, scale=0.3, mask=mask).out,
    ):
        leaves = [x.clone().requires_grad_() for x in given]
        out = run(*leaves)
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        found.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for ours, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-11)
    assert len(masks) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["first tokens of segments", "window, gaps"])
def test_flex_is_as_precise_as_a_dense_mask(case, dtype, masks):
    mask, given = AttentionMask(**CASES[case]), tensors(case, dtype=dtype, sizes=(24, 40))
    ours = flash_attention(*given, mask=mask, scale=0.3, impl="flex").out
    plain = softmax_attention(*given, scale=0.3, mask=mask).out
    exact = softmax_attention(*(x.double() for x in given), scale=0.3, mask=mask).out
    assert ours.dtype == dtype
    assert_within(ours, plain, exact, torch.finfo(dtype).eps)


@pytest.mark.parametrize("causal", [True, False])
def test_each_head_has_its_window(causal, masks):
    """Key heads with all keys beside key heads with a window, first tokens and steps."""
    q, k, v = qkv(T, heads=(4, 2))
    bands = [Band(T, T, 1)] * 2 + [Band(3, 3, 2), Band(5, 1, 1)]
    real, first = padding(T, 29), torch.zeros(2, T, dtype=torch.bool)
    first[0, :2], first[1, 8:10] = True, True
    region = flex.windows(
        T, T, bands, causal=causal, key_mask=real, extra=first, device=torch.device("cpu")
    )
    out, lse = flex.run_flex(q, k, v, region, 0.3, return_lse=True)
    for head, band in enumerate(bands):
        distance = torch.arange(T)[:, None] - torch.arange(T)
        step = band.dilation
        seen = (distance <= band.before * step) & (distance >= -band.after * step)
        seen = (seen & (distance % step == 0))[None] & real[:, None] | first[:, None]
        if causal:
            seen = seen & (distance >= 0)
        scores = (q[:, head] @ k[:, head // 2].mT * 0.3).masked_fill(~seen, -torch.inf)
        weights = scores.softmax(2).nan_to_num(0.0)
        torch.testing.assert_close(out[:, head], weights @ v[:, head // 2])
        exact = scores.logsumexp(2, keepdim=True)
        is_seen = exact > -torch.inf
        torch.testing.assert_close(lse[:, head][is_seen], exact[is_seen])
    assert lse.isfinite().all()


def test_blocks_outside_of_a_window_are_skipped(masks):
    mask = AttentionMask(causal=True, window=(15, 0), num_sinks=3)
    api.run_flex(FlashCall(*qkv(400), mask, 0.3))
    (found,) = masks
    partial = dense_blocks(found.kv_num_blocks, found.kv_indices)[0, 0]
    full = dense_blocks(found.full_kv_num_blocks, found.full_kv_indices)[0, 0]
    assert (partial | full).sum(1).tolist() == [1, 2, 3, *[4] * 47]
    assert full.sum() == 49  # the block before that of the query


def test_a_wrong_list_is_found():
    region = flex.of_mask(AttentionMask(causal=True), *torch.ones(2, 1, 1, 300, 4))
    check_lists(region.block_mask(300, 300), 1, 1)
    for wrong in (
        region._replace(some=region.some & ~torch.eye(3, dtype=torch.bool)),
        region._replace(every=region.every | torch.eye(3, dtype=torch.bool)),
    ):
        with pytest.raises(AssertionError):
            check_lists(wrong.block_mask(300, 300), 1, 1)


@pytest.mark.exhaustive
def test_a_compiled_call_contains_the_mask(masks):
    """One program for calls of several lengths, without a synchronisation."""
    given = qkv(T, heads=(4, 2), dtype=torch.float32)

    @torch.compile(backend="eager", fullgraph=True)
    def attend(q, k, v, real):
        mask = AttentionMask(causal=True, window=(6, 0), padding=real, num_sinks=2)
        return flex.run_flex(q, k, v, flex.of_mask(mask, q, k), 0.3)[0]

    out = attend(*given, padding(T, 9))
    mask = AttentionMask(causal=True, window=(6, 0), padding=padding(T, 9), num_sinks=2)
    torch.testing.assert_close(out, softmax_attention(*given, mask=mask, scale=0.3).out)


@pytest.mark.exhaustive
def test_compiled_kernels_read_the_lists(monkeypatch):
    compiled = torch.compile(torch_flex.flex_attention, fullgraph=True, dynamic=False)
    monkeypatch.setattr(flex, "_call", lambda q, k, v, **options: compiled(q, k, v, **options))
    given, token = qkv(300, heads=(4, 2), dtype=torch.float32), torch.arange(300)
    ids = (token[:, None] >= torch.tensor([170, 211])).sum(1).expand(2, -1)
    fields = {"padding": padding(300, 140, length=300), "segment_ids": ids, "num_sinks": 3}
    mask = AttentionMask(causal=True, window=(20, 0), **fields)
    out = api.run_flex(FlashCall(*given, mask, 0.3))
    torch.testing.assert_close(out, softmax_attention(*given, mask=mask, scale=0.3).out)


# -- the first call --------------------------------------------------------------------------------


@pytest.fixture
def not_compared(monkeypatch):
    monkeypatch.setattr(first_call, "_FOUND", {})


def auto():
    given = qkv(T, dtype=torch.float32, sizes=(16, 16))
    return flash_attention(*given, mask=AttentionMask(causal=True, window=(3, 0))).impl


def test_the_first_call_is_compared_with_torch_once(masks, not_compared):
    for _ in range(2):
        found = auto()
        assert found.impl == "flex"
        assert "compared with torch on" in found.reason
    assert len(masks) == 3  # two calls and the comparison


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("between", lambda begin, end, keys: flex.Region(*real_between(begin, end + 1, keys))),
        ("among", lambda chosen, queries: real_among(torch.ones_like(chosen), queries)),
    ],
)
def test_wrong_kernels_are_not_selected(name, wrong, masks, not_compared, monkeypatch):
    monkeypatch.setattr(flex, name, wrong)
    with pytest.warns(
        UserWarning, match="does not select FlexAttention: they are wrong on .*output"
    ):
        assert auto().impl == "cpp"
    assert "flex is skipped: they are wrong on" in auto().reason


real_between, real_among = flex.between, flex.among

# -- selection -------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch):
    """Let the CPU count as a GPU in the selection, and collect calls of the compiled function."""
    calls = []

    def attend(q, k, v, **options):
        calls.append(options)
        return torch_flex.flex_attention(q, k, v, **options)

    with flex_on_cpu(monkeypatch):
        key = "FlexAttention", "", torch.device("cpu")
        monkeypatch.setitem(first_call._FOUND, key, ("", ""))  # compared before
        monkeypatch.setattr(flex, "_call", attend)
        yield calls


@pytest.mark.parametrize(
    ("fields", "is_flex"),
    [
        ({"causal": True}, False),
        ({"causal": True, "window": (3, 0)}, True),
        ({"padding": padding(T, 9)}, True),
        ({"segment_ids": SEGMENTS}, True),
        ({"causal": True, "q_offset": 25}, True),
    ],
)
def test_auto_takes_flex_where_it_skips_keys(fields, is_flex, on_gpu):
    queries = T - fields.get("q_offset", 0)
    given = qkv(queries, T, dtype=torch.float32, sizes=(16, 16))
    found = flash_attention(*given, mask=AttentionMask(**fields)).impl
    assert (found.impl == "flex") == is_flex
    assert len(on_gpu) == is_flex
    if is_flex:
        assert "FlexAttention skips keys that no query sees" in found.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout": 0.1}, "attention dropout of 0.1"),
        ({"sinks": torch.zeros(4)}, "a bias or sinks are given"),
        ({"mask": AttentionMask(function=lambda: torch.ones(2, 1, T, T).bool())}, "a function"),
        ({"mask": AttentionMask(causal=True, q_offset=1)}, "are not among the 37 keys"),
        (
            {"mask": AttentionMask(segment_ids=SEGMENTS, q_offset=torch.tensor(0))},
            "position of the first query is a tensor, beside segments",
        ),
        ({"dtype": torch.float64}, "float64, float64, float64"),
        ({"sizes": (8, 16)}, "queries have size 8 "),
        ({"sizes": (16, 264)}, "values have size 264 "),
    ],
)
def test_what_flex_does_not_support_is_refused(options, reason, on_gpu):
    made = {"dtype": torch.float32, "sizes": (16, 16)}
    given = qkv(T, heads=(4, 2), **{name: options.get(name, x) for name, x in made.items()})
    rest = {name: x for name, x in options.items() if name not in made}
    with pytest.raises(UnsupportedError, match=f"impl='flex' cannot run .*{reason}"):
        flash_attention(*given, impl="flex", **rest)


def test_devices_without_its_kernels_are_refused(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert flex.device_reason(gpu) == "it needs compute capability 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    assert "needs Triton" in flex.device_reason(gpu)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    assert flex.device_reason(gpu) == flex.device_reason(torch.device("cpu")) == ""


def test_calls_on_a_gpu_are_compiled(monkeypatch):
    calls = []
    monkeypatch.setattr(flex, "_compiled", lambda attend: lambda *x, **y: calls.append((x, y)))
    q = SimpleNamespace(device=torch.device("cuda", 0))
    flex._call(q, q, q, scale=0.3)
    assert calls == [((q, q, q), {"scale": 0.3})]


def test_transforms_are_refused(on_gpu):
    q, k, v = qkv(T, heads=(2, 2), dtype=torch.float32, sizes=(16, 16))
    mask = AttentionMask(window=(2, 2))
    with pytest.raises(UnsupportedError, match="a transform of torch"):
        torch.func.grad(lambda x: flash_attention(x, k, v, mask=mask, impl="flex").out.sum())(q)
    change = {"devices": ("cuda",)}
    with pytest.MonkeyPatch.context() as patch:
        change_implementation(patch, "flash_attention", "flex", **change)
        with pytest.raises(UnsupportedError, match=r"tensors are on cpu \(flex runs on cuda\)"):
            flash_attention(q, k, v, mask=mask, impl="flex")
