"""Commands on one model: list, describe, swap, convert."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.commands.options import Model, spec_of
from attnzoo.commands.terminal import AsJson, console
from attnzoo.errors import SpecError

if TYPE_CHECKING:
    from attnzoo.hf.describe import Description


def list_backends(
    name: Annotated[
        str | None, typer.Argument(help="a backend, for the meaning of its options")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the attention backends, or explain the options of one of them with its papers."""
    from attnzoo.commands.option_docs import FLAGS, backend_docs
    from attnzoo.registry import available_backends
    from attnzoo.report.table import Table

    def show(columns: list[str], cells: list[list[str]]) -> None:
        Table(columns=columns, rows=cells, numeric=False).print(console)

    rows = [backend_docs(found) for found in ([name] if name else available_backends())]
    for row in rows:
        row["capabilities"] = ", ".join(x.replace("_", "-") for x in FLAGS if row[x])
    if as_json:
        print(json.dumps(rows, indent=2))
    elif name:
        row = rows[0]
        for text in (f"{row['name']}: {row['summary']}", row["config"], row["capabilities"]):
            console.print(text, highlight=False)
        show(
            ["option", "default", "accepts", "description"],
            [
                [option, str(default), row["accepted"][option], row["descriptions"][option]]
                for option, default in row["options"].items()
            ],
        )
        for option, values in row["choices"].items():
            show([option, "description"], [[value, text] for value, text in values.items()])
    else:
        cells = [
            [
                *(row["name"], row["summary"], row["capabilities"]),
                ", ".join(f"{option}={value}" for option, value in row["options"].items()),
            ]
            for row in rows
        ]
        show(["backend", "description", "capabilities", "options (defaults)"], cells)
        console.print("attnzoo list NAME explains the options of a backend.")


def describe(
    path: Model,
    as_json: AsJson = False,
) -> None:
    """Show the attention backend of each layer of a saved model; loads no weights."""
    from attnzoo.hf.describe import describe as describe_model
    from attnzoo.hf.saving.files import empty_model

    _print_description(describe_model(empty_model(path)), as_json)


def _print_description(description: Description, as_json: bool) -> None:
    from attnzoo.hf.describe import COLUMNS
    from attnzoo.report.table import Table

    if as_json:
        print(json.dumps([asdict(layer) for layer in description], indent=2))
        return
    table = Table(columns=COLUMNS, rows=description.rows(), title=description.model, numeric=False)
    table.print(console)


def swap(
    path: Model,
    attention: Annotated[
        str,
        typer.Option(
            help="backend of all layers without an exception: NAME or NAME:OPTION=VALUE,..."
        ),
    ],
    output_dir: Annotated[Path, typer.Option(help="new folder for the swapped model")],
    layers: Annotated[
        list[str] | None,
        typer.Option(help="exceptions: LAYERS=NAME, such as 0-1,11=flash (repeatable)"),
    ] = None,
    else_: Annotated[
        str | None, typer.Option("--else", help="backend of layers that --attention refuses")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a copy of a model with another attention, which from_pretrained loads."""
    from attnzoo.hf.describe import describe as describe_model
    from attnzoo.hf.saving.files import swap_files
    from attnzoo.report.output_path import check_folder

    spec = spec_of(attention, layers, else_)
    check_folder(output_dir)
    _print_description(describe_model(swap_files(path, spec, output_dir)), as_json)
    if not as_json:
        console.print(
            f"Written to {output_dir}; load it with from_pretrained after `import attnzoo`."
        )


def convert(
    path: Model,
    to: Annotated[
        str,
        typer.Option(
            metavar="CLASS",
            help="family of the class: the model's own; for Llama, Mistral and Qwen 2 granite_swa, "
            "ministral, mistral or qwen2, and mellum for Qwen 3, by the windows that each takes "
            "(docs/serving.md)",
        ),
    ],
    output_dir: Annotated[Path, typer.Option(help="new folder for the converted model")],
    plan: Annotated[
        Path | None,
        typer.Option(help="plan or spec in JSON for a model that is not swapped"),
    ] = None,
    recurrent: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="layers that become recurrent, such as 1-2, to be trained by recover --teacher "
            "(experimental; --to qwen3_5_text of a Qwen 3: Gated DeltaNet)",
        ),
    ] = None,
) -> None:
    """Write a model of exact layers as a stock class, which engines run without attnzoo.

    Layers of softmax and of sliding windows are exact; other layers are refused.
    """
    from attnzoo.hf.stock.convert import convert_files
    from attnzoo.report.output_path import check_folder

    check_folder(output_dir)
    spec, recurrent = _read_plan(plan, recurrent)
    layers = convert_files(path, to, output_dir, spec, recurrent=recurrent)
    console.print(f"Layers: {', '.join(layers)}.", soft_wrap=True, markup=False)
    console.print(
        f"Written to {output_dir}; README.md there says which engines run it.",
        soft_wrap=True,
        markup=False,
    )


def _read_plan(plan: Path | None, recurrent: str | None) -> tuple[Any, str | None]:
    """Return the spec of ``--plan``, and the recurrent layers of it or of ``--recurrent``."""
    from attnzoo.training.plan import read_plan

    if plan is None:
        return None, recurrent
    planned, _ = read_plan(plan)
    if not isinstance(planned, str):
        return planned, recurrent
    if recurrent is not None:
        raise SpecError(f"{str(plan)!r} has the recurrent layers; leave --recurrent out")
    return None, planned
