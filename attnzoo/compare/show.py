"""The tables of a comparison, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from attnzoo.compare.advice import qualities, speedups
from attnzoo.compare.fit import AHEAD, Curve, best_exact, crossover
from attnzoo.compare.results import Row
from attnzoo.report.text import figures, number, short, size

LEVEL_NAMES = {"op": "operator", "layer": "attention layer", "model": "whole model"}
MODE_NAMES = {
    "forward": "forward",
    "train": "forward and backward",
    "decode": "one token after so many",
}


def group_title(device: str, level: str, mode: str) -> str:
    """Name a group of curves."""
    return f"{LEVEL_NAMES[level].capitalize()}, {MODE_NAMES[mode]}, {device}"


def cost_table(curves: Sequence[Curve], mode: str) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: ms a row at every length, a prediction marked by ~, and the fits."""
    lengths = sorted({n for curve in curves for n in (*curve.ms, *curve.missing)})
    exact, longest = best_exact(curves), lengths[-1]
    ahead = AHEAD * longest
    fast = speedups(curves, longest)
    held = "kept" if mode == "decode" else "memory"
    head = [
        "attention",
        *(f"ms @{short(n)}" for n in lengths),
        f"predicted @{short(ahead)}",
        f"x exact @{short(longest)}",
        "grows as",
        "faster from",
        f"{held} @{short(longest)}",
    ]
    rows = []
    for curve in curves:
        bytes_held = curve.kept_bytes if mode == "decode" else curve.peak_bytes
        power = curve.exponent
        rows.append(
            [
                curve.attention,
                *(_cost(curve, n) for n in lengths),
                _predicted(curve, ahead),
                "" if curve.exact else number(fast.get(curve.attention), 1),
                "-" if power is None else f"T^{power:.2f}",
                _start(curve, exact),
                size(bytes_held.get(longest)),
            ]
        )
    return head, rows


def _cost(curve: Curve, length: int) -> str:
    if length in curve.ms:
        return figures(curve.ms[length])
    why = curve.missing.get(length, "not run").split(":")[0]
    predicted = curve.predicted_ms(length)
    return f"{_predicted(curve, length)} ({why})" if predicted is not None else why


def _predicted(curve: Curve, length: int) -> str:
    value = curve.predicted_ms(length)
    return "-" if value is None else f"~{figures(value, 2)}"


def _start(curve: Curve, exact: dict[int, float]) -> str:
    """Say from which length on an attention is faster; what was not measured is marked by ~."""
    if curve.exact:
        return ""
    found = crossover(curve.least_ms, exact)
    if found is None:
        return "not seen"
    sign = "~" if found.predicted else "<= " if found.at_most else ""
    return f"{sign}{short(found.length)}"


def quality_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: loss inside and beyond the trained length, recall by distance."""
    judged = [row for row in rows if row["kind"] == "quality" and row["status"] == "ok"]
    costs = qualities(rows)
    if not judged:
        return [], []
    distances = list(judged[0]["copy_by_distance"])
    few = sorted({0, len(distances) // 2, len(distances) - 1}) if distances else []
    shown = [distances[i] for i in few]
    trained = judged[0]["trained"]
    head = [
        "attention",
        f"bits/byte to {short(trained)}",
        "costs",
        "beyond",
        *(f"copy @{short(int(d))}" for d in shown),
        *(f"needle @{short(int(d))}" for d in shown),
    ]
    body = []
    for row in judged:
        name = row["attention"]
        body.append(
            [
                name,
                number(row["bits_per_byte"]),
                f"{costs[name].cost:+.3f}" if name in costs else "-",
                number(row["bits_per_byte_beyond"]),
                *(_share(row["copy_by_distance"].get(d)) for d in shown),
                *(_share(row["needle_by_distance"].get(d)) for d in shown),
            ]
        )
    return head, body


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def as_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table for a terminal."""
    made = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, cell in enumerate(head):
        made.add_column(cell, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in rows:
        made.add_row(*row)
    return made


def missing(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what could not be measured, and why; what follows from a shorter case is left out."""
    found: dict[str, str] = {}
    for row in rows:
        if row["status"] in ("ok", "not run"):
            continue
        what = row["kind"] if row["kind"] == "quality" else LEVEL_NAMES[row["level"]]
        why = ": ".join(filter(None, [row["status"], row.get("reason")]))
        found.setdefault(f"{row['attention']}, {what}, {short(row['T'])} tokens", why)
    return list(found.items())
