"""Fine-tuning of a swapped model by TRL's ``SFTTrainer``.

Packing, adapters, optimizers, distribution, checkpoints and evaluation are TRL's; ours are the
held-out documents and the comparison with the equally trained softmax model.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from jinja2 import TemplateError

from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.corpus import load_tokenizer
from attnzoo.evaluation.rows import require_finite
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import NAME
from attnzoo.hf.saving.files import copy_modules, read_config, saved_dtype
from attnzoo.hf.swap import original_attention, restore, swap
from attnzoo.optional_packages import OptionalPackage
from attnzoo.spec import AttentionSpec
from attnzoo.training.arguments import (
    check_libraries,
    check_numbers,
    config_errors,
    identity,
    refuse_unused,
    resumes,
)
from attnzoo.training.data import RowOptions, check_positions, load_documents, split_documents
from attnzoo.training.loading import load_causal
from attnzoo.training.planner import weights_fingerprint
from attnzoo.training.run_folder import RunFolder
from attnzoo.training.trainer import STATE, last_checkpoint, steps_of

if TYPE_CHECKING:
    import trl
else:
    trl = OptionalPackage("trl", extra="train")

RESULTS = "finetuning.json"
ADAPTERS = ("lora_", "use_rslora", "use_dora")  # beginnings of fields of ModelConfig
DTYPES = ("auto", "float32", "bfloat16")


def finetune(
    path: Path | str,
    spec: AttentionSpec | None,
    data: Sequence[Path | str],
    args: Any,
    model_args: Any = None,
    *,
    compare: bool = True,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Fine-tune a swapped model on text or examples, evaluate it, and save it.

    Args:
        path: Folder of a saved causal model.
        spec: The swap; ``None`` for a model that is already swapped.
        data: As in :func:`attnzoo.training.data.load_documents`; examples with
            ``completion_only_loss`` or ``assistant_only_loss``.
        args: ``trl.SFTConfig``.
        model_args: ``trl.ModelConfig``: adapters, data type, weights in 4 bits.
        compare: Whether to train the model with softmax too, by the same arguments.
        log: Called with progress messages.

    Returns:
        The content of ``finetuning.json``; ``lines`` has the held-out loss of each model in nats.

    Raises:
        AttnzooError: An argument is invalid.
    """
    path, model_args, lines = Path(path), model_args or trl.ModelConfig(), {}
    _check_arguments(path, args, model_args)
    resume, run = resumes(args), {"compare": compare, "config": identity(args) | vars(model_args)}
    RunFolder(Path(str(args.output_dir)), run, RESULTS).check(resume=resume)  # before data are read
    load = partial(
        load_causal,
        path,
        dtype=saved_dtype(path) if model_args.dtype == "auto" else getattr(torch, model_args.dtype),
        load_in_4bit=model_args.load_in_4bit,
        device=args.device,
    )
    with PartialState().local_main_process_first():  # the others find the data in the cache
        tokenizer = load_tokenizer(path)
        halves, digest = _read(data, args, tokenizer)
    model = load(spec)
    run |= {"data": digest, **_identity(model, backends=spec is None)}
    folder = RunFolder(Path(str(args.output_dir)), run, RESULTS)

    def make(name: str, model: Any) -> Any:
        """Return the trainer of a model, whose checkpoints are in a folder of their own."""
        own = copy.copy(args)
        own.output_dir, own.push_to_hub = str(folder.checkpoints / name), False
        return _trainer(path, model, own, halves, tokenizer, trl.get_peft_config(model_args))

    def evaluate(name: str, trainer: Any) -> None:
        log(f"evaluation: {name}")
        lines[name] = require_finite(_cross_entropy(trainer), f"held-out loss of {name}")

    trainer = make("finetune", model)
    _report_cuts(trainer, log)
    with folder.open(resume=resume, state=PartialState()) as finished:
        if finished is not None:
            return finished
        if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):  # weights in parts
            with original_attention(trainer.model):
                evaluate("softmax", trainer)
            evaluate("raw swap" if spec else "before", trainer)
        if compare:
            exact = load(spec and AttentionSpec("softmax"))
            if spec is None:
                restore(exact)
                swap(exact, "softmax")
            other = make("softmax", exact)
            _train(other, resume=resume)
            evaluate("softmax tuned", other)
        _train(trainer, resume=resume)
        evaluate("result", trainer)
        trainer.args.push_to_hub = args.push_to_hub
        return _save(trainer, path, folder, {**folder.run, "lines": lines})


def _check_arguments(path: Path, args: Any, model_args: Any) -> None:
    """Raise an error for invalid arguments, and for those that have no effect."""
    weights = "MODEL has the weights, and dtype and load_in_4bit say in which type they are loaded"
    unused = {"model_init_kwargs": weights}
    for name in (x.name for x in fields(model_args)):
        if name.startswith(ADAPTERS):
            unused |= {} if model_args.use_peft else {name: "give use_peft to train adapters"}
        elif name not in ("dtype", "load_in_4bit", "use_peft"):
            unused[name] = weights
    for given in (args, model_args):
        refuse_unused(given, unused)
        check_numbers(given)
    check_libraries(args)
    float16 = model_args.dtype == "auto" and saved_dtype(path) == torch.float16
    if float16 or model_args.dtype == "float16":
        raise ConfigError(
            "Weights in float16 would be trained without loss scaling; give --dtype bfloat16, or "
            "--fp16, which computes in float16 with weights in float32"
        )
    if model_args.dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {model_args.dtype!r}")


