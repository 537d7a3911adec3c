"""The training loop of integrations/accelerate, in one process and in two."""

import os
import re
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import transformers

import attnzoo
from attnzoo.evaluation.models import embedded_model_path
from tests import processes

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "integrations" / "accelerate" / "example.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
ARGUMENTS = ("--attention", "gated_linear", "--steps", "4", "--length", "16")
PRINTED = 1e-6  # the last digit of a printed loss


def losses(done: CompletedProcess[str]) -> torch.Tensor:
    """Return the loss of each step that the example printed."""
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)
    assert [int(step) for step, _ in lines] == [1, 2, 3, 4]  # one process prints
    return torch.tensor([float(loss) for _, loss in lines], dtype=torch.float64)


def test_two_processes_take_the_steps_of_one(tmp_path, fresh_python):
    """Their batches are halves, so the budget is what halves of batches change in one process."""
    given = {"cwd": tmp_path, "path": (ROOT,)}
    one = losses(fresh_python(EXAMPLE, *ARGUMENTS, "--out", "one", **given))
    halved = ("--batch", "2", "--accumulate", "4", "--out", "halves")
    halves = losses(fresh_python(EXAMPLE, *ARGUMENTS, *halved, **given))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*TORCHRUN, EXAMPLE, *ARGUMENTS, "--out", "two"]
    two = losses(processes.run(command, cwd=tmp_path, env=environment))
    budget = 2 * (halves - one).abs().max() + PRINTED + 8 * torch.finfo(torch.float32).eps * one
    assert bool(((two - one).abs() <= budget).all()), (one, halves, two)
    assert one[-1] < 0.9 * one[0]

    models = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (tmp_path / "one", tmp_path / "two", embedded_model_path())
    ]
    for model in models[:2]:
        assert {layer.backend for layer in attnzoo.describe(model)} == {"gated_linear"}
    attnzoo.swap(models[2], "gated_linear")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "two")
    ids = tokenizer("Once there was a dog who could not find his ball.", return_tensors="pt")
    with torch.no_grad():
        first, second, untrained = (float(x(**ids, labels=ids["input_ids"]).loss) for x in models)
    assert abs(first - second) <= budget.max()
    assert first < 0.9 * untrained  # the trained weights are saved
