"""Command lines that are generated from dataclasses of arguments: ``recover`` and ``finetune``.

``--help`` prints a file that is made from the same dataclasses (``python -m
attnzoo.commands.arguments``), since importing transformers takes seconds.
"""

from __future__ import annotations

import argparse
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import torch
import yaml  # type: ignore[import-untyped]
from transformers import HfArgumentParser

from attnzoo.commands.options import model_folder, spec_of
from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.optional_packages import OptionalPackage
from attnzoo.training.arguments import RecoveryArguments, config_errors

ABOUT = """MODEL is the folder of a saved model, its Hub id, or embedded. --config
FILE.yaml has any of these options by name, or is the name of a recipe; options
that are given override it. Names may have _ for -.

  attnzoo recover embedded --attention linear:feature_map=hedgehog,window=32 \\
    --data notes.txt --output-dir recovered
  attnzoo finetune recovered --data notes.jsonl --max-steps 200 \\
    --output-dir tuned
"""
TITLES = {  # of the groups in --help that begin with an option
    "data": "Swap",
    "train": "Trained parameters",
    "dataset_text_field": "Rows",
    "transfer_steps": "Attention transfer",
    "max_steps": "Distillation",
    "per_device_train_batch_size": "Other defaults than those of transformers' TrainingArguments",
}
OTHERS = {  # what --help says of options that are not ours
    "recover": "All options of transformers' TrainingArguments are taken, such as --bf16, "
    "--gradient-checkpointing, --gradient-accumulation-steps, --resume-from-checkpoint True "
    "and --report-to; --help-all explains them.",
    "finetune": "All options of TRL's SFTConfig and ModelConfig are taken, such as --output-dir, "
    "--max-steps, --learning-rate, --max-length, --packing, --dataset-text-field, "
    "--completion-only-loss True, --assistant-only-loss, --use-peft, --lora-r, "
    "--lora-target-modules, --load-in-4bit, --per-device-train-batch-size, "
    "--gradient-accumulation-steps, --bf16, "
    "--gradient-checkpointing, --resume-from-checkpoint True, --seed and --report-to; --help-all "
    "explains them.",
}


@dataclass
class SwapArguments:
    """Which attention a model gets, and the data."""

    data: list[str] | None = field(
        default=None,
        metadata={
            "action": "extend",
            "help": "text, .jsonl or .parquet files, folders, or data sets of the Hub (owner/name)",
        },
    )
    attention: str | None = field(
        default=None, metadata={"help": "backend: NAME or NAME:OPTION=VALUE,..."}
    )
    layers: list[str] | None = field(
        default=None,
        metadata={"action": "extend", "help": "exceptions: LAYERS=NAME, such as 0-1,11=flash"},
    )
    else_: str | None = field(
        default=None,
        metadata={"aliases": "--else", "help": "backend of layers that --attention refuses"},
    )

    def spec(self) -> Any:
        """Return the spec that the options name; ``None`` without ``attention``."""
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


@dataclass
class RecoverySwapArguments(SwapArguments):
    """Which attention a model gets in recovery, or which plan or teacher says so."""

    plan: str | None = field(
        default=None, metadata={"help": "plan of `attnzoo plan`, in place of --attention"}
    )
    teacher: str | None = field(
        default=None,
        metadata={"help": "model that MODEL was converted from, in place of a swap"},
    )


@dataclass
class FinetuneSwapArguments(SwapArguments):
    """Which attention a model gets in fine-tuning."""

    compare: bool = field(
        default=True, metadata={"help": "train the softmax model too, as a baseline"}
    )


