"""A stage keeps its best state by held-out loss and generation, also over an interruption."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import nn

from attnzoo.training.best_state import BestState, Score
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.recover import RecoverConfig, recover


def score(loss, agreement=(), step=0):
    return Score(step=step, losses=[loss - 0.01, loss + 0.01], agreement=list(agreement))


def test_a_better_state_has_a_lower_loss_and_does_not_generate_worse():
    assert score(0.5).is_better_than(score(0.6))
    assert not score(0.6).is_better_than(score(0.6))
    assert not score(float("nan")).is_better_than(score(0.6))
    equal = [0.5, 0.7, 0.6, 0.8]
    assert score(0.5, equal).is_better_than(score(0.6, equal))
    fewer = [x - 0.1 for x in equal]
    assert not score(0.5, fewer).is_better_than(score(0.6, equal))
    noisy = [0.6, 0.55, 0.7, 0.7]
    assert score(0.5, noisy).is_better_than(score(0.6, equal))


class Line(nn.Module):
    """One weight; the loss of a row is its squared distance from the row's number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0]))


def keeper(model, steps=8, every=None):
    stage = SimpleNamespace(
        name="distil",
        steps=steps,
        before_step=lambda step: None,
        loss=lambda model, row: (model.weight - row["x"]).square().sum(),
    )
    rows = [{"x": torch.tensor(x)} for x in (0.9, 1.1)]
    said = []
    best = BestState(
        stage,
        model,
        rows=rows,
        generation=None,
        every=every,
        autocast=lambda: torch.autocast("cpu", enabled=False),
        log=said.append,
    )
    return best, said


def walk(best, model, weights, first=1):
    for step, weight in enumerate(weights, first):
        with torch.no_grad():
            model.weight.fill_(weight)
        best.after_step(step)


def test_the_best_state_is_restored(tmp_path):
    model = Line()
    best, said = keeper(model)
    best.after_step(0)
    walk(best, model, [2.5, 2.0, 1.5, 1.2, 0.9, 0.0, -1.0, -2.0])
    best.restore()
    assert model.weight.item() == pytest.approx(1.2)  # evaluated at 0, 2, 4, 6 and 8
    assert "the state after 4 of 8 steps is kept" in said[-1]
    assert "held-out loss 0.0500" in said[-1]


def test_a_stage_never_hands_on_a_worse_state_than_it_got():
    model = Line()
    best, said = keeper(model)
    best.after_step(0)
    walk(best, model, [4.0 + x for x in range(8)])
    best.restore()
    assert model.weight.item() == 3.0
    assert "the state after 0 of 8 steps is kept" in said[-1]


def test_the_best_state_is_in_checkpoints(tmp_path):
    model = Line()
    best, _ = keeper(model)
    best.after_step(0)
    walk(best, model, [2.0, 1.0, 5.0, 6.0])
    checkpoint = tmp_path / "step-000004"
    checkpoint.mkdir()
    best.save(checkpoint)
    other = Line()
    again, _ = keeper(other)
    again.load(checkpoint)
    walk(again, other, [7.0, 8.0, 9.0, 10.0], first=5)
    again.restore()
    assert other.weight.item() == 1.0
    assert again.best.step == 2


def test_a_best_state_is_written_once_and_when_it_is_not_the_current_one(tmp_path, monkeypatch):
    model, written, save = Line(), [], torch.save
    best, _ = keeper(model, every=1)

    def record(data, path):
        written.append(path.name)
        save(data, path)

    monkeypatch.setattr(torch, "save", record)
    best.after_step(0)
    names = []
    for step, weight in enumerate([1.5, 4.0, 5.0, 1.2, 6.0], 1):
        walk(best, model, [weight], first=step)
        (tmp_path / str(step)).mkdir()
        best.save(tmp_path / str(step))
        names.append(best.prefix)
    first, second = names[1], names[4]
    assert names == [None, first, first, None, second]
    assert first.startswith("distil-000001-")
    assert second.startswith("distil-000004-")
    states = [name for name in written if name != "best-0.pt"]
    assert states == [f"{name}-0.pt.partial" for name in (first, second)]
    assert {x.name for x in (tmp_path / "best").iterdir()} == {f"{first}-0.pt", f"{second}-0.pt"}


def test_a_best_state_is_whole_or_absent(tmp_path, monkeypatch):
    model = Line()
    best, _ = keeper(model, every=1)
    walk(best, model, [1.0, 2.0])
    (tmp_path / "step").mkdir()

    def fail(data, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="No space left"):
            best.save(tmp_path / "step")
    assert not list((tmp_path / "best").iterdir())
    best.save(tmp_path / "step")
    assert len(list((tmp_path / "best").iterdir())) == 1


def config(**options):
    loop = LoopConfig(batch_size=4, checkpoint_every=2)
    given = {"transfer_steps": 4, "distil_steps": 8, "row_length": 32, "judged_rows": 4}
    return RecoverConfig(**{**given, "train": "full", "loop": loop, **options})


def test_distillation_with_far_too_large_rates_keeps_what_transfer_made(
    saved, text, spec, tmp_path
):
    """Without this, the result would be that of rates that destroy the model."""
    first = recover(saved, spec, [text], tmp_path / "first", config(distil_steps=0))
    wild = {"weights_lr": 0.3, "extras_lr": 0.3}
    kept = recover(saved, spec, [text], tmp_path / "kept", config(**wild))
    lost = recover(saved, spec, [text], tmp_path / "lost", config(**wild, evaluate_every=0))
    result = {name: x["lines"]["result"]["loss"] for name, x in
              (("first", first), ("kept", kept), ("lost", lost))}  # fmt: skip
    assert result["kept"] <= result["first"] + 1e-6
    assert result["lost"] > result["first"] + 0.1


def test_an_interrupted_stage_ends_with_the_same_state(saved, text, spec, tmp_path, interrupt):
    options = config(weights_lr=0.03, extras_lr=0.03)
    expected = recover(saved, spec, [text], tmp_path / "expected", options)
    run = saved, spec, [text], tmp_path / "out", options
    interrupt(9, recover, *run)
    found = recover(*run, resume=True)
    assert read_losses(tmp_path / "out") == read_losses(tmp_path / "expected")
    assert json.dumps(found["lines"]) == json.dumps(expected["lines"])
    models = [hf.AutoModelForCausalLM.from_pretrained(tmp_path / x) for x in ("out", "expected")]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
