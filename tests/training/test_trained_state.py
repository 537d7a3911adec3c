"""Checkpoints have trained parameters only: their size, and runs that are resumed from them."""

import json
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.training import checkpoints as checkpoints_module
from attnzoo.training import loop as loop_module
from attnzoo.training.best_state import Score
from attnzoo.training.checkpoints import BEST, FOLDER, CheckpointError, Checkpoints
from attnzoo.training.loop import Loop, LoopConfig, read_losses
from attnzoo.training.recover import RecoverConfig, recover
from attnzoo.training.trained_state import without_frozen_weights


def config(train="lora", every=None, **loop):
    loop = LoopConfig(**{"batch_size": 4, "checkpoint_every": 2, **loop})
    options = {"transfer_steps": 3, "distil_steps": 4, "row_length": 32, "judged_rows": 2}
    return RecoverConfig(**options, train=train, evaluate_every=every, loop=loop)


def losses(out):
    return [line["loss"] for line in read_losses(out)]


def test_a_state_dict_lacks_frozen_weights_and_loads_without_them(model):
    """Extras and buffers are in it; a weight that is trained must be there."""
    attnzoo.swap(model, "performer", num_features=8, window=4)
    model.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    whole = {name: x.clone() for name, x in model.state_dict().items()}
    with without_frozen_weights(model):
        state = {name: x.clone() for name, x in model.state_dict().items()}
        with torch.no_grad():
            for x in model.state_dict().values():
                x.zero_()
        model.load_state_dict(state)
        less = {name: x for name, x in state.items() if name != "model.norm.weight"}
        with pytest.raises(RuntimeError, match=r"Missing key.*model\.norm\.weight"):
            model.load_state_dict(less)
    assert set(state) == {x for x in whole if ".attnzoo." in x} | {"model.norm.weight"}
    assert any(name not in dict(model.named_parameters()) for name in state)  # features, drawn
    found = model.state_dict()
    assert all(torch.equal(found[name], whole[name]) for name in state)
    assert set(found) == set(whole)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)


def test_both_names_of_tied_weights_are_left_out():
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)).requires_grad_(False)
    with without_frozen_weights(model):
        assert not set(model.state_dict()) & {"lm_head.weight", "transformer.wte.weight"}


@pytest.mark.parametrize("every", [0, 1])
def test_a_checkpoint_of_adapters_is_three_times_as_large(
    saved, text, spec, tmp_path, interrupt, every, monkeypatch
):
    """Parameters and the two moments of AdamW; the best state is a file beside the checkpoints."""
    monkeypatch.setattr(Score, "is_better_than", lambda self, other: self.step in (1, 2))
    options = config(every=every, keep=3, checkpoint_every=1)
    interrupt(7, recover, saved, spec, [text], tmp_path / "out", options)
    folder = tmp_path / "out" / FOLDER
    for step in (5, 6):
        last = folder / f"step-{step:06d}"
        state = torch.load(last / "pytorch_model.bin", weights_only=True)
        assert {("lora_" in name) or (".attnzoo." in name) for name in state} == {True}
        adapter = sum(x.nbytes for x in state.values())
        moments = torch.load(last / "optimizer.bin", weights_only=True)["state"].values()
        total = adapter + sum(x.nbytes for part in moments for x in part.values())
        scores = last / "best-0.pt"
        assert not every or torch.load(scores, weights_only=True)["state"] is None
        assert total <= 3.01 * adapter
        named = set(json.loads((last / "progress.json").read_text())["files"])
        inside = {x.name for x in last.iterdir()} - {"progress.json"}
        best = {f"../best/{x.name}" for x in folder.glob("best/*")}
        assert named == inside | (best if step == 6 else set())
        assert len(best) == (1 if every else 0)


