"""Quality of a causal model: bits per byte on plain text and repeated segments, and generation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnzoo.evaluation.corpus import MIN_REPEAT_LENGTH, Repeat, add_repeats
from attnzoo.evaluation.data import StringTokenizer, read_documents, text_rows
from attnzoo.evaluation.generation import (
    GenerationBatch,
    measure_generation,
    uniform_bits_per_byte,
    with_reference,
    worse_than_uniform,
)
from attnzoo.evaluation.margins import Difference, closed_gap
from attnzoo.evaluation.rows import (
    IGNORE_INDEX,
    Rows,
    contributions,
    losses_of,
    predictions,
    require_finite,
)
from attnzoo.hf.swap.convert import original_attention

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
    repeated: Rows | None
    repeats: Sequence[Repeat]
    generation: GenerationBatch | None = None

    def to(self, device: torch.device) -> EvalBatch:
        """Return the batch with its tensors on a device."""
        parts = {name: x for name, x in vars(self).items() if isinstance(x, Rows | GenerationBatch)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in parts.items()}
        return replace(self, **moved)


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
        SpecError: The file does not exist or cannot be read.
    """
    strings, encode = read_documents(text), StringTokenizer(path)
    documents = [encode(x) for x in strings]
    generator = torch.Generator().manual_seed(0)
    bytes_per_token = sum(len(x.encode()) for x in strings) / sum(map(len, documents))
    plain = text_rows(documents, rows, row_length, bytes_per_token, generator)
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
    copies: float | None = None
    needles: float | None = None
    unigram: float = math.inf
    loss_rows: Sequence[float] = ()
    recall_rows: Sequence[float] = ()
    agreement_rows: Sequence[float] = ()
    notes: Sequence[str] = ()

    def recovered(
        self, softmax: Quality, window: Quality
    ) -> tuple[Difference | None, Difference | None]:
        """Return the fraction of the gap between window and softmax that is closed: loss, recall.

        ``None`` if the gap is not clearly above 0.01 bits per byte, as
        :mod:`attnzoo.evaluation.margins` defines it.
        """
        return (
            closed_gap(self.loss_rows, softmax.loss_rows, window.loss_rows, least=LEAST_GAP),
            closed_gap(self.recall_rows, softmax.recall_rows, window.recall_rows, least=LEAST_GAP),
        )


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
    batch = batch.to(next(model.parameters()).device)
    to_bits = 1 / (math.log(2) * batch.rows.bytes_per_token)
    plain: list[Tensor] = []
    for rows, logits in predictions(model, batch.rows):
        chosen = zip(losses_of(rows, logits), rows.targets, strict=True)
        plain += [x[1:][target[1:] != IGNORE_INDEX] for x, target in chosen]
    found: dict[str, Any] = {
        "loss": require_finite(float(torch.cat(plain).mean()), "loss on plain text") * to_bits,
        "unigram": unigram_bits_per_byte(batch.rows),
        "loss_rows": contributions(plain, to_bits),
    }
    recall, notes = _recall_rows(model, batch), []
    found["recall"] = None
    if recall:
        mean = require_finite(float(torch.cat(recall).mean()), "loss on repeated text") * to_bits
        uniform = uniform_bits_per_byte(model, batch.rows.bytes_per_token)
        if note := worse_than_uniform("recall", mean, uniform):
            notes = [note]
        else:
            found |= {"recall": mean, "recall_rows": contributions(recall, to_bits)}
    if batch.generation is not None:
        found |= measure_generation(model, batch.generation)
    model.train(training)
    return Quality(**{**found, "notes": [*notes, *found.get("notes", [])]})


def _recall_rows(model: PreTrainedModel, batch: EvalBatch) -> list[Tensor]:
    """Return the losses in nats of the second copies."""
    if batch.repeated is None:
        return []
    losses = [losses_of(*pair) for pair in predictions(model, batch.repeated)]
    pairs = zip(torch.cat(losses), batch.repeats, strict=True)
    return [x[repeat.second : repeat.second + repeat.length] for x, repeat in pairs]


def with_original_continuations(
    model: PreTrainedModel, batch: EvalBatch, teacher: PreTrainedModel | None = None
) -> EvalBatch:
    """Return the batch with the continuations of a swapped model under softmax attention.

    Called before the model is trained: other models are compared with them.

    Args:
        model: The swapped model.
        batch: The batch.
        teacher: The original model, where it is another one.
    """
    if batch.generation is None:
        return batch
    original: Any = model if teacher is None else teacher
    original.to(next(model.parameters()).device)
    training = original.training
    with original_attention(model) if teacher is None else nullcontext():
        original.eval()
        moved = batch.generation.to(next(original.parameters()).device)
        generation = with_reference(moved, original)
    original.train(training)
    return replace(batch, generation=generation)


def unigram_bits_per_byte(rows: Rows) -> float:
    """Return the loss of a model that knows only how frequent each evaluated token is.

    A model that is not below it on these rows predicts nothing: it is not trained, or the text is
    in another language.
    """
    tokens = rows.tokens.long()
    if rows.is_packed or rows.labels is not None:
        tokens = tokens[rows.targets != IGNORE_INDEX]
    frequencies = tokens.flatten().bincount().double() / tokens.numel()
    return float(torch.special.entr(frequencies).sum()) / (math.log(2) * rows.bytes_per_token)