def _identity(model: Any, *, backends: bool) -> dict[str, Any]:
    """Return what a run has of a model; other processes may have no weights yet."""
    is_main = PartialState().is_main_process
    weights = weights_fingerprint(model, backends=backends) if is_main else ""
    return {"model": weights, "spec": read_field(model.config, NAME)}


def _read(data: Sequence[Path | str], args: Any, tokenizer: Any) -> tuple[list[Any], str]:
    """Return training and held-out documents, or examples, and a hash of all of them."""
    field = args.dataset_text_field
    examples = bool(args.completion_only_loss or args.assistant_only_loss)
    options = RowOptions(dataset_text_field=field)
    documents = load_documents(data, options, tokenizer, examples=examples)
    digest = hashlib.sha256(b"".join(documents["digest"])).hexdigest()[:16]
    halves = split_documents(documents, cut=not examples)
    if not examples:
        texts = [x.select_columns("text").rename_columns({"text": field}) for x in halves]
        return texts, digest
    found = [
        x.map(lambda row: json.loads(row["text"]), remove_columns=x.column_names) for x in halves
    ]
    if "messages" in found[0].column_names and not args.assistant_only_loss:
        raise ConfigError("The data have messages: give assistant_only_loss")
    return found, digest


def _trainer(
    path: Path, model: Any, args: Any, halves: Sequence[Any], tokenizer: Any, adapters: Any
) -> Any:
    """Return TRL's trainer; its errors about arguments and templates are ours."""
    train, held_out = halves
    options = {"train_dataset": train, "eval_dataset": held_out, "peft_config": adapters}
    try:
        with config_errors():
            found = trl.SFTTrainer(model, args, processing_class=tokenizer, **options)
    except TemplateError as error:  # of a template that came with the model
        raise SpecError(f"The chat template cannot write the messages: {error}") from error
    check_positions(path, max(_lengths(found)))
    return found


def _lengths(trainer: Any) -> list[int]:
    """Return the tokens of each document, or part of one, that is trained on."""
    rows = trainer.train_dataset[:]
    return [*chain(*(rows.get("seq_lengths") or ([len(x)] for x in rows["input_ids"])))]


def _report_cuts(trainer: Any, log: Callable[[str], None]) -> None:
    """Say how many documents are cut at the length of a row."""
    args, lengths = trainer.args, _lengths(trainer)
    cut = lengths.count(args.max_length)
    if cut and (not args.packing or args.packing_strategy == "bfd"):
        log(
            f"{cut} of {len(lengths)} documents have {args.max_length} tokens or more, which are "
            "cut there: give --max-length, or --packing --packing-strategy bfd_split"
        )


def _cross_entropy(trainer: Any) -> float:
    """Return the cross-entropy of held-out rows, whatever the trainer minimises."""
    names = ("label_smoother", "aux_loss_enabled")
    own, loss_type = {x: getattr(trainer, x) for x in names}, trainer.args.loss_type
    trainer.label_smoother, trainer.aux_loss_enabled, trainer.args.loss_type = None, False, "nll"
    try:
        return float(trainer.evaluate()["eval_loss"])
    finally:
        vars(trainer).update(own)
        trainer.args.loss_type = loss_type


def _train(trainer: Any, *, resume: bool) -> None:
    """Train, from the last whole checkpoint if the run is resumed."""
    folder, count = Path(str(trainer.args.output_dir)), trainer.accelerator.num_processes
    last = last_checkpoint(folder, count) if resume else None
    if last is not None and steps_of(last) >= trainer.args.max_steps > 0:
        best = json.loads((last / STATE).read_text("utf-8"))["best_model_checkpoint"]
        if best is not None and trainer.args.load_best_model_at_end:
            last = folder / Path(best).name
        trainer._load_from_checkpoint(str(last))  # train() would take one more step
    else:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))


def _save(trainer: Any, path: Path, folder: RunFolder, results: dict[str, Any]) -> dict[str, Any]:
    """Save the model, with its adapters merged unless weights are in parts or quantized."""
    model: Any = trainer.model
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if hasattr(model, "merge_and_unload") and not sharded and not hasattr(model, "hf_quantizer"):
        trainer.model = model.merge_and_unload()
    if (use_cache := read_field(read_config(path), "use_cache")) is not None:
        model.config.use_cache = use_cache  # Trainer changes what is saved
    trainer.save_model(str(folder.partial))
    if trainer.is_world_process_zero():
        copy_modules(path, folder.partial)
        folder.finish(results)
    if trainer.args.push_to_hub:
        trainer.args.output_dir = str(folder.out)
        trainer.init_hf_repo()
        trainer.push_to_hub()
    return results
