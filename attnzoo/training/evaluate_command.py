"""Evaluation of a saved, swapped model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.data import EvalBatch, string_tokenizer
from attnzoo.evaluation.equal_memory import EqualWindow
from attnzoo.evaluation.harness import Harness, HarnessTasks
from attnzoo.evaluation.kernel_checks import check_model_kernels
from attnzoo.evaluation.models import max_positions, require_causal
from attnzoo.hf.names import NAME
from attnzoo.hf.saving.files import read_config
from attnzoo.hf.swap.convert import original_attention, restore, swap
from attnzoo.spec import AttentionSpec
from attnzoo.training.eval_rows import rows_to_eval_batch
from attnzoo.training.lengths import (
    equal_sentence,
    find_equal_window,
    is_hidden,
    long_results,
    make_long_batches,
)
from attnzoo.training.loading import load_rows
from attnzoo.training.quality import (
    as_dicts,
    branch_qualities,
    quality,
    softmax_quality,
    widest_window,
    with_original_continuations,
)
from attnzoo.training.runs import Log
from attnzoo.training.train_config import TrainConfig
from attnzoo.training.verdict import verdict


def evaluate(
    path: Path,
    data: list[Path],
    *,
    column: str = "text",
    row_length: int = 512,
    rows: int = 32,
    control: int | None = None,
    target_length: int | None = None,
    tasks: HarnessTasks | None = None,
    original: Path | None = None,
    log: Log = lambda text: None,
) -> dict[str, Any]:
    """Compare a saved, swapped model with softmax, its window alone and the window of equal memory.

    All models have the saved weights: ``result`` is the swap, ``softmax`` has softmax attention,
    ``window alone`` has a window, and ``equal window`` the windows that need as much memory as the
    swap (:mod:`attnzoo.evaluation.equal_memory`). ``softmax`` is therefore not the original model
    if the saved one was trained after the swap; give that one as ``original``.

    Args:
        path: Folder of a saved causal model that is swapped.
        data: Text files, JSON lines, parquet, or folders of them, to measure loss, recall and
            generation. The held-out documents are those that
            :func:`attnzoo.training.recover.recover` holds out.
        column: Field of JSON and parquet files that holds the text.
        row_length: Tokens per row.
        rows: Number of rows.
        control: Window of ``window alone`` in tokens; by default the swap's widest window.
        target_length: Tokens for which the swap is meant: rows of that length, and of twice as
            many tokens, are evaluated too, and the window of equal memory is that of this length;
            ``row_length`` when ``None``.
        tasks: Tasks of lm-evaluation-harness to run on each model.
        original: Folder of the model before the swap; it is one more line of ``tasks``.
        log: Called with progress messages.

    Returns:
        ``window``; with data, ``verdict``, ``lines``, ``longer`` and ``equal_window`` as in
        ``recovery.json``; with tasks, ``tasks``: for each model the metrics of every task, by
        lm_eval's names.

    Raises:
        AttnzooError: An argument is invalid.
    """
    if getattr(read_config(path), NAME, None) is None:
        raise SpecError(
            f"{str(path)!r} is not swapped, so there is nothing to compare; `attnzoo recover` and "
            "`attnzoo swap` write swapped models"
        )
    if not data and tasks is None:
        raise ConfigError("evaluate needs text (--data), tasks (--tasks), or both")
    if original is not None and tasks is None:
        raise ConfigError("original is a line of tasks; give --tasks, or leave it out")
    require_causal(path, "evaluation measures text prediction")
    config = TrainConfig(
        row_length=row_length,
        judged_rows=rows,
        repeat_share=0.0,
        control=control,
        target_length=target_length,
    )
    batch: EvalBatch | None = None
    long_batches: dict[int, EvalBatch] = {}
    if data:
        _, held_out = load_rows(path, data, column, config)
        batch = rows_to_eval_batch(held_out, rows, string_tokenizer(path))
        log(f"{len(batch.tokens)} held-out rows")
        long_batches = make_long_batches(
            path,
            lambda length: load_rows(path, data, column, replace(config, row_length=length))[1],
            row_length=row_length,
            target_length=target_length,
            count=rows,
            log=log,
        )
    harness = None if tasks is None else Harness(tasks, path)
    scores: dict[str, Any] = {}

    def run_tasks(name: str, model: Any) -> None:
        if harness is not None:
            log(f"tasks on {name}")
            scores[name] = harness.run(model.eval())

    if original is not None:
        require_causal(original, "tasks compare it with the swap")
        run_tasks("original", _load(original))
    model = _load(path)
    _check_kernels(model, path, row_length, log)
    spec = AttentionSpec.from_dict(getattr(model.config, NAME))
    with original_attention(model):
        run_tasks("softmax", model)
    run_tasks("result", model)
    lines: dict[str, Any] = {}
    long_lines: dict[int, dict[str, Any]] = {length: {} for length in long_batches}

    def judge(name: str, evaluate: Callable[[Any, EvalBatch], Any] = quality) -> None:
        assert batch is not None
        if name != "equal window" or not is_hidden(equal, row_length):
            lines[name] = evaluate(model, batch)
        for length, long in long_batches.items():
            if name != "equal window" or not is_hidden(equal, length):
                long_lines[length][name] = evaluate(model, long)

    equal: EqualWindow | None = None
    if batch is not None:
        equal = find_equal_window(path, spec, target_length or row_length, log)
        batch = with_original_continuations(model, batch)
        judge("softmax", softmax_quality)
        judge("result")
        lines |= branch_qualities(model, _quality_of(batch))
    window = control or widest_window(model)
    restore(model)  # swapping would warn that trained extras are lost
    if equal is not None and equal.saves_memory:
        swap(model, equal.spec)
        judge("equal window")
        restore(model)
    swap(model, "flash", window=window)
    run_tasks("window alone", model)
    results: dict[str, Any] = {"window": window}
    if batch is not None:
        judge("window alone")
        sentence = equal_sentence(lines, equal, row_length)
        results |= {
            "verdict": " ".join(filter(None, [verdict(lines), sentence])),
            "equal_window": None if equal is None else equal.to_dict(),
            "lines": as_dicts(lines),
            "longer": long_results(long_lines, equal),
        }
    return results | ({"tasks": scores} if scores else {})


def _load(path: Path) -> Any:
    """Return a saved model in float32, on the accelerator if there is one."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.to(device)


def _check_kernels(model: Any, path: Path, row_length: int, log: Log) -> None:
    """Check the GPU kernels that a model needs and that have no verdict yet."""
    length = min(row_length, max_positions(path) or row_length)
    inputs = {"input_ids": torch.ones(1, length, dtype=torch.int64)}
    check_model_kernels(model, inputs, log, generate=True)


def _quality_of(batch: EvalBatch) -> Callable[[Any], Any]:
    return lambda model: quality(model, batch)
