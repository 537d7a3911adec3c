"""Tasks of recall: multi-query associative recall, duplication, induction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from attnzoo.errors import SpecError, did_you_mean

IGNORED = -100  # label of positions without a target, as in cross-entropy
KEYS = 32  # number of key tokens in associative recall, and of value tokens
SYMBOLS = 62  # of duplication and induction, besides a separator and a trigger
SEPARATOR, TRIGGER = SYMBOLS, SYMBOLS + 1


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


def draw_mqar(count: int, size: int, generator: Generator, *, symbols: int = KEYS) -> LabelledRows:
    """Draw ``size`` key-value pairs, then all of them again in another order.

    There are ``symbols`` keys, of which each occurs in at most one pair, and as many values.

    The target after the second occurrence of a key is its value.
    """
    keys = torch.rand(count, symbols, generator=generator).argsort(1)[:, :size]
    values = symbols + torch.randint(symbols, (count, size), generator=generator)
    order = torch.rand(count, size, generator=generator).argsort(1)
    first = torch.stack([keys, values], 2).flatten(1)
    second = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
    tokens = torch.cat([first, second], 1)
    labels = torch.full_like(tokens, IGNORED)
    labels[:, 2 * size :: 2] = values.gather(1, order)
    return LabelledRows(tokens, labels)


def draw_duplication(count: int, size: int, generator: Generator) -> LabelledRows:
    """Draw 0 w 0 w with a word w of ``size`` symbols; the targets are those of the second copy."""
    word = torch.randint(SYMBOLS, (count, size), generator=generator)
    zero = torch.full((count, 1), SEPARATOR)
    tokens = torch.cat([zero, word, zero, word], 1)
    labels = torch.full_like(tokens, IGNORED)
    labels[:, size + 1 : -1] = word
    return LabelledRows(tokens, labels)


def draw_induction(count: int, size: int, generator: Generator) -> LabelledRows:
    """Draw ``size`` symbols with a trigger inside and at the end; predict the symbol after it."""
    tokens = torch.randint(SYMBOLS, (count, size), generator=generator)
    position = torch.randint(size - 2, (count, 1), generator=generator)
    tokens.scatter_(1, position, TRIGGER)
    tokens[:, -1] = TRIGGER
    labels = torch.full_like(tokens, IGNORED)
    labels[:, -1:] = tokens.gather(1, position + 1)
    return LabelledRows(tokens, labels)


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
MQAR_64 = Task(
    name="mqar64",
    about="multi-query associative recall (arXiv:2312.04927) of up to 64 pairs",
    vocabulary=2 * 64,
    draw=partial(draw_mqar, symbols=64),
    train_sizes=(4, 8, 16, 32, 64),
    test_sizes=(16, 32, 64),
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
INDUCTION = Task(
    name="induction",
    about="the token that followed the same token before (arXiv:2212.14052)",
    vocabulary=SYMBOLS + 2,
    draw=draw_induction,
    train_sizes=(16, 32, 64),
    test_sizes=(16, 32, 64),
    size_unit="tokens",
    steps=500,
    batch=128,
)
TASKS = {task.name: task for task in (MQAR, MQAR_64, DUPLICATION, INDUCTION)}


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
