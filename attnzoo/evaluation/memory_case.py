"""What memory is computed for: a model, an attention, sizes, a loss and processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.evaluation.models import spec_label
from attnzoo.spec import AttentionSpec


class TrainingLoss(NamedTuple):
    """A loss of training.

    Attributes:
        forward: Returns the loss.
        teacher: A model beside the one that is trained, if any.
        teacher_saved: Bytes that its weights are smaller than its tensors.
    """

    forward: Callable[[], Tensor]
    teacher: torch.nn.Module | None = None
    teacher_saved: int = 0


OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor", "sgd")
TRAINED = ("full", "lora", "extras")
TEACHERS = ("shared", "copy", "offloaded")
SHARDINGS = ("fsdp2", "ddp", "zero2", "zero3")
PRECISIONS = ("no", "bf16")
LOSSES: dict[str, Callable[..., TrainingLoss]] = {}  # by name, beside "lm"
NF4 = "nf4"  # as teacher_dtype: linear layers in 4 bits
AS_SAVED = "as saved"  # the label of a model with the attention of its config


def register_loss(
    name: str, make: Callable[[PreTrainedModel, Tensor, MemoryCase], TrainingLoss]
) -> None:
    """Make a loss known to :class:`MemoryCase`.

    Args:
        name: Its name.
        make: Returns the loss of a model in training mode, tokens ``[B, T]`` and the case.
    """
    LOSSES[name] = make


@dataclass(frozen=True, kw_only=True)
class ZeroSizes:
    """Sizes of DeepSpeed's ``zero_optimization`` in elements; those of the launch configs.

    Attributes:
        reduce_bucket: ``reduce_bucket_size``.
        prefetch_bucket: ``stage3_prefetch_bucket_size``.
        persistence_threshold: ``stage3_param_persistence_threshold``.
        max_live: ``stage3_max_live_parameters``.
        max_reuse_distance: ``stage3_max_reuse_distance``.
    """

    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    persistence_threshold: int = 100_000
    max_live: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            least = 1 if name == "reduce_bucket" else 0
            if size < least:
                raise ConfigError(f"{name} must be at least {least}, got {size}")


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One model, attention and size of inputs.

    Attributes:
        path: Folder of a saved model; its weights are not needed.
        spec: Plain data of the attention; ``None`` for that of the model's config.
        length: Tokens per row.
        batch: Rows.
        dtype: Data type of the weights.
        optimizer: ``"adamw"``, two numbers per trained weight, ``"adamw_8bit"``, the same in 8 bits
            of bitsandbytes, ``"adafactor"``, a number per row and column of a trained matrix, or
            ``"sgd"`` without momentum.
        train: ``"full"``, all weights, ``"extras"``, those that the backends add, or ``"lora"``,
            adapters on all linear layers and extras.
        loss: ``"lm"``, that of the model's ``forward``, or one of :func:`register_loss`.
        lora_rank: Rank of the adapters.
        precision: ``"bf16"`` for autocast, as in ``LoopConfig``, else ``"no"``.
        teacher: Of a loss with a teacher: ``"shared"``, the same weights, which must be frozen,
            ``"copy"``, or ``"offloaded"``, a copy whose weights are on the GPU layer by layer; what
            recovery does when ``None``.
        teacher_dtype: Data type of a copy's weights; ``dtype`` when ``None``. ``"nf4"`` is bfloat16
            with linear layers in 4 bits.
        gpus: Processes, each with a GPU, that have ``batch`` rows together; the memory is that of
            one of them.
        sharding: What several processes shard: ``"fsdp2"``, weights, gradients and optimizer,
            ``"ddp"``, nothing, ``"zero2"`` of DeepSpeed, gradients and optimizer, or ``"zero3"``,
            weights too.
        accumulate: Micro-batches of ``batch``: the rows of one are in memory at a time.
        load_in_4bit: Whether frozen linear layers have weights of 4 bits (QLoRA).
        activation_offloading: Whether activations are in the memory of the CPU from the forward to
            the backward pass, as in ``LoopConfig``.
        zero_sizes: Sizes of the buffers of DeepSpeed.
    """

    path: str
    spec: dict[str, Any] | None = None
    length: int = 1024
    batch: int = 1
    dtype: str = "float32"
    optimizer: str = "adamw"
    train: str = "full"
    loss: str = "lm"
    lora_rank: int = 16
    precision: str = "no"
    teacher: str | None = None
    teacher_dtype: str | None = None
    gpus: int = 1
    sharding: str = "fsdp2"
    accumulate: int = 1
    load_in_4bit: bool = False
    activation_offloading: bool = False
    zero_sizes: ZeroSizes = ZeroSizes()

    def __post_init__(self) -> None:
        for name in ("length", "batch", "lora_rank", "gpus", "accumulate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        choices = {
            "optimizer": OPTIMIZERS,
            "train": TRAINED,
            "loss": ("lm", *LOSSES),
            "precision": PRECISIONS,
            "teacher": TEACHERS,
            "sharding": SHARDINGS,
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known and not (name == "teacher" and value is None):
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, got {value!r}."
                    f"{did_you_mean(value, known)}"
                )
        for name in ("dtype", "teacher_dtype"):
            value = getattr(self, name)
            if value is None or (name, value) == ("teacher_dtype", NF4):
                continue
            dtype = getattr(torch, value, None)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ConfigError(
                    f"{name} must be a floating-point type of torch, such as float32 or bfloat16"
                    f"{', or nf4' if name == 'teacher_dtype' else ''}, got {value!r}"
                )
        self._check_combination()

    def _check_combination(self) -> None:
        """Raise an error for settings that contradict each other."""
        if self.loss == "lm" and (self.teacher or self.teacher_dtype):
            raise ConfigError("teacher is for a loss with a teacher, such as distil; leave it out")
        if self.teacher_dtype and not self.copies_teacher:
            raise ConfigError("teacher_dtype is that of a copy, but the teacher shares the weights")
        if self.teacher_dtype == NF4 and self.teacher == "offloaded":
            raise ConfigError(
                "teacher_dtype='nf4' is not offloaded: Accelerate moves weights, but not the "
                "scales of weights in 4 bits; use teacher='copy', or another type"
            )
        if self.teacher == "shared" and self.train == "full":
            raise ConfigError(
                "teacher='shared' needs frozen weights, but train='full' changes them; use 'copy' "
                "or 'offloaded', or train 'lora' or 'extras'"
            )
        if self.batch % (self.gpus * self.accumulate):
            raise ConfigError(
                f"batch={self.batch} rows are those of a step on all GPUs, but are not divisible "
                f"by gpus={self.gpus} times accumulate={self.accumulate}; give a multiple"
            )
        if self.load_in_4bit and self.train == "full":
            raise ConfigError(
                "load_in_4bit is for frozen weights, but train='full' trains them; use 'lora'"
            )
        whole = ("adafactor",) if self.zero else ("adafactor", "adamw_8bit")
        if self.optimizer in whole and (self.shards or self.zero):
            raise ConfigError(
                f"optimizer={self.optimizer!r} updates whole tensors, but sharding="
                f"{self.sharding!r} shards them; give sharding='ddp' or optimizer='adamw'"
            )
        if self.activation_offloading and self.zero:
            raise ConfigError(
                "activation_offloading does not go with DeepSpeed, which replaces the data of "
                "weights that autograd saves; leave it out, or give sharding='fsdp2' or 'ddp'"
            )
        if self.load_in_4bit and self.gpus > 1:
            raise ConfigError("load_in_4bit is computed for one GPU; leave gpus out")

    @property
    def shards(self) -> bool:
        """Whether weights are sharded."""
        return self.gpus > 1 and self.sharding == "fsdp2"

    @property
    def zero(self) -> int:
        """The stage of DeepSpeed's ZeRO; 0 without."""
        return int(self.sharding[-1]) if self.gpus > 1 and self.sharding[:4] == "zero" else 0

    @property
    def keeps_parts(self) -> bool:
        """Whether processes have parts of the weights between steps, and of those of a copy."""
        return self.shards or self.zero == 3

    @property
    def copies_teacher(self) -> bool:
        """Whether the teacher has weights of its own."""
        return self.train == "full" if self.teacher is None else self.teacher != "shared"

    @property
    def rows(self) -> int:
        """Rows of a micro-batch of one process."""
        return self.batch // (self.gpus * self.accumulate)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Data type of the weights that run: FSDP2 and DeepSpeed have that of ``precision``."""
        name = "bfloat16" if (self.shards or self.zero) and self.precision == "bf16" else self.dtype
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    @property
    def kept_dtype(self) -> torch.dtype:
        """Data type of the weights between steps."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def widening(self) -> int:
        """Bytes of a weight between steps over those of one that runs."""
        return self.kept_dtype.itemsize // self.compute_dtype.itemsize

    @property
    def attention(self) -> str:
        """Name of the attention in tables."""
        return AS_SAVED if self.spec is None else spec_label(AttentionSpec.from_dict(self.spec))
