"""Training that diverges stops with an error, keeps the last checkpoint and saves no model."""

import json
from itertools import count

import pytest
import torch

from attnzoo.evaluation.quality import NonFiniteError
from attnzoo.evaluation.rows import Rows
from attnzoo.training import plan as planning
from attnzoo.training import runs
from attnzoo.training.checkpoints import CheckpointError
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import DivergenceError, LoopConfig, read_losses
from attnzoo.training.quality import evaluate_rows
from attnzoo.training.recover import RecoverConfig, recover

LOOP = LoopConfig(batch_size=4, checkpoint_every=1, warmup=0.0)
SHORT = {"row_length": 32, "judged_rows": 2, "loop": LOOP}


def read_json(folder):
    """Parse every JSON file of a folder as JSON, which has no NaN."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for path in [*folder.rglob("*.json"), *folder.rglob("*.jsonl")]:
        for text in (
            path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        ):
            json.loads(text, parse_constant=refuse)


def test_a_loss_that_is_not_finite_stops_the_run(saved, text, spec, tmp_path):
    """Weights overflow in the first step of distillation, so the second loss is not finite."""
    out = tmp_path / "out"
    config = RecoverConfig(
        transfer_steps=2, distil_steps=9, weights_lr=1e30, extras_lr=1e30, **SHORT
    )
    with pytest.raises(
        DivergenceError,
        match=r"^Training diverged: .* of 9 of stage 'distil'.*step-00000\d', is kept",
    ):
        recover(saved, spec, [text], out, config)
    assert len(read_losses(out)) < 2 + 9
    assert not (out / "model.safetensors").exists()
    assert not (out / "recovery.json").exists()
    read_json(out)
    with pytest.raises(CheckpointError, match="already contains this run"):  # and is not locked
        recover(saved, spec, [text], out, config)


def test_a_model_that_is_not_finite_is_not_saved(saved, text, spec, tmp_path, monkeypatch):
    """The baselines and every loss are finite, the outputs of the trained model are not."""
    out, calls = tmp_path / "out", count()

    def overflow(model, batch, **options):
        if next(calls) < 4:
            return evaluate_rows(model, batch, **options)
        raise NonFiniteError("the loss on plain text is nan")

    monkeypatch.setattr(runs, "evaluate_rows", overflow)
    config = FinetuneConfig(steps=1, tune_softmax=False, train="full", **SHORT)
    with pytest.raises(DivergenceError, match=r"^Training diverged: the loss on plain text is nan"):
        finetune(saved, spec, [text], out, config)
    assert not (out / "model.safetensors").exists()
    read_json(out)


@pytest.mark.parametrize(
    ("patched", "message"),
    [("gradient", "the gradient norm is inf"), ("weight", "a weight is not finite")],
)
def test_gradients_and_weights_are_checked(
    saved, text, spec, tmp_path, monkeypatch, patched, message
):
    def clip(accelerator, parameters, largest):
        if patched == "gradient":
            return torch.tensor(torch.inf)
        parameters[0].grad.fill_(torch.nan)
        return torch.ones(())

    monkeypatch.setattr("accelerate.Accelerator.clip_grad_norm_", clip)
    config = RecoverConfig(transfer_steps=2, distil_steps=0, train="extras", **SHORT)
    with pytest.raises(DivergenceError, match=f"{message} in step 1 of 2 of stage 'transfer'"):
        recover(saved, spec, [text], tmp_path / "out", config)
    assert not list((tmp_path / "out" / "checkpoints").glob("step-*"))


def test_a_baseline_that_is_not_finite_is_an_error(saved, text, spec, tmp_path, monkeypatch):
    def overflow(model, batch, **options):
        raise NonFiniteError("the loss on plain text is nan")

    monkeypatch.setattr("attnzoo.training.runs.evaluate_rows", overflow)
    config = RecoverConfig(transfer_steps=2, distil_steps=0, **SHORT)
    with pytest.raises(NonFiniteError, match="The baseline 'softmax' cannot be measured: the loss"):
        recover(saved, spec, [text], tmp_path / "out", config)


def test_a_plan_has_no_divergence_that_is_not_finite(model, spec, monkeypatch):
    planner = planning.Planner(
        model, Rows.of_documents(torch.full((1, 16), 5)), {"candidate": spec}
    )
    nan = torch.full((1, 16), torch.nan)
    monkeypatch.setattr(planning, "token_divergence", lambda *_: nan)
    with pytest.raises(
        NonFiniteError, match="KL of the predictions with candidate in layer 0 is nan"
    ):
        planner.divergence({0: "candidate"})
