"""generate() with a state in the cache: every strategy equals a run without a cache."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.cache.state_layer import StateLayer
from attnzoo.hf.seam import cache_argument, output_cache
from tests.helpers import add_noise

# Every kind of state: sums, decayed sums from the hidden states, the last keys, rows of finished
# blocks, keys with summaries of their blocks; and stock keys
RECURRENT = [
    ("linear", {}),
    ("gated_linear", {}),
    ("flash", {"window": 4}),
    ("flash", {"window": 3, "num_sinks": 2}),
    ("longformer", {"window": 4, "num_global": 2}),
    ("gated_linear", {"window": 4}),
    ("delta", {"window": 4, "short_convolution": 3, "output_gate": True}),
    ("linformer", {"block": 5, "num_rows": 2}),
    ("block_sparse", {"window": 3, "top_k": 2, "block_size": 2, "num_sinks": 1}),
]
HASHED = {"num_hashes": 2, "chunk_size": 2, "window": 2, "first_tokens": 1, "decoding": "hashed"}
ALL = [*RECURRENT, ("performer", {"num_features": 16}), ("flash", {}), ("softmax", {})]
ALL += [("reformer", HASHED)]
NAMES = ["linear", "gated_linear", "window", "sinks", "longformer", "hybrid", "delta", "linformer"]
NAMES += ["block_sparse", "performer", "flash", "softmax", "reformer"]
NEW = 5


@pytest.fixture(params=ALL, ids=NAMES)
def model(request, llama):
    model = llama()
    attnzoo.swap(model, request.param[0], **request.param[1])
    return model


@pytest.fixture(params=RECURRENT, ids=NAMES[: len(RECURRENT)])
def recurrent(request, llama):
    model = llama()
    attnzoo.swap(model, request.param[0], **request.param[1])
    return model


def generate(model: Any, ids: Any, **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(ids, **options)


def traced(model: Any, ids: Any, **options: Any) -> Any:
    return generate(model, ids, output_logits=True, return_dict_in_generate=True, **options)


def test_greedy_with_left_padding(model, ids, padding, positions):
    mask = padding("left")
    steps = traced(model, ids, attention_mask=mask)
    longer = torch.cat([mask, mask.new_ones(3, NEW)], 1)
    with torch.no_grad():
        whole = model(
            steps.sequences,
            attention_mask=longer,
            position_ids=positions(longer),
            use_cache=False,
        ).logits
    assert_close(torch.stack(steps.logits, 1), whole[:, 11:-1], atol=1e-4, rtol=1e-4)


def test_beams(model, ids, padding):
    options = {"attention_mask": padding("left"), "num_beams": 3, "num_return_sequences": 2}
    expected = generate(model, ids, **options, use_cache=False)
    for cache in ("dynamic", "static"):
        assert torch.equal(generate(model, ids, **options, cache_implementation=cache), expected)


def test_prefill_in_chunks(model, ids):
    expected = traced(model, ids)
    found = traced(model, ids, prefill_chunk_size=5)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)


def test_cache_made_by_the_user(recurrent, ids):
    cache = hf.DynamicCache()
    found = generate(recurrent, ids, **cache_argument(cache))
    assert torch.equal(found, generate(recurrent, ids))
    assert all(isinstance(layer, StateLayer) for layer in cache.layers)
    assert cache.get_seq_length() == 12 + NEW - 1


def test_chat_continues_from_a_returned_cache(model, ids, padding):
    mask = padding("left")
    first = generate(model, ids, attention_mask=mask, return_dict_in_generate=True)
    conversation = torch.cat([first.sequences, ids[:, :4]], 1)
    longer = torch.cat([mask, mask.new_ones(3, NEW + 4)], 1)
    fresh = traced(model, conversation, attention_mask=longer)
    again = traced(
        model, conversation, attention_mask=longer, **cache_argument(output_cache(first))
    )
    assert_close(torch.stack(again.logits), torch.stack(fresh.logits), atol=1e-4, rtol=1e-4)


def test_assisted_decoding_equals_greedy(recurrent, llama, redraw, ids):
    model, assistant = recurrent, redraw(llama(), seed=5)
    add_noise(assistant, 0.05)  # agrees often, not always
    layer = model.model.layers[0].self_attn.attnzoo
    attnzoo.swap(assistant, layer.name, **layer.config.changed_options())
    plain = generate(model, ids[:1], max_new_tokens=9)
    helped = generate(model, ids[:1], max_new_tokens=9, assistant_model=assistant)
    assert torch.equal(helped, plain)


@pytest.mark.parametrize("name", ["block_sparse", "reformer"])
def test_assisted_decoding_with_exact_steps_is_refused(name, llama, ids):
    """Several candidates in one call are no single new token, which attends to all keys."""
    model = attnzoo.swap(llama(), name, decoding="exact")
    generate(model, ids[:1])
    with pytest.raises(UnsupportedError, match=r"decoding='exact'.*prompt_lookup_num_tokens"):
        generate(model, ids[:1], prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(
    ("backend", "rest"), [("linear", None), ("gated_linear", "flash"), ("flash", None)]
)
def test_encoder_decoder(backend, rest, beams, redraw, ids, padding):
    config = hf.BartConfig(
        vocab_size=99,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        forced_eos_token_id=None,
    )
    model = redraw(hf.BartForConditionalGeneration._from_config(config))
    attnzoo.swap(model, backend, else_=rest)
    options = {"attention_mask": padding("right"), "num_beams": beams}
    found = generate(model, ids, **options, return_dict_in_generate=True)
    assert torch.equal(found.sequences, generate(model, ids, **options, use_cache=False))
    caches = output_cache(found)
    state = backend != "flash"
    assert all(isinstance(x, StateLayer) == state for x in caches.self_attention_cache.layers)
    assert not any(isinstance(x, StateLayer) for x in caches.cross_attention_cache.layers)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("backend", ["softmax", "flash"])
def test_t5(backend, cache, redraw, ids, padding):
    config = hf.T5Config(
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = redraw(hf.T5ForConditionalGeneration(config))
    options = {"attention_mask": padding("right"), "num_beams": 2}
    expected = generate(model, ids, **options)
    attnzoo.swap(model, backend)
    assert torch.equal(generate(model, ids, **options, cache_implementation=cache), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_window_narrower_than_the_models_own(name, cache, redraw, llama_config, ids, padding):
    """States replace the cache of sliding layers, whose masks have another size."""
    sizes = llama_config().to_dict()
    sizes = {k: sizes[k] for k in ("vocab_size", "hidden_size", "num_attention_heads")}
    config = hf.AutoConfig.for_model(
        name,
        **sizes,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=48,
        head_dim=8,
        sliding_window=5,
        eos_token_id=None,
        pad_token_id=0,
        **({"layer_types": ["sliding_attention", "full_attention"]} if "gemma" in name else {}),
    )
    model = redraw(hf.AutoModelForCausalLM.from_config(config))
    for layers in ({}, {"1": "flash"}):
        attnzoo.swap(model, "flash", window=3, layers=layers)
        mask = padding("left")
        steps = traced(model, ids, attention_mask=mask, cache_implementation=cache)
        longer = torch.cat([mask, mask.new_ones(3, NEW)], 1)
        with torch.no_grad():
            whole = model(steps.sequences, attention_mask=longer, use_cache=False).logits
        assert_close(torch.stack(steps.logits, 1), whole[:, 11:-1], atol=1e-4, rtol=1e-4)
