"""What recovery and fine-tuning share: models and text, what is trained, what is judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from attnzoo.backends.recurrent import RecurrentBackend, WindowDropout
from attnzoo.demo.text import Judged, refuse_encoder
from attnzoo.errors import ConfigError, SpecError
from attnzoo.integrations.attention import NAME
from attnzoo.integrations.context_parallel import refuse_model
from attnzoo.integrations.convert import own_attention, restore, swap
from attnzoo.integrations.files import read_config
from attnzoo.report.whole import write_whole
from attnzoo.spec import AttentionSpec
from attnzoo.training.checkpoints import FOLDER, Checkpoints, explained
from attnzoo.training.data import (
    REPEATS_FROM,
    Rows,
    pack,
    read_documents,
    split_documents,
    with_repeats,
)
from attnzoo.training.evaluate import (
    Quality,
    as_data,
    judged_rows,
    quality,
    verdict,
    window_of,
)
from attnzoo.training.lines import LINES, Lines
from attnzoo.training.loop import Loop, LoopConfig, Loss, Stage, read_losses
from attnzoo.training.pages import write_pages
from attnzoo.training.plan import weights_name
from attnzoo.training.sharding import context_mesh
from attnzoo.training.transfer import extras, swapped_layers

RESULTS = {"recover": "recovery.json", "finetune": "finetuning.json"}
R = TypeVar("R")
Tell = Callable[[str], None]
Tick = Callable[[str, int, float], None]  # the stage, its step and the loss


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What is trained, on which rows, and what the result is judged on."""

    train: Literal["extras", "lora", "full"] = "lora"
    lora_rank: int = 16
    extras_lr: float = 5e-3  # of what backends added
    weights_lr: float | None = None  # 1e-3 of adapters, 1e-4 of the model's own weights without
    row_length: int = 512
    repeat_share: float = 0.25  # of rows in which a segment is repeated, to learn recall from
    judged_rows: int = 32
    control: int | None = None  # tokens that the control sees; the swap's widest window without
    window_dropout: float = 0.0  # share of a hybrid's heads that start a stage without window
    gradient_checkpointing: bool = False
    report_to: str | None = None  # a tracker that Accelerate knows, such as "tensorboard"
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        for name in ("lora_rank", "judged_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("extras_lr", "weights_lr"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.control is not None and self.control < 1:
            raise ConfigError(f"control must be at least 1 token, got {self.control}")
        if self.row_length < 8:
            raise ConfigError(f"row_length must be at least 8 tokens, got {self.row_length}")
        if self.row_length % self.loop.cp_size:
            raise ConfigError(
                f"A row of {self.row_length} tokens does not divide over cp_size="
                f"{self.loop.cp_size} processes; make row_length a multiple"
            )
        for name in ("repeat_share", "window_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a share, from 0 to 1, got {getattr(self, name)}")
        if self.train not in ("extras", "lora", "full"):
            raise ConfigError(f"train must be 'extras', 'lora' or 'full', got {self.train!r}")


def split_rows(
    path: Path, data: list[Path], column: str, config: TrainConfig, make: Callable[..., R]
) -> tuple[R, R]:
    """Return rows to train on and rows held out, as ``make`` makes them of documents."""
    read_config(path)  # says so if there is no model
    tokenizer = AutoTokenizer.from_pretrained(path)
    vocab_size = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    train, held_out = (
        make(texts, tokenizer, row_length=config.row_length, vocab_size=vocab_size)
        for texts in split_documents(read_documents(data, column))
    )
    return train, held_out


def load_rows(path: Path, data: list[Path], column: str, config: TrainConfig) -> tuple[Rows, Rows]:
    """Return rows to train on and rows held out, in a model's tokens."""
    train, held_out = split_rows(path, data, column, config, pack)
    return with_repeats(train, config.repeat_share, config.loop.seed), held_out


def load_swapped(path: Path, spec: AttentionSpec | None) -> PreTrainedModel:
    """Load a causal model in float32; see :func:`load_model`."""
    read_config(path)  # says so if there is no model
    refuse_encoder(path, "training is on text prediction")
    return load_model(path, spec, AutoModelForCausalLM)


def load_model(path: Path, spec: AttentionSpec | None, cls: Any) -> PreTrainedModel:
    """Load a model in float32, its attention swapped, or as its own config has it.

    Args:
        path: Folder of a saved model.
        spec: The swap; ``None`` for a model that is swapped already.
        cls: What to load it with.

    Raises:
        SpecError: It is swapped already and a spec is given, or neither.
    """
    config = read_config(path)
    known = getattr(config, NAME, None)
    if known is not None and spec is not None:
        raise SpecError(
            f"{str(path)!r} is swapped already; give the model as it was before, whose attention "
            "is to be recovered"
        )
    if known is None and spec is None:
        raise SpecError(f"{str(path)!r} is not swapped; say with which attention to swap it")
    if spec is not None:
        config.attnzoo = spec.to_dict()
    model: PreTrainedModel = cls.from_pretrained(
        path, config=config, attn_implementation=NAME, dtype=torch.float32
    )
    return model


def make_accelerator(config: TrainConfig, out: Path) -> Accelerator:
    """Return what splits every batch over the processes, in an order that the seed decides."""
    seed = config.loop.seed
    torch.manual_seed(seed)
    return Accelerator(
        log_with=config.report_to,
        project_dir=str(out / "logs") if config.report_to else None,
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=seed
        ),
        step_scheduler_with_optimizer=False,
    )


