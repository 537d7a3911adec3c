"""Search for the learning rates of a stage by short runs from its start.

Each run multiplies the rates of the stage by another factor, trains the same batches with a
schedule of its own length, and is evaluated on held-out rows. A factor replaces 1, that is the
rates that were given, only if its loss is clearly lower on the same rows
(:mod:`attnzoo.evaluation.margins`); of those whose losses do not clearly differ from the best one,
the smallest is chosen. Short runs prefer rates that pay off soon, so that a search is no guarantee
for a long stage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from attnzoo.errors import ConfigError
from attnzoo.evaluation.margins import paired
from attnzoo.report.atomic_write import atomic_write
from attnzoo.training.checkpoints import FOLDER, CheckpointError, Checkpoints, explain_write_errors
from attnzoo.training.sharding import SHARDED

FACTORS = (0.1, 0.3, 1.0, 3.0)
FILE = "lr_find.json"  # in the folder of the checkpoints, for a resumed run


def check_lr_find(accelerator: Accelerator, steps: int, cp_size: int) -> None:
    """Raise an error if the rates cannot be searched on these processes.

    Args:
        accelerator: That of the run.
        steps: Steps of each short run; 0 for no search.
        cp_size: Processes that split each row.

    Raises:
        ConfigError: Weights or rows are split over processes.
    """
    if steps and (accelerator.distributed_type in SHARDED or cp_size > 1):
        raise ConfigError(
            f"lr_find_steps={steps} restores whole weights after each short run, but FSDP, "
            "DeepSpeed or cp_size splits weights or rows over processes; search on one process or "
            "under DDP, and give the rates that it finds"
        )


def choose_factor(losses: Mapping[float, Sequence[float] | None]) -> float | None:
    """Return the factor of the rates to train with; ``None`` if no run has a finite loss.

    Args:
        losses: The loss on each held-out row by factor; ``None`` for a run that diverged.
    """
    finite = {
        factor: found
        for factor, found in losses.items()
        if found is not None and all(map(math.isfinite, found))
    }
    if 1.0 in finite:
        given = finite[1.0]
        finite = {f: x for f, x in finite.items() if f == 1 or paired(x, given).is_negative}
        if len(finite) == 1:
            return 1.0
        del finite[1.0]
    if not finite:
        return None
    best = min(finite.values(), key=math.fsum)
    return min(f for f, found in finite.items() if not paired(best, found).is_negative)


def find_rates(loop: Any, model: Any, stage: Any, *, started: bool) -> Any:
    """Return a stage with the rates that its short runs find; a resumed run has the same ones.

    Args:
        loop: A :class:`attnzoo.training.loop.Loop`, whose ``lr_find_steps`` are not 0.
        model: The model at the start of the stage.
        stage: The stage.
        started: Whether a checkpoint of the stage is resumed.

    Raises:
        CheckpointError: The rates of a stage that is resumed are not known.
        ConfigError: Every short run diverges.
    """
    (known,) = broadcast_object_list([read_found(loop.checkpoints)])
    if stage.name not in known:
        if started:
            raise CheckpointError(
                f"The rates of stage {stage.name!r} are missing: {FILE} in "
                f"{str(loop.checkpoints.out / FOLDER)!r} does not have them. Start again with a "
                "new --out"
            )
        known[stage.name] = _search(loop, model, stage)
        (known,) = broadcast_object_list([known])
        if loop.accelerator.is_main_process:
            with explain_write_errors(loop.checkpoints):
                atomic_write(_path(loop.checkpoints), json.dumps(known, allow_nan=False))
    found = known[stage.name]
    rates = " and ".join(f"{rate:.2g}" for rate in found["rates"])
    loop.log(f"{stage.name}: the rates are multiplied by {found['factor']:g} and are {rates}")
    return replace(stage, groups=_scaled(stage.groups, found["factor"]))


def read_found(checkpoints: Checkpoints) -> dict[str, Any]:
    """Return the factor, the rates and the losses that were found, by the name of the stage."""
    path = _path(checkpoints)
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


def _search(loop: Any, model: Any, stage: Any) -> dict[str, Any]:
    """Return the chosen factor and its rates, and the mean losses by factor."""
    steps = min(loop.config.lr_find_steps, stage.steps)
    loop.log(f"{stage.name}: the rates are searched by {len(FACTORS)} runs of {steps} steps")
    losses: dict[float, list[float] | None] = {}
    for factor in FACTORS:
        groups = _scaled(stage.groups, factor)
        losses[factor] = loop.try_stage(model, replace(stage, groups=groups), steps)
        shown = _mean(losses[factor])
        text = "diverges" if shown is None else f"held-out loss {shown:.4f}"
        loop.log(f"{stage.name}, rates times {factor:g}: {text}")
    chosen = choose_factor(losses)
    if chosen is None:
        raise ConfigError(
            f"Stage {stage.name!r} diverges in {steps} steps even at {FACTORS[0]:g} of its rates; "
            "give smaller ones (--transfer-lr, --weights-lr, --extras-lr)"
        )
    return {
        "factor": chosen,
        "rates": [group["lr"] for group in _scaled(stage.groups, chosen)],
        "losses": {f"{f:g}": _mean(found) for f, found in losses.items()},
    }


def _mean(losses: list[float] | None) -> float | None:
    if losses is None or not all(map(math.isfinite, losses)):
        return None
    return math.fsum(losses) / len(losses)


def _scaled(groups: list[dict[str, Any]], factor: float) -> list[dict[str, Any]]:
    return [{**group, "lr": group["lr"] * factor} for group in groups]


def _path(checkpoints: Checkpoints) -> Path:
    path: Path = checkpoints.out / FOLDER / FILE
    return path
