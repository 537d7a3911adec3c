"""The command that computes memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.options import Attentions, Model, parse_size, specs_of
from attnzoo.commands.terminal import AsJson, console, problems, show_status
from attnzoo.errors import AttnzooError

COLUMNS = {name: name for name in ("parameters", "gradients", "optimizer", "activations")} | {
    "activations_checkpointed": "checkpointed",
    "training": "training",
    "training_checkpointed": "checkpointed",
    "cache": "cache",
    "inference": "prompt",
    "decoding": "decoding",
}
CAPTION = (
    "Training, prompt and decoding are peaks, weights included; checkpointed: with gradient "
    "checkpointing. Tensors on a CPU: without the process itself, and on a GPU without kernels' "
    "own buffers."
)


def memory(
    path: Model = Path("embedded"),
    max_length: Annotated[str, typer.Option(help="tokens per row, such as 32k")] = "4k",
    batch_size: Annotated[int, typer.Option(min=1, help="rows")] = 1,
    attention: Attentions = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="data type of the weights; default: that of the saved model (recover and "
            "finetune train in float32)"
        ),
    ] = None,
    optim: Annotated[
        str, typer.Option(help="adamw, adamw_8bit (bitsandbytes), adafactor or sgd")
    ] = "adamw",
    train: Annotated[
        str, typer.Option(help="full, lora (adapters and extras) or extras (of the backends)")
    ] = "full",
    bf16: Annotated[bool, typer.Option("--bf16", help="autocast to bfloat16")] = False,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="frozen linear layers in 4 bits (QLoRA)")
    ] = False,
    gpus: Annotated[
        int,
        typer.Option(min=1, help="GPUs that share --batch-size rows and divide weights (FSDP2)"),
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Show the memory of training and decoding, computed without weights or a run.

    Parameters, gradients, optimizer, activations with and without gradient checkpointing, keys and
    values or states, and the peaks of a training step, of a prompt and of a decoded token.
    """
    from attnzoo.evaluation.memory import MemoryEstimator
    from attnzoo.hf.saving.dtype import dtype_name, saved_dtype
    from attnzoo.report.format import format_length

    tokens = parse_size(max_length, "--max-length")
    settings: dict[str, Any] = {
        **{"batch": batch_size, "dtype": dtype or dtype_name(saved_dtype(path))},
        **{"optimizer": optim, "train": train, "bf16": bf16},
        **{"load_in_4bit": load_in_4bit, "gpus": gpus},
    }
    found = [MemoryEstimator(path=path, spec=x, **settings) for x in _specs(path, attention)]
    rows = []
    with show_status(problems if as_json else console) as show:
        for estimator in found:
            show(estimator.attention)
            spec = estimator.spec and estimator.spec.to_dict()
            row = {"attention": estimator.attention, "spec": spec, "length": tokens, **settings}
            try:
                row |= {"computed": estimator.at(tokens).to_dict(), "reason": ""}
            except AttnzooError as error:
                row |= {"computed": None, "reason": str(error)}
            rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    title = f"{format_length(tokens)} tokens, {batch_size} row{'s' if batch_size > 1 else ''}, "
    title += settings["dtype"] + (f", one of {gpus} GPUs" if gpus > 1 else "")
    _print(rows, title)


def _print(rows: list[dict[str, Any]], title: str) -> None:
    """Print the memory of every attention, and the reasons of those without."""
    from attnzoo.report.format import format_bytes
    from attnzoo.report.table import Table

    body = [
        [row["attention"], *(format_bytes(row["computed"][key]) for key in COLUMNS)]
        for row in rows
        if row["computed"]
    ]
    columns = ["attention", *COLUMNS.values()]
    Table(columns=columns, rows=body, title=title, caption=CAPTION).print(console)
    for row in rows:
        if row["reason"]:
            console.print(f"{row['attention']}: {row['reason']}", soft_wrap=True, highlight=False)


def _specs(path: Path, attention: list[str] | None) -> list[Any]:
    """Return the attentions; ``None`` is that of the model's config."""
    from attnzoo.compare.cases import default_specs
    from attnzoo.compare.run import read_model_info
    from attnzoo.hf.saving.files import read_config

    if attention is None:
        read_config(path)  # a model that cannot be read is no row of a table
        return [None]
    causal = read_model_info(str(path)).causal

    def presets(names: list[str] | None) -> list[Any]:
        return default_specs(names, causal=causal)

    return specs_of(attention, presets) or presets(None)
