"""Recovery of a tiny model: trained weights, saved files, results and resumption."""

import json
import os
import sys
import time
from functools import cache

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.quality import evaluate_rows
from attnzoo.training.arguments import RecoveryArguments
from attnzoo.training.data import DataError, load_rows
from attnzoo.training.evaluator import evaluate, rows_to_eval_batch
from attnzoo.training.recover import recover
from attnzoo.training.recovery import rate_factor
from attnzoo.training.run_folder import RunError
from attnzoo.training.trainer import DivergenceError, StageRows, StageTrainer
from attnzoo.training.transfer import Transfer
from tests.processes import DEVNULL, SECONDS, running
from tests.processes import run as run_process
from tests.training.short_runs import arguments, losses


class Stop(Exception):
    pass


def weights(folder):
    return hf.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def stop_after(monkeypatch, steps):
    """Stop training when a number of steps is done, over all stages."""
    done, step = [], StageTrainer.training_step

    def count(self, *given, **options):
        if len(done) == steps:
            raise Stop
        done.append(1)
        return step(self, *given, **options)

    monkeypatch.setattr(StageTrainer, "training_step", count)


@pytest.mark.parametrize(
    "train",
    [
        "lora",
        pytest.param("extras", marks=pytest.mark.exhaustive),
        pytest.param("full", marks=pytest.mark.exhaustive),
    ],
)
def test_trained_weights(saved, text, spec, tmp_path, train):
    out = tmp_path / "out"
    outcome = recover(saved, spec, [text], arguments(out, train=train))
    before, after = weights(saved), weights(out)
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    if train == "extras":
        assert not changed
    else:
        assert any("q_proj" in name for name in changed)
        assert any("embed_tokens" in name for name in changed) == (train == "full")
    raw = hf.AutoModelForCausalLM.from_pretrained(saved)
    start = attnzoo.swap(raw, spec).state_dict()
    assert any("attnzoo" in n and not torch.equal(x, start[n]) for n, x in after.items())
    assert hf.AutoConfig.from_pretrained(out).use_cache
    assert json.loads((out / "recovery.json").read_text()) == outcome
    assert not [*(out / "checkpoints").glob("*/")]
    assert not [*out.glob("*.partial")]


def test_results_are_those_of_the_saved_model(saved, text, spec, tmp_path):
    args = arguments(tmp_path / "out", train="extras")
    outcome = recover(saved, spec, [text], args)
    batch = rows_to_eval_batch(load_rows(saved, [text], args)[1], 2)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert evaluate_rows(model, batch).loss == pytest.approx(outcome["lines"]["result"]["loss"])
    stock = hf.AutoModelForCausalLM.from_pretrained(saved)
    assert evaluate_rows(stock, batch).loss == pytest.approx(outcome["lines"]["softmax"]["loss"])
    attnzoo.swap(stock, "flash", window=4)
    window = outcome["lines"]["window alone"]["loss"]
    assert evaluate_rows(stock, batch).loss == pytest.approx(window)
    assert outcome["window"] == 4
    found = evaluate(tmp_path / "out", [text], row_length=32, rows=2)
    for name in ("softmax", "window alone", "result"):
        assert found["lines"][name]["loss"] == pytest.approx(outcome["lines"][name]["loss"])
    assert found["verdict"] == outcome["verdict"]
    with pytest.raises(SpecError, match="is not swapped, so there is nothing to compare"):
        evaluate(saved, [text], row_length=32)


def test_softmax_baseline_is_trained_with_cross_entropy(saved, text, spec, tmp_path):
    options = {"train": "full", "learning_rate": 3e-2, "cross_entropy": 0.5}
    outcome = recover(saved, spec, [text], arguments(tmp_path / "out", **options))
    tuned, softmax = (outcome["lines"][name]["loss"] for name in ("softmax tuned", "softmax"))
    assert tuned < softmax - 0.1
    assert [*outcome["losses"]] == ["softmax", "transfer", "distil"]


@pytest.fixture(scope="module")
def uninterrupted(saved, text, spec, tmp_path_factory):
    """A function that returns folder and results of an uninterrupted run, by target."""

    @cache
    def run(target):
        out = tmp_path_factory.mktemp("uninterrupted") / target
        args = arguments(out, transfer_target=target, train="full", save_steps=2)
        return out, recover(saved, spec, [text], args)

    return run


