"""A comparison in the terminal, as a self-contained page, and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from attnzoo.compare.advice import paragraph
from attnzoo.compare.cases import LEVELS
from attnzoo.compare.figures import Group, cost_plots, quality_plots
from attnzoo.compare.fit import Curve, make_curves
from attnzoo.compare.memory import computed_memory_table
from attnzoo.compare.run import group_costs
from attnzoo.compare.tables import cost_table, group_title, not_measured, quality_table
from attnzoo.evaluation.results import Row
from attnzoo.report import charts, page

PAGE = "report.html"


def group_curves(rows: Sequence[Row]) -> dict[Group, list[Curve]]:
    """Return the curves of every device, level and mode; the whole model first."""
    groups = {group: make_curves(found) for group, found in group_costs(list(rows)).items()}
    order = sorted(groups, key=lambda group: (group[2], group[0], -LEVELS.index(group[1])))
    return {group: groups[group] for group in order}


def main_group(groups: dict[Group, list[Curve]], mode: str) -> Group | None:
    """Return the group to summarise: of the mode if measured, on a GPU if any, largest level."""
    selected = [group for group in groups if group[2] == mode] or list(groups)
    found = [group for group in selected if any(curve.ms for curve in groups[group])]
    on_gpu = [group for group in found if group[0] != "cpu"]
    return next(iter(on_gpu or found), None)


def advice(rows: Sequence[Row], mode: str, model: str, missing: str = "") -> str:
    """Return the findings of a comparison as text.

    Args:
        rows: All rows.
        mode: The mode to summarise.
        model: The model, as on the command line.
        missing: Why no quality was measured, if none was requested or possible.
    """
    groups = group_curves(rows)
    group = main_group(groups, mode)
    if group is None:
        return "Nothing could be measured; the reasons are listed above."
    return f"{group_title(*group)}. {paragraph(groups[group], rows, group[2], model, missing)}"


def show(console: Console, rows: Sequence[Row], mode: str, model: str, missing: str = "") -> None:
    """Print the tables, the cases without a result, and the findings."""
    for group, curves in group_curves(rows).items():
        if group[2] == mode and any(curve.ms or curve.missing for curve in curves):
            cost_table(curves, group).print(console, wide=True)
    quality = quality_table(rows)
    if quality is not None:
        quality.print(console, wide=True)
    memory = computed_memory_table(rows)
    if memory is not None:
        memory.print(console, wide=True)
    for name, reason in not_measured(rows):
        console.print(f"{name}: {reason}", soft_wrap=True, highlight=False, markup=False)
    text = advice(rows, mode, model, missing)
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def write_report(
    out: Path, rows: Sequence[Row], mode: str, model: str, missing: str = ""
) -> Path | None:
    """Write ``report.html`` and its plots as PNG; return ``None`` without matplotlib."""
    if not charts.can_draw():
        return None
    groups = group_curves(rows)
    main = main_group(groups, mode)
    plots = [] if main is None else quality_plots(rows, main, groups[main])
    body = [
        page.heading("Which attention is faster, and from which length on?", 1),
        page.paragraph(_subject(rows), muted=True),
        page.paragraph(advice(rows, mode, model, missing)),
        page.plots_html(plots),
    ]
    quality = quality_table(rows)
    if quality is not None:
        body += [page.heading(quality.title), quality.html()]
    for group, curves in groups.items():
        if any(curve.ms for curve in curves):
            costs = cost_plots(group, curves)
            plots += costs
            body += [page.plots_html(costs), cost_table(curves, group).html()]
    memory = computed_memory_table(rows)
    if memory is not None:
        body += [page.heading(memory.title), page.paragraph(memory.caption, muted=True)]
        body.append(memory.html())
    body += [page.reasons("Not measured", not_measured(rows)), page.footer(_footer(rows))]
    charts.write_pictures(out, plots)
    return page.write_page(out / PAGE, title="attnzoo compare", body=body)


def _subject(rows: Sequence[Row]) -> str:
    model = rows[0]["model"]
    return (
        f"{model['name']}: {model['H']} query heads, {model['Hkv']} key heads of size "
        f"{model['D']}. Costs are per row, times those of the fastest round; ~ marks a prediction."
    )


def _footer(rows: Sequence[Row]) -> str:
    about = rows[0]
    facts = ", ".join(f"{name} {value}" for name, value in about["machine"].items())
    built = f", {about['commit']}" if about["commit"] else ""
    return f"attnzoo {about['attnzoo']}{built}; {facts}."
