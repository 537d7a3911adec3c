"""Document classification by byte: which library a piece of source code comes from.

After the document classification of Long Range Arena (arXiv:2011.04006), with text that is in the
package: source of the Python standard library. Whole files are held out.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Generator, Tensor

from attnzoo.evaluation.corpus import join, source_files
from attnzoo.tasks.base import IGNORED, LabelledRows, Task

LIBRARIES = ("asyncio", "email", "idlelib", "tkinter")
BYTES = 256
HELD_OUT_EVERY = 4  # one file in four is held out


@cache
def texts(held_out: bool) -> list[Tensor]:
    """Return the bytes of each library as tokens, ``[N]``."""
    found = []
    for library in LIBRARIES:
        files = [x for name, x in source_files().items() if name.rpartition("/")[0] == library]
        part = [text for i, text in enumerate(files) if (i % HELD_OUT_EVERY == 0) == held_out]
        found.append(torch.frombuffer(bytearray(join(part)), dtype=torch.uint8).long())
    return found


def draw_documents(count: int, size: int, generator: Generator, held_out: bool) -> LabelledRows:
    """Draw pieces of ``size`` bytes; the target after the last one is the library."""
    libraries = texts(held_out)
    which = torch.randint(len(libraries), (count,), generator=generator)
    tokens = torch.empty(count, size + 1, dtype=torch.long)
    for row, library in zip(tokens, which.tolist(), strict=True):
        data = libraries[library]
        start = int(torch.randint(len(data) - size, (), generator=generator))
        row[:size] = data[start : start + size]
    tokens[:, -1] = BYTES  # asks for the library
    labels = torch.full_like(tokens, IGNORED)
    labels[:, -1] = which
    return LabelledRows(tokens, labels)


DOCUMENTS = Task(
    name="bytes",
    about="the library that a piece of source code comes from (after arXiv:2011.04006)",
    vocabulary=BYTES + 1,
    draw=draw_documents,
    train_sizes=(256,),
    test_sizes=(256,),
    size_unit="bytes",
    steps=300,
    batch=32,
    chance=1 / len(LIBRARIES),
)
