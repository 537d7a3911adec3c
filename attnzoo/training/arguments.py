"""Arguments of recovery: transformers' ``TrainingArguments``, and what recovery adds.

Names are those of transformers, TRL (``SFTConfig``, ``ModelConfig``) and PEFT where they have the
option. The command line is generated from these fields (attnzoo/commands/arguments.py), so each
option, its name and its text exist once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args, get_type_hints

import torch
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations.integration_utils import get_available_reporting_integrations

from attnzoo.errors import AttnzooError, ConfigError, did_you_mean

# beginnings of fields that do not change the result: paths, logs, checkpoints, memory, processes
SAME_RESULT = (
    *("output_dir", "run_name", "project", "trackio", "report_to", "disable_tqdm", "logging_"),
    *("log_", "save_", "resume_from", "restore_callback", "enable_jit", "hub_", "push_to_hub"),
    *("do_", "debug", "use_cpu", "local_rank", "ddp_", "dataloader_num", "dataloader_p"),
    *("dataloader_m", "dataset_num", "gradient_checkpointing", "activation_", "skip_memory"),
    "torch_empty_cache",
)
# the least values of fields that are not 0, those from 0 to 1, and those above 0
LEAST = {
    **dict.fromkeys(("lora_r", "lora_alpha", "repeats_per_row", "cp_size", "save_total_limit"), 1),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 1),
    **dict.fromkeys(("gradient_accumulation_steps", "dataset_num_proc"), 1),
    **dict.fromkeys(("max_length", "target_length"), 8),
}
SHARES = ("repeat_share", "cross_entropy", "adam_beta1", "adam_beta2", "lora_dropout")
POSITIVE = (
    *("learning_rate", "extras_learning_rate", "attention_learning_rate"),
    *("transfer_learning_rate", "eval_steps", "save_steps", "logging_steps"),
)
# fields of TrainingArguments that recovery does not use, and what to do instead
_ORDER = "rows have one length, and their order follows from the seed"
UNUSED = {
    "push_to_hub": "run `hf upload ORG/NAME FOLDER` (hub_model_id is the name in the card)",
    "label_smoothing_factor": "recover has no label smoothing",
    "num_train_epochs": "stages count steps; give max_steps and transfer_steps",
    "auto_find_batch_size": "give per_device_train_batch_size",
    "save_only_model": "a run goes on with its optimizer",
    "label_names": "the labels of rows are their tokens",
    **dict.fromkeys(("train_sampling_strategy", "length_column_name"), _ORDER),
    **dict.fromkeys(("ignore_data_skip", "data_seed"), _ORDER),
    **dict.fromkeys(
        (
            *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
            *("eval_on_start", "eval_delay", "eval_accumulation_steps", "batch_eval_metrics"),
            *("per_device_eval_batch_size", "prediction_loss_only", "include_for_metrics"),
            *("bf16_full_eval", "fp16_full_eval", "save_strategy=best"),
            "lr_scheduler_type=reduce_lr_on_plateau",
        ),
        "stages are evaluated on single held-out rows, and end in their best state",
    ),
}
_ADAPTERS = ("lora_r", "lora_alpha", "lora_target_modules")
# fields that have an effect if another one is not 0, and those that a value of train leaves out
NEEDS = {
    "repeat_share": ("repeats_per_row",),
    "transfer_steps": ("transfer_target", "transfer_learning_rate"),
    "max_steps": (
        *("cross_entropy", "hidden_states", "learning_rate", "extras_learning_rate"),
        *("attention_learning_rate", *_ADAPTERS),
    ),
}
UNTRAINED = {
    "extras": (*_ADAPTERS, "learning_rate", "attention_learning_rate"),
    "full": _ADAPTERS,
}


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
    repeat_share: float = _option(0.25, "fraction of rows that train recall")
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
    # --- distillation
    max_steps: int = _option(100, "steps of distillation")
    learning_rate: float | None = _option(  # type: ignore[assignment]
        None, "of distillation; default: 1e-3 for adapters, 1e-4 for all weights, scaled"
    )
    extras_learning_rate: float = _option(5e-3, "rate of the backends' parameters")
    attention_learning_rate: float | None = _option(
        None, "rate of weights in attention; default: the same"
    )
    cross_entropy: float = _option(0.0, "weight of cross-entropy in the loss, 0 to 1")
    hidden_states: float = _option(0.0, "weight of hidden states in the loss")
    always_train: bool = _option(False, "train also if the swap starts where softmax is")
    disable_dropout: bool = _option(True, "disable the model's dropout, which its config keeps")
    cp_size: int = _option(1, "processes that split a row (context parallelism)")
    # --- defaults of TrainingArguments that recovery changes
    per_device_train_batch_size: int = _option(8, "rows per step and process")
    warmup_steps: float = _option(0.1, "linear warmup: a fraction, or steps")
    lr_scheduler_type: str = _option("cosine", "schedule of the rates")
    adam_beta2: float = _option(0.95, "beta2 of AdamW")
    eval_strategy: str = _option(
        "steps", "no: the last state is kept, not the best", choices=("no", "steps")
    )
    eval_steps: float | None = _option(0.25, "between evaluations: steps or a fraction")
    save_steps: float = _option(0.25, "between checkpoints: steps or a fraction")
    save_total_limit: int | None = _option(2, "checkpoints that are kept")
    seed: int = _option(0, "random seed")
    logging_steps: float = _option(1, "between losses in the log: steps or a fraction")

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: A value is invalid.
        """
        self.report_to = "none" if self.report_to is None else self.report_to
        unused = UNUSED | dict.fromkeys(UNTRAINED.get(self.train, ()), f"train is {self.train!r}")
        for name, needing in NEEDS.items():
            if not getattr(self, name):
                unused |= dict.fromkeys(needing, f"{name} is 0")
        refuse_unused(self, unused)
        check_numbers(self)
        own = RecoveryArguments.__annotations__
        for x in fields(self):
            known, given = x.metadata.get("choices"), getattr(self, x.name)
            if x.name in own and given == []:
                raise ConfigError(f"{x.name} is empty; name some, or leave it out for the default")
            if x.name in own and known is not None and given not in known:
                raise ConfigError(
                    f"{x.name} must be one of {', '.join(known)}, got {given!r}."
                    f"{did_you_mean(str(given), known)}"
                )
        token_count(self.max_tokens)
        resumes(self)
        with config_errors():
            super().__post_init__()  # type: ignore[no-untyped-call]
        check_libraries(self)
        self.remove_unused_columns = False  # position_ids separate documents
        self.logging_nan_inf_filter = False  # a loss that is not finite ends the run
        if self.ddp_find_unused_parameters is None:  # each trained parameter gets a gradient
            self.ddp_find_unused_parameters = False
        self._check_pairs()
        if self.dtype == "bfloat16" or self.load_in_4bit:
            self._check_frozen_weights()

    def _check_pairs(self) -> None:
        """Raise an error for options that do not go together."""
        if self.max_length % self.cp_size:
            raise ConfigError(
                f"A row of {self.max_length} tokens is not divisible by cp_size={self.cp_size} "
                "processes; make max_length a multiple"
            )
        if self.world_size % self.cp_size:
            raise ConfigError(
                f"{self.world_size} processes do not divide into groups of cp_size={self.cp_size} "
                f"that share rows; start a multiple of {self.cp_size}, such as torchrun "
                f"--nproc-per-node {self.cp_size}"
            )
        if self.cp_size > 1 and self.torch_compile:
            raise ConfigError(
                "torch_compile compiles layers, but those of cp_size > 1 exchange states between "
                "processes; leave one of them out"
            )
        for name, steps in (("transfer", self.transfer_steps), ("distil", self.max_steps)):
            if self.warmup_steps >= 1 and 0 < steps <= self.warmup_steps:
                raise ConfigError(
                    f"The stage {name!r} has {steps} steps, all of them warmup "
                    f"({self.warmup_steps:g} steps); give fewer, or a fraction such as "
                    "--warmup-steps 0.1"
                )

    def _check_frozen_weights(self) -> None:
        """Raise an error for narrow weights that are trained, or in another autocast."""
        given = "load_in_4bit" if self.load_in_4bit else "dtype='bfloat16'"
        if self.train == "full":
            raise ConfigError(
                f"{given} is for frozen weights, but train='full' trains them, and small updates "
                "are lost in bfloat16; use train='lora', or bf16 with float32 weights"
            )
        if self.fp16:
            raise ConfigError(f"{given} computes in bfloat16; leave fp16 out")
        if self.fsdp or self.deepspeed:
            raise ConfigError(
                "FSDP and DeepSpeed shard weights of one data type, but those that are trained are "
                f"in float32; leave {given} out (bf16 gathers weights in bfloat16), or start with "
                "torchrun alone"
            )
        self.dtype, self.bf16 = "bfloat16", True

    @property
    def transfer_rate(self) -> float:
        """Learning rate of transfer."""
        return self.transfer_learning_rate or (2e-2 if self.transfer_target == "output" else 5e-2)

    @property
    def distil_rate(self) -> float:
        """Learning rate of distillation, before it is scaled."""
        return self.learning_rate or (1e-4 if self.train == "full" else 1e-3)


