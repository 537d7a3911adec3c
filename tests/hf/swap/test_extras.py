"""Warnings: dropped trained extras, extras without weights, and swaps without effect."""

import warnings

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import attnzoo

LAYERS = [f"model.layers.{i}.self_attn" for i in range(2)]


def train(model):
    """Change the extras, as training does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attnzoo" in name:
                parameter.add_(0.1)


def extras(model):
    return {name: x.clone() for name, x in model.state_dict().items() if "attnzoo" in name}


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def test_swap_returns_the_model(llama):
    model = llama()
    assert attnzoo.swap(model, "linear") is model


def test_a_swap_that_drops_trained_extras_warns(llama):
    model = llama()
    attnzoo.swap(model, "linear", feature_map="hedgehog", layers={"1": "flash"})
    train(model)
    with pytest.warns(UserWarning, match="keep_extras=True") as record:
        attnzoo.swap(model, "linear", feature_map="hedgehog")
    assert LAYERS[0] in str(record[0].message)
    assert LAYERS[1] not in str(record[0].message)


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("backend", ["gated_linear", "performer", "linformer"])
def test_a_swap_that_drops_untrained_extras_does_not_warn(backend, llama):
    model = llama()
    options = {"linformer": {"block": 4, "num_rows": 2, "sharing": "layerwise"}}.get(backend, {})
    attnzoo.swap(model, backend, **options)
    attnzoo.swap(model, "linear")


def test_keep_extras_keeps_equal_shapes(llama):
    model = llama()
    attnzoo.swap(model, "gated_linear", feature_map="hedgehog")
    train(model)
    trained = extras(model)
    options = {"feature_map": "hedgehog", "chunk_size": 16}
    with pytest.warns(UserWarning, match="other extras") as record:
        attnzoo.swap(model, "gated_linear", keep_extras=True, layers={"1": "linear"}, **options)
    assert LAYERS[1] in str(record[0].message)
    assert LAYERS[0] not in str(record[0].message)
    kept = extras(model)
    assert kept
    assert all(torch.equal(x, trained[name]) for name, x in kept.items())
    assert model.model.layers[0].self_attn.attnzoo.config.chunk_size == 16


def test_else_for_every_layer_warns(llama):
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 3  # linear refuses it
    with pytest.warns(UserWarning, match="runs 'flash', the \"else\"") as record:
        attnzoo.swap(model, "linear", else_="flash")
    assert all(name in str(record[0].message) for name in LAYERS)
    assert "sliding window" in str(record[0].message)


@pytest.mark.usefixtures("no_warning")
def test_else_for_some_layers_does_not_warn(llama):
    model = llama()
    model.model.layers[0].self_attn.sliding_window = 3
    attnzoo.swap(model, "linear", else_="flash")


def test_a_warning_is_raised_before_anything_changes(llama):
    model = attnzoo.swap(llama(), "linear", feature_map="hedgehog")
    train(model)
    trained = extras(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", attnzoo.SwapWarning)
        with pytest.raises(attnzoo.SwapWarning, match="trained extras"):
            attnzoo.swap(model, "gated_linear")
    assert extras(model).keys() == trained.keys()
    assert {row.backend for row in attnzoo.describe(model)} == {"linear"}


def test_a_checkpoint_with_some_of_the_extras_warns(llama, tmp_path):
    model = llama()
    attnzoo.swap(model, "linear", feature_map="hedgehog")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {k: x for k, x in load_file(file).items() if f"{LAYERS[1]}.attnzoo" not in k}
    save_file(state, file, metadata={"format": "pt"})
    with pytest.warns(attnzoo.SwapWarning, match="lacks weights") as record:
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    message = str(next(w.message for w in record if "lacks" in str(w.message)))
    assert LAYERS[1] in message
    assert LAYERS[0] not in message


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("sharing", ["none", "layerwise"])
def test_complete_and_new_swaps_load_without_a_warning(sharing, llama, tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "stock")
    attnzoo.swap(model, "linformer", block=4, num_rows=2, sharing=sharing)
    model.save_pretrained(tmp_path / "swapped")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "swapped")
    assert all(torch.equal(x, extras(model)[name]) for name, x in extras(again).items())
    hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "stock", config=model.config, attn_implementation="attnzoo"
    )
