"""The definition of a task: how its token rows are generated, and its training budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Generator, Tensor

IGNORED = -100  # label of positions without a target, as in cross-entropy


class LabelledRows(NamedTuple):
    """Rows of a task.

    Attributes:
        tokens: ``[N, T]``.
        labels: ``[N, T]``: the token to predict after each position, or ``IGNORED``.
    """

    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Task:
    """A generated task.

    Attributes:
        name: Name on the command line.
        about: What the model predicts, and the source, in one line.
        vocabulary: Number of tokens.
        draw: Generates rows from their number, their size, a generator, and whether they are
            held out.
        train_sizes: Sizes in training; small ones help to learn the large ones.
        test_sizes: Sizes in evaluation, increasing.
        size_unit: Unit of a size.
        steps: Training steps.
        batch: Rows per step at the smallest size; larger sizes have as many tokens.
        chance: Accuracy of a random guess.
    """

    name: str
    about: str
    vocabulary: int
    draw: Callable[[int, int, Generator, bool], LabelledRows]
    train_sizes: tuple[int, ...]
    test_sizes: tuple[int, ...]
    size_unit: str
    steps: int
    batch: int
    chance: float
