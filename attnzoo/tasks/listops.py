"""ListOps: nested lists of digits under minimum, maximum, median and sum modulo ten.

Source: Nangia and Bowman, 2018, arXiv:1804.06028; as in Long Range Arena, arXiv:2011.04006, but
shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median_low

import torch
from torch import Generator

from attnzoo.tasks.base import ASKED_NOTHING, Rows, Task

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": median_low,
    "SM": lambda values: sum(values) % 10,
}
NAMES = [*map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]", "=", "pad"]
CLOSE, EQUALS, PAD = NAMES.index("]"), NAMES.index("="), NAMES.index("pad")
NEST = 0.25  # how often an argument is a list
MOST_ARGUMENTS = 5
DEEPEST = 4


def draw_expression(room: int, generator: Generator, depth: int = 1) -> tuple[list[int], int]:
    """Draw an expression of at most ``room`` tokens; returns its tokens and its value."""

    def number(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    operator = number(len(OPERATORS))
    tokens, values = [10 + operator], []
    for _ in range(2 + number(MOST_ARGUMENTS - 1)):
        left = room - len(tokens) - 1
        if left < 1:
            break
        inside = depth < DEEPEST and left >= 4 and number(1000) < 1000 * NEST
        part, value = draw_expression(left, generator, depth + 1) if inside else ([], number(10))
        tokens += part or [value]
        values.append(value)
    return [*tokens, CLOSE], list(OPERATORS.values())[operator](values)


def draw_listops(count: int, size: int, generator: Generator, held_out: bool) -> Rows:
    """Draw expressions of at most ``size`` tokens, each between half of that and all of it.

    They stand at the end of their row, after padding, with ``=`` behind them, where the value is
    asked for.
    """
    tokens = torch.full((count, size + 1), PAD)
    labels = torch.full_like(tokens, ASKED_NOTHING)
    tokens[:, -1] = EQUALS
    for row, label in zip(tokens, labels, strict=True):
        expression, value = draw_expression(size, generator)
        while len(expression) < size // 2:
            expression, value = draw_expression(size, generator)
        row[-1 - len(expression) : -1] = torch.tensor(expression)
        label[-1] = value
    return Rows(tokens, labels)


LISTOPS = Task(
    name="listops",
    about="the value of nested lists (arXiv:1804.06028, shorter)",
    vocabulary=len(NAMES),
    draw=draw_listops,
    train_sizes=(12, 24),
    test_sizes=(12, 24),
    size_is="tokens",
    steps=800,
    batch=64,
    chance=0.1,
)
