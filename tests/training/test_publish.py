"""The model card of a run."""

import shutil
import sys

import pytest
from huggingface_hub import ModelCard

import attnzoo
from attnzoo.cli import main

CARD = "---\nlicense: mit\nlanguage:\n- en\ntags: [other]\n---\n# Base\n"


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


def test_the_card_of_a_run_loads_its_model(run, command, text, tmp_path, monkeypatch):
    code, _, err = run(*command, "--hub-model-id", "me/swapped")
    assert code == 0, err
    folder = tmp_path / "hub" / "me" / "swapped"  # where `hf upload` puts it
    shutil.copytree(tmp_path / "swapped", folder)
    card = ModelCard((folder / "README.md").read_text())
    assert card.data.base_model == "org/base"
    assert (card.data.license, card.data.language) == ("mit", ["en"])
    assert (card.data.library_name, card.data.tags) == ("transformers", ["attnzoo"])
    assert "in 5 steps (2 of transfer, 3 of distil) with 4 rows a step, of " in card.text
    assert f"of attnzoo {attnzoo.__version__}" in card.text
    assert f"rows of 32 tokens from {text.name}. Of another " in card.text
    assert "pip install attnzoo" in card.text
    assert str(tmp_path) not in card.content + (folder / "recovery.json").read_text()
    monkeypatch.chdir(tmp_path / "hub")  # where the id is a folder
    code = card.text.split("```python\n")[1].split("```")[0]
    assert 'from_pretrained("me/swapped")' in code
    names: dict = {}
    exec(code, names)
    assert names["model"].config.attnzoo["backend"] == "gated_linear"
