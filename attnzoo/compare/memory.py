"""The computed memory of every attention in a comparison, as rows of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from attnzoo.compare.cases import CostCase, ModelInfo, is_exact
from attnzoo.compare.workers import OK, REFUSED
from attnzoo.errors import AttnzooError
from attnzoo.evaluation.equal_memory import equal_window
from attnzoo.evaluation.memory import MemoryCase, estimate, memory_table
from attnzoo.evaluation.results import Row, append
from attnzoo.report.format import format_length
from attnzoo.report.table import Table
from attnzoo.spec import AttentionSpec

KIND = "memory"
EQUAL = "equal window"


def add_memory(
    cases: Sequence[CostCase],
    info: ModelInfo,
    out: Path,
    about: Row,
    rows: list[Row],
    on_progress: Callable[[int, str], None],
) -> list[Row]:
    """Compute and append the memory of every case that has no such row; return all rows.

    Args:
        cases: One case of each attention, at the longest length.
        info: The model.
        out: Folder of results.
        about: Fields that all rows of the run share.
        rows: All rows.
        on_progress: Called with the number of cases done and the next case.
    """
    known = {row["key"] for row in rows}
    for number, case in enumerate(cases):
        on_progress(number, f"memory, {case.attention}")
        key = f"{KIND} {case.key()}"
        if key in known:
            continue
        result = _compute(case, info)
        row: dict[str, Any] = {**about, "kind": KIND, "key": key, **asdict(case), **result}
        rows = [*rows, append(out, row | {"exact": is_exact(case.spec)})]
    return rows


def _compute(case: CostCase, info: ModelInfo) -> dict[str, Any]:
    wanted = MemoryCase(
        path=info.path, spec=case.spec, length=case.T, batch=case.B, dtype=case.dtype
    )
    try:
        return {"status": OK, "computed": estimate(wanted).to_dict()}
    except AttnzooError as error:
        return {"status": REFUSED, "reason": str(error)}


def add_equal_windows(
    cases: Sequence[CostCase],
    info: ModelInfo,
    out: Path,
    about: Row,
    rows: list[Row],
) -> list[Row]:
    """Compute and append the window of equal memory of every approximation; return all rows.

    Args:
        cases: One case of each attention, at the longest length.
        info: The model, which generates.
        out: Folder of results.
        about: Fields that all rows of the run share.
        rows: All rows.
    """
    known = {row["key"] for row in rows}
    for case in cases:
        key = f"{EQUAL} {case.key()}"
        if is_exact(case.spec) or key in known:
            continue
        try:
            spec = AttentionSpec.from_dict(case.spec)
            found = equal_window(Path(info.path), spec, case.T, getattr(torch, case.dtype))
            result: Row = {"status": OK, "window": found.widest or None, **found.to_dict()}
        except AttnzooError as error:
            result = {"status": REFUSED, "reason": str(error)}
        row = {**about, "kind": EQUAL, "key": key, **asdict(case), **result, "exact": False}
        rows = [*rows, append(out, row)]
    return rows


def equal_windows(rows: Sequence[Row]) -> dict[str, int | None]:
    """Return the window of equal memory of each attention; ``None`` if it keeps all keys."""
    return {
        row["attention"]: row["window"]
        for row in rows
        if row["kind"] == EQUAL and row["status"] == OK
    }


def memory_cases(cases: Sequence[CostCase], dtype: str) -> list[CostCase]:
    """Return a case of each attention at the longest length, on the CPU and at model level.

    Args:
        cases: All cases.
        dtype: Data type in which memory is counted.
    """
    longest = max((case.T for case in cases), default=0)
    found = {
        case.attention: replace(case, level="model", mode="train", device="cpu", dtype=dtype)
        for case in cases
        if longest == case.T and case.level == "model"
    }
    return list(found.values())


def computed_memory_table(rows: Sequence[Row]) -> Table | None:
    """Return the memory of every attention at the longest length; ``None`` if none is known."""
    found = [row for row in rows if row["kind"] == KIND and row["status"] == OK]
    if not found:
        return None
    longest = max(row["T"] for row in found)
    shown = [row for row in found if row["T"] == longest]
    count, dtype = shown[0]["B"], shown[0]["dtype"]
    size = f"{format_length(longest)} tokens, {count} row{'s' if count > 1 else ''}, {dtype}"
    return memory_table(shown, f"Memory, whole model, AdamW: {size}; computed")
