"""Whole settings of recovery by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.training.loop import LoopConfig
from attnzoo.training.recover import RecoverConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of recovery.

    Attributes:
        about: For which models, and the source, in one line.
        options: Arguments of ``RecoverConfig``.
        loop: Arguments of ``LoopConfig``.
    """

    about: str
    options: Mapping[str, Any]
    loop: Mapping[str, Any]


RECIPES = {
    "quick": Recipe(
        about="minutes on two CPU cores, for models of a few million parameters",
        options={
            "transfer_steps": 60,
            "distil_steps": 100,
            "train": "full",
            "weights_lr": 1e-3,
            "repeat_share": 0.5,
            "row_length": 512,
        },
        loop={"batch_size": 8, "precision": "bf16"},
    ),
    # 100M tokens of transfer in rows of 512, 600M of distillation in rows of 4,096
    "radlads": Recipe(
        about="700M tokens on GPUs, in stages as RADLADS (arXiv:2505.03005), two learning rates",
        options={
            "transfer_steps": 6104,
            "transfer_lr": 1e-3,
            "row_length": 512,
            "distil_steps": 4578,
            "distil_length": 4096,
            "train": "full",
            "weights_lr": 7e-6,
            "attention_lr": 1e-4,
            "extras_lr": 1e-4,
            "repeat_share": 0.0,
            "gradient_checkpointing": True,
        },
        loop={"batch_size": 32, "precision": "bf16"},
    ),
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe called ``name``.

    Raises:
        ConfigError: No recipe has that name.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"No recipe is called {name!r}.{did_you_mean(name, RECIPES)} Available: "
            f"{', '.join(RECIPES)}."
        )
    return RECIPES[name]


def recipe_config(name: str, **changes: Any) -> RecoverConfig:
    """Return the settings of a recipe.

    Args:
        name: Name of the recipe.
        changes: Settings that differ, of ``RecoverConfig`` or of ``LoopConfig``.

    Raises:
        ConfigError: No recipe has that name, or a value is invalid.
    """
    recipe = find_recipe(name)
    fields = LoopConfig.__dataclass_fields__
    loop = {key: changes.pop(key) for key in [*changes] if key in fields}
    return RecoverConfig(
        **{**recipe.options, "recipe": name, **changes},
        loop=LoopConfig(**{**recipe.loop, **loop}),
    )
