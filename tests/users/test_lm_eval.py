"""lm-evaluation-harness on swapped models, in memory and by name."""

import json
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
COMMAND = "from attnzoo.cli import main; main()"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(embedded_model_path()).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(embedded_model_path())


def log_likelihoods(model, tokenizer, stories=None):
    """Return the log likelihood of every choice of the first stories, or of all."""
    harness = HFLM(model, tokenizer=tokenizer, max_length=512, device="cpu", batch_size=4)
    manager = TaskManager(
        include_path=str(ROOT / "integrations" / "lm_eval"), include_defaults=False
    )
    given = {"tasks": [TASK], "task_manager": manager, "bootstrap_iters": 0, "limit": stories}
    found = simple_evaluate(harness, **given)
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    return [pair[0] for sample in samples for pair in sample["filtered_resps"]]


def test_a_swap_in_memory(model, tokenizer, monkeypatch):
    monkeypatch.chdir(ROOT)
    expected = log_likelihoods(model, tokenizer, 2)
    assert len(expected) == 6
    attnzoo.swap(model, "flash")
    assert log_likelihoods(model, tokenizer, 2) == pytest.approx(expected, abs=1e-3)
    attnzoo.swap(model, "flash", window=2)
    assert log_likelihoods(model, tokenizer, 2) != pytest.approx(expected, abs=0.1)
    attnzoo.restore(model)


@pytest.fixture(scope="module")
def saved(model, tokenizer, tmp_path_factory):
    """A saved model under linear attention."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    attnzoo.swap(model, "linear")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    attnzoo.restore(model)
    return folder


def test_a_folder_by_name(saved, tmp_path, fresh_python, monkeypatch):
    """A process that imports attnzoo only through ``attnzoo run`` scores as this one does."""
    arguments = [
        *("run", "-m", "lm_eval", "--model", "hf", "--batch_size", "4"),
        *("--model_args", f"pretrained={saved},max_length=512,dtype=float32"),
        *("--include_path", "integrations/lm_eval", "--tasks", TASK, "--device", "cpu"),
        *("--output_path", str(tmp_path / "out"), "--log_samples", "--limit", "3"),
    ]
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = fresh_python(COMMAND, *arguments, cwd=ROOT, environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    samples.sort(key=lambda sample: sample["doc_id"])
    found = [float(pair[0]) for sample in samples for pair in sample["filtered_resps"]]
    monkeypatch.chdir(ROOT)
    swapped = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype="float32").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    assert found == pytest.approx(log_likelihoods(swapped, tokenizer, 3), abs=1e-4)
