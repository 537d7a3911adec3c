"""Rows whose end repeats earlier tokens: a copied segment, or the number of a needle.

Each row is one document, and begins with text of one. It is at most as long as the documents of the
text, because a model that was trained on these has seen no longer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attnzoo.evaluation.corpus import cut_rows
from attnzoo.evaluation.rows import Rows

ROWS = 6  # of each kind
COPY_TOKENS = 48  # length of a copied segment
MIN_DISTANCE = 64  # shortest distance, and end of the first position bucket
Encode = Callable[[str], Tensor]


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
