"""Fine-tuning of a swapped model by TRL's ``SFTTrainer``, or ``Trainer`` for encoders.

Packing, adapters, optimizers, distribution, checkpoints and evaluation are theirs; ours are the
held-out documents and the comparison with the equally trained softmax model.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from attnzoo.errors import AttnzooError, ConfigError, SpecError
from attnzoo.evaluation.data import load_tokenizer
from attnzoo.evaluation.models import max_positions
from attnzoo.evaluation.rows import require_finite
from attnzoo.hf.configs import read_field
from attnzoo.hf.saving.companions import copy_companions, move_files
from attnzoo.hf.saving.files import read_config
from attnzoo.hf.swap.convert import original_attention, restore, swap
from attnzoo.optional_packages import OptionalPackage
from attnzoo.report.atomic_write import atomic_write
from attnzoo.spec import AttentionSpec
from attnzoo.training.data import RowOptions, check_positions, load_documents, split_documents
from attnzoo.training.encoder import is_encoder, load_texts
from attnzoo.training.loading import load_model
from attnzoo.training.run_folder import RunFolder
from attnzoo.training.trainer import last_checkpoint, steps_of

if TYPE_CHECKING:
    import trl
else:
    trl = OptionalPackage("trl", extra="train")

RESULTS = "finetuning.json"
ENCODER_LENGTH = 512  # largest number of tokens of an encoder's text
IDENTITY = ("max_steps", "num_train_epochs", "learning_rate", "seed", "max_length", "packing")


def finetune(
    path: Path,
    spec: AttentionSpec | None,
    data: Sequence[Path | str],
    args: TrainingArguments,
    model_args: Any = None,
    *,
    compare: bool = True,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Fine-tune a swapped model on text or examples, evaluate it, and save it.

    A causal model is trained by ``trl.SFTTrainer``, an encoder to predict masked tokens by
    ``Trainer``.

    Args:
        path: Folder of a saved model.
        spec: The swap; ``None`` for a model that is already swapped.
        data: As in :func:`attnzoo.training.data.load_documents`; examples with
            ``completion_only_loss`` or ``assistant_only_loss``.
        args: ``trl.SFTConfig``, or ``TrainingArguments`` for an encoder.
        model_args: ``trl.ModelConfig``: adapters, data type, weights in 4 bits.
        compare: Whether to train the model with softmax too, by the same arguments.
        log: Called with progress messages.

    Returns:
        The content of ``finetuning.json``; ``lines`` has the held-out loss of each model in nats.

    Raises:
        AttnzooError: An argument is invalid.
    """
    path, model_args = Path(path), model_args or trl.ModelConfig()
    about = {"model": str(path), "spec": spec and spec.to_dict(), "data": [*map(str, data)]}
    given = {name: getattr(args, name) for name in IDENTITY if hasattr(args, name)}
    folder = RunFolder(Path(str(args.output_dir)), {**about, "config": given}, RESULTS)
    resume = str(args.resume_from_checkpoint).lower() not in ("none", "false", "")
    task = (_MaskedTokens if is_encoder(path) else _NextTokens)(path, data, args, model_args)
    trainer = task.trainer(task.load(spec), _stage(args, folder.checkpoints / "finetune"))
    model: Any = trainer.model
    lines: dict[str, float] = {}

    def evaluate(name: str, trainer: Trainer) -> None:
        log(f"evaluation: {name}")
        lines[name] = require_finite(task.loss(trainer), f"held-out loss of {name}")

    with folder.open(resume=resume, state=PartialState()) as finished:
        if finished is not None:
            return finished
        if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):  # weights in parts
            with original_attention(model):
                evaluate("softmax", trainer)
            evaluate("raw swap", trainer)
        if compare:
            exact = task.load(spec and AttentionSpec("softmax"))
            if spec is None:
                restore(exact)
                swap(exact, "softmax")
            other = task.trainer(exact, _stage(args, folder.checkpoints / "softmax"))
            _train(other, resume=resume)
            evaluate("softmax tuned", other)
        _train(trainer, resume=resume)
        evaluate("result", trainer)
        trainer.args.push_to_hub = args.push_to_hub
        return _save(trainer, path, folder, {**folder.run, "lines": lines})


