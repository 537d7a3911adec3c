"""Which library a piece of source code is from, byte by byte.

In the style of Long Range Arena's document classification (arXiv:2011.04006), on text that is on
every machine: the Python standard library. Files are held out whole.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Generator, Tensor

from attnzoo.corpus import read_bytes
from attnzoo.tasks.base import ASKED_NOTHING, Rows, Task

LIBRARIES = ("asyncio", "email", "idlelib", "tkinter")
BYTES = 256
EVERY = 4  # one file of so many is held out


@cache
def texts(held_out: bool) -> list[Tensor]:
    """Return the bytes of every library, ``[N]`` each."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for name in LIBRARIES:
        files = sorted((root / name).glob("*.py"))
        part = [f for i, f in enumerate(files) if (i % EVERY == 0) == held_out]
        found.append(torch.frombuffer(bytearray(read_bytes(part)), dtype=torch.uint8).long())
    return found


def draw_documents(count: int, size: int, generator: Generator, held_out: bool) -> Rows:
    """Draw pieces of ``size`` bytes; after the last one, the library is asked for."""
    every = texts(held_out)
    which = torch.randint(len(every), (count,), generator=generator)
    tokens = torch.empty(count, size + 1, dtype=torch.long)
    for row, library in zip(tokens, which.tolist(), strict=True):
        data = every[library]
        start = int(torch.randint(len(data) - size, (), generator=generator))
        row[:size] = data[start : start + size]
    tokens[:, -1] = BYTES  # the question
    labels = torch.full_like(tokens, ASKED_NOTHING)
    labels[:, -1] = which
    return Rows(tokens, labels)


DOCUMENTS = Task(
    name="bytes",
    about="the library that a piece of source code is from (after arXiv:2011.04006)",
    vocabulary=BYTES + 1,
    draw=draw_documents,
    train_sizes=(256,),
    test_sizes=(256,),
    size_is="bytes",
    steps=300,
    batch=32,
    chance=1 / len(LIBRARIES),
)
