"""The plots of a comparison: time, memory, speed-up, quality against cost, loss and recall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attnzoo.compare.advice import qualities, speedups
from attnzoo.compare.fit import AHEAD, Curve, best_exact, crossover, predict
from attnzoo.compare.results import Row
from attnzoo.compare.show import MODE_NAMES, group_title
from attnzoo.report.page import Plot, clear_figure, length_axis, line_style
from attnzoo.report.text import figures, number, short, size

Group = tuple[str, str, str]  # device, level, mode


def cost_plots(group: Group, curves: Sequence[Curve]) -> list[Plot]:
    """Return time, speed-up and memory over length, of one level and mode."""
    name, title = "-".join(group), group_title(*group)
    kept = group[2] == "decode"
    return [
        Plot(
            name=f"time-{name}",
            title=title,
            text="Milliseconds a row. A star is where an attention becomes faster than the best "
            "exact one; open marks and thin lines are predictions.",
            figure=_time(curves),
        ),
        Plot(
            name=f"speedup-{name}",
            title=f"{title}: speed-up",
            text="Times faster than the best exact attention; above the line it is worth it.",
            figure=_speedup(curves),
        ),
        Plot(
            name=f"memory-{name}",
            title=f"{title}: {'cache' if kept else 'memory'}",
            text="Bytes kept between tokens." if kept else "Most bytes held at once, a row.",
            figure=_memory(curves, kept=kept),
        ),
    ]


def _lengths(curves: Sequence[Curve]) -> list[int]:
    return sorted({n for curve in curves for n in (*curve.ms, *curve.missing)})


def _time(curves: Sequence[Curve]) -> Any:
    """Draw time over length, both logarithmic, with crossovers and predictions."""
    figure, lengths, exact = clear_figure(), _lengths(curves), best_exact(curves)
    ahead = AHEAD * lengths[-1]
    colours = _colours(len(curves))
    for index, curve in enumerate(curves):
        if not curve.ms:
            continue
        figure.add_scatter(
            x=list(curve.ms),
            y=list(curve.ms.values()),
            name=curve.attention,
            legendgroup=curve.attention,
            line_color=colours[index],
            customdata=[f"{figures(ms)} ms +- {curve.spread[n]:.0%}" for n, ms in curve.ms.items()],
            hovertemplate="%{fullData.name}, %{x} tokens: %{customdata}<extra></extra>",
            **line_style(index),
        )
        last = max(curve.ms)
        predicted = curve.predicted_ms(ahead)
        if predicted is not None:
            _add_extra(
                figure,
                curve.attention,
                colours[index],
                [last, ahead],
                [curve.ms[last], predicted],
                "predicted",
            )
        start = crossover(curve.least_ms, exact) if not curve.exact else None
        if start is not None and not start.at_most:
            height = _between(curve.ms, start.length)
            _add_extra(
                figure,
                curve.attention,
                colours[index],
                [start.length],
                [height],
                "predicted crossover" if start.predicted else "crossover",
            )
    length_axis(figure, [*lengths, ahead], "tokens")
    figure.update_yaxes(type="log", title="ms", dtick="D2", minor_showgrid=False)
    return figure


def _add_extra(
    figure: Any, name: str, colour: str, x: list[float], y: list[float], what: str
) -> None:
    """Draw a prediction or a crossover in the colour of its curve."""
    marks = {"crossover": "star", "predicted crossover": "star-open"}
    crossing = what in marks
    figure.add_scatter(
        x=x,
        y=y,
        name=name,
        legendgroup=name,
        showlegend=False,
        mode="markers" if crossing else "lines+markers",
        line={"color": colour, "width": 1, "dash": "dot"},
        marker={
            "color": colour,
            "size": 12 if crossing else 6,
            "symbol": marks.get(what, "circle-open"),
        },
        customdata=[short(value) for value in x],
        hovertemplate=f"{name}: {what}, %{{customdata}} tokens, %{{y:.3g}} ms<extra></extra>",
    )


def _between(costs: dict[int, float], length: float) -> float:
    """Return the cost at a length between two that were measured, or beyond all of them."""
    below = [n for n in costs if n <= length]
    above = [n for n in costs if n > length]
    if not above or not below:
        return predict(costs, round(length)) or costs[max(costs)]
    low, high = max(below), min(above)
    share = math.log(length / low) / math.log(high / low)
    return float(costs[low] * (costs[high] / costs[low]) ** share)


def _speedup(curves: Sequence[Curve]) -> Any:
    """Draw how many times faster each attention is than the best exact one."""
    figure, lengths = clear_figure(), _lengths(curves)
    fast = {n: speedups(curves, n) for n in lengths}
    for index, curve in enumerate(curves):
        points = {n: fast[n][curve.attention] for n in lengths if curve.attention in fast[n]}
        if points:
            figure.add_scatter(
                x=list(points),
                y=list(points.values()),
                name=curve.attention,
                line_color=_colours(len(curves))[index],
                hovertemplate="%{fullData.name}, %{x} tokens: %{y:.2f} times<extra></extra>",
                **line_style(index),
            )
    figure.add_hline(y=1, line_dash="dash", line_color="gray")
    length_axis(figure, lengths, "tokens")
    figure.update_yaxes(type="log", title="times faster than exact", minor_showgrid=False)
    return figure


def _memory(curves: Sequence[Curve], *, kept: bool) -> Any:
    """Draw bytes over length."""
    figure, lengths = clear_figure(), _lengths(curves)
    for index, curve in enumerate(curves):
        held = curve.kept_bytes if kept else curve.peak_bytes
        if held:
            figure.add_scatter(
                x=list(held),
                y=list(held.values()),
                name=curve.attention,
                line_color=_colours(len(curves))[index],
                customdata=[size(count) for count in held.values()],
                hovertemplate="%{fullData.name}, %{x} tokens: %{customdata}<extra></extra>",
                **line_style(index),
            )
    length_axis(figure, lengths, "tokens")
    figure.update_yaxes(type="log", title="bytes", minor_showgrid=False)
    return figure


def _colours(count: int) -> list[str]:
    """Return plotly's colours, again from the first after the last."""
    from plotly.colors import qualitative

    return [qualitative.Plotly[i % len(qualitative.Plotly)] for i in range(count)]


