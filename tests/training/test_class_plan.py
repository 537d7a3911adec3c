"""Plans for stock classes: one size of windows, within a limit of the cache."""

import itertools
import json

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.evaluation.rows import Rows
from attnzoo.training import plan as planning
from attnzoo.training.budget import CacheBudget
from attnzoo.training.class_plan import OneWindow, window_candidates
from attnzoo.training.plan import make_plan

LENGTH, TOKEN = 1000, 2 * 2 * 8 * 4  # tokens of the budget; bytes of a token in one layer


def windows(spec):
    return {int(n): entry.options["window"] for n, entry in spec.layers.items()}


def test_one_size_that_changes_the_predictions_least(saved):
    """The oracle tries every size in every set of layers that fits."""
    tokens = torch.randint(3, 259, (3, 100), generator=torch.Generator().manual_seed(0))
    rows = Rows.of_documents(tokens)
    specs = {f"flash:window={n}": attnzoo.AttentionSpec("flash", window=n) for n in (4, 16, 48)}
    budget = OneWindow(budget=CacheBudget(bytes=TOKEN * (LENGTH + 20), length=LENGTH))
    plan = make_plan(saved, rows, specs, budget=budget, target_length=LENGTH)
    model = hf.AutoModelForCausalLM.from_pretrained(saved).eval()
    planner = planning.Planner(model, rows, specs)
    found = {}
    for size, layers in itertools.product((4, 16, 48), ([0], [1], [0, 1])):
        if LENGTH * (2 - len(layers)) + size * len(layers) <= LENGTH + 20:
            chosen = dict.fromkeys(layers, f"flash:window={size}")
            found[planner.divergence(chosen)] = dict.fromkeys(layers, size)
    assert windows(plan.spec) == found[min(found)]
    assert len(set(windows(plan.spec).values())) == 1


def test_a_class_that_cannot_hold_windows_of_some_layers_is_refused():
    assert "flash:window=64" in window_candidates("llama", "granite_swa")
    with pytest.raises(UnsupportedError, match="give one of ministral, granite_swa, qwen2"):
        window_candidates("llama", "mistral")
    with pytest.raises(UnsupportedError, match="give one of qwen3"):
        window_candidates("qwen3", "granite_swa")


def test_command(saved, text, tmp_path, attnzoo_command):
    """The plan converts without another option."""
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    budget = ("--cache-bytes", TOKEN * 140, "--cache-length", 120)
    given = ("--data", text, "--max-length", 100, "--target-length", 120, "--output-file", plan)
    attnzoo_command("plan", saved, "--to", "granite_swa", *budget, *given)
    assert json.loads(plan.read_text())["spec"]["layers"]
    attnzoo_command("convert", saved, "--to", "granite_swa", "--plan", plan, "--output-dir", out)
    config = hf.AutoConfig.from_pretrained(out)
    assert "sliding_attention" in config.layer_types
