"""The window of equal memory of every approximation in a comparison, as rows of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from attnzoo.compare.cases import CostCase, ModelInfo, is_exact
from attnzoo.compare.workers import OK, REFUSED
from attnzoo.errors import AttnzooError
from attnzoo.evaluation.equal_memory import equal_window
from attnzoo.evaluation.results import Row, append
from attnzoo.spec import AttentionSpec

EQUAL = "equal window"


def add_equal_windows(
    cases: Sequence[CostCase], info: ModelInfo, out: Path, about: Row, rows: list[Row]
) -> list[Row]:
    """Compute and append the window of equal memory of every approximation; return all rows.

    Args:
        cases: All cases; the window is that of the longest length, for the whole model.
        info: The model, which generates.
        out: Folder of results.
        about: Fields that all rows of the run share.
        rows: All rows.
    """
    known = {row["key"] for row in rows}
    longest = max(case.T for case in cases)
    found = {
        case.attention: replace(case, mode="train", device="cpu", dtype=info.dtype)
        for case in cases
        if longest == case.T and case.level == "model" and not is_exact(case.spec)
    }
    for case in found.values():
        key = f"{EQUAL} {case.key()}"
        if key in known:
            continue
        try:
            spec = AttentionSpec.from_dict(case.spec)
            window = equal_window(Path(info.path), spec, case.T, getattr(torch, case.dtype))
            result: Row = {"status": OK, "window": window.widest or None, **window.to_dict()}
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
