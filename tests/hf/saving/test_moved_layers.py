"""Layers that are removed, reordered or repeated after a swap are swapped again to be saved."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import attnzoo
from attnzoo.errors import SpecError
from tests.helpers import add_noise, tiny_llama

IDS = torch.arange(3, 33)[None]
MIXED = attnzoo.AttentionSpec("gated_linear", layers={"1": "delta", "2-3": "flash"})


def make(spec):
    model = attnzoo.swap(tiny_llama(num_hidden_layers=4), spec)
    for module in model.modules():
        if isinstance(module, attnzoo.AttentionBackend):
            add_noise(module, 0.3)
    return model


def move(model, kept):
    """Keep some layers in another order, as pruning and depth up-scaling do."""
    layers = [copy.deepcopy(model.model.layers[number]) for number in kept]
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def test_layers_are_swapped_again_where_the_spec_has_others(tmp_path):
    model = move(make(MIXED), (1, 3, 2, 0))
    expected = logits(model)
    with pytest.raises(SpecError, match=r"layers\.1\.self_attn is now .* keep_extras"):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    spec = attnzoo.AttentionSpec("flash", layers={"0": "delta", "3": "gated_linear"})
    attnzoo.swap(model, spec, keep_extras=True)
    model.save_pretrained(tmp_path / "new")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert torch.equal(logits(again), expected)


def test_pruned_heads_move_with_their_layers(tmp_path):
    model = attnzoo.prune_heads(tiny_llama(num_hidden_layers=4), {1: [0, 1], 3: [2, 3]})
    move(model, (0, 2, 3)).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again), logits(model))  # sdpa and eager


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ((1, 2, 3), r"layers\.1\.self_attn is now model\.layers\.0"),  # the first one is removed
        ((0, 1, 1, 3), r"layers\.1\.self_attn is now model\.layers\.2"),
        ((0, 1), "names layer 3"),  # the numbers of the others stay
    ],
)
def test_moved_layers_are_refused_before_a_file_is_written(kept, reason, tmp_path):
    layers = {"3": "flash"} if reason.startswith("names") else {}
    model = move(make(attnzoo.AttentionSpec("performer", num_features=8, layers=layers)), kept)
    with pytest.raises(SpecError, match=reason):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
