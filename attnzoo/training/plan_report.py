"""How plans are presented: in the terminal, and as a page with charts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from attnzoo.evaluation.margins import mean_of, plus_minus
from attnzoo.report import charts, page
from attnzoo.report.format import format_bytes
from attnzoo.report.table import Table
from attnzoo.training.plan import EXACT, Plan

LEAST_KL = 1e-6  # nats; smaller values are drawn there
MOST_TICKS = 12


def write_plan_page(path: Path, plan: Plan) -> list[Path]:
    """Write charts of a plan's measurements, layers by candidates, as HTML and PNG.

    Args:
        path: HTML file; the PNG files have the same folder and begin with its name.
        plan: The plan.

    Returns:
        The files that were written; none without matplotlib.
    """
    if not charts.can_draw():
        return []
    figures = [
        _divergence_chart(plan, "alone", "One layer swapped", "exact"),
        _divergence_chart(plan, "restored", "One layer exact", "swapped"),
    ]
    body = [
        page.heading("Attention by layer", 1),
        page.paragraph(f"Under the plan, without training, predictions change by {_change(plan)}."),
        choices_table(plan).html(),
        page.heading("Candidates"),
        page.paragraph(CANDIDATES_TEXT, muted=True),
        candidates_table(plan).html(),
        page.reasons("Left out", list(plan.left_out.items())),
        page.plots_html(figures),
        *(
            part
            for measure, title in (("alone", "One layer swapped"), ("restored", "One layer exact"))
            for part in (page.heading(f"{title}: KL in nats"), _numbers(plan, measure).html())
        ),
    ]
    written = [page.write_page(path, title="attnzoo plan", body=body)]
    written += [
        charts.write_picture(path.with_name(f"{path.stem}-{x.name}.png"), x) for x in figures
    ]
    return written


CANDIDATES_TEXT = (
    "Each candidate in all layers, untrained, and the window that needs as much memory at the "
    "length that the swap is meant for: KL of the predictions in nats on the measured rows, with "
    "standard errors. A winner is named only where the difference is clear."
)


def _change(plan: Plan) -> str:
    return f"{plus_minus(plan.divergence, plan.divergence_error, 4)} nats"


def choice_text(plan: Plan, layer: int) -> str:
    """Return the attention of a layer in words, such as ``"delta, window 32"``."""
    entry = plan.spec.for_layer(layer)
    if entry.backend == EXACT and not entry.options:
        return "softmax (flash)"
    options = (f"{name.replace('_', ' ')} {value}" for name, value in entry.options.items())
    return ", ".join([entry.backend, *options])


def choices_table(plan: Plan) -> Table:
    """Return a table of the layers: far attention, entropy and choice."""
    rows = [
        [
            str(layer.layer),
            f"{layer.beyond:.0%}",
            f"{layer.entropy:.2f}",
            choice_text(plan, layer.layer),
        ]
        for layer in plan.layers
    ]
    columns = ("layer", f"attention beyond {plan.window}", "entropy, bits", "choice")
    return Table(columns=columns, rows=rows, numeric=False)


def windows_note(plan: Plan) -> str:
    """Return a warning that the candidates have different windows, or ``""``."""
    windows = sorted({x.own_window for x in plan.candidates if x.own_window is not None})
    if len(windows) < 2:
        return ""
    return (
        f"The candidates have windows of {', '.join(map(str, windows))} "
        "tokens, so a difference between them is partly that of the windows; --equal-window "
        f"{windows[0]} compares them at one."
    )


def candidates_table(plan: Plan) -> Table:
    """Return a table of the candidates: what they save, and the window of equal memory."""
    rows = []
    for one in plan.candidates:
        window = mean_of(one.window_rows)
        rows.append(
            [
                one.name,
                format_bytes(one.cache_bytes),
                f"{one.cache_bytes / one.exact_bytes:.0%}",
                plus_minus(one.kl.mean, one.kl.error, 4),
                "-" if one.window is None else str(one.window),
                plus_minus(window.mean, window.error, 4) if one.window_rows else "-",
                one.winner(),
            ]
        )
    length = plan.candidates[0].length if plan.candidates else 0
    return Table(
        columns=(
            "candidate, all layers",
            f"cache at {length:,} tokens",
            "of softmax's",
            "KL, nats",
            "window of equal memory",
            "its KL, nats",
            "changes predictions less",
        ),
        rows=rows,
        title="candidates in all layers, untrained",
    )


def _numbers(plan: Plan, measure: str) -> Table:
    """Return a table of KL by layer and candidate."""
    names = list(plan.layers[0].alone)
    rows = [
        [str(layer.layer), *(f"{getattr(layer, measure)[name]:.4f}" for name in names)]
        for layer in plan.layers
    ]
    return Table(columns=("layer", *names), rows=rows)


def _divergence_chart(plan: Plan, measure: str, title: str, others: str) -> charts.Plot:
    """Return KL by layer, a line per candidate; ``others`` is the state of other layers."""
    numbers = [layer.layer for layer in plan.layers]
    series = []
    for index, name in enumerate(plan.layers[0].alone):
        values = [max(getattr(layer, measure)[name], LEAST_KL) for layer in plan.layers]
        low = high = None
        if measure == "alone" and all(len(x.alone_rows.get(name, ())) > 1 for x in plan.layers):
            errors = [mean_of(layer.alone_rows[name]).error for layer in plan.layers]
            low = [max(x - e, LEAST_KL) for x, e in zip(values, errors, strict=True)]
            high = [x + e for x, e in zip(values, errors, strict=True)]
        series.append(
            charts.Series(name=name, x=numbers, y=values, low=low, high=high, style=index)
        )
    step = max(1, -(-len(numbers) // MOST_TICKS))
    figure = charts.line_chart(
        series,
        x=charts.Axis(label="layer", ticks={n: str(n) for n in numbers[::step]}),
        y=charts.Axis(label="KL, nats", log=True),
    )
    text = f"KL of the predictions, in nats, all other layers {others}; bars: standard errors."
    return charts.Plot(name=measure, title=title, text=text, figure=figure)


def plan_table(plan: Plan) -> RichTable:
    """Return a table of a plan: KL by layer and candidate, and each layer's choice."""
    table = RichTable(
        title="KL of the predictions in nats when only one layer is swapped",
        caption=f"under the plan, without training: {_change(plan)}",
    )
    names = list(plan.layers[0].alone)
    for column in ("layer", f"beyond {plan.window}", "entropy, bits", *names, "choice"):
        justify: Any = "left" if column == "choice" else "right"
        table.add_column(Text(column), justify=justify, overflow="fold")
    worst = max(max(layer.alone.values()) for layer in plan.layers)
    for layer in plan.layers:
        backend, comma, options = choice_text(plan, layer.layer).partition(",")
        cells = [
            Text(f"{value:.4f}", _color(value / worst if worst else 0))
            for value in layer.alone.values()
        ]
        table.add_row(
            str(layer.layer),
            f"{layer.beyond:.0%}",
            f"{layer.entropy:.2f}",
            *cells,
            Text.assemble((backend, "bold"), comma + options),
        )
    return table


def _color(fraction: float) -> str:
    """Return green for a small fraction of the largest KL, yellow, or red."""
    return "red" if fraction > 0.5 else "yellow" if fraction > 0.1 else "green"
