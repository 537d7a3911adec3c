"""The window that needs as much memory as a swap, against the caches of the models themselves."""

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo import AttentionSpec
from attnzoo.evaluation.decoding import layer_bytes
from attnzoo.evaluation.equal_memory import equal_window, layer_cache_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    )
    path = tmp_path_factory.mktemp("model")
    hf.LlamaForCausalLM(config).save_pretrained(path)
    return path


KEY = 2 * 2 * 8 * 4  # bytes of a token's keys and values in a layer


@torch.no_grad()
def kept(path, spec, length):
    """The bytes of each layer of a cache that the model has filled."""
    model = hf.AutoModelForCausalLM.from_pretrained(path).eval()
    attnzoo.swap(model, spec)
    cache = hf.DynamicCache(config=model.config)
    model(torch.zeros(1, length, dtype=torch.long), past_key_values=cache, use_cache=True)
    return {n: layer_bytes(layer) for n, layer in enumerate(cache.layers)}


def test_bytes_are_those_of_a_filled_cache(folder):
    spec = AttentionSpec("flash", layers={"1": {"backend": "delta", "options": {"window": 4}}})
    assert layer_cache_bytes(folder, spec, 40) == kept(folder, spec, 40)


def test_long_caches_are_extrapolated(folder, monkeypatch):
    monkeypatch.setattr("attnzoo.evaluation.decoding.FILLED_TOKENS", 32)
    spec = AttentionSpec("flash", layers={"1": {"backend": "linear"}})
    found = layer_cache_bytes(folder, spec, 200)
    assert found == kept(folder, spec, 200)
    assert found[0] == 200 * KEY


def test_windows_need_as_much_memory_as_the_swap(folder):
    """Layers that stay exact stay so; the caches are equal to one key."""
    entry = {"backend": "delta", "options": {"window": 4}}
    spec = AttentionSpec("flash", layers={"1-2": entry})
    found = equal_window(folder, spec, 60)
    assert set(found.windows) == {1, 2}
    assert found.saves_memory
    assert found.spec.for_layer(0).options.get("window") is None
    swap, window = kept(folder, spec, 60), kept(folder, found.spec, 60)
    assert window[0] == swap[0] == 60 * KEY
    for layer in (1, 2):
        assert abs(window[layer] - swap[layer]) <= 2 * KEY
    assert found.swap_bytes == sum(swap.values())
    assert found.exact_bytes == 3 * 60 * KEY
    assert str(found) == str(found.windows[1])


def test_a_cache_of_all_keys_is_softmax(folder):
    found = equal_window(folder, AttentionSpec("reformer", chunk_size=4), 60)
    assert set(found.windows.values()) == {None}
    assert not found.saves_memory
    short = equal_window(folder, AttentionSpec("longformer", window=64), 32)
    assert not short.saves_memory


def test_bytes_follow_the_saved_dtype(folder, tmp_path):
    """A state is float32, keys are bfloat16: the window is nearly twice as wide."""
    hf.AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(tmp_path)
    wide, narrow = (
        equal_window(x, AttentionSpec("linear"), 900).widest for x in (tmp_path, folder)
    )
    assert wide == pytest.approx(2 * narrow, abs=2)
