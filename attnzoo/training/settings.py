"""What the settings of a run need of the machine and of the processes that are launched."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedType

from attnzoo.errors import ConfigError
from attnzoo.training.loop import LoopConfig
from attnzoo.training.optimizer import require_optimizer


def require_settings(config: LoopConfig, accelerator: Accelerator) -> None:
    """Raise an error for settings that do not run here, before a run writes anything.

    Args:
        config: The settings.
        accelerator: That of the run.

    Raises:
        ConfigError: As :func:`require_optimizer` and :func:`require_offloading`, or DeepSpeed runs
            with ``torch_compile``.
        UnsupportedError: As :func:`require_optimizer`.
    """
    require_optimizer(config.optim, accelerator)
    if config.activation_offloading:
        require_offloading(accelerator)
    if config.torch_compile and accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ConfigError(
            "torch_compile compiles layers in place, which DeepSpeed's engine wraps; leave it out, "
            "or train with DDP or FSDP2"
        )


def require_offloading(accelerator: Accelerator) -> None:
    """Raise an error if activations cannot be moved to CPU memory.

    Args:
        accelerator: That of the run.

    Raises:
        ConfigError: They are there already, or DeepSpeed runs.
    """
    if accelerator.device.type in ("cpu", "mps"):
        raise ConfigError(
            "activation_offloading=True moves activations from the memory of a GPU to that of the "
            f"CPU, but on the device {accelerator.device.type!r} they are there already; leave it "
            "out. gradient_checkpointing saves memory on every device"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ConfigError(
            "activation_offloading=True does not go with DeepSpeed: ZeRO-3 replaces the data of "
            "weights that autograd saves, and hooks of autograd would keep the old data. Leave it "
            "out, or train with the launch config fsdp2 or ddp"
        )