class Parser(HfArgumentParser):
    """Parser of a command line and of the file of ``--config``."""

    def __init__(self, command: str) -> None:
        """Read the fields of the dataclasses whose fields are the options of a command."""
        trl: Any = OptionalPackage("trl", extra="train")
        classes: Any = [RecoverySwapArguments, RecoveryArguments]
        if command == "finetune":
            classes = [FinetuneSwapArguments, trl.SFTConfig, trl.ModelConfig]
        super().__init__(
            classes,
            prog=f"attnzoo {command}",
            usage=f"attnzoo {command} MODEL [options]",
            allow_abbrev=False,
            add_help=False,
            formatter_class=argparse.HelpFormatter,
        )
        self.command = command
        self.hints = {n: hint for x in classes for n, hint in get_type_hints(x).items()}
        # A flag that is on by default has --no-NAME too, which comes later and takes no value
        self.options = {action.dest: action for action in reversed(self._actions)}
        self.add_argument("model", metavar="MODEL", type=model_folder)

    def error(self, message: str) -> NoReturn:
        """Raise an error with one of the two spellings of an option."""
        message = re.sub(r"--\w*_[\w/-]*/(--[\w-]+)", r"\1", message)
        raise ConfigError(f"{message[0].upper()}{message[1:]}; see {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """Return instances of the dataclasses, and the model's folder.

        Raises:
            ConfigError: An option or a field of the file is unknown or has an invalid value.
        """
        of_file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        of_file.add_argument("--config")
        given, argv = of_file.parse_known_args(argv)
        config = {} if given.config is None else self.typed(read_config(given.config))
        # transformers refuses bf16 without use_cpu, and many CPUs are slow in it
        on_cpu = {} if torch.accelerator.is_available() else {"use_cpu": True, "bf16": False}
        flags = {x.partition("=")[0] for x in argv}
        for name in ("data", "layers"):  # argparse would add what is given to a default
            if flags.intersection(self.options[name].option_strings):
                config.pop(name, None)
        self.set_defaults(**on_cpu | config)
        self.options["output_dir"].required = config.get("output_dir") is None
        with config_errors(), warnings.catch_warnings():
            # a name that both versions of transformers know, and TRL's default
            warnings.filterwarnings("ignore", ".gradient_checkpointing", FutureWarning)
            *found, others, unknown = self.parse_args_into_dataclasses(
                argv, return_remaining_strings=True, look_for_args_file=False
            )
        if unknown:
            name = unknown[0].partition("=")[0].replace("_", "-")
            known = [x for a in self._actions for x in a.option_strings if "_" not in x]
            raise ConfigError(
                f"{self.prog} does not know {name!r}.{did_you_mean(name, known)} See {self.prog} "
                "--help"
            )
        return *found, others.model

    def typed(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a file as a command line would have them."""
        found = {}
        for name, value in config.items():
            if name not in self.options:
                raise ConfigError(
                    f"The file of --config has {name!r}, which `{self.prog}` does not know."
                    f"{did_you_mean(name, self.options)} See {self.prog} --help-all"
                )
            action, hint, found[name] = self.options[name], self.hints[name], value
            if value is None and type(None) in get_args(hint):
                continue
            if isinstance(value, dict) and "dict" in str(hint):
                continue
            values = value if isinstance(value, list) and action.nargs == "+" else [value]
            flag = action.nargs == "?" or bool in get_args(hint) or name == "resume_from_checkpoint"
            wrong = list | dict | None if flag else list | dict | bool | None
            if any(isinstance(x, wrong) for x in values) or not values:
                words = "; put words such as 'no' in quotes" if isinstance(value, bool) else ""
                raise ConfigError(
                    f"The file of --config has no value of {name} in {value!r}{words}"
                )
            try:
                found[name] = self._get_values(action, [*map(str, values)])
            except argparse.ArgumentError as error:
                self.error(f"in the file of --config: {error}")
        return found

    def short_help(self) -> str:
        """Return what ``--help`` prints: our options, and the names of some others."""
        shown = argparse.ArgumentParser(
            usage=self.usage,
            description=ABOUT,
            epilog=textwrap.fill(OTHERS[self.command], 80, break_on_hyphens=False),
            add_help=False,
            formatter_class=partial(
                argparse.RawDescriptionHelpFormatter, width=80, max_help_position=33
            ),
        )
        if self.command == "recover":
            names = [x.name for x in fields(RecoverySwapArguments)]
            names += RecoveryArguments.__annotations__
        else:
            names = [x.name for x in fields(FinetuneSwapArguments)]
        for name in names:
            if name in TITLES:
                group = shown.add_argument_group(TITLES[name])
            action = self.options[name]
            text, option = str(action.help), action.option_strings[-1]
            if action.nargs == "?":  # a flag
                if action.default:
                    option, text = f"--no-{option.removeprefix('--')}", f"do not {text}"
                group.add_argument(option, action="store_true", help=text)
                continue
            if action.default not in (None, "", False) and "default:" not in text:
                text += f" [{action.default}]"
            kind = "N" if action.type in (int, float) else "TEXT"
            metavar = "|".join(action.choices or [kind])
            group.add_argument(option, nargs=action.nargs, metavar=metavar, help=text)
        return shown.format_help()


def read_config(name: str) -> dict[str, Any]:
    """Return the fields of a YAML file, or of a recipe of the package by its name."""
    folder = files("attnzoo.training") / "recipes"
    recipes = {
        x.name.removesuffix(".yaml"): x for x in folder.iterdir() if x.name.endswith(".yaml")
    }
    path: Any = Path(name) if Path(name).is_file() else recipes.get(name)
    if path is None:
        raise ConfigError(
            f"--config takes a YAML file or a recipe ({', '.join(sorted(recipes))}), got {name!r}."
            f"{did_you_mean(name, recipes)}"
        )
    try:
        config = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is no YAML file: {error}") from None
    if not isinstance(config, dict) or not all(isinstance(name, str) for name in config):
        raise ConfigError(f"{str(path)!r} must have fields with values, such as max_steps: 100")
    names = {name: name.replace("-", "_") for name in config} | {"else": "else_"}
    return {names[name]: value for name, value in config.items()}


if __name__ == "__main__":
    for command in OTHERS:
        path = Path(__file__).parent / "help" / f"{command}.txt"
        path.write_text(Parser(command).short_help(), "utf-8")
