"""Fine-tuning of a swapped model by TRL's ``SFTTrainer``, or ``Trainer`` for encoders.

Packing, adapters, quantization, optimizers, distribution and checkpoints are theirs; ours are the
held-out documents and the comparison with the equally trained softmax model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerState,
    TrainingArguments,
)

from attnzoo.errors import AttnzooError, ConfigError, SpecError
from attnzoo.evaluation.data import load_tokenizer
from attnzoo.evaluation.margins import paired
from attnzoo.evaluation.quality import contributions, require_finite
from attnzoo.evaluation.rows import IGNORE_INDEX
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.saving.companions import copy_companions, move_files
from attnzoo.hf.saving.files import read_config
from attnzoo.hf.swap.convert import original_attention, restore, swap
from attnzoo.optional_packages import OptionalPackage
from attnzoo.report.atomic_write import atomic_write
from attnzoo.spec import AttentionSpec
from attnzoo.training.data import RowOptions, load_documents, pack, pack_examples, split_documents
from attnzoo.training.encoder import is_encoder
from attnzoo.training.eval_rows import rows_to_eval_batch
from attnzoo.training.quality import evaluate_rows

if TYPE_CHECKING:
    import trl
else:
    trl = OptionalPackage("trl", extra="train")

RESULTS, RUN = "finetuning.json", "finetuning_run.json"
ROWS, TEXTS = 32, 128  # held out, on which models are compared
ENCODER_LENGTH = 512  # largest number of tokens of an encoder's text
IDENTITY = ("max_steps", "num_train_epochs", "learning_rate", "seed", "max_length", "packing")
SHARES = ("loss_share", "recall_share", "loss_share_error", "recall_share_error")
LEAST_LOSS = 0.001  # smaller differences do not matter


@dataclass(frozen=True, kw_only=True)
class MaskedQuality:
    """Prediction of masked tokens: cross-entropy in nats, and the fraction that is right."""

    loss: float
    accuracy: float
    loss_rows: Sequence[float] = ()


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
        model_args: ``trl.ModelConfig``: adapters, quantization, data type.
        compare: Whether to train the model with softmax too, by the same arguments.
        log: Called with progress messages.

    Returns:
        The content of ``finetuning.json``: ``lines``, an evaluation of each model, and ``verdict``.

    Raises:
        AttnzooError: An argument is invalid.
    """
    if (read_field(read_config(path), NAME) is None) == (spec is None):
        raise SpecError(
            f"{str(path)!r} is {'not' if spec is None else 'already'} swapped; give an attention "
            "for a model that is not swapped, and none for one that is"
        )
    encoder, tokenizer = is_encoder(path), load_tokenizer(path)
    options, model_args = _row_options(args), model_args or trl.ModelConfig()
    about = {"model": str(path), "spec": spec and spec.to_dict(), "data": [*map(str, data)]}
    _begin(args, about)
    train_set, held_out = split_documents(load_documents(data, options, tokenizer))
    judge = (_masked_judge if encoder else _judge)(held_out, tokenizer, options)
    make = partial(
        _masked_trainer if encoder else _causal_trainer,
        model_args=model_args,
        tokenizer=tokenizer,
        documents=train_set,
        options=options,
    )
    lines: dict[str, Any] = {}
    model = _load(path, spec, model_args, encoder)
    trainer = make(model, args)
    if not trainer.is_deepspeed_enabled:  # whose weights may be in parts
        log("evaluation: softmax, raw swap")
        with original_attention(model):
            lines["softmax"] = judge(trainer.model)
        lines["raw swap"] = judge(trainer.model)
    if compare:
        log("training: softmax")
        exact = _load(path, spec and AttentionSpec("softmax"), model_args, encoder)
        if spec is None:
            restore(exact)
            swap(exact, "softmax")
        other = copy.copy(args)
        other.output_dir, other.push_to_hub = f"{args.output_dir}/softmax", False
        lines["softmax tuned"] = judge(_train(make(exact, other)))
    log("training: swap")
    lines["result"] = judge(_train(trainer))
    results = {
        **about,
        "verdict": _verdict(lines),
        "lines": {k: _plain(x) for k, x in lines.items()},
    }
    _save(trainer, path, results)
    return results


def _row_options(args: Any) -> RowOptions:
    """Return what documents and held-out rows are made of."""
    if not isinstance(args, trl.SFTConfig):
        return RowOptions(max_length=ENCODER_LENGTH)
    return RowOptions(
        dataset_text_field=args.dataset_text_field,
        max_length=args.max_length or 1024,
        completion_only_loss=bool(args.completion_only_loss or args.assistant_only_loss),
    )


def _begin(args: TrainingArguments, about: dict[str, Any]) -> None:
    """Check that the folder of a run is new, or holds the same run, which resumes.

    Raises:
        ConfigError: It holds a run, and either ``resume_from_checkpoint`` is not given, or the run
            is another one.
    """
    out = Path(str(args.output_dir))
    given = {name: getattr(args, name) for name in IDENTITY if hasattr(args, name)}
    text = json.dumps({**about, **given}, indent=2, sort_keys=True)
    if not (out / RUN).is_file():
        out.mkdir(parents=True, exist_ok=True)
        atomic_write(out / RUN, text)
        return
    if not args.resume_from_checkpoint:
        raise ConfigError(
            f"{str(out)!r} holds a run; give another output_dir, or resume_from_checkpoint"
        )
    if (out / RUN).read_text("utf-8") != text:
        raise ConfigError(
            f"{str(out)!r} holds a run with other arguments (finetuning_run.json); give these, or "
            "another output_dir"
        )


