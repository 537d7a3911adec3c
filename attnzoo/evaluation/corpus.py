"""Source of the Python standard library as text, cut into token rows.

The embedded model is trained on one split of it and evaluated on files of the other. Half of the
training rows, and all recall rows, contain one segment twice. A model cannot predict the second
copy without attending beyond its window, so the loss on the copy shows whether an approximation
keeps long-range recall.

The held-out files are in the package, as Python 3.11.7 has them: those of the Python that runs
would give other numbers (``tools/python_text.py``).
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

VERSION = "3.11.7"  # of Python
SOURCES = Path(__file__).parents[1] / "assets" / f"python-{VERSION}" / "sources.zip"
HELD_OUT_PERCENT = 5


def is_held_out(name: str) -> bool:
    """Whether a file is in the held-out split; depends on its name only, so all machines agree."""
    return (
        int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT
    )


@cache
def source_files() -> dict[str, bytes]:
    """Return the files in the package by their names, such as ``"email/parser.py"``, in order.

    They are the held-out files and those of :data:`attnzoo.tasks.documents.LIBRARIES`.
    """
    with zipfile.ZipFile(SOURCES) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def held_out_files() -> list[bytes]:
    """Return the contents of the held-out files, sorted by name."""
    return [content for name, content in source_files().items() if is_held_out(name)]


def join(files: Iterable[bytes]) -> bytes:
    """Concatenate the contents of files, separated by a newline."""
    return b"\n".join(files)


BYTE_OFFSET = 3  # ByT5's tokens 0, 1, 2 are pad, end and unknown; byte b is token b + 3


def byte_tokens(data: bytes) -> Tensor:
    """Return the tokens of ``data`` under ByT5's tokenizer, ``[N]``, without the end token."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long() + BYTE_OFFSET


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A segment that occurs twice in a row: ``length`` tokens at ``first`` and at ``second``."""

    first: int
    second: int
    length: int


def place_repeat(row_length: int, generator: torch.Generator, *, min_distance: int = 96) -> Repeat:
    """Draw a repeat with at least ``min_distance`` tokens between the two copies."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    longest = min(160, (row_length - min_distance) // 3)
    length = draw(min(48, longest), longest)
    first = draw(0, row_length - 2 * length - min_distance)
    second = draw(first + length + min_distance, row_length - length)
    return Repeat(first=first, second=second, length=length)


def cut_rows(tokens: Tensor, count: int, row_length: int, generator: torch.Generator) -> Tensor:
    """Cut rows at random positions of ``tokens [N]`` and return them, ``[count, row_length]``."""
    if len(tokens) < row_length:
        raise ValueError(
            f"the text has {len(tokens)} tokens, but one row needs {row_length}; give more text or "
            "shorter rows"
        )
    starts = torch.randint(0, len(tokens) - row_length + 1, (count,), generator=generator)
    return tokens[starts[:, None] + torch.arange(row_length)]


def add_repeats(
    rows: Tensor, generator: torch.Generator, *, share: float = 1.0
) -> list[Repeat | None]:
    """Write one repeat into a fraction of ``rows [N, T]``, in place.

    Args:
        rows: Token rows, modified in place.
        generator: Draws the positions.
        share: Fraction of the rows that get a repeat.

    Returns:
        The repeat of each row; ``None`` for a row without one.
    """
    repeats: list[Repeat | None] = []
    for row in rows:
        if share < 1.0 and float(torch.rand((), generator=generator)) >= share:
            repeats.append(None)
            continue
        repeat = place_repeat(len(row), generator)
        row[repeat.second : repeat.second + repeat.length] = row[
            repeat.first : repeat.first + repeat.length
        ].clone()
        repeats.append(repeat)
    return repeats
