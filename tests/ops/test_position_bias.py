"""A bias of positions in sparse attention: the dense formula with the bias at what is seen."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo.errors import UnsupportedError
from attnzoo.ops import longformer
from attnzoo.ops.gates import alibi_log_decay
from attnzoo.ops.longformer import longformer_attention
from attnzoo.ops.reformer import lsh_attention, lsh_meetings, shared_qk_attention
from attnzoo.ops.reformer_rule import Rule
from attnzoo.ops.softmax import softmax_attention

ROWS, HEADS, KEY_HEADS, LENGTH = 2, 4, 2, 100
SHAPES = [(1, 4, 100, 100), (2, 4, 1, 100)]  # as T5 has it, and as ALiBi comes with padding
SMALL = {"rounds": 3, "chunk_size": 4, "window": 3, "first_tokens": 2}


def qkv():
    q = torch.randn(ROWS, HEADS, LENGTH, 8, dtype=torch.float64)
    k = torch.randn(ROWS, KEY_HEADS, LENGTH, 8, dtype=torch.float64)
    return q, k, torch.randn(ROWS, KEY_HEADS, LENGTH, 6, dtype=torch.float64)


def agree(ours, theirs, inputs):
    """Compare two results and what they send back to all inputs."""
    assert_close(ours, theirs, atol=1e-11, rtol=1e-11)
    upstream = torch.randn_like(theirs)
    found, right = (torch.autograd.grad(x, inputs, upstream) for x in (ours, theirs))
    assert_close(found, right, atol=1e-10, rtol=1e-10)


def alibi():
    """Return the bias as models make it, by the keys' positions: softmax knows no other part."""
    slopes = -alibi_log_decay(HEADS, dtype=torch.float64)
    return slopes[None, :, None, None] * torch.arange(LENGTH, dtype=torch.float64)


# -- longformer ------------------------------------------------------------------------------------


def seen_by(causal, window, dilation, tokens, padding):
    """Write out who sees whom, ``[B, H, T, T]``; distances are over real tokens."""
    place = padding.cumsum(1)
    distance = (place[:, :, None] - place[:, None])[:, None]
    allowed = padding[:, None, :, None] & padding[:, None, None]
    if causal:
        allowed = allowed & (distance >= 0)
    sizes = window if isinstance(window, list) else [window] * HEADS
    heads = []
    for size in sizes:
        steps = distance.div(dilation, rounding_mode="floor")
        near = (distance % dilation == 0) & (steps.abs() <= (size - 1 if causal else size))
        heads.append(near | tokens[:, None, :, None] | tokens[:, None, None])
    return torch.cat(heads, 1) & allowed


