"""Recovery of a tiny model: trained weights, saved files, results and resumption."""

import json
import os
import resource
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import ConfigError, SpecError
from attnzoo.training import best_state, runs
from attnzoo.training.checkpoints import CheckpointError
from attnzoo.training.data import DataError
from attnzoo.training.eval_rows import rows_to_eval_batch
from attnzoo.training.evaluate_command import evaluate
from attnzoo.training.loading import load_rows
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.quality import evaluate_rows
from attnzoo.training.recover import (
    RecoverConfig,
    _one_prediction,
    recover,
    transfer_loss,
    with_step,
)
from attnzoo.training.transfer import Transfer
from tests.helpers import MODEL_SIZES
from tests.processes import DEVNULL, SECONDS, running
from tests.training.short_runs import HELD_OUT_ROWS

ROOT = Path(__file__).resolve().parents[2]
STEPS = {"transfer_steps": 5, "distil_steps": 6, "row_length": 32, "judged_rows": 2}


def config(train="lora", target="output", **changes):
    loop = {"batch_size": 4, "checkpoint_every": 2, **changes}
    return RecoverConfig(**STEPS, train=train, transfer_target=target, loop=LoopConfig(**loop))


def losses(out):
    return [(line["stage"], line["step"], line["loss"]) for line in read_losses(out)]


def weights(folder):
    return hf.AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("train", ["extras", "lora", "full"])
def test_trained_weights(saved, text, spec, tmp_path, train):
    outcome = recover(saved, spec, [text], tmp_path / "out", config(train))
    before, after = weights(saved), weights(tmp_path / "out")
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    if train == "extras":
        assert not changed
    else:
        assert any("q_proj" in name for name in changed)
        assert any("embed_tokens" in name for name in changed) == (train == "full")
    raw = hf.AutoModelForCausalLM.from_pretrained(saved)
    attnzoo.swap(raw, spec)
    start = raw.state_dict()
    assert any("attnzoo" in n and not torch.equal(x, start[n]) for n, x in after.items())
    assert json.loads((tmp_path / "out" / "recovery.json").read_text()) == json.loads(
        json.dumps(outcome)
    )
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_an_offloaded_teacher_takes_the_same_steps(saved, text, spec, tmp_path):
    plain = {**STEPS, "transfer_steps": 0, "train": "full", "loop": LoopConfig(batch_size=4)}
    for name, offload in (("memory", False), ("offloaded", True)):
        options = RecoverConfig(**plain, offload_teacher=offload)
        recover(saved, spec, [text], tmp_path / name, options)
    assert losses(tmp_path / "offloaded") == losses(tmp_path / "memory")


def test_results_are_those_of_the_saved_model(saved, text, spec, tmp_path):
    outcome = recover(saved, spec, [text], tmp_path / "out", config())
    _, held_out = load_rows(saved, [text], "text", config())
    batch = rows_to_eval_batch(held_out, 2)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert evaluate_rows(model, batch).loss == pytest.approx(outcome["lines"]["result"]["loss"])
    stock = hf.AutoModelForCausalLM.from_pretrained(saved)
    assert evaluate_rows(stock, batch).loss == pytest.approx(outcome["lines"]["softmax"]["loss"])
    attnzoo.swap(stock, "flash", window=4)
    window = outcome["lines"]["window alone"]["loss"]
    assert evaluate_rows(stock, batch).loss == pytest.approx(window)
    assert {"near branch alone", "far branch alone"} <= set(outcome["lines"])
    assert outcome["window"] == 4


@pytest.mark.parametrize("train", ["extras", "lora", "full"])
def test_softmax_baseline_is_trained_with_cross_entropy(saved, text, spec, tmp_path, train):
    """With the same loss; unless only extras are trained, which softmax has none of."""
    loop = LoopConfig(batch_size=4)
    options = {**STEPS, "train": train, "weights_lr": 3e-2, "cross_entropy": 0.5, "loop": loop}
    outcome = recover(saved, spec, [text], tmp_path / "out", RecoverConfig(**options))
    tuned, softmax = (outcome["lines"][name]["loss"] for name in ("softmax tuned", "softmax"))
    if train == "extras":
        assert tuned == softmax
    else:
        assert tuned < softmax - 0.1
    stages = [stage for stage, step, _ in losses(tmp_path / "out") if step == 0]
    assert stages == ["softmax"] * (train != "extras") + ["transfer", "distil"]


