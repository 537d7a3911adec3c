"""One stage of training on Accelerate: batches, steps, checkpoints, and where it stands.

Every stage trains some parameters of one model by one loss. It runs on one process or many; a batch
is split among them, so that two processes take the steps that one would.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from transformers.optimization import get_cosine_schedule_with_warmup

from attnzoo.errors import ConfigError
from attnzoo.integrations.context_parallel import context_parallel
from attnzoo.report.whole import write_whole
from attnzoo.training.checkpoints import Checkpoints, explained
from attnzoo.training.data import Rows
from attnzoo.training.sharding import SHARDED, filled, same_rows

LOSSES = "losses.jsonl"
Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]  # of a wrapped model on one batch


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is trained, by which loss, for how long.

    Attributes:
        name: In logs and checkpoints.
        steps: Steps of the optimiser.
        groups: Parameters with their learning rates, as torch's optimisers take them.
        loss: Given the wrapped model and a batch, returns a scalar.
        before: Called with the step before each, for what changes along the way.
    """

    name: str
    steps: int
    groups: list[dict[str, Any]]
    loss: Loss
    before: Callable[[int], None] = lambda step: None


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How steps are taken, in every stage."""

    batch_size: int = 8  # rows of a step, over all processes
    accumulate: int = 1  # parts in which a batch is taken
    warmup: float = 0.1  # share of the steps in which the learning rate rises; then a cosine
    clip: float = 1.0  # largest norm of the gradient
    weight_decay: float = 0.0
    seed: int = 0
    checkpoint_every: int = 50  # steps
    keep: int = 2  # checkpoints
    # Of products: "no" is float32, "bf16" autocasts, weights stay float32; None is as launched
    precision: str | None = None
    cp_size: int = 1  # processes that share every row; each holds an equal part of its tokens

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1),
            ("accumulate", 1),
            ("checkpoint_every", 1),
            ("keep", 1),
            ("cp_size", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"A batch of {self.batch_size} rows does not divide into {self.accumulate} parts; "
                "make batch_size a multiple of accumulate"
            )
        if not 0 <= self.warmup < 1:
            raise ConfigError(
                f"warmup is a share of the steps, at least 0 and below 1, got {self.warmup}"
            )
        if self.clip <= 0:
            raise ConfigError(f"clip must be above 0, got {self.clip}; 1.0 is usual")
        if self.precision not in (None, "no", "bf16"):
            raise ConfigError(f"precision must be 'no' or 'bf16', got {self.precision!r}")


class Loop:
    """Runs stages one after the other, from where an earlier run stopped.

    Args:
        accelerator: Made with ``split_batches``.
        rows: To train on.
        config: How steps are taken.
        checkpoints: Where the run is kept.
        progress: Where it stopped, as :meth:`Checkpoints.begin` returns it.
        tick: Called after every step with the stage's name, the step and the loss.
        mesh: The processes by row and by share of a row, where rows are shared.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        rows: Rows,
        config: LoopConfig,
        checkpoints: Checkpoints,
        progress: Mapping[str, Any] | None = None,
        tick: Callable[[str, int, float], None] = lambda stage, step, loss: None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.accelerator, self.rows, self.config = accelerator, rows, config
        self.checkpoints, self.progress, self.tick = checkpoints, progress, tick
        self.mesh = mesh
        self.total = 0  # steps of all stages so far
        if accelerator.is_main_process:
            _cut_losses(checkpoints.out / LOSSES, progress["total"] if progress else 0)

    def run(self, model: nn.Module, stage: Stage, rebuild: Callable[[], nn.Module]) -> Any:
        """Train a model through one stage; what the stage does not name is left alone.

        Args:
            model: As the stage's parameters belong to it.
            stage: What to do.
            rebuild: Makes such a model anew. Where the weights are sharded over the processes, it
                is called at the end and given them, so that what follows has them whole.

        Returns:
            The trained model, whole on every process: ``model``, or the one that was rebuilt.
        """
        first, self.total = self.total, self.total + stage.steps
        done = 0 if self.progress is None else int(self.progress["total"])
        if done > self.total or stage.steps == 0:
            return model  # a later checkpoint holds what this stage did
        chosen = {id(p) for group in stage.groups for p in group["params"]}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        optimizer = torch.optim.AdamW(
            stage.groups, betas=(0.9, 0.95), weight_decay=self.config.weight_decay
        )
        rises = round(self.config.warmup * stage.steps)
        schedule = get_cosine_schedule_with_warmup(optimizer, rises, stage.steps)
        wrapped, optimizer, schedule, loader = self.accelerator.prepare(
            model, optimizer, schedule, self._loader()
        )
        if done > first:
            assert self.progress is not None
            self.accelerator.load_state(str(self.progress["path"]))
        model.train()
        batches = self._batches(loader, max(done, first))
        for step in range(max(done - first, 0), stage.steps):
            stage.before(step)
            loss = self._step(wrapped, optimizer, next(batches), stage)
            schedule.step()
            now = first + step + 1
            if self.accelerator.is_main_process:
                line = {"total": now, "stage": stage.name, "step": step, "loss": loss}
                with explained(self.checkpoints):
                    _append(self.checkpoints.out / LOSSES, line)
            if self.accelerator.trackers:
                rate = schedule.get_last_lr()[0]
                self.accelerator.log(
                    {f"{stage.name}/loss": loss, f"{stage.name}/learning_rate": rate}, step=now
                )
            self.tick(stage.name, step, loss)
            if now % self.config.checkpoint_every == 0 or step + 1 == stage.steps:
                self._save({"total": now, "stage": stage.name})
        if self.accelerator.distributed_type in SHARDED:
            model = filled(self.accelerator, wrapped, rebuild())
        self.accelerator.free_memory()
        return model.requires_grad_(False)

    def _step(
        self, model: nn.Module, optimizer: Any, batches: list[Mapping[str, Tensor]], stage: Stage
    ) -> float:
        """Take one step over the parts of a batch; returns the mean loss of all processes."""
        total = torch.zeros((), device=self.accelerator.device)
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            alone = nullcontext() if last else self.accelerator.no_sync(model)
            with alone, self._share(model, batch) as share:
                with self.accelerator.autocast(), self._precision():
                    loss = stage.loss(model, share)
                if self.accelerator.distributed_type not in SHARDED:
                    loss = loss + touched(stage)
                self.accelerator.backward(loss / len(batches))
            total += loss.detach() / len(batches)
        # in the model's order: Accelerate compares them with its, one by one, under FSDP2
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.accelerator.clip_grad_norm_(parameters, self.config.clip)
        optimizer.step()
        optimizer.zero_grad()
        mean: Tensor = self.accelerator.reduce(total, "mean")
        return float(mean)

    def _share(
        self, model: nn.Module, batch: Mapping[str, Tensor]
    ) -> AbstractContextManager[Mapping[str, Any]]:
        """Return this process's share of a batch, where rows are shared."""
        if self.mesh is None:
            return nullcontext(batch)
        return context_parallel(model, batch, self.mesh["cp"])

    def _precision(self) -> AbstractContextManager[object]:
        """Return the autocast that was asked for, over that of the launch."""
        if self.config.precision is None:
            return nullcontext()
        wanted = self.config.precision == "bf16"
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=wanted)

    def _loader(self) -> DataLoader[Any]:
        size = min(self.config.batch_size, len(self.rows)) // self.config.accumulate
        parts = self.accelerator.num_processes // self.config.cp_size
        if size < 1 or size % parts:
            raise ConfigError(
                f"{size} rows at a time do not divide over {parts} processes, or groups that share "
                "rows; make batch_size a multiple of accumulate times these, and give at least "
                f"that many rows of text (there are {len(self.rows)})"
            )
        own = torch.Generator().manual_seed(self.config.seed)  # the global one stays in step
        loader: DataLoader[Any] = DataLoader(
            self.rows, batch_size=size, shuffle=True, drop_last=True, generator=own
        )
        return loader if self.mesh is None else same_rows(self.accelerator, loader, self.mesh)

    def _batches(self, loader: Any, done: int) -> Iterator[list[Mapping[str, Tensor]]]:
        """Yield the parts of every batch after the first ``done``, epoch after epoch.

        The order of an epoch depends on the seed and its number alone.
        """
        parts = self.config.accumulate
        epoch, skipped = divmod(done * parts, len(loader))
        held: list[Mapping[str, Tensor]] = []
        while True:
            rest = skip_first_batches(loader, skipped)
            rest.set_epoch(epoch)
            for batch in rest:
                held.append(batch)
                if len(held) == parts:
                    yield held
                    held = []
            epoch, skipped = epoch + 1, 0

    def _save(self, progress: dict[str, Any]) -> None:
        """Write a checkpoint; all processes take part."""

        def save(path: Path) -> None:
            if self.accelerator.is_main_process:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self.accelerator.save_state(str(path), safe_serialization=False)
            self.accelerator.wait_for_everyone()

        self.checkpoints.write(progress, save, main=self.accelerator.is_main_process)
        self.accelerator.wait_for_everyone()


def touched(stage: Stage) -> Tensor:
    """Return a zero that depends on all that a stage trains.

    Every parameter then has a gradient in every step, if only of zeros. A window that covers whole
    rows leaves the linear branch without, and torch's DistributedDataParallel waits for all.
    """
    found = torch.zeros((), device=stage.groups[0]["params"][0].device)
    for group in stage.groups:
        for parameter in group["params"]:
            found = found + 0 * parameter.float().sum()
    return found


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _cut_losses(path: Path, total: int) -> None:
    """Forget the losses of steps that are going to be taken again."""
    if path.is_file():
        lines = path.read_text("utf-8").splitlines()
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["total"] <= total]
        write_whole(path, "".join(f"{line}\n" for line in kept))


def read_losses(out: Path) -> list[dict[str, Any]]:
    """Return what every step of a run lost, in order."""
    path = out / LOSSES
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