class _NextTokens:
    """Fine-tuning of a causal model."""

    cls: Any = AutoModelForCausalLM

    def __init__(self, path: Path, data: Any, args: Any, model_args: Any) -> None:
        self.path, self.args, self.model_args = path, args, model_args
        self.tokenizer = load_tokenizer(path)
        with PartialState().local_main_process_first():  # the others find the data in the cache
            self.train, self.held_out = self.read(data)

    def load(self, spec: AttentionSpec | None) -> Any:
        """Return the swapped model."""
        options = {"load_in_4bit": self.model_args.load_in_4bit, "device": self.args.device}
        dtype = getattr(torch, self.model_args.dtype)
        return load_model(self.path, spec, self.cls, dtype=dtype, **options)

    def read(self, data: Any) -> list[Any]:
        """Return training and held-out documents, or examples."""
        field = self.args.dataset_text_field
        examples = bool(self.args.completion_only_loss or self.args.assistant_only_loss)
        options = RowOptions(dataset_text_field=field, completion_only_loss=examples)
        halves = split_documents(load_documents(data, options, self.tokenizer), cut=not examples)
        if not examples:
            return [x.select_columns("text").rename_columns({"text": field}) for x in halves]
        found = [
            x.map(lambda row: json.loads(row["text"]), remove_columns=x.column_names)
            for x in halves
        ]
        if "messages" in found[0].column_names and not self.args.assistant_only_loss:
            raise ConfigError("The data have messages: give assistant_only_loss")
        return found

    def trainer(self, model: Any, args: Any) -> Any:
        """Return the trainer of a model."""
        try:
            found = trl.SFTTrainer(
                model=model,
                args=args,
                train_dataset=self.train,
                eval_dataset=self.held_out,
                processing_class=self.tokenizer,
                peft_config=trl.get_peft_config(self.model_args),
            )
        except ValueError as error:  # of arguments that exclude each other
            raise error if isinstance(error, AttnzooError) else ConfigError(str(error)) from error
        rows = found.train_dataset[:]
        lengths = rows.get("seq_lengths") or [[len(x)] for x in rows["input_ids"]]
        check_positions(self.path, max(map(max, lengths)))
        return found

    def loss(self, trainer: Any) -> float:
        """Return the held-out loss of a model."""
        return float(trainer.evaluate()["eval_loss"])


class _MaskedTokens(_NextTokens):
    """Fine-tuning of an encoder, which predicts masked tokens."""

    cls = AutoModelForMaskedLM

    def read(self, data: Any) -> list[Any]:
        """Return training and held-out texts."""
        if self.tokenizer.mask_token is None:
            raise SpecError("The tokenizer of this model has no mask token; set one and save it")
        length = min(ENCODER_LENGTH, max_positions(self.path) or ENCODER_LENGTH)
        halves = load_texts(self.path, data, RowOptions(max_length=length))
        pairs = [zip(x.tokens, x.attention_mask.bool(), strict=True) for x in halves]
        return [[{"input_ids": tokens[kept].tolist()} for tokens, kept in x] for x in pairs]

    def trainer(self, model: Any, args: Any) -> Trainer:
        """Return the trainer of a model."""
        if (adapters := trl.get_peft_config(self.model_args)) is not None:
            from peft import get_peft_model

            adapters.task_type = None
            model = get_peft_model(model, adapters)
        collate = DataCollatorForLanguageModeling(self.tokenizer)
        options: Any = {"train_dataset": self.train, "eval_dataset": self.held_out}
        return Trainer(model, args, collate, processing_class=self.tokenizer, **options)

    def loss(self, trainer: Any) -> float:
        """Return the held-out loss of a model, on the same masked tokens as of all others."""
        collate = trainer.data_collator
        trainer.data_collator = DataCollatorForLanguageModeling(self.tokenizer, seed=0)
        found = super().loss(trainer)
        trainer.data_collator = collate
        return found


def _stage(args: Any, folder: Path) -> Any:
    """Return the arguments of a stage, whose checkpoints are in a folder of their own."""
    found = copy.copy(args)
    found.output_dir, found.push_to_hub = str(folder), False
    return found


def _train(trainer: Trainer, *, resume: bool) -> None:
    """Train, from the last whole checkpoint if the run is resumed."""
    folder, count = Path(str(trainer.args.output_dir)), trainer.accelerator.num_processes
    last = last_checkpoint(folder, count) if resume else None
    if last is not None and steps_of(last) >= trainer.args.max_steps > 0:
        trainer._load_from_checkpoint(str(last))  # train() would take one more step
    else:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))


def _save(
    trainer: Trainer, path: Path, folder: RunFolder, results: dict[str, Any]
) -> dict[str, Any]:
    """Save the model, with its adapters merged unless weights are in parts or quantized."""
    model: Any = trainer.model
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if hasattr(model, "merge_and_unload") and not sharded and not hasattr(model, "hf_quantizer"):
        trainer.model = model.merge_and_unload()
    if (use_cache := read_field(read_config(path), "use_cache")) is not None:
        model.config.use_cache = use_cache  # Trainer changes what is saved
    partial = folder.out / "model.partial"
    trainer.save_model(str(partial))
    if trainer.is_world_process_zero():
        copy_companions(path, partial)
        move_files(partial, folder.out)
        atomic_write(folder.out / RESULTS, json.dumps(results, indent=2))
        for part in folder.checkpoints.glob("*/"):
            shutil.rmtree(part)
    if trainer.args.push_to_hub:
        trainer.args.output_dir = str(folder.out)
        trainer.init_hf_repo()
        trainer.push_to_hub()
    return results
