"""Swapping models whose weights accelerate keeps on the CPU or on disk."""

import copy
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from torch import nn

import attnzoo
from attnzoo.errors import UnsupportedError
from tests.helpers import add_noise

OFFLOADS: dict[str, Callable[[nn.Module, Path], object]] = {
    "cpu": lambda model, folder: accelerate.cpu_offload(model, "cpu"),
    "disk": lambda model, folder: accelerate.disk_offload(model, str(folder), "cpu"),
}


@pytest.fixture
def model(llama):
    return llama()


@pytest.fixture
def ids():
    return torch.arange(2, 42).view(2, 20)


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("where", OFFLOADS)
def test_an_offloaded_model_is_swapped_for_backends_without_weights(model, ids, where, tmp_path):
    expected = copy.deepcopy(model)
    attnzoo.swap(expected, "flash")
    before = logits(model, ids)
    OFFLOADS[where](model, tmp_path)
    with pytest.raises(UnsupportedError, match=r"layers\.0\..*call attnzoo\.swap before"):
        attnzoo.swap(model, "gated_linear")
    attnzoo.swap(model, "flash")
    for _ in range(2):  # weights are offloaded again after each pass
        assert torch.equal(logits(model, ids), logits(expected, ids))
    attnzoo.restore(model)
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("where", OFFLOADS)
def test_a_swapped_model_can_be_offloaded(model, ids, where, tmp_path):
    attnzoo.swap(model, "gated_linear")
    expected = logits(model, ids)
    OFFLOADS[where](model, tmp_path)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("offloaded", [0, 1])
@pytest.mark.parametrize("where", ["device_map", *OFFLOADS])
def test_rows_of_an_offloaded_layer_are_shared(where, offloaded, llama, ids, tmp_path):
    model = attnzoo.swap(llama(), "linformer", block=8, sharing="layerwise")
    add_noise(model, 0.1)
    expected = logits(model, ids)
    if where == "device_map":
        model.save_pretrained(tmp_path / "model")
        layers = {f"model.layers.{i}": "disk" if i == offloaded else "cpu" for i in range(2)}
        others = {f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb")}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "model",
            device_map={**layers, **others, "lm_head": "cpu"},
            offload_folder=tmp_path / "offload",
        )
    else:
        OFFLOADS[where](model.model.layers[offloaded], tmp_path)
    weights = [p.is_meta for p in model.model.layers[offloaded].parameters()]
    assert all(weights)
    for _ in range(2):
        assert torch.equal(logits(model, ids), expected)


def test_rows_in_a_block_that_is_loaded_as_one_are_refused(model, ids):
    attnzoo.swap(model, "linformer", block=8, sharing="layerwise")
    accelerate.cpu_offload(model, "cpu", preload_module_classes=["LlamaDecoderLayer"])
    with pytest.raises(UnsupportedError, match=r"layers\.1.*rows are those of model\.layers\.0"):
        logits(model, ids)


def test_weights_in_a_block_that_is_loaded_as_one_are_refused(model, ids):
    expected = copy.deepcopy(model)
    attnzoo.swap(expected, "flash")
    accelerate.cpu_offload(model, "cpu", preload_module_classes=["LlamaDecoderLayer"])
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0.*call attnzoo\.swap before"):
        attnzoo.swap(model, "gated_linear")
    attnzoo.swap(model, "flash")  # has no weights
    assert torch.equal(logits(model, ids), logits(expected, ids))
