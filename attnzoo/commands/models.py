"""Commands on one model: list, describe, swap, demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.spec_options import spec_of
from attnzoo.commands.terminal import console


def list_backends(
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """List the attention backends: what they are, and what they can do."""
    from attnzoo.registry import available_backends, get_backend

    rows: list[dict[str, Any]] = []
    for name in available_backends():
        backend = get_backend(name)
        flags = ("exact", "causal", "bidirectional", "cross_attention", "recurrent")
        rows.append(
            {
                "name": name,
                "summary": (backend.__doc__ or "").strip().splitlines()[0],
                "options": backend.config_class.default_options(),
                "impls": list(backend.impls),
                # what depends on the layer or on options is a property of classes: it can be had
                **{flag: bool(getattr(backend, flag)) for flag in flags},
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    table = Table()
    for head in ("backend", "what it is", "can", "options (defaults)"):
        table.add_column(head, overflow="fold")
    for row in rows:
        can = [f.replace("_", "-") for f in flags if row[f]]
        options = ", ".join(f"{name}={value}" for name, value in row["options"].items())
        table.add_row(row["name"], row["summary"], ", ".join(can), options)
    console.print(table)


def describe(
    path: Annotated[Path, typer.Argument(help="folder of a saved model")],
) -> None:
    """Tell, layer by layer, which attention a saved model runs; reads its config only."""
    from attnzoo.integrations.describe import describe as describe_model
    from attnzoo.integrations.files import empty_model

    console.print(describe_model(empty_model(path)).table())


def swap(
    path: Annotated[Path, typer.Argument(help="folder of a saved model")],
    attention: Annotated[str, typer.Option(help="backend for every layer not named otherwise")],
    out: Annotated[Path, typer.Option(help="new folder for the swapped model")],
    option: Annotated[
        list[str] | None, typer.Option("--set", help="option of the backend: NAME=VALUE")
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option(help="exceptions: LAYERS=BACKEND, such as 0-1,11=flash")
    ] = None,
    else_: Annotated[
        str | None, typer.Option("--else", help="backend for layers that the first one refuses")
    ] = None,
) -> None:
    """Write a copy of a model with its attention swapped; from_pretrained gives it back."""
    from attnzoo.integrations.describe import describe as describe_model
    from attnzoo.integrations.files import swap_files

    spec = spec_of(attention, option, layers, else_)
    console.print(describe_model(swap_files(path, spec, out)).table())
    console.print(f"Written to {out}; load it with from_pretrained after `import attnzoo`.")


def demo(
    model: Annotated[
        Path | None, typer.Option(help="folder of a causal model; the embedded one without")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="text file to judge it on")] = None,
    attention: Annotated[
        list[str] | None, typer.Option(help="backend to show (repeatable); all without")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for results and report")] = Path("attnzoo-demo"),
    quick: Annotated[bool, typer.Option(help="fewer rows, contexts up to 1k")] = False,
) -> None:
    """Swap every attention into one model; show quality, recall, decoding speed and cache size."""
    from attnzoo.demo.report import summary, terminal_table, write_report
    from attnzoo.demo.run import run_demo
    from attnzoo.report.page import WITHOUT_PLOTLY

    results = run_demo(
        model=model, text=text, out=out, names=attention, quick=quick, console=console
    )
    console.print(terminal_table(results))
    for result in results:
        if result.refused:
            console.print(f"[bold]{result.label}[/] was refused: {result.refused}", soft_wrap=True)
    console.print(summary(results))
    console.print(f"Numbers: {out / 'results.json'}")
    page = write_report(out, results)
    console.print(f"Report:  {page}" if page else WITHOUT_PLOTLY, markup=False)
