"""The command on model families: results of the recorded sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.commands.terminal import AsJson, console
from attnzoo.errors import SpecError, did_you_mean

if TYPE_CHECKING:
    from attnzoo.report.table import Table


def families(
    backend: Annotated[str | None, typer.Option(help="only this backend, with reasons")] = None,
    model_type: Annotated[
        str | None, typer.Option(help="only this model type, with reasons, such as gemma2")
    ] = None,
    version: Annotated[
        str, typer.Option("--transformers", help="version; default: the newest recorded one")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show which backends each model family of transformers supports, and why not the others."""
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
        _model_type_table(model_type, types[model_type], names).print(console)
        return
    _families_table(found, names).print(console)
    console.print(record.summary(found), soft_wrap=True)


def _model_type_table(model_type: str, entry: dict[str, Any], names: list[str]) -> Table:
    """Return a table of one model type with a row per backend."""
    from attnzoo.report.table import Table

    title = f"{model_type}: {entry['outcome']}"
    if "reason" in entry:
        title += f" ({entry['reason']})"
    rows = []
    for name in names if "backends" in entry else ():
        result = entry["backends"][name]
        details = [
            f"{what} refused: {reason}" for what, reason in result.get("refused", {}).items()
        ]
        reasons = " ".join(filter(None, [result.get("reason", ""), *details]))
        rows.append([name, result["outcome"], ", ".join(result.get("checked", ())), reasons])
    return Table(
        columns=["backend", "outcome", "checked", "reason"], rows=rows, title=title, numeric=False
    )


def _families_table(found: dict[str, Any], names: list[str]) -> Table:
    """Return a table of all families; with one backend, it has the reasons."""
    from attnzoo.families import record
    from attnzoo.report.table import Table

    rows = []
    for family, entries in record.by_family(found).items():
        cells = [record.family_outcome(entries.values(), name) for name in names]
        if len(names) == 1:
            cells.append(_first_reason(list(entries.values()), names[0]))
        rows.append([family, *cells])
    return Table(
        columns=["family", *names, *(["reason"] if len(names) == 1 else [])],
        rows=rows,
        title=f"transformers {found['transformers']}",
        numeric=False,
    )


def _first_reason(entries: list[dict[str, Any]], backend: str) -> str:
    from attnzoo.families import record

    for entry in entries:
        reason = entry.get("backends", {}).get(backend, {}).get("reason") or entry.get("reason")
        if reason:
            return record.short_reason(reason)
    return ""