@pytest.mark.parametrize(
    ("steps", "target"),
    [
        pytest.param(3, "attention", marks=pytest.mark.exhaustive),
        pytest.param(5, "output", marks=pytest.mark.exhaustive),
        (9, "output"),
    ],
)
def test_resumed_run_equals_uninterrupted_run(
    saved, text, spec, tmp_path, uninterrupted, monkeypatch, steps, target
):
    """In transfer, which compares other keys in each step, between stages, and in distillation."""
    out, resume = tmp_path / "out", {"resume_from_checkpoint": "True"}
    options = {"transfer_target": target, "train": "full", "save_steps": 2}
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(Stop):
            recover(saved, spec, [text], arguments(out, **options))
    with pytest.raises(RunError, match="holds a run; go on with --resume-from-checkpoint True"):
        recover(saved, spec, [text], arguments(out, **options))
    with pytest.raises(RunError, match=r"config.hidden_states is 0.0, not 0.5"):
        recover(saved, spec, [text], arguments(out, **options, **resume, hidden_states=0.5))
    results = recover(saved, spec, [text], arguments(out, **options, **resume))
    folder, expected = uninterrupted(target)
    assert results["losses"] == expected["losses"]
    found = weights(out)
    assert all(torch.equal(x, found[name]) for name, x in weights(folder).items())
    assert recover(saved, spec, [text], arguments(out, **options, **resume)) == results


def test_checkpoints_have_what_is_trained_and_those_cut_short_are_skipped(
    saved, text, spec, tmp_path, uninterrupted, monkeypatch
):
    out = tmp_path / "out"
    options = {"train": "full", "save_steps": 2, "transfer_target": "output"}
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Stop):
            recover(saved, spec, [text], arguments(out, **options))
    stage = out / "checkpoints" / "transfer"
    found = [x for x in stage.glob("checkpoint-*") if (x / "model.safetensors").is_file()]
    assert {x.name for x in found} == {"checkpoint-4", "checkpoint-5"}
    size = (stage / "checkpoint-4" / "model.safetensors").stat().st_size
    assert size < 0.3 * (saved / "model.safetensors").stat().st_size
    state = stage / "checkpoint-5" / "trainer_state.json"
    state.write_text(state.read_text()[:40])
    results = recover(saved, spec, [text], arguments(out, **options, resume_from_checkpoint="True"))
    assert losses(results)[-6:] == losses(uninterrupted("output")[1])[-6:]


