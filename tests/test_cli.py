import errno
import json
import shutil
import sys
from inspect import signature

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from attnzoo import AttentionSpec
from attnzoo.cli import app, main
from attnzoo.commands import models, terminal
from attnzoo.commands.option_docs import backend_docs
from attnzoo.errors import ConfigError
from attnzoo.registry import available_backends
from tests.processes import run as run_process


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Llama with its tokenizer, on disk."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=384,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    ByT5Tokenizer().save_pretrained(path)
    return path


def run(monkeypatch, capsys, *arguments):
    """Call the command line in this process; returns exit code, output and errors."""
    monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, arguments)])
    monkeypatch.setattr(terminal.console, "width", 200)
    monkeypatch.setattr(terminal.problems, "width", 200)
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_list(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "list", "--json")
    assert code == 0
    rows = json.loads(out)
    assert [row["name"] for row in rows] == available_backends()
    assert all(row["summary"] for row in rows)
    assert {row["name"] for row in rows if row["recurrent"]} >= {"linear", "longformer"}
    assert not next(row["recurrent"] for row in rows if row["name"] == "reformer")


def test_only_values_that_a_backend_accepts_are_listed():
    listed = backend_docs("delta")["choices"]
    for option, values in listed.items():
        for value in values:
            AttentionSpec("delta", **{option: value})
    for option, value in (("gate", "mlstm"), ("feature_map", "cosine")):
        assert value not in listed[option]
        with pytest.raises(ConfigError):
            AttentionSpec("delta", **{option: value})
    listed = backend_docs("gated_linear")["choices"]
    assert {"mlstm", "gla"} <= listed["gate"].keys()
    assert "cosine" in listed["feature_map"]  # with normalize=False


def test_describe(monkeypatch, capsys, saved):
    code, out, _ = run(monkeypatch, capsys, "describe", saved)
    assert code == 0
    assert "model.layers.2.self_attn" in out
    assert "not swapped" in out


def test_swap_writes_a_model_that_loads(monkeypatch, capsys, saved, tmp_path):
    out = tmp_path / "swapped"
    code, text, _ = run(
        monkeypatch,
        capsys,
        *("swap", saved, "--attention", "linear:feature_map=relu"),
        *("--layers", "0-1=flash", "--output-dir", out),
    )
    assert code == 0
    assert "feature_map=relu" in text
    config = json.loads((out / "config.json").read_text())
    expected = AttentionSpec("linear", feature_map="relu", layers={"0-1": "flash"})
    assert AttentionSpec.from_dict(config["attnzoo"]) == expected
    model = AutoModelForCausalLM.from_pretrained(out)
    names = [layer.self_attn.attnzoo.name for layer in model.model.layers]
    assert names == ["flash", "flash", "linear"]
    assert (out / "tokenizer_config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "linaer"], "Did you mean 'linear'"),
        (["--attention", "linear:feature_mop=relu"], "Did you mean 'feature_map'"),
        (["--attention", "linear:feature_map"], "--attention takes NAME:OPTION=VALUE"),
        (["--attention", "linear", "--layers", "7=flash"], "layer 7"),
        (["--attention", "linear", "--layers", "1-0=flash"], "are invalid"),
        (["--attention", "flash:window=0"], "at least 1"),
        (["--attention", "linear:feature_map=this:square"], "No feature map is called"),
    ],
)
def test_mistakes_are_one_message_and_write_nothing(
    monkeypatch, capsys, saved, tmp_path, arguments, message
):
    out = tmp_path / "out"
    code, _, err = run(monkeypatch, capsys, "swap", saved, *arguments, "--output-dir", out)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not out.exists()
    assert "this" not in sys.modules


