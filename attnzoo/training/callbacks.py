"""Callbacks of a stage: its best state, its progress and the entropy of heads."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import ProgressCallback, TrainerCallback

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import UntrainedWarning
from attnzoo.evaluation.generation import GenerationBatch, continue_greedily
from attnzoo.evaluation.heads import entropy
from attnzoo.evaluation.margins import paired
from attnzoo.training.transfer import evaluation_mode, swapped_layers

FILE = "best-{rank}.pt"  # in a checkpoint


class StageCallback(TrainerCallback):
    """Measures the model at the start of a stage, every ``eval_steps`` and at its end.

    Attributes:
        trainer: The trainer of the stage.
    """

    trainer: Any

    def measure(self, step: int) -> dict[str, float]:
        """Return what is logged after so many steps."""
        raise NotImplementedError

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the start; a checkpoint has its measurements."""
        if state.global_step == 0:
            self._log(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the model if it is time to."""
        at = state.global_step
        if at % args.eval_steps == 0 or at == state.max_steps:
            self._log(at)

    def _log(self, step: int) -> None:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())  # a raw swap is untrained by definition
            warnings.simplefilter("ignore", UntrainedWarning)
            stack.enter_context(evaluation_mode(self.trainer.model))
            stack.enter_context(torch.no_grad())
            metrics = self.measure(step)
        due = self.trainer.control.should_log
        if metrics:
            self.trainer.log(metrics)
        self.trainer.control.should_log = due  # losses that are due in the same step


class BestState(StageCallback):
    """Keeps the trained parameters of a stage at their best, by held-out rows.

    Step 0 is a candidate: a stage never returns a worse model than it received. Every process
    evaluates the same rows and keeps its own parts of the parameters.

    Args:
        rows: Batches of one held-out row, on the model's device.
        generation: Prompts with the original model's continuations; ``None`` if generation is not
            evaluated.
        log: Called with messages.

    Attributes:
        best: Of the best state its step, the stage's loss on each row, and the fraction of equal
            generated tokens of each prompt.
        state: The best state.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Tensor]],
        generation: GenerationBatch | None = None,
        log: Any = lambda text: None,
    ) -> None:
        self.rows, self.generation, self.log = rows, generation, log
        self.best: dict[str, Any] | None = None
        self.state: list[Tensor] = []

    def measure(self, step: int) -> dict[str, float]:
        """Evaluate the model, and keep its state if it is the best."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        agreement: list[float] = []
        with torch.random.fork_rng(devices=devices), self.trainer.accelerator.autocast():
            losses = [float(self.trainer.stage_loss(self.trainer.model, row)) for row in self.rows]
            if (given := self.generation) is not None and given.reference is not None:
                found = continue_greedily(self.trainer.model, given.prompts, given.new_tokens)
                agreement = found.eq(given.reference).float().mean(1).tolist()
        score, state = {"step": step, "losses": losses, "agreement": agreement}, self._parameters()
        if self.best is None or is_better(score, self.best):
            self.best, self.state = score, [p.clone() for p in state]
        measured = {"eval_loss": losses, "eval_agreement": agreement}
        return {name: math.fsum(x) / len(x) for name, x in measured.items() if x}

    def restore(self) -> None:
        """Give the model its best state."""
        if self.best is None:
            return
        with torch.no_grad():
            for parameter, saved in zip(self._parameters(), self.state, strict=True):
                parameter.copy_(saved)
        step, steps = self.best["step"], self.trainer.args.max_steps
        if step != steps:
            loss = math.fsum(self.best["losses"]) / len(self.best["losses"])
            self.log(
                f"the state after {step} of {steps} steps is kept, the best by a held-out loss of "
                f"{loss:.4f}"
            )

    def save(self, folder: Path) -> None:
        """Write the best state into a checkpoint's folder; each process its own parts."""
        if self.best is not None:
            folder.mkdir(parents=True, exist_ok=True)
            rank = self.trainer.accelerator.process_index
            torch.save({"best": self.best, "state": self.state}, folder / FILE.format(rank=rank))

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote; the parameters take the state in :meth:`restore`."""
        path = folder / FILE.format(rank=self.trainer.accelerator.process_index)
        if path.is_file():
            data = torch.load(path, weights_only=True, map_location="cpu")
            self.best, self.state = data["best"], data["state"]

    def _parameters(self) -> list[Tensor]:
        """Return the parts of the trained parameters that this process has.

        FSDP2 leaves whole tensors in the outermost module after an evaluation.
        """
        for module in self.trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        trained: Any = [p.detach() for p in self.trainer.model.parameters() if p.requires_grad]
        return [p.to_local() if hasattr(p, "to_local") else p for p in trained]


def is_better(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Return whether the loss is lower, and generation not worse by a standard error."""
    change = paired(new["losses"], old["losses"]).mean
    equal = paired(new["agreement"], old["agreement"])
    lower = change < 0 and math.isfinite(math.fsum(new["losses"]))
    return lower and (not equal.count or equal.mean >= -equal.error)


class LossProgress(ProgressCallback):
    """A bar with the last loss, in place of a line for every step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the loss."""
        if state.is_world_process_zero and self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.4f}")


class HeadEntropy(StageCallback):
    """Logs the entropy of the attention weights in bits, by layer: a mean over heads and queries.

    Layers whose backends have no single matrix of weights per head are left out.

    Args:
        inputs: Arguments of the model: a few held-out texts, on its device.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.inputs = inputs

    def measure(self, step: int) -> dict[str, float]:
        """Return the entropy of each layer."""
        found: dict[str, float] = {}
        with ExitStack() as stack:
            for backend in swapped_layers(self.trainer.model).values():
                if backend.capabilities.has_weights:
                    request = backend.register_forward_pre_hook(_request_weights, with_kwargs=True)
                    record = partial(_record_entropy, found)
                    stack.callback(request.remove)
                    stack.callback(backend.register_forward_hook(record, with_kwargs=True).remove)
            self.trainer.model(**self.inputs)
        # a model that diverges has none; the loss of its next step explains that
        return found if all(map(math.isfinite, found.values())) else {}


def _request_weights(
    backend: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "return_weights": True}


def _record_entropy(
    found: dict[str, float],
    backend: AttentionBackend,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: AttentionOutput,
) -> AttentionOutput:
    """Record the mean entropy of a layer's weights, and return its output without them."""
    if output.weights is None:  # inside of a transfer, which compares outputs
        return output
    bits = entropy(output.weights.float()).mean(1)  # [B, T]
    mask = kwargs.get("mask")
    valid = None if mask is None else mask.query_padding(*output.weights.shape[2:])
    rows = torch.ones_like(bits) if valid is None else valid.to(bits)
    mean = float((bits * rows).sum() / rows.sum().clamp(min=1))
    found[f"entropy/{backend.geometry.layer}"] = round(mean, 4)
    return output._replace(weights=None)
