"""The command that shows recipes: their stages, source and differences."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from attnzoo.commands.terminal import AsJson, console


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="a recipe, for its stages, source and differences")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes of `--recipe`, or show the stages of one, its source and what differs."""
    from attnzoo.training.recipes import find_recipe, recipe_stages
    from attnzoo.training.recipes import recipes as all_recipes

    known = [find_recipe(name)] if name else list(all_recipes().values())
    if as_json:
        data = [
            {**asdict(x), "stages": [{**asdict(s), "tokens": s.tokens} for s in recipe_stages(x)]}
            for x in known
        ]
        print(json.dumps(data, indent=2))
    elif name:
        _print_recipe(known[0])
    else:
        _print_recipes(known)


def _print_recipes(known: list[Any]) -> None:
    from attnzoo.report.table import Table
    from attnzoo.training.recipes import recipe_stages

    rows = []
    for recipe in known:
        stages = recipe_stages(recipe)
        tokens = sum(stage.tokens for stage in stages)
        rows.append(
            [recipe.name, _millions(tokens), ", ".join(x.stage for x in stages), recipe.about]
        )
    columns = ("recipe", "tokens", "stages", "about")
    Table(columns=columns, rows=rows, numeric=False).print(console)
    console.print("attnzoo recipes NAME shows the stages, the source and what differs from it.")


def _print_recipe(recipe: Any) -> None:
    from attnzoo.report.table import Table
    from attnzoo.training.recipes import recipe_stages

    rows = [
        [
            stage.stage,
            stage.trains,
            stage.loss,
            _millions(stage.tokens),
            f"{stage.steps:,}",
            f"{stage.rows} x {stage.length:,}",
            ", ".join(f"{what} {rate:g}" for what, rate in stage.rates.items()),
            stage.schedule,
            str(stage.warmup),
        ]
        for stage in recipe_stages(recipe)
    ]
    columns = (
        *("stage", "trains", "loss", "tokens", "steps", "rows x tokens", "rates", "schedule"),
        "warmup steps",
    )
    lines = [f"{recipe.name}: {recipe.about}", f"Source: {recipe.source}"]
    if recipe.attention is not None:
        lines.append(f"Attention, if none is given: {recipe.attention}")
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    Table(columns=columns, rows=rows, numeric=False).print(console)
    for title, texts in (("What differs here", recipe.differences), ("Run", recipe.commands)):
        if texts:
            console.print(f"{title}:")
        for text in texts:
            console.print(f"  {text}", soft_wrap=True, markup=False, highlight=False)


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:,.1f}M"
