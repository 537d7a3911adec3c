"""Continuous batching: requests of several lengths in one row, keys and values in pages."""

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from tools.family_sweep.configs import shrink

PROMPTS = [[5, 6, 7, 8, 9], [*range(10, 44)], [60, 3, 60], [*range(90, 70, -1)]]
NEW_TOKENS = 12
has_paged_cache = pytest.mark.skipif(
    seam.CACHE_ARGUMENT != "cache",
    reason="attention modules of this transformers do not read the pages",
)


def generate_batch(model, **config):
    """Return the new tokens of each prompt, and their log-probabilities."""
    batch = hf.ContinuousBatchingConfig(return_logprobs=True, **config)
    greedy = hf.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    done = model.generate_batch(PROMPTS, generation_config=greedy, continuous_batching_config=batch)
    rows = [done[name] for name in sorted(done, key=lambda name: name[-3:])]
    return [row.generated_tokens for row in rows], torch.tensor([row.logprobs for row in rows])


def generate(model):
    """Return the same, one prompt at a time."""
    model.generation_config.eos_token_id = None
    tokens, logprobs = [], []
    for prompt in PROMPTS:
        options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        done = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, **options)
        tokens.append(done.sequences[0, len(prompt) :].tolist())
        logprobs.append(torch.cat(done.logits).log_softmax(-1).amax(-1))
    return tokens, torch.stack(logprobs)


def assert_equal(given, expected):
    assert given[0] == expected[0]
    torch.testing.assert_close(given[1], expected[1], rtol=0, atol=2e-5)


@has_paged_cache
@pytest.mark.parametrize("backend", ["softmax", "flash", "reformer"])
def test_requests_equal_separate_generation(backend, llama):
    model = attnzoo.swap(llama(num_key_value_heads=2), backend)
    assert_equal(generate_batch(model), generate(model))
    assert {row.backend for row in attnzoo.describe(model)} == {backend}


@has_paged_cache
def test_prompts_in_parts_and_rows_that_are_padded(llama):
    model = attnzoo.swap(llama(), "flash")
    # the pages that it makes otherwise fill most of the memory
    sizes = {"max_batch_tokens": 16, "q_padding_interval_size": 8, "num_blocks": 16}
    parts = generate_batch(model, **sizes)
    assert_equal(parts, generate(model))


@has_paged_cache
def test_the_window_of_a_layer(redraw):
    config = hf.Gemma3TextConfig(
        **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    )
    model = attnzoo.swap(redraw(hf.Gemma3ForCausalLM(config)), "softmax")
    assert_equal(generate_batch(model), generate(model))


@has_paged_cache
def test_layers_with_the_keys_of_others(redraw):
    """Gemma 3n: a layer of each kind has keys, and one of each kind uses them."""
    torch.manual_seed(0)
    kinds = ["full_attention", "sliding_attention"] * 2
    changes = {"num_hidden_layers": 4, "layer_types": kinds, "num_kv_shared_layers": 2}
    config = shrink(hf.Gemma3nTextConfig, changes)
    model = attnzoo.swap(redraw(hf.Gemma3nForCausalLM(config)), "flash")
    assert_equal(generate_batch(model), generate(model))


def test_recurrent_layers_have_no_pages():
    model = hf.BambaForCausalLM(shrink(hf.BambaConfig, {}))
    attnzoo.swap(model, "flash")
    with pytest.raises(
        UnsupportedError, match="no pages for layers of the kind 'linear_attention'"
    ):
        model.generate_batch(PROMPTS, max_new_tokens=2)


def test_a_state_has_no_pages(llama):
    model = attnzoo.swap(llama(), "linear")
    with pytest.raises(UnsupportedError, match=r"'linear' keeps one state .*model\.generate"):
        model.generate_batch(PROMPTS, max_new_tokens=2)
    model.set_attn_implementation("sdpa")
    assert model.init_continuous_batching() is not None


def test_an_older_paged_cache_is_refused(llama, monkeypatch):
    monkeypatch.setattr(seam, "CACHE_ARGUMENT", "past_key_values")
    with pytest.raises(UnsupportedError, match=r"transformers 5\.24"):
        attnzoo.swap(llama(), "flash").generate_batch(PROMPTS, max_new_tokens=2)
