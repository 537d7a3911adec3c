"""T5's position bias in backends that attend to some keys: exact if they attend to all."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.hf.seam import cache_argument, output_cache

T5: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 12,
}
WIDE = {  # options with which a query attends to all 24 tokens
    "longformer": {"window": 64},
    "reformer": {"num_hashes": 2, "chunk_size": 16},
}
NARROW = {
    "longformer": {"window": 4},
    "reformer": {"num_hashes": 1, "chunk_size": 2, "window": 3, "decoding": "hashed"},
}
KINDS = {
    "t5": (hf.T5Config, hf.T5ForConditionalGeneration),
    "umt5": (hf.UMT5Config, hf.UMT5ForConditionalGeneration),  # a table in every layer
}


@pytest.fixture
def make_model(redraw):
    def make(kind: str = "t5") -> Any:
        config, model = KINDS[kind]
        model = model._from_config(config(**T5), attn_implementation="eager")
        return redraw(model).double()

    return make


def given(length: int = 24) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 99, (2, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, length - 5 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids.flip(1)}


def tables(model: Any) -> list[Any]:
    return [x for name, x in model.named_parameters() if "relative_attention_bias" in name]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("backend", list(WIDE))
def test_outputs_and_gradients_equal_softmax_if_all_keys_are_attended(backend, kind, make_model):
    model, found = make_model(kind), []
    for name, options in (("softmax", {}), (backend, WIDE[backend])):
        attnzoo.restore(model) if found else None
        attnzoo.swap(model, name, **options, else_="flash")
        logits = model(**given(), use_cache=False).logits
        found.append((logits, torch.autograd.grad(logits.square().mean(), tables(model))))
    assert_close(found[1], found[0], atol=1e-9, rtol=1e-9)
    assert all(gradient.abs().max() > 0 for gradient in found[0][1])
    report = str(attnzoo.describe(model))
    assert report.count(backend) >= 4  # two layers of the encoder and two of the decoder


@pytest.mark.parametrize("backend", list(NARROW))
def test_the_bias_has_an_effect_if_few_keys_are_attended(backend, make_model):
    model = make_model()
    attnzoo.swap(model, backend, **NARROW[backend], else_="flash")
    with torch.no_grad():
        before = model(**given()).logits
        tables(model)[0].add_(torch.linspace(0, 3, 6, dtype=torch.float64)[:, None])
        assert (model(**given()).logits - before).abs().max() > 1e-3


@pytest.mark.parametrize("backend", list(NARROW))
def test_decoding_from_the_cache_equals_one_pass(backend, make_model):
    model, inputs = make_model(), given()
    attnzoo.swap(model, backend, **NARROW[backend], else_="flash")
    decoder = inputs.pop("decoder_input_ids")
    with torch.no_grad():
        whole = model(**inputs, decoder_input_ids=decoder).logits
        encoded, cache, found = model.encoder(**inputs), None, []
        for begin, end in ((0, 9), (9, 10), (10, 16), (16, 17), (17, 24)):
            step = model(
                encoder_outputs=encoded,
                attention_mask=inputs["attention_mask"],
                decoder_input_ids=decoder[:, begin:end],
                **cache_argument(cache),
                use_cache=True,
            )
            cache = output_cache(step)
            found.append(step.logits)
    assert_close(torch.cat(found, 1), whole, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("backend", list(WIDE))
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_equals_softmax(backend, cache, make_model):
    model, texts = make_model(), []
    inputs = {name: x for name, x in given().items() if name != "decoder_input_ids"}
    for name, options in (("softmax", {}), (backend, WIDE[backend])):
        attnzoo.restore(model) if texts else None
        attnzoo.swap(model, name, **options, else_="flash")
        options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
        texts.append(model.generate(**inputs, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("backend", list(WIDE))
def test_a_mask_in_place_of_causality_is_refused(backend, make_model):
    model = make_model()
    attnzoo.swap(model, backend, **WIDE[backend], else_="flash")
    layer = model.decoder.block[0].layer[0].SelfAttention.attnzoo
    x = torch.randn(1, 4, 6, 8, dtype=torch.float64)
    bias = torch.zeros(1, 4, 6, 6, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="causality and bias are indistinguishable"):
        layer(x, x, x, mask=AttentionMask(), bias=bias)
    layer(x, x, x, mask=AttentionMask(causal=True), bias=bias)
