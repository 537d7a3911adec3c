"""Table of block configs: chunk, warps, stages and tile per architecture, kernel and shape.

Kernels are not autotuned at the first call; each compiles once.

- ``python -m tools.triton_configs.select_configs`` writes ``shipped.json`` without a GPU.
- ``python -m tools.triton_configs.compile_aot`` compiles every row and prints registers, spills and
  shared memory.
- ``python -m tools.triton_configs.tune`` measures configs on a GPU and writes a table of the same
  format, which the environment variable ``ATTNZOO_KERNEL_TABLE`` selects.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from attnzoo.ops.linear.triton.compilers import miscompiles_tile

# split_sums_kernel; out_kernel, twice ("shared" computes statistics); query_gradient_kernel;
# key_gradient_kernel, twice
KERNELS = ("sums", "out", "shared", "dq", "dv", "dk")
DECAYS = ("none", "scalar", "vector")
# bare: bfloat16 without feature map and normalisation; mapped: with a feature map or normalised;
# any: with sizes that are not powers of two; wide: float32 operands (float32 and float16 inputs)
KINDS = ("bare", "mapped", "any", "wide")
SIZES = (64, 128, 256)  # in the table; smaller sizes use the row of 64
TABLE = "ATTNZOO_KERNEL_TABLE"  # environment variable: path of a table that tune has written
SHIPPED = Path(__file__).parent / "shipped.json"
# Shared memory limit of a block, in bytes; no GPU that uses the rows of sm_80 has a lower limit
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}


class Config(NamedTuple):
    """Compile-time constants of one kernel."""

    chunk: int  # C, in tokens
    warps: int
    stages: int  # chunks whose loads are pipelined
    tile: int  # columns of the state per program


class Shape(NamedTuple):
    """Key of a config, without the architecture."""

    kernel: str  # of KERNELS
    decay: str  # of DECAYS
    kind: str  # of KINDS
    size: int  # padded size of the dimension that the products contract, a power of two


@cache
def table(path: Path | str) -> dict[str, Config]:
    """Return the configs of a table by key."""
    rows = json.loads(Path(path).read_text("utf-8"))
    return {key: Config(*chosen) for key, chosen in rows["configs"].items()}


def key(shape: Shape, capability: int) -> str:
    """Return the key of a table row, for a compute capability such as 90.

    Hopper and later data-centre GPUs use the rows of sm_90. All others have less shared memory and
    no warp-group products, and use those of sm_80.
    """
    arch = 90 if 90 <= capability < 120 else 80
    return f"sm_{arch} {shape.kernel} {shape.decay} {shape.kind} {max(64, shape.size)}"


def default_config(shape: Shape, capability: int) -> Config:
    """Return the shipped config for a compute capability, such as 80 or 90."""
    return table(SHIPPED)[key(shape, capability)]


def avoid_defects(chosen: Config, capability: int) -> Config:
    """Return a config without the pairs of tile and warps that Triton compiles wrongly.

    More warps per tile need fewer registers per thread, and the same shared memory.
    """
    wrong = miscompiles_tile(chosen.tile, chosen.warps, capability)
    return chosen._replace(warps=8) if wrong else chosen


def config(shape: Shape, capability: int) -> Config:
    """Return the config from the table that ``TABLE`` names if it has one, else the shipped one.

    Pairs of tile and warps that the installed Triton is reported to compile wrongly are replaced.
    """
    path = os.environ.get(TABLE)
    row = table(path).get(key(shape, capability)) if path else None
    return avoid_defects(row or default_config(shape, capability), capability)
