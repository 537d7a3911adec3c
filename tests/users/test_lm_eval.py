"""lm-evaluation-harness on swapped models, in memory and by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import attnzoo
from attnzoo.evaluation.models import embedded_model_path

pytest.importorskip("lm_eval", reason="lm_eval is not installed; it is in the extra 'dev'")
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

ROOT = Path(__file__).resolve().parents[2]
TASK = "last_word"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(embedded_model_path()).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(embedded_model_path())


def log_likelihoods(model, tokenizer):
    """Return the log likelihood of every choice of every story."""
    harness = HFLM(model, tokenizer=tokenizer, max_length=512, device="cpu", batch_size=4)
    manager = TaskManager(include_path=str(ROOT / "examples" / "lm_eval"), include_defaults=False)
    found = simple_evaluate(harness, tasks=[TASK], task_manager=manager, bootstrap_iters=0)
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    return [pair[0] for sample in samples for pair in sample["filtered_resps"]]


def test_a_swap_in_memory(model, tokenizer, monkeypatch):
    monkeypatch.chdir(ROOT)
    expected = log_likelihoods(model, tokenizer)
    assert len(expected) == 18
    attnzoo.swap(model, "flash")
    assert log_likelihoods(model, tokenizer) == pytest.approx(expected, abs=1e-3)
    attnzoo.swap(model, "flash", window=2)
    assert log_likelihoods(model, tokenizer) != pytest.approx(expected, abs=0.1)
    attnzoo.restore(model)


def test_a_folder_by_name(model, tokenizer, tmp_path):
    """In a process that imports attnzoo only through ``attnzoo run``."""
    attnzoo.swap(model, "linear")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    command = [
        *(sys.executable, "-m", "attnzoo", "run", "-m", "lm_eval", "--model", "hf"),
        *("--model_args", f"pretrained={tmp_path / 'model'},max_length=512,dtype=float32"),
        *("--include_path", "examples/lm_eval", "--tasks", TASK, "--device", "cpu"),
        *("--output_path", str(tmp_path / "out"), "--log_samples", "--limit", "2"),
    ]
    env = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    accuracy = json.loads(file.read_text())["results"][TASK]["acc,none"]
    assert accuracy == pytest.approx(round(accuracy * 2) / 2, abs=1e-6)
    lines = next((tmp_path / "out").rglob("samples_*.jsonl")).read_text().splitlines()
    assert len(lines) == 2
