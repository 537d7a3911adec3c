"""Tasks of recall: multi-query associative recall, and duplication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attnzoo.errors import SpecError, did_you_mean

IGNORED = -100  # label of positions without a target, as in cross-entropy
KEYS = 32  # number of key tokens in associative recall, and of value tokens
SYMBOLS = 62  # of duplication, besides a separator
SEPARATOR = SYMBOLS
LabelledRows = tuple[Tensor, Tensor]  # tokens, and the token to predict after each or IGNORED


@dataclass(frozen=True, kw_only=True)
class Task:
    """A generated task.

    Attributes:
        name: Name on the command line.
        about: What the model predicts, and the source, in one line.
        vocabulary: Number of tokens.
        draw: Generates rows from their number, their size, and a generator. There are too many
            different rows to memorise, so held-out rows are drawn in the same way.
        train_sizes: Sizes in training; small ones help to learn the large ones.
        test_sizes: Sizes in evaluation, increasing.
        size_unit: Unit of a size.
        steps: Training steps.
        batch: Rows per step at the smallest size; larger sizes have as many tokens.
    """

    name: str
    about: str
    vocabulary: int
    draw: Callable[[int, int, Generator], LabelledRows]
    train_sizes: tuple[int, ...]
    test_sizes: tuple[int, ...]
    size_unit: str
    steps: int
    batch: int


def draw_mqar(count: int, size: int, generator: Generator) -> LabelledRows:
    """Draw ``size`` key-value pairs, then all of them again in another order.

    Each of the ``KEYS`` keys occurs in at most one pair; there are as many values. The target
    after the second occurrence of a key is its value.
    """
    keys = torch.rand(count, KEYS, generator=generator).argsort(1)[:, :size]
    values = KEYS + torch.randint(KEYS, (count, size), generator=generator)
    order = torch.rand(count, size, generator=generator).argsort(1)
    first = torch.stack([keys, values], 2).flatten(1)
    second = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
    tokens = torch.cat([first, second], 1)
    labels = torch.full_like(tokens, IGNORED)
    labels[:, 2 * size :: 2] = values.gather(1, order)
    return tokens, labels


def draw_duplication(count: int, size: int, generator: Generator) -> LabelledRows:
    """Draw 0 w 0 w with a word w of ``size`` symbols; the targets are those of the second copy."""
    word = torch.randint(SYMBOLS, (count, size), generator=generator)
    zero = torch.full((count, 1), SEPARATOR)
    tokens = torch.cat([zero, word, zero, word], 1)
    labels = torch.full_like(tokens, IGNORED)
    labels[:, size + 1 : -1] = word
    return tokens, labels


MQAR = Task(
    name="mqar",
    about="multi-query associative recall (arXiv:2312.04927): the value of each repeated key",
    vocabulary=2 * KEYS,
    draw=draw_mqar,
    train_sizes=(4, 8, 16, 32),
    test_sizes=(8, 16, 32),
    size_unit="pairs",
    steps=1200,
    batch=128,
)
DUPLICATION = Task(
    name="duplication",
    about="the second copy of a word (arXiv:2001.04451)",
    vocabulary=SYMBOLS + 2,
    draw=draw_duplication,
    train_sizes=(15, 31, 63),
    test_sizes=(15, 31, 63),
    size_unit="symbols",
    steps=600,
    batch=64,
)
TASKS = {task.name: task for task in (MQAR, DUPLICATION)}


def find_task(name: str) -> Task:
    """Return the task called ``name``.

    Raises:
        SpecError: No task has that name.
    """
    if name not in TASKS:
        raise SpecError(
            f"No task is called {name!r}.{did_you_mean(name, TASKS)} Available: {', '.join(TASKS)}."
        )
    return TASKS[name]
