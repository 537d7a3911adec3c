"""The model with its own attention, trained by the steps that the swapped one takes.

What it gains from them is the text's doing, and no merit of a swap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnzoo.training.loop import Loss
from attnzoo.training.runs import Run


def tune_softmax(run: Run, steps: int, loss_of: Callable[[Any], Loss]) -> None:
    """Train the model with its own attention, and judge it: the line ``softmax tuned``.

    Args:
        run: The run; its stage comes before those of the swapped model.
        steps: As many as the swapped model takes.
        loss_of: Returns the loss of those steps, given the model as it is trained.
    """
    tuned = run.trained(run.softmax(), "softmax", steps, loss_of, run.softmax)
    run.lines.judge("softmax tuned", lambda: run.quality(tuned))
