"""Position biases in sparse attention, against dense softmax with the bias under the mask."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from attnzoo.backends.gates.decays import alibi_log_decay
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.ops.longformer import by_band
from attnzoo.ops.longformer.api import longformer_attention
from attnzoo.ops.lsh.api import lsh_attention, shared_qk_attention
from attnzoo.ops.lsh.options import LSHOptions
from attnzoo.ops.lsh.reference import count_attended_keys
from attnzoo.ops.softmax.api import softmax_attention
from tests import helpers

qkv = partial(helpers.qkv, 100)

ROWS, HEADS, KEY_HEADS, LENGTH = 2, 4, 2, 100
SHAPES = [(1, 4, 100, 100), (2, 4, 1, 100)]  # of T5, and of ALiBi with padding
CAUSAL = AttentionMask(causal=True)
SMALL = {"num_hashes": 3, "chunk_size": 4, "window": 3, "first_tokens": 2}


def agree(ours, theirs, inputs):
    """Compare two outputs and the gradients of all inputs."""
    assert_close(ours, theirs, atol=1e-11, rtol=1e-11)
    upstream = torch.randn_like(theirs)
    found, right = (
        torch.autograd.grad(x, inputs, upstream, retain_graph=True) for x in (ours, theirs)
    )
    assert_close(found, right, atol=1e-10, rtol=1e-10)


def alibi():
    """Return the bias of models with ALiBi, by key position: softmax ignores the query's part."""
    slopes = -alibi_log_decay(HEADS, dtype=torch.float64)
    return slopes[None, :, None, None] * torch.arange(LENGTH, dtype=torch.float64)


def hide_keys(bias):
    """Hide all keys from queries 7 and 41, and many from others, by a bias of -inf."""
    hidden = torch.zeros(1, HEADS, LENGTH, LENGTH, dtype=torch.bool)
    hidden[:, :, [7, 41]] = hidden[:, 2:, 60, 13:] = hidden[:, :, :, 20] = True
    return bias.masked_fill(hidden, -torch.inf)


# -- longformer ------------------------------------------------------------------------------------


def seen_by(causal, window, dilation, tokens, padding):
    """Return the mask, ``[B, H, T, T]``; distances are counted in real tokens."""
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


@pytest.mark.parametrize("form", ["reference", "torch"])
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
def test_longformer_adds_the_bias_to_what_it_sees(
    causal, window, dilation, some_global, padded, shape, form
):
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
        mask=AttentionMask(causal=causal, padding=padding if padded is not None else None),
        bias=inputs[3],
        global_tokens=tokens if some_global else None,
        impl="reference" if form == "reference" else "torch",
    ).out
    seen = seen_by(causal, window, dilation, tokens, padding)
    agree(out, softmax_attention(*inputs[:3], mask=seen, bias=inputs[3]).out, inputs)


@pytest.mark.parametrize("form", ["reference", "torch", "dense"])
@pytest.mark.parametrize("some_global", [False, True])
def test_longformer_gives_zeros_where_the_bias_hides_all_keys(form, some_global):
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    q, k, v, bias = inputs = [x.requires_grad_() for x in (*qkv(), bias)]
    lowest = torch.arange(LENGTH)[:, None] == 12  # equal for all keys: none is masked
    bias = hide_keys(bias).masked_fill(lowest, torch.finfo(bias.dtype).min)
    tokens, padding = torch.zeros(2, ROWS, LENGTH, dtype=torch.bool)
    tokens[:, 60] = some_global
    queries = slice(1 if form == "dense" else 0, None)  # fewer queries than keys
    out = longformer_attention(
        q[:, :, queries],
        k,
        v,
        window=5,
        mask=AttentionMask(causal=True, q_offset=queries.start),
        bias=bias[:, :, queries],
        global_tokens=tokens if some_global else None,
        impl="reference" if form == "reference" else "torch",
    ).out
    seen = seen_by(True, 5, 1, tokens, ~padding)
    right = softmax_attention(q, k, v, mask=seen, bias=bias).out[:, :, queries]
    assert (right[:, :, 41 - queries.start] == 0).all()
    agree(out, right, inputs)


def test_alibi_of_a_long_sequence_is_not_expanded():
    """No tensor has T x T entries."""
    length = 2048
    q = torch.randn(1, 2, length, 8)
    bias = torch.tensor([0.5, 0.1])[None, :, None, None] * torch.arange(length).float()
    with torch.profiler.profile(profile_memory=True) as profile:
        longformer_attention(q, q, q, window=64, mask=CAUSAL, bias=bias)
        lsh_attention(q, q, q, mask=CAUSAL, num_hashes=1, chunk_size=16, bias=bias)
    assert max(event.cpu_memory_usage for event in profile.events()) < length * length


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("count", [1, 30, 99])
def test_the_last_queries_of_longformer_equal_one_pass(monkeypatch, count, padded, impl):
    monkeypatch.setattr(by_band, "QUERY_BLOCK", 16)
    (q, k, v), bias = qkv(), torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    padding = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    padding[0, :9] = False

    def attend(queries):
        mask = AttentionMask(
            causal=True, padding=padding if padded else None, q_offset=queries.start
        )
        options = {"window": 6, "mask": mask, "bias": bias[:, :, queries], "impl": impl}
        return longformer_attention(q[:, :, queries], k, v, **options).out

    one_pass = attend(slice(0, LENGTH))
    last = slice(LENGTH - count, LENGTH)
    assert_close(attend(last), one_pass[:, :, last])
    at = slice(50, 50 + min(count, 30))  # as with a static cache that is filled in part
    assert_close(attend(at), one_pass[:, :, at])