def test_truncated_weights_write_nothing(monkeypatch, capsys, saved, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in saved.iterdir():
        data = file.read_bytes()
        cut = len(data) // 2 if file.suffix == ".safetensors" else len(data)
        (broken / file.name).write_bytes(data[:cut])
    out = tmp_path / "out"
    code, _, err = run(
        monkeypatch, capsys, "swap", broken, "--attention", "flash", "--output-dir", out
    )
    assert code == 2
    assert "truncated" in err
    assert not out.exists()


def test_an_existing_folder_is_kept(monkeypatch, capsys, saved, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    code, _, err = run(
        monkeypatch, capsys, "swap", saved, "--attention", "flash", "--output-dir", tmp_path
    )
    assert code == 2
    assert "not empty" in err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_no_model_there(monkeypatch, capsys, tmp_path):
    code, _, err = run(monkeypatch, capsys, "describe", tmp_path)
    assert code == 2
    assert "there is no config.json" in err


def test_help_is_quick():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom attnzoo.cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0 and 'demo' in result.output\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers')))"
    )
    run_process([sys.executable, "-c", code], check=True)


def test_tables_are_available_as_json(monkeypatch, capsys, saved, tmp_path):
    swapped, maps = tmp_path / "swapped", tmp_path / "maps"
    source = tmp_path / "text.txt"
    source.write_text("one says to one " * 40)
    code, out, _ = run(
        monkeypatch,
        capsys,
        "swap",
        saved,
        "--attention",
        "linear",
        "--output-dir",
        swapped,
        "--json",
    )
    assert (code, {layer["backend"] for layer in json.loads(out)}) == (0, {"linear"})
    code, out, _ = run(monkeypatch, capsys, "describe", swapped, "--json")
    layers = json.loads(out)
    assert (code, [layer["layer"] for layer in layers]) == (0, [0, 1, 2])
    assert layers[0]["name"] == "model.layers.0.self_attn"
    inspected = (
        "inspect",
        saved,
        "--data",
        source,
        "--max-length",
        24,
        "--output-dir",
        maps,
        "--json",
    )
    code, out, _ = run(monkeypatch, capsys, *inspected)
    assert (code, len(json.loads(out)["heads"])) == (0, 4)


WITHOUT_TABLE = {"run", "autoload", "convert"}
WITH_FILE = {"plan", "recover", "finetune"}  # plan.json, results.json


def test_every_command_with_a_table_takes_json():
    commands = {c.name: c.callback for c in app.registered_commands}
    taking = {name for name, call in commands.items() if "as_json" in signature(call).parameters}
    assert taking == commands.keys() - WITHOUT_TABLE - WITH_FILE


def test_names_are_whole_in_80_columns(monkeypatch, capsys):
    from rich.console import Console

    for arguments in (("list",), ("list", "delta"), ("describe", "embedded")):
        monkeypatch.setattr(sys, "argv", ["attnzoo", *arguments])
        screen = Console(width=80, force_terminal=True, color_system=None)
        monkeypatch.setattr(models, "console", screen)
        with pytest.raises(SystemExit):
            main()
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        names = {
            ("list",): {"block_sparse", "gated_linear", "feature_map=elu+1,"},
            ("list", "delta"): set(backend_docs("delta")["options"]),
            ("describe", "embedded"): {"model.layers.3.self_attn", "backend"},
        }[arguments]
        assert names <= set(out.split())


def test_commands_are_the_documented_ones():
    names = {c.name or c.callback.__name__ for c in app.registered_commands}
    models = {"list", "describe", "swap", "convert"}
    training = {"plan", "recover", "finetune", "evaluate"}
    measuring = {"compare", "demo", "tasks", "inspect", "memory", "heads"}
    assert names == models | training | {"run", "autoload", "doctor"} | measuring


RENAMED = {"--length", "--column", "--out", "--text", "--set", "--batch", "--steps", "--optimizer"}


def test_options_have_one_name_in_all_commands():
    """That of transformers and TRL, where they have the option; `_` is read for `-`."""
    group = typer.main.get_command(app)
    commands = group.commands
    found = [(name, x) for name, c in commands.items() for p in c.params for x in p.opts]
    assert len(found) > 60
    assert not [(name, x) for name, x in found if x in RENAMED or (x[0] == "-" and "_" in x)]
    parent = group.make_context("attnzoo", ["memory"])
    given = commands["memory"].make_context("memory", ["--max_length", "2k"], parent=parent)
    assert given.params["max_length"] == "2k"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"{name} says to {name} " * 40)
    return folder


