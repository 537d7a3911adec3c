"""Evaluation of a saved, swapped model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.data import EvalBatch, StringTokenizer
from attnzoo.evaluation.equal_memory import EqualWindow
from attnzoo.evaluation.harness import Harness, HarnessTasks
from attnzoo.evaluation.kernel_checks import check_model_kernels
from attnzoo.evaluation.models import max_positions, require_causal
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import load_pretrained
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
    evaluate_rows,
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
    max_tokens: int | None = None,
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
        max_tokens: Number of tokens of the data that are read, as a stream; all when ``None``. The
            held-out documents are those of a run with the same number.
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
    _check_arguments(path, data, tasks, original)
    config = TrainConfig(
        row_length=row_length,
        judged_rows=rows,
        repeat_share=0.0,
        max_tokens=max_tokens,
        control=control,
        target_length=target_length,
    )
    judge = Judge(path, data, column, config, log) if data else None
    harness = None if tasks is None else Harness(tasks, path)
    scores: dict[str, Any] = {}

    def run_tasks(name: str, model: Any) -> None:
        if harness is not None:
            log(f"tasks on {name}")
            scores[name] = harness.run(model.eval())

    if original is not None:
        run_tasks("original", _load(original))
    model = _load(path)
    _check_kernels(model, path, row_length, log)
    with original_attention(model):
        run_tasks("softmax", model)
    run_tasks("result", model)
    window = control or widest_window(model)
    if judge is not None:
        judge.evaluate_swapped(model)
    restore(model)  # swapping would warn that trained extras are lost
    if judge is not None:
        judge.evaluate_equal_window(model)
    swap(model, "flash", window=window)
    run_tasks("window alone", model)
    results: dict[str, Any] = {"window": window}
    if judge is not None:
        judge.evaluate("window alone", model)
        results |= judge.results()
    return results | ({"tasks": scores} if scores else {})


def _check_arguments(
    path: Path, data: list[Path], tasks: HarnessTasks | None, original: Path | None
) -> None:
    """Raise an error for a model or arguments that :func:`evaluate` does not take.

    Raises:
        AttnzooError: An argument is invalid.
    """
    if read_field(read_config(path), NAME) is None:
        raise SpecError(
            f"{str(path)!r} is not swapped, so there is nothing to compare; `attnzoo recover` and "
            "`attnzoo swap` write swapped models"
        )
    if not data and tasks is None:
        raise ConfigError("evaluate needs text (--data), tasks (--tasks), or both")
    if original is not None and tasks is None:
        raise ConfigError("original is a line of tasks; give --tasks, or leave it out")
    require_causal(path, "evaluation measures text prediction")
    if original is not None:
        require_causal(original, "tasks compare it with the swap")


class Judge:
    """Evaluates models with the same weights on held-out text, at all lengths.

    Args:
        path: Folder of the saved, swapped model.
        data: Text files, or folders of them.
        column: Field of JSON and parquet files that holds the text.
        config: Lengths and number of the rows.
        log: Called with progress messages.

    Attributes:
        lines: Results by name, on rows of ``row_length`` tokens.
        long_lines: Results by length and name, on longer rows.
    """

    def __init__(
        self, path: Path, data: list[Path], column: str, config: TrainConfig, log: Log
    ) -> None:
        self.config, self.log = config, log
        self.lines: dict[str, Any] = {}
        _, held_out = load_rows(path, data, column, config)
        self.batch = rows_to_eval_batch(held_out, config.judged_rows, StringTokenizer(path))
        log(f"{len(self.batch.rows)} held-out rows")
        self.long_batches = make_long_batches(
            path,
            lambda length: load_rows(path, data, column, replace(config, row_length=length))[1],
            row_length=config.row_length,
            target_length=config.target_length,
            count=config.judged_rows,
            log=log,
        )
        self.long_lines: dict[int, dict[str, Any]] = {length: {} for length in self.long_batches}
        spec = AttentionSpec.from_dict(getattr(read_config(path), NAME))
        length = config.target_length or config.row_length
        self.equal = find_equal_window(path, spec, length, log)

    def evaluate(
        self,
        name: str,
        model: Any,
        measure: Callable[[Any, EvalBatch], Any] = evaluate_rows,
        equal: EqualWindow | None = None,
    ) -> None:
        """Evaluate a model at all lengths, except where ``equal`` sees every key."""
        if not is_hidden(equal, self.config.row_length):
            self.log(f"evaluation: {name}")
            self.lines[name] = measure(model, self.batch)
        for length, batch in self.long_batches.items():
            if not is_hidden(equal, length):
                self.log(f"evaluation: {name}, rows of {length:,} tokens")
                self.long_lines[length][name] = measure(model, batch)

    def evaluate_swapped(self, model: Any) -> None:
        """Evaluate a swapped model with softmax, as it is, and each branch of its hybrids."""
        self.batch = with_original_continuations(model, self.batch)
        self.evaluate("softmax", model, softmax_quality)
        self.evaluate("result", model)
        self.lines |= branch_qualities(
            model, lambda model: evaluate_rows(model, self.batch), self.log
        )

    def evaluate_equal_window(self, model: Any) -> None:
        """Evaluate the windows of equal memory in a model that is not swapped; restore it."""
        if self.equal is not None and self.equal.saves_memory:
            swap(model, self.equal.spec)
            self.evaluate("equal window", model, equal=self.equal)
            restore(model)

    def results(self) -> dict[str, Any]:
        """Return the verdict and the evaluations as plain data."""
        sentence = equal_sentence(self.lines, self.equal, self.config.row_length)
        return {
            "verdict": " ".join(filter(None, [verdict(self.lines), sentence])),
            "equal_window": None if self.equal is None else self.equal.to_dict(),
            "lines": as_dicts(self.lines),
            "longer": long_results(self.long_lines, self.equal),
        }


def _load(path: Path) -> Any:
    """Return a saved model in float32, on the accelerator if there is one."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model: Any = load_pretrained(AutoModelForCausalLM, path, dtype=torch.float32)
    return model.to(device)


def _check_kernels(model: Any, path: Path, row_length: int, log: Log) -> None:
    """Check the GPU kernels that a model needs and that have no verdict yet."""
    length = min(row_length, max_positions(path) or row_length)
    inputs = {"input_ids": torch.ones(1, length, dtype=torch.int64)}
    check_model_kernels(model, inputs, log, generate=True)
