"""Arguments of recovery: transformers' ``TrainingArguments``, and what recovery adds.

Names are those of transformers, TRL (``SFTConfig``, ``ModelConfig``) and PEFT where they have the
option. The command line is generated from these fields (attnzoo/commands/arguments.py), so each
option, its name and its text exist once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from attnzoo.errors import ConfigError

TEACHER_DTYPES = ("float32", "bfloat16", "float16", "nf4")


def _option(default: Any, text: str, *, choices: tuple[str, ...] | None = None) -> Any:
    metadata: dict[str, Any] = {"help": text}
    if choices is not None:
        metadata["choices"] = choices
    return field(default=default, metadata=metadata)


@dataclass
class RecoveryArguments(TrainingArguments):
    """Arguments of :func:`~attnzoo.training.recover.recover`.

    They are ``TrainingArguments`` with defaults that suit the embedded model, and the fields
    below. ``max_steps`` and ``learning_rate`` are those of distillation; the schedule, warmup,
    batch and so on apply to each stage.
    """

    output_dir: str | None = _option(None, "new folder for the model")
    # --- which parameters are trained
    train: str = _option(
        "lora",
        "extras (what backends add), lora (and extras), full",
        choices=("extras", "lora", "full"),
    )
    lora_r: int = _option(16, "rank of LoRA adapters")
    lora_alpha: int | None = _option(None, "scale of adapters, times r; default: 2 x r")
    lora_target_modules: list[str] | None = _option(  # noqa: RUF009  a field, as the others
        None, "linear layers with adapters by name, such as q_proj; default: all"
    )
    dtype: str = _option(
        "float32",
        "data type of frozen weights",
        choices=("float32", "bfloat16"),
    )
    load_in_4bit: bool = _option(False, "frozen linear layers in 4 bits (QLoRA)")
    # --- rows
    dataset_text_field: str = _option("text", "field of the data with the text")
    max_tokens: str | None = _option(None, "tokens of data that are read, such as 300M")
    max_length: int = _option(512, "tokens per row")
    completion_only_loss: bool = _option(False, "loss of completions and assistants only")
    repeat_share: float | None = _option(None, "fraction of rows that train recall; default: 0.25")
    repeats_per_row: int = _option(1, "repeated segments in such a row")
    target_length: int | None = _option(None, "tokens that the swap is meant for and judged at")
    # --- attention transfer
    transfer_steps: int = _option(100, "steps per block of layers")
    transfer_learning_rate: float | None = _option(
        None, "default: 2e-2, or 5e-2 for target attention"
    )
    transfer_target: str = _option(
        "output", "what layers match of softmax", choices=("output", "attention")
    )
    transfer_from: str | None = _option(None, "run whose transferred layers are reused")
    layers_at_once: int | None = _option(None, "layers per block of transfer; default: all")
    # --- distillation
    max_steps: int = _option(100, "steps of distillation")
    learning_rate: float | None = _option(  # type: ignore[assignment]
        None, "of distillation; default: 1e-3 for adapters, 1e-4 for all weights, scaled"
    )
    extras_learning_rate: float = _option(5e-3, "rate of the backends' parameters")
    attention_learning_rate: float | None = _option(
        None, "rate of weights in attention; default: the same"
    )
    top_k: int | None = _option(None, "tokens of the teacher in the KL; default: all")
    cross_entropy: float = _option(0.0, "weight of cross-entropy in the loss, 0 to 1")
    hidden_states: float = _option(0.0, "weight of hidden states in the loss")
    teacher_dtype: str | None = _option(
        None,
        "of the copy that --train full has; default: float32",
        choices=TEACHER_DTYPES,
    )
    always_train: bool = _option(False, "train also if the swap starts where softmax is")
    window_dropout: float = _option(0.0, "initial fraction of heads without their window")
    cp_size: int = _option(1, "processes that split a row (context parallelism)")
    # --- defaults of TrainingArguments that recovery changes
    per_device_train_batch_size: int = _option(8, "rows per step and process")
    warmup_steps: float = _option(0.1, "linear warmup: a fraction, or steps")
    lr_scheduler_type: str = _option("cosine", "schedule of the rates")
    adam_beta2: float = _option(0.95, "beta2 of AdamW")
    eval_strategy: str = _option("steps", "no: the last state is kept, not the best")
    eval_steps: float | None = _option(0.25, "between evaluations: steps or a fraction")
    save_steps: float = _option(0.25, "between checkpoints: steps or a fraction")
    save_total_limit: int | None = _option(2, "checkpoints that are kept")
    seed: int = _option(0, "random seed")


def token_count(text: int | str | None) -> int | None:
    """Return the number in a text such as ``300M``, with units of 1000; ``None`` without a text.

    Raises:
        ConfigError: The text is not a number above 0.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbt]?)", str(text).strip().lower())
    count = round(float(found[1]) * 1000 ** " kmbt".index(found[2] or " ")) if found else 0
    if count < 1:
        raise ConfigError(f"max_tokens must be a number of tokens such as 300M or 2B, got {text!r}")
    return count
