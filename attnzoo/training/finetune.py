"""Plain fine-tuning of a swapped model on text, and of softmax beside it, to be fair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnzoo.errors import ConfigError, SpecError
from attnzoo.spec import AttentionSpec
from attnzoo.training.account import account
from attnzoo.training.control import tune_softmax
from attnzoo.training.distil import distil_loss
from attnzoo.training.evaluate import branch_qualities
from attnzoo.training.runs import Run, Tell, Tick, TrainConfig
from attnzoo.training.transfer import extras


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainConfig):
    """How a swapped model is fine-tuned."""

    steps: int = 200
    tune_softmax: bool = True  # as many steps of the model with its own attention, to compare with

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")


def finetune(
    path: Path,
    spec: AttentionSpec | None,
    data: list[Path],
    out: Path,
    config: FinetuneConfig | None = None,
    *,
    column: str = "text",
    resume: bool = False,
    tell: Tell = lambda text: None,
    tick: Tick = lambda stage, step, loss: None,
) -> dict[str, Any]:
    """Train a swapped causal model to predict text, judge it, and save it to ``out``.

    Args:
        path: Folder of a saved model.
        spec: The swap; ``None`` for a model that is swapped already.
        data: Text files, JSON lines, parquet, or folders of them.
        out: A new folder for the model; ``finetuning.json`` in it says how good it is.
        config: How; defaults without.
        column: Field of JSON and parquet that holds the text.
        resume: Go on from the last checkpoint in ``out``.
        tell: Called with what is going on.
        tick: Called after every step with the stage, its step and the loss.

    Returns:
        What ``finetuning.json`` holds.

    Raises:
        AttnzooError: Something that was given cannot be used.
    """
    config = config or FinetuneConfig()
    run = Run(
        path,
        spec,
        data,
        out,
        config,
        column=column,
        resume=resume,
        weights=None,
        tell=tell,
        tick=tick,
    )
    run.judge_before()
    if config.train == "extras" and not extras(run.model):
        raise SpecError(
            "The backends have no parameters of their own, so train='extras' has nothing to do; "
            "take 'lora' or 'full'"
        )
    loss = distil_loss(None, cross_entropy=1.0)
    if config.tune_softmax and config.train != "extras":
        tune_softmax(run, config.steps, lambda trained: loss)
    before = run.schedule(run.model, config.steps)
    model = run.trained(
        run.model, "finetune", config.steps, lambda trained: loss, run.fresh, before
    )
    lines = {**run.lines.known, "result": run.quality(model)}
    lines |= branch_qualities(model, run.quality)
    results = account(run, model, lines)
    run.save(model, results, "finetune")
    return results