def refuse_unused(args: Any, unused: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for a field, or ``"field=value"``, that is given without effect.

    ``unused`` says why.
    """
    for x in fields(args):
        default = x.default if x.default_factory is MISSING else x.default_factory()
        given = getattr(args, x.name)
        for name in (x.name, f"{x.name}={getattr(given, 'value', given)}"):
            if name in unused and given != default:
                raise ConfigError(f"{name} has no effect: {unused[name]}")


def check_numbers(args: Any) -> None:
    """Raise ``ConfigError`` for a number of a dataclass that is too small, or not finite."""
    hints = get_type_hints(type(args))
    for x in fields(args):
        name, found, least = x.name, getattr(args, x.name), LEAST.get(x.name, 0)
        kinds = get_args(hints[name]) or (hints[name],)
        is_number = type(found) in (int, float)
        if found == x.default or not (is_number or type(x.default) in (int, float)):
            continue
        if found is None and type(None) in kinds:
            continue
        if not is_number:
            raise ConfigError(f"{name} must be a number, got {found!r}")
        if name in POSITIVE and not 0 < found < math.inf:  # NaN too
            raise ConfigError(f"{name} must be above 0 and finite, got {found}")
        if name in SHARES and not 0 <= found <= 1:
            raise ConfigError(f"{name} must be from 0 to 1, got {found}")
        if not least <= found < math.inf:
            raise ConfigError(f"{name} must be at least {least} and finite, got {found}")
        if int in kinds and float not in kinds and found != int(found):
            raise ConfigError(f"{name} must be a whole number, got {found}")


def check_libraries(args: Any) -> None:
    """Raise ``ConfigError`` for a tracker, compiler or option that a library does not have."""
    known = get_available_reporting_integrations()
    for name in args.report_to:
        if name not in known:
            raise ConfigError(
                f"report_to names {name!r}, which is not installed, or unknown to transformers; "
                f"{', '.join(known) or 'no tracker'} can be given"
            )
    if args.torch_compile:
        name, compilers = args.torch_compile_backend, torch._dynamo.list_backends(exclude_tags=())
        if name not in compilers:
            raise ConfigError(
                f"torch_compile_backend must be one of {', '.join(compilers)}, got {name!r}."
                f"{did_you_mean(name, compilers)}"
            )
    values = args.to_dict()
    names = ("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs")
    given = ", ".join(f"{name}={values[name]!r}" for name in names)
    with config_errors(f"{given}: "):
        optim = torch.optim.SGD([torch.zeros(1)])
        if args.optim_target_modules is None and "lomo" not in values["optim"]:  # need the model
            cls, options = Trainer.get_optimizer_cls_and_kwargs(args)
            optim = cls([torch.zeros(1)], **{**options, "lr": 1e-3})
        schedule = args.lr_scheduler_type, optim, 1, 2
        get_scheduler(*schedule, scheduler_specific_kwargs=args.lr_scheduler_kwargs)


@contextmanager
def config_errors(given: str = "") -> Iterator[None]:
    """Context in which errors of libraries are those of arguments, as ``ConfigError``."""
    try:
        yield
    except AttnzooError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"{given}{error}") from error


def resumes(args: Any) -> bool:
    """Return whether a run goes on from its last checkpoints, which are not given by name."""
    given = str(args.resume_from_checkpoint).lower()
    if given not in ("none", "false", "", "true"):
        raise ConfigError(
            "resume_from_checkpoint is True or False: a run finds the last checkpoint of each of "
            f"its stages in output_dir; got {args.resume_from_checkpoint!r}"
        )
    return given == "true"


def identity(args: Any) -> dict[str, Any]:
    """Return the fields that change a result; ``processes`` that share rows count once."""
    given = {n: x for n, x in args.to_dict().items() if not n.startswith(SAME_RESULT)}
    given["processes"] = args.world_size // given.get("cp_size", 1)
    return {name: x for name, x in given.items() if x is not None}


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
