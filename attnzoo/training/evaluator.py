"""Evaluation of swapped models against softmax, the raw swap and windows, on held-out text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from attnzoo.errors import AttnzooError, SpecError, UntrainedWarning
from attnzoo.evaluation.embeddings import Texts, embeddings, similarity
from attnzoo.evaluation.equal_memory import EqualWindow, equal_window
from attnzoo.evaluation.generation import make_generation_batch, with_reference
from attnzoo.evaluation.margins import mean_of
from attnzoo.evaluation.models import embedded_name, max_positions, require_causal
from attnzoo.evaluation.quality import (
    EvalBatch,
    Quality,
    evaluate_rows,
    rows_with_repeats,
)
from attnzoo.evaluation.rows import NonFiniteError, Rows
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.saving.files import read_config
from attnzoo.hf.swap import original_attention, restore, swap
from attnzoo.spec import AttentionSpec
from attnzoo.training.data import DataError, RowOptions, load_rows
from attnzoo.training.transfer import swapped_layers
from attnzoo.training.verdict import encoder_verdict, equal_sentence, verdict

ROWS = 32  # held-out rows
LEAST_ROWS = 4  # of a longer length; fewer say nothing
CONTROL = 32  # window of the baseline, in tokens, if the swap has none
Log = Callable[[str], None]


# -- held-out rows -------------------------------------------------------------------------------


def rows_to_eval_batch(rows: Rows, count: int, *, generates: bool = False) -> EvalBatch:
    """Return held-out rows, plain and with a repeated segment.

    Args:
        rows: Held-out rows.
        count: Number of rows.
        generates: Whether generation is measured, after the beginnings of documents.
    """
    held_out = select_rows(rows, count)
    repeated, repeats = rows_with_repeats(held_out, torch.Generator().manual_seed(0))
    generation = make_generation_batch(held_out.documents(), rows.length) if generates else None
    return EvalBatch(rows=held_out, repeated=repeated, repeats=repeats, generation=generation)


def select_rows(rows: Rows, count: int) -> Rows:
    """Return ``count`` rows that do not overlap.

    They begin with documents as far as there are documents, spread evenly over the text, because a
    model's own training sequences began there: on rows from the middle of documents a model may
    predict worse than its own student, which has seen such rows in distillation. The other rows are
    spread over the text.

    Args:
        rows: Packed rows of documents.
        count: N; fewer rows if the text has no more.
    """
    length, total = rows.length, rows.tokens.numel()
    starts = [] if rows.starts is None else rows.starts.tolist()
    found: list[int] = []
    for start in starts:
        if start + length <= total and (not found or start >= found[-1] + length):
            found.append(start)
    chosen = _spread(found, count)
    others = [x for x in range(0, total, length) if all(abs(x - y) >= length for y in chosen)]
    chosen = sorted(chosen + _spread(others, count - len(chosen)))
    begins = torch.zeros(total, dtype=torch.bool)
    begins[torch.tensor([x for x in starts if x < total], dtype=torch.long)] = True
    place = torch.arange(length)
    index = torch.tensor(chosen)[:, None] + place
    restarts = torch.where(begins[index], place, 0).cummax(1).values
    return Rows(
        tokens=rows.tokens.flatten()[index].long(),
        positions=place - restarts,
        bytes_per_token=rows.bytes_per_token,
    )


def _spread(values: list[int], count: int) -> list[int]:
    """Return at most ``count`` of the values, evenly spaced."""
    count = min(count, len(values))
    return [values[i * len(values) // count] for i in range(count)]


# -- evaluators ----------------------------------------------------------------------------------


class Evaluator:
    """Evaluates models with the same weights on held-out text, at all lengths.

    Args:
        path: Folder of the original or of the saved, swapped model.
        held_out: Held-out rows.
        load_held_out: Returns held-out rows of another length.
        rows: Number of rows that are evaluated; :data:`ROWS` when ``None``.
        target_length: Tokens for which the swap is meant; rows of that length and of twice as many
            tokens are evaluated too, without generation.
        log: Called with progress messages.

    Attributes:
        row_length: Tokens of the rows ``held_out``, which are the shortest.
        batches: What models are evaluated on, by length.
        lines_of: Results by length and name.
        equal: The window of equal memory; ``None`` if it is not known.
        window: Window of ``window alone``.
    """

    equal: EqualWindow | None = None
    window = 0

    def __init__(
        self,
        path: Path,
        held_out: Rows,
        load_held_out: Callable[[int], Rows],
        *,
        rows: int | None = None,
        target_length: int | None = None,
        log: Log = lambda text: None,
    ) -> None:
        self.path, self.log, self.target_length = path, log, target_length
        self.row_length = held_out.length
        batch = rows_to_eval_batch(held_out, rows or ROWS, generates=True)
        self.batches: dict[int, Any] = {self.row_length: batch}
        self._add_long_batches(load_held_out, rows or ROWS)
        if self.batch.repeated is None:
            log("recall is not measured: the documents are too short")
        self.lines_of: dict[int, dict[str, Any]] = {length: {} for length in self.batches}

    def _add_long_batches(self, load: Callable[[int], Rows], count: int) -> None:
        """Add rows of the target length and of twice as many tokens, as far as there are any."""
        limit, target = max_positions(self.path), self.target_length or 0
        for length in (target, 2 * target):
            if length <= self.row_length:
                continue
            try:
                if limit is not None and length > limit:
                    raise DataError(f"the model has {limit} positions")
                batch = rows_to_eval_batch(load(length), count)
                if len(batch.rows) < LEAST_ROWS:
                    raise DataError(
                        f"it has {len(batch.rows)} rows of that length, and {LEAST_ROWS} are the "
                        "least; give more text"
                    )
                self.batches[length] = batch
            except DataError as error:
                self.log(f"{length} tokens of held-out text are not evaluated: {error}")

    @property
    def batch(self) -> Any:
        """What models are evaluated on at the first length."""
        return self.batches[self.row_length]

    @property
    def lines(self) -> dict[str, Any]:
        """Results at the first length, by name."""
        return self.lines_of[self.row_length]

    def set_windows(self, model: Any, spec: AttentionSpec, window: int | None = None) -> None:
        """Set the windows that a swap is compared with.

        Args:
            model: The swapped model.
            spec: Its swap.
            window: Window of ``window alone``; the swap's widest when ``None``.
        """
        self.window = widest_window(model) if window is None else window
        try:
            self.equal = equal_window(self.path, spec, self.target_length or self.row_length)
        except AttnzooError as error:
            self.log(f"the window of equal memory is not computed: {error}")

    def add_original(self, model: Any, teacher: Any = None) -> None:
        """Set what the original model generates, of a swapped model before training."""
        if (generation := self.batch.generation) is None:
            return
        original = model if teacher is None else teacher
        original.to(next(model.parameters()).device)
        training = original.training
        with original_attention(model) if teacher is None else nullcontext():
            original.eval()
            generation = with_reference(generation, original)
        original.train(training)
        self.batches[self.row_length] = replace(self.batch, generation=generation)

    def measure(self, model: Any, batch: Any) -> Any:
        """Return the quality of a model at one length."""
        return evaluate_rows(model, batch)

    def evaluate(self, name: str, model: Any) -> None:
        """Evaluate a model at all lengths, except where a window of equal memory sees every key.

        Raises:
            NonFiniteError: The model's outputs are not finite.
        """
        self.log(f"evaluation: {name}")
        seen = self.equal.widest if self.equal is not None and name == "equal window" else 0
        with warnings.catch_warnings():  # a raw swap is untrained by definition
            warnings.simplefilter("ignore", UntrainedWarning)
            for length, batch in self.batches.items():
                if seen < length and (name != "raw swap" or length == self.row_length):
                    try:
                        self.lines_of[length][name] = found = self.measure(model, batch)
                        for note in getattr(found, "notes", ()):
                            self.log(f"{name}: {note}")
                    except NonFiniteError as error:
                        message = f"The model {name!r} cannot be measured: {error}"
                        raise NonFiniteError(message) from error

    def evaluate_windows(self, model: Any) -> None:
        """Evaluate windows in a model that is not swapped; restore it."""
        if self.equal is not None and self.equal.widest:
            swap(model, self.equal.spec)
            self.evaluate("equal window", model)
            restore(model)
        swap(model, "flash", window=self.window)
        self.evaluate("window alone", model)
        restore(model)

    def results(self) -> dict[str, Any]:
        """Return the verdict and the evaluations as plain data."""
        sentences = [equal_sentence(x, self.equal, length) for length, x in self.lines_of.items()]
        lines = {length: as_dicts(x) for length, x in self.lines_of.items()}
        return {
            "verdict": " ".join(filter(None, [verdict(self.lines), *dict.fromkeys(sentences)])),
            "window": self.window,
            "equal_window": None if self.equal is None else self.equal.to_dict(),
            "lines": lines.pop(self.row_length),
            "longer": {str(length): x for length, x in lines.items()},
        }


class EncoderEvaluator(Evaluator):
    """Evaluates encoders by the cosine of their embeddings to those of the original model.

    Args:
        held_out: Held-out texts.
        log: Called with progress messages.
    """

    def __init__(self, held_out: Texts, *, log: Log = lambda text: None) -> None:
        tokens, mask = held_out.tokens[:ROWS], held_out.attention_mask[:ROWS]
        self.log, self.row_length = log, tokens.shape[1]
        self.batches = {self.row_length: Texts(tokens=tokens, attention_mask=mask)}
        self.lines_of = {self.row_length: {}}

    def set_windows(self, model: Any, spec: AttentionSpec, window: int | None = None) -> None:
        """Set the window that a swap is compared with; an encoder keeps no cache."""
        self.window = widest_window(model) if window is None else window

    def add_original(self, model: Any, teacher: Any = None) -> None:
        """Set the embeddings of the original model, of a swapped model before training."""
        with original_attention(model):
            self.originals: Tensor = embeddings(model, self.batch)

    def measure(self, model: Any, batch: Any) -> Any:
        """Return the similarity of a model's embeddings to those of the original model."""
        return similarity(embeddings(model, batch), self.originals)

    def results(self) -> dict[str, Any]:
        """Return the verdict and the evaluations as plain data."""
        return {
            "verdict": encoder_verdict(self.lines),
            "window": self.window,
            "lines": self.lines,
        }


