"""Quality of a causal model: bits per byte on plain text and repeated segments, and generation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attnzoo.evaluation.corpus import (
    MIN_REPEAT_LENGTH,
    Repeat,
    add_repeats,
    string_tokenizer,
    tokenized_rows,
)
from attnzoo.evaluation.generation import (
    GenerationBatch,
    measure_generation,
    worse_than_uniform,
)
from attnzoo.evaluation.margins import Difference, closed_gap
from attnzoo.evaluation.rows import (
    IGNORE_INDEX,
    Rows,
    contributions,
    require_finite,
    token_losses,
    unigram_bits_per_byte,
)

LEAST_GAP = 0.01  # bits per byte between window and softmax of which fractions are stated
LEAST_REPEAT = 128  # tokens of a row that takes a repeat, for models with so few positions


@dataclass(frozen=True, kw_only=True)
class EvalBatch:
    """Rows of tokens to evaluate a causal model on.

    Attributes:
        rows: Plain text.
        repeated: Those of the rows that have a document of enough tokens, each with one segment
            of it copied to a later position of it; ``None`` if there is none.
        repeats: The positions of the two copies, one per row of ``repeated``.
        generation: Rows that models continue; ``None`` if generation is not measured.
    """

    rows: Rows
    repeated: Rows | None = None
    repeats: Sequence[Repeat] = ()
    generation: GenerationBatch | None = None


def rows_with_repeats(
    rows: Rows, generator: torch.Generator, *, least: int = MIN_REPEAT_LENGTH
) -> tuple[Rows | None, list[Repeat]]:
    """Return copies of the rows that take a repeat, each with one, and the repeats.

    Args:
        rows: Plain text.
        generator: Draws the positions.
        least: Tokens that a document needs for a repeat.
    """
    written = replace(rows, tokens=rows.tokens.clone())
    repeats = add_repeats(written, generator, least=least)
    kept = [i for i, repeat in enumerate(repeats) if repeat is not None]
    return written.select(kept) if kept else None, [x for x in repeats if x is not None]


def make_eval_batch(path: Path, text: Path | None, *, rows: int, row_length: int) -> EvalBatch:
    """Tokenize a text with a model's tokenizer and cut it into an evaluation batch.

    Args:
        path: Folder of the model.
        text: File; the standard library's held-out files when ``None``.
        rows: N.
        row_length: T.

    Raises:
        SpecError: The file cannot be read, or it is shorter than one row.
    """
    generator = torch.Generator().manual_seed(0)
    _, plain = tokenized_rows(string_tokenizer(path), text, rows, row_length, generator)
    least = min(MIN_REPEAT_LENGTH, max(LEAST_REPEAT, row_length))
    repeated, repeats = rows_with_repeats(plain, generator, least=least)
    return EvalBatch(rows=plain, repeated=repeated, repeats=repeats)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Quality of a model on held-out text.

    The attributes of generation are those of
    :func:`~attnzoo.evaluation.generation.measure_generation`; ``None`` if it is not measured.

    Attributes:
        loss: Cross-entropy on plain text, in bits per byte.
        recall: On the second copy of a repeated segment; ``None`` if documents are too short, or
            if it is worse than that of a uniform guess.
        unigram: Loss of a model that knows only how frequent each token of the rows is.
        loss_rows: The contribution of each row to ``loss``, which is their mean.
        recall_rows: The same of ``recall``.
        notes: Why numbers are left out.
    """

    loss: float
    recall: float | None
    agreement: float | None = None
    equal_tokens: float | None = None
    unigram: float = math.inf
    loss_rows: Sequence[float] = ()
    recall_rows: Sequence[float] = ()
    agreement_rows: Sequence[float] = ()
    notes: Sequence[str] = ()

    def closed(self, metric: str, softmax: Quality, window: Quality) -> Difference | None:
        """Return the fraction of the gap between window and softmax in loss or recall that closes.

        ``None`` if the gap is not clearly above 0.01 bits per byte, as
        :mod:`attnzoo.evaluation.margins` defines it.
        """
        rows = [getattr(x, f"{metric}_rows") for x in (self, softmax, window)]
        return closed_gap(*rows, least=LEAST_GAP)


def evaluate_rows(model: PreTrainedModel, batch: EvalBatch) -> Quality:
    """Return the quality of a model in evaluation mode; its mode is restored.

    Args:
        model: The model.
        batch: Rows to evaluate it on.

    Raises:
        NonFiniteError: The loss is NaN or infinite.
    """
    training = model.training
    model.eval()
    rows, size = batch.rows, batch.rows.bytes_per_token
    to_bits, notes = 1 / (math.log(2) * size), []
    losses = token_losses(model, rows)
    counted = rows.targets != IGNORE_INDEX
    plain = [x[own] for x, own in zip(losses, counted, strict=True)]
    predicted = rows.tokens[counted] if rows.is_packed else rows.tokens
    found: dict[str, Any] = {
        "loss": require_finite(float(torch.cat(plain).mean()), "loss on plain text") * to_bits,
        "recall": None,
        "unigram": unigram_bits_per_byte(predicted, size),
        "loss_rows": contributions(plain, to_bits),
    }
    if batch.repeated is not None:
        pairs = zip(token_losses(model, batch.repeated), batch.repeats, strict=True)
        recall = [x[repeat.second : repeat.second + repeat.length] for x, repeat in pairs]
        mean = require_finite(float(torch.cat(recall).mean()), "loss on repeated text") * to_bits
        if note := worse_than_uniform(model, "recall", mean, size):
            notes = [note]
        else:
            found |= {"recall": mean, "recall_rows": contributions(recall, to_bits)}
    if batch.generation is not None:
        found |= measure_generation(model, batch.generation)
    model.train(training)
    return Quality(**found, notes=notes)