def test_evaluate_repeats_the_results_of_the_run(saved, text, spec, tmp_path):
    made = recover(saved, spec, [text], tmp_path / "out", config("extras"))
    found = evaluate(tmp_path / "out", [text], row_length=32, rows=2)
    assert found["window"] == made["window"]
    for name in ("softmax", "window alone", "result", "near branch alone", "far branch alone"):
        assert found["lines"][name]["loss"] == pytest.approx(made["lines"][name]["loss"])
    assert found["verdict"] == made["verdict"]
    with pytest.raises(SpecError, match="is not swapped, so there is nothing to compare"):
        evaluate(saved, [text], row_length=32)


def test_transfer_computes_one_prediction_per_row(model):
    """Of a decoder, whose layers have the same errors with all predictions; an encoder has none."""
    attnzoo.swap(model, "linear", feature_map="hedgehog", window=4)
    batch = {"input_ids": torch.arange(3, 27).view(2, 12)}
    batch["labels"] = batch["input_ids"]
    sizes, losses = [], []
    model.lm_head.register_forward_hook(lambda module, args, out: sizes.append(out.shape[1]))
    for arguments in ({}, _one_prediction(model)):
        with Transfer(model) as transfer:
            losses.append(float(transfer_loss(transfer, **arguments)(model, batch)))
    assert sizes == [12, 1]
    assert losses[0] == losses[1] > 0
    assert _one_prediction(hf.BertModel(hf.BertConfig(**MODEL_SIZES))) == {}


def test_with_step_sets_the_step_of_transfer(model):
    attnzoo.swap(model, "linear", feature_map="hedgehog")
    transfer, seen = Transfer(model), []
    with_step(transfer, seen.append)(7)
    assert (transfer.step, seen) == (7, [7])


@pytest.fixture(scope="module")
def uninterrupted(saved, text, spec, tmp_path_factory):
    """A function that returns the folder of an uninterrupted run, by target of transfer."""

    @cache
    def run(target):
        out = tmp_path_factory.mktemp("uninterrupted") / target
        recover(saved, spec, [text], out, config(target=target))
        return out

    return run


@pytest.mark.parametrize(
    ("steps", "target"), [(2, "output"), (3, "attention"), (6, "output"), (9, "output")]
)
def test_resumed_run_equals_uninterrupted_run(
    saved, text, spec, tmp_path, interrupt, uninterrupted, steps, target
):
    """In transfer, which compares other keys in each step, and in distillation."""
    run = saved, spec, [text], tmp_path / "out", config(target=target)
    interrupt(steps, recover, *run)
    recover(*run, resume=True)
    expected = uninterrupted(target)
    assert losses(tmp_path / "out") == losses(expected)
    found = weights(tmp_path / "out")
    assert all(torch.equal(x, found[name]) for name, x in weights(expected).items())


