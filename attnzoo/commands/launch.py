"""The command that prints the configs of ``accelerate launch``."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

import typer

from attnzoo.errors import SpecError, did_you_mean


def launch_config(
    name: Annotated[str, typer.Argument(help="ddp, fsdp2, deepspeed_zero2 or deepspeed_zero3")],
) -> None:
    """Print a config of `accelerate launch` for several GPUs: launch-config fsdp2 > fsdp2.yaml."""
    folder = files("attnzoo.commands") / "launch_configs"
    known = sorted(
        file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")
    )
    if name not in known:
        raise SpecError(
            f"No launch config is called {name!r}.{did_you_mean(name, known)} "
            f"Available: {', '.join(known)}."
        )
    print((folder / f"{name}.yaml").read_text("utf-8"), end="")
