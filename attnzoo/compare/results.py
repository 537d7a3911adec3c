"""Rows of results as JSON lines: appended one by one, read again to go on after a kill."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import attnzoo
from attnzoo.errors import SpecError

FORMAT = 1
FILE = "results.jsonl"
Row = dict[str, Any]


def prepare(out: Path, *, fresh: bool) -> list[Row]:
    """Make the folder, see that it can be written, and read what an earlier run left.

    Args:
        out: Folder of results.
        fresh: Whether to set earlier results aside, as ``results.jsonl.old``.

    Raises:
        SpecError: The folder cannot be written, or its results are not of this version or whole.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SpecError(
            f"{str(out)!r} cannot be written ({error.strerror or error}); give --out a folder that "
            "can be made and written"
        ) from error
    path = out / FILE
    if fresh and path.exists():
        path.replace(path.with_suffix(".jsonl.old"))
    return read(path) if path.exists() else []


def read(path: Path) -> list[Row]:
    """Read all rows.

    Raises:
        SpecError: A row is cut off, malformed, or was written by another version.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"The results in {str(path)!r} cannot be read: {error}") from error
    remedy = "use --fresh to measure anew (the file is kept as .old), or give another --out"
    rows = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if number == len(lines) and not text.endswith("\n"):
                raise ValueError("no end of line")
        except ValueError:
            where = "the last one, is cut off" if number == len(lines) else "is no JSON"
            raise SpecError(
                f"Line {number} of {str(path)!r}, {where}; delete that line to go on from the "
                f"others, or {remedy}"
                if number == len(lines)
                else f"Line {number} of {str(path)!r} {where}; {remedy}"
            ) from None
        if not isinstance(row, dict) or "format" not in row or "status" not in row:
            raise SpecError(f"Line {number} of {str(path)!r} is no result of attnzoo; {remedy}")
        mine = (FORMAT, attnzoo.__version__)
        if (theirs := (row["format"], row.get("attnzoo"))) != mine:
            raise SpecError(
                f"Line {number} of {str(path)!r} was written by attnzoo {theirs[1]} (format "
                f"{theirs[0]}), this is {mine[1]} (format {mine[0]}), and their numbers do not "
                f"compare; {remedy}"
            )
        rows.append(row)
    return rows


def append(out: Path, row: Row) -> Row:
    """Append a row, in one write, so that a kill leaves whole rows; returns it as it is read."""
    line = json.dumps(row)
    with (out / FILE).open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())
        os.fsync(file.fileno())
    read_again: Row = json.loads(line)
    return read_again


def commit() -> str | None:
    """Return the commit of this package, where it runs from a checkout of its own repository."""
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
