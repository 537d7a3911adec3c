"""Options of commands that read text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from attnzoo.errors import ConfigError

_DATA = typer.Option(
    help="text, .jsonl or .parquet file, folder of them or of a saved data set, or the id of a "
    "data set of the Hub, owner/name or owner/name:config (repeatable); with weights, such as "
    "a.jsonl:0.7, a mixture"
)
Data = Annotated[list[Path], _DATA]
DataIfGiven = Annotated[list[Path] | None, _DATA]
Column = Annotated[
    str, typer.Option(help="field of JSON and parquet files and data sets with the text")
]
MaxTokens = Annotated[
    str | None,
    typer.Option(
        help="read only as much of --data as has so many tokens, such as 300M; data sets of the "
        "Hub are then streamed, and not downloaded whole"
    ),
]
Length = Annotated[int, typer.Option(help="tokens per row")]
Control = Annotated[
    int | None, typer.Option(help="window of the baseline, in tokens; default: the swap's window")
]
TargetLength = Annotated[
    int | None,
    typer.Option(
        help="tokens for which the swap is meant: it is evaluated there too, and compared with the "
        "window of equal memory; default: --length"
    ),
]


def token_count(text: str | None, option: str) -> int | None:
    """Return the number in a text such as ``300M``, with units of 1000; ``None`` without a text.

    Raises:
        ConfigError: The text is not a number above 0.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbt]?)", text.strip().lower())
    count = round(float(found[1]) * 1000 ** " kmbt".index(found[2] or " ")) if found else 0
    if count < 1:
        raise ConfigError(f"{option} must be a number of tokens such as 300M or 2B, got {text!r}")
    return count
