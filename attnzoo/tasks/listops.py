"""ListOps: nested lists of digits with minimum, maximum, median and sum modulo ten.

Source: Nangia and Bowman, 2018, arXiv:1804.06028. Sequences are shorter than in Long Range Arena
(arXiv:2011.04006).
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median_low

import torch
from torch import Generator

from attnzoo.tasks.base import IGNORED, LabelledRows, Task

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": median_low,
    "SM": lambda values: sum(values) % 10,
}
NAMES = [*map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]", "=", "pad"]
CLOSE, EQUALS, PAD = NAMES.index("]"), NAMES.index("="), NAMES.index("pad")
NESTING_PROBABILITY = 0.25  # that an argument is a list
MAX_ARGUMENTS = 5
MAX_DEPTH = 4


def draw_expression(max_tokens: int, generator: Generator, depth: int = 1) -> tuple[list[int], int]:
    """Draw an expression of at most ``max_tokens`` tokens; return its tokens and its value."""

    def number(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    operator = number(len(OPERATORS))
    tokens, values = [10 + operator], []
    for _ in range(2 + number(MAX_ARGUMENTS - 1)):
        left = max_tokens - len(tokens) - 1
        if left < 1:
            break
        inside = depth < MAX_DEPTH and left >= 4 and number(1000) < 1000 * NESTING_PROBABILITY
        part, value = draw_expression(left, generator, depth + 1) if inside else ([], number(10))
        tokens += part or [value]
        values.append(value)
    return [*tokens, CLOSE], list(OPERATORS.values())[operator](values)


def draw_listops(count: int, size: int, generator: Generator, held_out: bool) -> LabelledRows:
    """Draw expressions of ``size // 2`` to ``size`` tokens.

    Each row is padded on the left and ends with ``=``, whose target is the value.
    """
    tokens = torch.full((count, size + 1), PAD)
    labels = torch.full_like(tokens, IGNORED)
    tokens[:, -1] = EQUALS
    for row, label in zip(tokens, labels, strict=True):
        expression, value = draw_expression(size, generator)
        while len(expression) < size // 2:
            expression, value = draw_expression(size, generator)
        row[-1 - len(expression) : -1] = torch.tensor(expression)
        label[-1] = value
    return LabelledRows(tokens, labels)


LISTOPS = Task(
    name="listops",
    about="the value of nested lists (arXiv:1804.06028, shorter)",
    vocabulary=len(NAMES),
    draw=draw_listops,
    train_sizes=(12, 24),
    test_sizes=(12, 24),
    size_unit="tokens",
    steps=800,
    batch=64,
    chance=0.1,
)
