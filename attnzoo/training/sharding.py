"""What lies in parts on several processes: weights, and how they are made whole again; rows."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType, broadcast
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

from attnzoo.errors import ConfigError

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


def context_mesh(accelerator: Accelerator, cp_size: int) -> DeviceMesh | None:
    """Return the processes by row and by share of a row, named as Accelerate names them.

    Accelerate's own ``cp_size`` would bring torch's context parallelism, for torch's attention.

    Raises:
        ConfigError: The processes do not divide into groups of ``cp_size``.
    """
    if cp_size == 1:
        return None
    config = accelerator.parallelism_config
    if config is not None and (config.cp_enabled or config.sp_enabled):
        raise ConfigError(
            "Accelerate is launched with a cp_size or sp_size of its own, which serves torch's "
            "attention only; leave it out there, and give --cp-size alone"
        )
    count = accelerator.num_processes
    if count % cp_size:
        raise ConfigError(
            f"{count} processes do not divide into groups of cp_size={cp_size} that share rows; "
            f"start a multiple of {cp_size}, such as torchrun --nproc-per-node {cp_size}"
        )
    shape, names = (count // cp_size, cp_size), ("dp_replicate", "cp")
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)


def same_rows(accelerator: Accelerator, loader: DataLoader[Any], mesh: DeviceMesh) -> Any:
    """Prepare a loader that gives processes which share rows the same batches."""
    prepared: Any = prepare_data_loader(
        loader,
        accelerator.device,
        split_batches=True,
        put_on_device=True,
        rng_types=list(accelerator.rng_types),
        use_seedable_sampler=True,
        data_seed=accelerator.dataloader_config.data_seed,
        torch_device_mesh=mesh,
    )
    prepared._is_accelerate_prepared = True
    return prepared
