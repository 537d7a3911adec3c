"""Train several attentions on a task with several seeds, and tabulate the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import attnzoo
from attnzoo.errors import SpecError
from attnzoo.evaluation.models import spec_label
from attnzoo.evaluation.presets import preset_options, preset_specs
from attnzoo.evaluation.results import FORMAT, Row, append, commit, open_results
from attnzoo.evaluation.timing import machine
from attnzoo.hf.swap.convert import swap
from attnzoo.report.table import Table
from attnzoo.spec import AttentionSpec
from attnzoo.tasks.base import Task
from attnzoo.tasks.catalog import find_task
from attnzoo.tasks.train import evaluate, make_model, train

OnProgress = Callable[[str, float], None]  # the current run, and the completed fraction

BACKENDS = ("flash", "reformer", "longformer", "linear", "gated_linear", "delta", "performer")
TRAIN_HASHES = (1, 2, 4)  # hash rounds of Reformer in training on duplication, as in its paper
EVAL_HASHES = (1, 2, 4, 8)  # hash rounds of a trained Reformer in evaluation


def default_specs(names: Sequence[str] | None, task: str) -> list[AttentionSpec]:
    """Return the presets of the given backends, or the specs that a task compares by default.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    if not names and task == "duplication":
        return [AttentionSpec("flash"), *hashing_specs()]
    return preset_specs(names or BACKENDS, "from_scratch")


def hashing_specs() -> list[AttentionSpec]:
    """Return Reformer with each number of hash rounds of ``TRAIN_HASHES``."""
    (options,) = preset_options("reformer", "from_scratch")
    return [AttentionSpec("reformer", **{**options, "num_hashes": n}) for n in TRAIN_HASHES]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Options of a run.

    Attributes:
        task: Name of the task.
        specs: The attentions; the task's defaults when ``None``.
        seeds: Number of runs per attention.
        steps: Training steps; the task's own when ``None``.
        out: Folder of results.
        fresh: Whether to start over instead of resuming from earlier results.
    """

    task: str
    out: Path
    specs: Sequence[AttentionSpec] | None = None
    seeds: int = 3
    steps: int | None = None
    fresh: bool = False


def run_tasks(
    config: TaskConfig, on_progress: OnProgress = lambda name, fraction: None
) -> list[Row]:
    """Train every model that has no row in the results folder; return the rows of this run.

    Raises:
        AttnzooError: An option is invalid; nothing is trained then.
    """
    task = find_task(config.task)
    specs = list(config.specs or default_specs(None, task.name))
    if config.seeds < 1 or (config.steps is not None and config.steps < 1):
        raise SpecError(f"seeds and steps must be 1 or more, got {config.seeds} and {config.steps}")
    for spec in specs:
        make_model(task, spec, 0)  # refuses an unsupported spec before anything is trained
    earlier = {row.get("key"): row for row in open_results(config.out, fresh=config.fresh)}
    about = {
        "format": FORMAT,
        "attnzoo": attnzoo.__version__,
        "commit": commit(),
        "machine": machine(),
        "status": "ok",
        "kind": "task",
    }
    steps = config.steps or task.steps
    runs = [(seed, spec) for seed in range(config.seeds) for spec in specs]
    rows = []
    for number, (seed, spec) in enumerate(runs):
        key = f"{task.name} {steps} {seed} {spec.to_dict()}"
        row = earlier.get(key)
        if row is None:
            on_progress(f"{task.name}, {spec_label(spec)}, seed {seed}", number / len(runs))
            result = _train_and_evaluate(task, spec, seed, steps)
            row = append(config.out, {**about, "key": key, **result})
        rows.append(row)
    return rows


def _train_and_evaluate(task: Task, spec: AttentionSpec, seed: int, steps: int) -> Row:
    """Train and evaluate one model."""
    model, trained = train(task, spec, seed=seed, steps=steps)
    row: Row = {
        "task": task.name,
        "attention": spec_label(spec),
        "spec": spec.to_dict(),
        "seed": seed,
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "accuracy": trained.accuracy,
        "loss": trained.loss,
        "seconds": round(trained.seconds, 1),
    }
    if task.name == "duplication" and spec.default.backend == "reformer":
        options = dict(spec.default.options)
        row["by_rounds"] = {}
        for rounds in EVAL_HASHES:
            swap(model, "reformer", **(options | {"num_hashes": rounds}))
            longest = task.test_sizes[-1]
            row["by_rounds"][rounds] = evaluate(model, task, (longest,))[longest]
    return row


@dataclass(frozen=True, kw_only=True)
class SeedStatistics:
    """Results of several seeds in one cell of a table."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        """Return mean ± half the range, in percent."""
        half = (max(self.values) - min(self.values)) / 2
        return f"{100 * mean(self.values):.0f} ± {100 * half:.0f}"


def tabulate(task: Task, rows: Sequence[Row]) -> Table:
    """Return accuracy in percent by size, mean over seeds ± half the range."""
    columns = ["attention", *(f"{size} {task.size_unit}" for size in task.test_sizes), "s per run"]
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["attention"]].append(row)
    body = [
        [
            name,
            *(
                str(SeedStatistics(values=tuple(run["accuracy"][str(size)] for run in runs)))
                for size in task.test_sizes
            ),
            f"{mean(run['seconds'] for run in runs):.0f}",
        ]
        for name, runs in found.items()
    ]
    return Table(columns=columns, rows=body, title=f"{task.name}: {task.about}")


def tabulate_hash_rounds(rows: Sequence[Row]) -> Table | None:
    """Return accuracy by hash rounds in training and in evaluation, as in the Reformer paper."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "by_rounds" in row:
            found[row["attention"]].append(row)
    if not found:
        return None
    body = [
        [
            name,
            *(
                str(SeedStatistics(values=tuple(run["by_rounds"][str(rounds)] for run in runs)))
                for rounds in EVAL_HASHES
            ),
        ]
        for name, runs in found.items()
    ]
    return Table(
        columns=["trained with", *(f"evaluated with {rounds}" for rounds in EVAL_HASHES)],
        rows=body,
        title="Hash rounds, the longest words",
    )
