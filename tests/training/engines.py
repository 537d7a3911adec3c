"""Training engines on CPUs, over gloo, as arguments of ``Trainer`` set them up on GPUs.

Without GPUs, Accelerate joins processes with ``cpu=True`` only, which rules out FSDP and DeepSpeed.
Here it is told that each process has a GPU, whose device is the CPU.
"""

import importlib
import os
from contextlib import contextmanager
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from attnzoo.training.trainer import StageTrainer

ENGINES = ("ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3")


@contextmanager
def engine(name):
    """Context in which recovery trains with the engine of :func:`engine_arguments`.

    Each step checks that the model is what they say.

    Args:
        name: One of :data:`ENGINES`.
    """
    step = StageTrainer.training_step

    def checked_step(trainer, model, *given, **options):
        require_engine(name, trainer.accelerator, model, trainer.state.global_step)
        return step(trainer, model, *given, **options)

    def set_device(state):
        state.device = torch.device("cpu")

    environment = {
        "ACCELERATE_USE_CPU": "false",
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_BYPASS_DEVICE_MAP": "true",  # DDP without the number of a GPU
        "DS_ACCELERATOR": "cpu",
    }
    gpus = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)  # noqa: E731
    if name.startswith("deepspeed"):
        communication = importlib.import_module("deepspeed.comm.torch")
        communication.build_shm_op = lambda: None  # a minute of compilation; gloo suffices
    reset_state()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(PartialState, "_prepare_backend", gpus),
        mock.patch.object(PartialState, "set_device", set_device),
        mock.patch.object(StageTrainer, "training_step", checked_step),
    ):
        yield
    reset_state()


def reset_state():
    """Let Accelerate set its processes up anew."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def engine_arguments(name):
    """Return the arguments of ``Trainer`` that select an engine."""
    if name == "ddp":
        return {}
    if name == "fsdp2":
        config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": config}
    config = {
        "zero_optimization": {"stage": int(name[-1])},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    return {"deepspeed": config}


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
        whole = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
        assert not whole, whole
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
