"""Options that several training commands have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from attnzoo.commands.spec_options import (
    AttentionIfGiven,
    Else,
    Layers,
    Set,
    parse_object,
    spec_of,
)
from attnzoo.errors import ConfigError

_DATA = typer.Option(
    help="text, .jsonl or .parquet file, folder of them or of a saved data set, or the id of a "
    "data set of the Hub, owner/name or owner/name:config (repeatable); with weights, such as "
    "a.jsonl:0.7, a mixture"
)
Data = Annotated[list[Path], _DATA]
DataIfGiven = Annotated[list[Path] | None, _DATA]
Column = Annotated[
    str, typer.Option(help="field of JSON and parquet files and data sets with the text")
]
MaxTokens = Annotated[
    str | None,
    typer.Option(
        help="read only as much of --data as has so many tokens, such as 300M; data sets of the "
        "Hub are then streamed, and not downloaded whole"
    ),
]
Length = Annotated[int, typer.Option(help="tokens per row")]
Control = Annotated[
    int | None, typer.Option(help="window of the baseline, in tokens; default: the swap's window")
]
TargetLength = Annotated[
    int | None,
    typer.Option(
        help="tokens for which the swap is meant: it is evaluated there too, and compared with the "
        "window of equal memory; default: --length"
    ),
]


def token_count(text: str | None, option: str) -> int | None:
    """Return the number in a text such as ``300M``, with units of 1000; ``None`` without a text.

    Raises:
        ConfigError: The text is not a number above 0.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbt]?)", text.strip().lower())
    count = round(float(found[1]) * 1000 ** " kmbt".index(found[2] or " ")) if found else 0
    if count < 1:
        raise ConfigError(f"{option} must be a number of tokens such as 300M or 2B, got {text!r}")
    return count


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of both ``recover`` and ``finetune``."""

    data: Data
    max_tokens: MaxTokens = None
    out: Annotated[Path, typer.Option(help="new folder for the model")]
    recipe: Annotated[
        str | None,
        typer.Option(help="settings by name (attnzoo recipes); options that are given override"),
    ] = None
    attention: AttentionIfGiven = None
    option: Set = None
    layers: Layers = None
    else_: Else = None
    weights_lr: Annotated[
        float | None, typer.Option(help="learning rate of adapters, or of all weights")
    ] = None
    attention_lr: Annotated[
        float | None,
        typer.Option(help="learning rate of the weights in attention layers; default: the same"),
    ] = None
    lr_find_steps: Annotated[
        int,
        typer.Option(
            help="steps of each short run that searches the factor of a stage's rates, 0.1 to 3; "
            "0: no search"
        ),
    ] = 0
    lora_rank: Annotated[int, typer.Option(help="rank of LoRA adapters")] = 16
    lora_alpha: Annotated[
        int | None, typer.Option(help="scale of the adapters, times the rank; default: 2 x rank")
    ] = None
    lora_target_modules: Annotated[
        list[str] | None,
        typer.Option(
            help="linear layers with adapters by name, such as q_proj (repeatable); default: all"
        ),
    ] = None
    extras_lr: Annotated[
        float, typer.Option(help="learning rate of the backends' own parameters")
    ] = 5e-3
    train_on: Annotated[
        str,
        typer.Option(
            help="tokens with a loss: all, or completions (of prompts, and of the assistant)"
        ),
    ] = "all"
    repeat_share: Annotated[
        float | None,
        typer.Option(
            help="fraction of rows with a repeated segment, to train recall; default: 0.25, and 0 "
            "for completions"
        ),
    ] = None
    repeats_per_row: Annotated[
        int, typer.Option(help="repeated segments in such a row, which may overwrite each other")
    ] = 1
    batch: Annotated[int, typer.Option(help="rows per step over all processes")] = 8
    accumulate: Annotated[
        int, typer.Option(help="micro-batches per batch (gradient accumulation)")
    ] = 1
    optim: Annotated[
        str,
        typer.Option(
            help="adamw_torch; adamw_8bit, paged_adamw_8bit or paged_adamw_32bit (bitsandbytes); "
            "adafactor; or muon for matrices and AdamW for the rest"
        ),
    ] = "adamw_torch"
    lr_scheduler_type: Annotated[
        str, typer.Option(help="schedule by transformers' name: cosine, linear, inverse_sqrt, ...")
    ] = "cosine"
    lr_scheduler_kwargs: Annotated[
        str, typer.Option(help='JSON for the schedule, such as {"min_lr_rate": 0.1}')
    ] = "{}"
    warmup: Annotated[
        float,
        typer.Option(help="linear warmup: a fraction of a stage's steps, or from 1 on, steps"),
    ] = 0.1
    betas: Annotated[
        tuple[float, float], typer.Option(help="of AdamW, two numbers: --betas 0.9 0.999")
    ] = (0.9, 0.95)
    weight_decay: Annotated[
        float, typer.Option(help="of matrices; not of norms, biases and decays of backends")
    ] = 0.0
    clip: Annotated[float, typer.Option(help="largest gradient norm")] = 1.0
    label_smoothing_factor: Annotated[
        float,
        typer.Option(
            "--label-smoothing-factor",
            "--label-smoothing",
            help="share of a label's probability that all tokens get, in cross-entropy",
        ),
    ] = 0.0
    checkpoint_every: Annotated[
        int,
        typer.Option(
            help="steps between checkpoints; 0: at the end of each stage, and by "
            "--checkpoint-minutes"
        ),
    ] = 50
    checkpoint_minutes: Annotated[
        float | None,
        typer.Option(help="minutes between checkpoints, beside those of --checkpoint-every"),
    ] = None
    keep: Annotated[int, typer.Option(help="latest checkpoints to keep")] = 2
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            help="steps between evaluations on held-out rows, by which a stage keeps its best "
            "state; 0: the last state is kept; default: a quarter of each stage"
        ),
    ] = None
    entropy_every: Annotated[
        int | None,
        typer.Option(
            help="steps between measurements of the heads' entropy; 0: none; default: a tenth of "
            "each stage"
        ),
    ] = None
    cp_size: Annotated[
        int, typer.Option(help="processes that split each row (context parallelism)")
    ] = 1
    length: Length = 512
    control: Control = None
    target_length: TargetLength = None
    window_dropout: Annotated[
        float,
        typer.Option(help="initial fraction of a hybrid's heads without their window"),
    ] = 0.0
    precision: Annotated[
        str | None,
        typer.Option(
            help="autocast: no (float32), bf16, or fp16 with loss scaling, on GPUs; default: "
            "Accelerate's setting"
        ),
    ] = None
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="recompute layers in the backward pass, to save memory"
        ),
    ] = False
    torch_compile: Annotated[
        bool,
        typer.Option("--torch-compile", help="compile layers (torch.compile) in training steps"),
    ] = False
    dtype: Annotated[
        str,
        typer.Option(
            help="data type of frozen weights: float32, or bfloat16 with --train lora or extras, "
            "under autocast to bfloat16"
        ),
    ] = "float32"
    load_in_4bit: Annotated[
        bool,
        typer.Option(
            "--load-in-4bit",
            help="frozen linear layers in 4 bits, the rest in bfloat16 (QLoRA); needs bitsandbytes",
        ),
    ] = False
    activation_offloading: Annotated[
        bool,
        typer.Option(
            "--activation-offloading",
            help="keep activations in CPU memory until the backward pass, on GPUs",
        ),
    ] = False
    report_to: Annotated[
        str | None, typer.Option(help="tracker of Accelerate, such as tensorboard; logs to --out")
    ] = None
    push_to_hub: Annotated[
        bool, typer.Option("--push-to-hub", help="upload the model with its card to the Hub")
    ] = False
    hub_model_id: Annotated[
        str | None,
        typer.Option(help="ORG/MODEL or MODEL on the Hub; default: the name of --out"),
    ] = None
    hub_private_repo: Annotated[
        bool | None, typer.Option(help="whether a new repository is private")
    ] = None
    column: Column = "text"
    seed: int = 0
    resume: Annotated[bool, typer.Option(help="resume from the last checkpoint in --out")] = False

    def spec(self) -> Any:
        """Return the spec of ``--attention``, ``--set``, ``--layers`` and ``--else``."""
        assert self.attention is not None
        return spec_of(self.attention, self.option, self.layers, self.else_)

    def config(self) -> dict[str, Any]:
        """Return the arguments of a ``TrainConfig``."""
        from attnzoo.training.loop import LoopConfig

        names = [
            *(
                "lora_rank",
                "lora_alpha",
                "weights_lr",
                "attention_lr",
                "extras_lr",
                "repeat_share",
                "repeats_per_row",
                "control",
                "target_length",
                "evaluate_every",
                "window_dropout",
            ),
            *("dtype", "load_in_4bit"),
            *("gradient_checkpointing", "report_to", "label_smoothing_factor", "train_on"),
        ]
        loop = LoopConfig(
            batch_size=self.batch,
            accumulate=self.accumulate,
            checkpoint_every=self.checkpoint_every,
            checkpoint_minutes=self.checkpoint_minutes,
            entropy_every=self.entropy_every,
            lr_find_steps=self.lr_find_steps,
            torch_compile=self.torch_compile,
            cp_size=self.cp_size,
            activation_offloading=self.activation_offloading,
            seed=self.seed,
            precision=self.precision,
            optim=self.optim,
            warmup=self.warmup,
            betas=self.betas,
            weight_decay=self.weight_decay,
            clip=self.clip,
            keep=self.keep,
            lr_scheduler_type=self.lr_scheduler_type,
            lr_scheduler_kwargs=parse_object(self.lr_scheduler_kwargs, "--lr-scheduler-kwargs"),
        )
        targets = self.lora_target_modules
        return {
            "row_length": self.length,
            "max_tokens": token_count(self.max_tokens, "--max-tokens"),
            "loop": loop,
            "lora_target_modules": None if targets is None else tuple(targets),
            **{n: getattr(self, n) for n in names},
        }


def with_train_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that adds the options of ``TrainOptions`` to a command as ``options``."""
    hints = get_type_hints(command, include_extras=True)
    shared = get_type_hints(TrainOptions, include_extras=True)
    known = {field.name: field.default for field in fields(TrainOptions)}
    first, *own = inspect.signature(command).parameters.values()
    only, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    parameters = [first.replace(annotation=hints[first.name])]
    for name, default in known.items():
        default = empty if default is MISSING else default
        parameters.append(inspect.Parameter(name, only, default=default, annotation=shared[name]))
    parameters += [
        p.replace(kind=only, annotation=hints[p.name]) for p in own if p.name != "options"
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        options = TrainOptions(**{name: given.pop(name) for name in known})
        command(**given, options=options)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
