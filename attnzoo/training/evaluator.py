"""Evaluation of swapped models against softmax, the raw swap and windows, on held-out text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from attnzoo.errors import ConfigError, SpecError, UntrainedWarning
from attnzoo.evaluation.data import EvalBatch, StringTokenizer
from attnzoo.evaluation.embeddings import Texts, embeddings, similarity
from attnzoo.evaluation.equal_memory import EqualWindow
from attnzoo.evaluation.harness import Harness, HarnessTasks
from attnzoo.evaluation.kernel_checks import check_model_kernels
from attnzoo.evaluation.models import max_positions, require_causal
from attnzoo.evaluation.quality import NonFiniteError
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.saving.files import read_config
from attnzoo.hf.swap.convert import original_attention, restore, swap
from attnzoo.spec import AttentionSpec
from attnzoo.training import encoder
from attnzoo.training.data import RowOptions, load_rows
from attnzoo.training.eval_rows import rows_to_eval_batch
from attnzoo.training.lengths import (
    equal_sentence,
    find_equal_window,
    is_hidden,
    long_results,
    make_long_batches,
)
from attnzoo.training.quality import (
    as_dicts,
    branch_qualities,
    evaluate_rows,
    softmax_quality,
    widest_window,
    with_original_continuations,
)
from attnzoo.training.verdict import verdict

ROWS = 32  # held-out rows
Log = Callable[[str], None]


class Evaluator:
    """Evaluates models with the same weights on held-out text, at all lengths.

    Args:
        path: Folder of the original or of the saved, swapped model.
        held_out: Held-out rows.
        load_held_out: Returns held-out rows of another length.
        rows: Number of rows that are evaluated; :data:`ROWS` when ``None``.
        target_length: Tokens for which the swap is meant; rows of that length are evaluated too.
        generates: Whether greedy generation is measured.
        log: Called with progress messages.

    Attributes:
        lines: Results by name, on rows of the length of ``held_out``.
        long_lines: Results by length and name, on longer rows.
        equal: The window of equal memory; ``None`` if it is not known.
        window: Window of ``window alone``.
    """

    equal: EqualWindow | None = None
    window = 0

    def __init__(
        self,
        path: Path,
        held_out: Any,
        load_held_out: Callable[[int], Any],
        *,
        rows: int | None = None,
        target_length: int | None = None,
        generates: bool = True,
        log: Log = lambda text: None,
    ) -> None:
        self.path, self.log, self.row_length = path, log, held_out.length
        self.target_length = target_length
        self.lines: dict[str, Any] = {}
        encode = StringTokenizer(path) if generates else None
        self.batch = rows_to_eval_batch(held_out, rows or ROWS, encode)
        self.long_batches: Mapping[int, EvalBatch] = MappingProxyType({})
        if held_out.labels is None:
            self.long_batches = make_long_batches(
                path,
                load_held_out,
                row_length=self.row_length,
                target_length=target_length,
                count=rows or ROWS,
                log=log,
            )
            if self.batch.repeated is None:
                log("recall is not measured: the documents are too short")
        else:
            log("the loss is that of completions; recall is not measured")
        self.long_lines: dict[int, dict[str, Any]] = {length: {} for length in self.long_batches}

    def set_windows(self, model: Any, spec: AttentionSpec, window: int | None = None) -> None:
        """Set the windows that a swap is compared with.

        Args:
            model: The swapped model.
            spec: Its swap.
            window: Window of ``window alone``; the swap's widest when ``None``.
        """
        self.window = window or widest_window(model)
        length = self.target_length or self.row_length
        self.equal = find_equal_window(self.path, spec, length, self.log)

    def add_original(self, model: Any, teacher: Any = None) -> None:
        """Set what the original model generates, of a swapped model before training."""
        self.batch = with_original_continuations(model, self.batch, teacher)
        self.batch = self.batch.to(torch.device("cpu"))

    def evaluate(
        self,
        name: str,
        model: Any,
        measure: Callable[..., Any] = evaluate_rows,
        equal: EqualWindow | None = None,
        **options: Any,
    ) -> None:
        """Evaluate a model at all lengths, except where ``equal`` sees every key.

        Raises:
            NonFiniteError: The model's outputs are not finite.
        """
        self.log(f"evaluation: {name}")
        with warnings.catch_warnings():  # a raw swap is untrained by definition
            warnings.simplefilter("ignore", UntrainedWarning)
            try:
                if not is_hidden(equal, self.row_length):
                    self.lines[name] = measure(model, self.batch, **options)
                for length, batch in self.long_batches.items():
                    if not is_hidden(equal, length) and name != "raw swap":
                        self.long_lines[length][name] = measure(model, batch, **options)
            except NonFiniteError as error:
                raise NonFiniteError(f"The model {name!r} cannot be measured: {error}") from error

    def evaluate_windows(self, model: Any) -> None:
        """Evaluate windows in a model that is not swapped; restore it."""
        if self.equal is not None and self.equal.saves_memory:
            swap(model, self.equal.spec)
            self.evaluate("equal window", model, equal=self.equal)
            restore(model)
        swap(model, "flash", window=self.window)
        self.evaluate("window alone", model)
        restore(model)

    def evaluate_result(self, model: Any) -> None:
        """Evaluate the result, and each branch of its hybrids."""
        self.evaluate("result", model)
        branches = branch_qualities(model, lambda model: evaluate_rows(model, self.batch), self.log)
        self.lines |= branches

    def results(self) -> dict[str, Any]:
        """Return the verdict and the evaluations as plain data."""
        sentence = equal_sentence(self.lines, self.equal, self.row_length)
        return {
            "verdict": " ".join(filter(None, [verdict(self.lines), sentence])),
            "window": self.window,
            "equal_window": None if self.equal is None else self.equal.to_dict(),
            "lines": as_dicts(self.lines),
            "longer": long_results(self.long_lines, self.equal),
        }


class EncoderEvaluator:
    """Evaluates encoders by the cosine of their embeddings to those of the original model.

    Args:
        held_out: Held-out texts.
        rows: Number of texts that are evaluated; :data:`ROWS` when ``None``.
        log: Called with progress messages.
    """

    def __init__(
        self, held_out: Texts, *, rows: int | None = None, log: Log = lambda text: None
    ) -> None:
        n = rows or ROWS
        self.texts = Texts(tokens=held_out.tokens[:n], attention_mask=held_out.attention_mask[:n])
        self.log, self.window = log, 0
        self.lines: dict[str, Any] = {}

    def set_windows(self, model: Any, spec: AttentionSpec, window: int | None = None) -> None:
        """Set the window that a swap is compared with; an encoder keeps no cache."""
        self.window = window or widest_window(model)

    def add_original(self, model: Any, teacher: Any = None) -> None:
        """Set the embeddings of the original model, of a swapped model before training."""
        with original_attention(model):
            self.originals = embeddings(model, self.texts)

    def evaluate(self, name: str, model: Any, **options: Any) -> None:
        """Evaluate a model."""
        self.log(f"evaluation: {name}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntrainedWarning)
            self.lines[name] = similarity(embeddings(model, self.texts), self.originals)

    def evaluate_windows(self, model: Any) -> None:
        """Evaluate a window in a model that is not swapped; restore it."""
        swap(model, "flash", window=self.window)
        self.evaluate("window alone", model)
        restore(model)

    def evaluate_result(self, model: Any) -> None:
        """Evaluate the result, and each branch of its hybrids."""
        self.evaluate("result", model)
        self.lines |= branch_qualities(
            model, lambda model: similarity(embeddings(model, self.texts), self.originals), self.log
        )

    def results(self) -> dict[str, Any]:
        """Return the verdict and the evaluations as plain data."""
        return {
            "verdict": encoder.verdict(self.lines),
            "window": self.window,
            "equal_window": None,
            "lines": encoder.as_dicts(self.lines),
            "longer": {},
        }


def evaluate(
    path: str | Path,
    data: Sequence[str | Path],
    *,
    column: str = "text",
    row_length: int = 512,
    rows: int = 32,
    max_tokens: int | None = None,
    control: int | None = None,
    target_length: int | None = None,
    tasks: HarnessTasks | None = None,
    original: str | Path | None = None,
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
    path, data = _check_arguments(path, data, tasks, original)
    judge = None
    if data:
        options = RowOptions(
            dataset_text_field=column, max_tokens=max_tokens, max_length=row_length
        )
        _, held_out = load_rows(path, data, options)
        judge = Evaluator(
            path,
            held_out,
            lambda length: load_rows(path, data, replace(options, max_length=length))[1],
            rows=rows,
            target_length=target_length,
            log=log,
        )
        log(f"{len(judge.batch.rows)} held-out rows")
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
    results: dict[str, Any] = {"window": window}
    if judge is not None:
        judge.set_windows(model, AttentionSpec.from_dict(getattr(model.config, NAME)), window)
        judge.add_original(model)
        judge.evaluate("softmax", model, softmax_quality)
        judge.evaluate_result(model)
    restore(model)  # swapping would warn that trained extras are lost
    if judge is not None:
        judge.evaluate_windows(model)
        results |= judge.results()
    swap(model, "flash", window=window)
    run_tasks("window alone", model)
    return results | ({"tasks": scores} if scores else {})


def _check_arguments(
    path: str | Path,
    data: Sequence[str | Path],
    tasks: HarnessTasks | None,
    original: str | Path | None,
) -> tuple[Path, list[Path]]:
    """Return the paths of :func:`evaluate` as such.

    Raises:
        AttnzooError: An argument is invalid.
    """
    path, files = Path(path), [Path(x) for x in data]
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
        require_causal(Path(original), "tasks compare it with the swap")
    return path, files


def _load(path: str | Path) -> Any:
    """Return a saved model in float32, on the accelerator if there is one."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model: Any = load_pretrained(AutoModelForCausalLM, path, dtype=torch.float32)
    return model.to(device)


def _check_kernels(model: Any, path: Path, row_length: int, log: Log) -> None:
    """Check the GPU kernels that a model needs and that have no verdict yet."""
    length = min(row_length, max_positions(path) or row_length)
    inputs = {"input_ids": torch.ones(1, length, dtype=torch.int64)}
    check_model_kernels(model, inputs, log, generate=True)
