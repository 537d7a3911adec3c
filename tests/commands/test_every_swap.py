"""Every default swap, and every option in the pages' examples, through every command.

Each call runs, or ends with a reason before it trains or measures for long.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from attnzoo.cli import main
from attnzoo.compare import run as compare_run
from attnzoo.compare.cases import default_specs
from attnzoo.compare.workers import OK, REFUSED, Workers
from attnzoo.errors import AttnzooError
from attnzoo.evaluation import generation
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.report import page
from attnzoo.spec import format_backend
from attnzoo.training import recovery
from attnzoo.training.plan import preset_candidates

ROOT = Path(__file__).parents[2]
COMMANDS = (
    *("memory", "plan", "recover", "finetune"),
    *("evaluate", "compare", "heads", "convert"),
)
GIVEN = re.compile(r"--(?:attention|candidate) ([\w.:=,]+)")


def examples():
    """Return the attentions with options in commands of README.md and docs, by their texts."""
    found = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text().replace("\\\n", " ")
        for attention in GIVEN.findall(text):
            names = [attention] if ":" in attention else attention.split(",")
            found |= dict.fromkeys(names if attention != "all" else ())
    return list(found)


def swaps():
    """Return the swaps as ``--attention`` takes them: presets of every backend, and examples."""
    entries = [spec.default for spec in default_specs(None)]
    presets = [format_backend(entry.backend, entry.options) for entry in entries]
    return list(dict.fromkeys([*presets, *preset_candidates(), *examples()]))


SWAPS = swaps()
BACKENDS = {swap.partition(":")[0]: swap for swap in reversed(SWAPS)}  # the first of each
BACKENDS["flash"] = "flash:window=32"  # which a stock class holds
ROTATED = {  # each command with another backend; the exhaustive tests have all pairs
    "block_sparse": "compare",
    "delta": "finetune",
    "flash": "convert",
    "gated_linear": "evaluate",
    "linear": "heads",
    "linformer": "plan",
    "reformer": "recover",
    "softmax": "memory",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model in bfloat16, with the embedded model's tokenizer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = hf.LlamaConfig(**sizes, **ids, **heads, max_position_embeddings=300)
    path = tmp_path_factory.mktemp("model")
    hf.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    hf.AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} has {i * i % 97} in it, and {i} more\n" for i in range(700)))
    return path


def in_this_process(self, function, *arguments, device="cpu"):
    """Run a case of a comparison; an error that is no refusal stops the test."""
    try:
        return {"status": OK, **function(*arguments)}
    except AttnzooError as error:
        return {"status": REFUSED, "reason": str(error)}


@pytest.fixture
def run(monkeypatch, capfd):
    """Run a command in this process; return its exit code and the forward passes on real data."""
    passes = []
    forward = hf.LlamaForCausalLM.forward

    def counted(self, *args, **kwargs):
        passes.append(type(self.lm_head.weight.data) is torch.Tensor)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(hf.LlamaForCausalLM, "forward", counted)
    for owner, name, value in (
        (Workers, "run", in_this_process),
        (page, "can_draw", lambda: False),
        (generation, "NEW_TOKENS", 4),
        (recovery, "JUDGED", 2),
        (compare_run, "free_memory", lambda: 0),
    ):
        monkeypatch.setattr(owner, name, value)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, arguments)])
        passes.clear()
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, sum(passes), capfd.readouterr()

    return run


def arguments(command, swap, model, swapped, text, out):
    """Return a short call of a command."""
    rows = ("--data", text, "--max-length", 64)
    train = ("--attention", swap, "--data", text, "--max-length", 64, "--output-dir", out)
    train += ("--per-device-train-batch-size", 2, "--max-steps", 1)
    return {
        "memory": (model, "--attention", swap, "--max-length", 64),
        "plan": (
            model,
            "--candidate",
            swap,
            *rows,
            "--rows",
            2,
            "--output-file",
            out / "plan.json",
        ),
        "recover": (model, *train, "--transfer-steps", 1),
        "finetune": (model, *train),
        "evaluate": (swapped, *rows, "--rows", 2),
        "compare": (
            *(model, "--attention", swap, "--lengths", 64, "--tokens", 64, "--data", text),
            *("--max-length", 64, "--level", "model", "--min-run-time", 0.01, "--output-dir", out),
        ),
        "heads": (swapped, "--data", text, "--rows", 1, "--max-length", 32, "--output-dir", out),
        "convert": (swapped, "--to", "granite_swa", "--output-dir", out),
    }[command]


def call(run, command, swap, model, text, tmp_path):
    swapped = tmp_path / "swapped"
    if command in ("evaluate", "heads", "convert"):
        code, _, said = run("swap", model, "--attention", swap, "--output-dir", swapped)
        assert code == 0, said
    code, passes, said = run(
        command, *arguments(command, swap, model, swapped, text, tmp_path / "out")
    )
    if code:
        assert code == 2
        assert len(said.err.strip()) > 40, said
        assert passes <= 8, f"it ran the model {passes} times before it refused"
    return code, said


@pytest.mark.parametrize("backend", ROTATED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_command_runs(backend, run, model, text, tmp_path):
    command = ROTATED[backend]
    code, said = call(run, command, BACKENDS[backend], model, text, tmp_path)
    assert code == 0 or command == "plan", said


def test_examples_have_options_and_all_commands_are_called():
    assert "block_sparse:score=indexer,block_size=1,top_k=50,window=16,num_sinks=0" in SWAPS
    assert "performer:num_features=256,window=64" in SWAPS
    assert set(ROTATED.values()) == set(COMMANDS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_swap_in_every_command(swap, command, run, model, text, tmp_path):
    code, said = call(run, command, swap, model, text, tmp_path)
    assert code == 0 or command in ("plan", "heads", "convert"), said
