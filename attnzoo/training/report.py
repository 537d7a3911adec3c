"""What a run of recovery shows in a terminal: progress, and a table of what came out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from attnzoo.training.pages import heads, is_encoder, lines_cells
from attnzoo.training.plan import Plan


class ProgressBar:
    """A bar for every stage, with its loss; shown by the main process alone."""

    def __init__(self, console: Console, stages: Mapping[str, int]) -> None:
        self.console, self.stages = console, stages
        self.main = os.environ.get("RANK", "0") == "0"
        self.progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not self.main,
        )
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Show it."""
        self.progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave it as it stands."""
        self.progress.__exit__(kind, error, trace)

    def tell(self, text: str) -> None:
        """Print a line above the bars."""
        if self.main:
            self.progress.console.print(text)

    def tick(self, stage: str, step: int, loss: float) -> None:
        """Show that a step was taken."""
        if stage not in self.tasks:
            total = self.stages[stage.split()[0]]  # "transfer 4" is the block from layer 4 on
            self.tasks[stage] = self.progress.add_task(stage, total=total)
        self.progress.update(
            self.tasks[stage], completed=step + 1, description=f"{stage}, loss {loss:.4f}"
        )


def lines_table(results: Mapping[str, Any]) -> Table:
    """Lay out every line of ``recovery.json``: loss, recall, and how much of each is recovered."""
    cosines = "embeddings of held-out text, cosine to softmax's"
    table = Table(title=cosines if is_encoder(results) else "bits per byte on held-out text")
    for head in heads(results):
        table.add_column(head, justify="right" if head else "left")
    for cells in lines_cells(results):
        table.add_row(*cells)
    return table


def plan_table(plan: Plan) -> Table:
    """Lay out what a plan was chosen from: a row a layer, a column a candidate, the choice bold."""
    table = Table(
        title="nats by which predictions change when one layer alone is swapped",
        caption=f"under the plan, untrained: {plan.divergence:.4f} nats",
    )
    names = list(plan.layers[0].alone)
    for head in ("layer", f"beyond {plan.window}", "entropy", *names, "gets"):
        table.add_column(head, justify="left" if head == "gets" else "right", overflow="fold")
    worst = max(max(layer.alone.values()) for layer in plan.layers)
    for layer in plan.layers:
        entry = plan.spec.for_layer(layer.layer)
        options = ", ".join(f"{k}={v}" for k, v in entry.options.items())
        cells = [
            f"[{_heat(value / worst if worst else 0)}]{value:.4f}[/]"
            for value in layer.alone.values()
        ]
        table.add_row(
            str(layer.layer),
            f"{layer.beyond:.0%}",
            f"{layer.entropy:.2f}",
            *cells,
            f"[bold]{entry.backend}[/] {options}",
        )
    return table


def _heat(share: float) -> str:
    """Return a colour from green, nothing lost, to red."""
    return "red" if share > 0.5 else "yellow" if share > 0.1 else "green"
