"""score="indexer": its selection, its states, its loss, and models that have it."""

import warnings
from itertools import product

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.backends.block_sparse import BlockSparseBackend, BlockSparseConfig, LightningIndexer
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, SwapWarning, UnsupportedError
from attnzoo.hf.seam import cache_argument, output_cache
from attnzoo.ops.block_sparse import selection_loss as loss_module
from attnzoo.ops.block_sparse.api import block_sparse_attention
from attnzoo.ops.block_sparse.cpu.block_sparse import BLOCK_SPARSE
from attnzoo.ops.block_sparse.custom_ops import TORCH
from attnzoo.ops.block_sparse.index_keys import pack_queries
from attnzoo.ops.block_sparse.options import IndexTensors, SparseOptions
from attnzoo.ops.block_sparse.selection_loss import selection_loss
from attnzoo.runtime import cpp
from attnzoo.testing import RULES, check_backend, check_generation
from tests.helpers import build, geometry, qkv

NO_KERNEL = cpp.unavailable_reason(BLOCK_SPARSE)
CPP = pytest.param("cpp", marks=pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL))
INDEXER = {"score": "indexer", "window": 3, "top_k": 2, "block_size": 2, "num_sinks": 1}
SIZES = [  # window, first tokens, selected blocks, block size
    {"window": 3, "num_sinks": 0, "top_k": 4, "block_size": 1},
    {"window": 5, "num_sinks": 3, "top_k": 2, "block_size": 4},
]


def index_tensors(length, batch=2, heads=3, size=8):
    """Return random queries, keys and weights of an indexer, some of the weights negative."""
    shapes = (batch, heads, length, size), (batch, 1, length, size), (batch, heads, length)
    return IndexTensors(*(torch.randn(shape, dtype=torch.float64) for shape in shapes))


def block_scores(index, b, t, real, size):
    """Return the score of every block for the query at place t of ``real``, by its formula."""
    scores = []
    for first in range(0, len(real), size):
        key = index.k[b, 0, real[first : first + size]].mean(0)
        products = (index.q[b, :, real[t]] * key).sum(1)
        scores.append(float((index.weights[b, :, real[t]] * products.clamp(min=0)).sum()))
    return scores


