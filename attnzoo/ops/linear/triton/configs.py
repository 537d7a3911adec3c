"""The configs between which Triton's autotuner chooses: tokens of a chunk, warps and stages.

A kernel is compiled with each at the first call of a kind, and the fastest runs from then on; those
that need more shared memory than the GPU has are skipped. The interpreter has one config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

from attnzoo.runtime.compilers import miscompiles_tile
from attnzoo.runtime.triton_interpreter import interpreted
from attnzoo.runtime.triton_products import block_size

CHUNK_BYTES = 2**14  # of the rows of a chunk; larger ones spill, and take minutes to compile
STATE_ELEMENTS = 8192  # of a tile of a state: 64 registers per thread of 4 warps

if interpreted():
    CONFIGS = [triton.Config({"C": 16})]
else:
    CONFIGS = [
        triton.Config({"C": chunk}, num_warps=warps, num_stages=stages)
        for chunk, warps, stages in (
            *((64, 4, 2), (64, 8, 3)),
            *((32, 4, 2), (32, 8, 2)),
            (16, 8, 1),  # needs the least shared memory
        )
    ]


def tile_columns(inner: int, outer: int, *, wide: bool) -> int:
    """Return the columns of a tile of a state: as many as fit into the registers of a program.

    Args:
        inner: Size of the dimension that the products contract, a power of two.
        outer: Size of the dimension that tiles divide.
        wide: Whether operands are float32.
    """
    return min(block_size(outer), max(16, STATE_ELEMENTS // inner // (2 if wide else 1)))


def autotuned(*names: str) -> Callable[[Any], Any]:
    """Return a decorator of a kernel that is tuned for sizes, options and some more constants."""
    key = ["D", "E", "G", "BU", "MAP", "DECAY", "NORMALIZE", "PRECISION", "VARLEN", *names]
    prune = {"early_config_prune": usable}
    return triton.autotune(CONFIGS, key=key, prune_configs_by=prune)  # type: ignore[no-any-return]


def usable(configs: list[Any], arguments: Any, **constants: Any) -> list[Any]:
    """Return the configs that compile in seconds, and are not known to compile wrongly."""
    capability = triton.runtime.driver.active.get_current_target().arch
    row = constants["BX"] * constants["OPERAND"].primitive_bitwidth // 8
    return [
        x
        for x in configs
        if x.kwargs["C"] * row <= CHUNK_BYTES
        and not miscompiles_tile(constants["BU"], x.num_warps, capability)
    ]
