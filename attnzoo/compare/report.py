"""A comparison as a terminal text, a self-contained page, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from attnzoo.compare.advice import paragraph
from attnzoo.compare.cases import LEVELS
from attnzoo.compare.figures import Group, cost_plots, quality_plots
from attnzoo.compare.fit import Curve, make_curves
from attnzoo.compare.results import Row
from attnzoo.compare.run import curves_of
from attnzoo.compare.show import (
    as_table,
    cost_table,
    group_title,
    missing,
    quality_table,
)
from attnzoo.report import page
from attnzoo.report.picture import write_pictures

PAGE = "report.html"


def groups_of(rows: Sequence[Row]) -> dict[Group, list[Curve]]:
    """Return the curves of every device, level and mode; the whole model first."""
    made = {group: make_curves(found) for group, found in curves_of(list(rows)).items()}
    order = sorted(made, key=lambda group: (group[2], group[0], -LEVELS.index(group[1])))
    return {group: made[group] for group in order}


def leading_group(groups: dict[Group, list[Curve]], mode: str) -> Group | None:
    """Return the group that is spoken of: of this mode, of a GPU if there is one, the largest."""
    asked = [group for group in groups if group[2] == mode] or list(groups)
    found = [group for group in asked if any(curve.ms for curve in groups[group])]
    on_gpu = [group for group in found if group[0] != "cpu"]
    return next(iter(on_gpu or found), None)


def advice(rows: Sequence[Row], mode: str, model: str) -> str:
    """Return the paragraph that ends a comparison."""
    groups = groups_of(rows)
    group = leading_group(groups, mode)
    if group is None:
        return "Nothing could be measured; the reasons stand above."
    told = paragraph(groups[group], rows, group[2], model)
    return f"{group_title(*group)}. {told}"


def wide(console: Console) -> Console:
    """Return a console with room for a table, where the output is no terminal or a narrow one."""
    return Console(file=console.file, width=max(console.width, 150), quiet=console.quiet)


def show(console: Console, rows: Sequence[Row], mode: str, model: str) -> None:
    """Print tables, what could not be measured, and the advice."""
    tables = []
    for group, curves in groups_of(rows).items():
        if group[2] == mode and any(curve.ms or curve.missing for curve in curves):
            tables.append(as_table(group_title(*group), *cost_table(curves, mode)))
    head, body = quality_table(rows)
    if body:
        tables.append(as_table("Quality, nothing trained", head, body))
    for table in tables:
        wide(console).print(table)
    for name, why in missing(rows):
        console.print(f"{name}: {why}", soft_wrap=True, highlight=False, markup=False)
    console.print(advice(rows, mode, model), soft_wrap=True, highlight=False, markup=False)


def write_report(out: Path, rows: Sequence[Row], mode: str, model: str) -> Path | None:
    """Write ``report.html`` and its plots as PNG; ``None`` without plotly."""
    if not page.can_plot():
        return None
    groups = groups_of(rows)
    lead = leading_group(groups, mode)
    body = [
        page.heading("Which attention, from which length on?", 1),
        page.paragraph(_subject(rows), soft=True),
        page.paragraph(advice(rows, mode, model)),
    ]
    drawn = [] if lead is None else quality_plots(rows, lead, groups[lead])
    body.append(page.plots_html(drawn))
    head, table = quality_table(rows)
    if table:
        body += [page.heading("Quality, nothing trained"), page.table(head, table)]
    for group, curves in groups.items():
        if any(curve.ms for curve in curves):
            made = cost_plots(group, curves)
            drawn += made
            body.append(page.plots_html(made))
            body.append(page.table(*cost_table(curves, group[2])))
    body += [page.reasons("Not measured", missing(rows)), page.footer(_footer(rows))]
    write_pictures(out, drawn)
    return page.write_page(out / PAGE, title="attnzoo compare", body=body)


def _subject(rows: Sequence[Row]) -> str:
    model = rows[0]["model"]
    return (
        f"{model['name']}: {model['H']} query heads over {model['Hkv']} key heads of size "
        f"{model['D']}. Costs are of one row; a sign ~ marks a prediction."
    )


def _footer(rows: Sequence[Row]) -> str:
    about = rows[0]
    facts = ", ".join(f"{name} {value}" for name, value in about["machine"].items())
    built = f", {about['commit']}" if about["commit"] else ""
    return f"attnzoo {about['attnzoo']}{built}; {facts}."
