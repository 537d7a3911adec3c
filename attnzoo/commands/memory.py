"""The command that computes and measures memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.compare import Model, Threads
from attnzoo.commands.spec_options import Attentions, specs_of
from attnzoo.commands.terminal import AsJson, console, problems
from attnzoo.report.live import show_status


def memory(
    model: Model = "embedded",
    length: Annotated[str, typer.Option(help="tokens per row, such as 32k")] = "4k",
    batch: Annotated[int, typer.Option(min=1, help="rows")] = 1,
    attention: Attentions = None,
    dtype: Annotated[str, typer.Option(help="data type of the weights")] = "float32",
    optimizer: Annotated[str, typer.Option(help="adamw or sgd")] = "adamw",
    train: Annotated[str, typer.Option(help="full or extras (of the backends)")] = "full",
    loss: Annotated[str, typer.Option(help="lm, or distil (of recover, with a teacher)")] = "lm",
    measure: Annotated[
        bool, typer.Option("--measure", help="also run each attention, in a process of its own")
    ] = False,
    fit: Annotated[
        str | None, typer.Option(help="also print the longest input that fits, such as 24GB")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="time limit of a measurement in seconds")
    ] = 600.0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Show the memory of training and decoding, computed without weights or a run.

    Parameters, gradients, optimizer, activations with and without gradient checkpointing, keys and
    values or states, and the peaks of a training step, of a prompt and of a decoded token.
    """
    from attnzoo.evaluation.memory import MemoryCase
    from attnzoo.evaluation.memory_tables import fit_table, memory_table
    from attnzoo.evaluation.models import model_path
    from attnzoo.report.format import format_length
    from attnzoo.training import distil_memory  # noqa: F401 - registers the loss "distil"
    from attnzoo.training.budget import parse_size

    tokens, limit = parse_size(length, "--length"), fit and parse_size(fit, "--fit")
    path = str(model_path(model))
    cases = [
        MemoryCase(
            path=path,
            spec=spec,
            length=tokens,
            batch=batch,
            dtype=dtype,
            optimizer=optimizer,
            train=train,
            loss=loss,
        )
        for spec in _specs(path, attention)
    ]
    with show_status(problems if as_json else console) as show:
        rows = []
        for case in cases:
            show(case.attention)
            rows.append(_row(case, limit or None, timeout if measure else None, threads))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    title = f"{format_length(tokens)} tokens, {batch} row{'s' if batch > 1 else ''}, {dtype}"
    memory_table(rows, title).print(console)
    if fit:
        fit_table(rows, fit).print(console)
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


def _row(
    case: Any, limit: int | None, timeout: float | None, threads: int | None
) -> dict[str, Any]:
    """Return what is known of a case: computed, measured, what fits, and reasons of refusals."""
    from dataclasses import asdict

    import torch

    from attnzoo.compare.workers import OK, Workers, free_memory
    from attnzoo.errors import AttnzooError
    from attnzoo.evaluation.memory import TOTALS
    from attnzoo.evaluation.memory_fit import MemoryCurve
    from attnzoo.training.distil_memory import measured

    row: dict[str, Any] = {"attention": case.attention, **asdict(case)}
    row |= dict.fromkeys(("computed", "measured", "fit"), None) | {"reason": ""}
    try:
        curve = MemoryCurve(case)
        row["computed"] = curve.at(case.length).to_dict()
        if limit is not None:
            lengths = {total: curve.longest_that_fits(limit, total) for total in TOTALS}
            row["fit"] = {"bytes": limit, "longest": curve.longest, **lengths}
    except AttnzooError as error:
        return row | {"reason": str(error)}
    if timeout is not None:
        free = int(0.75 * free_memory())
        workers = Workers(
            threads=threads or torch.get_num_threads(),
            timeout=timeout,
            memory_bytes={"cpu": free} if free else {},
            preload=[measured.__module__],
        )
        result = workers.run(measured, case)
        if result["status"] == OK:
            row["measured"] = result["use"]
        else:
            row["reason"] = f"not measured: {result['status']} {result.get('reason', '')}".strip()
    return row
