"""Which block shapes each kernel runs with: fixed, per architecture and shape, in one table.

Nothing is tuned at the first call, so a cold process compiles one variant of each kernel and no
more. ``python -m attnzoo.kernels.ahead`` compiles all of these without a GPU and shows registers,
spills and shared memory; ``python -m attnzoo.kernels.tune`` measures others on one, and writes a
table that ``ATTNZOO_KERNEL_TABLE`` names.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

KERNELS = ("sums", "out", "shared", "dq", "dv", "dk")  # the span sums, and the modes of the sweep
DECAYS = ("none", "scalar", "vector")
TABLE = "ATTNZOO_KERNEL_TABLE"  # environment variable: the path of a table that tune has written


class Config(NamedTuple):
    """How one kernel is compiled."""

    chunk: int  # C, tokens at a time
    warps: int
    stages: int  # loads in flight, in chunks


class Shape(NamedTuple):
    """What a choice depends on."""

    kernel: str  # of KERNELS
    decay: str  # of DECAYS
    wide: bool  # operands are float32, not bfloat16
    size: int  # rows of the state: the size of what is multiplied inside, a power of two


def default_config(shape: Shape, capability: int) -> Config:
    """Return the shipped config for a compute capability, 80 or 90 and later."""
    vector, scalar = shape.decay == "vector", shape.decay == "scalar"
    if capability < 90:
        chunk = 16 if shape.wide or vector or scalar else 32
        return Config(chunk, 8, 2 if vector and shape.kernel == "dv" else 1)
    chunk = 16 if shape.wide or vector or (scalar and shape.kernel == "dk") else 32
    return Config(chunk, 8, 2)


def state_tile(x: int, u: int, wide: bool, capability: int) -> tuple[int, int]:
    """Return the block of a state that one program keeps, for its padded sizes.

    8192 float32 numbers are 32 registers for each thread of eight warps; what is left holds a block
    of scores, rows of a result, and features and products on their way.
    """
    room = 4096 if wide or capability < 90 else 8192
    return x, min(u, max(16, room // x))


@cache
def measured_table(path: str) -> dict[str, Config]:
    """Read a table that ``attnzoo.kernels.tune`` has written."""
    rows = json.loads(Path(path).read_text("utf-8"))
    return {row["key"]: Config(*row["config"]) for row in rows["configs"]}


def key(shape: Shape, capability: int) -> str:
    """Name a choice in a table."""
    operands = "wide" if shape.wide else "bf16"
    return f"sm_{capability} {shape.kernel} {shape.decay} {operands} {shape.size}"


def config(shape: Shape, capability: int) -> Config:
    """Return a config: of the table that the environment names, else the shipped one."""
    path = os.environ.get(TABLE)
    if path:
        found = measured_table(path).get(key(shape, capability))
        if found is not None:
            return found
    return default_config(shape, capability)
