"""The command that computes memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.model_argument import Model
from attnzoo.commands.spec_options import Attentions, specs_of
from attnzoo.commands.terminal import AsJson, console, problems
from attnzoo.report.live import show_status

MaxLength = Annotated[str, typer.Option(help="tokens per row, such as 32k")]
BatchSize = Annotated[int, typer.Option(min=1, help="rows")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="data type of the weights; default: that of the saved model (recover and finetune "
        "train in float32)"
    ),
]
Optim = Annotated[str, typer.Option(help="adamw, adamw_8bit (bitsandbytes), adafactor or sgd")]
Train = Annotated[
    str, typer.Option(help="full, lora (adapters and extras) or extras (of the backends)")
]
Bf16 = Annotated[bool, typer.Option("--bf16", help="autocast to bfloat16")]
LoadIn4bit = Annotated[
    bool, typer.Option("--load-in-4bit", help="frozen linear layers in 4 bits (QLoRA)")
]
Gpus = Annotated[
    int, typer.Option(help="GPUs that share --batch-size rows; the memory is that of one")
]
Sharding = Annotated[
    str, typer.Option(help="fsdp2 or zero3 (divide all), zero2 (not weights) or ddp (nothing)")
]
Fit = Annotated[
    str | None, typer.Option(help="also print the longest input that fits, such as 24GB")
]


def memory(
    model: Model = "embedded",
    max_length: MaxLength = "4k",
    batch_size: BatchSize = 1,
    attention: Attentions = None,
    dtype: Dtype = None,
    optim: Optim = "adamw",
    train: Train = "full",
    bf16: Bf16 = False,
    load_in_4bit: LoadIn4bit = False,
    gpus: Gpus = 1,
    sharding: Sharding = "fsdp2",
    fit: Fit = None,
    as_json: AsJson = False,
) -> None:
    """Show the memory of training and decoding, computed without weights or a run.

    Parameters, gradients, optimizer, activations with and without gradient checkpointing, keys and
    values or states, and the peaks of a training step, of a prompt and of a decoded token.
    """
    from attnzoo.evaluation.memory import MemoryCase, memory_table
    from attnzoo.evaluation.models import model_path
    from attnzoo.hf.saving.dtype import dtype_name, saved_dtype
    from attnzoo.report.format import format_length
    from attnzoo.training.budget import parse_size

    limit = parse_size(fit, "--fit") if fit else None
    path = str(model_path(model))
    settings: dict[str, Any] = {
        "length": parse_size(max_length, "--max-length"),
        "dtype": dtype or dtype_name(saved_dtype(Path(path))),
        **{"batch": batch_size, "optimizer": optim, "train": train, "bf16": bf16},
        **{"load_in_4bit": load_in_4bit, "gpus": gpus, "sharding": sharding},
    }
    cases = [MemoryCase(path=path, spec=spec, **settings) for spec in _specs(path, attention)]
    rows = []
    with show_status(problems if as_json else console) as show:
        for case in cases:
            show(case.attention)
            rows.append(_row(case, limit))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    size = (
        f"{format_length(cases[0].length)} tokens, {batch_size} row{'s' if batch_size > 1 else ''}"
    )
    title = f"{size}, {settings['dtype']}"
    title += f", one of {gpus} GPUs ({sharding})" if gpus > 1 else ""
    memory_table(rows, title).print(console)
    if fit:
        _fit_table(rows, fit).print(console)
    for row in rows:
        if row["reason"]:
            console.print(f"{row['attention']}: {row['reason']}", soft_wrap=True, highlight=False)


def _specs(path: str, attention: list[str] | None) -> list[Any]:
    """Return the plain data of the attentions; ``None`` is that of the model's config."""
    from attnzoo.compare.cases import default_specs
    from attnzoo.compare.run import read_model_info
    from attnzoo.hf.saving.files import read_config

    if attention is None:
        read_config(Path(path))  # a model that cannot be read is no row of a table
        return [None]
    causal = read_model_info(path).causal

    def presets(names: list[str] | None) -> list[Any]:
        return default_specs(names, causal=causal)

    return [spec.to_dict() for spec in specs_of(attention, presets) or presets(None)]


def _row(case: Any, limit: int | None) -> dict[str, Any]:
    """Return the memory of a case, what fits, and the reason of a refusal."""
    from dataclasses import asdict

    from attnzoo.errors import AttnzooError
    from attnzoo.evaluation.memory import TOTALS, MemoryCurve

    row: dict[str, Any] = {"attention": case.attention, **asdict(case)}
    row |= {"computed": None, "fit": None, "reason": ""}
    try:
        curve = MemoryCurve(case)
        row["computed"] = curve.at(case.length).to_dict()
        if limit is not None:
            lengths = {total: curve.longest_that_fits(limit, total) for total in TOTALS}
            row["fit"] = {"bytes": limit, "longest": curve.longest, **lengths}
    except AttnzooError as error:
        row["reason"] = str(error)
    return row


def _fit_table(rows: list[dict[str, Any]], limit: str) -> Any:
    """Return the longest input of every attention that fits a memory."""
    from attnzoo.evaluation.memory import COLUMNS, TOTALS
    from attnzoo.report.format import format_length
    from attnzoo.report.table import Table

    def cell(length: int | None, longest: int) -> str:
        if not length:
            return "-" if length is None else "none"
        text = format_length(length)
        return f"all lengths, to {text}" if length == longest else text

    body = [
        [row["attention"], *(cell(row["fit"][key], row["fit"]["longest"]) for key in TOTALS)]
        for row in rows
        if row["fit"]
    ]
    columns = ["attention", *(COLUMNS[key] for key in TOTALS)]
    return Table(columns=columns, rows=body, title=f"Longest input within {limit}, tokens per row")
