"""Recovery of a swapped model, end to end: transfer, distil, judge, save."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from attnzoo.demo.text import refuse_encoder
from attnzoo.errors import ConfigError, SpecError
from attnzoo.integrations.attention import NAME
from attnzoo.integrations.convert import swap
from attnzoo.integrations.files import read_config
from attnzoo.spec import AttentionSpec
from attnzoo.training.checkpoints import Checkpoints, write_whole
from attnzoo.training.data import (
    REPEATS_FROM,
    Rows,
    pack,
    read_documents,
    split_documents,
    with_repeats,
)
from attnzoo.training.distil import distil_loss, model_inputs, own_teacher
from attnzoo.training.evaluate import (
    Quality,
    as_data,
    branch_qualities,
    judged_rows,
    quality,
    softmax_quality,
    verdict,
    window_of,
)
from attnzoo.training.loop import Loop, LoopConfig, Loss, Stage
from attnzoo.training.plan import weights_name
from attnzoo.training.transfer import Transfer, extras

RESULTS = "recovery.json"
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RecoverConfig:
    """How a swapped model is recovered. Defaults are those that suit the embedded model."""

    transfer_steps: int = 100
    distil_steps: int = 100
    train: Literal["extras", "lora", "full"] = "lora"  # what distillation trains
    lora_rank: int = 16
    transfer_lr: float = 2e-2  # of what backends added, layer by layer
    extras_lr: float = 5e-3  # of the same, in distillation
    weights_lr: float = 1e-3  # of adapters; a tenth of it for the model's own weights
    cross_entropy: float = 0.0  # share of the text's own next token in the distillation loss
    row_length: int = 512
    repeat_share: float = 0.25  # of rows in which a segment is repeated, to learn recall from
    judged_rows: int = 32
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        for name in ("transfer_steps", "distil_steps", "repeat_share"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("lora_rank", "judged_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("transfer_lr", "extras_lr", "weights_lr"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.row_length < 8:
            raise ConfigError(f"row_length must be at least 8 tokens, got {self.row_length}")
        for name in ("cross_entropy", "repeat_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a share, from 0 to 1, got {getattr(self, name)}")
        if self.train not in ("extras", "lora", "full"):
            raise ConfigError(f"train must be 'extras', 'lora' or 'full', got {self.train!r}")


def load_rows(
    path: Path, data: list[Path], column: str, config: RecoverConfig
) -> tuple[Rows, Rows]:
    """Return rows to train on and rows held out, in a model's tokens."""
    read_config(path)  # says so if there is no model
    tokenizer = AutoTokenizer.from_pretrained(path)
    vocab_size = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    train, held_out = (
        pack(texts, tokenizer, row_length=config.row_length, vocab_size=vocab_size)
        for texts in split_documents(read_documents(data, column))
    )
    return with_repeats(train, config.repeat_share, config.loop.seed), held_out


def load_swapped(path: Path, spec: AttentionSpec) -> PreTrainedModel:
    """Load a causal model with its attention swapped, in float32."""
    config = read_config(path)
    if getattr(config, NAME, None) is not None:
        raise SpecError(
            f"{str(path)!r} is swapped already; give the model as it was before, whose attention "
            "is to be recovered"
        )
    refuse_encoder(path, "recovery trains text prediction")
    config.attnzoo = spec.to_dict()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, config=config, attn_implementation=NAME, dtype=torch.float32
    )
    return model


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
    tick: Callable[[str, int, float], None] = lambda stage, step, loss: None,
) -> dict[str, Any]:
    """Swap a saved causal model, bring its quality back, judge it, and save it to ``out``.

    Args:
        path: Folder of a saved model that is not swapped.
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
    loop = config.loop
    accelerator = make_accelerator(loop.seed)
    train, held_out = load_rows(path, data, column, config)
    model: Any = load_swapped(path, spec)
    name = weights_name(model)
    if weights is not None and weights != name:
        raise SpecError(
            f"The plan was made for a model with other weights than those in {str(path)!r}; make "
            "one for this model with `attnzoo plan`"
        )
    made_from = {
        "model": name,
        "spec": spec.to_dict(),
        "config": asdict(config),
        "data": train.fingerprint,
    }
    checkpoints = Checkpoints(out, made_from, keep=loop.keep)
    found = [checkpoints.begin(resume=resume) if accelerator.is_main_process else None]
    (progress,) = broadcast_object_list(found)
    tell(f"{len(train)} rows to train on, {len(held_out)} held out")
    if config.row_length < REPEATS_FROM:
        tell(f"recall is neither trained nor judged: rows are shorter than {REPEATS_FROM} tokens")
    judged = judged_rows(held_out, config.judged_rows)
    model.to(accelerator.device)
    lines = {"softmax": softmax_quality(model, judged), "raw swap": quality(model, judged)}
    lines["window alone"] = _window_alone(path, window_of(model), judged, accelerator.device)
    steps = Loop(accelerator, train, loop, checkpoints, progress, tick)
    _transfer(model, steps, config, tell)
    model = _distil(model, steps, config, tell)
    lines["result"] = quality(model, judged)
    lines |= branch_qualities(model, judged)
    results = {
        "verdict": verdict(lines),
        "window": window_of(model),
        "lines": as_data(lines),
        **made_from,
    }
    if accelerator.is_main_process:
        _save(model, path, out, results)
        checkpoints.clear()
    accelerator.wait_for_everyone()
    return results


def evaluate(
    path: Path,
    data: list[Path],
    *,
    column: str = "text",
    row_length: int = 512,
    rows: int = 32,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Judge a saved, swapped model on held-out text, beside its own attention and the window alone.

    All lines have the saved weights: ``softmax`` is the model with its own attention, which after
    training is not the model that it was made from.

    Args:
        path: Folder of a saved causal model that is swapped.
        data: Text files, JSON lines, parquet, or folders of them; what :func:`recover` held out of
            them is held out here.
        column: Field of JSON and parquet that holds the text.
        row_length: Tokens of a row.
        rows: How many rows to judge on.
        tell: Called with what is going on.

    Returns:
        ``verdict``, ``window`` and ``lines``, as in ``recovery.json``.

    Raises:
        AttnzooError: Something that was given cannot be used.
    """
    if getattr(read_config(path), NAME, None) is None:
        raise SpecError(
            f"{str(path)!r} is not swapped, so there is nothing to compare; `attnzoo recover` and "
            "`attnzoo swap` write swapped models"
        )
    refuse_encoder(path, "this judges text prediction")
    config = RecoverConfig(row_length=row_length, judged_rows=rows, repeat_share=0.0)
    _, held_out = load_rows(path, data, column, config)
    judged = judged_rows(held_out, rows)
    tell(f"{len(judged.plain)} rows that were held out")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    lines = {"softmax": softmax_quality(model, judged), "result": quality(model, judged)}
    lines |= branch_qualities(model, judged)
    window = window_of(model)
    swap(model, "flash", window=window)
    lines["window alone"] = quality(model, judged)
    return {"verdict": verdict(lines), "window": window, "lines": as_data(lines)}


