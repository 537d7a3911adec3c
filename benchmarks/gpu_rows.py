"""Result rows of ``gpu.py``: JSON lines, appended as they are measured, and read to resume."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
CUDA_ERRORS = (
    "CUDA error",
    "Triton Error [CUDA]",
)  # after one of these, a process cannot use its GPU
KEY = ("group", "kind", "workload", "implementation")  # the fields that identify a measurement


class PeerUnavailable(Exception):
    """An implementation cannot run on this machine; the message gives the reason."""


class DeviceLost(SystemExit):
    """The process cannot use its GPU any more, for example after an illegal memory access."""


def read_rows(path: Path) -> list[Row]:
    """Return all complete rows of a file; a process that was killed may leave half of a line."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text("utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def append_row(path: Path, row: Row) -> None:
    """Append a row, on a line of its own even if the last one is incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")


def key_of(row: Row) -> tuple[str, ...]:
    """Return the fields that identify a row."""
    return tuple(str(row.get(name, "")) for name in KEY)


class Recorder:
    """Runs the measurements of one group that the file does not have yet."""

    def __init__(self, path: Path, group: str) -> None:
        self.path, self.group = path, group
        # an interrupted measurement has only a "start" row; a "crash" row names its measurement
        self.done = {key_of(row) for row in read_rows(path) if row["kind"] != "start"}
        self.done |= {
            tuple(row["key"]) for row in read_rows(path) if row["kind"] == "crash" and row["key"]
        }

    def measure(self, run: Callable[[], Row], **key: Any) -> None:
        """Run a measurement and append its row, unless the file has it.

        Args:
            run: Returns the measured fields.
            key: ``kind`` and the other fields that identify the row.
        """
        row = {"group": self.group, **key}
        if key_of(row) in self.done:
            return
        append_row(self.path, {"kind": "start", "group": self.group, "key": key_of(row)})
        lost = ""
        try:
            row |= run()
        except PeerUnavailable as reason:
            row["unavailable"] = str(reason)
        except Exception as error:  # a defect of a library or of a GPU is a result here
            row["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            row["where"] = traceback.format_exc(limit=-2).splitlines()[1].strip()
            lost = row["error"] if any(text in row["error"] for text in CUDA_ERRORS) else ""
        append_row(self.path, row)
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        print(", ".join(f"{k} {v}" for k, v in shown.items() if v not in ("", [])), flush=True)
        if lost:
            raise DeviceLost(lost)
