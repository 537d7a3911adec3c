"""Plain fine-tuning of a swap, beside softmax that is trained by the same steps."""

import json

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import ConfigError, SpecError
from attnzoo.training.evaluate import quality
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig, read_losses


def config(**changes):
    loop = LoopConfig(batch_size=4, checkpoint_every=3)
    options = {"steps": 8, "row_length": 32, "judged_rows": 2, "weights_lr": 3e-3, "train": "full"}
    return FinetuneConfig(**{**options, "loop": loop, **changes})


def test_a_swap_without_extras_learns(saved, text, tmp_path):
    spec = attnzoo.AttentionSpec("longformer", window=4)
    results = finetune(saved, spec, [text], tmp_path / "out", config(steps=30))
    lines = results["lines"]
    assert lines["result"]["loss"] < lines["raw swap"]["loss"] - 0.1
    assert lines["softmax tuned"]["loss"] < lines["softmax"]["loss"] - 0.1
    assert results["window"] == 4
    assert {line["stage"] for line in read_losses(tmp_path / "out")} == {"softmax", "finetune"}
    told = json.loads((tmp_path / "out" / "finetuning.json").read_text())
    assert told["lines"] == lines
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.attnzoo["backend"] == "longformer"
    # what was saved goes on: a swapped model takes no spec
    more = finetune(
        tmp_path / "out", None, [text], tmp_path / "more", config(tune_softmax=False, steps=2)
    )
    assert more["lines"]["raw swap"]["loss"] == pytest.approx(lines["result"]["loss"])
    assert "softmax tuned" not in more["lines"]


def test_softmax_is_tuned_by_the_same_steps(saved, text, spec, tmp_path):
    """The line is what the trained model itself is judged at, trained as ``Trainer`` would."""
    from attnzoo.training.evaluate import judged_rows
    from attnzoo.training.runs import load_rows

    swapped = finetune(saved, spec, [text], tmp_path / "a", config())
    exact = attnzoo.AttentionSpec("softmax")
    alike = finetune(saved, exact, [text], tmp_path / "b", config(tune_softmax=False))
    tuned = swapped["lines"]["softmax tuned"]["loss"]
    assert tuned == pytest.approx(alike["lines"]["result"]["loss"], rel=1e-4)
    _, held_out = load_rows(saved, [text], "text", config())
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert quality(model, judged_rows(held_out, 2)).loss == pytest.approx(tuned, rel=1e-4)


class Stop(Exception):
    pass


@pytest.mark.parametrize("at", [4, 8, 13])
def test_a_run_that_is_stopped_goes_on(saved, text, spec, tmp_path, at):
    whole = finetune(saved, spec, [text], tmp_path / "whole", config(train="lora"))
    taken = []

    def stop(stage, step, loss):
        taken.append(loss)
        if len(taken) == at:
            raise Stop

    with pytest.raises(Stop):
        finetune(saved, spec, [text], tmp_path / "out", config(train="lora"), tick=stop)
    results = finetune(saved, spec, [text], tmp_path / "out", config(train="lora"), resume=True)
    assert read_losses(tmp_path / "out") == read_losses(tmp_path / "whole")
    assert results["lines"] == whole["lines"]


def test_what_cannot_be_tuned_is_refused(saved, text, tmp_path):
    with pytest.raises(SpecError, match="is not swapped; say with which attention"):
        finetune(saved, None, [text], tmp_path / "out", config())
    with pytest.raises(ConfigError, match="steps must be at least 1"):
        config(steps=0)
    near = attnzoo.AttentionSpec("longformer", window=4)
    with pytest.raises(SpecError, match="needs a window beside a linear branch"):
        finetune(saved, near, [text], tmp_path / "out", config(window_dropout=0.5))
    with pytest.raises(SpecError, match="no parameters of their own"):
        finetune(saved, near, [text], tmp_path / "new", config(train="extras"))


def test_precision_and_checkpointing_are_taken(saved, text, spec, tmp_path):
    """Autocast changes the losses a little, and computing layers twice not at all."""
    found = {}
    for name, changes in (
        ("plain", {}),
        ("twice", {"gradient_checkpointing": True}),
        ("bf16", {"loop": LoopConfig(batch_size=4, precision="bf16")}),
    ):
        options = config(tune_softmax=False, **changes)
        finetune(saved, spec, [text], tmp_path / name, options)
        found[name] = torch.tensor([x["loss"] for x in read_losses(tmp_path / name)])
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(found["twice"], found["plain"])
    assert not torch.equal(found["bf16"], found["plain"])
    torch.testing.assert_close(found["bf16"], found["plain"], rtol=0.03, atol=0)
