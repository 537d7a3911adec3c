"""Processes of a run: Accelerate, sharded weights (FSDP, DeepSpeed), the context-parallel mesh."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import (
    DistributedType,
    broadcast,
    broadcast_object_list,
    gather_object,
    get_int_from_env,
    parse_flag_from_env,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from attnzoo.errors import ConfigError
from attnzoo.evaluation.rows import IGNORE_INDEX

SECONDS_UNTIL_SEEN = 60.0  # NFS keeps that a file does not exist for up to acdirmax, 60 s
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
WORLD_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def make_accelerator(
    seed: int,
    *,
    tracker: str | None,
    logs: Path,
    precision: str | None = None,
    clip: float | None = None,
) -> Accelerator:
    """Return an Accelerator for all launched processes, with a seeded order of the rows.

    Each batch is split over the processes. On a machine without an accelerator, Accelerate sets up
    the processes that torchrun starts only with ``cpu=True``.

    Args:
        seed: Seed of the order.
        tracker: Name of a tracker, if any.
        logs: Folder of the tracker's logs.
        precision: As in ``LoopConfig``. For ``"fp16"``, the Accelerator scales the loss.
        clip: Largest gradient norm, which DeepSpeed applies itself.

    Raises:
        ConfigError: Accelerate does not see all launched processes, ``precision`` needs a GPU, or
            the launch config accumulates or clips gradients in another way.
    """
    if precision == "fp16" and not torch.accelerator.is_available():
        raise ConfigError(
            "precision='fp16' scales the loss, which Accelerate does on GPUs only, and this "
            "machine has none; use 'bf16', which needs no scaling, or 'no'"
        )
    torch.manual_seed(seed)
    launched = get_int_from_env(WORLD_SIZE, 1)
    # Autocast is the loop's own, but FSDP and DeepSpeed cast weights too, and DeepSpeed disables
    # autocast that is not its own
    own_autocast = precision == "bf16" and not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    accelerator = Accelerator(
        cpu=launched > 1 and not torch.accelerator.is_available(),
        mixed_precision=None if own_autocast else precision,
        log_with=tracker,
        project_dir=str(logs) if tracker else None,
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=seed
        ),
        step_scheduler_with_optimizer=False,
    )
    if accelerator.num_processes != launched:
        raise ConfigError(
            f"{launched} processes are launched, but Accelerate sees {accelerator.num_processes}, "
            "so each would train a model of its own in the same folder. Start them with torchrun "
            "or accelerate launch, and create no Accelerator before"
        )
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        set_up_deepspeed(plugin.deepspeed_config, clip)
    if accelerator.gradient_accumulation_steps != 1:
        raise _accumulation_error(accelerator.gradient_accumulation_steps)
    return accelerator


def check_folders(accelerator: Accelerator, folder: Path, checkpoint: Path | None) -> None:
    """Check the folders of a run on all processes, before it starts.

    Args:
        accelerator: That of the run.
        folder: Folder of the checkpoints.
        checkpoint: The checkpoint to resume from; ``None`` for a new run.

    Raises:
        ConfigError: As :func:`require_shared_folder` and :func:`check_world_size`.
    """
    require_shared_folder(accelerator, folder)
    if checkpoint is not None:
        check_world_size(accelerator, checkpoint)


def require_shared_folder(accelerator: Accelerator, folder: Path) -> None:
    """Raise an error if a process does not see a file that the first process writes.

    Checkpoints have files of all processes. On nodes that share no file system, each would have a
    part of them, and the run could not be resumed. Called by all processes, which all raise.

    Args:
        accelerator: That of the run.
        folder: A folder of the run, which exists on the node of the first process.

    Raises:
        ConfigError: The folder is not shared.
    """
    if accelerator.num_processes == 1:
        return
    (name,) = broadcast_object_list([f"probe-{uuid.uuid4().hex}"])
    probe = folder / name
    if accelerator.is_main_process:
        probe.touch()
    accelerator.wait_for_everyone()
    seen = _appears(probe)
    found = gather_object([(accelerator.process_index, socket.gethostname(), seen)])
    if accelerator.is_main_process:
        probe.unlink()
    blind = [f"{rank} on {host}" for rank, host, seen in found if not seen]
    if blind:
        raise ConfigError(
            f"--out {str(folder.parent)!r} is not on a file system that all nodes share: process "
            f"{', '.join(blind)} does not see what process 0 on {found[0][1]} writes there, so no "
            "checkpoint would be complete. Give --out a folder of a shared file system, with the "
            "same path on all nodes"
        )


def _appears(path: Path) -> bool:
    """Return whether a file exists within the time for which network file systems cache names."""
    end = time.monotonic() + SECONDS_UNTIL_SEEN
    while not path.exists():
        if time.monotonic() > end:
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # NFS looks again
        time.sleep(0.1)
    return True


def check_world_size(accelerator: Accelerator, checkpoint: Path) -> None:
    """Raise an error if sharded weights were saved by another number of processes.

    Without sharding, a checkpoint can be resumed on any number.

    Args:
        accelerator: That of the run.
        checkpoint: Folder of the checkpoint.

    Raises:
        ConfigError: The numbers differ under FSDP or DeepSpeed.
    """
    saved = len(list(checkpoint.glob("random_states_*.pkl")))  # Accelerate writes one a process
    if accelerator.distributed_type in SHARDED and saved != accelerator.num_processes:
        raise ConfigError(
            f"The checkpoint {str(checkpoint)!r} has the shards of {saved} processes, but "
            f"{accelerator.num_processes} run; resume on {saved}, or train with the launch config "
            "ddp, which resumes on any number"
        )


def set_up_deepspeed(config: dict[str, Any], clip: float | None) -> None:
    """Set DeepSpeed up for models that are built whole, and for the steps of the loop.

    Args:
        config: The config of the launch, to which ``clip`` is added.
        clip: Largest gradient norm; ``None`` for that of the launch.

    Raises:
        ConfigError: The config contradicts the loop.
    """
    # Accelerate registers ZeRO-3 with transformers, whatever zero3_init_flag says. Models would be
    # built in shards, but a swap reads the weights while a model is built.
    unset_hf_deepspeed_config()
    if (steps := config.get("gradient_accumulation_steps", 1)) not in (1, "auto"):
        raise _accumulation_error(steps)
    if clip is not None:
        given = config.get("gradient_clipping", "auto")
        if given not in ("auto", clip):
            raise ConfigError(
                f"gradient_clipping={given} of the DeepSpeed config is not the clip of this run, "
                f"{clip}; remove it there"
            )
        config["gradient_clipping"] = clip


def _accumulation_error(steps: int) -> ConfigError:
    return ConfigError(
        f"gradient_accumulation_steps={steps} of the launch config would divide each loss again; "
        "set it to 1 there, and give --accumulate"
    )


def accumulate_gradients(
    accelerator: Accelerator, model: nn.Module, *, last: bool
) -> AbstractContextManager[Any]:
    """Return the context of the forward and backward pass of one of a step's micro-batches.

    Args:
        accelerator: The Accelerator.
        model: The prepared model.
        last: Whether the step follows; gradients are synchronised over processes here only.
    """
    accelerator.sync_gradients = last  # DeepSpeed steps in the backward pass where this is set
    return nullcontext() if last else accelerator.no_sync(model)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 shards a model's weights."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def gather_weights(
    accelerator: Accelerator, sharded: Any, rebuild: Callable[[], nn.Module]
) -> nn.Module:
    """Return a model with the full weights of a sharded one, on each process.

    Args:
        accelerator: The Accelerator that prepared the sharded model.
        sharded: The sharded model.
        rebuild: Returns an unprepared model with the same parameters.
    """
    state = accelerator.get_state_dict(sharded)  # complete on the main process only
    model = rebuild()
    if accelerator.is_main_process:
        model.load_state_dict(state, strict=False)  # has one name for tied weights
    model.to(accelerator.device)
    for x in (*model.parameters(), *model.buffers()):
        x.data.copy_(broadcast(x.data, from_process=0))
    return model


def context_mesh(accelerator: Accelerator, cp_size: int) -> DeviceMesh | None:
    """Return the process mesh with dimensions ``dp_replicate`` and ``cp``, Accelerate's names.

    Accelerate's own ``cp_size`` enables torch's context parallelism, which supports torch's
    attention only.

    Raises:
        ConfigError: The number of processes is not divisible by ``cp_size``.
    """
    if cp_size == 1:
        return None
    config = accelerator.parallelism_config
    if config is not None and (config.cp_enabled or config.sp_enabled):
        raise ConfigError(
            "Accelerate is launched with its own cp_size or sp_size, which supports torch's "
            "attention only; remove it there and give --cp-size alone"
        )
    count = accelerator.num_processes
    if count % cp_size:
        raise ConfigError(
            f"{count} processes do not divide into groups of cp_size={cp_size} that share rows; "
            f"start a multiple of {cp_size}, such as torchrun --nproc-per-node {cp_size}"
        )
    shape, names = (count // cp_size, cp_size), ("dp_replicate", "cp")
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)


def prepare_cp_loader(accelerator: Accelerator, loader: DataLoader[Any], mesh: DeviceMesh) -> Any:
    """Prepare a loader that gives all processes of one ``cp`` group the same batches."""
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


def with_label_counts(
    accelerator: Accelerator, batches: list[Mapping[str, Tensor]]
) -> list[Mapping[str, Tensor]]:
    """Add ``num_items_in_batch``, by which losses over labels are divided, to micro-batches.

    It is the mean number of labels per micro-batch and process. The mean of the gradients is then
    that of one batch, also where micro-batches have different numbers of labels.
    """
    if "labels" not in batches[0]:  # of encoders
        return batches
    numbers = [(batch["labels"][:, 1:] != IGNORE_INDEX).sum() for batch in batches]
    mean = accelerator.reduce(torch.stack(numbers).float().mean(), "mean")
    return [{**batch, "num_items_in_batch": mean.clamp(min=1)} for batch in batches]


def zero_loss(groups: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return a zero with a gradient (of zeros) for every parameter of the groups of an optimizer.

    torch's DistributedDataParallel waits for the gradient of every parameter, but a window as wide
    as the rows gives the linear branch none.
    """
    total = torch.zeros((), device=groups[0]["params"][0].device)
    for group in groups:
        for parameter in group["params"]:
            total = total + 0 * parameter.float().sum()
    return total
