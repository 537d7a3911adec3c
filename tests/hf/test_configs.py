"""Configs whose layers differ, as Gemma 4's, which raise where a field is read without a layer."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.configs import has_field, layer_config, read_field
from tests.helpers import MODEL_SIZES


@pytest.fixture
def config():
    return AutoConfig.for_model(
        "gemma4_text",
        **MODEL_SIZES,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=99,
    )


def test_a_field_in_which_layers_differ_needs_a_layer(config):
    with pytest.raises(UnsupportedError, match="layers of this gemma4_text differ in 'head_dim'"):
        read_field(config, "head_dim")
    assert has_field(config, "head_dim")
    assert [read_field(layer_config(config, x), "head_dim") for x in (0, 1)] == [8, 16]
    assert read_field(config, "hidden_size") == 32
    assert read_field(config, "no_such_field", 3) == 3
    assert not has_field(config, "no_such_field")
    assert layer_config(config.per_layer_config[0], 5).head_dim == 8  # of one layer already


def test_the_window_of_gemma_4_is_converted(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    plan = attnzoo.AttentionSpec("flash", layers={"0": "flash:window=5"})
    converted = attnzoo.convert(model, "gemma4_text", plan)
    ids = torch.arange(3, 30)[None]
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(converted(ids, use_cache=False).logits, expected)
    attnzoo.restore(model)
    assert not torch.allclose(model(ids, use_cache=False).logits, expected)


def test_windows_of_a_class_without_an_entry_are_not_denied():
    """Its layers have windows; only those that it can have are unknown."""
    sizes = MODEL_SIZES | {"num_key_value_heads": 2}
    config = AutoConfig.for_model("exaone4", **sizes, sliding_window=9, sliding_window_pattern=2)
    model = AutoModelForCausalLM.from_config(config)
    plan = attnzoo.AttentionSpec("flash", layers={"0": "flash:window=5"})
    with pytest.raises(UnsupportedError, match="does not know which windows"):
        attnzoo.convert(model, "exaone4", plan)
