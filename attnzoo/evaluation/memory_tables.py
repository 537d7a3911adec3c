"""Tables of memory: parts and totals of each attention, and the longest input that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnzoo.evaluation.memory import TOTALS
from attnzoo.report.format import format_bytes, format_length
from attnzoo.report.table import Table

COLUMNS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "activations_checkpointed": "checkpointed",
    "training": "training",
    "training_checkpointed": "checkpointed",
    "cache": "cache",
    "inference": "prompt",
    "decoding": "decoding",
}
OFFLOADED = {"offloaded": "on the CPU", "offloaded_checkpointed": "checkpointed"}
CAPTION = (
    "Training, prompt and decoding are peaks, weights included; checkpointed: with gradient "
    "checkpointing. Tensors on a CPU: without the process itself, and on a GPU without kernels' "
    "own buffers."
)
NOTHING, EVERYTHING = "none", "all lengths"


def memory_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> Table:
    """Return the memory of every attention.

    Args:
        rows: With ``attention``, ``computed`` and optionally ``measured``, as plain data of a
            ``MemoryUse``; rows without ``computed`` are left out.
        title: Title of the table.
    """
    rows = [row for row in rows if row.get("computed")]
    columns = COLUMNS
    if any(row["computed"].get("offloaded") for row in rows):
        columns = columns | OFFLOADED
    body: list[list[str]] = []
    for row in rows:
        computed, measured = row["computed"], row.get("measured")
        name = row["attention"]
        if not measured:
            body.append([name, *(format_bytes(computed[key]) for key in columns)])
            continue
        ratios = [_ratio(computed[key], measured[key]) for key in columns]
        body += [
            [f"{name}, computed", *(format_bytes(computed[key]) for key in columns)],
            [f"{name}, measured", *(format_bytes(measured[key]) for key in columns)],
            ["computed / measured", *ratios],
        ]
    return Table(columns=["attention", *columns.values()], rows=body, title=title, caption=CAPTION)


def _ratio(computed: int | None, measured: int | None) -> str:
    return "-" if computed is None or not measured else f"{computed / measured:.2f}"


def fit_table(rows: Sequence[Mapping[str, Any]], limit: str) -> Table:
    """Return the longest input of every attention that fits a memory.

    Args:
        rows: With ``attention`` and ``fit``: lengths by total, and ``longest``, the most tokens
            that the model takes.
        limit: The memory, as text.
    """
    body = [
        [row["attention"], *(_length(row["fit"][key], row["fit"]["longest"]) for key in TOTALS)]
        for row in rows
        if row.get("fit")
    ]
    columns = ["attention", *(COLUMNS[key] for key in TOTALS)]
    return Table(columns=columns, rows=body, title=f"Longest input within {limit}, tokens per row")


def _length(length: int | None, longest: int) -> str:
    if length is None:
        return "-"
    if length == 0:
        return NOTHING
    return (
        f"{EVERYTHING}, to {format_length(longest)}" if length == longest else format_length(length)
    )