def test_unsupported_calls_with_fewer_queries_are_refused():
    q, k, v = qkv()
    with pytest.raises(UnsupportedError, match="9 queries and 100 keys"):
        longformer_attention(q[:, :, :9], k, v, window=4)


# -- reformer --------------------------------------------------------------------------------------


def reformer(form, q, k, v, mask, bias, impl):
    """Return the output of a form, and the rounds in which each query attends to each key."""
    options = {"mask": mask, "bias": bias, "impl": impl}
    if form == "shared":
        lsh = LSHOptions(True, mask.causal, 2, 8)
        out = shared_qk_attention(q, k, v, num_hashes=2, chunk_size=8, **options).out
    else:
        lsh = LSHOptions(False, mask.causal, 3, 4, 0, 3, 2)
        out = lsh_attention(q, k, v, **SMALL, **options).out
    seed, ids = torch.tensor([0]), mask.segment_ids
    return out, count_attended_keys(q, k, ids, ids, None, seed, [], list(map(int, lsh)))


def softmax_of_counts(form, q, k, v, counts, bias):
    """Return softmax attention to the attended keys, weighted by their number of rounds."""
    k, scale = (unit(k), 1.0) if form == "shared" else (k, None)
    bias = bias + counts.clamp_min(1).to(q.dtype).log()
    return softmax_attention(q, k, v, scale=scale, mask=counts > 0, bias=bias).out


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(
    ("shape", "packed"), [(SHAPES[0], True), (SHAPES[1], False), ((100, 100), False)], ids=str
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", ["asymmetric", "shared"])
def test_reformer_adds_the_bias_to_attended_keys(form, causal, packed, shape, impl):
    bias = torch.randn(shape, dtype=torch.float64)
    q, k, v, bias = inputs = [x.requires_grad_() for x in (*qkv(), bias)]
    mask = AttentionMask(causal=causal)
    if packed:
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        ids[0, 40:], ids[1, :7] = 1, -1
        mask = AttentionMask(causal=causal, segment_ids=ids, padding=ids >= 0)
    out, counts = reformer(form, q, k, v, mask, bias, impl)
    agree(out, softmax_of_counts(form, q, k, v, counts, bias), inputs)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", ["asymmetric", "shared"])
def test_reformer_gives_zeros_where_the_bias_hides_all_keys(form, causal, impl):
    """In the shared form, a query that sees no other key attends to its own, unless hidden."""
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    q, k, v, bias = inputs = [x.requires_grad_() for x in (*qkv(), bias)]
    sees_itself = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    sees_itself[41, 41] = True
    bias = torch.cat(
        [torch.where(sees_itself, bias, hide_keys(bias))[:, :1], hide_keys(bias)[:, 1:]], 1
    )
    out, counts = reformer(form, q, k, v, AttentionMask(causal=causal), bias, impl)
    if form == "shared":
        counts[:, 0, 41, 41] = 1
    right = softmax_of_counts(form, q, k, v, counts, bias)
    assert (right[:, 1:, 41] == 0).all()
    agree(out, right, inputs)


def unit(k):
    return k / (k.square().sum(-1, keepdim=True) + 1e-6 * k.shape[3]).sqrt()


def test_a_constant_bias_changes_nothing():
    q, k, v = qkv()
    bias = torch.tensor(3.0, dtype=torch.float64)
    plain = lsh_attention(q, k, v, mask=CAUSAL, **SMALL).out
    assert_close(lsh_attention(q, k, v, mask=CAUSAL, **SMALL, bias=bias).out, plain)


def test_the_last_queries_of_reformer_equal_one_pass():
    (q, k, v), bias = qkv(), torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    one_pass = lsh_attention(q, k, v, mask=CAUSAL, **SMALL, bias=bias).out
    for count in (1, 30):
        mask = AttentionMask(causal=True, q_offset=LENGTH - count)
        last = bias[:, :, -count:]
        few = lsh_attention(q[:, :, -count:], k, v, mask=mask, **SMALL, bias=last).out
        assert_close(few, one_pass[:, :, -count:])


# -- both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attend",
    [
        lambda *x, **options: longformer_attention(*x, window=LENGTH, **options),
        lambda *x, **options: lsh_attention(*x, num_hashes=4, chunk_size=64, **options),
    ],
    ids=["longformer", "reformer"],
)
def test_alibi_with_all_keys_is_that_of_softmax(attend):
    q, k, v = inputs = [x.requires_grad_() for x in qkv()]
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    slopes = -alibi_log_decay(HEADS, dtype=torch.float64)[:, None, None]
    right = softmax_attention(q, k, v, mask=distance >= 0, bias=-slopes * distance).out
    agree(attend(q, k, v, mask=CAUSAL, bias=alibi()).out, right, inputs)


@pytest.mark.slow
def test_compiled_ops_add_the_bias():
    torch._dynamo.reset()
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (*qkv(), bias)]
    for attend, options in (
        (longformer_attention, {"window": 9, "mask": CAUSAL}),
        (lsh_attention, {**SMALL, "mask": CAUSAL}),
    ):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        found = compiled(*inputs[:3], bias=inputs[3], **options).out
        agree(found, attend(*inputs[:3], bias=inputs[3], **options).out, inputs)
    torch._dynamo.reset()
