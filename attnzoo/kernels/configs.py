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
    plain: bool  # columns fill their blocks, key heads serve one query head, nothing is masked
    size: int  # rows of the state: the size of what is multiplied inside, a power of two


def default_config(shape: Shape, capability: int) -> Config:
    """Return the shipped config for a compute capability, 80 or 90 and later."""
    small = shape.wide or shape.decay == "vector" or not shape.plain or shape.size > 128
    if capability < 90:
        stages = 2 if shape.decay == "vector" and shape.kernel == "dv" else 1
        warps = 8 if shape.size > 16 else 4
        return Config(16 if small or shape.decay == "scalar" else 32, warps, stages)
    small = small or (shape.decay == "scalar" and shape.kernel == "dk")
    deep = shape.decay == "vector" and shape.size > 128 and shape.kernel in ("out", "shared", "dv")
    return Config(16 if small else 32, 8, 3 if deep else 2)


def state_tile(shape: Shape, u: int, capability: int) -> int:
    """Return the columns of a state that one program keeps, of ``u``, a power of two.

    8192 float32 numbers are 32 registers for each thread of eight warps; what is left holds a block
    of scores, rows of a result, and features and products on their way, addresses and masks.
    """
    roomy = capability >= 90 and shape.plain and not shape.wide and shape.size <= 128
    inner = shape.kernel in ("out", "shared", "dv")  # whose keys, and their decays, are whole
    crowded = shape.decay == "vector" and shape.size <= 128
    crowded = crowded and (capability < 90 or (inner and not shape.plain))
    return min(u, max(16, (8192 if roomy else 2048 if crowded else 4096) // shape.size))


@cache
def measured_table(path: str) -> dict[str, Config]:
    """Read a table that ``attnzoo.kernels.tune`` has written."""
    rows = json.loads(Path(path).read_text("utf-8"))
    return {row["key"]: Config(*row["config"]) for row in rows["configs"]}


def key(shape: Shape, capability: int) -> str:
    """Name a choice in a table."""
    operands = "wide" if shape.wide else "bf16"
    kind = "plain" if shape.plain else "other"
    return f"sm_{capability} {shape.kernel} {shape.decay} {operands} {kind} {shape.size}"


def config(shape: Shape, capability: int) -> Config:
    """Return a config: of the table that the environment names, else the shipped one."""
    path = os.environ.get(TABLE)
    if path:
        found = measured_table(path).get(key(shape, capability))
        if found is not None:
            return found
    return default_config(shape, capability)
