"""The tables of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from attnzoo.compare.advice import faster_from, losses, speedups
from attnzoo.compare.equal_windows import equal_windows
from attnzoo.compare.fit import HORIZON, Curve
from attnzoo.compare.workers import NOT_RUN, OK
from attnzoo.evaluation.results import Row
from attnzoo.report.format import format_bytes, format_length, number, significant
from attnzoo.report.table import Table

LEVEL_NAMES = {"op": "operator", "model": "whole model"}
MODE_NAMES = {"forward": "forward", "train": "forward + backward", "decode": "decoding one token"}


def group_title(device: str, level: str, mode: str) -> str:
    """Return the heading of a group of curves."""
    return f"{LEVEL_NAMES[level].capitalize()}, {MODE_NAMES[mode]}, {device}"


def cost_table(curves: Sequence[Curve], group: tuple[str, str, str]) -> Table:
    """Return milliseconds per row by length, predictions marked by ~, and what the fits say.

    All times are those of the fastest round. ``spread`` is the slowest round minus the fastest,
    divided by the median, at the length where it is largest.

    Args:
        curves: Curves of one group.
        group: Device, level and mode.
    """
    decode = group[2] == "decode"
    lengths = sorted({n for curve in curves for n in (*curve.ms, *curve.missing)})
    longest = lengths[-1]
    horizon = HORIZON * longest
    fast = speedups(curves, longest)
    columns = [
        "attention",
        *(f"ms @{format_length(n)}" for n in lengths),
        f"predicted @{format_length(horizon)}",
        "spread",
        f"x exact @{format_length(longest)}",
        "grows as",
        "faster from",
        f"{'cache' if decode else 'memory'} @{format_length(longest)}",
    ]
    rows = []
    for curve in curves:
        sizes = curve.cache_bytes if decode else curve.peak_bytes
        power = curve.exponent
        rows.append(
            [
                curve.attention,
                *(_cost(curve, n) for n in lengths),
                _predicted(curve, horizon),
                _percent(max(curve.spread.values(), default=None)),
                "" if curve.exact else number(fast.get(curve.attention), 1),
                "busy" if curve.busy else "-" if power is None else f"T^{power:.2f}",
                faster_from(curve, curves),
                format_bytes(sizes.get(longest)),
            ]
        )
    return Table(
        columns=columns,
        rows=rows,
        title=group_title(*group),
        caption="Milliseconds per row, fastest round. Spread: slowest minus fastest round, in % of "
        "the median; the largest of all lengths. Faster from: where the difference is clear over "
        "rounds that alternate with exact attention's. Busy: times that contradict each other.",
    )


def _cost(curve: Curve, length: int) -> str:
    if length in curve.ms:
        return significant(curve.ms[length]) + (" (busy)" if length in curve.busy else "")
    reason = curve.missing.get(length, NOT_RUN).split(":")[0]
    predicted = curve.predicted_ms(length)
    return f"{_predicted(curve, length)} ({reason})" if predicted is not None else reason


def _predicted(curve: Curve, length: int) -> str:
    value = curve.predicted_ms(length)
    return "-" if value is None else f"~{significant(value, 2)}"


def quality_table(rows: Sequence[Row]) -> Table | None:
    """Return loss within and beyond the trained length, generation and recall; ``None`` if none.

    ``equal tokens`` is the fraction of greedily generated tokens that equal exact attention's, and
    ``before a difference`` the mean number of tokens before the first that differs.
    Of a model that predicts no next token: the similarity of its embeddings by length.
    """
    measured = [row for row in rows if row["kind"] == "quality" and row["status"] == OK]
    if not measured:
        return None
    if "cosine" in measured[0]:
        return _embedding_table(measured)
    costs, equal = losses(measured), equal_windows(rows)
    known = {int(d): d for row in measured for d in row["copy_by_distance"]}
    distances = [known[d] for d in sorted(known)]
    few = sorted({0, len(distances) // 2, len(distances) - 1}) if distances else []
    shown = [distances[i] for i in few]
    columns = [
        "attention",
        f"bits/byte to {format_length(measured[0]['trained'])}",
        "costs",
        "window of equal memory",
        "beyond",
        "equal tokens",
        "before a difference",
        *(f"copy @{format_length(int(d))}" for d in shown),
        *(f"needle @{format_length(int(d))}" for d in shown),
    ]
    body = []
    for row in measured:
        name, generated = row["attention"], row.get("generation", {})  # older rows have none
        body.append(
            [
                name,
                number(row["bits_per_byte"]),
                f"{costs[name]:+.3f}" if name in costs else "-",
                "all keys" if name in equal and equal[name] is None else str(equal.get(name, "-")),
                number(row["bits_per_byte_beyond"]),
                _percent(generated.get("agreement")),
                number(generated.get("equal_tokens"), 1),
                *(_percent(row["copy_by_distance"].get(d)) for d in shown),
                *(_percent(row["needle_by_distance"].get(d)) for d in shown),
            ]
        )
    return Table(
        columns=columns, rows=body, title="Quality without training", caption=_notes(measured)
    )


def _notes(measured: Sequence[Row]) -> str:
    """Return why numbers of quality are left out, or ``""``."""
    found: dict[str, list[str]] = {}
    for row in measured:
        for note in row.get("notes", ()):
            found.setdefault(note, []).append(row["attention"])
    whose = {k: "" if len(x) == len(measured) else f"{', '.join(x)}: " for k, x in found.items()}
    return " ".join(f"{whose[note]}{note}." for note in found)


def _embedding_table(measured: Sequence[Row]) -> Table:
    lengths = list(measured[0]["cosine_by_length"])
    columns = ["attention", *(f"cosine @{format_length(int(n))}" for n in lengths), "least"]
    body = [
        [
            row["attention"],
            *(number(row["cosine_by_length"].get(n)) for n in lengths),
            number(row["least"]),
        ]
        for row in measured
    ]
    title = "Quality without training: cosine similarity of embeddings to the original model's"
    return Table(columns=columns, rows=body, title=title)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def not_measured(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return cases without a result and why; cases skipped after a shorter one are left out.

    A reason that several cases of an attention share is given once.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row["status"] in (OK, NOT_RUN):
            continue
        what = LEVEL_NAMES[row["level"]] if row["kind"] == "cost" else row["kind"]
        reason = ": ".join(filter(None, [row["status"], row.get("reason")]))
        cases = found.setdefault((row["attention"], reason), {})
        cases[f"{what}, {format_length(row['T'])} tokens"] = None
    return [
        (f"{attention}, {first}" + _more(len(rest)), reason)
        for (attention, reason), (first, *rest) in found.items()
    ]


def _more(count: int) -> str:
    return f", and {count} more case{'s' if count > 1 else ''}" if count else ""
