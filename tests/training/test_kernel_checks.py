"""The training commands check the kernels of a GPU before they train or evaluate."""

import pytest
import torch

import attnzoo
from attnzoo.training import evaluate_command, runs
from attnzoo.training.evaluate_command import evaluate
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig
from attnzoo.training.recover import RecoverConfig, recover
from tests.training.conftest import tiny_llama


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

    for module in (runs, evaluate_command):
        monkeypatch.setattr(module, "check_model_kernels", check)
    return calls


@pytest.mark.parametrize(
    ("train", "config", "generates"),
    [(recover, RecoverConfig, True), (finetune, FinetuneConfig, False)],
)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_run_checks_a_training_row(
    train, config, generates, precision, checked, saved, text, spec, tmp_path
):
    loop = LoopConfig(batch_size=4, precision=precision)
    options = config(row_length=32, judged_rows=2, loop=loop)
    with pytest.raises(Checked):
        train(saved, spec, [text], tmp_path / "out", options)
    inputs = checked["inputs"]
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {
        "input_ids": (1, 32),
        "position_ids": (1, 32),
    }
    assert checked["swapped"] == ["gated_linear"] * 2
    assert (checked["generate"], checked["autocast"]) == (generates, precision == "bf16")


def test_evaluation_checks_the_saved_model(checked, text, saved, tmp_path):
    attnzoo.swap(tiny_llama(), "linear").save_pretrained(tmp_path)
    with pytest.raises(Checked):
        evaluate(tmp_path, [], tasks=object(), row_length=16)
    assert checked["inputs"]["input_ids"].shape == (1, 16)
    assert (checked["swapped"], checked["generate"]) == (["linear"] * 2, True)