def selectable(t, real, causal, sizes):
    """Return the blocks that query t may select, and the keys of its window."""
    size, window, count = sizes["block_size"], sizes["window"], len(real)
    low = max(t - window + int(causal), 0) // size * size
    high = t + 1 if causal else min(-(-(t + 1 + window) // size) * size, count)
    near = set(range(low, high))
    blocks = range(-(-count // size))
    early = [j for j in blocks if j * size + size <= low]
    late = [] if causal else [j for j in blocks if j * size >= high]
    return [j for j in early + late if (j + 1) * size > sizes["num_sinks"]], near


def dense(q, k, v, index, causal, padding, sizes):
    """Attention with the indexer's selection, query by query in float64."""
    out, groups = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), q.shape[1] // k.shape[1]
    for b in range(len(q)):
        real = [s for s in range(q.shape[2]) if padding is None or padding[b, s]]
        for t in range(len(real)):
            blocks, near = selectable(t, real, causal, sizes)
            scores = block_scores(index, b, t, real, sizes["block_size"])
            best = sorted(blocks, key=lambda j: -scores[j])[: sizes["top_k"]]
            first = range(min(sizes["num_sinks"], t + 1 if causal else len(real)))
            size = sizes["block_size"]
            far = {s for j in best for s in range(j * size, min(j * size + size, len(real)))}
            keys = [real[s] for s in sorted(near | far | set(first))]
            for h in range(q.shape[1]):
                logits = k[b, h // groups, keys] @ q[b, h, real[t]] * q.shape[3] ** -0.5
                out[b, h, real[t]] = logits.softmax(0) @ v[b, h // groups, keys]
    return out


@pytest.mark.parametrize("impl", ["reference", "torch", CPP])
@pytest.mark.parametrize("causal", [True, False])
def test_selection_is_that_of_the_formula(causal, impl):
    for sizes, padded in product(SIZES, (False, True)):
        q, k, v = qkv(23)
        index = index_tensors(23)
        padding = torch.rand(2, 23) < 0.7 if padded else None
        mask = AttentionMask(causal=causal, padding=padding)
        options = {"mask": mask, "score": "indexer", "index": index, "impl": impl, **sizes}
        out = block_sparse_attention(q, k, v, **options).out
        assert_close(out, dense(q, k, v, index, causal, padding, sizes), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("impl", ["torch", CPP])
def test_shared_selections_coverage_and_gradients_are_those_of_the_reference(impl):
    """The index tensors get no gradient."""
    index = index_tensors(29)
    for causal, more in product((True, False), ({"query_block": 4}, {"coverage": 0.5})):
        leaves = [x.requires_grad_() for x in (*qkv(29), *index)]
        padding = torch.rand(2, 29) < 0.8
        options = {**INDEXER, **more, "mask": AttentionMask(causal=causal, padding=padding)}
        found = []
        for each in (impl, "reference"):
            out = block_sparse_attention(*leaves[:3], **options, index=index, impl=each).out
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves[:3])])
        for ours, right in zip(*found, strict=True):
            assert_close(ours, right, atol=1e-9, rtol=1e-9)
        assert not block_sparse_attention(*qkv(29), **options, index=index).out.requires_grad


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_state_continues_as_one_pass(block_size):
    """In calls of several tokens and of one, with rows of different lengths."""
    sizes = {**INDEXER, "block_size": block_size, "query_block": 3, "num_sinks": 0}
    (q, k, v), index = qkv(40), index_tensors(40)
    padding = torch.ones(2, 40, dtype=torch.bool)
    padding[1, :7], padding[0, 19:22] = False, False
    mask = AttentionMask(causal=True, padding=padding)
    whole = block_sparse_attention(q, k, v, mask=mask, index=index, return_state=True, **sizes)
    state, outs, start = None, [], 0
    for end in (9, 11, 24, 25, 26, 27, 28, 29, 33, *range(34, 41)):
        part = slice(start, end)
        given = IndexTensors(index.q[:, :, part], index.k[:, :, part], index.weights[:, :, part])
        output = block_sparse_attention(
            *(x[:, :, part] for x in (q, k, v)),
            mask=AttentionMask(causal=True, padding=padding[:, part]),
            index=given,
            state=state,
            return_state=True,
            **sizes,
        )
        state, start = output.state, end
        outs.append(output.out)
    assert_close(torch.cat(outs, 2), whole.out, atol=1e-9, rtol=1e-9)
    assert state.summary.shape == (2, 1, 37 // block_size, 8)
    for b, length in enumerate((37, 33)):  # the rest is unspecified
        blocks, rest = length // block_size, length % block_size
        assert_close(state.summary[b, 0, :blocks], whole.state.summary[b, 0, :blocks])
        unfinished = slice(block_size - 1 - rest, None)
        assert_close(state.tail[b, 0, unfinished], whole.state.tail[b, 0, unfinished])


@pytest.mark.parametrize(
    "options",
    [
        {"decoding": "sparse"},  # the default
        pytest.param({"block_size": 1, "query_block": 3}, marks=pytest.mark.exhaustive),
        pytest.param({}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_conformance(options):
    config = BlockSparseConfig(**{**INDEXER, **options, "index_heads": 2, "index_head_dim": 8})
    dtypes = [torch.float64] if options else [torch.float64, torch.float32, torch.bfloat16]
    report = check_backend(BlockSparseBackend, config=config, dtypes=dtypes)
    assert {"causality", "decoding", "padding", "packing", "weights"} <= set(report.passed)
    assert {*report.passed, *report.skipped} == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index_heads": 2}, r"index_heads needs score='indexer', got index_heads=2"),
        ({"score": "indexer", "index_heads": 0}, "index_heads must be at least 1 head, got 0"),
        ({"score": "indexer", "index_head_dim": 6}, "must be a multiple of 4, got 6"),
        ({"score": "indexer", "per_key_head": True}, "per_key_head must be False"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(ConfigError, match=message):
        BlockSparseConfig(**options)


def test_what_an_indexer_does_not_support():
    with pytest.raises(UnsupportedError, match=r"hidden size is unknown, and score='indexer'"):
        build("block_sparse", sizes={"hidden_size": None}, **INDEXER)
    (q, k, v), hidden = qkv(12), torch.randn(2, 12, 12).double()
    with pytest.raises(UnsupportedError, match="score='indexer' with decoding='exact'"):
        build("block_sparse", **INDEXER, decoding="exact")
    assert not build("block_sparse", causal=False, **INDEXER, decoding="exact").layer_reasons()
    backend = build("block_sparse", **INDEXER)
    with pytest.raises(UnsupportedError, match="hidden_states have shape"):
        backend(q, k, v, hidden_states=hidden[:, :5])
    for given, message in (
        ({"score": "indexer"}, "needs index="),
        ({"index": index_tensors(12)}, "index is given with score='moments'"),
        ({"score": "indexer", "index": index_tensors(9)}, r"index queries must be \[B, I, T, P\]"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            block_sparse_attention(q, k, v, **given)


def test_an_untrained_indexer_warns():
    x = dict(zip("qkv", qkv(12), strict=True))
    hidden = torch.randn(2, 12, 12).double()
    backend = build("block_sparse", **INDEXER)
    with pytest.warns(SwapWarning, match="the indexer is not trained"):
        backend(**x, hidden_states=hidden)
    assert "attnzoo recover" in backend.ran.reason
    backend = build("block_sparse", noise=0.1, **INDEXER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend(**x, hidden_states=hidden)
    assert "not trained" not in backend.ran.reason


# -- the loss ------------------------------------------------------------------------------------


def dense_loss(q, k, index, causal, padding, sizes):
    """The divergence, query by query in float64."""
    total, count, size = 0, 0, sizes["block_size"]
    for b in range(len(q)):
        real = [s for s in range(q.shape[2]) if padding is None or padding[b, s]]
        for t in range(len(real)):
            count += 1
            blocks, _ = selectable(t, real, causal, sizes)
            blocks = [j for j in blocks if not causal or (j + 1) * size <= t + 1]
            if not blocks:
                continue
            seen = real[: t + 1] if causal else real
            logits = torch.einsum(
                "hd,hsd->hs", q[b, :, real[t]], k[b].repeat_interleave(2, 0)[:, seen]
            )
            weights = (logits * q.shape[3] ** -0.5).softmax(1).mean(0)
            weights = [0 if s < sizes["num_sinks"] else weights[s] for s in range(len(seen))]
            mass = torch.stack([torch.as_tensor(sum(weights[j * size :][:size])) for j in blocks])
            scores = block_scores(index, b, t, real, size)
            logs = torch.tensor([scores[j] for j in blocks], dtype=q.dtype).log_softmax(0)
            total += float((mass * ((mass / mass.sum()).log() - logs)).sum())
    return total / count


@pytest.mark.parametrize("causal", [True, False])
def test_loss_is_the_divergence_from_softmax(causal):
    for sizes, padded in product(SIZES, (False, True)):
        q, k, _ = qkv(19)
        index, padding = index_tensors(19), torch.rand(2, 19) < 0.7 if padded else None
        given = {"mask": AttentionMask(causal=causal, padding=padding), "scale": 8**-0.5}
        options = SparseOptions(causal, *sizes.values(), 1)
        found = selection_loss(q, k, index, **given, options=options)
        expected = dense_loss(q, k, index, causal, padding, sizes)
        assert expected > 1e-3
        assert_close(float(found), expected, atol=1e-9, rtol=1e-9)


def test_loss_in_parts_has_the_same_gradient(monkeypatch):
    q, k, _ = qkv(19)
    index = IndexTensors(*(x.requires_grad_() for x in index_tensors(19)))
    given = {"mask": AttentionMask(causal=True), "scale": 0.3}
    options = SparseOptions(True, 3, 0, 2, 2, 1)
    found = []
    for most in (loss_module.MAX_SCORES, 600):
        monkeypatch.setattr(loss_module, "MAX_SCORES", most)
        loss = selection_loss(q, k, index, **given, options=options)
        found.append([loss, *torch.autograd.grad(loss, list(index))])
    for whole, parts in zip(*found, strict=True):
        assert_close(parts, whole, atol=1e-12, rtol=1e-12)
    assert all(x.abs().sum() > 0 for x in found[0])


def test_positions_are_rotary():
    """Scores depend on the distance of query and key, not on their positions."""
    indexer = LightningIndexer(geometry(), 2, 8).double()
    hidden = torch.randn(1, 5, 12).double()
    near, far = (indexer(hidden, torch.arange(n, n + 5)[None]) for n in (0, 1000))
    assert_close(near.q @ near.k.mT, far.q @ far.k.mT)
    other = indexer(hidden, 2 * torch.arange(5)[None])
    assert not torch.allclose(near.q @ near.k.mT, other.q @ other.k.mT, atol=1e-3)


# -- models --------------------------------------------------------------------------------------


@pytest.fixture
def llama(llama, monkeypatch):
    """The tiny Llama; new indexers have random scores."""

    def noise(self):
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)

    monkeypatch.setattr(LightningIndexer, "reset_parameters", noise)
    return llama


def test_generation(llama):
    """With left padding, split prompts and beams."""
    check_generation(
        llama, attnzoo.AttentionSpec("block_sparse", **INDEXER), batch=2, new_tokens=4, beams=2
    )


def test_assisted_decoding_static_caches_and_saved_models(llama, tmp_path):
    model, ids = llama, torch.arange(2, 22).view(1, 20) % 7 + 2
    cache = output_cache(model(ids[:, :12], use_cache=True))
    attnzoo.swap(model, "block_sparse", **INDEXER)
    options = {"max_new_tokens": 9, "do_sample": False}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, prompt_lookup_num_tokens=3), plain)
    assert torch.equal(model.generate(ids, **options, cache_implementation="static"), plain)
    assert "one new token scores" in str(attnzoo.describe(model))
    with pytest.raises(UnsupportedError, match="already holds 12 tokens as keys and values"):
        model(ids[:, 12:], **cache_argument(cache))
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_fake_selections_have_the_shape_of_real_ones():
    (_, k, _), index = qkv(13), index_tensors(13)
    summary = torch.randn(2, 1, 6, 8, dtype=torch.float64)
    sizes = [1, 3, 1, 2, 2, 1]
    rest = (None, None, None, 0.3, sizes, "indexer", None, False)
    given = (pack_queries(index), k, summary, *rest)
    torch.library.opcheck(TORCH.select, given, test_utils="test_faketensor")
    assert TORCH.select(*given).shape == (2, 2, 13, 2)


@pytest.mark.exhaustive
def test_a_compiled_model(llama):
    model, ids = llama.double(), torch.arange(2, 30).view(2, 14)
    attnzoo.swap(model, "block_sparse", **INDEXER)
    torch._dynamo.reset()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected, found = (
            f(ids, attention_mask=mask, use_cache=False).logits for f in (model, compiled)
        )
    assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-10, rtol=1e-10)
