"""Recipes: published settings of recovery by name, as data files.

A file of ``recipe_files`` has the settings of each command that takes part, the source of the
values, and what differs from it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.training.finetune import FinetuneConfig
from attnzoo.training.loop import LoopConfig
from attnzoo.training.recover import RATES, RecoverConfig
from attnzoo.training.train_config import TrainConfig

CONFIGS: Mapping[str, Any] = {"recover": RecoverConfig, "finetune": FinetuneConfig}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of recovery.

    Attributes:
        name: Its name.
        about: For which models, in one line.
        source: Paper, repository and files that have the values.
        differences: What differs from the source here.
        commands: The commands that run it, in order; ``DIR`` is the model, ``TEXT`` the data.
        attention: The swap, as ``--attention`` takes it; ``None`` if any is meant.
        recover: Arguments of ``RecoverConfig`` and its ``LoopConfig``; empty without such a stage.
        finetune: Arguments of ``FinetuneConfig`` and its ``LoopConfig``; empty without such a
            stage.
    """

    name: str
    about: str
    source: str
    differences: tuple[str, ...]
    commands: tuple[str, ...]
    attention: str | None = None
    recover: Mapping[str, Any] = field(default_factory=dict)
    finetune: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RecipeStage:
    """One stage of a recipe.

    Attributes:
        command: The command that runs it.
        stage: Its name in logs.
        trains: Which parameters.
        loss: What it minimises.
        steps: Optimiser steps.
        rows: Rows a step.
        length: Tokens a row.
        rates: Learning rates by what they apply to.
        schedule: Schedule of the rates by transformers' name, with its arguments.
        warmup: Steps of linear warmup.
    """

    command: str
    stage: str
    trains: str
    loss: str
    steps: int
    rows: int
    length: int
    rates: dict[str, float]
    schedule: str
    warmup: int

    @property
    def tokens(self) -> int:
        """Tokens of the stage."""
        return self.steps * self.rows * self.length


@cache
def recipes() -> dict[str, Recipe]:
    """Return all recipes by name."""
    folder = files("attnzoo.training") / "recipe_files"
    texts = {
        file.name.removesuffix(".toml"): file.read_text("utf-8")
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    }
    return {name: _read(name, texts[name]) for name in sorted(texts)}


def _read(name: str, text: str) -> Recipe:
    data = tomllib.loads(text)
    differences, commands = (tuple(data.pop(key)) for key in ("differences", "commands"))
    return Recipe(name=name, differences=differences, commands=commands, **data)


def find_recipe(name: str) -> Recipe:
    """Return the recipe called ``name``.

    Raises:
        ConfigError: No recipe has that name.
    """
    known = recipes()
    if name not in known:
        raise ConfigError(
            f"No recipe is called {name!r}.{did_you_mean(name, known)} Available: "
            f"{', '.join(known)}."
        )
    return known[name]


def recipe_config(name: str, command: str = "recover", **changes: Any) -> Any:
    """Return the settings of a recipe for a command.

    Args:
        name: Name of the recipe.
        command: ``"recover"`` or ``"finetune"``.
        changes: Settings that differ, of the command's config or of ``LoopConfig``.

    Returns:
        A ``RecoverConfig`` or a ``FinetuneConfig``.

    Raises:
        ConfigError: No recipe has that name, it has no stage of this command, or a value is
            invalid.
    """
    recipe = find_recipe(name)
    settings = getattr(recipe, command)
    if not settings:
        raise ConfigError(
            f"The recipe {name!r} has no stage of `attnzoo {command}`; run `{recipe.commands[0]}`"
        )
    if any(changes.get(rate) is not None for rate in RATES) and command == "recover":
        changes.setdefault("rate_factor", 1.0)
    given = {**settings, **changes, "recipe": name}
    fields = LoopConfig.__dataclass_fields__
    loop = {key: given.pop(key) for key in [*given] if key in fields}
    for key in ("betas", "lora_target_modules"):  # TOML has lists
        for part in (loop, given):
            if isinstance(part.get(key), list):
                part[key] = tuple(part[key])
    return CONFIGS[command](**given, loop=LoopConfig(**loop))


def recipe_stages(recipe: Recipe) -> list[RecipeStage]:
    """Return the stages of a recipe, in the order in which they run."""
    stages = []
    if recipe.recover:
        stages += _recover_stages(recipe_config(recipe.name))
    if recipe.finetune:
        config = recipe_config(recipe.name, "finetune")
        loss = "cross-entropy"
        stages.append(_stage(config, "finetune", "finetune", config.train, loss, config.steps))
    return stages


def _recover_stages(config: RecoverConfig) -> list[RecipeStage]:
    stages = []
    if config.transfer_steps:
        rates = {"extras": config.transfer_rate}
        steps, loss = config.transfer_steps, f"error of the {config.transfer_target}"
        stages.append(_stage(config, "recover", "transfer", "extras", loss, steps, rates=rates))
    if config.distil_steps:
        loss = "KL to softmax" if config.cross_entropy < 1 else "cross-entropy"
        rows = config.distil_batch or config.loop.batch_size
        stages.append(
            _stage(
                config,
                "recover",
                "distil",
                config.train,
                loss,
                config.distil_steps,
                rows=rows,
                length=config.distil_length,
                schedule=config.distil_schedule,
            )
        )
    return stages


def _stage(
    config: TrainConfig,
    command: str,
    name: str,
    trains: str,
    loss: str,
    steps: int,
    *,
    rates: dict[str, float] | None = None,
    rows: int | None = None,
    length: int | None = None,
    schedule: tuple[str, Mapping[str, Any]] | None = None,
) -> RecipeStage:
    """Return a stage; what is ``None`` is that of the config."""
    loop = config.loop
    kind, options = schedule or (loop.lr_scheduler_type, loop.lr_scheduler_kwargs)
    return RecipeStage(
        command=command,
        stage=name,
        trains=trains,
        loss=loss,
        steps=steps,
        rows=rows or loop.batch_size,
        length=length or config.row_length,
        rates=rates or config.rates,
        schedule=", ".join([kind, *(f"{key} {value}" for key, value in options.items())]),
        warmup=loop.warmup_steps(steps),
    )
