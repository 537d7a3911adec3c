"""The command doctor: check an installation."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from attnzoo.commands.terminal import console, problems


def doctor(
    full: Annotated[
        bool,
        typer.Option("--all", help="also narrower instruction sets, and head sizes up to 256"),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="check GPU kernels again that have a verdict")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Check versions, kernels, fused attention and transformers; prints a table for an issue.

    The verdicts about GPU kernels are kept: impl="auto" selects kernels only where they passed.

    The exit code is 1 if a check fails, and 0 if something is merely not available.
    """
    from attnzoo.evaluation.installation import WRONG, check_installation
    from attnzoo.report.table import Table

    rows = []
    with problems.status("checking") as progress:
        for row in check_installation(full, fresh):
            rows.append(row)
            progress.update(f"checked {row.check}")
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        cells = [[row.check, row.status, f"{row.seconds:.1f} s", row.detail] for row in rows]
        columns = ["check", "result", "time", "detail"]
        console.print(Table(columns=columns, rows=cells).markdown(), soft_wrap=True, end="")
        counts = Counter(row.status for row in rows)
        console.print(", ".join(f"{n} {status}" for status, n in counts.items()))
    raise typer.Exit(any(row.status == WRONG for row in rows))
