"""The model card of a run, and its upload to a Hub that is a folder."""

import json
import shutil
import sys
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest
import transformers as hf
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError

import attnzoo
from attnzoo.cli import main
from attnzoo.hf.saving.card import hub_id
from attnzoo.training import recover
from attnzoo.training.report import about_run

CARD = "---\nlicense: mit\nlanguage:\n- en\ntags: [other]\n---\n# Base\n"


class FolderHub:
    """The calls of ``HfApi`` on a folder in place of the Hub."""

    def __init__(self, root):
        self.root, self.calls = root, []

    def create_repo(self, name, *, private, exist_ok):
        assert exist_ok
        self.calls.append(("create", name, private))
        name = name if "/" in name else f"me/{name}"
        (self.root / name).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, repo_id, folder_path, ignore_patterns):
        self.calls.append(("upload", repo_id))
        for file in folder_path.rglob("*"):
            name = file.relative_to(folder_path)
            ignored = any(fnmatch(str(name), pattern) for pattern in ignore_patterns)
            if file.is_file() and not ignored:
                target = self.root / repo_id / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        return SimpleNamespace(commit_url=f"hub/{repo_id}/commit")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = FolderHub(tmp_path / "hub")
    monkeypatch.setattr(recover, "HfApi", lambda: hub)
    return hub


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs a command; returns exit code, output and errors."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def command(saved, text, tmp_path):
    """The arguments of a short run from a snapshot in the cache of the Hub."""
    base = tmp_path / "models--org--base" / "snapshots" / "0a1b"
    shutil.copytree(saved, base)
    (base / "README.md").write_text(CARD)
    return [
        *("recover", base, "--data", text, "--attention", "gated_linear:window=4"),
        *("--max-length", 32, "--per-device-train-batch-size", 4, "--transfer-steps", 2),
        *("--max-steps", 3, "--disable-tqdm", "True"),
        *("--train", "extras", "--eval-strategy", "no", "--output-dir", tmp_path / "swapped"),
    ]


def test_a_failed_upload_is_repeated_and_its_card_loads_the_model(
    run, hub, command, saved, text, tmp_path, monkeypatch
):
    def fail(**_):
        raise OSError("Connection reset")

    command += ["--push-to-hub", "--hub-private-repo", "True"]
    with monkeypatch.context() as patch:
        patch.setattr(hub, "upload_folder", fail)
        code, _, err = run(*command)
    assert code == 2
    assert "Connection reset" in err
    assert "--resume-from-checkpoint True" in err
    hub.calls.clear()
    code, out, err = run(*command, "--resume-from-checkpoint", "True")
    assert code == 0, err
    assert "The run is finished" in out
    assert "Hub:    hub/me/swapped/commit" in out
    assert hub.calls == [("create", "swapped", True), ("upload", "me/swapped")]
    folder = hub.root / "me" / "swapped"
    uploaded = {str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file()}
    assert {"config.json", "model.safetensors", "README.md", "recovery.json"} <= uploaded
    assert not uploaded & {"run.json", "checkpoints/run.json"}
    card = ModelCard((folder / "README.md").read_text())
    assert card.data.base_model == "org/base"
    assert (card.data.license, card.data.language) == ("mit", ["en"])
    assert (card.data.library_name, card.data.tags) == ("transformers", ["attnzoo"])
    about = json.loads((folder / "recovery.json").read_text())["about"]
    expected = f"in 5 steps (2 of transfer, 3 of distil) on 4 of {about['rows']} rows of 32 tokens"
    assert expected in card.text
    assert f"of attnzoo {attnzoo.__version__}" in card.text
    assert f"tokens from {text.name}. Another {about['held_out_rows']} rows are held" in card.text
    assert "pip install attnzoo" in card.text
    assert str(tmp_path) not in card.content + (folder / "recovery.json").read_text()
    monkeypatch.chdir(hub.root)  # where the id is a folder
    code = card.text.split("```python\n")[1].split("```")[0]
    assert 'from_pretrained("me/swapped")' in code
    names: dict = {}
    exec(code, names)
    assert names["model"].config.attnzoo["backend"] == "gated_linear"


def test_a_missing_login_is_an_error_before_training(run, hub, command, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise LocalTokenNotFoundError("Token is required, but no token found.")

    monkeypatch.setattr(hub, "create_repo", refuse)
    code, _, err = run(*command, "--push-to-hub")
    assert code == 2
    assert "cannot be written on the Hub: Token is required, but no token found.. Log in" in err
    assert not (tmp_path / "swapped").exists()


def test_what_a_card_says_of_local_files_and_data_sets(saved, text, tmp_path):
    from pathlib import Path

    data = [text, Path("org/corpus:english")]
    args = SimpleNamespace(
        **{"max_length": 8, "train_batch_size": 2, "gradient_accumulation_steps": 3},
        **{"world_size": 4, "cp_size": 2},
    )
    history = [{"step": 1}, {"step": 5}]
    run = SimpleNamespace(
        **{"path": saved, "data": data, "args": args, "rows": [0] * 7, "held_out": [0]},
        stages={"transfer": history, "softmax": history, "distil": []},
        folder=SimpleNamespace(out=tmp_path / "x"),
    )
    about = about_run(run)
    assert (about["batch"], about["steps"], about["name"]) == (12, {"transfer": 5}, "x")
    assert about["data"] == [text.name, "org/corpus:english"]
    assert about["datasets"] == ["org/corpus"]
    assert about["base_model"] is None
    assert about["base_name"] == saved.name
    assert hub_id(Path("cache/models--a--b--c/snapshots/1")) == "a/b--c"
    assert hf.__version__
