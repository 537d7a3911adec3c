"""Judging a model that is swapped and saved already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from attnzoo.demo.text import refuse_encoder
from attnzoo.errors import SpecError
from attnzoo.integrations.attention import NAME
from attnzoo.integrations.convert import swap
from attnzoo.integrations.files import read_config
from attnzoo.training.evaluate import (
    as_data,
    branch_qualities,
    judged_rows,
    quality,
    softmax_quality,
    verdict,
    window_of,
)
from attnzoo.training.runs import Tell, TrainConfig, load_rows


def evaluate(
    path: Path,
    data: list[Path],
    *,
    column: str = "text",
    row_length: int = 512,
    rows: int = 32,
    control: int | None = None,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Judge a saved, swapped model on held-out text, beside its own attention and the window alone.

    All lines have the saved weights: ``softmax`` is the model with its own attention, which after
    training is not the model that it was made from.

    Args:
        path: Folder of a saved causal model that is swapped.
        data: Text files, JSON lines, parquet, or folders of them; what :func:`recover` held out of
            them is held out here.
        column: Field of JSON and parquet that holds the text.
        row_length: Tokens of a row.
        rows: How many rows to judge on.
        control: Tokens that the window alone sees; the swap's widest window without.
        tell: Called with what is going on.

    Returns:
        ``verdict``, ``window`` and ``lines``, as in ``recovery.json``.

    Raises:
        AttnzooError: Something that was given cannot be used.
    """
    if getattr(read_config(path), NAME, None) is None:
        raise SpecError(
            f"{str(path)!r} is not swapped, so there is nothing to compare; `attnzoo recover` and "
            "`attnzoo swap` write swapped models"
        )
    refuse_encoder(path, "this judges text prediction")
    config = TrainConfig(row_length=row_length, judged_rows=rows, repeat_share=0.0, control=control)
    _, held_out = load_rows(path, data, column, config)
    judged = judged_rows(held_out, rows)
    tell(f"{len(judged.plain)} rows that were held out")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    lines = {"softmax": softmax_quality(model, judged), "result": quality(model, judged)}
    lines |= branch_qualities(model, lambda model: quality(model, judged))
    window = control or window_of(model)
    swap(model, "flash", window=window)
    lines["window alone"] = quality(model, judged)
    return {"verdict": verdict(lines), "window": window, "lines": as_data(lines)}
