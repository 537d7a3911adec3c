"""The command that computes and measures memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.compare import Model, Threads
from attnzoo.commands.spec_options import Attentions, specs_of
from attnzoo.commands.terminal import AsJson, console, problems
from attnzoo.report.live import show_status

Length = Annotated[str, typer.Option(help="tokens per row, such as 32k")]
Batch = Annotated[int, typer.Option(min=1, help="rows")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="data type of the weights; default: that of the saved model (recover and finetune "
        "train in float32)"
    ),
]
Optimizer = Annotated[str, typer.Option(help="adamw, adamw_8bit (bitsandbytes), adafactor or sgd")]
Train = Annotated[
    str, typer.Option(help="full, lora (adapters and extras) or extras (of the backends)")
]
LoraRank = Annotated[int, typer.Option(help="rank of LoRA adapters")]
Loss = Annotated[str, typer.Option(help="lm, or distil (of recover, with a teacher)")]
Teacher = Annotated[
    str | None,
    typer.Option(
        help="shared (with frozen weights), copy, or offloaded (to the CPU); default: as in recover"
    ),
]
TeacherDtype = Annotated[
    str | None,
    typer.Option(help="data type of a copy, or nf4 (linear layers in 4 bits); default: --dtype"),
]
Precision = Annotated[str, typer.Option(help="autocast: no or bf16")]
Gpus = Annotated[int, typer.Option(help="GPUs that share --batch rows; the memory is that of one")]
Sharding = Annotated[
    str, typer.Option(help="fsdp2 or zero3 (all), zero2 (not weights) or ddp (nothing)")
]
Accumulate = Annotated[int, typer.Option(help="micro-batches of --batch (gradient accumulation)")]
LoadIn4bit = Annotated[
    bool, typer.Option("--load-in-4bit", help="frozen linear layers in 4 bits (QLoRA)")
]
ActivationOffloading = Annotated[
    bool,
    typer.Option(
        "--activation-offloading", help="activations in CPU memory until the backward pass"
    ),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="also run each attention, in a process of its own")
]
Fit = Annotated[
    str | None, typer.Option(help="also print the longest input that fits, such as 24GB")
]
Timeout = Annotated[float, typer.Option(min=1, help="time limit of a measurement in seconds")]


def memory(
    model: Model = "embedded",
    length: Length = "4k",
    batch: Batch = 1,
    attention: Attentions = None,
    dtype: Dtype = None,
    optimizer: Optimizer = "adamw",
    train: Train = "full",
    lora_rank: LoraRank = 16,
    loss: Loss = "lm",
    teacher: Teacher = None,
    teacher_dtype: TeacherDtype = None,
    precision: Precision = "no",
    gpus: Gpus = 1,
    sharding: Sharding = "fsdp2",
    accumulate: Accumulate = 1,
    load_in_4bit: LoadIn4bit = False,
    activation_offloading: ActivationOffloading = False,
    measure: Measure = False,
    fit: Fit = None,
    timeout: Timeout = 600.0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Show the memory of training and decoding, computed without weights or a run.

    Parameters, gradients, optimizer, activations with and without gradient checkpointing, keys and
    values or states, and the peaks of a training step, of a prompt and of a decoded token.
    """
    from attnzoo.evaluation.memory_case import MemoryCase
    from attnzoo.evaluation.models import model_path
    from attnzoo.hf.saving.dtype import dtype_name, saved_dtype
    from attnzoo.training import distil_memory  # noqa: F401 - registers the loss "distil"
    from attnzoo.training.budget import parse_size

    limit = fit and parse_size(fit, "--fit")
    path = str(model_path(model))
    dtype = dtype or dtype_name(saved_dtype(Path(path)))
    cases = [
        MemoryCase(
            path=path,
            spec=spec,
            length=parse_size(length, "--length"),
            batch=batch,
            dtype=dtype,
            optimizer=optimizer,
            train=train,
            loss=loss,
            lora_rank=lora_rank,
            teacher=teacher,
            teacher_dtype=teacher_dtype,
            precision=precision,
            gpus=gpus,
            sharding=sharding,
            accumulate=accumulate,
            load_in_4bit=load_in_4bit,
            activation_offloading=activation_offloading,
        )
        for spec in _specs(path, attention)
    ]
    with show_status(problems if as_json else console) as show:
        given = (limit or None, timeout if measure else None, threads)
        rows = [_row(case, *given, show) for case in cases]
    _print_rows(rows, cases[0], fit, as_json)


def _print_rows(rows: list[dict[str, Any]], case: Any, fit: str | None, as_json: bool) -> None:
    """Print the rows as JSON, or their tables and the reasons of refusals.

    Args:
        rows: As of :func:`_row`.
        case: One of the cases, which differ in the attention.
        fit: The memory of ``--fit``.
        as_json: Whether to print JSON.
    """
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from attnzoo.evaluation.memory_tables import fit_table, memory_table
    from attnzoo.report.format import format_length

    length, batch, gpus = format_length(case.length), case.batch, case.gpus
    title = f"{length} tokens, {batch} row{'s' if batch > 1 else ''}, {case.dtype}"
    title += f", one of {gpus} GPUs ({case.sharding})" if gpus > 1 else ""
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
    case: Any,
    limit: int | None,
    timeout: float | None,
    threads: int | None,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Return what is known of a case: computed, measured, what fits, and reasons of refusals."""
    from dataclasses import asdict

    import torch

    from attnzoo.compare.workers import OK, Workers, free_memory
    from attnzoo.errors import AttnzooError
    from attnzoo.evaluation.memory import TOTALS
    from attnzoo.evaluation.memory_fit import MemoryCurve
    from attnzoo.training.distil_memory import measured

    show(case.attention)
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
