"""Fine-tuning of a swapped model on text, with an equally trained softmax model as baseline."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnzoo.errors import ConfigError, SpecError
from attnzoo.spec import AttentionSpec
from attnzoo.training.distil import distil_loss
from attnzoo.training.loop import OnStep
from attnzoo.training.results import collect_results
from attnzoo.training.runs import Log, Run
from attnzoo.training.train_config import TrainConfig
from attnzoo.training.transfer import extras


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainConfig):
    """Configuration of :func:`finetune`."""

    steps: int = 200
    tune_softmax: bool = True  # train the model with softmax for as many steps, as a baseline

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
    log: Log = lambda text: None,
    on_step: OnStep = lambda stage, step, loss: None,
) -> dict[str, Any]:
    """Fine-tune a swapped causal model on text, evaluate it, and save it to ``out``.

    Args:
        path: Folder of a saved model.
        spec: The swap; ``None`` for a model that is already swapped.
        data: Text files, JSON lines, parquet, or folders of them.
        out: New folder for the model and the results, ``finetuning.json``.
        config: Configuration; defaults when ``None``.
        column: Field of JSON and parquet files that holds the text.
        resume: Whether to resume from the last checkpoint in ``out``.
        log: Called with progress messages.
        on_step: Called after each step with the stage, the step and the loss.

    Returns:
        The content of ``finetuning.json``.

    Raises:
        AttnzooError: An argument is invalid.
    """
    config = config or FinetuneConfig()
    run = Run(
        "finetune",
        path,
        spec,
        data,
        out,
        config,
        column=column,
        resume=resume,
        weights=None,
        log=log,
        on_step=on_step,
    )
    with closing(run):
        return run.finished if run.finished is not None else _finetune(run, config)


def _finetune(run: Run, config: FinetuneConfig) -> dict[str, Any]:
    """Train and evaluate the model of a run, save it, and return its results."""
    run.evaluate_baselines()
    if config.train == "extras" and not extras(run.model):
        raise SpecError(
            "The backends have no parameters of their own, so there is nothing to train with "
            "train='extras'; use 'lora' or 'full'"
        )
    loss = distil_loss(None, cross_entropy=1.0, label_smoothing=config.label_smoothing_factor)
    if config.tune_softmax and config.train != "extras":
        run.tune_softmax(config.steps, lambda prepared: loss)
    before_step = run.step_callback(run.model, config.steps)
    model = run.train(
        run.model, "finetune", config.steps, lambda prepared: loss, run.load_model, before_step
    )
    results = collect_results(run, model, run.evaluate_result(model))
    run.save(model, results)
    return results