@pytest.mark.exhaustive
def test_killed_process_is_resumed(saved, text, tmp_path):
    command = [
        *(sys.executable, "-m", "attnzoo"),
        *("recover", str(saved), "--data", str(text), "--output-dir", str(tmp_path / "out")),
        *("--attention", "linear:feature_map=hedgehog", "--max-length", "32"),
        *("--transfer-steps", "80", "--max-steps", "3"),
        *("--per-device-train-batch-size", "2", "--save-steps", "10", "--always-train"),
    ]
    env, start = {**os.environ, "OMP_NUM_THREADS": "1"}, time.monotonic()
    with running(command, env=env, stdout=DEVNULL) as process:
        checkpoint = tmp_path / "out" / "checkpoints" / "transfer" / "checkpoint-10"
        while not (checkpoint / "trainer_state.json").is_file():
            assert process.poll() is None
            assert time.monotonic() - start < SECONDS
            time.sleep(0.05)
    run_process([*command, "--resume-from-checkpoint", "True"], env=env, check=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_stages_go_on_in_the_rows_where_the_last_one_has_stopped():
    """Each row comes once an epoch, but for those that fill no step."""
    parts = [StageRows(range(11), first=x, steps=y, batch=3, seed=5) for x, y in ((0, 2), (2, 5))]
    found = [row for part in parts for row in part]
    assert found == [*StageRows(range(11), first=0, steps=7, batch=3, seed=5)]
    epochs = [found[:9], found[9:18]]
    assert [len({*x}) for x in epochs] == [9, 9]
    assert epochs[0] != epochs[1]
    assert len(StageRows(range(2), first=1, steps=3, batch=4, seed=0)) == 12


def test_evaluations_of_transfer_compare_the_same_keys(saved, text, spec, tmp_path):
    """With a rate of almost zero, so that the loss does not change."""
    args = arguments(
        tmp_path / "out", transfer_target="attention", transfer_learning_rate=1e-30, max_steps=0
    )
    lines = recover(saved, spec, [text], args)["losses"]["transfer"]
    assert len({x["eval_loss"] for x in lines if "eval_loss" in x}) == 1


def test_one_row_at_a_time_takes_the_same_steps(saved, text, spec, tmp_path):
    """Losses over labels do not depend on gradient accumulation."""
    found = []
    for batch, parts in ((4, 1), (1, 4)):
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": parts}
        options |= {"transfer_steps": 0, "max_steps": 2, "eval_strategy": "no", "train": "full"}
        args = arguments(tmp_path / str(parts), **options, cross_entropy=0.4)
        found.append([x[2] for x in losses(recover(saved, spec, [text], args))])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_run_that_diverges_stops(saved, text, spec, tmp_path):
    args = arguments(tmp_path / "out", transfer_steps=0, learning_rate=1e30, train="full")
    with pytest.raises(DivergenceError, match=r"is (nan|inf).*\(--transfer-learning-rate"):
        recover(saved, spec, [text], args)
    assert not (tmp_path / "out" / "recovery.json").exists()


def test_a_stage_ends_in_its_best_state(saved, text, spec, tmp_path):
    """Distillation with a rate that ruins the model returns what it got."""
    logged = []
    args = arguments(tmp_path / "out", learning_rate=10.0, train="full", max_grad_norm=1e9)
    results = recover(saved, spec, [text], args, log=logged.append)
    assert any("the state after 0 of 6 steps is kept" in x for x in logged)
    found = [x["eval_loss"] for x in results["losses"]["distil"] if "eval_loss" in x]
    assert found[0] == min(found) < max(found)
    before, after = weights(saved), weights(tmp_path / "out")
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_rates_follow_from_the_distance(saved, text, spec, tmp_path):
    assert [rate_factor(x) for x in (0.0, 0.1, 7.0)] == [0.03, 1.0, 1.0]
    assert rate_factor(0.05) == pytest.approx(0.5**0.75)
    rates = []
    for name, options in (("own", {}), ("given", {"learning_rate": 1e-3})):
        options |= {"max_steps": 1, "warmup_steps": 0, "eval_strategy": "no"}
        args = arguments(tmp_path / name, transfer_steps=0, **options)
        lines = recover(saved, spec, [text], args)["losses"]["distil"]
        rates.append(max(x["learning_rate"] for x in lines if "learning_rate" in x))
    assert rates[0] < rates[1]


def test_transfer_computes_one_prediction_per_row(model):
    """Of a decoder, whose layers have the same errors with all predictions."""
    attnzoo.swap(model, "linear", feature_map="hedgehog", window=4)
    batch = {"input_ids": torch.arange(3, 27).view(2, 12)}
    sizes = []
    model.lm_head.register_forward_hook(lambda module, args, out: sizes.append(out.shape[1]))
    with Transfer(model) as transfer:
        short = float(transfer.run(model, batch))
        whole = float(transfer.loss(model(**batch)[0]))
    assert sizes == [1, 12]
    assert short == whole > 0


def test_invalid_arguments_are_refused(saved, text, spec, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match="no file or folder"):
        recover(saved, spec, [tmp_path / "absent"], arguments(out))
    with pytest.raises(SpecError, match="holds no saved model"):
        recover(tmp_path / "absent", spec, [text], arguments(out))
    model = hf.AutoModelForCausalLM.from_pretrained(saved)
    attnzoo.swap(model, "linear").save_pretrained(tmp_path / "swapped")
    hf.AutoTokenizer.from_pretrained(saved).save_pretrained(tmp_path / "swapped")
    with pytest.raises(SpecError, match="is already swapped"):
        recover(tmp_path / "swapped", spec, [text], arguments(out))
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transfer_steps": -1}, "transfer_steps must be at least 0 and finite, got -1"),
        ({"lora_r": 0}, "lora_r must be at least 1 and finite, got 0"),
        ({"extras_learning_rate": float("nan")}, "extras_learning_rate must be above 0"),
        ({"max_length": 4}, "max_length must be at least 8"),
        ({"cross_entropy": 1.5}, "cross_entropy must be from 0 to 1"),
        ({"hidden_states": -1.0}, "hidden_states must be at least 0"),
        ({"transfer_target": "outputs"}, r"transfer_target .*Did you mean 'output'"),
        ({"train": "all"}, "train must be one of extras, lora, full, got 'all'"),
        ({"max_tokens": "many"}, "number of tokens such as 300M"),
        ({"label_smoothing_factor": 0.1}, "has no label smoothing"),
        ({"push_to_hub": True}, "run `hf upload ORG/NAME FOLDER`"),
        ({"max_length": 33, "cp_size": 2}, "make max_length a multiple"),
        ({"cp_size": 2}, "do not divide into groups of cp_size=2"),
        ({"dtype": "bfloat16", "train": "full"}, "small updates are lost"),
        ({"warmup_steps": 40, "max_steps": 30}, "'distil' has 30 steps, all of them warmup"),
    ],
)
def test_invalid_values_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RecoveryArguments(output_dir="out", use_cpu=True, **options)
