"""Progress of a training run: bars in a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from math import inf
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from attnzoo.report.live import LineTimer, is_live
from attnzoo.training.loop import StepMetrics


class TrainingProgress:
    """Shows step, loss, gradient norm, tokens per second and remaining time of each stage.

    A terminal has a bar for each stage. Elsewhere, such as in the log of a batch job, lines are
    printed: :data:`~attnzoo.report.live.LINE_SECONDS` apart, and one after the last step of a
    stage that printed any. Only the main process prints.

    Args:
        console: Where to print.
        stages: Number of steps by stage.
    """

    def __init__(self, console: Console, stages: Mapping[str, int]) -> None:
        self.console, self.stages = console, stages
        self.main = os.environ.get("RANK", "0") == "0"
        self.prints_lines = self.main and not is_live(console)
        self.timer = LineTimer()
        self.printed: set[str] = set()  # stages
        self.progress = Progress(
            TextColumn("{task.description:<12}", markup=False),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not self.main or self.prints_lines,
            speed_estimate_period=inf,  # a step may take longer than any period
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
        """Print a line, above the bars in a terminal."""
        if self.main:
            self.progress.console.print(text, markup=False, soft_wrap=True)

    def on_step(self, stage: str, step: int, metrics: StepMetrics) -> None:
        """Show a step of a stage."""
        if stage not in self.tasks:
            total = self.stages[stage.split()[0]]  # "transfer 4" is the block that starts at 4
            self.tasks[stage] = self.progress.add_task(stage, total=total, metrics="")
        task = self.progress.tasks[self.tasks[stage]]
        self.progress.update(task.id, completed=step + 1)
        self.progress.update(task.id, metrics=describe(metrics, task.speed))
        if self.prints_lines and self._is_due(stage, task):
            self.console.print(line(task), soft_wrap=True, highlight=False)

    def _is_due(self, stage: str, task: Task) -> bool:
        if self.timer.is_due():
            self.printed.add(stage)
            return True
        return task.finished and stage in self.printed


def describe(metrics: StepMetrics, speed: float | None) -> str:
    """Return the metrics of a step in words.

    Args:
        metrics: The metrics.
        speed: Steps per second; ``None`` before the second step.
    """
    parts = [f"loss {metrics.loss:.4f}"]
    if metrics.grad_norm is not None:
        parts.append(f"gradient norm {metrics.grad_norm:.3g}")
    if speed is not None:
        parts.append(f"{metrics.tokens * speed:,.0f} tokens/s")
    return ", ".join(parts)


def line(task: Task) -> str:
    """Return a line about a stage: its step, its metrics, and the time that it still needs."""
    text = f"{task.description}: step {task.completed:.0f} of {task.total:.0f}"
    text += f", {task.fields['metrics']}"
    if task.time_remaining is not None:
        text += f", {timedelta(seconds=round(task.time_remaining))} left"
    return text
