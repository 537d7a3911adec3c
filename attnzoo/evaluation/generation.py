"""Greedy generation, and quality as a function of length: loss by position, recall by distance.

Recall is measured in two ways: the second copy of a segment, and a needle, which is a number that
the text assigns to a name once and asks for later. A row ends with either. It is one document, and
at most as long as the documents of the text, because a model that was trained on these has seen no
longer ones. Beyond the trained length, recall shows how well the model's positions extrapolate.

The loss of a text scores each token after the true ones. In generation a model reads its own
tokens, so that one wrong token changes those that follow.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.evaluation.corpus import cut_rows
from attnzoo.evaluation.data import StringTokenizer, read_documents, text_rows
from attnzoo.evaluation.rows import (
    IGNORE_INDEX,
    Rows,
    beginnings,
    contributions,
    losses_of,
    predictions,
    require_finite,
)
from attnzoo.hf.seam import cache_argument

ROWS = 6  # of copies and needles, by distance
COPY_TOKENS = 48  # length of a copied segment
MIN_DISTANCE = 64  # shortest distance, and end of the first position bucket
UNPREDICTABLE = 4  # first tokens of the second copy, before a model can recognise it
Encode = Callable[[str], Tensor]
PROMPTS = 16  # and copies and needles that are generated
NEW_TOKENS = 64  # longest continuation
COPY_ANSWER = COPY_TOKENS // 2  # generated tokens of a copy; the prompt ends with the others


def recall_distances(length: int) -> list[int]:
    """Return the distances that fit into rows of ``length`` tokens, doubling from the shortest."""
    found, distance = [], MIN_DISTANCE
    while distance + COPY_TOKENS + MIN_DISTANCE <= length:
        found.append(distance)
        distance *= 2
    return found


def copy_rows(
    documents: Sequence[Tensor], distance: int, generator: torch.Generator, count: int = ROWS
) -> Rows:
    """Return rows that end with a copy of the ``COPY_TOKENS`` tokens ``distance`` tokens earlier.

    Rows of ``MIN_DISTANCE + distance + COPY_TOKENS`` tokens.
    """
    rows = cut_rows(documents, count, MIN_DISTANCE + distance + COPY_TOKENS, generator)
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

    def __init__(self, encode: Encode, count: int = ROWS) -> None:
        self.assignments: list[Tensor] = []
        self.questions: list[Tensor] = []  # each ends with its answer
        answers = []
        for row in range(count):
            number = str(27_644_437 * (row + 3) % 9_000_000 + 1_000_000)
            answers.append(encode(number))
            self.assignments.append(encode(f"\nPASSKEY_{row} = {number}\n"))
            self.questions.append(torch.cat([encode(f"\nPASSKEY_{row} = "), answers[-1]]))
        self.answer_tokens = min(map(len, answers))
        unknown = getattr(encode, "unknown", None)  # of StringTokenizer
        written = {tuple(x.tolist()) for x in answers}
        self.reason = ""
        if len(written) < count or any(unknown in x for x in written):
            self.reason = (
                "needles are not measured: the tokenizer writes numbers with its unknown token, or "
                "not at all"
            )

    def rows(self, documents: Sequence[Tensor], distance: int, generator: torch.Generator) -> Rows:
        """Return rows that assign a number ``distance`` tokens before they ask for it."""
        length = MIN_DISTANCE + distance + max(map(len, self.questions))
        rows = cut_rows(documents, len(self.questions), length, generator)
        for row, given, question in zip(rows.tokens, self.assignments, self.questions, strict=True):
            start = length - len(question) - distance
            row[start : start + len(given)] = given
            row[length - len(question) :] = question
        return rows

    def fit(self, distance: int, length: int) -> bool:
        """Return whether there are rows of a distance of no more tokens than ``length``."""
        return not self.reason and MIN_DISTANCE + distance + max(map(len, self.questions)) <= length


@dataclass(frozen=True, kw_only=True)
class GenerationBatch:
    """Rows that a model continues greedily.

    Attributes:
        prompts: Plain text, each row of one document.
        new_tokens: Tokens to generate after a prompt.
        copies: Each row ends with a copy of a segment, of which a model generates the last
            ``COPY_ANSWER`` tokens. ``None`` if documents are too short.
        needles: Each row ends with a number that it has assigned to a name earlier. ``None`` if
            documents are too short, or for ``notes``.
        needle_answer: Number of tokens in a needle's number.
        reference: ``[N, new_tokens]``, the original model's continuations of ``prompts``.
        notes: Why numbers are left out.
    """

    prompts: Rows
    new_tokens: int
    copies: Rows | None = None
    needles: Rows | None = None
    needle_answer: int = 0
    reference: Tensor | None = None
    notes: Sequence[str] = ()

    def to(self, device: torch.device) -> GenerationBatch:
        """Return the batch with its tensors on a device."""
        given = {k: x.to(device) for k, x in vars(self).items() if isinstance(x, Tensor | Rows)}
        return replace(self, **given)  # type: ignore[arg-type]


def make_generation_batch(
    documents: Sequence[Tensor], encode: Encode, length: int, rows: Rows | None = None
) -> GenerationBatch | None:
    """Cut prompts from documents, and write copies and needles at the longest distance that fits.

    Prompt and continuation together are no longer than a document; ``None`` if documents have no
    two tokens.

    Args:
        documents: Tokens of each document of the text.
        encode: Returns the tokens of a string.
        length: Tokens of a prompt and its continuation; fewer if documents are shorter.
        rows: Rows whose documents' beginnings are the prompts; of ``documents`` when ``None``.
    """
    generator = torch.Generator().manual_seed(0)
    if rows is None and len(documents) == 1:
        new_tokens = min(NEW_TOKENS, length // 2)
        prompts = cut_rows(documents, PROMPTS, length - new_tokens, generator).tokens
    else:
        first = beginnings(documents if rows is None else rows.documents(), PROMPTS, length)
        new_tokens = min(NEW_TOKENS, first.shape[1] // 2)
        prompts = first[:, : first.shape[1] - new_tokens]
        if len(prompts) == 0 or new_tokens == 0:
            return None
    length = min(length, max(map(len, documents)))
    needles, copies, asked = Needles(encode, PROMPTS), None, None
    if distances := recall_distances(length):
        copies = copy_rows(documents, distances[-1], generator, PROMPTS)
        if needles.fit(distances[-1], length):
            asked = needles.rows(documents, distances[-1], generator)
    return GenerationBatch(
        prompts=Rows.of_documents(prompts),
        new_tokens=new_tokens,
        copies=copies,
        needles=asked,
        needle_answer=needles.answer_tokens,
        notes=[needles.reason] if needles.reason else [],
    )


@torch.no_grad()
def continue_greedily(model: PreTrainedModel, prompts: Rows, new_tokens: int) -> Tensor:
    """Return the most probable continuation of each prompt, token by token.

    Args:
        model: A causal model in evaluation mode. Its generation settings have no effect.
        prompts: Rows of one document each, without padding.
        new_tokens: Tokens to generate; none of them ends the text.

    Returns:
        Tokens, ``[N, new_tokens]``.
    """
    assert not prompts.is_packed
    cache, tokens, found = DynamicCache(config=model.config), prompts.tokens.long(), []
    for _ in range(new_tokens):
        output = model(tokens, **cache_argument(cache), use_cache=True, logits_to_keep=1)
        tokens = output.logits[:, -1:].argmax(-1)
        found.append(tokens)
    return torch.cat(found, 1)


def with_reference(batch: GenerationBatch, model: PreTrainedModel) -> GenerationBatch:
    """Return the batch with the continuations of a model, with which others are compared."""
    return replace(batch, reference=continue_greedily(model, batch.prompts, batch.new_tokens))


def measure_generation(model: PreTrainedModel, batch: GenerationBatch) -> dict[str, Any]:
    """Return how a model generates, compared with ``batch.reference`` and with the rows.

    ``agreement`` is the fraction of generated tokens that equal those of the original model at the
    same position, ``agreement_rows`` that of each continuation, and ``equal_tokens`` the mean
    number of tokens before the first that differs. ``copies`` is the fraction of the generated
    tokens of copies that equal the segment's, and ``needles`` that of the rows whose number is
    generated without an error. ``notes`` says why numbers are left out.

    Args:
        model: A causal model in evaluation mode.
        batch: The rows.
    """
    continued = continue_greedily(model, batch.prompts, batch.new_tokens)
    assert batch.reference is not None
    equal = continued.eq(batch.reference)
    copied = correct_tokens(model, batch.copies, COPY_ANSWER)
    needles = correct_tokens(model, batch.needles, batch.needle_answer)
    return {
        "agreement": float(equal.float().mean()),
        "agreement_rows": equal.float().mean(1).tolist(),
        "equal_tokens": float(equal.int().cumprod(1).sum(1).float().mean()),
        "copies": None if copied is None else float(copied.float().mean()),
        "needles": None if needles is None else float(needles.all(1).float().mean()),
        "notes": list(batch.notes),
    }


def correct_tokens(model: PreTrainedModel, rows: Rows | None, answer: int) -> Tensor | None:
    """Return which of the last ``answer`` tokens of each row a model generates, ``[N, answer]``."""
    if rows is None:
        return None
    prompts = Rows.of_documents(rows.tokens[:, :-answer])
    return continue_greedily(model, prompts, answer) == rows.tokens[:, -answer:]


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
        unigram_bits_per_byte: Loss of a model that knows only how frequent each token is.
        notes: Why numbers are left out.
        sha: Hash of the rows and the text, a key for results.
    """

    rows: Rows
    copies: Mapping[int, Rows]
    needles: Mapping[int, Rows]
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
    strings, encode = read_documents(text), StringTokenizer(path)
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
    distances, needles = recall_distances(longest), Needles(encode)
    copies = {d: copy_rows(documents, d, generator) for d in distances}
    asked = [d for d in distances if needles.fit(d, longest)]
    digest = hashlib.sha256(rows.tokens.numpy().tobytes() + "".join(strings)[:4096].encode())
    if len(documents) > 1:
        digest.update(rows.positions.numpy().tobytes())
    frequencies = tokens.bincount() / len(tokens)
    unigram = float(torch.special.entr(frequencies).sum()) / (math.log(2) * bytes_per_token)
    notes = [needles.reason] if needles.reason else []
    if not distances:
        notes.append(f"recall is not measured: the longest document has {longest} tokens")
    prompts = make_generation_batch(documents, encode, length, rows if len(documents) > 1 else None)
    return RecallEvalBatch(
        rows=rows,
        copies=copies,
        needles={d: needles.rows(documents, d, generator) for d in asked},
        answer_tokens=needles.answer_tokens,
        generation=prompts,
        unigram_bits_per_byte=unigram,
        notes=notes,
        sha=digest.hexdigest()[:12],
    )


def uniform_bits_per_byte(model: PreTrainedModel, bytes_per_token: float) -> float:
    """Return the loss of a model that gives every token the same probability."""
    return math.log2(model.config.get_text_config().vocab_size) / bytes_per_token


def worse_than_uniform(what: str, found: float, uniform: float) -> str:
    """Return why a recall is left out, or ``""``: it is worse than that of a uniform guess.

    A model that copies worse than it guesses does not recall: the segments are not like the text
    that it was trained on, or it is not trained.
    """
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
    losses = torch.cat([losses_of(*pair) for pair in predictions(model, rows, 1)]) * to_bits
    counted = (rows.targets != IGNORE_INDEX).to(losses.device)
    positions = rows.positions.to(losses.device)
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
    uniform = uniform_bits_per_byte(model, rows.bytes_per_token)
    for distance, given in batch.copies.items():
        loss, correct = _of_answers(model, given, predictable)
        mean_loss = require_finite(loss, "loss on a second copy") * to_bits
        if note := worse_than_uniform(f"recall of a copy @{distance}", mean_loss, uniform):
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
        "unigram_bits_per_byte": round(batch.unigram_bits_per_byte, 4),
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
