"""Linformer's two forms against loops over single tokens, written here."""

import math

import pytest
import torch
from torch.testing import assert_close

from attnzoo.errors import UnsupportedError
from attnzoo.ops.linformer import linformer_attention
from attnzoo.ops.linformer_blocks import linformer_block_attention

H, HKV, D, E, SCALE = 4, 2, 5, 3, 0.6


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def qkv(length, keys=None, batch=3):
    keys = length if keys is None else keys
    return draw(batch, H, length, D), draw(batch, HKV, keys, D), draw(batch, HKV, keys, E)


def rows_of(heads, longest, rows):
    return 0.3 * draw(heads, longest, rows), 0.3 * draw(heads, longest, rows)


def paddings(length):
    """Return left, right and interior padding, and rows of each length."""
    real = torch.rand(5, length) > 0.4
    real[0] = True
    real[1] = torch.arange(length) >= length // 3
    real[2] = torch.arange(length) < length // 2
    real[4] = False
    return real


def summarise(x, rows, pooling):
    """Project the n tokens of one head, ``[n, X]``; rows that no token goes to are left out."""
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


def whole(q, k, v, key_rows, value_rows, pooling, real=None):
    """Attend with every query of every head apart."""
    out = torch.zeros(*q.shape[:3], E, dtype=q.dtype)
    for b in range(q.shape[0]):
        kept = slice(None) if real is None else real[b]
        if real is not None and not real[b].any():
            continue
        for h in range(H):
            g = h // (H // HKV)
            row_k, bias = summarise(k[b, g, kept], head(key_rows, g), pooling)
            row_v, _ = summarise(v[b, g, kept], head(value_rows, g), pooling)
            for t in range(q.shape[2]):
                out[b, h, t] = attend(q[b, h, t], row_k, row_v, bias)
    return out


def blocks(q, k, v, key_rows, value_rows, pooling, real=None):
    """Attend causally, with every query of every head apart."""
    out, size = torch.zeros(*q.shape[:3], E, dtype=q.dtype), key_rows.shape[1]
    for b in range(q.shape[0]):
        kept = torch.arange(q.shape[2]) if real is None else real[b].nonzero()[:, 0]
        for h in range(H):
            g = h // (H // HKV)
            x, y = k[b, g, kept], v[b, g, kept]
            for place, t in enumerate(kept):
                start = place // size * size
                parts = [
                    (
                        *summarise(x[i : i + size], head(key_rows, g), pooling),
                        summarise(y[i : i + size], head(value_rows, g), pooling)[0],
                    )
                    for i in range(0, start, size)
                ]
                own = slice(start, place + 1)
                parts.append((x[own], torch.zeros(place + 1 - start).double(), y[own]))
                row_k, bias, row_v = (torch.cat(each) for each in zip(*parts, strict=True))
                out[b, h, t] = attend(q[b, h, t], row_k, row_v, bias)
    return out


# -- the whole sequence --------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("pooling", [False, True])
@pytest.mark.parametrize("heads", [1, HKV])
@pytest.mark.parametrize(("length", "keys"), [(12, 12), (3, 10), (7, 4), (2, 1)])
def test_matches_the_loops(impl, pooling, heads, length, keys):
    """Of 12 tokens at most and 5 rows: divisible by the rows and not, more than rows and fewer."""
    q, k, v = qkv(length, keys)
    rows = rows_of(heads, 12, 5)
    out = linformer_attention(q, k, v, *rows, scale=SCALE, pooling=pooling, impl=impl)
    assert_close(out, whole(q, k, v, *rows, pooling))


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("pooling", [False, True])
@pytest.mark.parametrize("heads", [1, HKV])
def test_padding_takes_no_place(impl, pooling, heads):
    q, k, v = qkv(11, batch=5)
    real, rows = paddings(11), rows_of(heads, 12, 5)
    expected = whole(q, k, v, *rows, pooling, real)
    options = {"scale": SCALE, "pooling": pooling, "impl": impl, "real": real}
    out = linformer_attention(q, k, v, *rows, **options)
    assert_close(out, expected)
    gone = ~real[:, None, :, None]
    other = linformer_attention(
        q, k.masked_fill(gone, 1e3), v.masked_fill(gone, 1e3), *rows, **options
    )
    assert_close(other, expected)


@pytest.mark.parametrize("keys", [1, 4, 5])
def test_tokens_that_have_a_row_each_make_softmax_attention(keys):
    q, k, v = qkv(7, keys)
    nothing = torch.zeros(1, 20, 5, dtype=torch.float64)
    out = linformer_attention(q, k, v, nothing, nothing, scale=SCALE, pooling=True)
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    assert_close(out, (SCALE * q @ k.mT).softmax(-1) @ v)


