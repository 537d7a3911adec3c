"""Quality as a function of length: loss by position, and recall by distance.

Recall is measured in two ways: the second copy of a segment, and a needle, which is a number that
the text assigns to a name once and asks for later. Beyond the trained length, both show how well
the model's positions extrapolate.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.evaluation.data import StringTokenizer, read_documents, text_rows
from attnzoo.evaluation.generation import (
    COPY_TOKENS,
    MIN_DISTANCE,
    ROWS,
    GenerationBatch,
    Needles,
    copy_rows,
    make_generation_batch,
    recall_distances,
)
from attnzoo.evaluation.quality import (
    contributions,
    losses_of,
    require_finite,
    uniform_bits_per_byte,
    worse_than_uniform,
)
from attnzoo.evaluation.rows import IGNORE_INDEX, Rows, predictions

UNPREDICTABLE = 4  # first tokens of the second copy, before a model can recognise it


@dataclass(frozen=True, kw_only=True)
class RecallEvalBatch:
    """Rows that measure quality by position and recall by distance.

    Attributes:
        rows: Plain text.
        copies: By distance, rows whose last ``COPY_TOKENS`` tokens repeat the tokens that far
            before.
        needles: By distance, rows whose last ``answer_tokens`` tokens were given that far before.
        answer_tokens: Number of tokens in a needle's number.
        generation: Prompts, copies and needles that the model continues; ``None`` if documents are
            too short.
        unigram_bits_per_byte: Loss of a model that knows only how frequent each token is.
        notes: Why numbers are left out.
        sha: Hash of the rows and the text, a key for results.
    """

    rows: Rows
    copies: dict[int, Rows]
    needles: dict[int, Rows]
    answer_tokens: int
    generation: GenerationBatch | None
    unigram_bits_per_byte: float
    notes: Sequence[str]
    sha: str

    @property
    def shape(self) -> tuple[int, int]:
        """N and T of the plain text."""
        return len(self.rows), self.rows.length


def make_recall_batch(path: Path, text: Path | None, length: int) -> RecallEvalBatch:
    """Tokenize a text with a model's tokenizer and make rows of each kind.

    Args:
        path: Folder of the model.
        text: File; the held-out part of the standard library when ``None``.
        length: T.

    Raises:
        SpecError: The file cannot be read, or it is shorter than one row.
    """
    strings = read_documents(text)
    encode = StringTokenizer(path)
    documents = [encode(x) for x in strings]
    tokens = torch.cat(documents)
    if len(tokens) < length:
        raise SpecError(
            f"The text has {len(tokens)} tokens, but a row needs {length}; give a longer --data, "
            "or a smaller --max-length"
        )
    generator = torch.Generator().manual_seed(0)
    bytes_per_token = sum(len(x.encode()) for x in strings) / len(tokens)
    rows = text_rows(documents, ROWS, length, bytes_per_token, generator)
    longest = min(length, max(map(len, documents)))
    distances = recall_distances(longest)
    copies = {d: copy_rows(documents, d, generator) for d in distances}
    needles = Needles(encode)
    asked = [d for d in distances if not needles.reason and needles.fit(d, longest)]
    digest = hashlib.sha256(rows.tokens.numpy().tobytes() + "".join(strings)[:4096].encode())
    if len(documents) > 1:
        digest.update(rows.positions.numpy().tobytes())
    frequencies = tokens.bincount() / len(tokens)
    notes = [needles.reason] if needles.reason else []
    if not distances:
        notes.append(f"recall is not measured: the longest document has {longest} tokens")
    return RecallEvalBatch(
        rows=rows,
        copies=copies,
        needles={d: needles.rows(documents, d, generator) for d in asked},
        answer_tokens=needles.answer_tokens,
        generation=make_generation_batch(
            documents, encode, length, rows if len(documents) > 1 else None
        ),
        unigram_bits_per_byte=float(torch.special.entr(frequencies).sum())
        / (math.log(2) * bytes_per_token),
        notes=notes,
        sha=digest.hexdigest()[:12],
    )


@torch.no_grad()
def measure_recall(
    model: PreTrainedModel, batch: RecallEvalBatch, trained_positions: int | None
) -> dict[str, Any]:
    """Return loss by position and recall by distance of a model, as plain data.

    Losses are bits per byte; recall is the fraction of tokens that are predicted correctly.
    Positions are those in a document. ``bits_per_byte`` covers the trained positions,
    ``bits_per_byte_beyond`` the later ones; ``rows`` is ``bits_per_byte`` of each row. Recall at a
    distance is left out where copies are worse than a uniform guess; ``notes`` says so.

    Args:
        model: A causal model in evaluation mode.
        batch: Rows.
        trained_positions: Number of positions that the model was trained on; all when ``None``.

    Raises:
        NonFiniteError: A loss is NaN or infinite.
    """
    rows, notes = batch.rows, list(batch.notes)
    to_bits = 1 / (math.log(2) * rows.bytes_per_token)
    losses = torch.cat([losses_of(*pair) for pair in predictions(model, rows, 1)]) * to_bits
    counted = (rows.targets != IGNORE_INDEX).to(losses.device)
    positions = rows.positions.to(losses.device)
    require_finite(float(losses[counted].mean()), "loss on plain text")
    by_position = {}
    start, length = 0, int(positions.max()) + 1
    while start < length - 1:
        end = min(max(MIN_DISTANCE, 2 * start), length)
        own = counted & (positions > start) & (positions <= end)
        if own.any():
            by_position[end] = round(float(losses[own].mean()), 4)
        start = end
    copied, copied_loss, found = {}, {}, {}
    predictable = slice(-COPY_TOKENS + UNPREDICTABLE, None)
    uniform = uniform_bits_per_byte(model, rows.bytes_per_token)
    for distance, given in batch.copies.items():
        loss, correct = _of_answers(model, given, predictable)
        mean_loss = require_finite(float(loss.mean()), "loss on a second copy") * to_bits
        if note := worse_than_uniform(f"recall of a copy @{distance}", mean_loss, uniform):
            notes.append(note)
            continue
        copied[distance] = round(float(correct.float().mean()), 4)
        copied_loss[distance] = round(mean_loss, 4)
    for distance, given in batch.needles.items():
        correct = _of_answers(model, given, slice(-batch.answer_tokens, None))[1]
        found[distance] = round(float(correct.float().mean()), 4)
    trained = min(trained_positions or rows.length, rows.length)
    within, beyond = counted & (positions <= trained), losses[counted & (positions > trained)]
    return {
        "bits_per_byte": round(float(losses[within].mean()), 4),
        "rows": [round(x, 5) for x in contributions(_by_row(losses, within))],
        "bits_per_byte_beyond": round(float(beyond.mean()), 4) if beyond.numel() else None,
        "unigram_bits_per_byte": round(batch.unigram_bits_per_byte, 4),
        "trained": trained,
        "loss_by_position": by_position,
        "copy_by_distance": copied,
        "copy_loss_by_distance": copied_loss,
        "needle_by_distance": found,
        "notes": notes,
    }


def _by_row(losses: Tensor, counted: Tensor) -> list[Tensor]:
    return [x[own] for x, own in zip(losses, counted, strict=True)]


def _of_answers(model: PreTrainedModel, rows: Rows, answer: slice) -> tuple[Tensor, Tensor]:
    """Return the loss in nats of the tokens of answers, and whether argmax predicts them."""
    losses, correct = [], []
    for part, logits in predictions(model, rows, len(rows)):
        losses.append(losses_of(part, logits)[:, answer])
        correct.append(
            F.pad(logits[:, :-1].argmax(-1), (1, 0))[:, answer] == part.tokens[:, answer]
        )
    return torch.cat(losses), torch.cat(correct)
