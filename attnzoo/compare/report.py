"""A comparison in the terminal, as a self-contained page, and as plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from attnzoo.compare.advice import findings_table, headline, speedups
from attnzoo.compare.cases import LEVELS
from attnzoo.compare.fit import (
    HORIZON,
    Curve,
    best_exact,
    clear_gain,
    clearly_faster,
    crossover,
    interpolate,
    make_curves,
)
from attnzoo.compare.run import group_costs
from attnzoo.compare.tables import MODE_NAMES, cost_table, group_title, not_measured, quality_table
from attnzoo.compare.workers import OK
from attnzoo.evaluation.results import Row
from attnzoo.report import charts, page
from attnzoo.report.charts import Axis, Plot, Series, length_axis, line_chart
from attnzoo.report.format import byte_unit, format_length
from attnzoo.report.table import Table

PAGE = "report.html"
Group = tuple[str, str, str]  # device, level, mode
# lower and upper ends of the bars of a curve's points
Spread = Callable[[Curve, Mapping[int, float]], tuple[list[float], list[float]]]


def group_curves(rows: Sequence[Row]) -> dict[Group, list[Curve]]:
    """Return the curves of every device, level and mode; the whole model first."""
    groups = {group: make_curves(found) for group, found in group_costs(list(rows)).items()}
    order = sorted(groups, key=lambda group: (group[2], group[0], LEVELS.index(group[1])))
    return {group: groups[group] for group in order}


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
    quality = quality_table(rows)
    if quality is not None:
        quality.print(console)
    for group, curves in group_curves(rows).items():
        if group[2] == mode and any(curve.ms or curve.missing for curve in curves):
            cost_table(curves, group).print(console)
    for name, reason in not_measured(rows):
        console.print(f"{name}: {reason}", soft_wrap=True, highlight=False, markup=False)
    text, findings = advice(rows, mode, missing)
    if findings is not None:
        findings.print(console)
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def write_report(out: Path, rows: Sequence[Row], mode: str, missing: str = "") -> Path | None:
    """Write ``report.html`` and its plots as PNG; return ``None`` without matplotlib."""
    if not charts.can_draw():
        return None
    groups = group_curves(rows)
    main = main_group(groups, mode)
    plots = [] if main is None else quality_plots(rows, main, groups[main])
    text, findings = advice(rows, mode, missing)
    body = [
        page.heading("Which attention is faster, and from which length on?", 1),
        page.paragraph(_subject(rows), muted=True),
        page.paragraph(text),
        "" if findings is None else findings.html(),
        page.plots_html(plots),
    ]
    quality = quality_table(rows)
    if quality is not None:
        body += [page.heading(quality.title), quality.html()]
        body += [page.paragraph(quality.caption, muted=True)] if quality.caption else []
    for group, curves in groups.items():
        if any(curve.ms for curve in curves):
            costs = cost_plots(group, curves)
            plots += costs
            body += [page.plots_html(costs), cost_table(curves, group).html()]
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


def cost_plots(group: Group, curves: Sequence[Curve]) -> list[Plot]:
    """Return time, speed-up and memory over length of one device, level and mode."""
    name, title = "-".join(group), group_title(*group)
    decode = group[2] == "decode"
    return [
        Plot(
            name=f"time-{name}",
            title=title,
            text="Milliseconds per row: points are the fastest round, bars reach to the slowest. A "
            "star marks the length from which on an attention is clearly faster than the best "
            "exact one; open markers and thin lines are predictions.",
            figure=_time(curves),
        ),
        Plot(
            name=f"speedup-{name}",
            title=f"{title}: speed-up",
            text="Time of the best exact attention divided by the time of each attention; bars are "
            "standard errors over rounds of both in alternation.",
            figure=_speedup(curves),
        ),
        Plot(
            name=f"memory-{name}",
            title=f"{title}: {'cache' if decode else 'memory'}",
            text="Memory kept between tokens." if decode else "Peak memory per row.",
            figure=_memory(curves, decode=decode),
        ),
    ]


def _lengths(curves: Sequence[Curve]) -> list[int]:
    return sorted({n for curve in curves for n in (*curve.ms, *curve.missing)})


def _over_length(
    curves: Sequence[Curve],
    values: Callable[[Curve], Mapping[int, float]],
    unit: float = 1.0,
    spread: Spread | None = None,
) -> list[Series]:
    """Return one line per attention that has values; colours are the same in all plots.

    ``spread`` returns the ends of the bars at the given points.
    """
    lines = []
    for index, curve in enumerate(curves):
        points = values(curve)
        if points:
            heights = [value / unit for value in points.values()]
            low, high = (None, None) if spread is None else spread(curve, points)
            lines.append(
                Series(
                    name=curve.attention, x=list(points), y=heights, low=low, high=high, style=index
                )
            )
    return lines


def _time(curves: Sequence[Curve]) -> Any:
    """Draw time over length with crossovers and predictions."""
    lengths, exact = _lengths(curves), best_exact(curves)
    horizon = HORIZON * lengths[-1]
    series = _over_length(curves, lambda curve: curve.ms, spread=_rounds)
    for index, curve in enumerate(curves):
        predicted = curve.predicted_ms(horizon)
        if predicted is not None:
            last = max(curve.ms)
            series.append(
                Series(
                    name="",
                    x=[last, horizon],
                    y=[curve.ms[last], predicted],
                    style=index,
                    kind="prediction",
                )
            )
        start = None
        if curve.ms and not curve.exact and not curve.busy:
            start = crossover(curve.ms, exact, clearly_faster(curve, curves))
        if start is not None and not start.at_most:
            series.append(
                Series(
                    name="",
                    x=[start.length],
                    y=[interpolate(curve.ms, start.length)],
                    style=index,
                    kind="predicted crossing" if start.predicted else "crossing",
                )
            )
    axis = length_axis([*lengths, horizon], "tokens")
    return line_chart(series, x=axis, y=Axis(label="milliseconds per row", log=True))


def _rounds(curve: Curve, points: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Return the fastest and the slowest round."""
    return list(points.values()), [curve.slowest_ms[n] for n in points]