@pytest.mark.parametrize("form", ["reference", "walk", "blocks"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("window", "dilation", "some_global", "padded"),
    [
        (5, 1, False, None),
        ([3, 7, 5, 90], 2, True, None),
        (9, 1, True, (0, 11)),
        (70, 3, True, (31, 50)),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_longformer_adds_it_where_it_sees(
    monkeypatch, causal, window, dilation, some_global, padded, shape, form
):
    if form == "blocks":  # as on GPUs

        def blocks(q, k, v, plan, bias):
            return (longformer.blocks_attention(q, k, v, plan, 0.0, bias),)

        monkeypatch.setattr(longformer, "walk_attention", blocks)
    bias = torch.randn(shape, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (*qkv(), bias)]
    tokens, padding = torch.zeros(2, ROWS, LENGTH, dtype=torch.bool)
    padding |= True
    if padded is not None:
        padding[0, slice(*padded)] = False
    if some_global:
        tokens[0, [12, 60]], tokens[1, 7] = True, True
    out = longformer_attention(
        *inputs[:3],
        window=window,
        dilation=dilation,
        causal=causal,
        bias=inputs[3],
        global_tokens=tokens if some_global else None,
        padding=padding if padded is not None else None,
        impl="reference" if form == "reference" else "torch",
    )
    seen = seen_by(causal, window, dilation, tokens, padding)
    agree(out, softmax_attention(*inputs[:3], mask=seen, bias=inputs[3]).out, inputs)


def test_alibi_of_a_long_sequence_takes_no_square():
    """What it holds beside inputs and output is far below one float a pair."""
    length = 2048
    q = torch.randn(1, 2, length, 8)
    bias = torch.tensor([0.5, 0.1])[None, :, None, None] * torch.arange(length).float()
    with torch.profiler.profile(profile_memory=True) as profile:
        longformer_attention(q, q, q, window=64, causal=True, bias=bias)
        lsh_attention(q, q, q, rounds=1, chunk_size=16, bias=bias)
    assert max(event.cpu_memory_usage for event in profile.events()) < length * length


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("count", [1, 30, 99])
def test_the_last_queries_of_longformer_get_what_they_get_in_one_pass(monkeypatch, count, padded):
    monkeypatch.setattr(longformer, "PIECE", 16)
    (q, k, v), bias = qkv(), torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    padding = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    padding[0, :9] = False
    options = {"window": 6, "causal": True, "padding": padding if padded else None}
    whole = longformer_attention(q, k, v, bias=bias, **options)
    few = longformer_attention(q[:, :, -count:], k, v, bias=bias[:, :, -count:], **options)
    assert_close(few, whole[:, :, -count:])
    at = slice(50, 50 + min(count, 30))  # as with a static cache, of which a part is filled
    few = longformer_attention(q[:, :, at], k, v, bias=bias[:, :, at], offset=50, **options)
    assert_close(few, whole[:, :, at])


def test_what_longformer_cannot_do_with_few_queries_is_refused():
    q, k, v = qkv()
    with pytest.raises(UnsupportedError, match="9 queries and 100 keys"):
        longformer_attention(q[:, :, :9], k, v, window=4)
    with pytest.raises(UnsupportedError, match="a bias is given"):
        longformer_attention(q, k, v, window=4, bias=alibi(), impl="flex")


# -- reformer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("shape", [*SHAPES, (100, 100)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", ["asymmetric", "shared"])
def test_reformer_adds_it_where_queries_meet_keys(form, causal, packed, shape, impl):
    bias = torch.randn(shape, dtype=torch.float64)
    q, k, v, bias = inputs = [x.requires_grad_() for x in (*qkv(), bias)]
    segments = None
    if packed:
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        ids[0, 40:], ids[1, :7] = 1, -1
        segments = (ids, ids)
    options = {"causal": causal, "bias": bias, "segments": segments, "impl": impl}
    if form == "shared":
        rule = Rule(True, causal, 2, 8)
        out, k = shared_qk_attention(q, k, v, rounds=2, chunk_size=8, **options), unit(k)
    else:
        rule = Rule(False, causal, 3, 4, 0, 3, 2)
        out = lsh_attention(q, k, v, **SMALL, **options)
    ids = (None, None) if segments is None else segments
    met = lsh_meetings(q, inputs[1], *ids, None, torch.tensor([0]), [], list(map(int, rule)))
    times = met.clamp_min(1).to(q.dtype).log()
    scale = 1.0 if form == "shared" else None
    right = softmax_attention(q, k, v, scale=scale, mask=met > 0, bias=bias + times).out
    agree(out, right, inputs)


def unit(k):
    return k / (k.square().sum(-1, keepdim=True) + 1e-6 * k.shape[3]).sqrt()


def test_one_number_for_all_pairs_changes_nothing():
    q, k, v = qkv()
    plain = lsh_attention(q, k, v, **SMALL)
    shifted = lsh_attention(q, k, v, **SMALL, bias=torch.tensor(3.0, dtype=torch.float64))
    assert_close(shifted, plain)


def test_the_last_queries_of_reformer_get_what_they_get_in_one_pass():
    (q, k, v), bias = qkv(), torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    whole = lsh_attention(q, k, v, **SMALL, bias=bias)
    for count in (1, 30):
        few = lsh_attention(q[:, :, -count:], k, v, **SMALL, bias=bias[:, :, -count:])
        assert_close(few, whole[:, :, -count:])


# -- both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attend",
    [
        lambda *x, **options: longformer_attention(*x, window=LENGTH, causal=True, **options),
        lambda *x, **options: lsh_attention(*x, rounds=4, chunk_size=64, causal=True, **options),
    ],
    ids=["longformer", "reformer"],
)
def test_where_all_is_seen_alibi_is_that_of_softmax(attend):
    q, k, v = inputs = [x.requires_grad_() for x in qkv()]
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    slopes = -alibi_log_decay(HEADS, dtype=torch.float64)[:, None, None]
    right = softmax_attention(q, k, v, mask=distance >= 0, bias=-slopes * distance).out
    agree(attend(q, k, v, bias=alibi()), right, inputs)


@pytest.mark.slow
def test_compiled_they_take_it_too():
    torch._dynamo.reset()
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (*qkv(), bias)]
    for attend, options in (
        (longformer_attention, {"window": 9, "causal": True}),
        (lsh_attention, SMALL),
    ):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        found = compiled(*inputs[:3], bias=inputs[3], **options)
        agree(found, attend(*inputs[:3], bias=inputs[3], **options), inputs)
    torch._dynamo.reset()
