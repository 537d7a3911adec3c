"""The command that evaluates a swapped model: on text, and on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.options import (
    DataIfGiven,
    DatasetTextField,
    MaxTokens,
    Model,
    model_folder,
    split,
)
from attnzoo.commands.recovery import print_results
from attnzoo.commands.terminal import AsJson, console, problems
from attnzoo.errors import ConfigError, short_repr

Control = Annotated[
    int | None,
    typer.Option(min=1, help="window of the baseline, in tokens; default: the swap's window"),
]
TargetLength = Annotated[
    int | None,
    typer.Option(
        min=8,
        help="tokens for which the swap is meant: it is evaluated there too, and compared with the "
        "window of equal memory; default: --max-length",
    ),
]
Rows = Annotated[int, typer.Option(min=1, help="held-out rows")]
Tasks = Annotated[str | None, typer.Option(help="tasks, groups or tags of lm_eval: NAME,NAME")]
Limit = Annotated[
    float | None, typer.Option(help="documents per task; below 1, a fraction of them")
]
BatchSize = Annotated[str, typer.Option(help="rows per batch of tasks, or auto")]
NumFewshot = Annotated[int | None, typer.Option(min=0, help="solved examples in a task's prompt")]
MaxLength = Annotated[
    int | None,
    typer.Option(
        min=8,
        help="tokens per row, default: 512, and of a task's prompt, default: the model's positions",
    ),
]
IncludePath = Annotated[Path | None, typer.Option(help="folder of your own tasks")]
Metadata = Annotated[
    str | None, typer.Option(help='JSON for generated tasks, as {"max_seq_lengths": [4096]}')
]
Original = Annotated[
    Path | None,
    typer.Option(
        metavar="MODEL", parser=model_folder, help="the model before the swap: its scores too"
    ),
]


def evaluate(
    path: Model,
    data: DataIfGiven = None,
    rows: Rows = 32,
    max_tokens: MaxTokens = None,
    max_length: MaxLength = None,
    control: Control = None,
    target_length: TargetLength = None,
    dataset_text_field: DatasetTextField = "text",
    tasks: Tasks = None,
    limit: Limit = None,
    batch_size: BatchSize = "1",
    num_fewshot: NumFewshot = None,
    include_path: IncludePath = None,
    metadata: Metadata = None,
    original: Original = None,
    as_json: AsJson = False,
) -> None:
    """Compare a swapped model with softmax and with its window alone, on text or on tasks."""
    from attnzoo.evaluation.harness import Harness
    from attnzoo.training.arguments import token_count
    from attnzoo.training.evaluator import evaluate as evaluate_model
    from attnzoo.training.report import tasks_table

    options: dict[str, Any] = {
        "limit": limit,
        "num_fewshot": num_fewshot,
        "include_path": include_path,
        "metadata": None if metadata is None else parse_object(metadata, "--metadata"),
    }
    given = [name for name, value in options.items() if value is not None]
    if tasks is None and given:
        raise ConfigError(f"{given[0]} is an option of tasks; give --tasks, or leave it out")
    harness = None
    if tasks is not None:
        size: Any = {"batch_size": batch_size, "max_length": max_length}
        harness = Harness(path, split(tasks), **size, **options)
    results = evaluate_model(
        path,
        data or [],
        column=dataset_text_field,
        row_length=max_length or 512,
        rows=rows,
        max_tokens=token_count(max_tokens),
        control=control,
        target_length=target_length,
        tasks=harness,
        original=original,
        log=partial((problems if as_json else console).print, soft_wrap=True, highlight=False),
    )
    if as_json:
        print(json.dumps(results, indent=2, default=str))
        return
    if "tasks" in results:
        tasks_table(results).print(console)
    if "lines" in results:
        print_results(results)


def parse_object(text: str, option: str) -> dict[str, Any]:
    """Return the JSON object that an option has as its value."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{option} takes a JSON object, got {short_repr(text)}")
    return found
