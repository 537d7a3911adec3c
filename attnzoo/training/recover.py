"""Recovery of a swapped model, end to end: transfer, distil, judge, save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.errors import ConfigError
from attnzoo.spec import AttentionSpec
from attnzoo.training.account import account
from attnzoo.training.control import tune_softmax
from attnzoo.training.distil import (
    distil_loss,
    hidden_loss,
    model_inputs,
    own_teacher,
    read_hidden,
    read_logits,
)
from attnzoo.training.encoder import EncoderRun, is_encoder
from attnzoo.training.evaluate import branch_qualities
from attnzoo.training.loop import Loss, Stage
from attnzoo.training.runs import Run, Tell, Tick, TrainConfig
from attnzoo.training.transfer import Target, Transfer, extras, learning_layers


@dataclass(frozen=True, kw_only=True)
class RecoverConfig(TrainConfig):
    """How a swapped model is recovered. Defaults are those that suit the embedded model."""

    transfer_steps: int = 100  # of every block of layers
    distil_steps: int = 100
    transfer_lr: float | None = None  # 2e-2 towards outputs, 5e-2 towards attention without
    transfer_target: Target = "output"  # of each layer; or its "attention" weights
    layers_at_once: int | None = None  # that transfer teaches; None teaches all together
    cross_entropy: float = 0.0  # share of the text's own next token in the distillation loss
    top_k: int | None = None  # of the teacher's predictions that count one by one; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("transfer_steps", "distil_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("layers_at_once", "top_k"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.transfer_lr is not None and self.transfer_lr <= 0:
            raise ConfigError(f"transfer_lr must be above 0, got {self.transfer_lr}")
        if self.transfer_target not in ("output", "attention"):
            raise ConfigError(
                f"transfer_target must be 'output' or 'attention', got {self.transfer_target!r}"
            )
        if not 0 <= self.cross_entropy <= 1:
            raise ConfigError(f"cross_entropy is a share, from 0 to 1, got {self.cross_entropy}")


def recover(
    path: Path,
    spec: AttentionSpec,
    data: list[Path],
    out: Path,
    config: RecoverConfig | None = None,
    *,
    column: str = "text",
    resume: bool = False,
    weights: str | None = None,
    tell: Tell = lambda text: None,
    tick: Tick = lambda stage, step, loss: None,
) -> dict[str, Any]:
    """Swap a saved model, bring its quality back, judge it, and save it to ``out``.

    A causal model is judged by loss and recall, an encoder by how near its embeddings come to what
    they were.

    Args:
        path: Folder of a saved model that is not swapped, a decoder or an encoder.
        spec: The swap.
        data: Text files, JSON lines, parquet, or folders of them.
        out: A new folder for the model; ``recovery.json`` in it says how good it is.
        config: How; defaults without.
        column: Field of JSON and parquet that holds the text.
        resume: Go on from the last checkpoint in ``out``.
        weights: Names the weights that the spec was planned for, if it was.
        tell: Called with what is going on.
        tick: Called after every step with the stage, its step and the loss.

    Returns:
        What ``recovery.json`` holds.

    Raises:
        AttnzooError: Something that was given cannot be used.
    """
    config = config or RecoverConfig()
    encoder = is_encoder(path)
    if encoder:
        _refuse_text_loss(config)
    run = (EncoderRun if encoder else Run)(
        path,
        spec,
        data,
        out,
        config,
        column=column,
        resume=resume,
        weights=weights,
        tell=tell,
        tick=tick,
    )
    run.judge_before()
    if config.cross_entropy and config.distil_steps and config.train != "extras":
        tune_softmax(run, config.distil_steps, lambda trained: _distil_loss(trained, run, config))
    model = _distil(_transfer(run.model, run, config), run, config)
    lines = dict(run.lines.known)
    # without the text's own tokens, its own predictions are all that softmax would have learned
    lines.setdefault("softmax tuned", lines["softmax"])
    lines["result"] = run.quality(model)
    lines |= branch_qualities(model, run.quality)
    results = account(run, model, lines)
    run.save(model, results, "recover")
    return results


def _refuse_text_loss(config: RecoverConfig) -> None:
    for name, none in (("cross_entropy", 0.0), ("top_k", None)):
        if getattr(config, name) != none:
            raise ConfigError(
                f"{name} is about predicted text, and an encoder is distilled to its hidden "
                "states; leave it out"
            )


def _transfer(model: PreTrainedModel, run: Run, config: RecoverConfig) -> PreTrainedModel:
    """Teach every layer to give what softmax gives, all together or a block after the other."""
    able = learning_layers(model)
    if not able or not config.transfer_steps:
        run.tell("no transfer: " + ("0 steps" if able else "the backends have nothing to learn"))
        return model
    size = config.layers_at_once or len(able)
    rate = config.transfer_lr or (2e-2 if config.transfer_target == "output" else 5e-2)
    for name, layers in _blocks(able, size):
        with Transfer(model, layers, target=config.transfer_target) as transfer:
            chosen = tuple(f"{layer}." for layer in layers)
            parameters = [p for n, p in extras(model).items() if _bare(n).startswith(chosen)]
            stage = Stage(
                name=name,
                steps=config.transfer_steps,
                groups=[{"params": parameters, "lr": rate}],
                loss=transfer_loss(transfer),
                before=told(transfer, run.schedule(model, config.transfer_steps)),
            )
            model = run.loop.run(model, stage, run.fresh)
    return model


def _blocks(layers: list[str], size: int) -> Iterator[tuple[str, list[str]]]:
    for at in range(0, len(layers), size):
        yield "transfer" if size >= len(layers) else f"transfer {at}", layers[at : at + size]


def told(transfer: Transfer, before: Callable[[int], None]) -> Callable[[int], None]:
    """Tell a transfer its step, too."""

    def tell(step: int) -> None:
        transfer.step = step
        before(step)

    return tell


def _bare(name: str) -> str:
    """Return a parameter's name as geometries have it, without what wrappers put before it."""
    return name.removeprefix("module.")


def transfer_loss(transfer: Transfer) -> Loss:
    """Return the loss of a model whose layers are being taught, for a :class:`Stage`."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return transfer.loss(model(**model_inputs(batch))[0])

    return loss


def _distil_loss(trained: Any, run: Run, config: RecoverConfig) -> Loss:
    """Return the loss of distillation, for a model as it is trained."""
    read = read_hidden if run.encoder else read_logits
    shared, full = config.loop.cp_size > 1, config.train == "full"
    teacher = own_teacher(trained, weights_change=full, read=read, shared=shared)
    if run.encoder:
        return hidden_loss(teacher)
    return distil_loss(teacher, cross_entropy=config.cross_entropy, top_k=config.top_k)


def _distil(model: PreTrainedModel, run: Run, config: RecoverConfig) -> PreTrainedModel:
    """Train to predict as with softmax; returns the model with adapters merged into it."""
    if not config.distil_steps or (config.train == "extras" and not extras(model)):
        run.tell("no distillation: " + ("nothing to learn" if config.distil_steps else "0 steps"))
        return model
    return run.trained(
        model,
        "distil",
        config.distil_steps,
        lambda trained: _distil_loss(trained, run, config),
        run.fresh,
        run.schedule(model, config.distil_steps),
    )