def make_accelerator(seed: int) -> Accelerator:
    """Return what splits every batch over the processes, in an order that the seed decides."""
    torch.manual_seed(seed)
    return Accelerator(
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=seed
        ),
        step_scheduler_with_optimizer=False,
    )


def _transfer(model: PreTrainedModel, loop: Loop, config: RecoverConfig, tell: Tell) -> None:
    able = any(True for _ in extras(model))
    if not able or not config.transfer_steps:
        tell("no transfer: " + ("0 steps" if able else "the backends have nothing to learn"))
        return
    with Transfer(model) as transfer:
        parameters = list(extras(model).values())
        group = {"params": parameters, "lr": config.transfer_lr}
        loop.run(
            model,
            Stage(
                name="transfer",
                steps=config.transfer_steps,
                groups=[group],
                loss=transfer_loss(transfer),
            ),
        )


def transfer_loss(transfer: Transfer) -> Loss:
    """Return the loss of a model whose layers are being taught, for a :class:`Stage`."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        model(**model_inputs(batch), use_cache=False)
        return transfer.loss()

    return loss


def _distil(
    model: PreTrainedModel, loop: Loop, config: RecoverConfig, tell: Tell
) -> PreTrainedModel:
    """Train to predict as with softmax; returns the model with adapters merged into it."""
    added = list(extras(model).values())
    if not config.distil_steps or (config.train == "extras" and not added):
        tell("no distillation: " + ("nothing to learn" if config.distil_steps else "0 steps"))
        return model
    trained: Any = model
    known = {id(p) for p in added}
    if config.train == "lora":
        torch.manual_seed(config.loop.seed)  # for the adapters, however the run came here
        trained = with_adapters(model, config.lora_rank)
    teacher = own_teacher(trained, weights_change=config.train == "full")
    groups = [{"params": added, "lr": config.extras_lr}] if added else []
    if config.train != "extras":
        own = [
            p
            for name, p in trained.named_parameters()
            if id(p) not in known and (config.train == "full" or "lora_" in name)
        ]
        rate = config.weights_lr * (0.1 if config.train == "full" else 1)
        groups.append({"params": own, "lr": rate})
    loss = distil_loss(teacher, cross_entropy=config.cross_entropy)
    loop.run(trained, Stage(name="distil", steps=config.distil_steps, groups=groups, loss=loss))
    return trained.merge_and_unload() if config.train == "lora" else model


def with_adapters(model: PreTrainedModel, rank: int) -> Any:
    """Put LoRA adapters beside every linear layer of a model but those of backends."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules="all-linear",
            exclude_modules=r".*\.attnzoo(\..*)?",
            task_type="CAUSAL_LM",
        ),
    )


def _window_alone(path: Path, window: int, judged: Any, device: torch.device) -> Quality:
    """Judge the model with nothing but the window: what a swap has to beat."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    swap(model.to(device), "flash", window=window)
    return quality(model, judged)


def _save(model: PreTrainedModel, path: Path, out: Path, results: dict[str, Any]) -> None:
    model.requires_grad_(True)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(path).save_pretrained(out)
    write_whole(out / RESULTS, json.dumps(results, indent=2))
