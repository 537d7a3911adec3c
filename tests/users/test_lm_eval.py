"""lm-evaluation-harness on swapped models, in memory and by name."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import attnzoo
from attnzoo.cli import main
from attnzoo.evaluation.models import embedded_model_path

pytest.importorskip("lm_eval", reason="lm_eval is not installed; it is the extra 'eval'")
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


def log_likelihoods(model, tokenizer):
    """Return the log likelihood of every choice of every story."""
    harness = HFLM(model, tokenizer=tokenizer, max_length=512, device="cpu", batch_size=4)
    manager = TaskManager(
        include_path=str(ROOT / "integrations" / "lm_eval"), include_defaults=False
    )
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


@pytest.fixture(scope="module")
def saved(model, tokenizer, tmp_path_factory):
    """A saved model under linear attention."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    attnzoo.swap(model, "linear")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    attnzoo.restore(model)
    return folder


def test_a_folder_by_name(saved, tmp_path, fresh_python):
    """In a process that imports attnzoo only through ``attnzoo run``."""
    arguments = [
        *("run", "-m", "lm_eval", "--model", "hf"),
        *("--model_args", f"pretrained={saved},max_length=512,dtype=float32"),
        *("--include_path", "integrations/lm_eval", "--tasks", TASK, "--device", "cpu"),
        *("--output_path", str(tmp_path / "out"), "--log_samples", "--limit", "2"),
    ]
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = fresh_python(COMMAND, *arguments, cwd=ROOT, environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    accuracy = json.loads(file.read_text())["results"][TASK]["acc,none"]
    assert accuracy == pytest.approx(round(accuracy * 2) / 2, abs=1e-6)
    lines = next((tmp_path / "out").rglob("samples_*.jsonl")).read_text().splitlines()
    assert len(lines) == 2


def evaluate(monkeypatch, capsys, *arguments):
    """Return exit code, output and errors of ``attnzoo evaluate``."""
    monkeypatch.setattr("sys.argv", ["attnzoo", "evaluate", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


def test_evaluate_runs_tasks_before_and_after(saved, tokenizer, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    path = embedded_model_path()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    given = [
        saved,
        "--tasks",
        TASK,
        "--include_path",
        "integrations/lm_eval",
    ]
    given += ["--original", embedded_model_path(), "--max_length", 600, "--control", 2]
    given += ["--limit", 6, "--batch_size", 6]
    code, printed, errors = evaluate(monkeypatch, capsys, *given, "--json")
    assert code == 0, errors
    scores = json.loads(printed)["tasks"]
    assert list(scores) == ["original", "softmax", "result", "window alone"]
    assert set(scores["result"]) == {TASK}
    assert scores["original"] == scores["softmax"]
    for name, backend, options in (
        ("softmax", "softmax", {}),
        ("result", "linear", {}),
        ("window alone", "flash", {"window": 2}),
    ):
        attnzoo.swap(model, backend, **options)
        harness = HFLM(model, tokenizer=tokenizer, max_length=600, device="cpu", batch_size=6)
        manager = TaskManager(include_path="integrations/lm_eval", include_defaults=False)
        found = simple_evaluate(harness, tasks=[TASK], task_manager=manager, bootstrap_iters=0)
        assert scores[name][TASK]["acc,none"] == found["results"][TASK]["acc,none"]
    assert scores["result"] != scores["softmax"]
    git = []
    monkeypatch.setattr("subprocess.check_output", lambda command, **_: git.append(command) or b"")
    code, printed, _ = evaluate(monkeypatch, capsys, *given[:-2], "--limit", 1)
    assert (code, git) == (0, [])  # outside of a repository, git would print an error
    assert TASK in printed
    assert "window alone" in printed


@pytest.mark.parametrize("problem", [ImportError, ConnectionError])
def test_what_a_task_lacks_is_one_message(saved, monkeypatch, capsys, problem):
    def fails(*_, **__):
        raise problem("it needs wonderwords.")

    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", fails)
    given = ["--tasks", TASK, "--include-path", ROOT / "integrations" / "lm_eval"]
    code, _, errors = evaluate(monkeypatch, capsys, saved, *given)
    assert code == 2
    assert f"{TASK} cannot be loaded: it needs wonderwords." in " ".join(errors.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "evaluate needs text (--data), tasks (--tasks), or both"),
        (["--limit", 2], "limit is an option of tasks; give --tasks"),
        (["--original", embedded_model_path(), "--data", "x"], "original is a line of tasks"),
        (["--tasks", ","], "tasks names no task"),
        pytest.param(  # reads the index of all tasks of lm_eval
            ["--tasks", "niah_simple_1"],
            "Did you mean 'niah_single_1'?",
            marks=pytest.mark.exhaustive,
        ),
        (["--tasks", TASK, "--limit", 0], "limit must be above 0, got 0"),
        (
            ["--tasks", TASK, "--batch-size", "many"],
            "batch_size must be above 0, or",
        ),
        (["--tasks", TASK, "--metadata", "[1]"], "takes a JSON object, got '[1]'"),
        (["--tasks", "x", "--include-path", "nowhere"], "there is no folder 'nowhere'"),
    ],
)
def test_invalid_arguments_are_refused(saved, arguments, message, monkeypatch, capsys):
    code, _, errors = evaluate(monkeypatch, capsys, saved, *arguments)
    assert code == 2
    assert message in " ".join(errors.split())
