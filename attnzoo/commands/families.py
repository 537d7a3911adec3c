"""The command on model families: what the recorded sweep found."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from attnzoo.commands.terminal import console
from attnzoo.errors import SpecError, did_you_mean


def families(
    backend: Annotated[str | None, typer.Option(help="this backend only, with reasons")] = None,
    model_type: Annotated[
        str | None, typer.Option(help="this model type only, with reasons, such as gemma2")
    ] = None,
    version: Annotated[
        str, typer.Option("--transformers", help="version; the newest that was swept without")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Tell which model families run which backend: equal, runs, or refused and why."""
    import json

    from attnzoo.families import record

    found = record.read(version)
    names = record.backends(found)
    if backend is not None and backend not in names:
        raise SpecError(
            f"The sweep has no backend {backend!r}.{did_you_mean(backend, names)} "
            f"It has {', '.join(names)}."
        )
    types = found["types"]
    if model_type is not None:
        types = {model_type: record.model_type_entry(found, model_type)}
    names = [backend] if backend is not None else names
    if as_json:
        print(json.dumps({"transformers": found["transformers"], "types": types}, indent=2))
        return
    if model_type is not None:
        console.print(_of_type(model_type, types[model_type], names))
        return
    console.print(_of_all(found, names))
    console.print(record.summary(found), soft_wrap=True)


def _of_type(model_type: str, entry: dict[str, Any], names: list[str]) -> Any:
    """Make a table of one model type: a line for each backend."""
    from rich.table import Table

    title = f"{model_type}: {entry['outcome']}"
    if "reason" in entry:
        title += f" ({entry['reason']})"
    table = Table(title=title, title_justify="left")
    for head in ("backend", "outcome", "checked", "why"):
        table.add_column(head, overflow="fold")
    for name in names if "backends" in entry else ():
        result = entry["backends"][name]
        refused = [f"{what} refused: {why}" for what, why in result.get("refused", {}).items()]
        why = " ".join(filter(None, [result.get("reason", ""), *refused]))
        table.add_row(name, result["outcome"], ", ".join(result.get("checked", ())), why)
    return table


def _of_all(found: dict[str, Any], names: list[str]) -> Any:
    """Make a table of all families; of one backend, with the reason."""
    from rich.table import Table

    from attnzoo.families import record

    table = Table(title=f"transformers {found['transformers']}", title_justify="left")
    for head in ("family", *names, *(["why"] if len(names) == 1 else [])):
        table.add_column(head, overflow="fold")
    for family, entries in record.by_family(found).items():
        cells = [record.family_outcome(entries.values(), name) for name in names]
        if len(names) == 1:
            cells.append(_first_reason(list(entries.values()), names[0]))
        table.add_row(family, *cells)
    return table


def _first_reason(entries: list[dict[str, Any]], backend: str) -> str:
    from attnzoo.families import record

    for entry in entries:
        reason = entry.get("backends", {}).get(backend, {}).get("reason") or entry.get("reason")
        if reason:
            return record.short_reason(reason)
    return ""
