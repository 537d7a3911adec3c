"""Configuration that recovery and fine-tuning share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType

from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.training.loop import LoopConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Which parameters are trained, on which rows, and how the result is evaluated."""

    # "extras" are the parameters that backends add, such as feature maps and gates
    train: Literal["extras", "lora", "full"] = "lora"
    lora_rank: int = 16
    lora_alpha: int | None = None  # the adapters' scale is lora_alpha / lora_rank; None: 2
    # last parts of the names of the linear layers with adapters; None: all outside of backends
    lora_target_modules: tuple[str, ...] | None = None
    extras_lr: float = 5e-3
    weights_lr: float | None = None  # None: 1e-3 for adapters, 1e-4 for all weights
    attention_lr: float | None = None  # of weights in attention layers; None: weights_lr
    row_length: int = 512  # tokens
    max_tokens: int | None = None  # of the text that is read, as a stream; None: all of it
    # "all" tokens of the text, or the "completions" of prompts and the assistant's messages
    train_on: Literal["all", "completions"] = "all"
    # fraction of rows with a repeated segment, which train recall; None: 0.25, completions 0
    repeat_share: float | None = None
    repeats_per_row: int = 1  # repeated segments in such a row
    judged_rows: int = 32  # held-out rows for evaluation
    # steps between evaluations on held-out rows, by which a stage keeps its best state; None: a
    # quarter of each stage; 0: never, and the last state is kept
    evaluate_every: int | None = None
    control: int | None = None  # window of "window alone"; None: the swap's widest window
    # tokens for which the swap is meant: it is evaluated there too, and at twice as many, and the
    # window of equal memory is that of this length; None: row_length
    target_length: int | None = None
    label_smoothing_factor: float = 0.0  # of cross-entropy, as in TrainingArguments
    window_dropout: float = 0.0  # initial fraction of a hybrid's heads without their window
    disable_dropout: bool = False  # train without the model's dropouts, which its config keeps
    gradient_checkpointing: bool = False
    # data type of frozen weights: "float32", or "bfloat16" with train="lora" or "extras", which
    # trains under autocast to bfloat16; what is trained is in float32
    dtype: Literal["float32", "bfloat16"] = "float32"
    load_in_4bit: bool = False  # frozen linear layers in 4 bits, the rest in bfloat16 (QLoRA)
    report_to: str | None = None  # a tracker of Accelerate, such as "tensorboard"
    recipe: str | None = None  # the name of these settings, for the model card
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        if self.train_on not in ("all", "completions"):
            raise ConfigError(f"train_on must be 'all' or 'completions', got {self.train_on!r}")
        if self.repeat_share is None:
            share = 0.25 if self.train_on == "all" else 0.0
            object.__setattr__(self, "repeat_share", share)  # so that a resumed run compares it
        elif self.repeat_share and self.train_on == "completions":
            raise ConfigError(
                f"repeat_share={self.repeat_share} would write copied segments into prompts and "
                "completions; leave it out with train_on='completions'"
            )
        if self.repeats_per_row > 1 and not self.repeat_share:
            raise ConfigError(
                f"repeats_per_row={self.repeats_per_row} applies to the rows that repeat_share "
                "selects, but repeat_share is 0; set both, or neither"
            )
        for name in ("lora_rank", "lora_alpha", "judged_rows", "repeats_per_row"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.attention_lr is not None and self.train == "extras":
            raise ConfigError(
                "attention_lr is the learning rate of the model's own weights in attention layers, "
                "but train='extras' trains none of them; leave it out, or train 'lora' or 'full'"
            )
        for name in ("extras_lr", "weights_lr", "attention_lr"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:  # NaN too
                raise ConfigError(f"{name} must be above 0 and finite, got {rate}")
        if self.control is not None and self.control < 1:
            raise ConfigError(f"control must be at least 1 token, got {self.control}")
        if self.evaluate_every is not None and self.evaluate_every < 0:
            raise ConfigError(
                f"evaluate_every must be at least 0 steps (0: never), got {self.evaluate_every}"
            )
        if self.target_length is not None and self.target_length < 8:
            raise ConfigError(f"target_length must be at least 8 tokens, got {self.target_length}")
        self._check_max_tokens()
        if self.row_length < 8:
            raise ConfigError(f"row_length must be at least 8 tokens, got {self.row_length}")
        if self.row_length % self.loop.cp_size:
            raise ConfigError(
                f"A row of {self.row_length} tokens is not divisible by cp_size="
                f"{self.loop.cp_size} processes; make row_length a multiple"
            )
        if not 0 <= self.label_smoothing_factor < 1:
            raise ConfigError(
                "label_smoothing_factor must be at least 0 and below 1, got "
                f"{self.label_smoothing_factor}"
            )
        for name in ("repeat_share", "window_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.train not in ("extras", "lora", "full"):
            raise ConfigError(f"train must be 'extras', 'lora' or 'full', got {self.train!r}")
        self._check_frozen_weights()
        if self.report_to is not None:
            _check_tracker(self.report_to)

    def _check_frozen_weights(self) -> None:
        """Raise an error for narrow weights that are trained, or in another autocast."""
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(
                f"dtype must be 'float32' or 'bfloat16', got {self.dtype!r}; load_in_4bit has "
                "linear layers in 4 bits"
            )
        if self.load_in_4bit:
            object.__setattr__(self, "dtype", "bfloat16")
        if self.dtype == "float32":
            return
        given = "load_in_4bit" if self.load_in_4bit else "dtype='bfloat16'"
        if self.train == "full":
            raise ConfigError(
                f"{given} is for frozen weights, but train='full' trains them, and small updates "
                "are lost in bfloat16; use train='lora', or precision='bf16' with float32 weights"
            )
        if self.loop.precision not in (None, "bf16"):
            raise ConfigError(
                f"{given} computes in bfloat16, but precision is {self.loop.precision!r}; leave "
                "precision out, or give 'bf16'"
            )
        object.__setattr__(self, "loop", replace(self.loop, precision="bf16"))

    def _check_max_tokens(self) -> None:
        """Raise an error if the number of tokens that are read is invalid."""
        if self.max_tokens is None:
            return
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.train_on == "completions":
            raise ConfigError(
                f"max_tokens={self.max_tokens} counts tokens of text, but train_on='completions' "
                "reads examples; leave it out, or give data with fewer examples"
            )

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates of ``extras``, ``attention`` and ``weights``, as far as they train."""
        found = {"extras": self.extras_lr}
        if self.train != "extras":
            if self.attention_lr is not None:
                found["attention"] = self.attention_lr
            found["weights"] = self.weights_lr or (1e-4 if self.train == "full" else 1e-3)
        return found

    def check_warmup(self, stages: Mapping[str, int]) -> None:
        """Raise an error if a stage ends before its warmup.

        Args:
            stages: Steps by the name of the stage.

        Raises:
            ConfigError: A stage has no more steps than warmup.
        """
        for name, steps in stages.items():
            if self.loop.warmup >= 1 and 0 < steps <= self.loop.warmup:
                raise ConfigError(
                    f"The stage {name!r} has {steps} steps, all of them warmup ({self.loop.warmup} "
                    "steps); give fewer, or a fraction such as --warmup 0.1"
                )


def _check_tracker(name: str) -> None:
    """Raise an error if Accelerate has no such tracker, or its package is not installed."""
    known = [str(tracker) for tracker in LoggerType if tracker != LoggerType.ALL]
    if name not in known:
        raise ConfigError(
            f"report_to must be a tracker of Accelerate ({', '.join(known)}), got {name!r}."
            f"{did_you_mean(name, known)}"
        )
    if name not in map(str, get_available_trackers()):
        raise ConfigError(
            f"report_to={name!r} needs the package {name}, which is not installed; install it, or "
            "leave report_to out"
        )
