"""Models whose weights lie in parts on several processes: how they are made whole again."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast
from torch import nn

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 holds a model's weights, which are whole during a module's pass only."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in model.parameters())


def filled(accelerator: Accelerator, wrapped: Any, model: nn.Module) -> nn.Module:
    """Give a model the weights of a sharded one, on every process.

    Args:
        accelerator: That prepared the sharded model.
        wrapped: The sharded model.
        model: Of the same parameters, not prepared.
    """
    state = accelerator.get_state_dict(wrapped)  # whole on the main process alone
    if accelerator.is_main_process:
        model.load_state_dict(state, strict=False)  # tied weights stand in it once
    model.to(accelerator.device)
    for x in (*model.parameters(), *model.buffers()):
        x.data.copy_(broadcast(x.data, from_process=0))
    return model