def test_killed_process_is_resumed(saved, text, tmp_path, capsys, attnzoo_command, monkeypatch):
    monkeypatch.setattr(best_state, "ROWS", HELD_OUT_ROWS)  # as in the process that is killed
    arguments = [
        *("recover", str(saved), "--data", str(text), "--out", str(tmp_path / "out")),
        *("--attention", "linear", "--set", "feature_map=hedgehog", "--length", "32"),
        *("--transfer-steps", "80", "--distil-steps", "3", "--batch", "2"),
        *("--checkpoint-every", "10", "--always-train"),
    ]
    command = [sys.executable, "-m", "attnzoo", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    with running(command, env=env, stdout=DEVNULL) as process:  # and kill it
        checkpoint = tmp_path / "out" / "checkpoints" / "step-000010"
        while not checkpoint.is_dir():
            assert process.poll() is None
            assert time.monotonic() - start < SECONDS
            time.sleep(0.01)
    done = len(losses(tmp_path / "out"))
    assert 10 <= done < 80
    attnzoo_command(*arguments, "--resume")
    assert [step for _, step, _ in losses(tmp_path / "out")] == [*range(80), *range(3)]
    assert "softmax" in capsys.readouterr().out


def test_gradient_accumulation_takes_the_same_steps(saved, text, spec, tmp_path):
    """In distillation; the loss of transfer is relative to the norm of each micro-batch."""
    found = []
    for parts in (1, 2):
        out = tmp_path / str(parts)
        options = {**STEPS, "transfer_steps": 0, "repeat_share": 0.0}
        loop = LoopConfig(batch_size=4, accumulate=parts)
        recover(saved, spec, [text], out, RecoverConfig(**options, train="full", loop=loop))
        found.append([loss for *_, loss in losses(out)])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


COMMAND = """
import os
os.environ.pop("ACCELERATE_USE_CPU", None)
from attnzoo.cli import main
main()
"""


def test_two_processes_take_the_steps_of_one(saved, text, tmp_path, attnzoo_command, fresh_python):
    """The command in two processes; torchrun starts those of tests/users/test_accelerate.py."""
    arguments = [
        *("recover", str(saved), "--data", str(text), "--attention", "performer"),
        *("--set", "window=4", "--length", "32", "--batch", "4"),
        *("--transfer-steps", "2", "--distil-steps", "4", "--train", "full"),
    ]
    attnzoo_command(*arguments, "--out", tmp_path / "one")
    done = fresh_python(COMMAND, *arguments, "--out", tmp_path / "two", path=(ROOT,), processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = ([loss for *_, loss in losses(tmp_path / name)] for name in ("one", "two"))
    assert len(one) == 6
    assert two == pytest.approx(one, rel=0.05)
    assert two[2:] == pytest.approx(one[2:], rel=0.01)


def test_resumption_of_another_run_is_refused(saved, text, spec, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"no run in .* to resume"):
        recover(saved, spec, [text], out, config(), resume=True)
    recover(saved, spec, [text], out, config())
    with pytest.raises(CheckpointError, match="already contains this run; give --resume"):
        recover(saved, spec, [text], out, config())
    with pytest.raises(CheckpointError, match=r"another run: its config\.train is 'lora', not"):
        recover(saved, spec, [text], out, config("full"), resume=True)
    (out / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json' is damaged"):
        recover(saved, spec, [text], out, config(), resume=True)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    with pytest.raises(CheckpointError, match="exists and contains no run"):
        recover(saved, spec, [text], tmp_path / "used", config())


def test_incomplete_checkpoint_is_ignored(saved, text, spec, tmp_path, interrupt):
    out = tmp_path / "out"
    interrupt(5, recover, saved, spec, [text], out, config())
    last = out / "checkpoints" / "step-000004"
    assert last.is_dir()
    last.rename(last.with_name("step-000004.partial"))
    (last.with_name("step-000004.partial") / "progress.json").unlink()
    recover(saved, spec, [text], out, config(), resume=True)
    assert len(losses(out)) == 11


def test_resumed_run_reuses_baselines(saved, text, spec, tmp_path, monkeypatch, interrupt):
    interrupt(4, recover, saved, spec, [text], tmp_path / "out", config())
    kept = json.loads((tmp_path / "out" / "checkpoints" / "lines.json").read_text())
    assert set(kept) == {"softmax", "raw swap", "equal window", "window alone"}
    calls = []
    monkeypatch.setattr(
        runs, "evaluate_rows", lambda *x, **y: calls.append(1) or evaluate_rows(*x, **y)
    )
    outcome = recover(saved, spec, [text], tmp_path / "out", config(), resume=True)
    new = set(outcome["lines"]) - {*kept, "softmax tuned"}  # a copy of softmax's line here
    assert len(calls) == len(new) == 3
    assert {name: outcome["lines"][name]["loss"] for name in kept} == {
        name: line["loss"] for name, line in kept.items()
    }


def test_transfer_in_blocks_of_layers(saved, text, spec, tmp_path):
    """The weights of a layer do not depend on the other layers of its block."""
    steps = {"transfer_steps": 4, "distil_steps": 0, "row_length": 32, "judged_rows": 2}
    loop = LoopConfig(batch_size=4, clip=1e9)
    for name, size in (("all", None), ("one", 1)):
        options = RecoverConfig(**steps, layers_at_once=size, loop=loop)
        recover(saved, spec, [text], tmp_path / name, options)
    stages = [line["stage"] for line in read_losses(tmp_path / "one")]
    assert stages == ["transfer 0"] * 4 + ["transfer 1"] * 4
    together, apart = weights(tmp_path / "all"), weights(tmp_path / "one")
    first = [name for name in apart if "layers.0.self_attn.attnzoo" in name]
    assert first
    start = hf.AutoModelForCausalLM.from_pretrained(saved)
    attnzoo.swap(start, spec)
    start = start.state_dict()
    a, b = (torch.cat([(x[n] - start[n]).flatten() for n in first]) for x in (together, apart))
    assert float(torch.cosine_similarity(a, b, 0)) > 0.99


def test_full_disk_keeps_the_last_checkpoint(saved, text, spec, tmp_path, uninterrupted):
    """Simulated by a limit on the size of files, so that a write fails in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = tmp_path / "out"

    def fill(stage, step, loss):
        if (stage, step) == ("transfer", 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))

    try:
        with pytest.raises(
            CheckpointError, match=r"cannot be written .*the last checkpoint is .*step-000002'"
        ):
            recover(saved, spec, [text], out, config(), on_step=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    recover(saved, spec, [text], out, config(), resume=True)
    assert losses(out) == losses(uninterrupted("output"))


def test_tracker_gets_the_losses(saved, text, spec, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = RecoverConfig(**STEPS, report_to="tensorboard", loop=LoopConfig(batch_size=4))
    recover(saved, spec, [text], tmp_path / "out", options)
    events = EventAccumulator(str(tmp_path / "out" / "logs" / "attnzoo")).Reload()
    for stage in ("transfer", "distil"):
        logged = [event.value for event in events.Scalars(f"{stage}/loss")]
        expected = [loss for name, _, loss in losses(tmp_path / "out") if name == stage]
        assert logged == pytest.approx(expected)


def test_window_of_the_baseline(saved, text, spec, tmp_path):
    options = RecoverConfig(**STEPS, control=9)
    outcome = recover(saved, spec, [text], tmp_path / "out", options)
    assert outcome["window"] == 9
    found = evaluate(tmp_path / "out", [text], row_length=32, rows=2, control=9)
    assert found["window"] == 9


def test_invalid_arguments_are_refused(saved, text, spec, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match="no file or folder"):
        recover(saved, spec, [tmp_path / "absent"], out, config())
    with pytest.raises(SpecError, match="holds no saved model"):
        recover(tmp_path / "absent", spec, [text], out, config())
    model = hf.AutoModelForCausalLM.from_pretrained(saved)
    attnzoo.swap(model, "linear")
    model.save_pretrained(tmp_path / "swapped")
    hf.AutoTokenizer.from_pretrained(saved).save_pretrained(tmp_path / "swapped")
    with pytest.raises(SpecError, match="is already swapped"):
        recover(tmp_path / "swapped", spec, [text], out, config())
    with pytest.raises(ConfigError, match="make batch_size a multiple"):
        recover(saved, spec, [text], out, config(batch_size=4, accumulate=3))
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transfer_steps": -1}, "transfer_steps must not be negative, got -1"),
        ({"lora_rank": 0}, "lora_rank must be at least 1, got 0"),
        ({"repeats_per_row": 0}, "repeats_per_row must be at least 1, got 0"),
        ({"repeats_per_row": 2, "repeat_share": 0.0}, "rows that repeat_share selects"),
        ({"extras_lr": 0.0}, "extras_lr must be above 0"),
        ({"row_length": 4}, "row_length must be at least 8 tokens"),
        ({"cross_entropy": 1.5}, "cross_entropy must be from 0 to 1"),
        ({"hidden_states": -1.0}, "hidden_states must not be negative, got -1"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"layers_at_once": 0}, "layers_at_once must be at least 1, got 0"),
        ({"window_dropout": 2}, "window_dropout must be from 0 to 1"),
        ({"control": 0}, "control must be at least 1 token, got 0"),
        ({"transfer_target": "keys"}, "transfer_target must be 'output' or 'attention'"),
        ({"train": "all"}, "train must be 'extras', 'lora' or 'full', got 'all'"),
    ],
)
def test_invalid_config_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RecoverConfig(**options)