@pytest.mark.parametrize("layout", ["heads apart", "heads side by side"])
def test_any_strides(layout):
    """Heads that lie side by side in memory are projected in one product."""
    q, k, v = qkv(9)
    rows = rows_of(1, 9, 4)
    expected = linformer_attention(q, k, v, *rows, scale=SCALE)
    if layout == "heads side by side":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert_close(linformer_attention(q, k, v, *rows, scale=SCALE), expected)


def test_longer_sequences_are_refused():
    with pytest.raises(UnsupportedError, match="up to 8 tokens, got 9: set max_length=9"):
        linformer_attention(*qkv(9), *rows_of(1, 8, 4), scale=SCALE)


@pytest.mark.parametrize("heads", [1, HKV])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients(heads, padded):
    real = paddings(6)[:3] if padded else None
    leaves = [x.requires_grad_() for x in (*qkv(6), *rows_of(heads, 7, 4))]
    assert torch.autograd.gradcheck(
        lambda *x: linformer_attention(*x, scale=SCALE, pooling=True, real=real),
        leaves,
        fast_mode=True,
    )


# -- blocks --------------------------------------------------------------------------------------

BLOCK, ROWS = 6, 4


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("pooling", [False, True])
@pytest.mark.parametrize("heads", [1, HKV])
@pytest.mark.parametrize("length", [1, 6, 7, 12, 13, 24])  # up to two blocks at once, then walked
def test_blocks_match_the_loops(impl, pooling, heads, length):
    q, k, v = qkv(length, batch=2)
    rows = rows_of(heads, BLOCK, ROWS)
    options = {"scale": SCALE, "pooling": pooling, "impl": impl}
    out = linformer_block_attention(q, k, v, *rows, **options).out
    assert_close(out, blocks(q, k, v, *rows, pooling))


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("length", [9, 21])
def test_padding_takes_no_place_in_a_block(impl, length):
    q, k, v = qkv(length, batch=5)
    real, rows = paddings(length), rows_of(1, BLOCK, ROWS)
    options = {"scale": SCALE, "pooling": True, "impl": impl, "real": real}
    out = linformer_block_attention(q, k, v, *rows, **options).out
    assert_close(out, blocks(q, k, v, *rows, True, real))
    gone = ~real[:, None, :, None]
    worse = [x.masked_fill(gone, 1e3) for x in (k, v)]
    assert torch.equal(linformer_block_attention(q, *worse, *rows, **options).out, out)


@pytest.mark.parametrize("length", [5, 31])
def test_blocks_of_as_many_rows_as_tokens_make_softmax_attention(length):
    q, k, v = qkv(length)
    nothing = torch.zeros(1, BLOCK, BLOCK, dtype=torch.float64)
    out = linformer_block_attention(q, k, v, nothing, nothing, scale=SCALE, pooling=True).out
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    exact = (SCALE * q @ k.mT).masked_fill(later, -math.inf).softmax(-1) @ v
    assert_close(out, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("length", [11, 40])
def test_later_tokens_change_nothing(dtype, length):
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
def test_pieces_make_the_whole(impl, pooling, padded, cuts):
    q, k, v = qkv(27, batch=5)
    rows, real = rows_of(HKV, BLOCK, ROWS), paddings(27) if padded else None
    options = {"scale": SCALE, "pooling": pooling, "impl": impl}
    expected = linformer_block_attention(q, k, v, *rows, real=real, **options).out
    outs, state = [], None
    for start, stop in zip((0, *cuts), (*cuts, 27), strict=True):
        now = slice(start, stop)
        output = linformer_block_attention(
            q[:, :, now],
            k[:, :, now],
            v[:, :, now],
            *rows,
            real=None if real is None else real[:, now],
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
    real = paddings(length)[:3] if padded else None
    leaves = [x.requires_grad_() for x in (*qkv(length), *rows_of(1, BLOCK, ROWS))]

    def run(q, k, v, *rows):
        first, rest = slice(4), slice(4, None)
        options = {"scale": SCALE, "pooling": True}
        masks = [None if real is None else real[:, part] for part in (first, rest)]
        before = linformer_block_attention(
            *(x[:, :, first] for x in (q, k, v)), *rows, real=masks[0], return_state=True, **options
        )
        after = linformer_block_attention(
            *(x[:, :, rest] for x in (q, k, v)),
            *rows,
            real=masks[1],
            state=before.state,
            **options,
        )
        return before.out, after.out

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_dropout_takes_the_walk_that_autograd_knows():
    """Weights are dropped anew in each call, so that no pass can be made twice."""
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


def test_memory_of_the_backward_pass_is_that_of_its_inputs():
    """What autograd alone would keep grows with the square of the length."""
    kept = []

    def keep(x):
        kept.append(x.numel())
        return x

    q, k, v = (x.requires_grad_() for x in qkv(40 * BLOCK, batch=1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        linformer_block_attention(q, k, v, *rows_of(1, BLOCK, ROWS), scale=SCALE, pooling=True)
    assert sum(kept) < 6 * (q.numel() + k.numel() + v.numel())