def test_plan_recover_evaluate(saved, text, tmp_path, monkeypatch, capsys):
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    data = ["--data", text, "--max-length", 48]
    near, far = "longformer:window=4", "linear:feature_map=hedgehog,window=8"
    given = ["plan", saved, *data, "--rows", 2, "--candidate", near, "--candidate", far]
    code, printed, _ = run(monkeypatch, capsys, *given, "--keep-softmax", 1, "--output-file", plan)
    assert f"Next:   attnzoo recover {saved} --plan {plan} ..." in printed
    data_of_plan = json.loads(plan.read_text())
    assert data_of_plan["spec"]["backend"] == "flash"
    assert len(data_of_plan["chosen"]) == 2  # of three layers
    steps = ["--transfer-steps", 1, "--max-steps", 1, "--per-device-train-batch-size", 2]
    steps += ["--transfer-target", "attention", "--extras-learning-rate", 0.01]
    given = ["recover", saved, "--data", text, "--max-length", 48, "--output-dir", out]
    code, printed, _ = run(monkeypatch, capsys, *given, "--plan", plan, *steps)
    assert "raw swap" in printed
    code, printed, _ = run(monkeypatch, capsys, "evaluate", out, *data)
    assert code in (0, None)
    assert "window alone" in printed


def test_plan_of_backends_by_name(saved, text, tmp_path, monkeypatch, capsys):
    """A name without options has the options of its presets; rows must leave keys out."""
    plan = tmp_path / "plan.json"
    given = ["plan", saved, "--data", text, "--max-length", 48, "--rows", 2, "--keep-softmax", 1]
    given += ["--candidate", "delta", "--overwrite", "--output-file", plan]
    code, _, _ = run(monkeypatch, capsys, *given)
    assert code in (0, None)
    options = {"feature_map": "squared_relu", "window": 32}
    layers = json.loads(plan.read_text())["spec"]["layers"]
    assert list(layers.values()) == [{"backend": "delta", "options": options}] * 2
    given[-4] = "block_sparse:score=indexer"
    code, _, error = run(monkeypatch, capsys, *given)
    assert code == 2
    assert "block_sparse:score=indexer: it reads every key of rows of 48 tokens" in error


def test_limits_of_a_plan(saved, text, monkeypatch, capsys):
    data = ["plan", saved, "--data", text, "--max-length", 48, "--rows", 2]
    data += ["--candidate", "longformer:window=4"]
    budget = ["--cache-bytes", "40KiB", "--keep-softmax", 1]
    code, _, problem = run(monkeypatch, capsys, *data, *budget)
    assert code == 2
    assert "either --keep-softmax or --cache-bytes" in problem
    code, _, problem = run(monkeypatch, capsys, *data, "--keep-softmax", 4)
    assert "keep_softmax must be a fraction of the layers" in problem
    assert "for 3 layers" in problem


