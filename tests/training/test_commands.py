"""The training commands: interruption, output paths, names with brackets."""

import json
import sys

import pytest
import torch

from attnzoo.cli import main
from attnzoo.commands import terminal
from attnzoo.compare import maps
from attnzoo.training import data as data_module
from attnzoo.training import plan
from attnzoo.training.trainer import StageTrainer


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


def test_an_interrupted_run_is_resumed(attnzoo, saved, text, tmp_path, monkeypatch):
    command = ["recover", saved, "--data", text, "--attention", "linear:feature_map=hedgehog"]
    command += ["--max-length", 32, "--per-device-train-batch-size", 4, "--transfer-steps", 4]
    command += ["--max-steps", 0, "--train", "extras", "--save-steps", 1, "--disable-tqdm", "1"]
    command += ["--output-dir", tmp_path / "a run"]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    calls, step = iter(range(100)), StageTrainer.training_step
    with monkeypatch.context() as patch:
        patch.setattr(
            StageTrainer,
            "training_step",
            lambda *given: interrupted() if next(calls) == 2 else step(*given),
        )
        attnzoo(*command)
    code, _, err = attnzoo(*command)
    assert (code, "go on with --resume-from-checkpoint True" in err) == (2, True)
    code, out, _ = attnzoo(*command, "--resume-from-checkpoint", "True")
    assert code == 0
    assert "raw swap" in out
    code, again, _ = attnzoo(*command, "--resume-from-checkpoint", "True")
    assert code == 0
    assert "The run is finished" in again
    assert out.splitlines()[-8:] == again.splitlines()[-8:]


def test_outputs_are_checked_before_anything_is_measured(
    attnzoo, saved, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(data_module, "load_rows", None)
    monkeypatch.setattr(plan, "make_plan", None)
    monkeypatch.setattr(maps, "make_maps", None)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "maps.json").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    below = tmp_path / "file" / "below"
    data = ["--data", text]
    for given, message in (
        (["plan", saved, *data, "--output-file", tmp_path / "file"], "exists; give --overwrite"),
        (["plan", saved, *data, "--output-file", tmp_path], "is a folder; give a file"),
        (["plan", saved, *data, "--output-file", tmp_path / "link"], "is a link to"),
        (["plan", saved, *data, "--output-file", below, "--overwrite"], "cannot be written"),
        (["inspect", "--output-dir", tmp_path / "maps"], "exists; give --overwrite"),
        (["inspect", "--output-dir", tmp_path / "link"], "is a link to"),
        (["inspect", "--output-dir", below], "cannot be written"),
        (["compare", "--output-dir", below], "cannot be written"),
        (["demo", "--output-dir", below], "cannot be written"),
        (["swap", saved, "--attention", "flash", "--output-dir", below], "cannot be written"),
        (["tasks", "--output-dir", below], "cannot be written"),
    ):
        code, _, err = attnzoo(*given)
        assert code == 2, given
        assert message in err, given
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "maps" / "maps.json").read_text() == "mine"


def test_brackets_are_printed_as_they_are(attnzoo, text, tmp_path):
    """Rich reads [red] and [/x] as markup. A plan calls the embedded model by its name."""
    out = tmp_path / "[red][/x]" / "plan.json"
    given = ["plan", "embedded", "--data", text, "--max-length", 32, "--rows", 1]
    given += ["--candidate", "longformer:window=4"]
    code, printed, _ = attnzoo(*given, "--output-file", out)
    assert code == 0
    assert f"Plan:   {out}" in printed
    assert f"Next:   attnzoo recover embedded --plan '{out}' ..." in printed
    code, printed, _ = attnzoo(*given)
    assert code == 0
    assert "Nothing was written" in printed
    code, _, err = attnzoo("describe", "[red][/x]")
    assert code == 2
    assert "'[red][/x]'" in err


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
