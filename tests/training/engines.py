"""Training engines on CPUs, over gloo: as the launch configs of GPUs set them up.

Without GPUs, Accelerate joins processes with ``cpu=True`` only, which rules out FSDP and DeepSpeed.
Here it is told that each process has a GPU, whose device is the CPU.
"""

import importlib
import os
import weakref
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from attnzoo.training import sharding

LAUNCH = Path(__file__).resolve().parents[2] / "integrations" / "accelerate" / "configs"
PREFIXES = ("ACCELERATE_", "FSDP_")
ENGINES = ("ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3")


@contextmanager
def engine(name, **changes):
    """Context in which runs train with a launch config, in float32 unless ``changes`` say so.

    Args:
        name: Name of the launch config.
        changes: Further environment variables.

    Yields:
        A list of the Accelerators and of references to the models of the stages.
    """
    made = []

    def make(**options):
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        accelerator = Accelerator(**{**options, "cpu": False})
        prepare = accelerator.prepare

        def record(*given):
            prepared = prepare(*given)
            made.append((accelerator, weakref.ref(prepared[0])))  # it keeps no weights
            return prepared

        accelerator.prepare = record
        return accelerator

    def set_device(state):
        state.device = torch.device("cpu")

    environment = {
        **launch_environment(name),
        "ACCELERATE_USE_CPU": "false",
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_BYPASS_DEVICE_MAP": "true",  # DDP without the number of a GPU
        "DS_ACCELERATOR": "cpu",
        **changes,
    }
    gpus = lambda *_: ("gloo", DistributedType.MULTI_GPU)  # noqa: E731
    if name.startswith("deepspeed"):
        communication = importlib.import_module("deepspeed.comm.torch")
        communication.build_shm_op = lambda: None  # a minute of compilation; gloo suffices
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(PartialState, "_prepare_backend", gpus),
        mock.patch.object(PartialState, "set_device", set_device),
        mock.patch.object(sharding, "Accelerator", make),
    ):
        yield made
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def launch_environment(name):
    """Return the environment variables that ``accelerate launch`` sets for a launch config."""
    arguments = ["--config_file", str(LAUNCH / f"{name}.yaml"), "-m", "attnzoo"]
    arguments, config, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    arguments.main_process_port = 0
    if name.startswith("deepspeed"):
        arguments.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)
        found = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        found = prepare_multi_gpu_env(arguments)
    return {key: value for key, value in found.items() if key.startswith(PREFIXES)}


def require_engine(name, accelerator, model, steps):
    """Raise an error if the model that is trained is not what a launch config says.

    Args:
        name: Name of the launch config.
        accelerator: The Accelerator of the run.
        model: The prepared model.
        steps: Optimizer steps of the stage so far.
    """
    assert accelerator.num_processes == 2
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "ddp":
        assert isinstance(model, DistributedDataParallel), type(model)
    elif name == "fsdp2":
        assert accelerator.is_fsdp2
        assert isinstance(model, FSDPModule), type(model)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        blocks = [m for m in model.modules() if isinstance(m, FSDPModule)]
        assert len(blocks) > 2  # the layers, and the rest
        assert local_share(p.to_local().numel() for p in trained) / full_size(trained) < 0.6
    else:
        require_zero(int(name[-1]), model, trained, steps)


def require_zero(stage: int, model: nn.Module, trained: list[nn.Parameter], steps: int) -> None:
    """Raise an error if DeepSpeed does not shard what a stage of ZeRO shards."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert isinstance(model, DeepSpeedEngine), type(model)
    assert model.zero_optimization_stage() == stage
    assert model.global_steps == steps, (model.global_steps, steps)
    if stage == 3:
        assert all(hasattr(p, "ds_tensor") for p in model.parameters())
        local = local_share(p.ds_tensor.numel() for p in trained)
        assert local / sum(p.ds_numel for p in trained) < 0.6
    else:
        groups = model.optimizer.single_partition_of_fp32_groups
        assert local_share(x.numel() for x in groups) / full_size(trained) < 0.6


def local_share(sizes) -> int:
    return sum(sizes)


def full_size(parameters) -> int:
    return sum(p.numel() for p in parameters)