def _load(path: Path, spec: AttentionSpec | None, model_args: Any, encoder: bool) -> Any:
    """Return a swapped model."""
    options = {"quantization_config": trl.get_quantization_config(model_args)}
    cls = AutoModelForMaskedLM if encoder else AutoModelForCausalLM
    model = load_pretrained(cls, path, dtype=model_args.dtype, **options)
    return model if spec is None else swap(model, spec)


def _causal_trainer(
    model: Any, args: Any, *, model_args: Any, tokenizer: Any, documents: Any, options: RowOptions
) -> Trainer:
    """Return TRL's trainer of a causal model."""
    columns = documents.column_names
    if options.completion_only_loss:
        documents = documents.map(lambda row: json.loads(row["text"]), remove_columns=columns)
        if "messages" in documents.column_names and not args.assistant_only_loss:
            raise ConfigError("The data have messages: give assistant_only_loss")
    else:
        documents = documents.select_columns("text")
        if args.dataset_text_field != "text":
            documents = documents.rename_column("text", args.dataset_text_field)
    try:
        trainer: Trainer = trl.SFTTrainer(
            model=model,
            args=args,
            train_dataset=documents,
            processing_class=tokenizer,
            peft_config=trl.get_peft_config(model_args),
        )
    except ValueError as error:  # of arguments that exclude each other
        if isinstance(error, AttnzooError):
            raise
        raise ConfigError(str(error)) from error
    return trainer


def _masked_trainer(
    model: Any, args: Any, *, model_args: Any, tokenizer: Any, documents: Any, options: RowOptions
) -> Trainer:
    """Return the trainer of an encoder, which predicts masked tokens."""
    if (adapters := trl.get_peft_config(model_args)) is not None:
        from peft import get_peft_model

        adapters.task_type = None
        model = get_peft_model(model, adapters)
    return Trainer(
        model=model,
        args=args,
        train_dataset=_tokenized(documents, tokenizer, options.max_length),
        data_collator=DataCollatorForLanguageModeling(tokenizer),
        processing_class=tokenizer,
    )


def _tokenized(documents: Any, tokenizer: Any, length: int) -> Any:
    """Return the first tokens of each document, with special ones."""
    length = min(length, tokenizer.model_max_length)
    return documents.map(
        lambda block: {
            "input_ids": tokenizer(block["text"], truncation=True, max_length=length)["input_ids"]
        },
        batched=True,
        remove_columns=documents.column_names,
    )


def _judge(held_out: Any, tokenizer: Any, options: RowOptions) -> Callable[[Any], Any]:
    """Return what evaluates the loss and the recall of a causal model on held-out rows."""
    if options.completion_only_loss:
        rows = pack_examples(held_out, tokenizer, options.max_length)
    else:
        ids = tokenizer(list(held_out["text"]), add_special_tokens=False, verbose=False)
        length = min(options.max_length, sum(map(len, ids["input_ids"])))
        rows = pack(held_out, tokenizer, length)
    batch = rows_to_eval_batch(rows, ROWS)
    return lambda model: evaluate_rows(model, batch)


def _masked_judge(held_out: Any, tokenizer: Any, options: RowOptions) -> Callable[[Any], Any]:
    """Return what evaluates an encoder on the same masked tokens of held-out texts."""
    if tokenizer.mask_token is None:
        raise SpecError("The tokenizer of this model has no mask token; set one and save it")
    mask = DataCollatorForLanguageModeling(tokenizer, seed=0)
    texts = _tokenized(held_out, tokenizer, options.max_length).select(
        range(min(TEXTS, len(held_out)))
    )
    batches = [mask([{"input_ids": x} for x in block["input_ids"]]) for block in texts.iter(16)]

    @torch.no_grad()
    def judge(model: Any) -> MaskedQuality:
        training, losses, right = model.training, [], []
        model.eval()
        for batch in batches:
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

    return judge


def _train(trainer: Trainer) -> Any:
    """Train, from the last complete checkpoint if the run is resumed; return the model."""
    found = Path(str(trainer.args.output_dir)).glob("checkpoint-*/trainer_state.json")
    if not trainer.args.resume_from_checkpoint:
        trainer.train()
        return trainer.model
    states = [(TrainerState.load_from_json(str(file)), file.parent) for file in found]
    last = max(states, key=lambda pair: pair[0].global_step, default=None)
    if last is not None and last[0].global_step >= last[0].max_steps:
        trainer._load_from_checkpoint(str(last[1]))  # train() takes one more step
    else:
        trainer.train(resume_from_checkpoint=None if last is None else str(last[1]))
    return trainer.model


def _plain(line: Any) -> dict[str, Any]:
    """Return an evaluation as plain data, without fractions of a gap, which nothing closes."""
    values = {k: list(x) if isinstance(x, tuple) else x for k, x in asdict(line).items()}
    return values | ({} if isinstance(line, MaskedQuality) else dict.fromkeys(SHARES))


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


def _save(trainer: Trainer, path: Path, results: dict[str, Any]) -> None:
    """Save the model, with its adapters merged unless weights are in parts or quantized."""
    out, model = Path(str(trainer.args.output_dir)), cast(Any, trainer.model)
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if hasattr(model, "merge_and_unload") and not sharded and not hasattr(model, "hf_quantizer"):
        trainer.model = model.merge_and_unload()
    partial_folder = out / "model.partial"
    trainer.save_model(str(partial_folder))
    if trainer.is_world_process_zero():
        copy_companions(path, partial_folder)
        move_files(partial_folder, out)
        atomic_write(out / RESULTS, json.dumps(results, indent=2, allow_nan=False))
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
