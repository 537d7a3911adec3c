"""Result rows as JSON lines, appended one by one, so that an interrupted run can resume."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

import attnzoo
from attnzoo.errors import SpecError
from attnzoo.evaluation.timing import machine
from attnzoo.report.output_path import OutputError, check_folder

FORMAT = 1
FILE = "results.jsonl"
Row = dict[str, Any]


class Results:
    """The rows of a folder. What was measured there is not measured again.

    A row is that of a measurement if all fields that describe the measurement are equal.

    Args:
        out: Folder of results, which is created.
        fresh: Whether to rename earlier results to ``results.jsonl.old`` and start over.
        about: Fields of all rows of a command: the machine, the model.

    Raises:
        OutputError: The folder cannot be written.
        SpecError: Its results are malformed or of another version.
    """

    def __init__(self, out: Path, *, fresh: bool, **about: Any) -> None:
        check_folder(out)
        out.mkdir(parents=True, exist_ok=True)
        path = out / FILE
        if fresh and path.exists():
            path.replace(path.with_suffix(".jsonl.old"))
        self.out, self.rows = out, read(path) if path.exists() else []
        self.about: Row = {
            "format": FORMAT,
            "attnzoo": attnzoo.__version__,
            "machine": machine() | {"transformers": transformers.__version__},
            **about,
        }

    def find(self, what: Row) -> Row | None:
        """Return the row of a measurement, given all fields that describe it."""
        fields = json.loads(json.dumps(self.about | what)).items()
        return next((row for row in self.rows if fields <= row.items()), None)

    def row(self, what: Row, measure: Callable[[], Row]) -> Row:
        """Return the row of a measurement; without one, append it with what ``measure`` returns."""
        row = self.find(what)
        if row is None:
            row = append(self.out, self.about | what | measure())
            self.rows.append(row)
        return row


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
