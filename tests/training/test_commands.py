"""The training commands: interruption, output paths, names with brackets."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from attnzoo.cli import main
from attnzoo.commands import terminal
from attnzoo.compare import maps
from attnzoo.errors import ConfigError
from attnzoo.training import loading, plan, recover
from attnzoo.training.sharding import make_accelerator
from attnzoo.training.train_config import TrainConfig


@pytest.fixture
def attnzoo(monkeypatch, capsys):
    """A function that calls the command line; returns exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, arguments)])
        monkeypatch.setattr(terminal.console, "width", 200)
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


def test_an_interrupted_run_names_the_command_that_resumes_it(
    attnzoo, saved, text, tmp_path, monkeypatch
):
    """Until the run has a folder, there is nothing to resume."""
    command = ["recover", saved, "--data", text, "--attention", "linear", "--length", 32]
    command += ["--set", "feature_map=hedgehog"]
    command += ["--batch", 4, "--transfer-steps", 4, "--distil-steps", 0, "--train", "extras"]
    command += ["--checkpoint-every", 1, "--out", tmp_path / "a run"]
    real = recover._transfer

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recover, "is_encoder", interrupted)
        code, _, err = attnzoo(*command)
        assert (code, "nothing was written" in err) == (130, True)
    calls = iter(range(100))
    on_step = "attnzoo.training.progress.TrainingProgress.on_step"
    with monkeypatch.context() as patch:
        patch.setattr(on_step, lambda *_: interrupted() if next(calls) == 2 else None)
        code, _, err = attnzoo(*command)
    expected = f"attnzoo {' '.join(map(str, command[:-1]))} '{tmp_path}/a run' --resume"
    assert (code, err.splitlines()[-1]) == (130, expected)
    steps = {path.name for path in (tmp_path / "a run" / "checkpoints").glob("step-*")}
    assert steps == {"step-000001", "step-000002"}
    assert recover._transfer is real
    code, out, _ = attnzoo(*command, "--resume")
    assert code == 0
    assert "raw swap" in out
    code, again, _ = attnzoo(*command, "--resume")
    assert code == 0
    assert "The run is finished" in again
    assert out.splitlines()[-8:] == again.splitlines()[-8:]


def test_outputs_are_checked_before_anything_is_measured(
    attnzoo, saved, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(loading, "load_rows", None)
    monkeypatch.setattr(plan, "make_plan", None)
    monkeypatch.setattr(maps, "make_maps", None)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "maps.json").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    below = tmp_path / "file" / "below"
    data = ["--data", text]
    for arguments, message in (
        (["plan", saved, *data, "--out", tmp_path / "file"], "exists; give --overwrite"),
        (["plan", saved, *data, "--out", tmp_path], "is a folder; give --out a file"),
        (["plan", saved, *data, "--out", tmp_path / "link"], "is a link to"),
        (["plan", saved, *data, "--out", below, "--overwrite"], "cannot be written"),
        (["inspect", "--out", tmp_path / "maps"], "exists; give --overwrite"),
        (["inspect", "--out", tmp_path / "link"], "is a link to"),
        (["inspect", "--out", below], "cannot be written"),
        (["compare", "--out", below], "cannot be written"),
        (["demo", "--out", below], "cannot be written"),
        (["swap", saved, "--attention", "flash", "--out", below], "cannot be written"),
        (["tasks", "--task", "mqar", "--out", below], "cannot be written"),
    ):
        code, _, err = attnzoo(*arguments)
        assert code == 2, arguments
        assert message in err, arguments
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "maps" / "maps.json").read_text() == "mine"


def test_a_plan_names_the_embedded_model(attnzoo, text, tmp_path):
    out = tmp_path / "plan.json"
    given = ["plan", "embedded", "--data", text, "--length", 32, "--rows", 1, "--out", out]
    code, printed, _ = attnzoo(*given, "--candidate", "longformer:window=4")
    assert code == 0
    assert f"Next:   attnzoo recover embedded --plan {out} ..." in printed


def test_brackets_are_printed_as_they_are(attnzoo, saved, text, tmp_path):
    """Rich reads [red] and [/x] as markup."""
    out = tmp_path / "[red][/x]" / "plan.json"
    given = ["plan", saved, "--data", text, "--length", 32, "--rows", 1, "--out", out]
    code, printed, _ = attnzoo(*given, "--candidate", "longformer:window=4")
    assert code == 0
    assert f"Plan:   {out}" in printed
    code, printed, _ = attnzoo(*given, "--candidate", "longformer:window=4", "--overwrite")
    assert code == 0
    code, _, err = attnzoo("describe", "[red][/x]")
    assert code == 2
    assert "'[red][/x]'" in err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", r"must be a tracker of Accelerate \(.*tensorboard.*\), got 'nope'"),
        ("tensorbord", "Did you mean 'tensorboard'"),
        ("dvclive", "needs the package dvclive, which is not installed"),
    ],
)
def test_an_unknown_tracker_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(report_to=name)
    assert TrainConfig(report_to="tensorboard").report_to == "tensorboard"


def test_launched_processes_that_accelerate_does_not_see_are_refused(monkeypatch, tmp_path):
    """Each would train alone in the same folder."""
    Accelerator()  # this process is alone from now on
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes are launched, but Accelerate sees 1"):
        make_accelerator(0, tracker=None, logs=tmp_path)


def test_processes_of_one_machine_print_one_error(attnzoo, monkeypatch):
    monkeypatch.setattr("attnzoo.cli.SECONDS_BEFORE_EXIT", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert attnzoo("describe", "nowhere") == (2, "", "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "no config.json" in attnzoo("describe", "nowhere")[2]


@pytest.mark.parametrize(("command", "is_kept"), [("list", False), ("describe", True)])
def test_a_command_that_ends_well_destroys_the_process_group(attnzoo, command, is_kept):
    """After an error other processes may be within an operation, for which it would wait."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert attnzoo(command, *(["nowhere"] if is_kept else []))[0] == (2 if is_kept else 0)
        assert dist.is_initialized() == is_kept
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_missing_tokenizer_is_an_error(attnzoo, text, tmp_path, saved):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_bytes((saved / name).read_bytes())
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    code, _, err = attnzoo("plan", tmp_path / "model", "--data", text)
    assert code == 2
    assert "The tokenizer in" in err
    assert json.loads((saved / "config.json").read_text())
    assert torch.get_default_dtype() == torch.float32
