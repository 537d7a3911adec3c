"""``set_attn_implementation`` disables and enables a swap: what runs, is described and is saved."""

import copy
import json
import warnings

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import attnzoo


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def described(model):
    return [(row.backend, row.impl) for row in attnzoo.describe(model)]


@pytest.fixture
def swapped(llama, ids):
    """Return a swapped Llama with trained extras, its logits, and those of the original."""
    model = llama()
    original = logits(model, ids)
    attnzoo.swap(model, "gated_linear", feature_map="hedgehog")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attnzoo" in name:
                parameter.add_(0.1)
    return model, logits(model, ids), original


def test_a_disabled_swap_runs_and_describes_stock_attention(swapped, ids):
    model, expected, original = swapped
    model.set_attn_implementation("eager")
    assert torch.equal(logits(model, ids), original)
    assert described(model) == [("none", "eager")] * 2
    assert all("gated_linear is disabled" in row.reason for row in attnzoo.describe(model))
    model.set_attn_implementation("attnzoo")
    assert torch.equal(logits(model, ids), expected)
    assert {row.backend for row in attnzoo.describe(model)} == {"gated_linear"}


def test_a_disabled_swap_is_saved_as_a_stock_model(swapped, ids, tmp_path):
    model, expected, original = swapped
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"attnzoo", "attn_implementation"} & set(config)
    assert not any("attnzoo" in key for key in load_file(tmp_path / "model.safetensors"))
    again, info = hf.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(again, ids), original)
    assert described(again) == [("none", "sdpa")] * 2
    model.set_attn_implementation("attnzoo")  # saving has dropped nothing from memory
    assert torch.equal(logits(model, ids), expected)
    model.save_pretrained(tmp_path / "on")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "on")
    assert torch.equal(logits(again, ids), expected)


def test_a_disabled_swap_can_be_restored_and_replaced(swapped, ids):
    model, _, original = swapped
    other = copy.deepcopy(model)
    for each in (model, other):
        each.set_attn_implementation("sdpa")
    attnzoo.restore(model)
    assert not any("attnzoo" in name for name, _ in model.named_modules())
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(logits(model, ids), original)
    with pytest.warns(UserWarning, match="drops the trained extras"):
        attnzoo.swap(other, "softmax")
    torch.testing.assert_close(logits(other, ids), original)
    attnzoo.restore(other)
    assert other.config._attn_implementation == "sdpa"


def test_copied_configs_follow(redraw):
    """Before transformers 5.20, ``set_attn_implementation`` does not reach T5's copies."""
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1}
    config = hf.T5Config(**sizes, num_heads=4, pad_token_id=0, decoder_start_token_id=0)
    model = hf.T5ForConditionalGeneration(config)
    attnzoo.swap(model, "flash")
    model.set_attn_implementation("eager")
    assert set(described(model)) == {("none", "eager")}
    assert {part.config._attn_implementation for part in (model.encoder, model.decoder)} == {
        "eager"
    }
    model.set_attn_implementation("attnzoo")
    assert {row.backend for row in attnzoo.describe(model)} == {"flash"}


@pytest.fixture
def clip(redraw):
    text = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "eos_token_id": 98,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    vision = {**text, "image_size": 16, "patch_size": 4}
    for key in ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id"):
        del vision[key]
    return redraw(hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision)))


def test_a_disabled_part_stays_disabled(clip, tmp_path):
    attnzoo.swap(clip, "softmax")
    clip.set_attn_implementation({"text_config": "sdpa"})
    wanted = [("none", "sdpa"), ("softmax", "")]
    assert described(clip) == wanted
    clip.save_pretrained(tmp_path)
    assert described(hf.CLIPModel.from_pretrained(tmp_path)) == wanted


def test_a_folder_is_loaded_with_the_swap_disabled(swapped, ids, tmp_path):
    """An explicit ``attn_implementation`` takes precedence, as for every other implementation."""
    model, expected, original = swapped
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="'eager', as requested; the swap to 'gated_linear'"):
        again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(logits(again, ids), original)
    assert described(again) == [("none", "eager")] * 2
    again.set_attn_implementation("attnzoo")
    assert torch.equal(logits(again, ids), expected)


def test_a_part_that_is_saved_without_its_swap_warns(tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "vocab_size": 99}
    model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, num_heads=4))
    attnzoo.swap(model, "longformer", window=2, else_="flash")
    with pytest.warns(
        attnzoo.SwapWarning, match="T5Stack is a part of a swapped model and is saved"
    ):
        model.get_encoder().save_pretrained(tmp_path / "encoder")
    with warnings.catch_warnings():
        warnings.simplefilter("error", attnzoo.SwapWarning)
        model.save_pretrained(tmp_path / "whole")
