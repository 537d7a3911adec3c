"""Result rows as JSON lines, appended one by one, so that an interrupted run can resume."""

from __future__ import annotations

import errno
import json
import os
import subprocess
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
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if number == len(lines) and not text.endswith("\n"):
                raise ValueError("no end of line")
        except (ValueError, RecursionError):
            if number == len(lines):
                fault = "the last one, is truncated; delete that line to resume from the others, or"
                raise SpecError(f"Line {number} of {str(path)!r}, {fault} {remedy}") from None
            raise SpecError(f"Line {number} of {str(path)!r} is not JSON; {remedy}") from None
        if not isinstance(row, dict) or "format" not in row or "status" not in row:
            raise SpecError(f"Line {number} of {str(path)!r} is not a result of attnzoo; {remedy}")
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


def commit() -> str | None:
    """Return the commit of this package if it runs from a git checkout, else ``None``."""
    root = Path(attnzoo.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
