"""The best state of a stage: by held-out loss, and by generation where the stage has an output.

A stage starts from the state that the stage before it hands on, and that is its first candidate, so
that no stage hands on a worse state than it got. Held-out rows are evaluated one by one; a later
state replaces the best one if its mean loss is lower and its generated tokens do not equal fewer of
the original model's, by more than a standard error over the same rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from attnzoo.errors import UntrainedWarning
from attnzoo.evaluation.generation import GenerationBatch, continue_greedily
from attnzoo.evaluation.margins import paired
from attnzoo.report.atomic_write import atomic_path
from attnzoo.training.checkpoints import BEST
from attnzoo.training.transfer import evaluation_mode

ROWS = 16  # held-out rows of the loss
EVALUATIONS = 4  # of a stage after its start, if the number of steps is not given
FILE = "best-{rank}.pt"  # in a checkpoint


@dataclass(frozen=True, kw_only=True)
class Score:
    """How good a state is on held-out rows.

    Attributes:
        step: Steps of the stage.
        losses: The stage's loss on each row.
        agreement: Fraction of equal generated tokens of each prompt; empty if it is not measured.
    """

    step: int
    losses: list[float]
    agreement: list[float] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean loss over the rows."""
        return math.fsum(self.losses) / len(self.losses)

    def is_better_than(self, other: Score) -> bool:
        """Return whether the loss is lower than another state's, and generation not worse."""
        if not math.isfinite(self.loss):
            return False
        if not paired(self.losses, other.losses).mean < 0:
            return False
        equal = paired(self.agreement, other.agreement)
        return not equal.count or equal.mean >= -equal.error

    def __str__(self) -> str:
        """Return the loss, and the fraction of equal generated tokens if it is measured."""
        text = f"held-out loss {self.loss:.4f}"
        if self.agreement:
            mean = math.fsum(self.agreement) / len(self.agreement)
            text += f", {mean:.0%} equal generated tokens"
        return text


class LastState:
    """Keeps the last state of a stage: what :class:`BestState` does, without an evaluation."""

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def restore(self) -> None:
        """Do nothing."""

    @property
    def prefix(self) -> str | None:
        """Prefix of the files of the best state; ``None`` if a checkpoint needs none."""
        return None

    def save(self, folder: Path) -> None:
        """Write nothing."""

    def load(self, folder: Path) -> None:
        """Read nothing."""


class BestState(LastState):
    """Keeps the trained parameters of a stage at their best.

    Every process evaluates the same rows and keeps its own parts of the parameters.

    Args:
        stage: The stage, whose loss is evaluated.
        model: The model with the stage's parameters, without wrappers of several processes.
        rows: Batches of one held-out row, on the model's device.
        generation: Prompts with the original model's continuations; ``None`` if generation is not
            evaluated.
        every: Steps between evaluations; a part of the stage when ``None``.
        autocast: Returns the context of the stage's forward passes.
        log: Called with messages.
        rank: Number of the file that this process reads, and its own if it writes one.
        writes: Whether this process writes a file; only one of those with equal parameters does.
    """

    def __init__(
        self,
        stage: Any,
        model: nn.Module,
        *,
        rows: list[Mapping[str, Tensor]],
        generation: GenerationBatch | None,
        every: int | None,
        autocast: Callable[[], AbstractContextManager[Any]],
        log: Callable[[str], None],
        rank: int = 0,
        writes: bool = True,
    ) -> None:
        self.stage, self.model, self.rows, self.generation = stage, model, rows, generation
        self.every = every or max(1, math.ceil(stage.steps / EVALUATIONS))
        self.autocast, self.log, self.rank, self.writes = autocast, log, rank, writes
        self.step = 0
        self.best: Score | None = None
        self.first: Score | None = None
        self.state: list[Tensor] = []
        self.written: str | None = None  # the file that this process has written last, or read

    def after_step(self, step: int) -> None:
        """Evaluate the state after so many steps of the stage, if it is time to."""
        self.step = step
        if step % self.every and step != self.stage.steps:
            return
        score = self.score(step)
        if self.best is None or score.is_better_than(self.best):
            self.best = score
            self.state = [p.detach().clone() for p in self._parameters()]
        self.first = self.first or score
        self.log(f"{self.stage.name}, step {step}: {score}")

    def restore(self) -> None:
        """Give the model its best state."""
        if self.best is None:
            return
        with torch.no_grad():
            for parameter, saved in zip(self._parameters(), self.state, strict=True):
                parameter.copy_(saved)
        if self.best.step != self.stage.steps:
            self.log(
                f"{self.stage.name}: the state after {self.best.step} of {self.stage.steps} steps "
                f"is kept, the best by {self.best}"
            )

    @property
    def prefix(self) -> str | None:
        """Prefix of the files of the best state: stage, step and a hash of the scores.

        ``None`` if the best state is the current one, whose parameters a checkpoint has anyway.
        """
        if self.best is None or self.best.step == self.step:
            return None
        scores = json.dumps([self.stage.name, asdict(self.best)])
        digest = hashlib.sha256(scores.encode()).hexdigest()[:16]
        return f"{self.stage.name.replace(' ', '-')}-{self.best.step:06d}-{digest}"

    def save(self, folder: Path) -> None:
        """Write the scores into a checkpoint's folder, and the best state once beside it."""
        if not self.writes:
            return
        scores = {k: x and asdict(x) for k, x in (("best", self.best), ("first", self.first))}
        name = None if self.prefix is None else f"{self.prefix}-{self.rank}.pt"
        if name is not None and name != self.written:
            (folder.parent / BEST).mkdir(exist_ok=True)
            with atomic_path(folder.parent / BEST / name) as partial:
                torch.save(self.state, partial)
            self.written = name
        torch.save({**scores, "state": None, "file": name}, folder / FILE.format(rank=self.rank))

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote, if this checkpoint has it; the model is loaded before."""
        path = folder / FILE.format(rank=self.rank)
        if not path.is_file():
            return
        data = torch.load(path, weights_only=True, map_location="cpu")
        self.best, self.first = (Score(**data[k]) if data[k] else None for k in ("best", "first"))
        own, saved = self._parameters(), data["state"]  # tensors in checkpoints of version 0.2
        if saved is None:
            saved, self.written = own, data.get("file")
        if self.written is not None:
            file = folder.parent / BEST / Path(self.written).name
            saved = torch.load(file, weights_only=True, map_location="cpu")
        self.state = [x.detach().to(p.device, copy=True) for p, x in zip(own, saved, strict=True)]

    def _parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters in the model's order; FSDP2 replaces those of the stage.

        FSDP2 leaves whole tensors in the outermost module after an evaluation.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return [p for p in self.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def score(self, step: int) -> Score:
        """Evaluate the model after so many steps."""
        self.stage.before_step(self.stage.steps)  # as at the end: no window dropout, fixed draws
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())  # a raw swap is untrained by definition
            warnings.simplefilter("ignore", UntrainedWarning)
            for context in (random_state_kept(), evaluation_mode(self.model), self.autocast()):
                stack.enter_context(context)
            losses = [float(self.stage.loss(self.model, row)) for row in self.rows]
            agreement: list[float] = []
            if self.generation is not None:
                reference = self.generation.reference
                assert reference is not None
                model: Any = self.model
                found = continue_greedily(
                    model, self.generation.prompts, self.generation.new_tokens
                )
                agreement = found.eq(reference).float().mean(1).tolist()
        return Score(step=step, losses=losses, agreement=agreement)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Context after which torch's random numbers are those that they would be without it."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
