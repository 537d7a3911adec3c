"""A comparison in the terminal, as a self-contained page, and as plots."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from attnzoo.compare.cases import LEVELS
from attnzoo.compare.fit import Curve, best_exact, make_curves
from attnzoo.compare.tables import (
    MODE_NAMES,
    cost_table,
    findings_table,
    group_title,
    headline,
    measured_quality,
    not_measured,
    quality_table,
)
from attnzoo.evaluation.results import Row
from attnzoo.report.charts import Plot, line_plot
from attnzoo.report.format import format_length
from attnzoo.report.page import Part, write_page
from attnzoo.report.table import Table

PAGE = "report.html"
Group = tuple[str, str, str]  # device, level, mode


def group_curves(rows: Sequence[Row]) -> dict[Group, list[Curve]]:
    """Return the curves of every device, level and mode; the whole model first."""
    groups: dict[Group, list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "cost":
            groups[row["device"], row["level"], row["mode"]].append(row)
    order = sorted(groups, key=lambda group: (group[2], group[0], LEVELS.index(group[1])))
    return {group: make_curves(groups[group]) for group in order}


def main_group(groups: dict[Group, list[Curve]], mode: str) -> Group | None:
    """Return the group to summarise: of the mode if measured, on a GPU if any, largest level."""
    selected = [group for group in groups if group[2] == mode] or list(groups)
    found = [group for group in selected if any(curve.ms for curve in groups[group])]
    on_gpu = [group for group in found if group[0] != "cpu"]
    return next(iter(on_gpu or found), None)


def advice(rows: Sequence[Row], mode: str, missing: str = "") -> tuple[str, Table | None]:
    """Return the main finding of a comparison as text, and a table of all attentions.

    Args:
        rows: All rows.
        mode: The mode to summarise.
        missing: Why no quality was measured, if none was requested or possible.
    """
    groups = group_curves(rows)
    group = main_group(groups, mode)
    if group is None:
        return "Nothing could be measured; the reasons are listed above.", None
    curves = groups[group]
    return f"{group_title(*group)}. {headline(curves, rows, missing)}", findings_table(curves, rows)


def show(console: Console, rows: Sequence[Row], mode: str, missing: str = "") -> None:
    """Print the tables, quality first, the cases without a result, and the findings."""
    groups = group_curves(rows)
    costs = [cost_table(groups[group], group) for group in groups if group[2] == mode]
    text, findings = advice(rows, mode, missing)
    for part in (quality_table(rows), *costs, *not_measured(rows), findings, text):
        if isinstance(part, Table):
            part.print(console)
        elif part:
            console.print(part, soft_wrap=True, highlight=False, markup=False)


def write_report(out: Path, rows: Sequence[Row], mode: str, missing: str = "") -> Path | None:
    """Write ``report.html`` and its plots as PNG; return ``None`` without matplotlib."""
    about, groups = rows[0], group_curves(rows)
    text, findings = advice(rows, mode, missing)
    model = about["model"]
    subject = (
        f"{model['name']}: {model['H']} query heads, {model['Hkv']} key heads of size "
        f"{model['D']}. Costs are per row, and times those of the fastest round."
    )
    parts: list[Part] = [subject, text, findings, *quality_plots(rows, mode), quality_table(rows)]
    for group, curves in groups.items():
        if any(curve.ms for curve in curves):
            parts += [*cost_plots(group, curves), cost_table(curves, group)]
    facts = ", ".join(f"{name} {value}" for name, value in about["machine"].items())
    parts += [*not_measured(rows), f"attnzoo {about['attnzoo']}; {facts}."]
    return write_page(out / PAGE, "Which attention is faster, and from which length on?", parts)


def cost_plots(group: Group, curves: Sequence[Curve]) -> list[Plot]:
    """Return time and memory over length of one device, level and mode."""
    name, title = "-".join(group), group_title(*group)
    decode = group[2] == "decode"
    sizes = {x.attention: x.cache_bytes if decode else x.peak_bytes for x in curves if x.ms}
    return [
        line_plot(
            {curve.attention: curve.ms for curve in curves if curve.ms},
            name=f"time-{name}",
            title=title,
            x="tokens",
            y="milliseconds per row",
        ),
        line_plot(
            {k: {n: size / 2**20 for n, size in found.items()} for k, found in sizes.items()},
            name=f"memory-{name}",
            title=f"{title}: {'cache' if decode else 'peak memory'}",
            x="tokens",
            y="MiB per row",
        ),
    ]


def quality_plots(rows: Sequence[Row], mode: str) -> list[Plot]:
    """Return quality against cost, loss by position and recall by distance."""
    plots, measured = [], measured_quality(rows)
    for field, title, x, y in (
        ("cosine_by_length", "Similarity of embeddings", "tokens", "cosine similarity"),
        ("loss_by_position", "Loss by position in the row", "position, up to", "bits per byte"),
        ("copy_by_distance", "Tokens of a second copy", "distance, tokens", "predicted correctly"),
        ("needle_by_distance", "Digits of a needle", "distance, tokens", "predicted correctly"),
    ):
        lines = {row["attention"]: row[field] for row in measured if row.get(field)}
        if lines:
            name = field.replace("_", "-")
            plots.append(line_plot(lines, name=name, title=title, x=x, y=y, log=False))
    return [*_pareto(rows, mode), *plots]


def _pareto(rows: Sequence[Row], mode: str) -> list[Plot]:
    """Return quality against time at the longest length, with the Pareto front."""
    groups = group_curves(rows)
    bits = {x["attention"]: x["bits_per_byte"] for x in measured_quality(rows) if "rows" in x}
    if (group := main_group(groups, mode)) is None:
        return []
    length = max(best_exact(groups[group]), default=0)
    points: dict[str, tuple[float, float]] = {
        curve.attention: (curve.ms[length], bits[curve.attention])
        for curve in groups[group]
        if length in curve.ms and curve.attention in bits
    }
    if not points:
        return []
    front: dict[float, float] = {}
    for ms, loss in sorted(points.values()):
        if loss < min(front.values(), default=math.inf):
            front[ms] = loss
    at = f"{format_length(length)} tokens"
    return [
        line_plot(
            {name: dict([point]) for name, point in points.items()} | {"Pareto front": front},
            name="pareto",
            title="Quality without training against cost",
            x=f"milliseconds per row at {at}, {MODE_NAMES[group[2]]}",
            y="bits per byte, lower is better",
            scale="log",
        )
    ]
