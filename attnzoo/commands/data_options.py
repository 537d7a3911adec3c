"""Options of commands that read text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_DATA = typer.Option(
    help="text, .jsonl or .parquet file, folder of them or of a saved data set, or the id of a "
    "data set of the Hub, owner/name or owner/name:config (repeatable); with weights, such as "
    "a.jsonl:0.7, a mixture"
)
Data = Annotated[list[Path], _DATA]
DataIfGiven = Annotated[list[Path] | None, _DATA]
DatasetTextField = Annotated[
    str, typer.Option(help="field of JSON and parquet files and data sets with the text")
]
MaxTokens = Annotated[
    str | None,
    typer.Option(
        help="read only as much of --data as has so many tokens, such as 300M; data sets of the "
        "Hub are then streamed, and not downloaded whole"
    ),
]
Control = Annotated[
    int | None, typer.Option(help="window of the baseline, in tokens; default: the swap's window")
]
TargetLength = Annotated[
    int | None,
    typer.Option(
        help="tokens for which the swap is meant: it is evaluated there too, and compared with the "
        "window of equal memory; default: --max-length"
    ),
]
