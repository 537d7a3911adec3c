"""Which block shapes each kernel runs with: fixed, per architecture and shape, in one table.

Nothing is tuned at the first call, so a cold process compiles one variant of each kernel and no
more. ``python -m attnzoo.kernels.choose`` has chosen what ``shipped.json`` says, without a GPU;
``python -m attnzoo.kernels.ahead`` compiles all of it and shows registers, spills, shared memory;
``python -m attnzoo.kernels.tune`` measures others on a GPU, and writes a table of the same form
that ``ATTNZOO_KERNEL_TABLE`` names.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

KERNELS = ("sums", "out", "shared", "dq", "dv", "dk")  # the span sums, and the modes of the sweep
DECAYS = ("none", "scalar", "vector")
# bfloat16: sums of weighed values and no more; with a feature map or divided; masked, or of sizes
# that are no powers of two. float32, or float16 taken for it
KINDS = ("bare", "mapped", "any", "wide")
SIZES = (64, 128, 256)  # of the table; smaller states take the row of 64
TABLE = "ATTNZOO_KERNEL_TABLE"  # environment variable: the path of a table that tune has written
SHIPPED = Path(__file__).parent / "shipped.json"
# bytes of shared memory that one block may have; what runs with the rows of sm_80 may have less
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}


class Config(NamedTuple):
    """How one kernel is compiled."""

    chunk: int  # C, tokens at a time
    warps: int
    stages: int  # loads in flight, in chunks
    tile: int  # columns of the state that one program keeps


class Shape(NamedTuple):
    """What a choice depends on."""

    kernel: str  # of KERNELS
    decay: str  # of DECAYS
    kind: str  # of KINDS
    size: int  # rows of the state: the size of what is multiplied inside, a power of two


@cache
def table(path: Path | str) -> dict[str, Config]:
    """Read a table of configs by key."""
    rows = json.loads(Path(path).read_text("utf-8"))
    return {key: Config(*chosen) for key, chosen in rows["configs"].items()}


def key(shape: Shape, capability: int) -> str:
    """Name a choice in a table, for a compute capability such as 90.

    Data-centre GPUs of the generations after Hopper take its rows; all others, which have less
    shared memory and no products of whole warp groups, those of sm_80.
    """
    arch = 90 if 90 <= capability < 120 else 80
    return f"sm_{arch} {shape.kernel} {shape.decay} {shape.kind} {max(64, shape.size)}"


def default_config(shape: Shape, capability: int) -> Config:
    """Return the shipped config for a compute capability, such as 80 or 90."""
    return table(SHIPPED)[key(shape, capability)]


def config(shape: Shape, capability: int) -> Config:
    """Return a config: of the table that the environment names, else the shipped one."""
    path = os.environ.get(TABLE)
    found = table(path).get(key(shape, capability)) if path else None
    return found or default_config(shape, capability)
