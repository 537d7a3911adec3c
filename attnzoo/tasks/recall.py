"""Three tasks of looking back: associative recall, duplication, induction."""

from __future__ import annotations

import torch
from torch import Generator

from attnzoo.tasks.base import ASKED_NOTHING, Rows, Task

KEYS = VALUES = 32  # of associative recall: which tokens are keys, and which are values
SYMBOLS = 62  # of the other two, beside a separator and a trigger
SEPARATOR, TRIGGER = SYMBOLS, SYMBOLS + 1


def draw_mqar(count: int, size: int, generator: Generator, held_out: bool) -> Rows:
    """Draw ``size`` pairs of a key and a value, then every key again, in another order.

    A model is asked for the value after each second appearance of a key. All rows are drawn anew,
    so that ``held_out`` needs no part of its own: there are more than anyone could learn by heart.
    """
    keys = torch.rand(count, KEYS, generator=generator).argsort(1)[:, :size]
    values = KEYS + torch.randint(VALUES, (count, size), generator=generator)
    order = torch.rand(count, size, generator=generator).argsort(1)
    first = torch.stack([keys, values], 2).flatten(1)
    second = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
    tokens = torch.cat([first, second], 1)
    labels = torch.full_like(tokens, ASKED_NOTHING)
    labels[:, 2 * size :: 2] = values.gather(1, order)
    return Rows(tokens, labels)


def draw_duplication(count: int, size: int, generator: Generator, held_out: bool) -> Rows:
    """Draw 0 w 0 w with a word of ``size`` symbols; the second copy is asked for."""
    word = torch.randint(SYMBOLS, (count, size), generator=generator)
    zero = torch.full((count, 1), SEPARATOR)
    tokens = torch.cat([zero, word, zero, word], 1)
    labels = torch.full_like(tokens, ASKED_NOTHING)
    labels[:, size + 1 : -1] = word
    return Rows(tokens, labels)


def draw_induction(count: int, size: int, generator: Generator, held_out: bool) -> Rows:
    """Draw ``size`` symbols with a trigger somewhere and at the end: what came after it?"""
    tokens = torch.randint(SYMBOLS, (count, size), generator=generator)
    place = torch.randint(size - 2, (count, 1), generator=generator)
    tokens.scatter_(1, place, TRIGGER)
    tokens[:, -1] = TRIGGER
    labels = torch.full_like(tokens, ASKED_NOTHING)
    labels[:, -1:] = tokens.gather(1, place + 1)
    return Rows(tokens, labels)


MQAR = Task(
    name="mqar",
    about="multi-query associative recall (arXiv:2312.04927): the value of every key again",
    vocabulary=KEYS + VALUES,
    draw=draw_mqar,
    train_sizes=(4, 8, 16, 32),
    test_sizes=(8, 16, 32),
    size_is="pairs",
    steps=1200,
    batch=128,
    chance=1 / VALUES,
)
DUPLICATION = Task(
    name="duplication",
    about="a word and its copy (arXiv:2001.04451): the copy",
    vocabulary=SYMBOLS + 2,
    draw=draw_duplication,
    train_sizes=(15, 31, 63),
    test_sizes=(15, 31, 63),
    size_is="symbols",
    steps=600,
    batch=64,
    chance=1 / SYMBOLS,
)
INDUCTION = Task(
    name="induction",
    about="what came after the same token before (arXiv:2212.14052)",
    vocabulary=SYMBOLS + 2,
    draw=draw_induction,
    train_sizes=(16, 32, 64),
    test_sizes=(16, 32, 64),
    size_is="tokens",
    steps=500,
    batch=128,
    chance=1 / SYMBOLS,
)
