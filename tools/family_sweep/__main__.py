"""``python -m tools.family_sweep``: check model types, and write record, page and README line."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer


def main(
    model_type: Annotated[
        list[str] | None,
        typer.Argument(help="model types to check; default: all, which rewrites the record"),
    ] = None,
    jobs: Annotated[int, typer.Option(help="number of processes")] = os.cpu_count() or 1,
    update: Annotated[
        bool, typer.Option(help="update the record with the given model types")
    ] = False,
    backend: Annotated[
        list[str] | None, typer.Option(help="backend to check (repeatable); default: all")
    ] = None,
    own_windows: Annotated[
        bool,
        typer.Option(help="check only backends with a window in families that have windows"),
    ] = False,
) -> None:
    """Check model families under backends; without arguments, check all and write the record."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from attnzoo.errors import did_you_mean
    from attnzoo.registry import BUILTIN
    from tools.family_sweep import record
    from tools.family_sweep.output import write_pages, write_record
    from tools.family_sweep.own_windows import types_with_windows
    from tools.family_sweep.sweep import prepare_process, sweep

    start, done = time.monotonic(), 0

    def on_entry(name: str, entry: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        results = entry.get("backends", {})
        outcomes = {key: result["outcome"] for key, result in results.items()}
        parts = [results, entry.get("windows", {}), entry.get("own_windows", {})]
        checked = [x for part in parts for x in part.items()]
        wrong = [f"{key}: {result['reason']}" for key, result in checked if _is_wrong(result)]
        details = outcomes or entry.get("reason", "")
        typer.echo(f"{done:4d} {name}: {entry['outcome']} {details} {' '.join(wrong)}", err=True)

    for name in model_type or ():
        if name not in CONFIG_MAPPING:
            hint = did_you_mean(name, list(CONFIG_MAPPING))
            raise typer.BadParameter(f"transformers has no model type {name!r}.{hint}")
    prepare_process()
    types = model_type or (types_with_windows() if own_windows else list(CONFIG_MAPPING))
    names, whole = backend or list(BUILTIN), not (backend or own_windows)
    result = sweep(
        *(types, [] if own_windows else names, jobs, on_entry),
        windowed=whole,
        own_windows=own_windows or whole,
    )
    typer.echo(f"{time.monotonic() - start:.0f} s, {result['cpu_seconds']} s of CPU time")
    if update:
        result = merge(record.read(result["transformers"]), result)
    if update or (whole and not model_type):
        for path in (write_record(result), *write_pages()):
            typer.echo(path)
        typer.echo(record.summary(result))


def merge(recorded: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the checked types and, of each, the checked parts replaced."""
    types = dict(recorded["types"])
    for name, entry in result["types"].items():
        if entry["outcome"] == "checked":
            before = types.get(name, {})
            backends = before.get("backends", {}) | entry.get("backends", {})
            kept = {key: before[key] for key in ("windows", "own_windows") if key in before}
            entry = {**kept, **entry, "backends": backends}
        types[name] = entry
    return {**recorded, "types": types}


def _is_wrong(result: dict[str, Any]) -> bool:
    return result["outcome"] in ("different", "failed")


if __name__ == "__main__":
    typer.run(main)
