"""The commands of docs/libraries.md run: Trainer, SFTTrainer, PEFT, Accelerate and lm_eval."""

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
PAGE = (ROOT / "docs" / "libraries.md").read_text("utf-8")
COMMANDS = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()
MODULES = {
    "python": [],
    "attnzoo": ["-m", "attnzoo"],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
}
# what makes a command short, and the file that it writes
SHORT = {
    "trainer_finetune.py": ["--steps", "2", "--length", "32"],
    "trl_sft.py": ["--steps", "2"],
    "peft_lora.py": ["--steps", "2"],
    "accelerate launch": [
        *("--steps", "2", "--no-compare", "--length", "64", "--batch", "2"),
    ],
    "lm_eval": ["--limit", "2", "--output_path", "scores"],
}
WRITTEN = {
    "trainer_finetune.py": "trained/model.safetensors",
    "trl_sft.py": "tuned/model.safetensors",
    "peft_lora.py": "adapter/adapter_model.safetensors",
    "accelerate launch": "new/model.safetensors",
    "lm_eval": "scores",
}
# tests/users runs these examples with few steps too, in its own process
REPEATED = {"trainer_finetune.py", "trl_sft.py", "peft_lora.py", "lm_eval"}


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in REPEATED else [])
        for name in SHORT
    ],
)
def test_command(name, swapped, tmp_path):
    (command,) = (line for line in COMMANDS if name in line)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("alpha beta gamma delta. " * 200)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program, *arguments = shlex.split(command, comments=True)
    arguments = [
        x.replace("SWAPPED", str(swapped)).replace("DIR", str(embedded_model_path()))
        for x in arguments
    ]
    done = run(
        [sys.executable, *MODULES[program], *arguments, *SHORT[name]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / WRITTEN[name]).exists(), done.stdout[-3000:]
