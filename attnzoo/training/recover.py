"""Recovery of a swapped model: attention transfer, distillation, evaluation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.spec import AttentionSpec
from attnzoo.training.calibrate import calibrate, calibrated_layers
from attnzoo.training.distil import (
    chunk_of,
    distil_loss,
    hidden_loss,
    hidden_states,
    model_inputs,
    other_teacher,
    predictions,
    softmax_teacher,
)
from attnzoo.training.encoder import EmbeddingRun, is_encoder
from attnzoo.training.four_bits import require_bitsandbytes, require_quantizable
from attnzoo.training.loop import Loss, OnStep, Stage
from attnzoo.training.optimizer import check_schedule
from attnzoo.training.rates import distillation_factor, why_not_trained
from attnzoo.training.results import complete
from attnzoo.training.reuse import reuse_transfer
from attnzoo.training.runs import Log, Run
from attnzoo.training.student import StudentRun, transfer_student
from attnzoo.training.train_config import TrainConfig
from attnzoo.training.transfer import (
    Target,
    Transfer,
    extras,
    trainable_layers,
)

TEACHER_DTYPES = ("float32", "bfloat16", "float16", "nf4")
RATES = ("weights_lr", "attention_lr", "extras_lr")  # of distillation


@dataclass(frozen=True, kw_only=True)
class RecoverConfig(TrainConfig):
    """Configuration of :func:`recover`; the defaults suit the embedded model."""

    transfer_steps: int = 100  # per block of layers
    distil_steps: int = 100
    transfer_lr: float | None = None  # None: 2e-2 for target "output", 5e-2 for "attention"
    transfer_from: str | None = None  # folder of an earlier run, whose layers are reused
    # training rows whose attention weights the gates of delta start from; 0: none
    calibration_rows: int = 0
    transfer_target: Target = "output"  # a layer's output, or its "attention" weights
    layers_at_once: int | None = None  # layers per block of transfer; None: all
    cross_entropy: float = 0.0  # weight of cross-entropy in the distillation loss
    hidden_states: float = 0.0  # weight of the error of every layer's hidden states in it
    top_k: int | None = None  # the teacher's most probable tokens in the KL; None: all
    distil_length: int | None = None  # tokens per row of distillation; None: row_length
    distil_batch: int | None = None  # rows per step of distillation; None: loop.batch_size
    # factor of the rates of distillation; None: from how far the student is from its teacher,
    # and 1 if weights_lr, attention_lr, extras_lr or cross_entropy is set, and for encoders
    rate_factor: float | None = None
    # also if the swap starts where the original model is, as far as that can be measured
    always_train: bool = False
    # of the teacher with train="full", which is a copy: the data type of its weights (None:
    # float32; "nf4": bfloat16 with linear layers in 4 bits), and whether they are in the memory of
    # the CPU while they do not run
    teacher_dtype: str | None = None
    offload_teacher: bool = False
    disable_dropout: bool = True  # the teacher has none
    # schedule of the rates of distillation, as lr_scheduler_type; None: that of the loop
    distil_lr_scheduler_type: str | None = None
    distil_lr_scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("transfer_steps", "distil_steps", "calibration_rows"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("layers_at_once", "top_k"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.distil_length is not None and (
            self.distil_length < 8 or self.distil_length % self.loop.cp_size
        ):
            raise ConfigError(
                "distil_length must be at least 8 tokens and divisible by cp_size="
                f"{self.loop.cp_size}, got {self.distil_length}"
            )
        if self.distil_batch is not None and (
            self.distil_batch < 1 or self.distil_batch % self.loop.accumulate
        ):
            raise ConfigError(
                "distil_batch must be at least 1 row and divisible into "
                f"accumulate={self.loop.accumulate} micro-batches, got {self.distil_batch}"
            )
        if self.transfer_lr is not None and not 0 < self.transfer_lr < math.inf:  # NaN too
            raise ConfigError(f"transfer_lr must be above 0 and finite, got {self.transfer_lr}")
        if self.transfer_target not in ("output", "attention"):
            raise ConfigError(
                f"transfer_target must be 'output' or 'attention', got {self.transfer_target!r}"
            )
        if self.rate_factor is None and self.recipe is None and self._sets_rates():
            object.__setattr__(self, "rate_factor", 1.0)
        if self.rate_factor is not None and not 0 < self.rate_factor < math.inf:
            raise ConfigError(f"rate_factor must be above 0 and finite, got {self.rate_factor}")
        if not 0 <= self.cross_entropy <= 1:
            raise ConfigError(f"cross_entropy must be from 0 to 1, got {self.cross_entropy}")
        if self.distil_lr_scheduler_type is not None:
            check_schedule(self.distil_lr_scheduler_type, self.distil_lr_scheduler_kwargs)
        elif self.distil_lr_scheduler_kwargs:
            raise ConfigError(
                "distil_lr_scheduler_kwargs are those of distil_lr_scheduler_type, which is not "
                "given; give both, or lr_scheduler_kwargs"
            )
        self._check_teacher()
        self.check_warmup({"transfer": self.transfer_steps, "distil": self.distil_steps})
        if self.hidden_states < 0:
            raise ConfigError(f"hidden_states must not be negative, got {self.hidden_states}")
        if self.label_smoothing_factor and not self.cross_entropy:
            raise ConfigError(
                "label_smoothing_factor smooths the targets of cross-entropy, but cross_entropy is "
                "0, and the teacher's predictions are no labels; set both, or neither"
            )

    def _check_teacher(self) -> None:
        """Raise an error for settings of a copy where the teacher shares the model's weights."""
        if self.teacher_dtype is None and not self.offload_teacher:
            return
        if self.train != "full":
            raise ConfigError(
                "teacher_dtype and offload_teacher are for a teacher that is a copy, but with "
                f"train={self.train!r} it shares the frozen weights and needs no memory; leave "
                "them out"
            )
        if self.teacher_dtype not in (None, *TEACHER_DTYPES):
            raise ConfigError(
                f"teacher_dtype must be one of {', '.join(TEACHER_DTYPES)}, got "
                f"{self.teacher_dtype!r}.{did_you_mean(str(self.teacher_dtype), TEACHER_DTYPES)} "
                "nf4 has linear layers in 4 bits; 8 bits are not supported"
            )
        if self.teacher_dtype == "nf4" and self.offload_teacher:
            raise ConfigError(
                "teacher_dtype='nf4' does not go with offload_teacher, which moves weights, but "
                "not the scales of weights in 4 bits; leave one of them out: offload_teacher needs "
                "less memory, and nf4 less time"
            )

    @property
    def teacher_torch_dtype(self) -> torch.dtype | Literal["nf4"] | None:
        """Data type of a teacher that is a copy, as of :func:`softmax_teacher`."""
        if self.teacher_dtype is None:
            return None
        if self.teacher_dtype == "nf4":
            return "nf4"
        dtype: torch.dtype = getattr(torch, self.teacher_dtype)
        return dtype

    @property
    def transfer_rate(self) -> float:
        """Learning rate of transfer."""
        return self.transfer_lr or (2e-2 if self.transfer_target == "output" else 5e-2)

    @property
    def distil_schedule(self) -> tuple[str, Mapping[str, Any]] | None:
        """Schedule of the rates of distillation; ``None`` for that of the loop."""
        if self.distil_lr_scheduler_type is None:
            return None
        return self.distil_lr_scheduler_type, self.distil_lr_scheduler_kwargs

    def _sets_rates(self) -> bool:
        """Return whether a rate of distillation is not the default."""
        fields = self.__dataclass_fields__
        return any(getattr(self, name) != fields[name].default for name in RATES)


