"""Options that the training commands share, declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from attnzoo.commands.spec_options import spec_of

Data = Annotated[list[Path], typer.Option(help="text, .jsonl, .parquet, or folders of them")]
Column = Annotated[str, typer.Option(help="field of JSON and parquet with the text")]
Length = Annotated[int, typer.Option(help="tokens of a row")]
Control = Annotated[
    int | None, typer.Option(help="tokens that the control sees; the swap's window without")
]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What ``recover`` and ``finetune`` are told alike."""

    data: Data
    out: Annotated[Path, typer.Option(help="new folder for the model")]
    attention: Annotated[str | None, typer.Option(help="backend for every other layer")] = None
    option: Annotated[
        list[str] | None, typer.Option("--set", help="option of the backend: NAME=VALUE")
    ] = None
    layers: Annotated[
        list[str] | None, typer.Option(help="exceptions: LAYERS=BACKEND, such as 0-1,11=flash")
    ] = None
    else_: Annotated[
        str | None, typer.Option("--else", help="backend for layers that the first one refuses")
    ] = None
    weights_lr: Annotated[
        float | None, typer.Option(help="learning rate of adapters, or of all weights")
    ] = None
    extras_lr: Annotated[
        float, typer.Option(help="learning rate of what backends added, beside them")
    ] = 5e-3
    repeat_share: Annotated[
        float,
        typer.Option(help="share of the rows in which a segment is repeated, to learn recall"),
    ] = 0.25
    batch: Annotated[int, typer.Option(help="rows of a step, over all processes")] = 8
    accumulate: Annotated[int, typer.Option(help="parts that a batch is taken in")] = 1
    cp_size: Annotated[int, typer.Option(help="processes that share every row, of all")] = 1
    length: Length = 512
    control: Control = None
    window_dropout: Annotated[
        float,
        typer.Option(help="share of a hybrid's heads that start a stage without their window"),
    ] = 0.0
    precision: Annotated[
        str | None, typer.Option(help="of products: no (float32) or bf16; as launched without")
    ] = None
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="compute layers twice, to save memory")
    ] = False
    report_to: Annotated[
        str | None, typer.Option(help="a tracker of Accelerate, such as tensorboard; logs in --out")
    ] = None
    column: Column = "text"
    seed: int = 0
    resume: Annotated[bool, typer.Option(help="go on from the last checkpoint in --out")] = False

    def spec(self) -> Any:
        """Return the swap that ``--attention`` and its options say."""
        return spec_of(self.attention, self.option, self.layers, self.else_)

    def config(self) -> dict[str, Any]:
        """Return these options as a ``TrainConfig`` takes them."""
        from attnzoo.training.loop import LoopConfig

        same = [
            *("weights_lr", "extras_lr", "repeat_share", "control", "window_dropout"),
            *("gradient_checkpointing", "report_to"),
        ]
        loop = LoopConfig(
            batch_size=self.batch,
            accumulate=self.accumulate,
            cp_size=self.cp_size,
            seed=self.seed,
            precision=self.precision,
        )
        return {"row_length": self.length, "loop": loop, **{n: getattr(self, n) for n in same}}


def with_train_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: give a command those options beside its own; it is called with ``options``."""
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
