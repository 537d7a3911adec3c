"""How plans are presented in the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from attnzoo.evaluation.margins import mean_of, plus_minus
from attnzoo.report.format import format_bytes
from attnzoo.report.table import Table
from attnzoo.training.plan import EXACT, Plan


def _change(plan: Plan) -> str:
    return f"{plus_minus(plan.divergence, plan.divergence_error, 4)} nats"


def choice_text(plan: Plan, layer: int) -> str:
    """Return the attention of a layer in words, such as ``"delta, window 32"``."""
    entry = plan.spec.for_layer(layer)
    if entry.backend == EXACT and not entry.options:
        return "softmax (flash)"
    options = (f"{name.replace('_', ' ')} {value}" for name, value in entry.options.items())
    return ", ".join([entry.backend, *options])


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