@pytest.mark.parametrize(
    ("train", "steps", "version"), [("extras", 2, "new"), ("full", 5, "new"), ("lora", 6, "old")]
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    saved, text, spec, tmp_path, interrupt, train, steps, version
):
    """Also from a checkpoint of an earlier version, which has all weights."""
    given, out = (saved, spec, [text]), tmp_path / "out"
    recover(*given, tmp_path / "whole", config(train))
    with pytest.MonkeyPatch.context() as patch:
        if version == "old":
            patch.setattr(Loop, "_checkpointed", lambda *_: nullcontext())
        interrupt(steps, recover, *given, out, config(train))
    recover(*given, out, config(train), resume=True)
    assert losses(out) == losses(tmp_path / "whole")
    found, expected = (
        hf.AutoModelForCausalLM.from_pretrained(x).state_dict() for x in (out, tmp_path / "whole")
    )
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_checkpoints_every_so_many_minutes(saved, text, spec, tmp_path, monkeypatch):
    """Beside those at the end of each stage."""
    now, written = [0.0], []
    write = Checkpoints.write

    def record(self, progress, save, **options):
        written.append(progress["total"])
        write(self, progress, save, **options)

    monkeypatch.setattr(Checkpoints, "write", record)
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: now[0])

    def on_step(stage, step, metrics):
        now[0] += 25.0

    options = config("extras", 0, checkpoint_every=0, checkpoint_minutes=1.0)
    recover(saved, spec, [text], tmp_path / "out", options, on_step=on_step)
    assert written == [3, 6, 7]


def save_file(folder, best=None):
    """Write a checkpoint, and the best state that it refers to."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file").write_text("state")
    if best is not None:
        (folder.parent / BEST).mkdir(exist_ok=True)
        (folder.parent / BEST / f"{best}-0.pt").write_text(best)


def write_steps(checkpoints, steps):
    for total, best in steps.items():
        progress = {"total": total, "best": best}
        checkpoints.write(progress, partial(save_file, best=best))
    checkpoints.wait()


def test_rotation_keeps_the_best_states_that_checkpoints_refer_to(tmp_path):
    made, folder = Checkpoints(tmp_path, {}, keep=2), tmp_path / FOLDER / BEST
    write_steps(made, {1: "a", 2: "a", 3: "b", 4: None})
    assert [x.name for x in folder.iterdir()] == ["b-0.pt"]
    (folder / "c-0.pt.partial").write_text("of a process that was killed")
    write_steps(made, {5: "b", 6: None})
    assert [x.name for x in folder.iterdir()] == ["b-0.pt"]
    write_steps(made, {7: None})
    assert not list(folder.iterdir())


@pytest.mark.parametrize("fault", ["changed", "missing"])
def test_a_damaged_best_state_damages_the_checkpoints_that_refer_to_it(tmp_path, fault):
    made, messages = Checkpoints(tmp_path, {}, keep=3), []
    write_steps(made, {1: "a", 2: "b"})
    file = tmp_path / FOLDER / BEST / "b-0.pt"
    file.write_text("x") if fault == "changed" else file.unlink()
    if fault == "changed":  # a later checkpoint has the hash of what was written
        made.write({"total": 3, "best": "b"}, save_file)
        made.wait()
    assert made.latest(messages.append)["total"] == 1
    assert len(messages) == (2 if fault == "changed" else 1)
    assert all(f"../best/b-0.pt is {fault}" in message for message in messages)


def test_a_checkpoint_is_hashed_while_training_goes_on(tmp_path, monkeypatch):
    event = threading.Event()
    hash_files = checkpoints_module.file_hashes

    def slow(folder):
        assert event.wait(30)
        return hash_files(folder)

    monkeypatch.setattr(checkpoints_module, "file_hashes", slow)
    made = Checkpoints(tmp_path, {})
    made.write({"total": 1}, save_file)
    assert [x.name for x in (tmp_path / FOLDER).iterdir()] == ["step-000001.partial"]
    event.set()
    made.write({"total": 2}, save_file)  # waits for the first one
    assert (tmp_path / FOLDER / "step-000001").is_dir()
    made.wait()
    assert made.latest()["total"] == 2


def test_an_error_of_the_hashing_thread_stops_the_run(tmp_path, monkeypatch):
    hash_files = checkpoints_module.file_hashes

    def full(folder):
        if folder.name == "step-000002.partial":
            raise OSError(28, "No space left on device")
        return hash_files(folder)

    monkeypatch.setattr(checkpoints_module, "file_hashes", full)
    made = Checkpoints(tmp_path, {})
    made.write({"total": 1}, save_file)
    made.write({"total": 2}, save_file)
    with pytest.raises(CheckpointError, match=r"No space left.*step-000001'\. Free disk space"):
        made.write({"total": 3}, save_file)
