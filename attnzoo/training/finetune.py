"""Fine-tuning of a swapped model by TRL's ``SFTTrainer``, or ``Trainer`` for encoders.

Packing, adapters, optimizers, distribution and checkpoints are theirs; ours are the held-out
documents and the comparison with the equally trained softmax model.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
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
from attnzoo.evaluation.embeddings import Texts
from attnzoo.evaluation.margins import paired
from attnzoo.evaluation.models import max_positions
from attnzoo.evaluation.quality import contributions, require_finite
from attnzoo.evaluation.rows import IGNORE_INDEX
from attnzoo.hf.configs import read_field
from attnzoo.hf.saving.companions import copy_companions, move_files
from attnzoo.hf.saving.files import read_config
from attnzoo.hf.swap.convert import original_attention, restore, swap
from attnzoo.optional_packages import OptionalPackage
from attnzoo.report.atomic_write import atomic_write
from attnzoo.spec import AttentionSpec
from attnzoo.training.data import (
    RowOptions,
    check_positions,
    load_documents,
    pack,
    pack_examples,
    split_documents,
)
from attnzoo.training.encoder import is_encoder, load_texts
from attnzoo.training.eval_rows import rows_to_eval_batch
from attnzoo.training.loading import load_model
from attnzoo.training.quality import evaluate_rows
from attnzoo.training.results import RunFolder
from attnzoo.training.trainer import last_checkpoint, steps_of

if TYPE_CHECKING:
    import trl
else:
    trl = OptionalPackage("trl", extra="train")

RESULTS = "finetuning.json"
ROWS, TEXTS = 32, 128  # held out, on which models are compared
ENCODER_LENGTH = 512  # largest number of tokens of an encoder's text
IDENTITY = ("max_steps", "num_train_epochs", "learning_rate", "seed", "max_length", "packing")
LEAST_LOSS = 0.001  # smaller differences do not matter


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
        The content of ``finetuning.json``: ``lines``, an evaluation of each model, and ``verdict``.

    Raises:
        AttnzooError: An argument is invalid.
    """
    path = Path(path)
    about = {"model": str(path), "spec": spec and spec.to_dict(), "data": [*map(str, data)]}
    given = {name: getattr(args, name) for name in IDENTITY if hasattr(args, name)}
    folder = RunFolder(Path(str(args.output_dir)), {**about, "config": given}, RESULTS)
    resume = str(args.resume_from_checkpoint).lower() not in ("none", "false", "")
    model_args = model_args or trl.ModelConfig()
    task = (_MaskedTokens if is_encoder(path) else _NextTokens)(path, data, args, model_args)
    model = task.load(spec)
    trainer = task.trainer(model, _stage(args, folder.checkpoints / "finetune"))
    lines: dict[str, Any] = {}
    with folder.open(resume=resume, state=PartialState()) as finished:
        if finished is not None:
            return finished
        if not trainer.is_deepspeed_enabled:  # whose weights may be in parts
            log("evaluation: softmax, raw swap")
            with original_attention(model):
                lines["softmax"] = task.evaluate(trainer.model)
            lines["raw swap"] = task.evaluate(trainer.model)
        if compare:
            log("training: softmax")
            exact = task.load(spec and AttentionSpec("softmax"))
            if spec is None:
                restore(exact)
                swap(exact, "softmax")
            other = task.trainer(exact, _stage(args, folder.checkpoints / "softmax"))
            lines["softmax tuned"] = task.evaluate(_train(other, resume=resume))
        log("training: swap")
        lines["result"] = task.evaluate(_train(trainer, resume=resume))
        results = {**folder.run, "verdict": _verdict(lines), "lines": _plain(lines)}
        trainer.args.push_to_hub = args.push_to_hub
        _save(trainer, path, folder, results)
        return results


@dataclass(frozen=True, kw_only=True)
class MaskedQuality:
    """Prediction of masked tokens: cross-entropy in nats, and the fraction that is right."""

    loss: float
    accuracy: float
    loss_rows: Sequence[float] = ()


class _NextTokens:
    """Fine-tuning of a causal model."""

    cls: Any = AutoModelForCausalLM

    def __init__(self, path: Path, data: Any, args: Any, model_args: Any) -> None:
        self.path, self.args, self.model_args = path, args, model_args
        self.tokenizer = load_tokenizer(path)
        with PartialState().local_main_process_first():  # the others find the data in the cache
            self.prepare(data)

    def load(self, spec: AttentionSpec | None) -> Any:
        """Return the swapped model."""
        options = {"load_in_4bit": self.model_args.load_in_4bit, "device": self.args.device}
        dtype = getattr(torch, self.model_args.dtype)
        return load_model(self.path, spec, self.cls, dtype=dtype, **options)

    def prepare(self, data: Any) -> None:
        """Read training documents, and held-out rows."""
        args, tokenizer = self.args, self.tokenizer
        examples = bool(args.completion_only_loss or args.assistant_only_loss)
        options = RowOptions(
            dataset_text_field=args.dataset_text_field, completion_only_loss=examples
        )
        documents, held_out = split_documents(load_documents(data, options, tokenizer))
        length = args.max_length or 1024
        if examples:
            columns = documents.column_names
            documents = documents.map(lambda row: json.loads(row["text"]), remove_columns=columns)
            if "messages" in documents.column_names and not args.assistant_only_loss:
                raise ConfigError("The data have messages: give assistant_only_loss")
            rows = pack_examples(held_out, tokenizer, length)
        else:
            documents = documents.select_columns("text")
            if args.dataset_text_field != "text":
                documents = documents.rename_column("text", args.dataset_text_field)
            ids = tokenizer([*held_out["text"]], add_special_tokens=False, verbose=False)
            rows = pack(held_out, tokenizer, min(length, sum(map(len, ids["input_ids"]))))
        check_positions(self.path, (rows,), length)
        self.documents, self.batch = documents, rows_to_eval_batch(rows, ROWS)

    def trainer(self, model: Any, args: Any) -> Trainer:
        """Return the trainer of a model."""
        try:
            trainer: Trainer = trl.SFTTrainer(
                model=model,
                args=args,
                train_dataset=self.documents,
                processing_class=self.tokenizer,
                peft_config=trl.get_peft_config(self.model_args),
            )
        except ValueError as error:  # of arguments that exclude each other
            if isinstance(error, AttnzooError):
                raise
            raise ConfigError(str(error)) from error
        return trainer

    def evaluate(self, model: Any) -> Any:
        """Return the loss and the recall of a model on held-out rows."""
        return evaluate_rows(model, self.batch)


