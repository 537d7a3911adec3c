"""The whole way, on a tiny model: what is trained, saved, told, and gone on with."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import ConfigError, SpecError
from attnzoo.training import runs
from attnzoo.training.checkpoints import CheckpointError
from attnzoo.training.data import DataError
from attnzoo.training.evaluate import quality
from attnzoo.training.judge import evaluate
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.recover import RecoverConfig, recover, told
from attnzoo.training.transfer import Transfer

STEPS = {"transfer_steps": 5, "distil_steps": 6, "row_length": 32, "judged_rows": 2}


def config(train="lora", target="output", **changes):
    loop = {"batch_size": 4, "checkpoint_every": 2, **changes}
    return RecoverConfig(**STEPS, train=train, transfer_target=target, loop=LoopConfig(**loop))


class Stop(Exception):
    pass


def losses(out):
    return [(line["stage"], line["step"], line["loss"]) for line in read_losses(out)]


def weights(folder):
    return hf.AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("train", ["extras", "lora", "full"])
def test_what_is_trained(saved, text, spec, tmp_path, train):
    results = recover(saved, spec, [text], tmp_path / "out", config(train))
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
        json.dumps(results)
    )
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_the_account_is_of_the_saved_model(saved, text, spec, tmp_path):
    from attnzoo.training.evaluate import judged_rows, quality
    from attnzoo.training.runs import load_rows

    results = recover(saved, spec, [text], tmp_path / "out", config())
    _, held_out = load_rows(saved, [text], "text", config())
    judged = judged_rows(held_out, 2)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert quality(model, judged).loss == pytest.approx(results["lines"]["result"]["loss"])
    stock = hf.AutoModelForCausalLM.from_pretrained(saved)
    assert quality(stock, judged).loss == pytest.approx(results["lines"]["softmax"]["loss"])
    attnzoo.swap(stock, "flash", window=4)
    window = results["lines"]["window alone"]["loss"]
    assert quality(stock, judged).loss == pytest.approx(window)
    assert {"near branch alone", "far branch alone"} <= set(results["lines"])
    assert results["window"] == 4


@pytest.mark.parametrize("train", ["extras", "lora", "full"])
def test_softmax_is_tuned_by_the_text_too(saved, text, spec, tmp_path, train):
    """By the same loss; with no weights of its own in training it stays as it is."""
    loop = LoopConfig(batch_size=4)
    options = {**STEPS, "train": train, "weights_lr": 3e-2, "cross_entropy": 0.5, "loop": loop}
    results = recover(saved, spec, [text], tmp_path / "out", RecoverConfig(**options))
    tuned, softmax = (results["lines"][name]["loss"] for name in ("softmax tuned", "softmax"))
    if train == "extras":
        assert tuned == softmax
    else:
        assert tuned < softmax - 0.1
    stages = [stage for stage, step, _ in losses(tmp_path / "out") if step == 0]
    assert stages == ["softmax"] * (train != "extras") + ["transfer", "distil"]


def test_a_saved_model_is_judged_as_it_was_when_made(saved, text, spec, tmp_path):
    made = recover(saved, spec, [text], tmp_path / "out", config("extras"))
    found = evaluate(tmp_path / "out", [text], row_length=32, rows=2)
    assert found["window"] == made["window"]
    for name in ("softmax", "window alone", "result", "near branch alone", "far branch alone"):
        assert found["lines"][name]["loss"] == pytest.approx(made["lines"][name]["loss"])
    assert found["verdict"] == made["verdict"]
    with pytest.raises(SpecError, match="is not swapped, so there is nothing to compare"):
        evaluate(saved, [text], row_length=32)


def test_transfer_knows_its_step(model):
    attnzoo.swap(model, "linear", feature_map="hedgehog")
    transfer, seen = Transfer(model), []
    told(transfer, seen.append)(7)
    assert (transfer.step, seen) == (7, [7])


@pytest.mark.parametrize(
    ("at", "target"), [(2, "output"), (3, "attention"), (6, "output"), (9, "output")]
)
def test_a_run_that_is_stopped_goes_on_to_the_same_losses(saved, text, spec, tmp_path, at, target):
    """In transfer, which compares other keys in each step, and in distillation."""
    options = config(target=target)
    recover(saved, spec, [text], tmp_path / "whole", options)
    taken = []

    def stop(stage, step, loss):
        taken.append(loss)
        if len(taken) == at:
            raise Stop

    with pytest.raises(Stop):
        recover(saved, spec, [text], tmp_path / "out", options, tick=stop)
    recover(saved, spec, [text], tmp_path / "out", options, resume=True)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    ours, exact = weights(tmp_path / "out"), weights(tmp_path / "whole")
    assert all(torch.equal(x, ours[name]) for name, x in exact.items())


def test_a_killed_process_leaves_a_checkpoint_to_go_on_from(saved, text, tmp_path):
    arguments = [
        *("recover", str(saved), "--data", str(text), "--out", str(tmp_path / "out")),
        *("--attention", "linear", "--set", "feature_map=hedgehog", "--length", "32"),
        *("--transfer-steps", "300", "--distil-steps", "3", "--batch", "2"),
    ]
    command = [sys.executable, "-m", "attnzoo", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        checkpoint = tmp_path / "out" / "checkpoints" / "step-000100"
        while not checkpoint.is_dir():
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    done = len(losses(tmp_path / "out"))
    assert 100 <= done < 300
    finished = subprocess.run(
        [*command, "--resume"], env=env, capture_output=True, text=True, check=True
    )
    assert [step for _, step, _ in losses(tmp_path / "out")] == [*range(300), *range(3)]
    assert "softmax" in finished.stdout


def test_parts_of_a_batch_add_up(saved, text, spec, tmp_path):
    """Transfer's loss is relative to each part's own size, so only distillation is exact."""
    found = []
    for parts in (1, 2):
        out = tmp_path / str(parts)
        options = {**STEPS, "transfer_steps": 0, "repeat_share": 0.0}
        loop = LoopConfig(batch_size=4, accumulate=parts)
        recover(saved, spec, [text], out, RecoverConfig(**options, train="full", loop=loop))
        found.append([loss for *_, loss in losses(out)])
    assert found[1] == pytest.approx(found[0], rel=2e-3)


def test_two_processes_take_the_steps_of_one(saved, text, tmp_path):
    def run(out, launcher):
        command = [
            *(sys.executable, *launcher, "-m", "attnzoo", "recover", str(saved)),
            *("--data", str(text), "--out", str(out), "--attention", "performer"),
            *("--set", "window=4", "--length", "32", "--batch", "4"),
            *("--transfer-steps", "2", "--distil-steps", "4", "--train", "full"),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=200)
        return [loss for *_, loss in losses(out)]

    one = run(tmp_path / "one", [])
    two = run(
        tmp_path / "two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    )
    assert len(one) == 6
    assert two == pytest.approx(one, rel=0.05)
    assert two[2:] == pytest.approx(one[2:], rel=0.01)


def test_another_run_may_not_go_on(saved, text, spec, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"no run in .* to go on with"):
        recover(saved, spec, [text], out, config(), resume=True)
    recover(saved, spec, [text], out, config())
    with pytest.raises(CheckpointError, match="holds this run already; give --resume"):
        recover(saved, spec, [text], out, config())
    with pytest.raises(CheckpointError, match="holds another run: config was"):
        recover(saved, spec, [text], out, config("full"), resume=True)
    (out / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json' is damaged"):
        recover(saved, spec, [text], out, config(), resume=True)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    with pytest.raises(CheckpointError, match="exists and holds no run"):
        recover(saved, spec, [text], tmp_path / "used", config())


def test_a_torn_checkpoint_is_passed_over(saved, text, spec, tmp_path):
    out, taken = tmp_path / "out", []

    def stop(stage, step, loss):
        taken.append(loss)
        if len(taken) == 5:
            raise Stop

    with pytest.raises(Stop):
        recover(saved, spec, [text], out, config(), tick=stop)
    last = out / "checkpoints" / "step-000004"
    assert last.is_dir()
    last.rename(last.with_name("step-000004.partial"))
    (last.with_name("step-000004.partial") / "progress.json").unlink()
    recover(saved, spec, [text], out, config(), resume=True)
    assert len(losses(out)) == 11


def test_what_was_judged_is_not_judged_again(saved, text, spec, tmp_path, monkeypatch):
    def stop(stage, step, loss):
        if step == 3:
            raise Stop

    with pytest.raises(Stop):
        recover(saved, spec, [text], tmp_path / "out", config(), tick=stop)
    told = json.loads((tmp_path / "out" / "checkpoints" / "lines.json").read_text())
    assert set(told) == {"softmax", "raw swap", "window alone"}
    judged = []
    monkeypatch.setattr(runs, "quality", lambda *given: judged.append(1) or quality(*given))
    results = recover(saved, spec, [text], tmp_path / "out", config(), resume=True)
    new = set(results["lines"]) - {*told, "softmax tuned"}  # which is softmax's own line here
    assert len(judged) == len(new) == 3
    assert {name: results["lines"][name]["loss"] for name in told} == {
        name: line["loss"] for name, line in told.items()
    }


def test_layers_may_be_taught_in_blocks(saved, text, spec, tmp_path):
    """What a layer learns does not depend on those that learn beside it."""
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


def test_a_full_disk_leaves_the_last_checkpoint(saved, text, spec, tmp_path):
    """The limit on a file's size stands in for it: a write fails in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = tmp_path / "out"

    def fill(stage, step, loss):
        if (stage, step) == ("transfer", 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))

    try:
        with pytest.raises(CheckpointError, match=r"cannot be written .*step-000002', is whole"):
            recover(saved, spec, [text], out, config(), tick=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    recover(saved, spec, [text], out, config(), resume=True)
    recover(saved, spec, [text], tmp_path / "whole", config())
    assert losses(out) == losses(tmp_path / "whole")


def test_a_tracker_is_told(saved, text, spec, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = RecoverConfig(**STEPS, report_to="tensorboard", loop=LoopConfig(batch_size=4))
    recover(saved, spec, [text], tmp_path / "out", options)
    events = EventAccumulator(str(tmp_path / "out" / "logs" / "attnzoo")).Reload()
    for stage in ("transfer", "distil"):
        told = [event.value for event in events.Scalars(f"{stage}/loss")]
        expected = [loss for name, _, loss in losses(tmp_path / "out") if name == stage]
        assert told == pytest.approx(expected)


def test_a_control_of_another_width(saved, text, spec, tmp_path):
    options = RecoverConfig(**STEPS, control=9)
    results = recover(saved, spec, [text], tmp_path / "out", options)
    assert results["window"] == 9
    found = evaluate(tmp_path / "out", [text], row_length=32, rows=2, control=9)
    assert found["window"] == 9


def test_what_cannot_be_recovered_is_refused(saved, text, spec, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match="no file or folder"):
        recover(saved, spec, [tmp_path / "absent"], out, config())
    with pytest.raises(SpecError, match="holds no saved model"):
        recover(tmp_path / "absent", spec, [text], out, config())
    model = hf.AutoModelForCausalLM.from_pretrained(saved)
    attnzoo.swap(model, "linear")
    model.save_pretrained(tmp_path / "swapped")
    hf.AutoTokenizer.from_pretrained(saved).save_pretrained(tmp_path / "swapped")
    with pytest.raises(SpecError, match="is swapped already"):
        recover(tmp_path / "swapped", spec, [text], out, config())
    with pytest.raises(ConfigError, match="make batch_size a multiple"):
        recover(saved, spec, [text], out, config(batch_size=4, accumulate=3))
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transfer_steps": -1}, "transfer_steps must not be negative, got -1"),
        ({"lora_rank": 0}, "lora_rank must be at least 1, got 0"),
        ({"extras_lr": 0.0}, "extras_lr must be above 0"),
        ({"row_length": 4}, "row_length must be at least 8 tokens"),
        ({"cross_entropy": 1.5}, "cross_entropy is a share"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"layers_at_once": 0}, "layers_at_once must be at least 1, got 0"),
        ({"window_dropout": 2}, "window_dropout is a share"),
        ({"control": 0}, "control must be at least 1 token, got 0"),
        ({"transfer_target": "keys"}, "transfer_target must be 'output' or 'attention'"),
        ({"train": "all"}, "train must be 'extras', 'lora' or 'full', got 'all'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RecoverConfig(**options)
