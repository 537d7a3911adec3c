"""The model with its own attention, trained by the steps that the swapped one takes.

What it gains from them is the text's doing, and no merit of a swap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from attnzoo.integrations.convert import restore
from attnzoo.training.loop import Loss, Stage
from attnzoo.training.runs import Run


def tune_softmax(run: Run, steps: int, loss_of: Callable[[Any], Loss]) -> None:
    """Train the model with its own attention, and judge it: the line ``softmax tuned``.

    Args:
        run: The run; its stage comes before those of the swapped model.
        steps: As many as the swapped model takes.
        loss_of: Returns the loss of those steps, given the model as it is trained.
    """

    def fresh() -> PreTrainedModel:
        model = run.fresh()
        restore(model)
        return model

    trained, groups = run.prepared(fresh())
    stage = Stage(name="softmax", steps=steps, groups=groups, loss=loss_of(trained))
    tuned = run.merged(run.loop.run(trained, stage, lambda: run.prepared(fresh())[0]))
    run.lines.judge("softmax tuned", lambda: run.quality(tuned))