class _MaskedTokens(_NextTokens):
    """Fine-tuning of an encoder, which predicts masked tokens."""

    cls = AutoModelForMaskedLM

    def prepare(self, data: Any) -> None:
        """Read training texts, and mask held-out ones, the same for all models."""
        if self.tokenizer.mask_token is None:
            raise SpecError("The tokenizer of this model has no mask token; set one and save it")
        length = min(ENCODER_LENGTH, max_positions(self.path) or ENCODER_LENGTH)
        halves = load_texts(self.path, data, RowOptions(max_length=length))
        self.documents, held_out = map(_rows, halves)
        collate = DataCollatorForLanguageModeling(self.tokenizer, seed=0)
        held_out = held_out[:TEXTS]
        self.batches = [collate(held_out[i : i + 16]) for i in range(0, len(held_out), 16)]

    def trainer(self, model: Any, args: Any) -> Trainer:
        """Return the trainer of a model."""
        if (adapters := trl.get_peft_config(self.model_args)) is not None:
            from peft import get_peft_model

            adapters.task_type = None
            model = get_peft_model(model, adapters)
        collate = DataCollatorForLanguageModeling(self.tokenizer)
        options: Any = {"train_dataset": self.documents, "data_collator": collate}
        return Trainer(model, args, processing_class=self.tokenizer, **options)

    @torch.no_grad()
    def evaluate(self, model: Any) -> MaskedQuality:
        """Return how well a model predicts the masked tokens."""
        training, right = model.training, []
        losses: list[torch.Tensor] = []
        model.eval()
        for batch in self.batches:
            inputs = {name: x.to(model.device) for name, x in batch.items()}
            labels = inputs.pop("labels")
            logits, kept = model(**inputs).logits, labels != IGNORE_INDEX
            found = F.cross_entropy(logits[kept].float(), labels[kept], reduction="none")
            losses += found.split(kept.sum(1).tolist())
            right.append(logits[kept].argmax(-1) == labels[kept])
        model.train(training)
        return MaskedQuality(
            loss=require_finite(float(torch.cat(losses).mean()), "loss on masked tokens"),
            accuracy=float(torch.cat(right).float().mean()),
            loss_rows=contributions(losses),
        )


def _rows(texts: Texts) -> list[dict[str, list[int]]]:
    """Return texts as a data set."""
    pairs = zip(texts.tokens, texts.attention_mask.bool(), strict=True)
    return [{"input_ids": tokens[kept].tolist()} for tokens, kept in pairs]


def _stage(args: Any, folder: Path) -> Any:
    """Return the arguments of a stage, whose checkpoints are in a folder of their own."""
    found = copy.copy(args)
    found.output_dir, found.push_to_hub = str(folder), False
    return found


def _train(trainer: Trainer, *, resume: bool) -> Any:
    """Train, from the last whole checkpoint if the run is resumed; return the model."""
    folder, count = Path(str(trainer.args.output_dir)), trainer.accelerator.num_processes
    last = last_checkpoint(folder, count) if resume else None
    if last is not None and steps_of(last) >= trainer.args.max_steps > 0:
        trainer._load_from_checkpoint(str(last))  # train() would take one more step
    else:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    return trainer.model


def _plain(lines: dict[str, Any]) -> dict[str, Any]:
    """Return evaluations as plain data; there is no gap of which they close a fraction."""
    shares = dict.fromkeys(("loss_share", "recall_share"))
    found = {
        name: asdict(line) | ({} if isinstance(line, MaskedQuality) else shares)
        for name, line in lines.items()
    }
    plain: dict[str, Any] = json.loads(json.dumps(found, allow_nan=False))
    return plain


def _verdict(lines: dict[str, Any]) -> str:
    """Return the conclusion in one sentence."""
    result = lines["result"]
    other = next(x for x in ("softmax tuned", "softmax", "result") if x in lines)
    unit = "nats per masked token" if isinstance(result, MaskedQuality) else "bits per byte"
    found = paired(result.loss_rows, lines[other].loss_rows, least=LEAST_LOSS)
    clear = "a difference of" if found.is_clear else "no difference is measured:"
    return (
        f"The loss of held-out text is {result.loss:.3f} {unit}, of {other} "
        f"{lines[other].loss:.3f}; {clear} {found}."
    )


def _save(trainer: Trainer, path: Path, folder: RunFolder, results: dict[str, Any]) -> None:
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
