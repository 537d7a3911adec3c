"""The training commands check the kernels of a GPU before they train or evaluate."""

import shutil

import pytest
import torch

import attnzoo
from attnzoo.training import evaluator as evaluation
from attnzoo.training import recovery
from attnzoo.training.evaluator import evaluate
from attnzoo.training.recover import recover
from tests.training.conftest import tiny_llama
from tests.training.short_runs import arguments


class Checked(Exception):
    """Ends a command at its check."""


@pytest.fixture
def checked(monkeypatch):
    """The arguments of the check that ended a command."""
    calls = {}

    def check(model, inputs, log, *, generate=False):
        calls.update(inputs=inputs, generate=generate, autocast=torch.is_autocast_enabled("cpu"))
        calls["swapped"] = [row.backend for row in attnzoo.describe(model)]
        raise Checked

    for module in (recovery, evaluation):
        monkeypatch.setattr(module, "check_model_kernels", check)
    return calls


@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_checks_a_training_row(bf16, checked, saved, text, spec, tmp_path):
    with pytest.raises(Checked):
        recover(saved, spec, [text], arguments(tmp_path / "out", bf16=bf16))
    inputs = checked["inputs"]
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {
        "input_ids": (1, 32),
        "position_ids": (1, 32),
    }
    assert checked["swapped"] == ["gated_linear"] * 2
    assert (checked["generate"], checked["autocast"]) == (True, bf16)


def test_evaluation_checks_the_saved_model(checked, text, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)  # its tokenizer
    attnzoo.swap(tiny_llama(), "linear").save_pretrained(tmp_path)
    with pytest.raises(Checked):
        evaluate(tmp_path, [text], row_length=24)
    assert checked["inputs"]["input_ids"].shape == (1, 24)
    assert (checked["swapped"], checked["generate"]) == (["linear"] * 2, True)
