"""Greedy generation, and quality as a function of length: loss by position, recall by distance.

Recall is measured in two ways: the second copy of a segment, and a needle, which is a number that
the text assigns to a name once and asks for later. A row ends with either. It is one document, and
at most as long as the documents of the text, because a model that was trained on these has seen no
longer ones. Beyond the trained length, recall shows how well the model's positions extrapolate.

The loss of a text scores each token after the true ones. In generation a model reads its own
tokens, so that one wrong token changes those that follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attnzoo.evaluation.corpus import cut_rows, string_tokenizer, tokenized_rows
from attnzoo.evaluation.rows import (
    IGNORE_INDEX,
    Rows,
    beginnings,
    contributions,
    fingerprint,
    losses_of,
    predictions,
    require_finite,
    token_losses,
    unigram_bits_per_byte,
)
from attnzoo.hf.seam import cache_argument

ROWS = 6  # of copies and needles, by distance
TEXT_TOKENS = ROWS * 2048  # of plain text, in 6 rows or more
COPY_TOKENS = 48  # length of a copied segment
MIN_DISTANCE = 64  # shortest distance, and end of the first position bucket
UNPREDICTABLE = 4  # first tokens of the second copy, before a model can recognise it
PROMPTS = 16
NEW_TOKENS = 64  # longest continuation


@dataclass(frozen=True, kw_only=True)
class GenerationBatch:
    """Rows that a model continues greedily.

    Attributes:
        prompts: Plain text, each row of one document.
        new_tokens: Tokens to generate after a prompt.
        reference: ``[N, new_tokens]``, the original model's continuations of ``prompts``.
    """

    prompts: Rows
    new_tokens: int
    reference: Tensor | None = None


def make_generation_batch(documents: Sequence[Tensor], length: int) -> GenerationBatch | None:
    """Return the beginnings of documents as prompts; ``None`` if documents have no two tokens.

    Args:
        documents: Tokens of each.
        length: Tokens of a prompt and its continuation; fewer if documents are shorter.
    """
    first = beginnings(documents, PROMPTS, length)
    new_tokens = min(NEW_TOKENS, first.shape[1] // 2)
    if len(first) == 0 or new_tokens == 0:
        return None
    prompts = Rows.of_documents(first[:, : first.shape[1] - new_tokens])
    return GenerationBatch(prompts=prompts, new_tokens=new_tokens)


@torch.no_grad()
def continue_greedily(model: PreTrainedModel, prompts: Rows, new_tokens: int) -> Tensor:
    """Return the most probable continuation of each prompt, token by token.

    Args:
        model: A causal model in evaluation mode. Its generation settings have no effect.
        prompts: Rows of one document each, without padding.
        new_tokens: Tokens to generate; none of them ends the text.

    Returns:
        Tokens, ``[N, new_tokens]``, on the CPU.
    """
    assert not prompts.is_packed
    cache, found = DynamicCache(config=model.config), []
    tokens = prompts.tokens.long().to(next(model.parameters()).device)
    for _ in range(new_tokens):
        output = model(tokens, **cache_argument(cache), use_cache=True, logits_to_keep=1)
        tokens = output.logits[:, -1:].argmax(-1)
        found.append(tokens)
    return torch.cat(found, 1).cpu()


def with_reference(batch: GenerationBatch, model: PreTrainedModel) -> GenerationBatch:
    """Return the batch with the continuations of a model, with which others are compared."""
    return replace(batch, reference=continue_greedily(model, batch.prompts, batch.new_tokens))


def measure_generation(model: PreTrainedModel, batch: GenerationBatch) -> dict[str, Any]:
    """Return how a model generates, compared with ``batch.reference``.

    ``agreement`` is the fraction of generated tokens that equal those of the original model at the
    same position, ``agreement_rows`` that of each continuation, and ``equal_tokens`` the mean
    number of tokens before the first that differs.

    Args:
        model: A causal model in evaluation mode.
        batch: The rows.
    """
    assert batch.reference is not None
    equal = continue_greedily(model, batch.prompts, batch.new_tokens).eq(batch.reference)
    return {
        "agreement": float(equal.float().mean()),
        "agreement_rows": equal.float().mean(1).tolist(),
        "equal_tokens": float(equal.int().cumprod(1).sum(1).float().mean()),
    }


def correct_tokens(model: PreTrainedModel, rows: Rows, answer: int) -> Tensor:
    """Return which of the last ``answer`` tokens of each row a model generates, ``[N, answer]``."""
    prompts = Rows.of_documents(rows.tokens[:, :-answer])
    return continue_greedily(model, prompts, answer) == rows.tokens[:, -answer:]


def copy_rows(documents: Sequence[Tensor], distance: int, generator: torch.Generator) -> Rows:
    """Return rows that end with a copy of the ``COPY_TOKENS`` tokens ``distance`` tokens earlier.

    Rows of ``MIN_DISTANCE + distance + COPY_TOKENS`` tokens.
    """
    rows = cut_rows(documents, ROWS, MIN_DISTANCE + distance + COPY_TOKENS, generator)
    source = rows.tokens[:, -COPY_TOKENS - distance : -distance or None]
    rows.tokens[:, -COPY_TOKENS:] = source[:, :COPY_TOKENS]
    return rows


class Needles:
    """One number per row: the tokens that assign it to a name, and those that ask for it.

    Args:
        encode: Returns the tokens of a string.
        count: Number of rows.

    Attributes:
        answer_tokens: Tokens of the shortest number.
        reason: Why the numbers cannot be measured: the tokenizer does not write them; or ``""``.
    """

    def __init__(self, encode: Callable[[str], Tensor], count: int = ROWS) -> None:
        numbers = [str(27_644_437 * (row + 3) % 9_000_000 + 1_000_000) for row in range(count)]
        answers = [encode(x) for x in numbers]
        self.assignments = [encode(f"\nPASSKEY_{i} = {x}\n") for i, x in enumerate(numbers)]
        self.questions = [  # each ends with its answer
            torch.cat([encode(f"\nPASSKEY_{i} = "), x]) for i, x in enumerate(answers)
        ]
        self.answer_tokens = min(map(len, answers))
        self.reason = ""
        if len({tuple(x.tolist()) for x in answers}) < count:
            self.reason = (
                "needles are not measured: the tokenizer writes numbers with its unknown token, or "
                "not at all"
            )

    def rows(self, documents: Sequence[Tensor], distance: int, generator: torch.Generator) -> Rows:
        """Return rows that assign a number ``distance`` tokens before they ask for it."""
        length = self.length(distance)
        rows = cut_rows(documents, len(self.questions), length, generator)
        for row, given, question in zip(rows.tokens, self.assignments, self.questions, strict=True):
            start = length - len(question) - distance
            row[start : start + len(given)] = given
            row[length - len(question) :] = question
        return rows

    def length(self, distance: int) -> int:
        """Return the tokens of rows of a distance."""
        return MIN_DISTANCE + distance + max(map(len, self.questions))


@dataclass(frozen=True, kw_only=True)
class RecallEvalBatch:
    """Rows that measure quality by position and recall by distance.

    Attributes:
        rows: Plain text.
        copies: By distance, rows whose last ``COPY_TOKENS`` tokens repeat the tokens that far
            before.
        needles: By distance, rows whose last ``answer_tokens`` tokens were given that far before.
        answer_tokens: Number of tokens in a needle's number.
        generation: Prompts that the model continues; ``None`` if documents are too short.
        unigram: Loss of a model that knows only how frequent each token is, in bits per byte.
        notes: Why numbers are left out.
        sha: Hash of the rows and the text, a key for results.
    """

    rows: Rows
    copies: Mapping[int, Rows]
    needles: Mapping[int, Rows]
    answer_tokens: int
    generation: GenerationBatch | None
    unigram: float
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
    encode, generator = string_tokenizer(path), torch.Generator().manual_seed(0)
    count = max(ROWS, TEXT_TOKENS // length)
    documents, rows = tokenized_rows(encode, text, count, length, generator)
    tokens = torch.cat(documents)
    longest, needles = min(length, max(map(len, documents))), Needles(encode)
    distances = [MIN_DISTANCE << i for i in range(longest.bit_length())]
    distances = [d for d in distances if d + COPY_TOKENS + MIN_DISTANCE <= longest]
    copies = {d: copy_rows(documents, d, generator) for d in distances}
    asked = [d for d in distances if not needles.reason and needles.length(d) <= longest]
    generation = make_generation_batch(rows.documents(), length)
    if len(documents) == 1:
        new_tokens = min(NEW_TOKENS, length // 2)
        draw = torch.Generator().manual_seed(0)
        prompts = cut_rows(documents, PROMPTS, length - new_tokens, draw)
        generation = GenerationBatch(prompts=prompts, new_tokens=new_tokens)
    notes = [needles.reason] if needles.reason else []
    if not distances:
        notes.append(f"recall is not measured: the longest document has {longest} tokens")
    return RecallEvalBatch(
        rows=rows,
        copies=copies,
        needles={d: needles.rows(documents, d, generator) for d in asked},
        answer_tokens=needles.answer_tokens,
        generation=generation,
        unigram=unigram_bits_per_byte(tokens, rows.bytes_per_token),
        notes=notes,
        sha=fingerprint(rows.tokens, rows.positions, tokens)[:12],
    )


def worse_than_uniform(model: PreTrainedModel, what: str, found: float, size: float) -> str:
    """Return why a recall is left out, or ``""``: it is worse than that of a uniform guess.

    A model that copies worse than it guesses does not recall: the segments are not like the text
    that it was trained on, or it is not trained.

    Args:
        model: The model.
        what: Name of the recall.
        found: Its loss in bits per byte.
        size: Bytes per token.
    """
    uniform = math.log2(model.config.get_text_config().vocab_size) / size
    if found <= uniform:
        return ""
    return (
        f"{what} is left out: {found:.2f} bits per byte, and a uniform guess has {uniform:.2f}; "
        "the model recalls nothing in such rows"
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
    losses, positions = token_losses(model, rows, 1) * to_bits, rows.positions
    counted = rows.targets != IGNORE_INDEX
    require_finite(float(losses[counted].mean()), "loss on plain text")
    by_position, start, length = {}, 0, int(positions.max()) + 1
    while start < length - 1:
        end = min(max(MIN_DISTANCE, 2 * start), length)
        own = counted & (positions > start) & (positions <= end)
        if own.any():
            by_position[end] = round(float(losses[own].mean()), 4)
        start = end
    copied, found = {}, {}
    predictable = slice(-COPY_TOKENS + UNPREDICTABLE, None)
    for distance, given in batch.copies.items():
        loss, correct = _of_answers(model, given, predictable)
        mean_loss = require_finite(loss, "loss on a second copy") * to_bits
        what = f"recall of a copy @{distance}"
        if note := worse_than_uniform(model, what, mean_loss, rows.bytes_per_token):
            notes.append(note)
        else:
            copied[distance] = round(correct, 4)
    for distance, given in batch.needles.items():
        found[distance] = round(_of_answers(model, given, slice(-batch.answer_tokens, None))[1], 4)
    trained = min(trained_positions or rows.length, rows.length)
    within, beyond = counted & (positions <= trained), losses[counted & (positions > trained)]
    inside = [x[own] for x, own in zip(losses, within, strict=True)]
    return {
        "bits_per_byte": round(float(losses[within].mean()), 4),
        "rows": [round(x, 5) for x in contributions(inside)],
        "bits_per_byte_beyond": round(float(beyond.mean()), 4) if beyond.numel() else None,
        "unigram_bits_per_byte": round(batch.unigram, 4),
        "trained": trained,
        "loss_by_position": by_position,
        "copy_by_distance": copied,
        "needle_by_distance": found,
        "notes": notes,
    }


def _of_answers(model: PreTrainedModel, rows: Rows, answer: slice) -> tuple[float, float]:
    """Return the loss in nats of the tokens of answers, and which part argmax predicts."""
    ((part, logits),) = predictions(model, rows, len(rows))
    predicted = F.pad(logits[:, :-1].argmax(-1), (1, 0))[:, answer]
    correct = predicted == part.tokens[:, answer]
    return float(losses_of(part, logits)[:, answer].mean()), float(correct.float().mean())
