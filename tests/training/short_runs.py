"""Shorten the measurements of a run: with a tiny model they take most of its time."""

from collections.abc import Callable
from typing import Any

from attnzoo.evaluation import generation
from attnzoo.evaluation.equal_memory import EqualWindow
from attnzoo.training import evaluator, recovery
from attnzoo.training.arguments import RecoveryArguments

STEPS = {
    "transfer_steps": 5,
    "max_steps": 6,
    "max_length": 32,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_steps": 1,
}


def shorten_runs(patch: Callable[[object, str, Any], None]) -> None:
    """Reduce the lengths and the rows of measurements.

    Args:
        patch: Sets an attribute: ``setattr``, or that of a ``MonkeyPatch``.
    """
    windows = EqualWindow(length=16, windows={0: 2, 1: 2}, swap_bytes=1, exact_bytes=8)
    patch(recovery, "CLOSE", 0.0)  # swaps of models with random weights start close to softmax
    patch(recovery, "JUDGED", 4)
    patch(evaluator, "ROWS", 2)
    patch(evaluator, "equal_window", lambda path, spec, length: windows)
    patch(generation, "NEW_TOKENS", 8)


def arguments(out: Any, **changes: Any) -> RecoveryArguments:
    """Return the arguments of a short run in a folder."""
    return RecoveryArguments(output_dir=str(out), **{**STEPS, **changes})


def losses(results: Any) -> list[tuple[str, int, float]]:
    """Return the losses of a run by stage and step."""
    return [
        (stage, line["step"], line["loss"])
        for stage, lines in results["losses"].items()
        for line in lines
        if "loss" in line
    ]