class Run:
    """One run in a folder of its own: text, model, steps, and the lines to beat.

    Made for causal models; what is another for encoders, they replace in a class of their own.

    Args:
        path: Folder of a saved causal model.
        spec: The swap; ``None`` for a model that is swapped already.
        data: Text files, JSON lines, parquet, or folders of them.
        out: A new folder, or that of the same run, to go on.
        config: How to train.
        column: Field of JSON and parquet that holds the text.
        resume: Go on from the last checkpoint in ``out``.
        weights: Names the weights that the spec was planned for, if it was.
        tell: Called with what is going on.
        tick: Called after every step.

    Raises:
        AttnzooError: Something that was given cannot be used.
    """

    line: Any = Quality  # what the model is judged by
    encoder = False
    task = "CAUSAL_LM"  # as PEFT calls it
    verdict: Any = staticmethod(verdict)
    as_data: Any = staticmethod(as_data)

    def __init__(
        self,
        path: Path,
        spec: AttentionSpec | None,
        data: list[Path],
        out: Path,
        config: TrainConfig,
        *,
        column: str,
        resume: bool,
        weights: str | None,
        tell: Tell,
        tick: Tick,
    ) -> None:
        self.path, self.spec, self.out, self.config, self.tell = path, spec, out, config, tell
        self.accelerator = make_accelerator(config, out)
        train, held_out = self.load_rows(data, column)
        self.model: Any = self.fresh()
        self.mesh = context_mesh(self.accelerator, config.loop.cp_size)
        if self.mesh is not None:
            refuse_model(self.model)
        name = weights_name(self.model)
        if weights is not None and weights != name:
            raise SpecError(
                f"The plan was made for a model with other weights than those in {str(path)!r}; "
                "make one for this model with `attnzoo plan`"
            )
        self.made_from = {
            "model": name,
            "spec": getattr(self.model.config, NAME),
            "config": asdict(config),
            "data": train.fingerprint,
        }
        self.checkpoints = Checkpoints(out, self.made_from, keep=config.loop.keep)
        main = self.accelerator.is_main_process
        (progress,) = broadcast_object_list(
            [self.checkpoints.begin(resume=resume) if main else None]
        )
        tell(f"{len(train)} rows to train on, {len(held_out)} held out")
        self.lines = Lines(self.accelerator, out / FOLDER / LINES, self.line)
        self.window = config.control or window_of(self.model)
        self.model.to(self.accelerator.device)
        self.judge_on(held_out)
        if config.report_to:
            self.accelerator.init_trackers("attnzoo")
        self.loop = Loop(
            self.accelerator, train, config.loop, self.checkpoints, progress, tick, self.mesh
        )

    def load_rows(self, data: list[Path], column: str) -> tuple[Any, Any]:
        """Return rows to train on, and rows held out."""
        return load_rows(self.path, data, column, self.config)

    def judge_on(self, held_out: Any) -> None:
        """Take what the model is judged on from the rows that were held out."""
        if self.config.row_length < REPEATS_FROM:
            self.tell(f"no recall: rows are shorter than {REPEATS_FROM} tokens")
        self.judged: Judged = judged_rows(held_out, self.config.judged_rows)

    def quality(self, model: PreTrainedModel) -> Any:
        """Judge a model as it is."""
        return quality(model, self.judged)

    def judge_before(self) -> None:
        """Judge the model with softmax, with its swap, and with the window alone."""
        model, lines = self.model, self.lines
        spec = getattr(model.config, NAME)
        if "window alone" in lines.known:
            return
        with own_attention(model):
            lines.judge("softmax", lambda: self.quality(model))
        lines.judge("raw swap", lambda: self.quality(model))
        kept = {n: x.clone() for n, x in model.state_dict().items() if ".attnzoo." in n}
        swap(model, "flash", window=self.window)
        lines.judge("window alone", lambda: self.quality(model))
        swap(model, spec)
        model.load_state_dict(kept, strict=False)
        model.to(self.accelerator.device)

    def fresh(self) -> PreTrainedModel:
        """Return the model as it was loaded, for weights to be filled in."""
        return load_swapped(self.path, self.spec)

    def softmax(self) -> PreTrainedModel:
        """Return the model with softmax: its own, or flash, which runs on shares of rows too."""
        model = self.fresh()
        if self.mesh is None:
            restore(model)
        else:
            swap(model, "flash")
        return model

    def prepared(self, model: PreTrainedModel) -> tuple[Any, list[dict[str, Any]]]:
        """Return a model with what is trained of it, in groups with learning rates.

        Adapters are put beside its own weights where ``train`` is ``lora``.
        """
        config = self.config
        added = list(extras(model).values())
        known = {id(p) for p in added}
        trained: Any = model
        if config.train == "lora":
            torch.manual_seed(config.loop.seed)  # for the adapters, however the run came here
            trained = with_adapters(model, config.lora_rank, self.task)
        groups = [{"params": added, "lr": config.extras_lr}] if added else []
        if config.train != "extras":
            own = [
                p
                for name, p in trained.named_parameters()
                if id(p) not in known and (config.train == "full" or "lora_" in name)
            ]
            rate = config.weights_lr or (1e-4 if config.train == "full" else 1e-3)
            groups.append({"params": own, "lr": rate})
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        return trained, groups

    def trained(
        self,
        model: PreTrainedModel,
        name: str,
        steps: int,
        loss_of: Callable[[Any], Loss],
        fresh: Callable[[], PreTrainedModel],
        before: Callable[[int], None] = lambda step: None,
    ) -> PreTrainedModel:
        """Train a model through one stage; returns it with adapters merged into it.

        Args:
            model: What is trained.
            name: Of the stage.
            steps: How many.
            loss_of: Returns the loss, given the model as it is trained.
            fresh: Returns the model as it was loaded, for weights to be filled in.
            before: Called before every step.
        """
        made, groups = self.prepared(model)
        stage = Stage(name=name, steps=steps, groups=groups, loss=loss_of(made), before=before)
        return self.merged(self.loop.run(made, stage, lambda: self.prepared(fresh())[0]))

    def schedule(self, model: nn.Module, steps: int) -> Callable[[int], None]:
        """Return what drops windows of hybrids, from ``window_dropout`` down to none, step by step.

        Source: scheduled sliding-window dropout, arXiv:2510.05901.

        Raises:
            SpecError: It is asked for, and no layer has a window beside a linear branch.
        """
        share, seed = self.config.window_dropout, self.config.loop.seed
        hybrids = [
            backend
            for backend in swapped_layers(model).values()
            if isinstance(backend, RecurrentBackend) and backend.far_log_weight is not None
        ]
        if share and not hybrids:
            raise SpecError(
                "window_dropout needs a window beside a linear branch, such as gated_linear with "
                "window=32; leave it out"
            )

        def before(step: int) -> None:
            for backend in hybrids:
                now = share * (1 - step / steps)
                backend.window_dropout = WindowDropout(now, 100_000 * seed + step)

        return before

    def merged(self, trained: Any) -> PreTrainedModel:
        """Return a trained model without adapters beside it."""
        trained = trained.merge_and_unload() if self.config.train == "lora" else trained
        model: PreTrainedModel = trained.to(self.accelerator.device)
        return model

    def save(self, model: PreTrainedModel, results: Mapping[str, Any], command: str) -> None:
        """Write model, tokenizer and account, whole or not at all; all processes take part."""
        if self.accelerator.is_main_process:
            made = self.out / "model.partial"
            model.requires_grad_(True)
            with explained(self.checkpoints):
                model.save_pretrained(made)
                AutoTokenizer.from_pretrained(self.path).save_pretrained(made)
                for file in made.iterdir():
                    file.replace(self.out / file.name)
                made.rmdir()
                write_whole(self.out / RESULTS[command], json.dumps(results, indent=2))
                write_pages(self.out, results, read_losses(self.out), command)
            self.checkpoints.clear()
        if self.config.report_to:
            self.accelerator.end_training()
        self.accelerator.wait_for_everyone()


def with_adapters(model: nn.Module, rank: int, task: str) -> Any:
    """Put LoRA adapters beside every linear layer of a model but those of backends."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules="all-linear",
            exclude_modules=r".*\.attnzoo(\..*)?",
            task_type=task,
        ),
    )
