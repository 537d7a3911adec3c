"""Rows whose end repeats earlier tokens, and the quality of greedy generation.

A row ends with a copied segment, or with the number of a needle. Each is one document, and begins
with text of one; it is at most as long as the documents of the text, because a model that was
trained on these has seen no longer ones. They need no download.

The loss of a text scores each token after the true ones. In generation a model reads its own
tokens, so that one wrong token changes those that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attnzoo.evaluation.corpus import cut_rows
from attnzoo.evaluation.rows import Rows, beginnings
from attnzoo.hf.seam import cache_argument

ROWS = 6  # of copies and needles, by distance
COPY_TOKENS = 48  # length of a copied segment
MIN_DISTANCE = 64  # shortest distance, and end of the first position bucket
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
        """Return whether rows of a distance have no more tokens than ``length``."""
        return MIN_DISTANCE + distance + max(map(len, self.questions)) <= length


@dataclass(frozen=True, kw_only=True)
class GenerationBatch:
    """Rows that a model continues greedily.

    Attributes:
        prompts: Plain text, each row of one document.
        copies: Each row ends with a copy of a segment, of which a model generates the last
            ``COPY_ANSWER`` tokens. ``None`` if documents are too short.
        needles: Each row ends with a number that it has assigned to a name earlier. ``None`` if
            documents are too short, or for ``notes``.
        needle_answer: Number of tokens in a needle's number.
        distance: Tokens from a segment or number to its copy.
        new_tokens: Tokens to generate after a prompt.
        reference: ``[N, new_tokens]``, the original model's continuations of ``prompts``.
        notes: Why numbers are left out.
    """

    prompts: Rows
    copies: Rows | None
    needles: Rows | None
    needle_answer: int
    distance: int
    new_tokens: int
    reference: Tensor | None = None
    notes: Sequence[str] = ()

    def to(self, device: torch.device) -> GenerationBatch:
        """Return the batch with its tensors on a device."""
        given = {k: x.to(device) for k, x in vars(self).items() if isinstance(x, Tensor | Rows)}
        return replace(self, **given)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class GenerationQuality:
    """Quality of greedy generation.

    Attributes:
        agreement: Fraction of generated tokens that equal those of the original model at the same
            position.
        equal_tokens: Mean number of tokens before the first that differs from the original's.
        copies: Fraction of the generated tokens of copies that equal the segment's.
        needles: Fraction of rows whose number is generated without an error.
        agreement_rows: ``agreement`` of each continuation.
        notes: Why numbers are left out.
    """

    agreement: float
    equal_tokens: float
    copies: float | None
    needles: float | None
    agreement_rows: list[float]
    notes: list[str] = field(default_factory=list)


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
    distances = recall_distances(length)
    distance = distances[-1] if distances else 0
    needles = Needles(encode, PROMPTS)
    fits = bool(distances) and needles.fit(distance, length)
    return GenerationBatch(
        prompts=Rows.of_documents(prompts),
        copies=copy_rows(documents, distance, generator, PROMPTS) if distances else None,
        needles=needles.rows(documents, distance, generator)
        if fits and not needles.reason
        else None,
        needle_answer=needles.answer_tokens,
        distance=distance,
        new_tokens=new_tokens,
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


def measure_generation(
    model: PreTrainedModel, batch: GenerationBatch, *, is_original: bool = False
) -> GenerationQuality:
    """Return how a model generates, compared with ``batch.reference`` and with the rows.

    Args:
        model: A causal model in evaluation mode.
        batch: The rows.
        is_original: Whether the model is the one that continued the prompts as
            ``batch.reference``, so that it need not continue them again.
    """
    assert batch.reference is not None
    continued = batch.reference
    if not is_original:
        continued = continue_greedily(model, batch.prompts, batch.new_tokens)
    equal = continued.eq(batch.reference)
    copied = correct_tokens(model, batch.copies, COPY_ANSWER)
    needles = correct_tokens(model, batch.needles, batch.needle_answer)
    return GenerationQuality(
        agreement=float(equal.float().mean()),
        agreement_rows=equal.float().mean(1).tolist(),
        equal_tokens=float(equal.int().cumprod(1).sum(1).float().mean()),
        copies=None if copied is None else float(copied.float().mean()),
        needles=None if needles is None else float(needles.all(1).float().mean()),
        notes=list(batch.notes),
    )


def correct_tokens(model: PreTrainedModel, rows: Rows | None, answer: int) -> Tensor | None:
    """Return which of the last ``answer`` tokens of each row a model generates, ``[N, answer]``."""
    if rows is None:
        return None
    prompts = Rows.of_documents(rows.tokens[:, :-answer])
    return continue_greedily(model, prompts, answer) == rows.tokens[:, -answer:]
