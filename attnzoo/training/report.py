"""Terminal output of the training commands: progress bars and the table of a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from attnzoo.training.plan import Plan


class ProgressBar:
    """A progress bar per stage with its loss, shown by the main process only.

    Args:
        console: Where to print.
        stages: Number of steps by stage.
    """

    def __init__(self, console: Console, stages: Mapping[str, int]) -> None:
        self.console, self.stages = console, stages
        self.main = os.environ.get("RANK", "0") == "0"
        self.progress = Progress(
            TextColumn("{task.description:<24}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not self.main,
        )
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Start the display."""
        self.progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the display."""
        self.progress.__exit__(kind, error, trace)

    def log(self, text: str) -> None:
        """Print a line above the bars."""
        if self.main:
            self.progress.console.print(text, markup=False, soft_wrap=True)

    def on_step(self, stage: str, step: int, loss: float) -> None:
        """Advance the bar of a stage."""
        if stage not in self.tasks:
            total = self.stages[stage.split()[0]]  # "transfer 4" is the block that starts at 4
            self.tasks[stage] = self.progress.add_task(stage, total=total)
        self.progress.update(
            self.tasks[stage], completed=step + 1, description=f"{stage}, loss {loss:.4f}"
        )


def plan_table(plan: Plan) -> Table:
    """Return a table of a plan: KL by layer and candidate, and each layer's choice."""
    table = Table(
        title="KL of the predictions in nats when only one layer is swapped",
        caption=f"under the plan, without training: {plan.divergence:.4f} nats",
    )
    names = list(plan.layers[0].alone)
    for column in ("layer", f"beyond {plan.window}", "entropy", *names, "choice"):
        justify: Any = "left" if column == "choice" else "right"
        table.add_column(Text(column), justify=justify, overflow="fold")
    worst = max(max(layer.alone.values()) for layer in plan.layers)
    for layer in plan.layers:
        entry = plan.spec.for_layer(layer.layer)
        options = ", ".join(f"{k}={v}" for k, v in entry.options.items())
        cells = [
            Text(f"{value:.4f}", _color(value / worst if worst else 0))
            for value in layer.alone.values()
        ]
        table.add_row(
            str(layer.layer),
            f"{layer.beyond:.0%}",
            f"{layer.entropy:.2f}",
            *cells,
            Text.assemble((entry.backend, "bold"), f" {options}"),
        )
    return table


def _color(fraction: float) -> str:
    """Return green for a small fraction of the largest KL, yellow, or red."""
    return "red" if fraction > 0.5 else "yellow" if fraction > 0.1 else "green"
