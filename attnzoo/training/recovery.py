"""Recovery of a swapped model in stages: attention transfer, distillation, evaluation.

Rates that suit a student far from its teacher undo what transfer has learned in one that is close:
the steps of Adam have the size of the rate, however small the gradient is. The rates of
distillation are therefore multiplied by :func:`rate_factor`, unless ``learning_rate`` is given.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, broadcast
from torch.utils.data import default_collate
from transformers import PreTrainedModel, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from attnzoo.errors import SpecError
from attnzoo.evaluation.corpus import load_tokenizer
from attnzoo.evaluation.rows import Rows, contributions, separates_documents
from attnzoo.evaluation.rows import predictions as row_predictions
from attnzoo.hf.configs import read_field, set_dropout
from attnzoo.hf.lora import (
    add_adapters,
    check_target_modules,
    require_peft,
    with_adapters,
)
from attnzoo.hf.names import NAME
from attnzoo.hf.saving.files import (
    cast_weights,
    copy_modules,
    model_class,
    read_config,
    round_weights,
    saved_dtype,
)
from attnzoo.hf.swap import original_attention, restore, swap
from attnzoo.spec import AttentionSpec
from attnzoo.training import evaluator
from attnzoo.training.arguments import (
    RecoveryArguments,
    config_errors,
    identity,
    refuse_unused,
    resumes,
)
from attnzoo.training.callbacks import BestState, HeadEntropy
from attnzoo.training.data import load_rows, load_texts
from attnzoo.training.distil import token_divergence
from attnzoo.training.evaluator import EncoderEvaluator, Evaluator
from attnzoo.training.loading import load_causal, load_model
from attnzoo.training.planner import require_trained, weights_fingerprint
from attnzoo.training.report import card
from attnzoo.training.run_folder import RunFolder
from attnzoo.training.trainer import LogitDistillationTrainer, TransferTrainer
from attnzoo.training.transfer import (
    evaluation_mode,
    extras,
    has_indexer,
    swapped_layers,
    trainable_layers,
)
from attnzoo.training.verdict import difference

CLOSE = 1e-3  # nats; a student that starts closer has little to learn from its teacher
FAR = 0.1  # nats, from which on the rates are those that are given
LEAST = 0.03  # smallest factor of the rates
JUDGED = 16  # held-out rows of the best state, and of a divergence
TEXTS, TOKENS = 4, 128  # texts on which the entropy of heads is measured
Log = Callable[[str], None]


class Recovery:
    """Recovery of a causal model; subclasses say what differs for others.

    Args:
        path: Folder of the model.
        spec: The swap.
        data: As in :func:`recover`.
        args: As in :func:`recover`.
        log: Called with messages, on the main process.
        weights: As in :func:`recover`.
    """

    task = "CAUSAL_LM"  # PEFT's task type
    teacher: Any = None  # another model that teaches; without one, the model with softmax does
    trainer_class = LogitDistillationTrainer

    def __init__(
        self,
        path: Path,
        spec: AttentionSpec | None,
        data: list[Path],
        args: RecoveryArguments,
        log: Log,
        weights: str | None = None,
    ) -> None:
        self.path, self.spec, self.data, self.args = path, spec, data, args
        self.state = PartialState()
        self.log: Log = log if self.state.is_main_process else lambda text: None
        self.check_arguments()
        if args.train == "lora":
            require_peft()
        out, run = Path(str(args.output_dir)), dict[str, Any](config=identity(args))
        RunFolder(out, run).check(resume=resumes(args))  # before data are read
        self.dtype = saved_dtype(path)  # that the model is saved in again
        with self.state.local_main_process_first():  # the others find its rows in the cache
            self.rows, self.held_out = self.load_rows()
        rows, held_out = len(self.rows), len(self.held_out)
        count = min(evaluator.ROWS, held_out)
        self.log(f"{rows} training rows, {held_out} held-out rows, of which {count} are measured")
        set_seed(args.seed)
        self.model: Any = self.load_model()
        saved = self.load(dtype=self.dtype) if self.is_narrow else self.model
        if args.train == "lora" and args.lora_target_modules is not None:
            check_target_modules(self.model, args.lora_target_modules)
        found = weights_fingerprint(saved)
        if weights not in (None, found):
            raise SpecError(
                "The plan was made for a model with other weights than those in "
                f"{str(self.path)!r}; make a plan for this model with `attnzoo plan`"
            )
        run |= {
            "model": found,
            "spec": read_field(self.model.config, NAME),
            "data": self.rows.fingerprint,
            "held_out": self.held_out.fingerprint,
        }
        self.reused: dict[str, dict[str, torch.Tensor]] = {}  # transferred layers
        if args.transfer_from is not None:
            self.reused = transferred_layers(self.model, Path(args.transfer_from), found)
        if self.teacher is not None:
            run["teacher"] = weights_fingerprint(self.teacher)
        self.folder = RunFolder(out, run)
        self.stages: dict[str, list[dict[str, Any]]] = {}  # log histories
        self.taken = 0  # steps of the stages so far

    def check_arguments(self) -> None:
        """Raise an error for arguments that do not suit the model."""

    def load_rows(self) -> tuple[Any, Any]:
        """Return training rows and held-out rows."""
        return load_rows(self.path, self.data, self.args)

    def load(self, **options: Any) -> PreTrainedModel:
        """Return the swapped model with its saved weights; ``options`` are of ``load_model``."""
        options["disable_dropout"] = self.args.disable_dropout
        return load_causal(self.path, self.spec, **options)

    def load_model(self) -> Any:
        """Return the model that is trained, on its device.

        Under ZeRO-3 it is built whole: a swap reads the weights.
        """
        unset_hf_deepspeed_config()
        options: dict[str, Any] = {"dtype": getattr(torch, self.args.dtype)}
        if self.args.load_in_4bit:
            options |= {"load_in_4bit": True, "device": self.args.device}
        model: Any = self.load(**options)
        if not self.args.load_in_4bit:
            model.to(self.args.device)
        for p in extras(model).values():
            p.data = p.data.float()  # frozen weights may be narrow, what is trained is not
        return model

    @property
    def is_narrow(self) -> bool:
        """Whether frozen weights are rounded while the run trains."""
        return self.args.load_in_4bit or self.args.dtype != "float32"

    def run(self) -> dict[str, Any]:
        """Run all stages; return the content of ``recovery.json``."""
        with self.folder.open(resume=resumes(self.args), state=self.state) as finished:
            if finished is not None:
                self.log("The run is finished; these are its results.")
                return finished
            self.evaluator = self.make_evaluator()
            self.warn_of_mixed_documents()
            self.evaluate_baselines()
            model, reason = self.model, self.why_not_trained()
            if reason:
                self.log(reason)
            else:
                self.tune_softmax()
                model = self.distil(self.transfer(model))
            model = self.whole(model)
            self.evaluator.lines.setdefault("softmax tuned", self.evaluator.lines["softmax"])
            round_weights(model, self.dtype)
            self.evaluator.evaluate("result", model)
            results = {**self.evaluator.results(), **self.folder.run}
            if reason:
                results["not_trained"] = reason
            if self.teacher is not None:
                config = self.model.config
                layers = {"class": config.model_type, "layer_types": config.layer_types}
                results["student"] = layers
            return self.save(model, results)

    # --- evaluation

    def make_evaluator(self) -> Any:
        """Return what evaluates models on the held-out rows."""
        args = self.args
        return Evaluator(
            self.path,
            self.held_out,
            lambda length: load_rows(self.path, self.data, args, length)[1],
            target_length=args.target_length,
            log=self.log,
        )

    def warn_of_mixed_documents(self) -> None:
        """Say if the model reads over the borders of documents in a row, which training packs."""
        rows = self.rows
        if isinstance(rows, Rows) and rows.is_packed:
            some = rows.select(slice(2)).to(self.args.device)
            with evaluation_mode(self.model), torch.no_grad():
                if not separates_documents(self.model, some):
                    self.log(
                        "this model does not separate the documents of a row by their positions: "
                        "training mixes them, measurements do not; give documents as long as a row"
                    )

    def evaluate_baselines(self) -> None:
        """Evaluate the untrained model with softmax, with its swap, and with windows."""
        model, evaluator = self.model, self.evaluator
        spec = getattr(model.config, NAME)
        evaluator.set_windows(model, AttentionSpec.from_dict(spec))
        evaluator.add_original(model)
        with original_attention(model):
            evaluator.evaluate("softmax", model)
        evaluator.evaluate("raw swap", model)
        saved = {n: x.clone() for n, x in model.state_dict().items() if f".{NAME}." in n}
        restore(model)  # swapping would warn that trained extras are lost
        evaluator.evaluate_windows(model)
        swap(model, AttentionSpec.from_dict(spec))
        model.load_state_dict(saved, strict=False)
        model.to(self.args.device)

    def why_not_trained(self) -> str:
        """Return why nothing is trained, or ``""``: the student starts where softmax is.

        That is less than :data:`CLOSE` nats away on held-out rows of every length, and no
        difference is measured in loss, recall or generated tokens.
        """
        args, evaluator = self.args, self.evaluator
        if args.always_train or args.cross_entropy or not (args.transfer_steps or args.max_steps):
            return ""
        indexers = [x.indexer for x in swapped_layers(self.model).values() if has_indexer(x)]
        if not all(indexer.is_trained for indexer in indexers if indexer is not None):
            return ""
        raw, exact = evaluator.lines["raw swap"], evaluator.lines["softmax"]
        if any(difference(x, raw, exact).is_clear for x in ("loss", "recall", "agreement")):
            return ""
        rows = [x.rows.select(slice(JUDGED)) for x in evaluator.batches.values()]
        kl = max(held_out_divergence(self.model, x, self.teacher) for x in rows)
        if kl >= CLOSE:
            return ""
        return (
            f"nothing is trained: the model starts {kl:.1g} nats from softmax on this text, and "
            f"its loss, {difference('loss', raw, exact)} bits per byte above softmax's, is within "
            "the noise. It is saved as it is; give text with longer documents, or train all the "
            "same (--always-train)"
        )

    # --- stages

    def train(
        self,
        kind: Any,
        model: Any,
        name: str,
        rate: float,
        rebuild: Callable[[], Any],
        *,
        factor: float = 1.0,
        **options: Any,
    ) -> Any:
        """Run a stage, from its last checkpoint if the run is resumed; return the whole model.

        Args:
            kind: Class of the trainer.
            model: The model.
            name: Name of the stage.
            rate: Learning rate.
            rebuild: Returns another model of the same architecture.
            factor: Of this rate and the others.
            options: Of the trainer.
        """
        args = copy.copy(self.args)
        args.output_dir = str(self.folder.checkpoints / name)
        args.max_steps = args.transfer_steps if name == "transfer" else args.max_steps
        args.learning_rate = rate * factor
        args.extras_learning_rate *= factor
        if args.attention_learning_rate is not None:
            args.attention_learning_rate *= factor
        args.run_name = f"{Path(str(self.args.output_dir)).name} {name}"
        measured = self.teacher is None and self.state.num_processes == 1 and swapped_layers(model)
        with config_errors():
            trainer = kind(
                model,
                args,
                best=self.best(generates=name == "distil"),
                train_dataset=self.rows,
                first=self.taken,
                data_collator=default_collate,
                callbacks=[HeadEntropy(self.held_out_texts())] if measured else [],
                **options,
            )
        self.taken += args.max_steps
        trainer.train(resume_from_checkpoint=resumes(args))
        self.stages[name] = trainer.state.log_history
        return self.gathered(trainer, rebuild)

    def judged(self) -> list[dict[str, torch.Tensor]]:
        """Return held-out rows that are spread over the text, as batches of one row."""
        count = min(JUDGED, len(self.held_out))
        rows = [self.held_out[i * len(self.held_out) // count] for i in range(count)]
        return [{k: x[None].to(self.args.device) for k, x in row.items()} for row in rows]

    def held_out_texts(self) -> dict[str, torch.Tensor]:
        """Return a few held-out texts as arguments of the model."""
        rows = self.judged()[:TEXTS]
        names = [name for name in rows[0] if name != "labels"]
        return {name: torch.cat([x[name][:, :TOKENS] for x in rows]) for name in names}

    def best(self, *, generates: bool = False) -> BestState | None:
        """Return what keeps the best state of a stage; ``None`` if the last one is kept.

        It is not kept under DeepSpeed, whose optimizer has the weights, nor under context
        parallelism, where a process has a part of each row.
        """
        if self.args.eval_strategy == "no":
            return None
        deepspeed = self.state.distributed_type == DistributedType.DEEPSPEED
        if self.args.cp_size > 1 or deepspeed:
            self.log("the last state of a stage is kept, not the best (DeepSpeed or cp_size)")
            return None
        generation = getattr(self.evaluator.batch, "generation", None) if generates else None
        return BestState(self.judged(), generation, self.log)

    def tune_softmax(self) -> None:
        """Train the model with softmax with cross-entropy as the baseline ``softmax tuned``.

        It takes the same steps as the swapped model, so that the gain from more text does not count
        as a gain of the swap.
        """
        args = self.args
        if not (args.cross_entropy and args.max_steps and args.train != "extras"):
            return

        def load() -> Any:
            model = self.load_model()
            if args.cp_size > 1:
                swap(model, "flash")
            else:
                restore(model)
            return model

        tuned = self.train_weights(load(), "softmax", 1.0, load)
        self.evaluator.evaluate("softmax tuned", tuned)

    def transfer(self, model: Any) -> Any:
        """Run attention transfer on all layers that have parameters."""
        args, layers = self.args, trainable_layers(model)
        reason = "the backends have no parameters of their own"
        if self.reused:
            for name, state in self.reused.items():
                swapped_layers(model)[name].load_state_dict(state)
            self.log(f"transfer of {len(self.reused)} layers is reused from {args.transfer_from}")
            layers, reason = [x for x in layers if x not in self.reused], "all layers are reused"
        if not layers or not args.transfer_steps:
            self.log(f"transfer is skipped: {'0 steps' if layers else reason}")
            return model
        rate = args.transfer_rate
        return self.train(TransferTrainer, model, "transfer", rate, self.load_model, layers=layers)

    def distil(self, model: Any) -> Any:
        """Distil softmax into the model; return it with adapters merged."""
        args = self.args
        if not args.max_steps or (args.train == "extras" and not self.trainer_class.added(model)):
            reason = "no parameter gets a gradient from the output" if args.max_steps else "0 steps"
            self.log(f"distillation is skipped: {reason}")
            return model
        return self.train_weights(model, "distil", self.rate_factor(model), self.load_model)

    def rate_factor(self, model: Any) -> float:
        """Return the factor of the rates of distillation; a resumed run has the same one."""
        args = self.args
        if args.learning_rate is not None or args.cross_entropy:
            return 1.0
        rows = self.evaluator.batch.rows.select(slice(JUDGED))
        kl = held_out_divergence(model, rows, self.teacher)
        factor = rate_factor(kl)
        start = f"distillation starts {kl:.4f} nats from softmax"
        self.log(f"{start}; its rates are multiplied by {factor:.2g}")
        return factor

    def train_weights(self, model: Any, name: str, factor: float, load: Callable[[], Any]) -> Any:
        """Distil a model, with its adapters or all its weights; return it with these merged.

        Args:
            model: The model.
            name: Name of the stage.
            factor: Of the rates.
            load: Returns another model of the same architecture.
        """
        args = self.args
        prepared = self.prepare(model)
        trained = self.train(
            self.trainer_class,
            prepared,
            name,
            args.distil_rate,
            lambda: self.prepare(load()),
            factor=factor,
            teacher=self.teacher,
            is_encoder=self.task != "CAUSAL_LM",
            log=self.log,
        )
        if args.train != "lora" or self.is_narrow:
            return trained
        return trained.merge_and_unload()

    def prepare(self, model: Any) -> Any:
        """Return a model, with adapters for ``train="lora"``."""
        args = self.args
        if args.train != "lora":
            return model
        torch.manual_seed(args.seed)  # the same adapters in a resumed run
        prepared = with_adapters(
            model,
            args.lora_r,
            self.task,
            alpha=args.lora_alpha,
            target_modules=args.lora_target_modules,
        )
        return prepared.to(args.device)

    @torch.no_grad()
    def gathered(self, trainer: Any, rebuild: Callable[[], Any]) -> Any:
        """Return the trained model with whole weights on each process.

        Sharded weights go into a model that is built again: FSDP2 renames the classes of layers in
        place, and the next stage could not wrap them.
        """
        accelerator = trainer.accelerator
        if accelerator.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            return accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
        trained = accelerator.unwrap_model(trainer.model_wrapped)
        if any(hasattr(p, "ds_id") for p in trained.parameters()):  # in parts, under ZeRO-3
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters(list(trained.parameters())):
                state = {n: x.detach().clone() for n, x in trained.state_dict().items()}
        else:
            state = accelerator.get_state_dict(trainer.model_wrapped)  # on the main process
        model = rebuild()
        if accelerator.is_main_process:
            model.load_state_dict(state, strict=False)  # has one name for tied weights
        model.to(accelerator.device)
        for x in (*model.parameters(), *model.buffers()):
            x.data.copy_(broadcast(x.data, from_process=0))
        return model

    def whole(self, trained: Any) -> Any:
        """Return a trained model with weights that are not rounded, to evaluate and save it.

        What was trained is added, in float32, to the weights of the folder.
        """
        if not self.is_narrow:
            return trained.to(self.args.device)
        model: Any = self.load(dtype=self.dtype)
        add_adapters(model, trained)
        self.model = model
        return model.to(self.args.device)

    def save(self, model: Any, results: dict[str, Any]) -> dict[str, Any]:
        """Write model, tokenizer, card and results to the folder; return the results with losses.

        The weights have the data type of the model that came in. The results are written last: they
        mark a finished run.
        """
        if self.state.is_main_process:
            losses = {name: _losses(history) for name, history in self.stages.items()}
            results = json.loads(json.dumps({**results, "losses": losses}, allow_nan=False))
            partial = self.folder.partial
            model.requires_grad_(True)
            cast_weights(model, self.dtype)
            set_dropout(model.config, read_config(self.path))
            model.save_pretrained(partial)
            load_tokenizer(self.path).save_pretrained(partial)
            copy_modules(self.path, partial)
            (partial / "README.md").write_text(card(self, results), "utf-8")
            self.folder.finish(results)
        self.state.wait_for_everyone()
        return results


class EncoderRecovery(Recovery):
    """Recovery of an encoder, whose embeddings are to stay those of the original model."""

    task = "FEATURE_EXTRACTION"

    def check_arguments(self) -> None:
        """Raise an error for arguments of predictions and of packed rows."""
        reason = "an encoder is distilled to its last hidden states, and each row is one text"
        names = ("cross_entropy", "hidden_states", "target_length", "cp_size")
        refuse_unused(self.args, dict.fromkeys(names, reason))

    def load_rows(self) -> tuple[Any, Any]:
        """Return training texts and held-out texts."""
        return load_texts(self.path, self.data, self.args)

    def load(self, **options: Any) -> PreTrainedModel:
        """Return the swapped model with its saved weights, in the class it was saved in."""
        cls = model_class(read_config(self.path), self.path)
        options["disable_dropout"] = self.args.disable_dropout
        return load_model(self.path, self.spec, cls, **options)

    def make_evaluator(self) -> Any:
        """Return what compares embeddings."""
        return EncoderEvaluator(self.held_out, log=self.log)

    def why_not_trained(self) -> str:
        """Return ``""``: an encoder is always trained."""
        return ""

    def rate_factor(self, model: Any) -> float:
        """Return 1: there are no predictions to compare."""
        return 1.0


def rate_factor(kl: float) -> float:
    r"""Return the factor of the rates for a student with a KL in nats.

    It is :math:`\min(1, (\mathrm{KL} / 0.1)^{3/4})`, at least :data:`LEAST`. The constants go
    through two students of the embedded model: ``delta`` in all layers, 0.1 nats after transfer,
    for which the rates were found; and in two of four layers, 0.005 nats, which full rates take
    from 79% to 43% equal generated tokens in five steps, and a tenth of them do not.
    """
    return min(1.0, max(LEAST, math.pow(max(kl, 0.0) / FAR, 0.75)))


@torch.no_grad()
def held_out_divergence(model: Any, rows: Rows, original: Any = None) -> float:
    """Return the mean KL of a model's predictions from those with softmax, in nats.

    Args:
        model: A swapped causal model, or any with ``original``.
        rows: Held-out rows.
        original: The model with softmax, where it is another one.
    """
    found = []
    with evaluation_mode(model):
        for row in rows.split(1):
            with original_attention(model) if original is None else nullcontext():
                ((_, teacher),) = row_predictions(original or model, row, 1)
            ((_, student),) = row_predictions(model, row, 1)
            found.append(token_divergence(student, teacher).flatten())
    means = contributions(found)
    return math.fsum(means) / len(means)


def transferred_layers(
    model: PreTrainedModel, folder: Path, weights: str
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the states of a saved swap's layers that have the same backend and options.

    Transfer trains every layer on softmax's inputs, so one run over all layers serves every plan.
    ``SpecError`` is raised if the saved model has other weights, no such layer, or is not trained.
    """
    saved: Any = load_model(folder, None, type(model))
    if weights_fingerprint(saved) != weights:
        raise SpecError(
            f"{str(folder)!r} has other weights than the model, whose layers it was trained to "
            "match; give a run of this model with transfer only (--max-steps 0, or --train "
            "extras)"
        )
    known, states = swapped_layers(saved), {}
    for name in trainable_layers(model):
        backend, other = swapped_layers(model)[name], known.get(name)
        if other is not None and (other.name, other.config) == (backend.name, backend.config):
            states[name] = other.state_dict()
    if not states:
        raise SpecError(
            f"No layer of {str(folder)!r} with parameters to train has the backend and the options "
            "of this swap; leave transfer_from out"
        )
    require_trained(model, states, folder)
    return states


def _losses(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a stage logged, without times."""
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_agreement")
    lines = [
        {k: x for k, x in line.items() if k in kept or k.startswith("entropy/")} for line in history
    ]
    return [line for line in lines if len(line) > 1]
