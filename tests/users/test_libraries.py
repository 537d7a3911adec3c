"""The commands of integrations/README.md run, one or more for each library."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import transformers

import attnzoo
from attnzoo.evaluation.models import embedded_model_path
from tests.processes import run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "integrations"
PAGE = (FOLDER / "README.md").read_text("utf-8")
COMMANDS = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()
LAUNCHERS = {"python": [], "accelerate": ["-m", "accelerate.commands.accelerate_cli"]}
OURS = "from attnzoo.cli import main; main()"
# what makes a command short, and the file that it writes, if any
SHORT = {
    "integrations/accelerate": ["--steps", "2", "--length", "32"],
    "attnzoo finetune": [
        *("--max-steps", "2", "--no-compare", "--max-length", "64"),
        *("--per-device-train-batch-size", "2"),
    ],
    "integrations/trainer": ["--steps", "2", "--length", "32"],
    "integrations/trl": ["--steps", "2"],
    "integrations/peft": ["--steps", "2"],
    "integrations/lm_eval": ["--limit", "2", "--output_path", "scores"],
    "integrations/sentence_transformers": [],
}
WRITTEN = {
    "integrations/accelerate": "looped/model.safetensors",
    "attnzoo finetune": "new/model.safetensors",
    "integrations/trainer": "trained/model.safetensors",
    "integrations/trl": "tuned/model.safetensors",
    "integrations/peft": "adapter/adapter_model.safetensors",
    "integrations/lm_eval": "scores",
}
# tests/users runs these examples with few steps too, in its own process or under torchrun
REPEATED = SHORT.keys() - {"attnzoo finetune"}


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swapped") / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded_model_path())
    attnzoo.swap(model, "linear")
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(folder)
    return folder


def test_every_command_is_known():
    assert len(COMMANDS) == len(SHORT)
    assert all(sum(name in command for command in COMMANDS) == 1 for name in SHORT)


def test_every_library_has_a_command_a_page_and_an_example():
    folders = [x for x in FOLDER.iterdir() if x.is_dir() and x.name[0] not in "._"]
    folders = [x for x in folders if x.name != "vllm"]  # a package with its own tests: make vllm
    names = {f"integrations/{folder.name}" for folder in folders}
    assert names == SHORT.keys() - {"attnzoo finetune"}
    for folder in folders:
        assert f"]({folder.name}/README.md)" in PAGE
        page = (folder / "README.md").read_text("utf-8")
        examples = [path.name for path in folder.iterdir() if path.suffix in {".py", ".yaml"}]
        assert examples
        assert all(f"]({name})" in page for name in examples), examples


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in REPEATED else [])
        for name in SHORT
    ],
)
def test_command(name, swapped, tmp_path, fresh_python):
    (command,) = (line for line in COMMANDS if name in line)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("alpha beta gamma delta. " * 200)
    (tmp_path / "integrations").symlink_to(FOLDER)
    program, *arguments = shlex.split(command, comments=True)
    arguments = [
        x.replace("SWAPPED", str(swapped)).replace("DIR", str(embedded_model_path()))
        for x in arguments
    ]
    arguments += SHORT[name]
    environment = {"PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    if program == "attnzoo":
        given = {"cwd": tmp_path, "path": (ROOT,), "environment": environment}
        done = fresh_python(OURS, *arguments, **given)
    else:
        command = [sys.executable, *LAUNCHERS[program], *arguments]
        done = run(command, cwd=tmp_path, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    if name in WRITTEN:
        assert (tmp_path / WRITTEN[name]).exists(), done.stdout[-3000:]
