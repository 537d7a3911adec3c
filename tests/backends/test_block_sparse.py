"""The block_sparse backend: options, conformance, transformers models, and their quality."""

import pytest
import torch
from torch.testing import assert_close

import attnzoo
from attnzoo.backends.block_sparse import BlockSparseBackend, BlockSparseConfig
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.testing import RULES, check_backend, check_generation
from tests.helpers import build, tiny_llama

SMALL = {"window": 3, "top_k": 2, "block_size": 2, "num_sinks": 1}


CONFIGS = [
    ({"window": 4, "top_k": 2, "decoding": "exact", "per_key_head": True}, [torch.float64]),
    ({"window": 20, "top_k": 2, "num_sinks": 0, "score": "mean"}, [torch.float64]),
    pytest.param(
        {"window": 5, "top_k": 2, "query_block": 4, "score": "bounds"},
        None,
        marks=pytest.mark.exhaustive,
    ),
    pytest.param({"window": 9, "top_k": 3, "coverage": 0.8}, None, marks=pytest.mark.exhaustive),
    pytest.param({}, None, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("options", "dtypes"), CONFIGS, ids=str)
def test_conformance(options, dtypes):
    config = BlockSparseConfig.from_options("block_sparse", options)
    given = {} if dtypes is None else {"dtypes": dtypes}
    report = check_backend(BlockSparseBackend, config=config, **given)
    assert {"causality", "decoding", "padding", "packing", "weights"} <= set(report.passed)
    assert {*report.passed, *report.skipped} == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"BlockSparseConfig\.window must be at least 1 token, got 0"),
        ({"top_k": -1}, r"top_k must be at least 0 blocks, got -1; the default is 12"),
        ({"coverage": 1.5}, r"BlockSparseConfig\.coverage must be above 0 and at most 1, got 1\.5"),
        ({"coverage": 0.9, "score": "bounds"}, "coverage needs score='mean' or 'moments'"),
        (
            {"score": "best"},
            "score must be 'moments' or 'mean' or 'bounds' or 'indexer', got 'best'",
        ),
        ({"impl": "fast"}, "impl must be"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(ConfigError, match=message):
        BlockSparseConfig(**options)


def test_a_query_block_needs_its_first_query():
    options = {"query_block": 4, "decoding": "exact"}
    with pytest.raises(UnsupportedError, match="query_block=4 with decoding='exact'"):
        build("block_sparse", **options)
    assert not build("block_sparse", causal=False, **options).layer_reasons()
    assert not build("block_sparse", query_block=4).layer_reasons()


def test_exact_decoding_attends_to_all_keys():
    q, k, v = (torch.randn(2, heads, 60, 8).double() for heads in (4, 2, 2))
    backend = build("block_sparse", **SMALL, decoding="exact")
    out = backend(q[:, :, -1:], k, v, mask=AttentionMask(causal=True, q_offset=59)).out
    exact = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True)
    assert_close(out, exact)
    assert backend.ran.impl == "torch"
    assert backend.keeps_all_keys
    assert not build("block_sparse", **SMALL).keeps_all_keys


@pytest.mark.parametrize("options", [{}, {"per_key_head": True, "coverage": 0.8}], ids=str)
@pytest.mark.parametrize("first", [1, 25, 39])
def test_the_latest_queries_continue_from_all_keys(options, first):
    """Engines that keep keys and values in pages call it so, with no state."""
    backend = build("block_sparse", **SMALL, **options)
    q, k, v = (torch.randn(1, heads, 40, 8, dtype=torch.float64) for heads in (4, 2, 2))
    whole = backend(q, k, v, mask=AttentionMask(causal=True)).out
    mask = AttentionMask(causal=True, q_offset=first)
    assert_close(backend(q[:, :, first:], k, v, mask=mask).out, whole[:, :, first:])
    with pytest.raises(UnsupportedError, match="15 queries and 40 keys are given without a causal"):
        backend(q[:, :, 25:], k, v, mask=AttentionMask())


def test_query_blocks_do_not_continue_from_keys():
    backend = build("block_sparse", **SMALL, query_block=4)
    q, k, v = (torch.randn(1, heads, 40, 8) for heads in (4, 2, 2))
    with pytest.raises(UnsupportedError, match=r"25 queries and 40 keys.*as a state"):
        backend(q[:, :, 15:], k, v, mask=AttentionMask(causal=True, q_offset=15))


def test_a_bidirectional_layer_has_no_state():
    q, k, v = (torch.randn(2, heads, 9, 8).double() for heads in (4, 2, 2))
    with pytest.raises(UnsupportedError, match="only causal layers have one"):
        build("block_sparse", causal=False)(q, k, v, return_state=True)


@pytest.mark.parametrize(
    "options",
    [{"query_block": 3}, pytest.param({"score": "bounds"}, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_generation(llama, options):
    spec = attnzoo.AttentionSpec("block_sparse", **SMALL, **options)
    check_generation(llama, spec, batch=2, length=9, new_tokens=4, beams=2)


def test_assisted_decoding_and_a_static_cache(llama):
    model, ids = llama, torch.arange(2, 22).view(1, 20) % 7 + 2
    attnzoo.swap(model, "block_sparse", **SMALL)
    options = {"max_new_tokens": 9, "do_sample": False}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, prompt_lookup_num_tokens=3), plain)
    assert torch.equal(model.generate(ids, **options, cache_implementation="static"), plain)
    described = str(attnzoo.describe(model))
    assert "one new token scores" in described


def test_a_compiled_model():
    model, ids = tiny_llama(num_hidden_layers=1).double(), torch.arange(2, 30).view(2, 14)
    attnzoo.swap(model, "block_sparse", **SMALL)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected, found = (
            f(ids, attention_mask=mask, use_cache=False).logits for f in (model, compiled)
        )
    assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-10, rtol=1e-10)
