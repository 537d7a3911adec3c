"""Frozen weights in bfloat16 or in 4 bits, beside parameters that are trained in float32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import nn

from attnzoo.errors import ConfigError
from attnzoo.training.four_bits import require_bitsandbytes
from attnzoo.training.sharding import SHARDED


def require_frozen_weights(dtype: str, load_in_4bit: bool, accelerator: Accelerator) -> None:
    """Raise an error if frozen weights cannot have a data type in a run.

    Args:
        dtype: As in ``TrainConfig``.
        load_in_4bit: As in ``TrainConfig``.
        accelerator: That of the run.

    Raises:
        UnsupportedError: bitsandbytes, which 4 bits need, is not installed.
        ConfigError: FSDP or DeepSpeed shards weights of several data types.
    """
    if load_in_4bit:
        require_bitsandbytes()
    if dtype != "float32" and accelerator.distributed_type in SHARDED:
        raise ConfigError(
            "FSDP and DeepSpeed shard weights of one data type, but those that are trained are in "
            "float32; leave dtype and load_in_4bit out (precision='bf16' gathers weights in "
            "bfloat16), or start with torchrun alone"
        )


def widen(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, torch.dtype]:
    """Cast parameters to float32, in which they are trained; return the types of those cast."""
    narrow = {p: p.dtype for p in parameters if p.dtype != torch.float32}
    for parameter in narrow:
        parameter.data = parameter.data.float()
    return narrow


def narrow_again(types: dict[nn.Parameter, torch.dtype]) -> None:
    """Cast parameters back to the data types that :func:`widen` returned."""
    for parameter, dtype in types.items():
        parameter.data = parameter.data.to(dtype)
