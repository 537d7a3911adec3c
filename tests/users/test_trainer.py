"""The Trainer of transformers on a swapped model."""

import runpy
from pathlib import Path

import pytest
import torch
import transformers

import attnzoo

EXAMPLE = Path(__file__).resolve().parents[2] / "integrations" / "trainer" / "example.py"


@pytest.mark.slow
def test_the_example_learns_and_saves(tmp_path):
    main = runpy.run_path(str(EXAMPLE))["main"]
    trainer = main(["--out", str(tmp_path), "--steps", "10", "--length", "16"])
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {layer.backend for layer in attnzoo.describe(loaded)} == {"linear"}
    ids = torch.arange(2, 40)[None]
    model = trainer.model.cpu().eval()
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
