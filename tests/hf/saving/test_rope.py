"""Saved folders have the RoPE of transformers 4 beside that of transformers 5."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import attnzoo
from attnzoo.hf.saving.checkpoints import rope_table
from attnzoo.hf.stock.convert import card
from tests.helpers import MODEL_SIZES

THETA = 500_000.0
SCALED = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.5},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 33, "beta_fast": 17.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 33,
    },
}
SIZES = MODEL_SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 99}


def make(family, parameters, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, rope_parameters=parameters, **changes)
    return AutoModelForCausalLM.from_config(config).eval()


def logits(model):
    return model(torch.arange(3, 83)[None] % 99, use_cache=False).logits


def flat_theta(folder):
    """Read the base as an engine does that knows the flat field only."""
    return json.loads((folder / "config.json").read_text()).get("rope_theta", 10_000.0)


def swapped(model):
    return attnzoo.swap(model, "flash", layers={"0": "flash:window=7"})


MADE = {
    "swap": ("llama", swapped),
    "convert": ("llama", lambda x: attnzoo.convert(x, "qwen2")),
    "convert with windows": ("llama", lambda x: attnzoo.convert(swapped(x), "granite_swa")),
    "part": ("stablelm", swapped),
}


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        *(("swap", kind) for kind in SCALED),
        *(("convert", kind) for kind in ("default", "llama3")),
        ("convert with windows", "yarn"),
        *(("part", kind) for kind in ("default", "dynamic")),
    ],
)
def test_both_forms_are_saved_and_read_as_one(made, kind, tmp_path):
    family, change = MADE[made]
    part = {"partial_rotary_factor": 0.5} if family == "stablelm" else {}
    parameters = {"rope_type": kind, "rope_theta": THETA, **SCALED[kind], **part}
    model = change(make(family, parameters))
    expected, rope = logits(model), dict(model.config.rope_parameters)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert flat_theta(tmp_path) == THETA
    assert saved["rope_parameters"] == rope
    scaling = saved.get("rope_scaling") or {}
    assert (kind == "default") == (not scaling)
    assert SCALED[kind].items() <= scaling.items()
    assert saved.get("partial_rotary_factor", 1.0) == part.get("partial_rotary_factor", 1.0)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.rope_parameters == rope
    assert torch.equal(logits(again), expected)
    del saved["rope_parameters"]  # as of transformers 4
    (tmp_path / "config.json").write_text(json.dumps(saved))
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again), expected)


@pytest.mark.parametrize(("local", "named"), [(THETA, False), (7_000.0, True)])
def test_kinds_of_layers_with_other_positions_are_named_in_the_card(local, named, tmp_path):
    kinds = {
        name: {"rope_type": "default", "rope_theta": theta}
        for name, theta in (("full_attention", THETA), ("sliding_attention", local))
    }
    types = ["sliding_attention", "full_attention"]
    model = make("gemma3_text", kinds, head_dim=8, layer_types=types, sliding_window=9)
    model = attnzoo.convert(model, "gemma3_text")
    model.save_pretrained(tmp_path)
    assert flat_theta(tmp_path) == (10_000.0 if named else THETA)
    assert bool(rope_table(model.config)) == named
    text = card(model.config, [9, None], "x")
    assert ("| sliding_attention | `rope_type` default, `rope_theta` 7000.0 |" in text) == named
