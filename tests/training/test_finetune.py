"""Fine-tuning of a swapped model, with an equally trained softmax model as baseline."""

import json
import shutil

import pytest
import torch
import transformers as hf
from safetensors import safe_open

import attnzoo
from attnzoo.errors import ConfigError, SpecError
from attnzoo.training.eval_rows import rows_to_eval_batch
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loading import load_rows
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.quality import evaluate_rows


def config(**changes):
    loop = LoopConfig(batch_size=4, checkpoint_every=3)
    options = {"steps": 8, "row_length": 32, "judged_rows": 2, "weights_lr": 3e-3, "train": "full"}
    return FinetuneConfig(**{**options, "loop": loop, **changes})


def test_swap_without_extras_is_finetuned(saved, text, tmp_path):
    spec = attnzoo.AttentionSpec("longformer", window=4)
    outcome = finetune(saved, spec, [text], tmp_path / "out", config(steps=30))
    lines = outcome["lines"]
    assert lines["result"]["loss"] < lines["raw swap"]["loss"] - 0.1
    assert lines["softmax tuned"]["loss"] < lines["softmax"]["loss"] - 0.1
    assert outcome["window"] == 4
    assert {line["stage"] for line in read_losses(tmp_path / "out")} == {"softmax", "finetune"}
    written = json.loads((tmp_path / "out" / "finetuning.json").read_text())
    assert written["lines"] == lines
    assert set(written["decoding"]["result"]["milliseconds"]) == {"16"}
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.attnzoo["backend"] == "longformer"
    # the saved model is already swapped, so it takes no spec
    more = finetune(
        tmp_path / "out", None, [text], tmp_path / "more", config(tune_softmax=False, steps=2)
    )
    assert more["lines"]["raw swap"]["loss"] == pytest.approx(lines["result"]["loss"])
    assert "softmax tuned" not in more["lines"]


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_bfloat16_model_comes_back_in_bfloat16(saved, text, spec, tmp_path, train):
    """It is trained in float32; the results are those of the rounded weights."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(saved, source)
    hf.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).save_pretrained(source)
    options = config(train=train, tune_softmax=False, steps=3)
    outcome = finetune(source, spec, [text], out, options)
    with safe_open(out / "model.safetensors", "pt") as weights:
        found = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert found == {"BF16"}
    assert hf.AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    model = hf.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    _, held_out = load_rows(saved, [text], "text", options)
    loss = evaluate_rows(model, rows_to_eval_batch(held_out, 2)).loss
    assert outcome["lines"]["result"]["loss"] == pytest.approx(loss, rel=1e-6)


def test_softmax_baseline_takes_the_same_steps(saved, text, spec, tmp_path):
    """The baseline equals fine-tuning with the backend ``softmax``."""
    swapped = finetune(saved, spec, [text], tmp_path / "a", config())
    exact = attnzoo.AttentionSpec("softmax")
    same = finetune(saved, exact, [text], tmp_path / "b", config(tune_softmax=False))
    tuned = swapped["lines"]["softmax tuned"]["loss"]
    assert tuned == pytest.approx(same["lines"]["result"]["loss"], rel=1e-4)
    _, held_out = load_rows(saved, [text], "text", config())
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert evaluate_rows(model, rows_to_eval_batch(held_out, 2)).loss == pytest.approx(
        tuned, rel=1e-4
    )


@pytest.fixture(scope="module")
def uninterrupted(saved, text, spec, tmp_path_factory):
    """The results and the losses of an uninterrupted run."""
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    return finetune(saved, spec, [text], out, config(train="lora")), read_losses(out)


@pytest.mark.parametrize("steps", [4, 8, 13])
def test_resumed_run_equals_uninterrupted_run(
    saved, text, spec, tmp_path, interrupt, uninterrupted, steps
):
    """After a stop in the softmax stage, at its end, and in the stage of the swapped model."""
    run = saved, spec, [text], tmp_path / "out", config(train="lora")
    interrupt(steps, finetune, *run)
    resumed = finetune(*run, resume=True)
    expected, losses = uninterrupted
    assert read_losses(tmp_path / "out") == losses
    assert resumed["lines"] == expected["lines"]


def test_invalid_arguments_are_refused(saved, text, tmp_path):
    with pytest.raises(SpecError, match="is not swapped; give an attention"):
        finetune(saved, None, [text], tmp_path / "out", config())
    with pytest.raises(ConfigError, match="steps must be at least 1"):
        config(steps=0)
    near = attnzoo.AttentionSpec("longformer", window=4)
    with pytest.raises(SpecError, match="needs a layer with a window and a linear branch"):
        finetune(saved, near, [text], tmp_path / "out", config(window_dropout=0.5))
    with pytest.raises(SpecError, match="no parameters of their own"):
        finetune(saved, near, [text], tmp_path / "new", config(train="extras"))


def test_precision_and_gradient_checkpointing(saved, text, spec, tmp_path):
    """Autocast changes the losses within bfloat16's precision; checkpointing does not."""
    found = {}
    for name, changes in (
        ("plain", {}),
        ("checkpointing", {"gradient_checkpointing": True}),
        ("bf16", {"loop": LoopConfig(batch_size=4, precision="bf16")}),
    ):
        options = config(tune_softmax=False, **changes)
        finetune(saved, spec, [text], tmp_path / name, options)
        found[name] = torch.tensor([x["loss"] for x in read_losses(tmp_path / name)])
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(found["checkpointing"], found["plain"])
    assert not torch.equal(found["bf16"], found["plain"])
    torch.testing.assert_close(found["bf16"], found["plain"], rtol=0.03, atol=0)
