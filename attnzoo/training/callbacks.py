"""Callbacks of a stage: its best state, the entropy of heads, and window dropout."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import ProgressCallback, TrainerCallback

from attnzoo.backends.parts.recurrent import RecurrentBackend
from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.config import Geometry
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import SpecError, UntrainedWarning
from attnzoo.evaluation.generation import GenerationBatch, continue_greedily
from attnzoo.evaluation.heads import entropy
from attnzoo.evaluation.margins import paired
from attnzoo.training.transfer import evaluation_mode, swapped_layers

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
        """Return whether the loss is lower, and generation not worse by a standard error."""
        if not math.isfinite(self.loss) or not paired(self.losses, other.losses).mean < 0:
            return False
        equal = paired(self.agreement, other.agreement)
        return not equal.count or equal.mean >= -equal.error

    def metrics(self) -> dict[str, float]:
        """Return the means by the names under which they are logged."""
        found = {"eval_loss": self.loss}
        if self.agreement:
            found["eval_agreement"] = math.fsum(self.agreement) / len(self.agreement)
        return found


def log_metrics(trainer: Any, metrics: dict[str, float]) -> None:
    """Log numbers; the losses that are due in the same step are logged all the same."""
    due = trainer.control.should_log
    trainer.log(metrics)
    trainer.control.should_log = due


def is_due(args: Any, state: Any) -> bool:
    """Return whether a stage is evaluated after this step: by ``eval_steps``, and at its end."""
    every = args.eval_steps * state.max_steps if args.eval_steps < 1 else args.eval_steps
    at: int = state.global_step
    return at % max(1, math.ceil(every)) == 0 or at == int(state.max_steps)


class BestState(TrainerCallback):
    """Keeps the trained parameters of a stage at their best, by held-out rows.

    Step 0 is a candidate: a stage never returns a worse model than it received. Every process
    evaluates the same rows and keeps its own parts of the parameters.

    Args:
        rows: Batches of one held-out row, on the model's device.
        generation: Prompts with the original model's continuations; ``None`` if generation is not
            evaluated.
        log: Called with messages.

    Attributes:
        trainer: The trainer of the stage.
    """

    trainer: Any

    def __init__(
        self,
        rows: Sequence[Mapping[str, Tensor]],
        generation: GenerationBatch | None = None,
        log: Any = lambda text: None,
    ) -> None:
        self.rows, self.generation, self.log = rows, generation, log
        self.best: Score | None = None
        self.state: list[Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate the state from which the stage starts."""
        if self.best is None:
            self._judge(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate the state if it is time to."""
        if is_due(args, state):
            self._judge(state.global_step)

    def _judge(self, step: int) -> None:
        score, state = self.score(step), self._parameters()
        if self.best is None or score.is_better_than(self.best):
            self.best = score
            self.state = [p.detach().clone() for p in state]
        log_metrics(self.trainer, score.metrics())

    def restore(self) -> None:
        """Give the model its best state."""
        if self.best is None:
            return
        with torch.no_grad():
            for parameter, saved in zip(self._parameters(), self.state, strict=True):
                parameter.copy_(saved)
        steps = self.trainer.args.max_steps
        if self.best.step != steps:
            self.log(
                f"the state after {self.best.step} of {steps} steps is kept, the best by a "
                f"held-out loss of {self.best.loss:.4f}"
            )

    def save(self, folder: Path) -> None:
        """Write the best state into a checkpoint's folder; each process its own parts."""
        if self.best is not None:
            folder.mkdir(parents=True, exist_ok=True)
            rank = self.trainer.accelerator.process_index
            data = {"score": asdict(self.best), "state": [_local(x) for x in self.state]}
            torch.save(data, folder / FILE.format(rank=rank))

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote; the parameters take the state in :meth:`restore`."""
        path = folder / FILE.format(rank=self.trainer.accelerator.process_index)
        if path.is_file():
            data = torch.load(path, weights_only=True, map_location="cpu")
            self.best, self.state = Score(**data["score"]), data["state"]

    def _parameters(self) -> list[Tensor]:
        """Return the parts of the trained parameters that this process has.

        FSDP2 leaves whole tensors in the outermost module after an evaluation.
        """
        for module in self.trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return [_local(p) for p in self.trainer.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def score(self, step: int) -> Score:
        """Evaluate the model after so many steps."""
        trainer, model = self.trainer, self.trainer.model
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        for backend in swapped_layers(model).values():
            if isinstance(backend, RecurrentBackend):
                backend.linear_only_heads = None
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())  # a raw swap is untrained by definition
            warnings.simplefilter("ignore", UntrainedWarning)
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.enter_context(evaluation_mode(model))
            stack.enter_context(trainer.accelerator.autocast())
            losses = [float(trainer.stage_loss(model, row)) for row in self.rows]
            agreement: list[float] = []
            if self.generation is not None:
                reference = self.generation.reference
                assert reference is not None
                found = continue_greedily(
                    model, self.generation.prompts, self.generation.new_tokens
                )
                agreement = found.eq(reference).float().mean(1).tolist()
        return Score(step=step, losses=losses, agreement=agreement)


def _local(x: Tensor) -> Tensor:
    """Return the part of a tensor that this process has."""
    part: Tensor = x.detach()
    return part.to_local() if hasattr(part, "to_local") else part


class LossProgress(ProgressCallback):
    """A bar with the last loss, in place of a line for every step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the loss."""
        if state.is_world_process_zero and self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.4f}")


class HeadEntropy(TrainerCallback):
    """Logs the entropy of the attention weights in bits, by layer: a mean over heads and queries.

    Args:
        inputs: Arguments of the model: a few held-out texts, on its device.

    Attributes:
        trainer: The trainer of the stage.
    """

    trainer: Any

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.inputs = inputs

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the start of the stage."""
        self._log()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the heads when the stage is evaluated."""
        if is_due(args, state):
            self._log()

    def _log(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntrainedWarning)  # no step was taken yet
            found = head_entropies(self.trainer.model, self.inputs)
        numbers = {
            x.geometry.name: x.geometry.layer for x in swapped_layers(self.trainer.model).values()
        }
        means = {
            f"entropy/{numbers[n]}": round(math.fsum(bits) / len(bits), 4)
            for n, bits in found.items()
        }
        # a model that diverges has none; the loss of its next step explains that
        if means and all(map(math.isfinite, means.values())):
            log_metrics(self.trainer, means)


@torch.no_grad()
def head_entropies(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the entropy of every head's attention weights in bits, a mean over real queries.

    Args:
        model: A swapped model, or a wrapper around one.
        inputs: Arguments of the model.

    Returns:
        A number per head by the name of the layer, of the layers whose backends have one matrix of
        weights per head.
    """
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        for name, backend in swapped_layers(model).items():
            if backend.capabilities.has_weights:
                request = backend.register_forward_pre_hook(_request_weights, with_kwargs=True)
                record = backend.register_forward_hook(
                    partial(_record_entropy, found, name), with_kwargs=True
                )
                stack.callback(request.remove)
                stack.callback(record.remove)
        if swapped_layers(model):
            model(**inputs)
    return found


def _request_weights(
    backend: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "return_weights": True}


def _record_entropy(
    found: dict[str, list[float]],
    name: str,
    backend: AttentionBackend,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: AttentionOutput,
) -> AttentionOutput:
    """Record the entropy of a layer's weights, and return its output without them."""
    if output.weights is None:  # inside of a transfer, which compares outputs
        return output
    bits = entropy(output.weights.float())  # [B, H, T]
    mask = kwargs.get("mask")
    valid = None if mask is None else mask.query_padding(*output.weights.shape[2:])
    rows = torch.ones_like(bits[:, 0]) if valid is None else valid.to(bits)
    mean = (bits * rows[:, None]).sum((0, 2)) / rows.sum().clamp(min=1)
    found[name] = [round(x, 4) for x in mean.tolist()]
    return output._replace(weights=None)


class WindowDropout(TrainerCallback):
    """Decays the dropout of windows linearly to 0 over a stage.

    A hybrid otherwise learns to rely on its window only. Source: scheduled sliding-window dropout,
    arXiv:2510.05901.

    Args:
        model: The model, whose hybrids have it.
        share: The fraction of heads at the start.
        seed: That of the run.

    Raises:
        SpecError: No layer has a window and a linear branch.
    """

    def __init__(self, model: nn.Module, share: float, seed: int) -> None:
        self.share, self.seed = share, seed
        self.hybrids = [
            backend
            for backend in swapped_layers(model).values()
            if isinstance(backend, RecurrentBackend) and backend.far_log_weight is not None
        ]
        if not self.hybrids:
            raise SpecError(
                "window_dropout needs a layer with a window and a linear branch, such as "
                "gated_linear or delta with window=32; leave it out"
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the heads of the step."""
        now = self.share * (1 - state.global_step / state.max_steps)
        for backend in self.hybrids:
            backend.linear_only_heads = draw_heads(
                now, 100_000 * self.seed + state.global_step, backend.geometry
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give all heads their window."""
        for backend in self.hybrids:
            backend.linear_only_heads = None


def draw_heads(share: float, seed: int, geometry: Geometry) -> Tensor | None:
    """Return which heads of a layer attend without their window, ``[H]`` bool, or ``None``.

    All rows and ranks draw the same heads, and so does a forward pass that gradient checkpointing
    repeats.

    Args:
        share: The expected fraction of the heads.
        seed: A different one for every step.
        geometry: Shape of the layer.
    """
    if share <= 0:
        return None
    generator = torch.Generator("cpu").manual_seed(1000 * seed + geometry.layer)
    drawn = torch.rand(geometry.num_heads, generator=generator, dtype=torch.float32, device="cpu")
    return drawn < share
