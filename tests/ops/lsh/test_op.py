"""LSH attention against its definition query by query, and against transformers' layer."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.ops.lsh.api import lsh_attention, shared_qk_attention
from attnzoo.ops.lsh.block_softmax import BlockBatch, BlockPlan, block_attention
from attnzoo.ops.lsh.cpu import lsh as reformer_cpp
from attnzoo.ops.lsh.cpu.lsh import LSH, PIVOTS
from attnzoo.ops.lsh.options import LSHOptions, seeded_generator
from attnzoo.ops.lsh.reference import count_attended_keys
from attnzoo.ops.lsh.voronoi_hashing import (
    HashRounds,
    RoundBlocks,
    best_pivots,
    split_levels,
)
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.runtime import cpp
from tests import helpers

SMALL = {"num_hashes": 3, "chunk_size": 4, "window": 3, "first_tokens": 2}
NO_KERNEL = cpp.unavailable_reason(LSH) or cpp.unavailable_reason(PIVOTS)
CPP = pytest.param("cpp", marks=pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL))
FORMS = pytest.mark.parametrize(
    ("form", "impl"),
    [
        pytest.param("asymmetric", "torch"),
        pytest.param("asymmetric", "cpp", marks=CPP.marks),
        pytest.param("shared", "torch"),
    ],
)


def qkv(length, **options):
    q, k, v = helpers.qkv(length, **options)
    return q, k.add_(torch.randn_like(k[:, :, :1])), v  # keys share a mean, as pretrained ones do


def make_mask(q, k, causal, ids):
    """Return the mask of queries at the last positions; negative ids are padding."""
    mask = {"causal": causal, "q_offset": k.shape[2] - q.shape[2]}
    if ids is not None:
        mask |= {"padding": ids >= 0, "segment_ids": ids.clamp_min(0)}
    return AttentionMask(**mask)


def lsh(q, k, v, *, causal=True, ids=None, **options):
    return lsh_attention(q, k, v, mask=make_mask(q, k, causal, ids), **options).out


def shared_qk(q, k, v, *, causal=True, ids=None, **options):
    return shared_qk_attention(q, k, v, mask=make_mask(q, k, causal, ids), **options).out


# -- the asymmetric form, query by query -----------------------------------------------------------


def attended_keys(
    q, k, t, *, num_hashes, chunk_size, window, first_tokens, causal, buckets=None, seed=0
):
    """Return the keys ``[S, D]`` that the query ``[D]`` at position t attends to, as a set."""
    length = len(k)
    full = num_hashes * chunk_size + first_tokens + (window if causal else 2 * window + 1)
    if t < full if causal else length <= full:
        return set(range(t + 1 if causal else length))
    past = full * 2 ** int(math.log2(t / full) + 1e-9) if causal else length
    near = range(max(t - window + 1, 0), t + 1) if causal else range(t - window, t + window + 1)
    keys = {j for j in near if 0 <= j < length} | set(range(first_tokens))
    center = k[:past].mean(0)
    for group, pivots_per_chunk in enumerate((0.5, 1.0)):
        rounds = len(range(group, num_hashes, 2))
        pivot_length = 2 * past if causal else past
        count = buckets or min(max(1, int(pivots_per_chunk * pivot_length) // chunk_size), 256)
        count = min(count, past - first_tokens)
        draw = torch.rand(rounds, count, generator=seeded_generator(seed, past, group)).double()
        for r in range(rounds):
            edges = [first_tokens + (past - first_tokens) * i // count for i in range(count + 1)]
            ranges = zip(edges[:-1], edges[1:], draw[r].tolist(), strict=True)
            pivots = k[[low + int(x * (high - low)) for low, high, x in ranges]]
            distance = (k[:, None] - pivots).square().sum(-1)  # [S, P]
            nearest = distance.argmin(1)
            query_bucket = ((pivots - center) @ q).argmax()
            bucket = [j for j in range(first_tokens, length) if nearest[j] == query_bucket]
            if causal:  # the latest before the window
                keys |= set([j for j in bucket if j <= t - window][-chunk_size:])
            else:  # those around the query's position
                at = sum(j <= t for j in bucket) - chunk_size // 2
                at = max(min(at, len(bucket) - chunk_size), 0)
                keys |= set(bucket[at : at + chunk_size])
    return keys


def reference_counts(q, k, options):
    """Return in how many rounds the reference attends to each key, ``[B, H, T, S]``."""
    return count_attended_keys(
        q, k, None, None, None, torch.tensor([0]), [], list(map(int, options))
    )


@pytest.mark.parametrize("buckets", [None, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_queries_attend_to_the_keys_of_the_definition(causal, buckets):
    q, k, v = qkv(61, batch=1)
    expected = torch.zeros(1, 4, 61, 61, dtype=torch.long)
    for head in range(4):
        for t in range(61):
            keys = attended_keys(
                q[0, head, t], k[0, head // 2], t, **SMALL, causal=causal, buckets=buckets
            )
            expected[0, head, t, list(keys)] = 1
    # Each key counts once, even if several rounds contain it
    dense = softmax_attention(q, k, v, mask=expected > 0).out
    for impl in ("torch", "reference", *([] if NO_KERNEL else ["cpp"])):
        out = lsh(q, k, v, **SMALL, causal=causal, num_buckets=buckets, impl=impl)
        assert_close(out, dense, atol=1e-12, rtol=1e-12)
    options = LSHOptions(False, causal, 3, 4, buckets or 0, 3, 2)
    assert torch.equal(reference_counts(q, k, options), expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "first"), [(9, 5), (60, 5), (250, 130)])
def test_many_first_tokens(length, first, causal):
    q, k, v = qkv(length, batch=1, heads=(1, 1))
    options = {"num_hashes": 1, "chunk_size": 1, "window": 1, "first_tokens": first}
    seen = torch.zeros(1, 1, length, length, dtype=torch.bool)
    for t in range(length):
        seen[0, 0, t, list(attended_keys(q[0, 0, t], k[0, 0], t, **options, causal=causal))] = True
    for impl in ("torch",) if NO_KERNEL else ("torch", "cpp"):
        found = lsh(q, k, v, **options, causal=causal, impl=impl)
        assert_close(found, softmax_attention(q, k, v, mask=seen).out)


@pytest.mark.parametrize("impl", ["torch", CPP])
@pytest.mark.parametrize("causal", [True, False])
def test_short_sequences_get_full_attention(causal, impl):
    full = 17 if causal else 21
    q, k, v = qkv(full)
    mask = torch.ones(full, full, dtype=torch.bool).tril() if causal else None
    found = lsh(q, k, v, **SMALL, causal=causal, impl=impl)
    assert_close(found, softmax_attention(q, k, v, mask=mask).out)
    q, k, v = qkv(full + 8)
    mask = torch.ones(full + 8, full + 8, dtype=torch.bool).tril() if causal else None
    dense = softmax_attention(q, k, v, mask=mask).out
    found = lsh(q, k, v, **SMALL, causal=causal, impl=impl)
    assert (found - dense).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@FORMS
def test_rounding_costs_no_more_than_in_the_reference(form, impl, dtype):
    inputs = qkv(300, dtype=dtype, sizes=(16, 6))

    def run(x, impl):
        if form == "shared":
            return shared_qk(*x, num_hashes=2, chunk_size=16, impl=impl)
        return lsh(*x, **{**SMALL, "chunk_size": 16}, impl=impl)

    exact = run([x.double() for x in inputs], "reference")
    plain, ours = run(inputs, "reference"), run(inputs, impl)
    budget = 2 * (plain - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= budget


@pytest.mark.parametrize("impl", ["torch", CPP])
@pytest.mark.parametrize(
    ("chunk", "length", "dtype"),
    [(4, 300, torch.float32), (4, 300, torch.float64), (64, 1100, torch.float32)],
)
def test_later_tokens_change_no_bit(chunk, length, dtype, impl):
    """Blocks, lanes and shapes of products depend on past tokens only."""
    size = 64 if chunk == 64 else 8
    x = qkv(length, batch=1, heads=(2, 1), sizes=(size, size), dtype=dtype)
    options = {"num_hashes": 2, "chunk_size": chunk, "window": 9, "impl": impl}
    out = lsh(*x, **options)
    for cut in (length // 3, length // 2 + 1, length - 1):
        for change in (lambda later: 6 * later, lambda later: 3 * torch.randn_like(later)):
            changed = [torch.cat([t[:, :, :cut], change(t[:, :, cut:])], 2) for t in x]
            found = lsh(*changed, **options)
            assert torch.equal(found[:, :, :cut], out[:, :, :cut])
            assert not torch.equal(found[:, :, cut:], out[:, :, cut:])


@pytest.mark.parametrize(("size", "value_size"), [(1, 4), (4, 1), (4, 4)])
def test_a_block_does_not_depend_on_the_other_blocks_of_its_batch(size, value_size):
    """Later tokens decide how many blocks a batch has; one block takes the same product."""
    queries, keys, most = 32, 128, 40
    q, k, v = (
        torch.randn(most * rows + 1, channels)
        for rows, channels in ((queries, size), (keys, size), (keys, value_size))
    )

    def attend(blocks):
        batch = BlockBatch(
            torch.arange(blocks * queries).view(blocks, queries),
            torch.arange(blocks * keys).view(blocks, keys),
            torch.zeros(blocks, keys, queries),
        )
        return block_attention(q, k, v, BlockPlan(blocks * queries, 1, iter([batch])))

    for found, expected in zip(attend(1), attend(most), strict=True):
        assert torch.equal(found[:queries], expected[:queries])


@pytest.mark.parametrize("impl", ["torch", CPP, "reference"])
def test_the_last_queries_equal_one_pass(impl):
    q, k, v = qkv(90)
    whole = lsh(q, k, v, **SMALL, impl=impl)
    for count in (1, 7, 40, 89):
        found = lsh(q[:, :, -count:], k, v, **SMALL, impl=impl)
        assert_close(found, whole[:, :, -count:])


@pytest.mark.parametrize("causal", [True, False])
@FORMS
def test_packed_sequences_equal_separate_ones(form, impl, causal):
    q, k, v = (x.requires_grad_() for x in qkv(70, batch=4))
    ids = torch.full((4, 70), -1)
    ids[0], ids[1, :33], ids[3, 4:70:2] = 5, 0, 0  # two of one length, and a row of padding
    ids[3, 5:70:2] = 1  # interleaved
    ids[3, 60:] = -1

    def run(*x, ids=None):
        if form == "shared":
            return shared_qk(*x, num_hashes=2, chunk_size=4, causal=causal, ids=ids)
        return lsh(*x, **SMALL, causal=causal, ids=ids, impl=impl)

    out = run(q, k, v, ids=ids)
    out.square().sum().backward()
    for row, number in ((0, 5), (1, 0), (3, 0), (3, 1)):
        where = ids[row] == number
        alone = [x[[row]][:, :, where].detach().requires_grad_() for x in (q, k, v)]
        expected = run(*alone)
        expected.square().sum().backward()
        assert_close(out[[row]][:, :, where], expected)
        for mine, its in zip((q, k, v), alone, strict=True):
            assert_close(mine.grad[[row]][:, :, where], its.grad)
    nothing = (ids < 0)[:, None, :, None]
    assert (out.masked_select(nothing) == 0).all()
    assert all((x.grad.masked_select(nothing) == 0).all() for x in (q, k, v))


@FORMS
def test_hashes_depend_on_the_seed_only(form, impl):
    x, state = qkv(200), torch.get_rng_state()

    def run(seed):
        if form == "shared":
            return shared_qk(*x, chunk_size=8, seed=seed)
        return lsh(*x, **SMALL, seed=seed, impl=impl)

    first, again, other = map(run, (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(run(torch.tensor([1])), first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("causal", [True, False])
@FORMS
def test_gradients(form, impl, causal):
    x = [t.requires_grad_() for t in qkv(40, batch=1, heads=(2, 1), sizes=(4, 3))]

    def run(*x):
        if form == "shared":
            return shared_qk(*x, num_hashes=2, chunk_size=8, causal=causal)
        return lsh(*x, **SMALL, causal=causal, scale=0.7, impl=impl)

    assert torch.autograd.gradcheck(run, x, fast_mode=True)


@pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL)
@pytest.mark.parametrize(("groups", "causal"), [(3, True), (5, False), (6, True)])
def test_gradients_with_any_number_of_query_heads_per_key_head(groups, causal):
    """Default options and so many tokens that blocks of 32 // groups queries share windows."""
    given = qkv(700, batch=1, heads=(groups, 1))
    upstream = torch.randn(1, groups, 700, 6, dtype=torch.float64)
    results = []
    for name in ("reference", "torch", "cpp"):
        inputs = [x.clone().requires_grad_() for x in given]
        out = lsh(*inputs, causal=causal, impl=name)
        results.append((out, *torch.autograd.grad(out, inputs, upstream)))
    for expected, *found in zip(*results, strict=True):
        for seen, impl in zip(found, ("torch", "cpp"), strict=True):
            assert_close(seen, expected, rtol=1e-9, atol=1e-11, msg=lambda m, i=impl: f"{i}: {m}")


