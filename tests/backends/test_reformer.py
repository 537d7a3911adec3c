"""The reformer backend: options, hash draws, cached keys, and transformers models."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.backends.reformer import ReformerBackend, ReformerConfig
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.ops.lsh.api import lsh_attention, shared_qk_attention
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.testing import RULES, ConformanceError, check_backend, check_generation
from tests import helpers
from tests.helpers import qkv, tiny_llama

build = partial(helpers.build, "reformer")

SMALL = {"chunk_size": 4, "num_hashes": 2, "window": 3, "first_tokens": 2}


CONFIGS = [  # all but the first hash the short sequences of the suite
    pytest.param({}, None, marks=pytest.mark.exhaustive),
    ({"chunk_size": 7, "num_hashes": 2, "window": 3}, None),
    ({"chunk_size": 16, "num_hashes": 1, "window": 1, "decoding": "hashed"}, [torch.float64]),
    pytest.param(
        {"chunk_size": 7, "num_hashes": 2, "window": 3, "impl": "reference"},
        [torch.float64],
        marks=pytest.mark.exhaustive,
    ),
    ({"chunk_size": 7, "num_hashes": 2, "form": "shared_qk"}, [torch.float32]),
]


@pytest.mark.parametrize(("options", "dtypes"), CONFIGS, ids=str)
def test_conformance(options, dtypes):
    config = ReformerConfig.from_options("reformer", options)
    given = {} if dtypes is None else {"dtypes": dtypes}
    report = check_backend(ReformerBackend, config=config, **given)
    causal = set() if config.form == "shared_qk" else {"causality", "decoding"}
    assert {"padding", "packing", "batching", "weights", *causal} <= set(report.passed)
    assert {*report.passed, *report.skipped} == {rule.name for rule in RULES}


class HashedSteps(ReformerBackend):
    """Declares exact steps, but hashes single tokens."""

    def attend(self, inputs):
        declared = self.capabilities
        self.capabilities = replace(declared, exact_steps=False)
        try:
            return super().attend(inputs)
        finally:
            self.capabilities = declared


def test_inexact_steps_of_a_backend_with_exact_steps_are_found():
    config = ReformerConfig(chunk_size=7, num_hashes=1, window=1, first_tokens=0)
    with pytest.raises(ConformanceError, match="over cached keys") as caught:
        check_backend(HashedSteps, config=config, rules=("decoding",), dtypes=[torch.float64])
    assert caught.value.rule == "decoding"


@pytest.mark.parametrize("padded", [False, True])
def test_a_single_new_token_attends_exactly_to_all_cached_keys(padded):
    q, k, v = qkv(40)
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, :9] = not padded
    mask = AttentionMask(causal=True, q_offset=39, padding=real if padded else None)
    backend = build(**SMALL)
    out = backend(q[:, :, -1:], k, v, mask=mask).out
    exact = softmax_attention(q[:, :, -1:], k, v, mask=real[:, None, None]).out
    assert_close(out, exact)
    assert backend.ran.impl == "torch"
    if not padded:  # a mask for one token may leave out causality
        assert_close(backend(q[:, :, -1:], k, v, mask=AttentionMask()).out, exact)
    hashed = build(**SMALL, decoding="hashed")(q[:, :, -1:], k, v, mask=mask).out
    assert not torch.allclose(hashed, exact, atol=1e-3)


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_hashes": 0},
            r"ReformerConfig\.num_hashes must be at least 1 round, got 0; the default is 8",
        ),
        ({"chunk_size": -1}, r"ReformerConfig\.chunk_size must be at least 1 token, got -1"),
        ({"num_buckets": 0}, r"ReformerConfig\.num_buckets must be at least 1 bucket, got 0"),
        ({"window": 0}, r"ReformerConfig\.window must be at least 1 token, got 0"),
        ({"first_tokens": -1}, r"ReformerConfig\.first_tokens must be at least 0 tokens, got -1"),
        ({"window": 2.5}, r"ReformerConfig\.window must be int, got 2\.5"),
        ({"form": "shared"}, "must be 'asymmetric' or 'shared_qk', got 'shared'"),
        ({"form": "shared_qk", "num_buckets": 3}, "must be even with form='shared_qk'.*use 4"),
        ({"form": "shared_qk", "window": 8}, "window requires form='asymmetric', got window=8"),
        ({"form": "shared_qk", "first_tokens": 1}, "first_tokens requires form='asymmetric'"),
        ({"rounds": 3}, "has no option 'rounds'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        attnzoo.AttentionSpec("reformer", **options)


def test_shared_qk_is_refused_in_causal_layers():
    with pytest.raises(UnsupportedError, match=r"layer\.attn.*later tokens would determine"):
        build(form="shared_qk")
    backend = build(form="shared_qk", causal=False)
    with pytest.raises(UnsupportedError, match=r"the mask is causal.*use form='asymmetric'"):
        backend(*qkv(9), mask=AttentionMask(causal=True))


def test_unsupported_calls_are_refused():
    q, k, v = qkv(9)
    with pytest.raises(UnsupportedError, match="5 queries and 9 keys are given without a causal"):
        build(causal=False)(q[:, :, :5], k, v)
    with pytest.raises(UnsupportedError, match="sliding window"):
        build()(q, k, v, mask=AttentionMask(causal=True, window=(3, 0)))


def test_options_reach_the_op():
    x = qkv(40)
    seed = torch.tensor([5, 3, 0])  # seed, layer, draw
    mask = AttentionMask(causal=True)
    expected = lsh_attention(*x, **SMALL, num_buckets=6, mask=mask, scale=0.3, seed=seed)
    backend = build(**SMALL, num_buckets=6, seed=5, layer=3)
    assert_close(backend(*x, scale=0.3).out, expected.out)
    assert backend.ran == expected.impl
    shared = build(form="shared_qk", chunk_size=4, num_hashes=2, causal=False, impl="reference")
    expected = shared_qk_attention(*x, num_hashes=2, chunk_size=4, seed=torch.tensor([0, 0, 0]))
    assert_close(shared(*x).out, expected.out)
    assert shared.ran == ("reference", "named in the options")


def test_layers_have_different_hashes():
    x = qkv(60)
    assert not torch.equal(build(**SMALL)(*x).out, build(**SMALL, layer=1)(*x).out)


# -- cached keys ---------------------------------------------------------------------------------


def test_a_static_cache_with_unwritten_keys():
    q, k, v = qkv(60)
    backend = build(**SMALL)
    whole = backend(q, k, v).out
    real = torch.ones(2, 60, dtype=torch.bool)
    real[1, :9] = False
    padded = backend(q, k, v, mask=AttentionMask(causal=True, padding=real)).out
    for at in (torch.tensor(41), 41):
        unwritten = [torch.cat([x[:, :, :44], torch.zeros_like(x[:, :, 44:])], 2) for x in (k, v)]
        step = q[:, :, 41:44]
        found = backend(step, *unwritten, mask=AttentionMask(causal=True, q_offset=at)).out
        assert_close(found, whole[:, :, 41:44])
        mask = AttentionMask(causal=True, padding=real, q_offset=at)
        assert_close(backend(step, *unwritten, mask=mask).out, padded[:, :, 41:44])


# -- models --------------------------------------------------------------------------------------


@pytest.fixture
def llama():
    return tiny_llama(max_position_embeddings=128)


def test_generation_equals_one_pass(llama, tmp_path):
    attnzoo.swap(llama, "reformer", **SMALL, decoding="hashed")
    check_generation(llama, length=40)
    ids, mask = torch.randint(1, 60, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[1, :13] = 0
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    tokens = llama.generate(ids, **given)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(llama.generate(ids, **given, **static), tokens)
    llama.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(ids, **given), tokens)
    with torch.no_grad():
        hashed = llama(ids, attention_mask=mask).logits
        attnzoo.restore(llama)
        exact = llama(ids, attention_mask=mask).logits
    assert (exact - hashed)[mask.bool()].abs().max() > 0.1  # some keys are not attended to


def test_short_sequences_give_the_logits_of_the_model(llama):
    ids = torch.randint(1, 60, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        stock = llama(ids, attention_mask=mask).logits
        attnzoo.swap(llama, "reformer")
        swapped = llama(ids, attention_mask=mask).logits
    assert_close(swapped[mask.bool()], stock[mask.bool()], atol=1e-4, rtol=1e-4)


def test_a_layer_compiles_without_graph_breaks():
    torch._dynamo.reset()
    backend, x = build(**SMALL), [t.requires_grad_() for t in qkv(40)]
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, :7] = False
    gradients = []
    for layer in (backend, torch.compile(backend, backend="aot_eager", fullgraph=True)):
        out = layer(*x, mask=AttentionMask(causal=True, padding=real)).out
        gradients.append([out, *torch.autograd.grad(out.square().sum(), x)])
    assert_close(gradients[1], gradients[0])
    torch._dynamo.reset()