def recover(
    path: Path,
    spec: AttentionSpec | None,
    data: list[Path],
    out: Path,
    config: RecoverConfig | None = None,
    *,
    teacher: Path | None = None,
    column: str = "text",
    resume: bool = False,
    weights: str | None = None,
    log: Log = lambda text: None,
    on_step: OnStep = lambda stage, step, metrics: None,
) -> dict[str, Any]:
    """Swap a saved model, recover its quality, evaluate it, and save it to ``out``.

    A causal model is evaluated by loss and recall; an encoder by the cosine similarity between its
    embeddings and those of the original model.

    Args:
        path: Folder of a saved model that is not swapped, a decoder or an encoder.
        spec: The swap; ``None`` with ``teacher``.
        data: Text files, JSON lines, parquet, or folders of them.
        out: New folder for the model and the results, ``recovery.json``.
        config: Configuration; defaults when ``None``.
        teacher: Folder of the original model, if ``path`` holds a student of a stock class
            (:mod:`attnzoo.training.student`).
        column: Field of JSON and parquet files that holds the text.
        resume: Whether to resume from the last checkpoint in ``out``.
        weights: Fingerprint of the weights that the spec was planned for, if any.
        log: Called with progress messages.
        on_step: Called after each step with the stage, the step and its metrics.

    Returns:
        The content of ``recovery.json``.

    Raises:
        AttnzooError: An argument is invalid.
    """
    config = config or RecoverConfig()
    if config.teacher_dtype == "nf4":
        require_bitsandbytes()
    if teacher is not None:
        options: dict[str, Any] = {"column": column, "resume": resume, "weights": weights}
        student = StudentRun(
            *("recover", path, None, data, out, config),
            **options,
            teacher=teacher,
            log=log,
            on_step=on_step,
        )
        return complete(student, partial(_recover_student, config=config))
    encoder = is_encoder(path)
    if encoder:
        _require_hidden_state_loss(config)
    run = (EmbeddingRun if encoder else Run)(
        "recover",
        path,
        spec,
        data,
        out,
        config,
        column=column,
        resume=resume,
        weights=weights,
        log=log,
        on_step=on_step,
    )
    return complete(run, partial(_recover, config=config))