# -- quality -------------------------------------------------------------------------------------


def quality_plots(rows: Sequence[Row], group: Group, curves: Sequence[Curve]) -> list[Plot]:
    """Return quality against cost, loss by position, and recall by distance."""
    judged = [row for row in rows if row["kind"] == "quality" and row["status"] == "ok"]
    if not judged:
        return []
    trained = judged[0]["trained"]
    made = [
        Plot(
            name="loss-by-position",
            title="Loss by position",
            text=f"Bits per byte of text, by position in the row; the model was made for "
            f"{short(trained)} positions.",
            figure=_lines(judged, "loss_by_position", "position, up to", "bits per byte"),
        ),
        Plot(
            name="copy-by-distance",
            title="Recall by distance: a second copy",
            text="Share of the tokens of a second copy that are guessed right.",
            figure=_lines(judged, "copy_by_distance", "tokens between", "share right"),
        ),
        Plot(
            name="needle-by-distance",
            title="Recall by distance: a needle",
            text="Share of the digits of a number, given once, that are guessed right.",
            figure=_lines(judged, "needle_by_distance", "tokens between", "share right"),
        ),
    ]
    longest = max(best_exact(curves), default=None)
    if longest is not None:
        text = (
            f"Milliseconds at {short(longest)} tokens ({group_title(*group)}) against bits per "
            "byte, nothing trained; on the line, nothing is both better and faster."
        )
        pareto = _pareto(rows, curves, longest, MODE_NAMES[group[2]])
        made.insert(0, Plot(name="pareto", title="Quality against cost", text=text, figure=pareto))
    return made


def _lines(judged: Sequence[Row], name: str, x_title: str, y_title: str) -> Any:
    """Draw one line for each attention, over lengths."""
    figure = clear_figure()
    for index, row in enumerate(judged):
        points = {int(n): value for n, value in row[name].items()}
        figure.add_scatter(
            x=list(points),
            y=list(points.values()),
            name=row["attention"],
            line_color=_colours(len(judged))[index],
            hovertemplate="%{fullData.name}, %{x}: %{y:.3f}<extra></extra>",
            **line_style(index),
        )
    length_axis(figure, sorted({int(n) for row in judged for n in row[name]}), x_title)
    figure.update_yaxes(title=y_title)
    return figure


def _pareto(rows: Sequence[Row], curves: Sequence[Curve], length: int, mode: str) -> Any:
    """Draw quality over time at one length, and the front that nothing beats in both."""
    judged = qualities(rows)
    points = [
        (curve.ms[length], judged[curve.attention].bits, curve.attention)
        for curve in curves
        if length in curve.ms and curve.attention in judged
    ]
    figure = clear_figure()
    front = [p for p in sorted(points) if all(q[1] > p[1] for q in points if q < p)]
    figure.add_scatter(
        x=[p[0] for p in front],
        y=[p[1] for p in front],
        mode="lines",
        line={"color": "gray", "dash": "dot", "shape": "hv"},
        hoverinfo="skip",
        showlegend=False,
    )
    colours = _colours(len(points))
    for index, (ms, bits, name) in enumerate(points):
        figure.add_scatter(
            x=[ms],
            y=[bits],
            name=name,
            mode="markers",
            marker={
                "size": 12,
                "color": colours[index],
                "symbol": line_style(index)["marker_symbol"],
            },
            hovertemplate=f"{name}: {figures(ms)} ms, {number(bits)} bits per byte<extra></extra>",
        )
    figure.update_xaxes(type="log", title=f"ms at {short(length)} tokens, {mode}", dtick="D2")
    figure.update_yaxes(type="log", title="bits per byte, lower is better", dtick="D1")
    return figure