@pytest.mark.parametrize(("dtype", "causal"), [(torch.float32, True), (torch.float64, False)])
def test_blocks_of_any_shape_are_the_same_in_both_impls(dtype, causal):
    """Lengths, sizes and chunks that fill no vector, no tile and no block; several threads."""
    now = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for length, size, chunk, window in ((777, 40, 16, 300), (901, 17, 100, 5), (33, 64, 1, 2)):
            x = qkv(length, batch=1, sizes=(size, size + 9), dtype=dtype)
            x = [t.requires_grad_() for t in x]
            weight = torch.randn(1, 4, length, size + 9, dtype=dtype)
            options = {"num_hashes": 3, "chunk_size": chunk, "window": window, "causal": causal}
            outs = [lsh(*x, **options, impl=impl) for impl in ("torch", "cpp")]
            gradients = [torch.autograd.grad((out * weight).sum(), x) for out in outs]
            eps = 50 * torch.finfo(dtype).eps
            for a, b in zip((outs[0], *gradients[0]), (outs[1], *gradients[1]), strict=True):
                assert (a - b).abs().max() <= eps * a.abs().max()
    finally:
        torch.set_num_threads(now)


@pytest.mark.parametrize("impl", ["torch", CPP])
def test_nan_is_not_hidden(impl):
    q, k, v = qkv(200, batch=1, heads=(2, 2), dtype=torch.float32)
    q[0, 0, 150], k[0, 1, 190] = torch.nan, torch.nan
    out = lsh(q, k, v, **SMALL, impl=impl)
    assert out[0, 0, 150].isnan().all()
    assert not out[0, 0, :150].isnan().any()
    assert out[0, 1, 190:193].isnan().all()  # by the window
    if impl == "cpp":  # in torch, all queries of a block with such a key become NaN
        assert not out[0, 1, :190].isnan().any()


@pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL)
def test_the_kernel_refuses_unsupported_calls():
    q, k, v = qkv(5)
    with pytest.raises(UnsupportedError, match=r"cpp' cannot run .*: the kernel has no additive"):
        lsh(q, k, v, bias=torch.zeros(5, 5), impl="cpp")
    with pytest.raises(UnsupportedError, match="shared_qk_attention has no impl 'cpp'"):
        shared_qk(q, q[:, :2], v, impl="cpp")
    with pytest.raises(UnsupportedError, match=r"the tensors are on meta \(cpp runs on cpu\)"):
        lsh(*(x.to("meta") for x in (q, k, v)), impl="cpp")


@pytest.mark.parametrize(
    "best",
    [
        best_pivots,
        pytest.param(
            reformer_cpp.best_pivots,
            marks=pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL),
        ),
    ],
)
def test_a_token_is_hashed_to_the_pivot_of_highest_score(best):
    """To 2^-18 of the scores, whose last bits hold the index of the pivot."""
    kinds = [(2, 3), (1, 11)]
    x, pivots, offset = torch.randn(2, 1000, 24), torch.randn(2, 17, 24), torch.randn(2, 17, 1)
    for its in (offset, None):
        found = best(x, pivots, its, kinds).long()
        assert found.shape == (3, 2, 1000)
        scores = pivots.double() @ x.double().mT - (0 if its is None else its.double())
        for mine, of_round in zip(found, scores.split([3, 3, 11], 1), strict=True):
            assert mine.min() == 0
            assert mine.max() == of_round.shape[1] - 1
            missed = of_round.amax(1) - of_round.gather(1, mine[:, None])[:, 0]
            assert (missed <= 2**-18 * of_round.abs().amax(1)).all()


