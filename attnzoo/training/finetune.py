"""Fine-tuning of a swapped model on text, with an equally trained softmax model as baseline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from attnzoo.errors import ConfigError, SpecError
from attnzoo.spec import AttentionSpec
from attnzoo.training.distil import chunk_of, distil_loss
from attnzoo.training.encoder import is_encoder
from attnzoo.training.loop import Loss, OnStep
from attnzoo.training.masked import MaskedRun
from attnzoo.training.results import complete
from attnzoo.training.runs import Log, Run
from attnzoo.training.train_config import TrainConfig
from attnzoo.training.transfer import output_extras


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainConfig):
    """Configuration of :func:`finetune`."""

    steps: int = 200
    mlm_probability: float | None = None  # of an encoder's tokens to predict; None: 0.15
    tune_softmax: bool = True  # train the model with softmax for as many steps, as a baseline

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")
        self.check_warmup({"finetune": self.steps})
        if self.mlm_probability is not None and not 0 < self.mlm_probability < 1:
            raise ConfigError(
                f"mlm_probability must be above 0 and below 1, got {self.mlm_probability}"
            )


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
    on_step: OnStep = lambda stage, step, metrics: None,
) -> dict[str, Any]:
    """Fine-tune a swapped model on text, evaluate it, and save it to ``out``.

    A causal model learns to predict the next token, an encoder masked tokens.

    Args:
        path: Folder of a saved model.
        spec: The swap; ``None`` for a model that is already swapped.
        data: Text files, JSON lines, parquet, or folders of them.
        out: New folder for the model and the results, ``finetuning.json``.
        config: Configuration; defaults when ``None``.
        column: Field of JSON and parquet files that holds the text.
        resume: Whether to resume from the last checkpoint in ``out``.
        log: Called with progress messages.
        on_step: Called after each step with the stage, the step and its metrics.

    Returns:
        The content of ``finetuning.json``.

    Raises:
        AttnzooError: An argument is invalid.
    """
    config = config or FinetuneConfig()
    encoder = is_encoder(path)
    if config.mlm_probability is not None and not encoder:
        raise ConfigError(
            "mlm_probability is for encoders, and this model is a decoder; leave it out"
        )
    run = (MaskedRun if encoder else Run)(
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
    return complete(run, partial(_finetune, config=config))


def _finetune(run: Run, config: FinetuneConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model of a run, fine-tuned, and no further results."""
    if config.train == "extras" and not output_extras(run.model):
        raise SpecError(
            "The backends have no parameters of their own with a gradient from the model's output, "
            "so there is nothing to train with train='extras'; use 'lora' or 'full' (`attnzoo "
            "recover` trains indexers)"
        )
    before_step = run.step_callback(run.model, config.steps)
    make_loss = partial(_loss, run=run, config=config)
    if config.tune_softmax and config.train != "extras":
        run.tune_softmax(config.steps, make_loss, before_step)
    model = run.train(run.model, "finetune", config.steps, make_loss, run.load_model, before_step)
    return model, {}


def _loss(model: Any, run: Run, config: FinetuneConfig) -> Loss:
    """Return the loss of a model that :meth:`Run.prepare` returned."""
    if isinstance(run, MaskedRun):
        return run.loss()
    tokens = config.row_length * config.loop.batch_size // config.loop.accumulate
    with run.shards.running(model):
        chunk = chunk_of(model, tokens, run.accelerator, run.log)
    return distil_loss(
        None,
        cross_entropy=1.0,
        label_smoothing=config.label_smoothing_factor,
        chunk=chunk,
    )