def test_finetune(saved, text, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    data = ["finetune", saved, "--data", text, "--max-length", 48, "--max-steps", 2]
    data += ["--per-device-train-batch-size", 2, "--output-dir", out]
    code, printed, _ = run(monkeypatch, capsys, *data, "--attention", "longformer:window=4")
    assert code in (0, None)
    assert "softmax tuned" in printed
    assert "softmax tuned" in json.loads((out / "finetuning.json").read_text())["lines"]
    code, _, problem = run(monkeypatch, capsys, *data, "--layers", "1=flash")
    assert "need --attention" in problem


def test_recover_wants_one_spec(saved, text, tmp_path, monkeypatch, capsys):
    data = ["recover", saved, "--data", text, "--output-dir", tmp_path / "out"]
    for more in ([], ["--attention", "linear", "--plan", "plan.json"]):
        code, _, problem = run(monkeypatch, capsys, *data, *more)
        assert code == 2
        assert "either --attention (with --layers) or --plan FILE" in problem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--lengths", "many"], "not understood at 'many'"),
        (["compare", "--attention", "linaer"], "Did you mean 'linear'"),
        (["compare", "--attention", "linear:window=0"], "at least 1"),
        (["compare", "nowhere"], "there is no config.json"),
        (["compare", "--mode", "decoed"], "Did you mean 'decode'"),
        (["tasks", "--attention", "linaer"], "Did you mean 'linear'"),
        (["tasks", "--seeds", 0], "must be 1 or more"),
        (["inspect", "--layer", 9], "one of 0 to 3"),
    ],
)
def test_mistakes_of_what_measures(monkeypatch, capsys, tmp_path, arguments, message):
    code, _, err = run(monkeypatch, capsys, *arguments, "--output-dir", tmp_path / "out")
    assert code == 2
    assert message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--rows", "0"),
        ("plan", "--rows", "-1"),
        ("heads", "--rows", "0"),
        ("memory", "--batch-size", "0"),
    ],
)
def test_counts_are_at_least_1(monkeypatch, capsys, saved, arguments):
    command, option, value = arguments
    data = ("--data", saved) if command == "plan" else ()
    code, _, problem = run(monkeypatch, capsys, command, saved, *data, option, value)
    assert code == 2
    assert f"'{option}': Input should be greater than or equal to 1" in problem


@pytest.mark.parametrize("command", ["describe", "swap", "heads", "inspect"])
def test_damaged_models_are_explained(monkeypatch, capsys, saved, tmp_path, command):
    damaged, text = shutil.copytree(saved, tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("some text " * 99)
    options = {
        "describe": (),
        "swap": ("--attention", "linear", "--output-dir", tmp_path / "out"),
        "heads": ("--data", text, "--max-length", "64"),
        "inspect": ("--data", text, "--output-dir", tmp_path / "out"),
    }[command]
    weights, config = damaged / "model.safetensors", damaged / "config.json"
    if command != "describe":  # it does not read weights
        weights.write_bytes(weights.read_bytes()[:999])
        code, _, problem = run(monkeypatch, capsys, command, damaged, *options)
        assert (code, "Error while deserializing" in problem) == (2, True), problem
    config.write_text('{"model_type": "llama", ')
    code, _, problem = run(monkeypatch, capsys, command, damaged, *options)
    assert (code, "config.json' cannot be read: " in problem) == (2, True), problem


def test_a_full_disk_is_explained(monkeypatch, capsys, saved, tmp_path):
    def no_space(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", no_space)
    options = ("--attention", "linear", "--output-dir", tmp_path / "out")
    code, _, problem = run(monkeypatch, capsys, "swap", saved, *options)
    assert code == 2
    assert "No space left on device: 'model.safetensors'" in problem
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_measured_is_explained(monkeypatch, capsys, saved, tmp_path):
    text, latin = tmp_path / "text.txt", tmp_path / "latin.txt"
    text.write_text("some text " * 999)
    latin.write_bytes("caf\xe9 ".encode("latin-1") * 99)
    for arguments, message in (
        (("memory", tmp_path), "holds no saved model: there is no config.json"),
        (("memory", saved, "--dtype", "int8"), "dtype must be a floating-point type of torch"),
        (("memory", saved, "--attention", ","), "--attention names no backend"),
        (("inspect", saved, "--data", latin), "is not UTF-8 text (byte 3: "),
        (
            ("plan", saved, "--data", text, "--max-length", "64", "--keep-softmax", "nan"),
            "must be a fraction of the",
        ),
    ):
        code, _, problem = run(monkeypatch, capsys, *arguments)
        assert (code, message in problem) == (2, True), problem
