"""Runs a task for several mechanisms and seeds, and tabulates what came of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import attnzoo
from attnzoo.bench import machine
from attnzoo.compare.results import FORMAT, Row, append, commit, prepare
from attnzoo.demo.run import label
from attnzoo.errors import SpecError
from attnzoo.integrations.convert import swap
from attnzoo.registry import get_backend
from attnzoo.spec import AttentionSpec
from attnzoo.tasks.base import Task, find_task
from attnzoo.tasks.train import judge, make_model, train

Options = dict[str, Any]
Tell = Callable[[str, float], None]  # what runs, and which share of everything is done

# What --attention NAME means here: rows have 32 to 256 tokens, so windows and chunks are small, and
# models are trained from scratch, so that products need not be those of a softmax.
FROM_SCRATCH: Options = {"feature_map": "identity", "normalize": False}
VARIANTS: dict[str, tuple[Options, ...]] = {
    "longformer": ({"window": 16},),
    "reformer": ({"num_hashes": 4, "chunk_size": 16, "window": 8},),
    "performer": ({"num_features": 64},),
    "linformer": ({"block": 16},),
    "linear": (FROM_SCRATCH,),
    "gated_linear": ({"gate": "retnet", **FROM_SCRATCH}, {"gate": "gla", **FROM_SCRATCH}),
}
MECHANISMS = ("flash", "reformer", "longformer", "linear", "gated_linear", "performer")
ROUNDS = (1, 2, 4, 8)  # of hashing, with which a trained reformer is judged on duplication
HASHED = tuple(  # what duplication is trained with: the rounds of the paper's table
    AttentionSpec("reformer", num_hashes=n, chunk_size=16, window=8) for n in (1, 2, 4)
)


def default_specs(names: Sequence[str] | None, task: str) -> list[AttentionSpec]:
    """Return the mechanisms of a task: those named, or those that it is known to tell apart.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    if not names and task == "duplication":
        return [AttentionSpec("flash"), *HASHED]
    for name in names or ():
        get_backend(name)
    return [
        AttentionSpec(name, **options)
        for name in names or MECHANISMS
        for options in VARIANTS.get(name, ({},))
    ]


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """What is asked for.

    Attributes:
        task: Its name.
        specs: The mechanisms; the task's own when ``None``.
        seeds: How many runs each.
        steps: Of training; the task's own when ``None``.
        out: Folder of results.
        fresh: Whether earlier results are set aside.
    """

    task: str
    out: Path
    specs: Sequence[AttentionSpec] | None = None
    seeds: int = 3
    steps: int | None = None
    fresh: bool = False


def run_tasks(plan: TaskPlan, tell: Tell = lambda what, share: None) -> list[Row]:
    """Train what is not in the folder yet; returns the rows of this task and plan.

    Raises:
        AttnzooError: Something was given that cannot be used; nothing is trained then.
    """
    task = find_task(plan.task)
    specs = list(plan.specs or default_specs(None, task.name))
    if plan.seeds < 1 or (plan.steps is not None and plan.steps < 1):
        raise SpecError(f"seeds and steps must be 1 or more, got {plan.seeds} and {plan.steps}")
    for spec in specs:
        make_model(task, spec, 0)  # a refusal comes now, not after an hour
    earlier = {row.get("key"): row for row in prepare(plan.out, fresh=plan.fresh)}
    about = {
        "format": FORMAT,
        "attnzoo": attnzoo.__version__,
        "commit": commit(),
        "machine": machine(),
        "status": "ok",
        "kind": "task",
    }
    steps = plan.steps or task.steps
    runs = [(seed, spec) for seed in range(plan.seeds) for spec in specs]
    rows = []
    for number, (seed, spec) in enumerate(runs):
        key = f"{task.name} {steps} {seed} {spec.to_dict()}"
        row = earlier.get(key)
        if row is None:
            tell(f"{task.name}, {label(spec)}, seed {seed}", number / len(runs))
            result = _one(task, spec, seed, steps)
            row = append(plan.out, {**about, "key": key, **result})
        rows.append(row)
    return rows


def _one(task: Task, spec: AttentionSpec, seed: int, steps: int) -> Row:
    """Train and judge one model."""
    model, trained = train(task, spec, seed=seed, steps=steps)
    row: Row = {
        "task": task.name,
        "attention": label(spec),
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
        for rounds in ROUNDS:
            swap(model, "reformer", **(options | {"num_hashes": rounds}))
            longest = task.test_sizes[-1]
            row["by_rounds"][rounds] = judge(model, task, (longest,))[longest]
    return row


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Several seeds as one cell of a table."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        """Write mean and half the distance between the outer ones, in percent."""
        half = (max(self.values) - min(self.values)) / 2
        return f"{100 * mean(self.values):.0f} ± {100 * half:.0f}"


def tabulate(task: Task, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: percent right by size, mean over seeds and half the spread."""
    head = ["attention", *(f"{size} {task.size_is}" for size in task.test_sizes), "s a run"]
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["attention"]].append(row)
    body = [
        [
            name,
            *(
                str(Spread(values=tuple(run["accuracy"][str(size)] for run in runs)))
                for size in task.test_sizes
            ),
            f"{mean(run['seconds'] for run in runs):.0f}",
        ]
        for name, runs in found.items()
    ]
    return head, body


def tabulate_rounds(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the Reformer paper's table: trained with so many rounds, judged with others."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "by_rounds" in row:
            found[row["attention"]].append(row)
    head = ["trained with", *(f"judged with {rounds}" for rounds in ROUNDS)]
    body = [
        [
            name,
            *(
                str(Spread(values=tuple(run["by_rounds"][str(rounds)] for run in runs)))
                for rounds in ROUNDS
            ),
        ]
        for name, runs in found.items()
    ]
    return head, body
