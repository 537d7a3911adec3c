"""Result rows as JSON lines, appended one by one, so that an interrupted run can resume."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import attnzoo
from attnzoo.errors import SpecError
from attnzoo.report.output_path import OutputError, check_folder

FORMAT = 1
FILE = "results.jsonl"
Row = dict[str, Any]


def open_results(out: Path, *, fresh: bool) -> list[Row]:
    """Create a results folder and return the rows of earlier runs.

    Args:
        out: Folder of results.
        fresh: Whether to rename earlier results to ``results.jsonl.old`` and start over.

    Raises:
        OutputError: The folder cannot be written.
        SpecError: Its results are malformed or of another version.
    """
    check_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / FILE
    if fresh and path.exists():
        path.replace(path.with_suffix(".jsonl.old"))
    return read(path) if path.exists() else []


def read(path: Path) -> list[Row]:
    """Return the rows of a results file.

    Raises:
        SpecError: A row is truncated, malformed, or was written by another version.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"The results in {str(path)!r} cannot be read: {error}") from error
    remedy = "use --fresh to start over (the file is kept as .old), or give another --output-dir"
    rows = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            row = json.loads(line) if line.endswith("\n") else None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or "format" not in row or "status" not in row:
            raise SpecError(
                f"Line {number} of {str(path)!r} is truncated, or not a result of attnzoo; delete "
                f"that line to resume from the others, or {remedy}"
            )
        mine = (FORMAT, attnzoo.__version__)
        if (theirs := (row["format"], row.get("attnzoo"))) != mine:
            raise SpecError(
                f"Line {number} of {str(path)!r} was written by attnzoo {theirs[1]} (format "
                f"{theirs[0]}), but this is {mine[1]} (format {mine[0]}), so the results are not "
                f"comparable; {remedy}"
            )
        rows.append(row)
    return rows


def append(out: Path, row: Row) -> Row:
    """Append a row in one write, so that a kill leaves no partial row; return the parsed row.

    Raises:
        OutputError: The row cannot be written; the earlier rows stay as they are.
    """
    line = json.dumps(row, allow_nan=False)
    data = f"{line}\n".encode()
    with (out / FILE).open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(end)
            raise OutputError(
                f"{str(out / FILE)!r} cannot be written ({error.strerror or error}); free disk "
                "space, then repeat the command to continue after the last row"
            ) from error
    parsed: Row = json.loads(line)
    return parsed
