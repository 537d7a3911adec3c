"""The command lines of recover and finetune, which are made from dataclasses."""

import dataclasses
import re
import shlex
import sys
from pathlib import Path

import pytest
from transformers import TrainingArguments

from attnzoo.commands import arguments
from attnzoo.commands.options import spec_of
from attnzoo.errors import ConfigError
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.training.arguments import RecoveryArguments
from tests.processes import run

RECIPES = sorted((Path(arguments.__file__).parents[1] / "training" / "recipes").glob("*.yaml"))
OF_TRL = {  # fields of SFTConfig and ModelConfig
    *("lora_r", "lora_alpha", "lora_target_modules", "dtype", "load_in_4bit"),
    *("dataset_text_field", "max_length", "disable_dropout"),
}


def parse(command, *argv):
    given = ["embedded", "--output-dir", "out", *map(str, argv)]
    return arguments.Parser(command).parse(given)[:-1]


@pytest.mark.parametrize("command", arguments.OTHERS)
def test_help_is_that_of_the_dataclasses_and_fits(command):
    """`python -m attnzoo.commands.arguments` writes the files."""
    text = (Path(arguments.__file__).parent / "help" / f"{command}.txt").read_text()
    assert text == arguments.Parser(command).short_help()
    lines = text.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 80
    known = {x for action in arguments.Parser(command)._actions for x in action.option_strings}
    assert set(re.findall(r"--[\w-]+", arguments.OTHERS[command])) <= known | {"--help-all"}


def test_help_imports_no_library():
    code = (
        "import sys\nfrom attnzoo.cli import main\nsys.argv = ['attnzoo', 'recover', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([x for x in ('torch', 'transformers', 'trl') if x in sys.modules])"
    )
    done = run([sys.executable, "-c", code], check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--transfer-steps N" in done.stdout


def test_own_options_are_few():
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name for field in dataclasses.fields(RecoveryArguments)} - theirs
    own |= {field.name for field in dataclasses.fields(arguments.RecoverySwapArguments)}
    assert len(own - OF_TRL) <= 25
    assert own >= OF_TRL


def test_both_spellings_and_repeated_lists():
    swap, args = parse(
        *("recover", "--data", "a.txt", "--data", "b.jsonl", "c", "--max_steps", 7),
        *("--transfer-learning-rate", "3e-3", "--else", "flash", "--attention", "linear"),
    )
    assert swap.data == ["a.txt", "b.jsonl", "c"]
    assert (args.max_steps, args.transfer_learning_rate, swap.else_) == (7, 3e-3, "flash")


def test_a_file_gives_options_and_the_command_line_overrides_them(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("max_steps: 11\ntransfer-steps: 13\nlearning_rate: 2e-4\nlora_r: 5\n")
    _, args = parse("recover", "--config", path, "--lora-r", 3)
    assert (args.max_steps, args.transfer_steps, args.lora_r) == (11, 13, 3)
    assert args.learning_rate == 2e-4  # YAML has it as text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max_stepz=3"], r"not know '--max-stepz'\. Did you mean '--max-steps'"),
        (["--max-steps", "x"], r"--max-steps: invalid int value: 'x'; see attnzoo recover --help"),
        (["--transfer-target", "all"], r"--transfer-target: invalid choice: 'all'"),
        (["model"], r"does not know 'model'"),
        (["--config", "quik"], "Did you mean 'quick'"),
    ],
)
def test_invalid_command_lines(given, message):
    with pytest.raises(ConfigError, match=message):
        parse("recover", *given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_step: 3", r"'max_step', which .* Did you mean 'max_steps'"),
        ("- 3", "must have fields"),
        ("a: [", "no YAML file"),
        ("max_steps: [1]", r"no value of max_steps in \[1\]"),
        ("attention: [linear]", r"no value of attention in \['linear'\]"),
        ("max_length: null", "no value of max_length in None"),
        ("max_steps: {a: 1}", "no value of max_steps in {'a': 1}"),
        ("data: [[a]]", r"no value of data in \[\['a'\]\]"),
        ("data: []", "no value of data"),
        ("max_steps: 1.5", "in the file of --config: .*invalid int value: '1.5'"),
        ("bf16: maybe", "in the file of --config: .*bf16"),
        ("train: all", "invalid choice: 'all'"),
        ("seed: true", "no value of seed in True"),
        ("transfer_from: no", "no value of transfer_from in False; put .* in quotes"),
        ("lora_target_modules: [q_proj, off]", "no value of lora_target_modules in"),
    ],
)
def test_invalid_files(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        parse("recover", "--config", path)


def test_values_of_files_have_the_types_of_options(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "data: notes.txt\nlayers: 0-1=flash\nelse: flash\nattention: linear\nbf16: false\n"
        "lr_scheduler_kwargs: {num_cycles: 2}\nlora_alpha: null\nlora_target_modules: q_proj\n"
        "learning_rate: 3e-4\nmax_tokens: 300\nresume_from_checkpoint: true\n"
        "disable_dropout: false\n"
    )
    swap, args = parse("recover", "--config", path)
    assert (swap.data, swap.layers) == (["notes.txt"], ["0-1=flash"])
    assert args.disable_dropout is False
    swap, _ = parse("recover", "--config", path, "--data", "more.txt", "--layers=2=linear")
    assert (swap.data, swap.layers) == (["more.txt"], ["2=linear"])
    assert (swap.else_, args.bf16, args.lora_alpha) == ("flash", False, None)
    assert (args.lr_scheduler_kwargs, args.learning_rate) == ({"num_cycles": 2}, 3e-4)
    assert (args.lora_target_modules, args.max_tokens) == (["q_proj"], "300")
    assert args.resume_from_checkpoint == "True"
    path.write_text("max_length: null\ncompare: no\n")
    swap, args, _ = parse("finetune", "--config", path)
    assert (args.max_length, swap.compare) == (None, False)


def test_a_model_and_a_folder_for_the_result_are_required(tmp_path):
    with pytest.raises(ConfigError, match=r"required: --output-dir, MODEL; see attnzoo recover"):
        arguments.Parser("recover").parse([])
    (tmp_path / "mine.yaml").write_text("output_dir: new")
    given = ["--config", str(tmp_path / "mine.yaml"), "embedded"]
    _, args, model = arguments.Parser("recover").parse(given)
    assert (args.output_dir, model) == ("new", embedded_model_path())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_and_the_commands_in_them(path):
    text = path.read_text()
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    commands = re.findall(r"attnzoo [^\n]*", "\n".join(lines).replace("\\\n", " "))
    command = "recover" if "transfer_steps" in text else "finetune"
    swap, *_ = parse(command, "--config", path.stem, "--bf16", "False")
    assert swap.attention is None or spec_of(swap.attention)
    for line in commands:
        _, name, *rest = shlex.split(line)
        if name in arguments.OTHERS and "--config" in rest:
            of = rest[rest.index("--config") + 1]
            assert of in [x.stem for x in RECIPES]
            if "--data" in rest:
                arguments.Parser(name).parse([*rest, "--bf16", "False"])