def widest_window(model: nn.Module) -> int:
    """Return the widest window of the swapped layers in tokens; 32 if no layer has one."""
    backends = swapped_layers(model).values()
    windows = [getattr(backend.config, "window", None) for backend in backends]
    return max((w for w in windows if isinstance(w, int)), default=CONTROL)


def as_dicts(lines: Mapping[str, Quality]) -> dict[str, Any]:
    """Return evaluation results as plain data, with the fractions of the gap they close.

    ``loss_share_error`` and ``recall_share_error`` are the standard errors of the fractions,
    ``agreement_error`` that of the fraction of equal tokens.
    """
    softmax, window = lines["softmax"], lines["window alone"]
    data = {}
    for name, line in lines.items():
        found: dict[str, Any] = asdict(line)
        errors = {"agreement": mean_of(line.agreement_rows).error}
        for metric in ("loss", "recall"):
            share = line.closed(metric, softmax, window)
            found[f"{metric}_share"] = share and share.mean
            errors[f"{metric}_share"] = math.inf if share is None else share.error
        known = {f"{key}_error": x if math.isfinite(x) else None for key, x in errors.items()}
        data[name] = found | known
    return data


# -- the command ---------------------------------------------------------------------------------


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
    log: Log = lambda text: None,
) -> dict[str, Any]:
    """Compare a saved, swapped model with softmax, its window alone and the window of equal memory.

    All models have the saved weights: ``result`` is the swap, ``softmax`` has softmax attention,
    ``window alone`` has a window, and ``equal window`` the windows that need as much memory as the
    swap (:mod:`attnzoo.evaluation.equal_memory`). ``softmax`` is therefore not the original model
    if the saved one was trained after the swap.

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
        log: Called with progress messages.

    Returns:
        ``window``, ``verdict``, ``lines``, ``longer`` and ``equal_window`` as in
        ``recovery.json``.

    Raises:
        AttnzooError: An argument is invalid.
    """
    path, data = Path(path), [Path(x) for x in data]
    if read_field(read_config(path), NAME) is None:
        raise SpecError(
            f"{embedded_name(path) or str(path)!r} is not swapped, so there is nothing to compare; "
            "`attnzoo recover` and `attnzoo swap` write swapped models"
        )
    require_causal(path, "evaluation measures text prediction")
    sizes: Any = {"max_tokens": max_tokens, "max_length": row_length}
    options = RowOptions(dataset_text_field=column, **sizes)

    def load(length: int) -> Rows:
        return load_rows(path, data, options, length)[1]

    held_out = load(row_length)
    judge = Evaluator(path, held_out, load, rows=rows, target_length=target_length, log=log)
    log(f"{len(judge.batch.rows)} held-out rows")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model: Any = load_pretrained(AutoModelForCausalLM, path, dtype=torch.float32)
    model.to(device)
    judge.set_windows(model, AttentionSpec.from_dict(getattr(model.config, NAME)), control)
    judge.add_original(model)
    with original_attention(model):
        judge.evaluate("softmax", model)
    judge.evaluate("result", model)
    restore(model)  # swapping would warn that trained extras are lost
    judge.evaluate_windows(model)
    return judge.results()