def _recover(run: Run, config: RecoverConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model of a run, recovered, and what calibration measured."""
    if config.teacher_dtype == "nf4":
        require_quantizable(run.model)
    if reason := _why_not_trained(run, config):
        return _untrained(run, reason)
    if config.cross_entropy and config.distil_steps and config.train != "extras":
        rows = run.rows_of_length(config.distil_length)
        run.tune_softmax(
            config.distil_steps,
            lambda model: _distil_loss(model, run, config),
            rows=rows,
            batch_size=config.distil_batch,
            schedule=config.distil_schedule,
        )
    calibration = _calibrate(run, config)
    model = _distil(_transfer(run.model, run, config), run, config)
    # without cross-entropy, softmax is its own teacher: distillation does not change it
    run.baselines.results.setdefault("softmax tuned", run.baselines.results["softmax"])
    return model, {"calibration": calibration} if calibration else {}


def _recover_student(run: Any, config: RecoverConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the student of a run, recovered, and what the results say of it."""
    if reason := _why_not_trained(run, config):
        model, further = _untrained(run, reason)
        return model, {**further, **run.describe_student()}
    model = _distil(transfer_student(run, config), run, config)
    run.baselines.results.setdefault("softmax tuned", run.baselines.results["softmax"])
    return model, run.describe_student()


def _why_not_trained(run: Run, config: RecoverConfig) -> str:
    """Return why nothing is trained, or ``""``; the text is learned with cross-entropy anyway."""
    trains = config.transfer_steps or config.distil_steps
    if run.is_encoder or config.always_train or config.cross_entropy or not trains:
        return ""
    return why_not_trained(run, run.model)


def _untrained(run: Run, reason: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model of a run that trains nothing, and the reason."""
    run.log(reason)
    run.baselines.results.setdefault("softmax tuned", run.baselines.results["softmax"])
    model: PreTrainedModel = run.model
    return model, {"not_trained": reason}


def _require_hidden_state_loss(config: RecoverConfig) -> None:
    for name, unset in (("cross_entropy", 0.0), ("top_k", None)):
        if getattr(config, name) != unset:
            raise ConfigError(
                f"{name} applies to predicted tokens, but an encoder is distilled to its hidden "
                "states; leave it out"
            )
    if config.hidden_states:
        raise ConfigError(
            f"hidden_states={config.hidden_states} adds a term to the loss of predictions, but an "
            "encoder is distilled to its last hidden states only; leave it out"
        )


def _calibrate(run: Run, config: RecoverConfig) -> list[dict[str, Any]]:
    """Start the gates of the run's model from softmax's attention; return what was measured."""
    if not config.calibration_rows or not calibrated_layers(run.model):
        return []
    rows, count = run.loop.rows, config.calibration_rows
    with run.shards.running(run.model):
        layers = calibrate(run.model, rows.select(slice(count)))
    if not layers:
        run.log("gates are not calibrated: no row is longer than the window")
    for x in layers:
        run.log(
            f"{x['layer']}: {x['beyond']:.0%} of the attention is beyond the window, "
            f"{x['age']:.0f} tokens away; its gates start from that"
        )
    return layers


def _transfer(model: PreTrainedModel, run: Run, config: RecoverConfig) -> PreTrainedModel:
    """Run attention transfer on all layers at once, or block by block."""
    layers, reason = trainable_layers(model), "the backends have no parameters of their own"
    if config.transfer_from is not None:
        folder, weights = Path(config.transfer_from), run.provenance["model"]
        reused = reuse_transfer(model, folder, weights, run.shards)
        run.log(f"transfer of {len(reused)} layers is reused from {config.transfer_from}")
        layers, reason = [name for name in layers if name not in reused], "all layers are reused"
    if not layers or not config.transfer_steps:
        reason = "0 steps" if layers else reason
        run.log(f"transfer is skipped: {reason}")
        return model
    for name, block in _blocks(layers, config.layers_at_once or len(layers)):
        with Transfer(model, block, target=config.transfer_target) as transfer:
            prefixes = tuple(f"{layer}." for layer in block)
            parameters = [
                p
                for n, p in extras(model).items()
                if n.removeprefix("module.").startswith(prefixes)  # the prefix of a wrapped model
            ]
            stage = Stage(
                name=name,
                steps=config.transfer_steps,
                groups=[{"params": parameters, "lr": config.transfer_rate}],
                loss=transfer_loss(transfer, **_one_prediction(model)),
                before_step=with_step(transfer, run.step_callback(model, config.transfer_steps)),
            )
            rebuild = partial(run.load_model, empty=run.shards.enabled)
            model = run.loop.run(model, stage, rebuild)
    return model


def _blocks(layers: list[str], size: int) -> Iterator[tuple[str, list[str]]]:
    for first in range(0, len(layers), size):
        name = "transfer" if size >= len(layers) else f"transfer {first}"
        yield name, layers[first : first + size]


def with_step(transfer: Transfer, before_step: Callable[[int], None]) -> Callable[[int], None]:
    """Return a ``before_step`` that also sets the transfer's step."""

    def wrapper(step: int) -> None:
        transfer.step = step
        before_step(step)

    return wrapper


def transfer_loss(transfer: Transfer, **arguments: Any) -> Loss:
    """Return the loss of attention transfer, for a :class:`Stage`.

    Args:
        transfer: Records the errors of the layers.
        arguments: Further arguments of the model's ``forward``.
    """

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return transfer.loss(model(**model_inputs(batch), **arguments)[0])

    return loss


def _one_prediction(model: nn.Module) -> dict[str, int]:
    """Return the argument that limits a model's logits to one token, if it has such an argument.

    Attention transfer does not use predictions, whose logits can take more memory than all else.
    """
    known = inspect.signature(type(model).forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in known else {}


def _distil_loss(model: Any, run: Run, config: RecoverConfig) -> Loss:
    """Return the distillation loss of a model that :meth:`Run.prepare` returned."""
    chunk = None
    if not run.is_encoder:
        rows = config.distil_batch or config.loop.batch_size
        tokens = (config.distil_length or config.row_length) * rows // config.loop.accumulate
        with run.shards.running(model):
            chunk = chunk_of(model, tokens, run.accelerator, run.log)
    outputs = partial(predictions, with_layers=config.hidden_states > 0, chunk=chunk)
    if run.teacher is not None:
        teacher = other_teacher(run.teacher, outputs)
    else:
        teacher = softmax_teacher(
            model,
            weights_change=config.train == "full",
            outputs=hidden_states if run.is_encoder else outputs,
            context_parallel=config.loop.cp_size > 1,
            dtype=config.teacher_torch_dtype,
            offload=config.offload_teacher,
            shards=run.shards,
        )
    if run.is_encoder:
        return hidden_loss(teacher)
    return distil_loss(
        teacher,
        cross_entropy=config.cross_entropy,
        top_k=config.top_k,
        hidden_states=config.hidden_states,
        label_smoothing=config.label_smoothing_factor,
        chunk=chunk,
    )


def _distil(model: PreTrainedModel, run: Run, config: RecoverConfig) -> PreTrainedModel:
    """Distil softmax into the model; return it with adapters merged."""
    if not config.distil_steps or (config.train == "extras" and not run.output_added(model)):
        reason = (
            "no parameter gets a gradient from the output" if config.distil_steps else "0 steps"
        )
        run.log(f"distillation is skipped: {reason}")
        return model
    factor = config.rate_factor
    if factor is None:
        only_teacher = not (run.is_encoder or config.cross_entropy)
        factor = distillation_factor(run, model) if only_teacher else 1.0
    return run.train(
        model,
        "distil",
        config.distil_steps,
        lambda prepared: _distil_loss(prepared, run, config),
        run.load_model,
        run.step_callback(model, config.distil_steps),
        rows=run.rows_of_length(config.distil_length),
        batch_size=config.distil_batch,
        schedule=config.distil_schedule,
        rate_factor=factor,
    )
