"""``python -m attnzoo.families``: sweep every model type; write record, page and README line."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer


def main(
    model_type: Annotated[
        list[str] | None,
        typer.Argument(help="model types to check; without, all, into the record"),
    ] = None,
    jobs: Annotated[int, typer.Option(help="processes at the same time")] = os.cpu_count() or 1,
    update: Annotated[
        bool, typer.Option(help="write the model types that are named into the record, too")
    ] = False,
    backend: Annotated[
        list[str] | None, typer.Option(help="backend to check (repeatable); all without")
    ] = None,
) -> None:
    """Check model families under backends; without arguments all of them, into the record."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from attnzoo.backends.base import BUILTIN
    from attnzoo.errors import did_you_mean
    from attnzoo.families import page, record
    from attnzoo.families.sweep import sweep

    begin, done = time.monotonic(), 0

    def tell(name: str, entry: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        results = entry.get("backends", {})
        found = {key: result["outcome"] for key, result in results.items()}
        wrong = [f"{key}: {r['reason']}" for key, r in results.items() if _is_wrong(r)]
        what = found or entry.get("reason", "")
        typer.echo(f"{done:4d} {name}: {entry['outcome']} {what} {' '.join(wrong)}", err=True)

    for name in model_type or ():
        if name not in CONFIG_MAPPING:
            close = did_you_mean(name, list(CONFIG_MAPPING))
            raise typer.BadParameter(f"transformers has no model type {name!r}.{close}")
    types, names = model_type or list(CONFIG_MAPPING), backend or list(BUILTIN)
    made = sweep(types, names, jobs, tell)
    typer.echo(f"{time.monotonic() - begin:.0f} s, {made['cpu_seconds']} s of processors")
    if update:
        made = {
            **(kept := record.read(made["transformers"])),
            "types": kept["types"] | made["types"],
        }
    if update or not (model_type or backend):
        for path in (record.write(made), *page.write_pages()):
            typer.echo(path)
        typer.echo(record.summary(made))


def _is_wrong(result: dict[str, Any]) -> bool:
    return result["outcome"] in ("different", "failed")


if __name__ == "__main__":
    typer.run(main)