def _speedup(curves: Sequence[Curve]) -> Any:
    """Draw the speed-up over the best exact attention, with standard errors over the rounds."""
    lengths = _lengths(curves)
    fast = {n: speedups(curves, n) for n in lengths}

    def of(curve: Curve) -> dict[int, float]:
        return {n: fast[n][curve.attention] for n in lengths if curve.attention in fast[n]}

    def errors(curve: Curve, points: Mapping[int, float]) -> tuple[list[float], list[float]]:
        gains = {n: clear_gain(curve, curves, n) for n in points}
        error = {n: 0.0 if gain is None else gain.error for n, gain in gains.items()}
        low = [x * math.exp(-error[n]) for n, x in points.items()]
        return low, [x * math.exp(error[n]) for n, x in points.items()]

    return line_chart(
        _over_length(curves, of, spread=errors),
        x=length_axis(lengths, "tokens"),
        y=Axis(label="times faster than exact attention", log=True),
        reference=1.0,
    )


def _memory(curves: Sequence[Curve], *, decode: bool) -> Any:
    """Draw peak memory, or cache size in decoding, in the unit that suits the largest value."""

    def of(curve: Curve) -> dict[int, float]:
        return curve.cache_bytes if decode else curve.peak_bytes

    size, unit = byte_unit(max((x for curve in curves for x in of(curve).values()), default=0))
    return line_chart(
        _over_length(curves, of, size),
        x=length_axis(_lengths(curves), "tokens"),
        y=Axis(label=f"{'cache' if decode else 'memory'} per row, {unit}", log=True),
    )


def quality_plots(rows: Sequence[Row], group: Group, curves: Sequence[Curve]) -> list[Plot]:
    """Return quality against cost, loss by position and recall by distance."""
    measured = [row for row in rows if row["kind"] == "quality" and row["status"] == OK]
    if not measured:
        return []
    if "cosine" in measured[0]:
        return [
            Plot(
                name="cosine-by-length",
                title="Similarity of embeddings by length",
                text="Cosine similarity between the embeddings and those of the original model.",
                figure=_by_length(
                    measured, "cosine_by_length", "tokens", Axis(label="cosine similarity")
                ),
            )
        ]
    correct = Axis(label="tokens predicted correctly", percent=True)
    distance = "distance, tokens"
    plots = [
        Plot(
            name="loss-by-position",
            title="Loss by position",
            text="Bits per byte of text by position in the row; the model was trained on "
            f"{format_length(measured[0]['trained'])} positions.",
            figure=_by_length(
                measured, "loss_by_position", "position, up to", Axis(label="bits per byte")
            ),
        )
    ]
    for name, title, text in (
        (
            "copy",
            "a second copy",
            "Fraction of the tokens of a second copy that are predicted correctly.",
        ),
        (
            "needle",
            "a needle",
            "Fraction of the digits of a number, given once, that are predicted correctly.",
        ),
    ):
        field = f"{name}_by_distance"
        if any(row[field] for row in measured):  # else the table says why
            figure = _by_length(measured, field, distance, correct)
            title = f"Recall by distance: {title}"
            plots.append(Plot(name=f"{name}-by-distance", title=title, text=text, figure=figure))
    longest = max(best_exact(curves), default=None)
    if longest is not None:
        text = (
            f"Milliseconds per row at {format_length(longest)} tokens ({group_title(*group)}) and "
            "bits per byte, without training. No attention is better and faster than those on "
            "the line."
        )
        figure = _pareto(rows, curves, longest, MODE_NAMES[group[2]])
        plots.insert(0, Plot(name="pareto", title="Quality against cost", text=text, figure=figure))
    return plots


def _by_length(measured: Sequence[Row], name: str, label: str, y: Axis) -> Any:
    """Draw one field of quality rows, which is a mapping by length, for each attention."""
    series = [
        Series(
            name=row["attention"],
            x=[int(n) for n in row[name]],
            y=list(row[name].values()),
            style=index,
        )
        for index, row in enumerate(measured)
    ]
    lengths = sorted({int(n) for row in measured for n in row[name]})
    return line_chart(series, x=length_axis(lengths, label), y=y)


def _pareto(rows: Sequence[Row], curves: Sequence[Curve], length: int, mode: str) -> Any:
    """Draw quality against time at one length, with the Pareto front."""
    quality = {r["attention"]: r for r in rows if r["kind"] == "quality" and r["status"] == OK}
    points = [
        (curve.ms[length], row["bits_per_byte"], curve.attention)
        for curve in curves
        if length in curve.ms and (row := quality.get(curve.attention))
    ]
    front = [p for p in sorted(points) if all(q[1] > p[1] for q in points if q < p)]
    series = [Series(name="", x=[p[0] for p in front], y=[p[1] for p in front], kind="step")]
    series += [
        Series(name=name, x=[ms], y=[bits], style=index, kind="points")
        for index, (ms, bits, name) in enumerate(points)
    ]
    return line_chart(
        series,
        x=Axis(label=f"milliseconds per row at {format_length(length)} tokens, {mode}", log=True),
        y=Axis(label="bits per byte, lower is better", log=True),
    )
