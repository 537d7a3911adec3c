"""Quality as a function of length: loss by position, and recall by distance.

Recall is measured in two ways: the second copy of a segment, and a needle, which is a number that
the text assigns to a name once and asks for later. Beyond the trained length, both show how well
the model's positions extrapolate.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.evaluation.corpus import cut_rows
from attnzoo.evaluation.data import read_text, string_tokenizer
from attnzoo.evaluation.generation import GenerationBatch, make_generation_batch
from attnzoo.evaluation.quality import require_finite
from attnzoo.evaluation.recall_rows import (
    COPY_TOKENS,
    MIN_DISTANCE,
    ROWS,
    Needles,
    copy_rows,
    recall_distances,
)

UNPREDICTABLE = 4  # first tokens of the second copy, before a model can recognise it


@dataclass(frozen=True, kw_only=True)
class RecallEvalBatch:
    """Rows that measure quality by position and recall by distance.

    Attributes:
        tokens: ``[N, T]``, plain text.
        copies: By distance, rows ``[N, S]`` whose last ``COPY_TOKENS`` tokens repeat the tokens
            that far before.
        needles: By distance, rows whose last ``answer_tokens`` tokens were given that far before.
        answer_tokens: Number of tokens in a needle's number.
        generation: Prompts, copies and needles that the model continues.
        bytes_per_token: Converts bits per token to bits per byte.
        unigram_bits_per_byte: Loss of a model that knows only how frequent each token is.
        sha: Hash of the rows and the text, a key for results.
    """

    tokens: Tensor
    copies: dict[int, Tensor]
    needles: dict[int, Tensor]
    answer_tokens: int
    generation: GenerationBatch
    bytes_per_token: float
    unigram_bits_per_byte: float
    sha: str

    @property
    def shape(self) -> tuple[int, int]:
        """N and T of the plain text."""
        return len(self.tokens), self.tokens.shape[1]


def make_recall_batch(path: Path, text: Path | None, length: int) -> RecallEvalBatch:
    """Tokenize a text with a model's tokenizer and make rows of each kind.

    Args:
        path: Folder of the model.
        text: File; the held-out part of the standard library when ``None``.
        length: T.

    Raises:
        SpecError: The file cannot be read, or it is shorter than one row.
    """
    string = read_text(text)
    encode = string_tokenizer(path)
    tokens = encode(string)
    if len(tokens) < length:
        raise SpecError(
            f"The text has {len(tokens)} tokens, but a row needs {length}; give a longer --text, "
            "or a smaller --quality-length"
        )
    generator = torch.Generator().manual_seed(0)
    rows = cut_rows(tokens, ROWS, length, generator)
    distances = recall_distances(length)
    copies = {d: copy_rows(tokens, d, generator) for d in distances}
    needles = Needles(encode)
    digest = hashlib.sha256(rows.numpy().tobytes() + string[:4096].encode())
    frequencies = tokens.bincount() / len(tokens)
    bytes_per_token = len(string.encode()) / len(tokens)
    return RecallEvalBatch(
        tokens=rows,
        copies=copies,
        needles={d: needles.rows(tokens, d, generator) for d in distances},
        answer_tokens=needles.answer_tokens,
        generation=make_generation_batch(tokens, encode, length),
        bytes_per_token=bytes_per_token,
        unigram_bits_per_byte=float(torch.special.entr(frequencies).sum())
        / (math.log(2) * bytes_per_token),
        sha=digest.hexdigest()[:12],
    )


@torch.no_grad()
def measure_recall(
    model: PreTrainedModel, batch: RecallEvalBatch, trained_positions: int | None
) -> dict[str, Any]:
    """Return loss by position and recall by distance of a model, as plain data.

    Losses are bits per byte; recall is the fraction of tokens that are predicted correctly.
    ``bits_per_byte`` covers the trained positions, ``bits_per_byte_beyond`` the later ones;
    ``rows`` is ``bits_per_byte`` of each row.

    Args:
        model: A causal model in evaluation mode.
        batch: Rows.
        trained_positions: Number of positions that the model was trained on; all when ``None``.

    Raises:
        NonFiniteError: A loss is NaN or infinite.
    """
    to_bits = 1 / (math.log(2) * batch.bytes_per_token)
    losses = torch.cat([_predictions(model, row[None])[0] for row in batch.tokens]) * to_bits
    require_finite(float(losses.mean()), "loss on plain text")
    by_position = {}
    start, length = 0, batch.tokens.shape[1]
    while start < length - 1:
        end = min(max(MIN_DISTANCE, 2 * start), length)
        by_position[end] = round(float(losses[:, start:end].mean()), 4)
        start = end
    copied, copied_loss, found = {}, {}, {}
    predictable = slice(-COPY_TOKENS + UNPREDICTABLE, None)
    for distance, rows in batch.copies.items():
        loss, correct = _predictions(model, rows)
        copied[distance] = round(float(correct[:, predictable].float().mean()), 4)
        mean_loss = require_finite(float(loss[:, predictable].mean()), "loss on a second copy")
        copied_loss[distance] = round(mean_loss * to_bits, 4)
    for distance, rows in batch.needles.items():
        correct = _predictions(model, rows)[1][:, -batch.answer_tokens :]
        found[distance] = round(float(correct.float().mean()), 4)
    trained = min(trained_positions or length, length)
    beyond = losses[:, trained:]
    return {
        "bits_per_byte": round(float(losses[:, :trained].mean()), 4),
        "rows": [round(float(x), 5) for x in losses[:, :trained].mean(1)],
        "bits_per_byte_beyond": round(float(beyond.mean()), 4) if beyond.numel() else None,
        "unigram_bits_per_byte": round(batch.unigram_bits_per_byte, 4),
        "trained": trained,
        "loss_by_position": by_position,
        "copy_by_distance": copied,
        "copy_loss_by_distance": copied_loss,
        "needle_by_distance": found,
    }


def _predictions(model: PreTrainedModel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss in nats of each token but the first, and whether argmax predicts it."""
    logits = model(rows, use_cache=False).logits[:, :-1].float()
    loss = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
    return loss, logits.argmax(-1) == rows[:, 1:]
