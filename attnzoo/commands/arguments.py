"""Command lines that are generated from dataclasses of arguments: ``recover`` and ``finetune``.

``--help`` prints a file that is made from the same dataclasses (``python -m
attnzoo.commands.arguments``), since importing transformers takes seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from attnzoo.errors import AttnzooError, ConfigError, did_you_mean
from attnzoo.optional_packages import OptionalPackage

GROUPS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "recover": {
        "Swap": ("attention", "layers", "else_", "plan", "teacher"),
        "Data": (
            *("data", "dataset_text_field", "max_tokens", "max_length", "completion_only_loss"),
            *("repeat_share", "repeats_per_row", "target_length"),
        ),
        "Trained parameters": (
            *("train", "lora_r", "lora_alpha", "lora_target_modules", "dtype", "load_in_4bit"),
            *("extras_learning_rate", "attention_learning_rate"),
        ),
        "Attention transfer": (
            *("transfer_steps", "transfer_learning_rate", "transfer_target", "transfer_from"),
            "layers_at_once",
        ),
        "Distillation": (
            *("max_steps", "learning_rate", "top_k", "cross_entropy", "hidden_states"),
            *("teacher_dtype", "window_dropout", "disable_dropout", "always_train", "cp_size"),
        ),
        "Of transformers' TrainingArguments; --help-all shows all": (
            *("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps"),
            *("warmup_steps", "lr_scheduler_type", "bf16", "gradient_checkpointing", "eval_steps"),
            *("save_steps", "resume_from_checkpoint", "seed", "report_to", "push_to_hub"),
        ),
    },
    "finetune": {
        "Swap": ("attention", "layers", "else_"),
        "Data": ("data", "compare"),
        "Of TRL's SFTConfig and ModelConfig; --help-all shows all": (
            *("output_dir", "max_steps", "learning_rate", "max_length", "packing"),
            *("dataset_text_field", "completion_only_loss", "assistant_only_loss", "use_peft"),
            *("lora_r", "lora_target_modules", "load_in_4bit", "per_device_train_batch_size"),
            *("gradient_accumulation_steps", "bf16", "gradient_checkpointing"),
            *("resume_from_checkpoint", "seed", "report_to"),
        ),
    },
}
ABOUT = {
    "recover": (
        "Swap a model and recover its quality by attention transfer and distillation.",
        "attnzoo recover embedded --attention linear:feature_map=hedgehog,window=32 \\\n"
        "    --data notes.txt --output-dir recovered",
    ),
    "finetune": (
        "Fine-tune a swapped model, or one that --attention swaps, by TRL's SFTTrainer.",
        "attnzoo finetune recovered --data notes.jsonl --max-steps 200 \\\n    --output-dir tuned",
    ),
}
TEXTS = {  # of options of transformers and TRL, in our help, where theirs is longer than a line
    "output_dir": "new folder for the model",
    "per_device_train_batch_size": "rows per step and process",
    "gradient_accumulation_steps": "micro-batches per step",
    "bf16": "autocast to bfloat16",
    "fp16": "autocast to float16 with loss scaling",
    "gradient_checkpointing": "recompute layers in the backward pass",
    "resume_from_checkpoint": "True, or a checkpoint of this run",
    "push_to_hub": "upload the model with its card",
    "report_to": "tracker, such as tensorboard or wandb",
    "seed": "random seed",
    "max_steps": "steps of training; default: epochs",
    "learning_rate": "learning rate",
    "max_length": "tokens per row",
    "packing": "pack documents into rows",
    "dataset_text_field": "field of JSON, parquet and data sets with the text",
    "completion_only_loss": "loss of completions only",
    "assistant_only_loss": "loss of the assistant's messages only",
    "use_peft": "train LoRA adapters",
    "lora_r": "rank of LoRA adapters",
    "lora_target_modules": "linear layers with adapters, by name",
    "load_in_4bit": "frozen linear layers in 4 bits (bitsandbytes)",
}
WIDTH, COLUMN = 80, 33


@dataclasses.dataclass
class SwapArguments:
    """Which attention a model gets, and the data."""

    data: list[str] | None = dataclasses.field(
        default=None,
        metadata={
            "action": "extend",
            "help": "text, .jsonl or .parquet files, folders, or data sets of the Hub "
            "(owner/name); a.jsonl:0.7 weights it",
        },
    )
    attention: str | None = dataclasses.field(
        default=None, metadata={"help": "backend: NAME or NAME:OPTION=VALUE,..."}
    )
    layers: list[str] | None = dataclasses.field(
        default=None,
        metadata={"action": "extend", "help": "exceptions: LAYERS=NAME, such as 0-1,11=flash"},
    )
    else_: str | None = dataclasses.field(
        default=None,
        metadata={"aliases": "--else", "help": "backend of layers that --attention refuses"},
    )

    def spec(self) -> Any:
        """Return the spec that the options name; ``None`` without ``attention``."""
        from attnzoo.commands.options import spec_of

        if self.attention is not None:
            return spec_of(self.attention, self.layers, self.else_)
        if self.layers or self.else_:
            raise ConfigError("--layers and --else need --attention; give it, or leave them out")
        return None

    def data_paths(self) -> list[Path]:
        """Return the values of ``--data``."""
        if not self.data:
            raise ConfigError("--data is not given; give text, such as --data notes.txt")
        return [Path(x) for x in self.data]


@dataclasses.dataclass
class RecoverySwapArguments(SwapArguments):
    """Which attention a model gets in recovery, or which plan or teacher says so."""

    plan: str | None = dataclasses.field(
        default=None, metadata={"help": "plan of `attnzoo plan` with an attention a layer"}
    )
    teacher: str | None = dataclasses.field(
        default=None,
        metadata={"help": "model that MODEL was converted from, in place of a swap"},
    )


@dataclasses.dataclass
class FinetuneSwapArguments(SwapArguments):
    """Which attention a model gets in fine-tuning."""

    compare: bool = dataclasses.field(
        default=True, metadata={"help": "train the softmax model too, as a baseline"}
    )


def argument_classes(command: str, *, encoder: bool = False) -> tuple[type, ...]:
    """Return the dataclasses whose fields are the options of a command."""
    if command == "recover":
        from attnzoo.training.arguments import RecoveryArguments

        return RecoverySwapArguments, RecoveryArguments
    from transformers import TrainingArguments

    trl: Any = OptionalPackage("trl", extra="train")
    return (
        FinetuneSwapArguments,
        TrainingArguments if encoder else trl.SFTConfig,
        trl.ModelConfig,
    )


def parse(command: str, argv: Sequence[str], classes: Sequence[type]) -> tuple[Any, ...]:
    """Return instances of dataclasses from a command line and the file of ``--config``.

    Raises:
        ConfigError: An option or a field of the file is unknown or has an invalid value.
    """
    import torch

    parser = _parser(command, classes)
    argv, config = _read_config(argv)
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    for name in config:
        if name not in actions:
            raise ConfigError(
                f"The file of --config has {name!r}, which `attnzoo {command}` does not know."
                f"{did_you_mean(name, actions)} See attnzoo {command} --help-all"
            )
    for action in actions.values():
        if action.dest in config:
            action.default, action.required = config[action.dest], False
    if not torch.accelerator.is_available():
        # transformers refuses bf16 without use_cpu, and many CPUs are slow in it
        defaults = {"use_cpu": True, "bf16": False}
        parser.set_defaults(**{name: x for name, x in defaults.items() if name not in config})
    found, unknown = parser.parse_known_args(argv)
    for text in unknown:
        if text.startswith("-"):
            raise ConfigError(
                f"attnzoo {command} has no option {text.partition('=')[0]}."
                f"{_meant(text, parser)} See attnzoo {command} --help"
            )
    if unknown:
        raise ConfigError(
            f"{unknown[0]!r} belongs to no option; the model comes first: attnzoo {command} MODEL "
            "--option value"
        )
    if not found.output_dir:
        raise ConfigError("--output-dir is not given; give a new folder for the model")
    outputs = []
    for cls in classes:
        names = {field.name for field in dataclasses.fields(cls) if field.init}
        try:
            outputs.append(cls(**{name: x for name, x in vars(found).items() if name in names}))
        except AttnzooError:
            raise
        except (ValueError, ImportError) as error:  # of transformers' and TRL's own checks
            raise ConfigError(str(error)) from error
    return tuple(outputs)


def _meant(text: str, parser: argparse.ArgumentParser) -> str:
    known = [x for action in parser._actions for x in action.option_strings if "_" not in x]
    name = text.partition("=")[0].replace("_", "-")
    return f" It is {RENAMED[name]} now." if name in RENAMED else did_you_mean(name, known)


RENAMED = {  # options of earlier versions
    "--out": "--output-dir",
    "--batch": "--per-device-train-batch-size",
    "--accumulate": "--gradient-accumulation-steps",
    "--length": "--max-length",
    "--steps": "--max-steps",
    "--distil-steps": "--max-steps",
    "--weights-lr": "--learning-rate",
    "--extras-lr": "--extras-learning-rate",
    "--attention-lr": "--attention-learning-rate",
    "--transfer-lr": "--transfer-learning-rate",
    "--lora-rank": "--lora-r",
    "--column": "--dataset-text-field",
    "--train-on": "--completion-only-loss",
    "--precision": "--bf16 or --fp16",
    "--warmup": "--warmup-steps",
    "--clip": "--max-grad-norm",
    "--keep": "--save-total-limit",
    "--checkpoint-every": "--save-steps",
    "--evaluate-every": "--eval-steps",
    "--resume": "--resume-from-checkpoint True",
    "--recipe": "--config FILE",
    "--set": "part of --attention NAME:OPTION=VALUE,...",
}


def _read_config(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments without ``--config``, and the content of its file."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    given, rest = parser.parse_known_args(argv)
    if given.config is None:
        return rest, {}
    import yaml  # type: ignore[import-untyped]

    path = recipe_path(given.config)
    try:
        config = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is no YAML file: {error}") from None
    if not isinstance(config, dict) or not all(isinstance(name, str) for name in config):
        raise ConfigError(f"{str(path)!r} must have fields with values, such as max_steps: 100")
    return rest, {name.replace("-", "_"): value for name, value in config.items()}


def recipe_path(name: str) -> Path:
    """Return the file of ``--config``: a path, or the name of a recipe of the package."""
    if Path(name).is_file():
        return Path(name)
    recipes = {
        file.name.removesuffix(".yaml"): file
        for file in (files("attnzoo.training") / "recipes").iterdir()
        if file.name.endswith(".yaml")
    }
    if name not in recipes:
        raise ConfigError(
            f"--config takes a YAML file or a recipe ({', '.join(sorted(recipes))}), got {name!r}."
            f"{did_you_mean(name, recipes)}"
        )
    return Path(str(recipes[name]))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # transformers registers both spellings of an option; one is enough here
        message = re.sub(r"--\w*_[\w/-]*/(--[\w-]+)", r"\1", message)
        raise ConfigError(f"{message[0].upper()}{message[1:]}; see attnzoo {self.prog} --help")


def _parser(command: str, classes: Sequence[type]) -> argparse.ArgumentParser:
    from transformers import HfArgumentParser

    class Parser(_Parser, HfArgumentParser):
        pass

    types: Any = [*classes]
    return Parser(
        types,
        prog=command,
        allow_abbrev=False,
        add_help=False,
        usage=f"attnzoo {command} MODEL [options]",
        formatter_class=argparse.HelpFormatter,
    )


def help_file(command: str) -> str:
    """Return what ``--help`` prints; it imports no library."""
    return (files("attnzoo.commands") / "help" / f"{command}.txt").read_text("utf-8")


def help_all(command: str) -> str:
    """Return all options of a command, with the texts of the libraries that have them."""
    return _parser(command, argument_classes(command)).format_help()


def make_help(command: str) -> str:
    """Return the content of the file that ``--help`` prints."""
    about, example = ABOUT[command]
    lines = [
        f"usage: attnzoo {command} MODEL [options]",
        "",
        about,
        "",
        f"  {example}",
        "",
        *textwrap.wrap(
            "MODEL is the folder of a saved model, its Hub id, or embedded. --config FILE.yaml "
            "has any of these options by name, or is the name of a recipe; options that are "
            "given override it. Names may have _ for -.",
            WIDTH,
        ),
    ]
    fields = {
        f.name: (cls, f) for cls in argument_classes(command) for f in dataclasses.fields(cls)
    }
    for title, names in GROUPS[command].items():
        lines += ["", f"{title}:"]
        for name in names:
            lines += _option_lines(*fields[name])
    return "\n".join(lines) + "\n"


def _option_lines(cls: type, field: dataclasses.Field[Any]) -> list[str]:
    """Return the lines of an option in the help."""
    hint = str(get_type_hints(cls)[field.name])
    own = cls.__module__.startswith("attnzoo.") and field.name in cls.__annotations__
    text = field.metadata.get("help", "") if own else TEXTS.get(field.name)
    if text is None:
        text = " ".join(str(field.metadata.get("help", "")).split(". ")[0].split())
    option = f"--{field.name.rstrip('_').replace('_', '-')}"
    is_flag = hint in ("<class 'bool'>", "bool | None")
    if is_flag and field.default is True:
        option, text = option.replace("--", "--no-", 1), f"do not {text}"
    elif is_flag:
        pass
    elif choices := field.metadata.get("choices"):
        option = f"{option} {'|'.join(choices)}"
        if len(option) > COLUMN - 4:
            option = option.partition(" ")[0] + " NAME"
            text = f"{text} ({', '.join(choices)})"
    else:
        kind = "N" if "int" in hint or "float" in hint else "TEXT"
        option = f"{option} {kind}{' ...' if 'list' in hint else ''}"
    default = field.default
    default = getattr(default, "value", default)
    shown = default not in (None, "", False, True, dataclasses.MISSING) and "default:" not in text
    if shown and not is_flag:
        text = f"{text} [{default}]"
    indent = " " * COLUMN
    wrapped = textwrap.wrap(text, WIDTH - COLUMN, break_long_words=False)
    if len(option) > COLUMN - 4:
        return [f"  {option}", *(indent + line for line in wrapped)]
    return [f"  {option}".ljust(COLUMN) + wrapped[0], *(indent + line for line in wrapped[1:])]


if __name__ == "__main__":
    for command in GROUPS:
        path = Path(__file__).parent / "help" / f"{command}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(make_help(command), "utf-8")
