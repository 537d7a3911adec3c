"""Learning-rate schedules by transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import SchedulerType
from transformers.optimization import get_scheduler

from attnzoo.errors import ConfigError, did_you_mean

ADAPTIVE = ("reduce_lr_on_plateau", "greedy")  # need the held-out loss during training
NAMES = tuple(kind.value for kind in SchedulerType if kind.value not in ADAPTIVE)


def make_schedule(
    name: str,
    options: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    *,
    warmup: int,
    steps: int,
) -> Any:
    """Return a schedule of the learning rates of an optimizer.

    Args:
        name: ``lr_scheduler_type`` of transformers' ``TrainingArguments``, such as ``"cosine"``.
        options: Its ``lr_scheduler_kwargs``.
        optimizer: The optimizer.
        warmup: Steps of linear warmup; ``"constant"`` has none.
        steps: Steps in all.
    """
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(options),
    )


def check_schedule(name: str, options: Mapping[str, Any]) -> None:
    """Raise an error for a schedule that does not exist or cannot be made.

    Raises:
        ConfigError: The name is unknown, or the options are not those of this schedule.
    """
    if name not in NAMES:
        raise ConfigError(
            f"lr_scheduler_type must be one of {', '.join(NAMES)}, got {name!r}."
            f"{did_you_mean(name, NAMES)}"
        )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    try:
        make_schedule(name, options, optimizer, warmup=1, steps=10)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"The schedule {name!r} cannot be made with lr_scheduler_kwargs={dict(options)}: "
            f"{error}"
        ) from error
