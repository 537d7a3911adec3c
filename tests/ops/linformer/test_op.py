"""Both forms of Linformer against loops over single tokens."""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.ops.linformer.api import linformer_attention, linformer_block_attention
from tests import helpers
from tests.helpers import HKV, H, draw

qkv = partial(helpers.qkv, batch=3, sizes=(5, 3))

D, E, SCALE = 5, 3, 0.6


def rows_of(heads, longest, rows):
    return 0.3 * draw(heads, longest, rows), 0.3 * draw(heads, longest, rows)


def padding_masks(length):
    """Return no padding, left, right and interior padding, and padding only, ``[5, T]``."""
    mask = torch.rand(5, length) > 0.4
    mask[0] = True
    mask[1] = torch.arange(length) >= length // 3
    mask[2] = torch.arange(length) < length // 2
    mask[4] = False
    return mask


def causal(padding_mask):
    return AttentionMask(causal=True, padding=padding_mask)


def project(x, rows, pooling):
    """Project the n tokens of one head, ``[n, X]``, to the rows that get a token."""
    n, r = len(x), rows.shape[1]
    weights = rows[:n].clone()
    counts = torch.ones(r)
    if pooling:
        used = min(n, r)
        weights, counts = weights[:, :used], torch.zeros(used)
        for i in range(n):
            counts[i * used // n] += 1
        for i in range(n):
            j = i * used // n
            weights[i, j] += 1 / counts[j]
    return weights.T @ x, counts.double().log()


def attend(q, k, v, bias):
    return (SCALE * k @ q + bias).softmax(0) @ v


def head(rows, h):
    return rows[h if len(rows) > 1 else 0]


def full_attention(q, k, v, key_rows, value_rows, pooling, padding_mask=None):
    """Attend with each query of each head separately."""
    out = torch.zeros(*q.shape[:3], E, dtype=q.dtype)
    for b in range(q.shape[0]):
        kept = slice(None) if padding_mask is None else padding_mask[b]
        if padding_mask is not None and not padding_mask[b].any():
            continue
        for h in range(H):
            g = h // (H // HKV)
            row_k, bias = project(k[b, g, kept], head(key_rows, g), pooling)
            row_v, _ = project(v[b, g, kept], head(value_rows, g), pooling)
            for t in range(q.shape[2]):
                out[b, h, t] = attend(q[b, h, t], row_k, row_v, bias)
    return out


def block_attention(q, k, v, key_rows, value_rows, pooling, padding_mask=None):
    """Attend causally, with each query of each head separately."""
    out, size = torch.zeros(*q.shape[:3], E, dtype=q.dtype), key_rows.shape[1]
    for b in range(q.shape[0]):
        kept = torch.arange(q.shape[2])
        if padding_mask is not None:
            kept = kept[padding_mask[b]]
        for h in range(H):
            g = h // (H // HKV)
            x, y = k[b, g, kept], v[b, g, kept]
            for position, t in enumerate(kept):
                start = position // size * size
                parts = [
                    (
                        *project(x[i : i + size], head(key_rows, g), pooling),
                        project(y[i : i + size], head(value_rows, g), pooling)[0],
                    )
                    for i in range(0, start, size)
                ]
                own = slice(start, position + 1)
                parts.append((x[own], torch.zeros(position + 1 - start).double(), y[own]))
                row_k, bias, row_v = (torch.cat(each) for each in zip(*parts, strict=True))
                out[b, h, t] = attend(q[b, h, t], row_k, row_v, bias)
    return out


# -- full sequences ------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("pooling", [False, True])
@pytest.mark.parametrize("heads", [1, HKV])
@pytest.mark.parametrize(("length", "keys"), [(12, 12), (3, 10), (7, 4), (2, 1)])
def test_matches_the_loops(impl, pooling, heads, length, keys):
    """At most 12 tokens and 5 rows: more and fewer tokens than rows, with and without a rest."""
    q, k, v = qkv(length, keys)
    rows = rows_of(heads, 12, 5)
    out = linformer_attention(q, k, v, *rows, scale=SCALE, pooling=pooling, impl=impl).out
    assert_close(out, full_attention(q, k, v, *rows, pooling))


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("pooling", [False, True])
@pytest.mark.parametrize("heads", [1, HKV])
def test_padding_has_no_position(impl, pooling, heads):
    q, k, v = qkv(11, batch=5)
    mask, rows = padding_masks(11), rows_of(heads, 12, 5)
    expected = full_attention(q, k, v, *rows, pooling, mask)
    options = {"scale": SCALE, "pooling": pooling, "impl": impl}
    options["mask"] = AttentionMask(padding=mask)
    assert_close(linformer_attention(q, k, v, *rows, **options).out, expected)
    changed = [x.masked_fill(~mask[:, None, :, None], 1e3) for x in (k, v)]
    assert_close(linformer_attention(q, *changed, *rows, **options).out, expected)


@pytest.mark.parametrize("keys", [1, 4, 5])
def test_one_row_per_token_equals_softmax(keys):
    q, k, v = qkv(7, keys)
    zeros = torch.zeros(1, 20, 5, dtype=torch.float64)
    out = linformer_attention(q, k, v, zeros, zeros, scale=SCALE, pooling=True).out
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    assert_close(out, (SCALE * q @ k.mT).softmax(-1) @ v)


@pytest.mark.parametrize("layout", ["B H T D", "B T H D"])
def test_any_strides(layout):
    """Heads that are adjacent in memory are projected in one product."""
    q, k, v = qkv(9)
    rows = rows_of(1, 9, 4)
    expected = linformer_attention(q, k, v, *rows, scale=SCALE).out
    if layout == "B T H D":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert_close(linformer_attention(q, k, v, *rows, scale=SCALE).out, expected)


def test_longer_sequences_are_refused():
    with pytest.raises(UnsupportedError, match="up to 8 tokens, got 9; set max_length=9"):
        linformer_attention(*qkv(9), *rows_of(1, 8, 4), scale=SCALE)


@pytest.mark.parametrize("heads", [1, HKV])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients(heads, padded):
    mask = AttentionMask(padding=padding_masks(6)[:3] if padded else None)
    leaves = [x.requires_grad_() for x in (*qkv(6), *rows_of(heads, 7, 4))]
    assert torch.autograd.gradcheck(
        lambda *x: linformer_attention(*x, scale=SCALE, pooling=True, mask=mask).out,
        leaves,
        fast_mode=True,
    )


# -- blocks --------------------------------------------------------------------------------------

BLOCK, ROWS = 6, 4


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("pooling", [False, True])
@pytest.mark.parametrize("heads", [1, HKV])
@pytest.mark.parametrize("length", [1, 6, 7, 12, 13, 24])  # dense up to two blocks, then blockwise
def test_blocks_match_the_loops(impl, pooling, heads, length):
    q, k, v = qkv(length, batch=2)
    rows = rows_of(heads, BLOCK, ROWS)
    options = {"scale": SCALE, "pooling": pooling, "impl": impl}
    out = linformer_block_attention(q, k, v, *rows, **options).out
    assert_close(out, block_attention(q, k, v, *rows, pooling))


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("length", [9, 21])
def test_padding_has_no_position_in_a_block(impl, length):
    q, k, v = qkv(length, batch=5)
    mask, rows = padding_masks(length), rows_of(1, BLOCK, ROWS)
    options = {"scale": SCALE, "pooling": True, "impl": impl, "mask": causal(mask)}
    out = linformer_block_attention(q, k, v, *rows, **options).out
    assert_close(out, block_attention(q, k, v, *rows, True, mask))
    changed = [x.masked_fill(~mask[:, None, :, None], 1e3) for x in (k, v)]
    assert torch.equal(linformer_block_attention(q, *changed, *rows, **options).out, out)


@pytest.mark.parametrize("length", [5, 31])
def test_one_row_per_token_of_a_block_equals_softmax(length):
    q, k, v = qkv(length)
    zeros = torch.zeros(1, BLOCK, BLOCK, dtype=torch.float64)
    out = linformer_block_attention(q, k, v, zeros, zeros, scale=SCALE, pooling=True).out
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    exact = (SCALE * q @ k.mT).masked_fill(later, -math.inf).softmax(-1) @ v
    assert_close(out, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("length", [11, 40])
def test_later_tokens_change_zeros(dtype, length):
    tensors = [x.to(dtype) for x in qkv(length)]
    rows = [x.to(dtype) for x in rows_of(1, BLOCK, ROWS)]
    out = linformer_block_attention(*tensors, *rows, scale=SCALE, pooling=True).out
    for cut in (*range(1, length, 4), length - 1):
        changed = [x.clone() for x in tensors]
        for x in changed:
            x[:, :, cut:] *= -50
        other = linformer_block_attention(*changed, *rows, scale=SCALE, pooling=True).out
        assert torch.equal(other[:, :, :cut], out[:, :, :cut])


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("pooling", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (5, 6, 7), (6,), (12, 13), (3, 20), tuple(range(1, 27))])
def test_calls_with_a_state_equal_one_call(impl, pooling, padded, cuts):
    q, k, v = qkv(27, batch=5)
    rows, mask = rows_of(HKV, BLOCK, ROWS), padding_masks(27) if padded else None
    options = {"scale": SCALE, "pooling": pooling, "impl": impl}
    expected = linformer_block_attention(q, k, v, *rows, mask=causal(mask), **options).out
    outs, state = [], None
    for start, stop in zip((0, *cuts), (*cuts, 27), strict=True):
        now = slice(start, stop)
        output = linformer_block_attention(
            q[:, :, now],
            k[:, :, now],
            v[:, :, now],
            *rows,
            mask=causal(None if mask is None else mask[:, now]),
            state=state,
            return_state=True,
            **options,
        )
        state = output.state
        outs.append(output.out)
    assert_close(torch.cat(outs, 2), expected)


def test_the_state_grows_by_its_rows_for_every_finished_block():
    q, k, v = qkv(20)
    rows, state = rows_of(1, BLOCK, ROWS), None
    for t in range(20):
        now = (x[:, :, t : t + 1] for x in (q, k, v))
        state = linformer_block_attention(
            *now, *rows, scale=SCALE, pooling=True, state=state, return_state=True
        ).state
        finished = (t + 1) // BLOCK
        assert state.row_k.shape == (3, HKV, finished * ROWS, D)
        assert state.row_v.shape == (3, HKV, finished * ROWS, E)
        assert state.k.shape == (3, HKV, BLOCK, D)
        assert state.used.tolist() == [(t + 1) % BLOCK] * 3


@pytest.mark.parametrize("length", [5, 19])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_blocks(length, padded):
    mask = padding_masks(length)[:3] if padded else None
    leaves = [x.requires_grad_() for x in (*qkv(length), *rows_of(1, BLOCK, ROWS))]

    def run(q, k, v, *rows):
        first, rest = slice(4), slice(4, None)
        options = {"scale": SCALE, "pooling": True}
        masks = [causal(None if mask is None else mask[:, part]) for part in (first, rest)]
        before = linformer_block_attention(
            *(x[:, :, first] for x in (q, k, v)), *rows, mask=masks[0], return_state=True, **options
        )
        after = linformer_block_attention(
            *(x[:, :, rest] for x in (q, k, v)),
            *rows,
            mask=masks[1],
            state=before.state,
            **options,
        )
        return before.out, after.out

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_dropout_does_not_recompute_blocks():
    """Every call draws new dropout, so recomputing would give other gradients."""
    q, k, v = (x.requires_grad_() for x in qkv(30))
    rows = rows_of(1, BLOCK, ROWS)
    plain = linformer_block_attention(q, k, v, *rows, scale=SCALE).out
    torch.manual_seed(0)
    total = torch.zeros_like(plain)
    for _ in range(100):
        total += linformer_block_attention(q, k, v, *rows, scale=SCALE, dropout=0.2).out.detach()
    assert (total / 100 - plain).abs().mean() < 0.03
    torch.manual_seed(0)
    out = linformer_block_attention(q, k, v, *rows, scale=SCALE, dropout=0.2).out
    weights = torch.autograd.grad(out.sum(), v)[0].sum()  # those that were not dropped
    torch.manual_seed(0)
    ones = torch.ones_like(v)
    again = linformer_block_attention(q, k, ones, *rows, scale=SCALE, dropout=0.2).out
    assert_close(weights, again.sum())


def test_backward_saves_only_the_inputs():
    """Autograd would save tensors that grow with the square of the length."""
    kept = {}  # views share a storage

    def keep(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // x.itemsize
        return x

    q, k, v = (x.requires_grad_() for x in qkv(40 * BLOCK, batch=1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        linformer_block_attention(q, k, v, *rows_of(1, BLOCK, ROWS), scale=SCALE, pooling=True)
    assert sum(kept.values()) < 4 * (q.numel() + k.numel() + v.numel())


@pytest.mark.parametrize("op", [linformer_attention, linformer_block_attention])
def test_the_implementation_is_returned(op):
    inputs = *qkv(7), *rows_of(1, 8, 4)
    assert op(*inputs).impl.impl == "torch"
    assert op(*inputs, impl="reference").impl == ("reference", "named in the options")
    with pytest.raises(UnsupportedError, match="Did you mean 'reference'"):
        op(*inputs, impl="refrence")


def test_unsupported_masks_are_refused():
    inputs = *qkv(7), *rows_of(1, 8, 4)
    for op, mask, message in (
        (linformer_attention, AttentionMask(causal=True), "use linformer_block_attention"),
        (linformer_block_attention, AttentionMask(), "use linformer_attention"),
        (linformer_attention, AttentionMask(window=(1, 1)), "mask is a sliding window"),
        (linformer_attention, AttentionMask(padding=torch.ones(3, 6) > 0), r"here \[3, 7\]"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            op(*inputs, mask=mask)
    with pytest.raises(UnsupportedError, match="value_rows must be"):
        linformer_attention(*inputs[:4], inputs[4][:, :5])


@pytest.mark.parametrize("pooling", [False, True])
@pytest.mark.parametrize("op", [linformer_attention, linformer_block_attention])
def test_gradients_in_16_bits_are_as_precise_as_the_reference(op, pooling):
    """Values with a mean of 1 make the scores' gradients differences of large numbers."""
    tokens = 512 if op is linformer_attention else 64
    q, k, v, d_out = torch.randn(4, 1, 2, 512, 32).unbind()
    rows = 0.05 * torch.randn(2, 1, tokens, 8)
    tensors = [x.bfloat16() for x in (q, k, v + 1, *rows)]

    def gradients(dtype, impl):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        out = op(*leaves, pooling=pooling, impl=impl).out
        return torch.autograd.grad(out, leaves, d_out.bfloat16().to(dtype))

    exact = gradients(torch.float64, "reference")
    plain, ours = gradients(torch.bfloat16, "reference"), gradients(torch.bfloat16, "torch")
    for name, a, b, c in zip(("q", "k", "v", "E", "F"), ours, plain, exact, strict=True):
        error, budget = ((x.double() - c).norm() / c.norm() for x in (a, b))
        assert error <= 2 * budget, f"{name}: {error:.1e} exceeds twice {budget:.1e}"
