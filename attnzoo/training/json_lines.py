"""Files with one JSON object per line, which a run appends to at every step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnzoo.report.atomic_write import atomic_write


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append an object to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file in order; none if there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def truncate_lines(path: Path, total: int) -> None:
    """Remove the lines of steps after the checkpoint, which a resumed run repeats."""
    if path.is_file():
        lines = path.read_text("utf-8").splitlines()
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["total"] <= total]
        atomic_write(path, "".join(f"{line}\n" for line in kept))
