"""Rows whose end repeats earlier tokens: a copied segment, or the number of a needle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.evaluation.corpus import cut_rows

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
    tokens: Tensor, distance: int, generator: torch.Generator, count: int = ROWS
) -> Tensor:
    """Return rows that end with a copy of the ``COPY_TOKENS`` tokens ``distance`` tokens earlier.

    Shape ``[N, MIN_DISTANCE + distance + COPY_TOKENS]``.
    """
    rows = cut_rows(tokens, count, MIN_DISTANCE + distance + COPY_TOKENS, generator)
    source = rows[:, -COPY_TOKENS - distance : -distance or None]
    rows[:, -COPY_TOKENS:] = source[:, :COPY_TOKENS]
    return rows


class Needles:
    """One number per row: the tokens that assign it to a name, and those that ask for it.

    Args:
        encode: Returns the tokens of a string.
        count: Number of rows.

    Attributes:
        answer_tokens: Tokens of the shortest number.
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

    def rows(self, tokens: Tensor, distance: int, generator: torch.Generator) -> Tensor:
        """Return rows that assign a number ``distance`` tokens before they ask for it."""
        length = MIN_DISTANCE + distance + max(map(len, self.questions))
        rows = cut_rows(tokens, len(self.questions), length, generator)
        for row, given, question in zip(rows, self.assignments, self.questions, strict=True):
            start = length - len(question) - distance
            row[start : start + len(given)] = given
            row[length - len(question) :] = question
        return rows