def test_work_per_query_does_not_grow():
    """Counts scores; hashing has a bounded number of pivots, and benchmarks/ops.py times it."""
    options, scores = LSHOptions(False, True, 2, 64, 0, 32, 4), []
    for length in (2048, 16384):
        q, count = torch.randn(1, 1, length, 16), 0
        for level in split_levels(options, 0, length):
            queries, keys = q[:, :, level.begin : level.end], q[:, 0, : level.keys]
            for hash_round in HashRounds(queries, keys, options, level, (0,)).rounds:
                blocks = RoundBlocks(hash_round)
                for at, _ in blocks.by_width(64):
                    count += 64 * blocks.queries[at].numel()
        scores.append(count / length)
    assert scores[1] <= 1.05 * scores[0] <= 1.05 * 2 * (2 * 2 * 64 + 3 * 32)


# -- the paper's form, against transformers --------------------------------------------------------


def peer(length, *, chunk, rounds, buckets, causal, heads=2, size=8, std=0.5):
    """Return transformers' layer in float64 and the rotations that it will draw."""
    config = ReformerConfig(
        attention_head_size=size,
        num_attention_heads=heads,
        hidden_size=heads * size,
        num_hashes=rounds,
        num_buckets=buckets,
        lsh_attn_chunk_length=chunk,
        is_decoder=causal,
        lsh_attention_probs_dropout_prob=0.0,
        max_position_embeddings=length,
        hash_seed=3,
    )
    layer = LSHSelfAttention(config).double()
    torch.nn.init.normal_(layer.query_key.weight, std=std)
    torch.nn.init.normal_(layer.value.weight, std=std)
    columns = sum([buckets] if isinstance(buckets, int) else buckets) // 2
    with torch.random.fork_rng():
        torch.manual_seed(3)
        rotations = torch.randn(heads, size, rounds, columns, dtype=torch.float64)
    return layer, rotations


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("length", "chunk", "rounds", "buckets"),
    [(64, 8, 1, 8), (64, 8, 3, 8), (64, 8, 2, [2, 4]), (48, 16, 4, 6), (16, 8, 2, 2), (8, 8, 2, 2)],
)
def test_shared_qk_matches_transformers(length, chunk, rounds, buckets, causal, impl):
    layer, rotations = peer(length, chunk=chunk, rounds=rounds, buckets=buckets, causal=causal)
    hidden = torch.randn(2, length, 16, dtype=torch.float64)
    with torch.random.fork_rng():
        theirs = layer(hidden).hidden_states
        their_gradient = torch.autograd.grad(theirs.square().sum(), layer.parameters())
    q, v = split(layer.query_key(hidden), 2), split(layer.value(hidden), 2)
    options = {"num_hashes": rounds, "chunk_size": chunk, "num_buckets": buckets, "impl": impl}
    ours = shared_qk(q, q, v, **options, causal=causal, rotations=rotations)
    ours = ours.transpose(1, 2).flatten(2)
    assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    gradient = torch.autograd.grad(ours.square().sum(), layer.parameters())
    assert_close(gradient, their_gradient, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("causal", [True, False])
def test_shared_qk_matches_transformers_in_float32(causal):
    layer, rotations = peer(1024, chunk=64, rounds=4, buckets=32, causal=causal, size=32, std=0.1)
    layer, hidden = layer.float(), torch.randn(1, 1024, 64)
    layer.hash_seed = None  # float32 draws differ from float64 draws
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        rotations = torch.randn(2, 32, 4, 16)
        torch.manual_seed(3)
        theirs = layer(hidden).hidden_states
        q, v = split(layer.query_key(hidden), 2), split(layer.value(hidden), 2)
        options = {"num_hashes": 4, "chunk_size": 64, "num_buckets": 32, "causal": causal}
        ours = shared_qk(q, q, v, **options, rotations=rotations)
    # There, a query without other keys weights its rounds by logs of -1e5, rounded to 0.008
    alone = (ours - v).abs().amax(-1, keepdim=True) < 1e-6
    assert alone[:, :, 0].all() or not causal
    assert alone.sum() <= 8
    error = (ours - split(theirs, 2)).masked_fill(alone, 0)
    assert error.abs().max() <= 1e-5


@pytest.mark.parametrize("causal", [True, False])
def test_padding_in_shared_qk_matches_transformers(causal):
    length, real = 64, torch.ones(2, 64, dtype=torch.bool)
    real[1, 58:] = False  # within the last chunk
    layer, rotations = peer(length, chunk=8, rounds=3, buckets=8, causal=causal)
    hidden = torch.randn(2, length, 16, dtype=torch.float64)
    with torch.random.fork_rng():
        theirs = layer(hidden, attention_mask=real).hidden_states
    q, v = split(layer.query_key(hidden), 2), split(layer.value(hidden), 2)
    options = {"num_hashes": 3, "chunk_size": 8, "num_buckets": 8, "causal": causal}
    ours = shared_qk(q, q, v, **options, rotations=rotations, ids=real.long() - 1)
    assert_close(ours.transpose(1, 2).flatten(2)[real], theirs[real], atol=1e-9, rtol=1e-9)


def test_only_queries_without_other_keys_attend_to_their_own():
    q, _, v = qkv(64, heads=(2, 2))
    options = {"num_hashes": 2, "chunk_size": 8, "num_buckets": 4}
    assert_close(shared_qk(q, q, v, **options)[:, :, 0], v[:, :, 0])
    for causal in (True, False):
        eye = torch.eye(64, dtype=torch.float64).expand(2, 2, -1, -1)
        weights = shared_qk(q, q, eye, **options, causal=causal)
        own = weights.diagonal(dim1=2, dim2=3)
        alone = (own - 1).abs() < 1e-12
        assert ((own == 0) | alone).all()
        assert alone[:, :, 0].all() or not causal
        assert causal == bool(alone.any())


def test_shared_qk_sorts_queries_and_different_keys_separately():
    q, k, v = qkv(100, batch=1, sizes=(16, 6))
    out = shared_qk(q, k, v, num_hashes=2, chunk_size=8)
    counts = reference_counts(q, k, LSHOptions(True, True, 2, 8))
    unit = k / k.norm(dim=-1, keepdim=True)
    bias = counts.clamp_min(1).log()
    dense = softmax_attention(q, unit, v, scale=1.0, mask=counts > 0, bias=bias).out
    assert_close(out, dense, atol=1e-5, rtol=1e-5)  # the norm has an epsilon
    assert counts.sum(-1).max() <= 2 * 2 * 8


# -- errors, operators, tracing --------------------------------------------------------------------


def test_inputs_that_disagree_are_refused():
    q, k, v = qkv(9)
    with pytest.raises(UnsupportedError, match="Did you mean 'torch'"):
        lsh(q, k, v, impl="troch")
    with pytest.raises(UnsupportedError, match="5 queries and 9 keys"):
        lsh(q[:, :, :5], k, v, causal=False)
    with pytest.raises(UnsupportedError, match="9 queries and 5 keys"):
        lsh(q, k[:, :, :5], v[:, :, :5])
    with pytest.raises(UnsupportedError, match="1 queries and 9 keys"):
        shared_qk(q[:, :, :1], k, v)


@pytest.mark.parametrize("attend", [lsh_attention, shared_qk_attention])
def test_masks_that_are_not_supported_are_refused(attend):
    q, k, v = qkv(9)
    with pytest.raises(UnsupportedError, match=r"the mask is a sliding window of \(3, 0\)"):
        attend(q, k, v, mask=AttentionMask(causal=True, window=(3, 0)))
    with pytest.raises(UnsupportedError, match="the mask is arbitrary"):
        attend(q, k, v, mask=AttentionMask(function=lambda: torch.ones(2, 1, 9, 9) > 0))
    with pytest.raises(UnsupportedError, match="q_offset is 3; it must be between 0 and 0"):
        attend(q, k, v, mask=AttentionMask(causal=True, q_offset=3))


def test_empty_sequences_work():
    out = lsh(*(x[:, :, :0] for x in qkv(3)))
    assert out.shape == (2, 4, 0, 6)


@FORMS
def test_the_operator_passes_opcheck(form, impl):
    q, k, v = (x.float().requires_grad_() for x in qkv(40))
    options = list(map(int, LSHOptions(form == "shared", True, 2, 4, 0, 3, 0)))
    ids = torch.zeros(2, 40, dtype=torch.long)
    given = (q, k, v, 0.5, ids, ids, None, torch.tensor([1]), [], options, None)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    operator = getattr(torch.ops.attnzoo, f"lsh_{impl}")
    torch.library.opcheck(operator, given, test_utils=checks)


@pytest.mark.parametrize("impl", ["auto", "torch", CPP, "reference"])
def test_it_compiles_without_a_break(impl):
    torch._dynamo.reset()
    x = [t.requires_grad_() for t in qkv(60)]
    compiled = torch.compile(lsh, backend="aot_eager", fullgraph=True)
    expected, found = (run(*x, **SMALL, impl=impl) for run in (lsh, compiled))
    assert_close(found, expected)
    gradients = [torch.autograd.grad(out.sum(), x) for out in (found, expected)]
    assert_close(*gradients)
    torch._dynamo.reset()


def test_large_inputs_trace():
    """Fake tensors have the shapes and strides of results, without allocating them."""
    with FakeTensorMode():
        q = torch.empty(1, 4096, 8, 64).transpose(1, 2)  # as projections leave it; 8 MiB
        out = shared_qk(q, q, q, num_hashes=2)
        assert out.stride() == q.stride()
    q = torch.randn(1, 64, 2, 16).transpose(1, 2)
    assert shared_qk(q, q, q, num_hashes=2, chunk_size=16).stride() == q.stride()


@pytest.mark.parametrize("length", [40, 43])
@pytest.mark.parametrize("causal", [True, False])
def test_shared_qk_is_independent_of_the_batch_size(monkeypatch, length, causal):
    """Some blocks of a head, whole heads, all at once; one tensor for q and k, or two."""
    q, k, v = qkv(length, heads=(2, 2))
    del q
    found = []
    for scores, keys in ((64, k), (3 * 64, k), (2**18, k), (2**18, k.clone())):
        monkeypatch.setattr("attnzoo.ops.lsh.shared_qk_plan.MAX_SCORES", scores)
        inputs = [x.detach().requires_grad_() for x in (k, keys, v)]
        if keys is k:
            inputs[1] = inputs[0]
        out = shared_qk(*inputs, num_hashes=3, chunk_size=4, causal=causal, seed=1)
        grads = torch.autograd.grad(out.square().sum(), inputs)
        of_both = grads[0] if keys is k else grads[0] + grads[1]
        found.append((out, of_both, grads[2]))
    for other in found[1:]:
        assert_close(other, found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("attend", "impl"),
    [
        *((lsh_attention, impl) for impl in ("cpp", "torch", "reference")),
        *((shared_qk_attention, impl) for impl in ("torch", "reference")),
    ],
)
def test_later_keys_of_any_size_change_nothing(attend, impl):
    q, k, v = (x.float() for x in qkv(200))
    options = {"mask": AttentionMask(causal=True), "num_hashes": 2, "chunk_size": 16, "impl": impl}
    large = [torch.cat([x[:, :, :100], x[:, :, 100:] * 1e15], 2) for x in (q, k)]
    found, expected = (attend(*x, v, **options).out[:, :, :100] for x in (large, (q, k)))
    assert torch.equal(found, expected)


def test_rotations_need_an_even_number_of_buckets():
    with pytest.raises(UnsupportedError, match=r"num_buckets must be even, .* got 3"):
        shared_qk_attention(*qkv(9), num_buckets=3)
