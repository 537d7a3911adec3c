"""Evaluation of a saved, swapped model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from attnzoo.errors import SpecError
from attnzoo.evaluation.data import string_tokenizer
from attnzoo.evaluation.models import require_causal
from attnzoo.integrations.attention import NAME
from attnzoo.integrations.convert import restore, swap
from attnzoo.integrations.files import read_config
from attnzoo.training.loading import load_rows
from attnzoo.training.quality import (
    as_dicts,
    branch_qualities,
    quality,
    rows_to_eval_batch,
    softmax_quality,
    verdict,
    widest_window,
    with_original_continuations,
)
from attnzoo.training.runs import Log
from attnzoo.training.train_config import TrainConfig


def evaluate(
    path: Path,
    data: list[Path],
    *,
    column: str = "text",
    row_length: int = 512,
    rows: int = 32,
    control: int | None = None,
    log: Log = lambda text: None,
) -> dict[str, Any]:
    """Compare a saved, swapped model with softmax and with its window alone on held-out text.

    All models have the saved weights. ``softmax`` is therefore not the original model if the saved
    one was trained after the swap.

    Args:
        path: Folder of a saved causal model that is swapped.
        data: Text files, JSON lines, parquet, or folders of them. The held-out documents are those
            that :func:`attnzoo.training.recover.recover` holds out.
        column: Field of JSON and parquet files that holds the text.
        row_length: Tokens per row.
        rows: Number of rows.
        control: Window of ``window alone`` in tokens; by default the swap's widest window.
        log: Called with progress messages.

    Returns:
        ``verdict``, ``window`` and ``lines``, as in ``recovery.json``.

    Raises:
        AttnzooError: An argument is invalid.
    """
    if getattr(read_config(path), NAME, None) is None:
        raise SpecError(
            f"{str(path)!r} is not swapped, so there is nothing to compare; `attnzoo recover` and "
            "`attnzoo swap` write swapped models"
        )
    require_causal(path, "evaluation measures text prediction")
    config = TrainConfig(row_length=row_length, judged_rows=rows, repeat_share=0.0, control=control)
    _, held_out = load_rows(path, data, column, config)
    batch = rows_to_eval_batch(held_out, rows, string_tokenizer(path))
    log(f"{len(batch.tokens)} held-out rows")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = with_original_continuations(model, batch)
    lines = {"softmax": softmax_quality(model, batch), "result": quality(model, batch)}
    lines |= branch_qualities(model, lambda model: quality(model, batch))
    window = control or widest_window(model)
    restore(model)  # swapping would warn that trained extras are lost
    swap(model, "flash", window=window)
    lines["window alone"] = quality(model, batch)
    return {"verdict": verdict(lines), "window": window, "lines": as_dicts(lines)}
