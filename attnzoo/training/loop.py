"""Training loop on Accelerate: batches, optimiser steps, checkpoints and resumption.

A run has several stages; each trains some parameters of one model with one loss. Each batch is
split over the processes, so the steps do not depend on the number of processes.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from attnzoo.errors import AttnzooError, ConfigError
from attnzoo.evaluation.rows import Rows
from attnzoo.hf.context_parallel import context_parallel
from attnzoo.runtime.activation_offload import offload_activations
from attnzoo.training.best_state import BestState, LastState, random_state_kept
from attnzoo.training.checkpoints import Checkpoints, explain_write_errors
from attnzoo.training.compiled import CompiledLayers
from attnzoo.training.frozen_weights import narrow_again, widen
from attnzoo.training.head_entropy import HEADS, EntropyLog
from attnzoo.training.json_lines import append_line, read_lines, truncate_lines
from attnzoo.training.lr_find import find_rates
from attnzoo.training.model_shards import ModelShards
from attnzoo.training.optimizer import (
    BETAS,
    check_optimizer,
    check_schedule,
    make_optimizer,
    make_schedule,
)
from attnzoo.training.safe_load import load_state
from attnzoo.training.sharding import (
    SHARDED,
    accumulate_gradients,
    gather_weights,
    prepare_cp_loader,
    with_label_counts,
    zero_loss,
)
from attnzoo.training.trained_state import restored, without_frozen_weights

LOSSES = "losses.jsonl"
DIVERGENCE_ADVICE = (
    "Start again in a new --out with a smaller learning rate (--transfer-lr for transfer; "
    "--weights-lr and --extras-lr for other stages)"
)
MIN_LOSS_SCALE = 1.0  # fp16 halves the scale from 65,536 at each overflow
Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]  # of a prepared model and a batch


class DivergenceError(AttnzooError):
    """A loss, a gradient or a weight is NaN or infinite; training stops."""


class StepMetrics(NamedTuple):
    """Measurements of one optimiser step.

    Attributes:
        loss: Mean loss over micro-batches and processes.
        grad_norm: Norm of the gradient before clipping; ``None`` if the engine does not return it.
        tokens: Tokens of the step over all processes, without padding.
    """

    loss: float
    grad_norm: float | None
    tokens: int


OnStep = Callable[[str, int, StepMetrics], None]  # stage, step


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a run.

    Attributes:
        name: Name in logs and checkpoints.
        steps: Number of optimiser steps.
        groups: Parameter groups with learning rates, as torch's optimisers take them.
        loss: Returns a scalar, given the prepared model and a batch.
        before_step: Called with the step before each step.
        rows: Training rows; those of the loop when ``None``.
        batch_size: Rows per step over all processes; that of the loop when ``None``.
        schedule: Schedule of the rates by transformers' name, and its arguments; that of the loop
            when ``None``.
    """

    name: str
    steps: int
    groups: list[dict[str, Any]]
    loss: Loss
    before_step: Callable[[int], None] = lambda step: None
    rows: Rows | None = None
    batch_size: int | None = None
    schedule: tuple[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Configuration of the optimiser steps and checkpoints of every stage."""

    batch_size: int = 8  # rows per step over all processes
    accumulate: int = 1  # gradient accumulation: micro-batches per batch
    warmup: float = 0.1  # linear warmup: below 1 a fraction of a stage's steps, else steps
    # as of transformers' TrainingArguments; each stage has a schedule of its own
    optim: str = "adamw_torch"  # or another of attnzoo.training.optimizer.OPTIMIZERS
    lr_scheduler_type: str = "cosine"
    lr_scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    clip: float = 1.0  # largest gradient norm
    weight_decay: float = 0.0  # of matrices, not of norms, biases and decays of backends
    betas: tuple[float, float] = BETAS  # of AdamW
    torch_compile: bool = False  # of layers, in training steps
    lr_find_steps: int = 0  # of each short run that searches the rates of a stage; 0: no search
    seed: int = 0
    checkpoint_every: int = 50  # steps; 0: at the end of each stage, and by checkpoint_minutes
    checkpoint_minutes: float | None = None  # minutes between checkpoints, beside those by steps
    keep: int = 2  # checkpoints
    # steps between measurements of the heads' entropy; None: a tenth of each stage; 0: none
    entropy_every: int | None = None
    # Autocast: "no" is float32, "bf16" is bfloat16 with float32 weights, "fp16" is float16 with
    # float32 weights and loss scaling, on GPUs; None is Accelerate's
    precision: str | None = None
    cp_size: int = 1  # context parallelism: processes that split each row
    activation_offloading: bool = False  # to CPU memory, from the forward to the backward pass

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1),
            ("accumulate", 1),
            ("checkpoint_every", 0),
            ("lr_find_steps", 0),
            ("keep", 1),
            ("cp_size", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.checkpoint_minutes is not None and not 0 < self.checkpoint_minutes < math.inf:
            raise ConfigError(
                f"checkpoint_minutes must be above 0 and finite, got {self.checkpoint_minutes}; "
                "leave it out for checkpoints by steps only"
            )
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"A batch of {self.batch_size} rows is not divisible into {self.accumulate} "
                "micro-batches; make batch_size a multiple of accumulate"
            )
        if not (0 <= self.warmup < 1 or (self.warmup >= 1 and float(self.warmup).is_integer())):
            raise ConfigError(
                "warmup is a fraction of the steps, at least 0 and below 1, or a whole number of "
                f"steps, got {self.warmup}"
            )
        if 0 < self.lr_find_steps <= self.warmup:
            raise ConfigError(
                f"Each of the {self.lr_find_steps} steps of lr_find_steps is warmup "
                f"({self.warmup:g} steps); give more, or a warmup below 1, a fraction"
            )
        if not 0 < self.clip < math.inf:
            raise ConfigError(f"clip must be above 0 and finite, got {self.clip}; 1.0 is usual")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(
                f"weight_decay must be at least 0 and finite, got {self.weight_decay}; 0.01 to 0.1 "
                "is usual"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"betas must be two numbers, at least 0 and below 1, got {self.betas}; 0.9 and "
                "0.95 or 0.999 are usual"
            )
        if self.precision not in (None, "no", "bf16", "fp16"):
            raise ConfigError(f"precision must be 'no', 'bf16' or 'fp16', got {self.precision!r}")
        if self.entropy_every is not None and self.entropy_every < 0:
            raise ConfigError(
                f"entropy_every must be at least 0 steps (0: never), got {self.entropy_every}"
            )
        self._check_compile()
        check_optimizer(self.optim, self.betas)
        check_schedule(self.lr_scheduler_type, self.lr_scheduler_kwargs)

    def _check_compile(self) -> None:
        """Raise an error for a setting that does not go with compiled layers."""
        if self.torch_compile and self.cp_size > 1:
            raise ConfigError(
                "torch_compile compiles layers, but those of cp_size > 1 exchange states between "
                "processes; leave one of them out"
            )
        if self.torch_compile and self.activation_offloading:
            raise ConfigError(
                "activation_offloading is not tested with the tensors that layers of torch_compile "
                "save; leave one of them out"
            )

    def warmup_steps(self, steps: int) -> int:
        """Return the steps of linear warmup of a stage with so many steps."""
        return round(self.warmup * steps) if self.warmup < 1 else int(self.warmup)


class Loop:
    """Runs the stages of a run, from its last checkpoint if there is one.

    Args:
        accelerator: An Accelerator with ``split_batches``.
        rows: Training rows.
        config: Configuration of the steps.
        checkpoints: The run's checkpoints.
        progress: Progress of the last checkpoint, as :meth:`Checkpoints.begin` returns it.
        on_step: Called after each step with the stage, the step and its metrics.
        mesh: Process mesh of context parallelism, ``None`` without.

    Attributes:
        entropy_log: Measures the heads of the models, on the main process; ``None`` if not.
        keep_best: Returns what keeps the best state of a stage, given the model and the stage, or
            ``None`` to keep the last one.
        make_judge: Returns what evaluates a model on held-out rows, given the model and the stage;
            needed to search rates.
        log: Called with messages.
        shards: Prepares models of a stage; needed to run one.
    """

    shards: ModelShards
    make_judge: Callable[[nn.Module, Stage], BestState]

    def __init__(
        self,
        accelerator: Accelerator,
        rows: Rows,
        config: LoopConfig,
        checkpoints: Checkpoints,
        progress: Mapping[str, Any] | None = None,
        on_step: OnStep = lambda stage, step, metrics: None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.accelerator, self.rows, self.config = accelerator, rows, config
        self.checkpoints, self.progress, self.on_step = checkpoints, progress, on_step
        self.mesh = mesh
        self.entropy_log: EntropyLog | None = None
        self.keep_best: Callable[[nn.Module, Stage], LastState | None] = lambda model, stage: None
        self.log: Callable[[str], None] = lambda text: None
        self.compiled: AbstractContextManager[Any] = nullcontext()  # of training steps
        self.total = 0  # steps of the stages so far
        self.saved = time.monotonic()  # time of the last checkpoint
        if accelerator.is_main_process:
            for name in (LOSSES, HEADS):
                truncate_lines(checkpoints.out / name, progress["total"] if progress else 0)

    def run(self, model: nn.Module, stage: Stage, rebuild: Callable[[], nn.Module]) -> Any:
        """Train a model for one stage; all parameters outside the stage are frozen.

        Args:
            model: The model that has the stage's parameters.
            stage: The stage.
            rebuild: Returns an unprepared model of the same architecture, which takes the weights
                if FSDP or DeepSpeed shards them; without data if :class:`ModelShards` is enabled.

        Returns:
            The trained model: ``model``, or the rebuilt one if weights are sharded. It has whole
            weights, or a part of each, as :class:`ModelShards` says.

        Raises:
            DivergenceError: A loss, a gradient norm or a weight is not finite. The last checkpoint
                is kept.
        """
        first, self.total = self.total, self.total + stage.steps
        done = 0 if self.progress is None else int(self.progress["total"])
        if done > self.total or stage.steps == 0:
            return model  # the checkpoint of a later stage has this stage's weights
        trained = {id(p) for group in stage.groups for p in group["params"]}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        narrow = widen(p for group in stage.groups for p in group["params"])
        if self.config.lr_find_steps:
            stage = find_rates(self, model, stage, started=done > first)
        wrapped, optimizer, schedule, loader = self._prepare(model, stage)
        best = self.keep_best(self._callable(model, wrapped), stage) or LastState()
        self._start(wrapped, best, resume=done > first)
        model.train()
        batches = self._batches(loader, max(done, first))
        for step in range(max(done - first, 0), stage.steps):
            self._log_entropies(model, stage, step, first + step + 1)
            stage.before_step(step)
            metrics = self._step(wrapped, optimizer, next(batches), stage, step)
            if not self.accelerator.optimizer_step_was_skipped:  # an overflow under fp16
                schedule.step()
            now = first + step + 1
            if self.accelerator.is_main_process:
                line = {"total": now, "stage": stage.name, "step": step, "loss": metrics.loss}
                line["tokens"] = metrics.tokens
                with explain_write_errors(self.checkpoints):
                    append_line(self.checkpoints.out / LOSSES, line)
            if self.accelerator.trackers:
                logged = {"loss": metrics.loss, "learning_rate": schedule.get_last_lr()[0]}
                if metrics.grad_norm is not None:
                    logged["grad_norm"] = metrics.grad_norm
                self.accelerator.log({f"{stage.name}/{k}": x for k, x in logged.items()}, step=now)
            self.on_step(stage.name, step, metrics)
            if step + 1 == stage.steps:
                self._log_entropies(model, stage, step + 1, now)
            best.after_step(step + 1)
            if self._is_checkpoint_due(now) or step + 1 == stage.steps:
                self._require_finite_weights(wrapped, stage, step)
                self._save(wrapped, {"total": now, "stage": stage.name}, best)
        best.restore()
        if self.shards.enabled:
            model = self.shards.collect(wrapped, rebuild())
        elif self.accelerator.distributed_type in SHARDED:
            model = gather_weights(self.accelerator, wrapped, rebuild)
        else:  # removes Accelerate's autocast from forward: models are evaluated in float32
            self.accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
            narrow_again(narrow)
        self.accelerator.free_memory()
        return model.requires_grad_(False)

    def try_stage(self, model: nn.Module, stage: Stage, steps: int) -> list[float] | None:
        """Train a model as in the first steps of a stage, evaluate it, and restore it.

        Nothing is recorded, and the random state is kept. Weights are not sharded.

        Args:
            model: The model, in which only the stage's parameters have gradients.
            stage: The stage.
            steps: Number of steps, over which the schedule of the rates extends.

        Returns:
            The stage's loss on each held-out row; ``None`` if training diverges.
        """
        scaler = self.accelerator.scaler
        scale = None if scaler is None else scaler.state_dict()
        with restored(model), random_state_kept():
            wrapped, optimizer, schedule, loader = self._prepare(model, replace(stage, steps=steps))
            batches = self._batches(loader, 0)
            model.train()
            try:
                for step in range(steps):
                    stage.before_step(step)
                    self._step(wrapped, optimizer, next(batches), stage, step)
                    if not self.accelerator.optimizer_step_was_skipped:
                        schedule.step()
                judge = self.make_judge(model, stage)
                judge.generation = None  # the loss decides
                return judge.score(steps).losses
            except DivergenceError:  # on all processes: the loss is their mean
                return None
            finally:
                self.accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
                self.accelerator.free_memory()
                if scaler is not None:
                    scaler.load_state_dict(scale)

    def _prepare(self, model: nn.Module, stage: Stage) -> Any:
        """Return the prepared model, optimizer, schedule and loader of a stage."""
        self.compiled = CompiledLayers(model) if self.config.torch_compile else nullcontext()
        make_optimizer = partial(self._optimizer, model, stage)
        return self.shards.prepare(model, stage.groups, make_optimizer, self._loader(stage))

    def _callable(self, model: nn.Module, wrapped: nn.Module) -> nn.Module:
        """Return the model to call for an evaluation: the wrapped one where weights are sharded."""
        return wrapped if self.accelerator.distributed_type in SHARDED else model

    def _start(self, model: nn.Module, best: LastState, *, resume: bool) -> None:
        """Load the last checkpoint of a stage, or evaluate the state that it starts from."""
        if resume:
            assert self.progress is not None
            with self._checkpointed(model):
                load_state(self.accelerator, self.progress["path"])
            best.load(Path(self.progress["path"]))
        else:
            best.after_step(0)

    def _optimizer(
        self, model: nn.Module, stage: Stage, groups: list[dict[str, Any]]
    ) -> tuple[torch.optim.Optimizer, Any]:
        """Return the optimizer of a stage's groups and the schedule of its learning rates."""
        optimizer = make_optimizer(
            self.config.optim,
            model,
            groups,
            weight_decay=self.config.weight_decay,
            betas=self.config.betas,
        )
        kind, options = stage.schedule or (
            self.config.lr_scheduler_type,
            self.config.lr_scheduler_kwargs,
        )
        schedule = make_schedule(
            kind,
            options,
            optimizer,
            warmup=self.config.warmup_steps(stage.steps),
            steps=stage.steps,
        )
        return optimizer, schedule

    def _log_entropies(self, model: nn.Module, stage: Stage, step: int, total: int) -> None:
        if self.entropy_log is not None:
            with self.autocast():
                self.entropy_log.record(model, stage.name, step, stage.steps, total)

    def _step(
        self,
        model: nn.Module,
        optimizer: Any,
        batches: list[Mapping[str, Tensor]],
        stage: Stage,
        step: int,
    ) -> StepMetrics:
        """Take one step over the micro-batches of a batch."""
        total = torch.zeros((), device=self.accelerator.device)
        batches = with_label_counts(self.accelerator, batches)
        for number, batch in enumerate(batches, 1):
            sync = accumulate_gradients(self.accelerator, model, last=number == len(batches))
            with sync, self.compiled, self._shard_batch(model, batch) as shard:
                offload = offload_activations(
                    model, self.accelerator.device, enabled=self.config.activation_offloading
                )
                with self.accelerator.autocast(), self.autocast(), offload:
                    loss = stage.loss(model, shard)
                if self.accelerator.distributed_type not in SHARDED:
                    loss = loss + zero_loss(stage.groups)
                self.accelerator.backward(loss / len(batches))
            total += loss.detach() / len(batches)
        # in the order of model.parameters(), with which Accelerate compares them under FSDP2
        parameters = [p for p in model.parameters() if p.requires_grad]
        norm = self.accelerator.clip_grad_norm_(parameters, self.config.clip)
        mean: Tensor = self.accelerator.reduce(total, "mean")
        loss_value = float(mean)
        if not math.isfinite(loss_value):
            raise self._diverged(f"the loss is {loss_value}", stage, step)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of FSDP2
        grad_norm = None if norm is None else float(norm)  # DeepSpeed may return None
        if grad_norm is not None and not math.isfinite(grad_norm):
            self._check_loss_scale(grad_norm, stage, step)
        optimizer.step()  # with loss scaling, a step with infinite gradients is left out
        optimizer.zero_grad()
        return StepMetrics(loss_value, grad_norm, self._count_tokens(batches))

    def _count_tokens(self, batches: list[Mapping[str, Tensor]]) -> int:
        """Return the tokens of a step, of which every process has as many, without padding."""
        groups: int = self.accelerator.num_processes // self.config.cp_size
        own = sum(
            int(batch["attention_mask"].sum())
            if "attention_mask" in batch
            else batch["input_ids"].numel()
            for batch in batches
        )
        return own * groups

    def _check_loss_scale(self, norm: float, stage: Stage, step: int) -> None:
        """Raise an error for a gradient norm that a smaller loss scale cannot make finite."""
        scaler = self.accelerator.scaler
        if scaler is None:
            raise self._diverged(f"the gradient norm is {norm}", stage, step)
        if float(scaler.get_scale()) < MIN_LOSS_SCALE:
            raise self._diverged(
                f"the gradient norm is {norm} with a loss scale of {scaler.get_scale():g}",
                stage,
                step,
            )

    def _require_finite_weights(self, model: nn.Module, stage: Stage, step: int) -> None:
        """Raise an error if a trained weight is not finite; called by all processes."""
        wrong = torch.zeros((), device=self.accelerator.device)
        for parameter in model.parameters():
            if parameter.requires_grad:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                wrong += (~local.detach().isfinite()).any()
        if float(self.accelerator.reduce(wrong, "sum")):
            raise self._diverged("a weight is not finite", stage, step)

    def _diverged(self, what: str, stage: Stage, step: int) -> DivergenceError:
        """Return the error of a run that diverges."""
        self.checkpoints.wait()
        last = self.checkpoints.latest()
        kept = "no checkpoint exists"
        if last is not None:
            kept = f"the last checkpoint, {str(last['path'])!r}, is kept"
        return DivergenceError(
            f"Training diverged: {what} in step {step + 1} of {stage.steps} of stage "
            f"{stage.name!r}. It is stopped, and {kept}. {DIVERGENCE_ADVICE}"
        )

    def _shard_batch(
        self, model: nn.Module, batch: Mapping[str, Tensor]
    ) -> AbstractContextManager[Mapping[str, Any]]:
        """Return a context with this process's tokens of a batch under context parallelism."""
        if self.mesh is None:
            return nullcontext(batch)
        return context_parallel(model, batch, self.mesh["cp"])

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of ``precision``, which overrides Accelerate's."""
        if self.config.precision in (None, "fp16"):  # fp16: the Accelerator's own, with its scaler
            return nullcontext()
        enabled = self.config.precision == "bf16"
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=enabled)

    def _loader(self, stage: Stage) -> DataLoader[Any]:
        rows = stage.rows or self.rows
        batch_size = stage.batch_size or self.config.batch_size
        size = min(batch_size, len(rows)) // self.config.accumulate
        groups = self.accelerator.num_processes // self.config.cp_size
        if size < 1 or size % groups:
            raise ConfigError(
                f"A micro-batch of {size} rows is not divisible over {groups} processes, or groups "
                "of cp_size processes; make batch_size a multiple of accumulate times their "
                f"number, and give at least that many rows of text (there are {len(rows)})"
            )
        # its own generator: the global random state does not depend on the data order
        generator = torch.Generator().manual_seed(self.config.seed)
        loader: DataLoader[Any] = DataLoader(
            rows, batch_size=size, shuffle=True, drop_last=True, generator=generator
        )
        if self.mesh is not None:
            loader = prepare_cp_loader(self.accelerator, loader, self.mesh)
        return loader

    def _batches(self, loader: Any, done: int) -> Iterator[list[Mapping[str, Tensor]]]:
        """Yield the micro-batches of each batch after the first ``done``, epoch by epoch.

        The order of an epoch depends only on the seed and the epoch. Rows that do not fill a batch
        are left out, so that the rows of a step do not depend on the number of micro-batches.
        """
        parts = self.config.accumulate
        whole = len(loader) // parts * parts
        epoch, skipped = divmod(done * parts, whole)
        batches: list[Mapping[str, Tensor]] = []
        while True:
            rest = skip_first_batches(loader, skipped)
            rest.set_epoch(epoch)
            for number, batch in enumerate(rest, skipped):
                if number < whole:
                    batches.append(batch)
                if len(batches) == parts:
                    yield batches
                    batches = []
            epoch, skipped = epoch + 1, 0

    def _is_checkpoint_due(self, total: int) -> bool:
        """Return whether a checkpoint follows a step; called by all processes."""
        every, minutes = self.config.checkpoint_every, self.config.checkpoint_minutes
        due = every > 0 and total % every == 0
        if minutes is None:
            return due
        late = time.monotonic() - self.saved > 60 * minutes and self.accelerator.is_main_process
        flag = torch.tensor(float(late), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum")) or due  # the main process's clock

    def _checkpointed(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context in which the state of a prepared model is saved or loaded.

        DeepSpeed writes all weights in a format of its own.
        """
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return nullcontext()
        return without_frozen_weights(model)

    def _save(self, model: nn.Module, progress: dict[str, Any], best: LastState) -> None:
        """Write a checkpoint, with the best state of the stage; called by all processes."""
        self.saved = time.monotonic()

        def save(path: Path) -> None:
            if self.accelerator.is_main_process:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            with self._checkpointed(model):
                self.accelerator.save_state(str(path), safe_serialization=False)
            best.save(path)
            self.accelerator.wait_for_everyone()

        progress = {**progress, "best": best.prefix}
        self.checkpoints.write(progress, save, main=self.accelerator.is_main_process)


def read_losses(out: Path) -> list[dict[str, Any]]:
    """Return the rows of ``losses.jsonl``: total, stage, step, loss and tokens of each step."""
    return read_lines(out / LOSSES)
