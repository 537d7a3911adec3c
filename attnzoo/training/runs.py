"""One training run: data, model, checkpoints, trained stages and saved results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.corpus import MIN_REPEAT_LENGTH
from attnzoo.evaluation.data import EvalBatch, StringTokenizer
from attnzoo.evaluation.equal_memory import EqualWindow
from attnzoo.evaluation.kernel_checks import check_model_kernels
from attnzoo.evaluation.quality import NonFiniteError
from attnzoo.hf.adapters.lora import add_adapters, with_adapters
from attnzoo.hf.configs import read_field
from attnzoo.hf.context_parallel import check_model
from attnzoo.hf.names import NAME
from attnzoo.hf.saving.dtype import round_weights, saved_dtype
from attnzoo.hf.swap.convert import original_attention, restore, swap
from attnzoo.spec import AttentionSpec
from attnzoo.training import best_state
from attnzoo.training.baselines import Baselines
from attnzoo.training.best_state import BestState
from attnzoo.training.checkpoints import (
    FOLDER,
    CheckpointError,
    Checkpoints,
    check_run_folder,
)
from attnzoo.training.eval_rows import rows_to_eval_batch
from attnzoo.training.frozen_weights import require_frozen_weights
from attnzoo.training.lengths import (
    equal_sentence,
    find_equal_window,
    is_hidden,
    long_results,
    make_long_batches,
)
from attnzoo.training.loading import load_causal, load_rows
from attnzoo.training.loop import (
    DIVERGENCE_ADVICE,
    DivergenceError,
    Loop,
    Loss,
    OnStep,
    Stage,
)
from attnzoo.training.lr_find import check_lr_find
from attnzoo.training.model_card import about_run
from attnzoo.training.model_shards import ModelShards, merge_shards
from attnzoo.training.plan import weights_fingerprint
from attnzoo.training.quality import (
    Quality,
    as_dicts,
    branch_qualities,
    evaluate_rows,
    widest_window,
    with_original_continuations,
)
from attnzoo.training.rates import parameter_groups
from attnzoo.training.settings import require_settings
from attnzoo.training.sharding import check_folders, context_mesh, make_accelerator
from attnzoo.training.train_config import TrainConfig
from attnzoo.training.transfer import extras, output_extras, swapped_layers
from attnzoo.training.verdict import verdict
from attnzoo.training.window_dropout import decay_window_dropout

BASELINES_DONE = "window alone"  # the last one that is evaluated
AT = " @ "  # in names of results on longer rows, before their length
RESULTS = {"recover": "recovery.json", "finetune": "finetuning.json"}
# settings of LoopConfig that a resumed run may change
NO_IDENTITY = (
    *("checkpoint_every", "checkpoint_minutes", "keep", "entropy_every"),
    "activation_offloading",
)
Log = Callable[[str], None]


class Run:
    """One run in its own folder: data, model, training loop and baselines.

    This class trains causal models; subclasses override what differs for other models. The run's
    folder is locked until :meth:`close`.

    Args:
        command: ``recover`` or ``finetune``.
        path: Folder of a saved causal model.
        spec: The swap; ``None`` for a model that is already swapped.
        data: Text files, JSON lines, parquet, or folders of them.
        out: New folder of the run; an existing run's folder with ``resume``.
        config: Training configuration.
        column: Field of JSON and parquet files that holds the text.
        resume: Whether to resume from the last checkpoint in ``out``.
        weights: Fingerprint of the weights that the spec was planned for, if any.
        log: Called with progress messages.
        on_step: Called after each step with the stage, the step and its metrics.

    Attributes:
        finished: The results of a resumed run that is finished, else ``None``; the other
            attributes are then not complete.

    Raises:
        AttnzooError: An argument is invalid.
    """

    finished: dict[str, Any] | None
    quality_class: Any = Quality  # result of one evaluation
    is_encoder = False
    task = "CAUSAL_LM"  # PEFT's task type
    verdict: Any = staticmethod(verdict)
    as_dicts: Any = staticmethod(as_dicts)
    long_batches: Mapping[int, EvalBatch] = MappingProxyType({})  # by length
    teacher: Any = None  # another model that teaches; without one, the model with softmax does
    added: Any = staticmethod(extras)  # parameters that are not the original model's
    output_added: Any = staticmethod(output_extras)  # those with a gradient from the output

    def __init__(
        self,
        command: str,
        path: Path,
        spec: AttentionSpec | None,
        data: list[Path],
        out: Path,
        config: TrainConfig,
        *,
        column: str,
        resume: bool,
        weights: str | None,
        log: Log,
        on_step: OnStep,
    ) -> None:
        self.command, self.path, self.spec, self.out = command, path, spec, out
        self.config, self.log, self.data, self.column = config, log, data, column
        loop, logs = config.loop, out / "logs"
        self.accelerator: Accelerator = make_accelerator(
            loop.seed, tracker=config.report_to, logs=logs, precision=loop.precision, clip=loop.clip
        )
        require_settings(loop, self.accelerator)
        self.shards = ModelShards(self.accelerator)
        if is_main := self.accelerator.is_main_process:
            check_run_folder(out, resume=resume)
        with self.accelerator.local_main_process_first():  # the others find its rows in the cache
            train, self.held_out = self.load_rows(data, column)
        self.dtype = saved_dtype(path)  # that the model is saved in again
        self.model: Any = self.load_model()
        self._set_mesh(loop.cp_size)
        self.provenance = {
            "model": self._fingerprint(weights),
            "spec": read_field(self.model.config, NAME),
            "config": json.loads(json.dumps(asdict(config))),  # as in the file of results
            "data": train.fingerprint,
            "held_out": self.held_out.fingerprint,
        }
        self.about = self._about(len(train))
        self.checkpoints = Checkpoints(out, self._identity(), keep=config.loop.keep, log=log)
        with ExitStack() as stack:
            stack.callback(self.close)  # unlocks the folder if what follows fails
            begun = list(self._begin(resume)) if is_main else [None, None]
            self.finished, progress = broadcast_object_list(begun)
            if self.finished is not None:
                log("The run is finished; these are its results.")
                return
            self._check_folders(progress)
            self._log_rows(train, self.held_out)
            self.baselines = Baselines(self.accelerator, self.checkpoints, self.quality_class, log)
            self._find_baselines()
            self.shards.to_device(self.model)
            self.set_eval_data(self.held_out)
            if config.report_to:
                self.accelerator.init_trackers("attnzoo")
            self._set_loop(train, progress, on_step)
            self._check_kernels(train[0])
            stack.pop_all()

    def _set_loop(self, rows: Any, progress: dict[str, Any] | None, on_step: OnStep) -> None:
        config, checkpoints = self.config.loop, self.checkpoints
        self.loop = Loop(self.accelerator, rows, config, checkpoints, progress, on_step, self.mesh)
        self.loop.shards = self.shards

    def _set_mesh(self, cp_size: int) -> None:
        self.mesh = context_mesh(self.accelerator, cp_size)
        if self.mesh is not None:
            check_model(self.model)

    def _about(self, rows: int) -> dict[str, Any]:
        """Return what the model card says about the origin of the model."""
        return about_run(
            self.path,
            self.data,
            self.out,
            rows=rows,
            row_length=self.config.row_length,
            held_out=len(self.held_out),
        )

    def _find_baselines(self) -> None:
        """Set the windows that the swap is compared with, and no results on longer rows yet."""
        self.window = self.config.control or widest_window(self.model)
        self.equal = self.find_equal_window()
        self.long_lines: dict[int, dict[str, Any]] = {}

    def _log_rows(self, train: Any, held_out: Any) -> None:
        self.log(f"{len(train)} training rows, {len(held_out)} held-out rows")
        if shortened := getattr(train, "shortened", 0):
            self.log(f"{shortened} examples are longer than a row and keep their beginning only")

    def _check_kernels(self, row: Mapping[str, Tensor]) -> None:
        """Check the GPU kernels that the model needs and that have no verdict yet."""
        inputs = {name: x[None] for name, x in row.items() if name != "labels"}
        generates = self.command == "recover" and not self.is_encoder  # in the evaluation
        with self._autocast(), self.shards.running(self.model):
            check_model_kernels(self.model, inputs, self.log, generate=generates)

    def _fingerprint(self, planned: str | None) -> str:
        """Return the fingerprint of the model's weights, which is that of the plan, if any."""
        model = self.load_whole() if self.is_narrow else self.model
        fingerprint = weights_fingerprint(model, self.shards.fetch)
        if planned is not None and planned != fingerprint:
            raise SpecError(
                "The plan was made for a model with other weights than those in "
                f"{str(self.path)!r}; make a plan for this model with `attnzoo plan`"
            )
        return fingerprint

    def _identity(self) -> dict[str, Any]:
        """Return what defines the run: a folder is resumed by an equal run only."""
        config = dict(self.provenance["config"])
        config["loop"] = {k: v for k, v in config["loop"].items() if k not in NO_IDENTITY}
        return {**self.provenance, "config": config, "command": self.command}

    def _begin(self, resume: bool) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the results of a finished run, or the progress of the last checkpoint."""
        path = self.out / RESULTS[self.command]
        if not resume or not path.is_file():
            return None, self.checkpoints.begin(resume=resume)
        self.checkpoints.check_identity()
        try:
            return json.loads(path.read_text("utf-8")), None
        except ValueError as error:
            raise CheckpointError(
                f"{str(path)!r} is damaged ({error}); remove it to train the run again"
            ) from None

    def _check_folders(self, progress: dict[str, Any] | None) -> None:
        """Check the folder of the checkpoints on all processes; a run that is refused leaves none.

        Raises:
            ConfigError: As :func:`check_folders` and :func:`check_lr_find`.
        """
        checkpoint = None if progress is None else Path(progress["path"])
        try:
            check_lr_find(
                self.accelerator, self.config.loop.lr_find_steps, self.config.loop.cp_size
            )
            check_folders(self.accelerator, self.out / FOLDER, checkpoint)
        except ConfigError:
            if progress is None and self.accelerator.is_main_process:
                self.checkpoints.forget_run()
            raise

    def close(self) -> None:
        """Unlock the run's folder, and close connections."""
        self.shards.close()
        if self.accelerator.is_main_process:
            self.checkpoints.release()

    def rows_of_length(self, length: int | None) -> Any:
        """Return the same training text in rows of another length; ``None`` for the run's own."""
        if length in (None, self.config.row_length):
            return None
        config = replace(self.config, row_length=length)
        return load_rows(self.path, self.data, self.column, config)[0]

    def load_rows(self, data: list[Path], column: str) -> tuple[Any, Any]:
        """Return training rows and held-out rows."""
        return load_rows(self.path, data, column, self.config)

    def load(self, **options: Any) -> PreTrainedModel:
        """Return the swapped model with its saved weights; ``options`` are of ``load_model``."""
        options["disable_dropout"] = self.config.disable_dropout
        return load_causal(self.path, self.spec, **options)

    @property
    def is_narrow(self) -> bool:
        """Whether frozen weights are rounded while the run trains."""
        return self.config.dtype != "float32"

    def load_model(self, *, empty: bool = False) -> PreTrainedModel:
        """Return the model that is trained.

        Args:
            empty: Whether to build it on the meta device, without weights.

        Raises:
            AttnzooError: As :func:`require_frozen_weights` and ``load_model``.
        """
        dtype, in_4 = self.config.dtype, self.config.load_in_4bit
        require_frozen_weights(dtype, in_4, self.accelerator)
        if empty:
            return self.load(empty=True)
        quantized = {"load_in_4bit": True, "device": self.accelerator.device} if in_4 else {}
        return self.shards.load(lambda: self.load(dtype=getattr(torch, dtype), **quantized))

    def load_whole(self) -> PreTrainedModel:
        """Return the model in the data type that it is saved in."""
        return self.load(dtype=self.dtype)

    def load_softmax_model(self, *, empty: bool = False) -> PreTrainedModel:
        """Return the model with softmax attention; flash under context parallelism."""
        model = self.load_model(empty=empty)
        if self.mesh is None:
            restore(model)
        else:
            swap(model, "flash")
        return model

    def set_eval_data(self, held_out: Any) -> None:
        """Set the held-out rows that models are evaluated on."""
        batch = rows_to_eval_batch(
            held_out,
            self.config.judged_rows,
            # fine-tuning is meant to change what the model generates
            StringTokenizer(self.path) if self.command == "recover" else None,
        )
        if self.config.train_on == "completions":
            self.log("the loss is that of completions; recall is not measured")
        elif batch.repeated is None:
            self.log(f"recall is not measured: no row has {MIN_REPEAT_LENGTH} tokens of a document")
        with self.shards.running(self.model):
            batch = with_original_continuations(self.model, batch, self.teacher)
        self.eval_batch: EvalBatch = batch.to(torch.device("cpu"))
        if self.config.train_on == "all":
            self.long_batches = make_long_batches(
                self.path,
                lambda length: load_rows(
                    self.path, self.data, self.column, replace(self.config, row_length=length)
                )[1],
                row_length=self.config.row_length,
                target_length=self.config.target_length,
                count=self.config.judged_rows,
                log=self.log,
            )

    def find_equal_window(self) -> EqualWindow | None:
        """Return the window that needs as much memory as the swap; ``None`` if it is unknown."""
        length = self.config.target_length or self.config.row_length
        spec = AttentionSpec.from_dict(getattr(self.model.config, NAME))
        return find_equal_window(self.path, spec, length, self.log)

    def quality(self, model: PreTrainedModel, *, is_original: bool = False) -> Any:
        """Evaluate a model on held-out rows; ``is_original`` if untrained and with softmax."""
        return evaluate_rows(model, self.eval_batch, is_original=is_original)

    def evaluate_result(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the results of the baselines, the trained model, and each branch of a hybrid.

        The trained weights are rounded to the data type that they are saved in before.

        Raises:
            DivergenceError: The trained model's outputs are not finite; nothing is saved.
        """
        round_weights(model, self.dtype)
        baselines = {k: x for k, x in self.baselines.results.items() if AT not in k}
        try:
            self.log("evaluation: result")
            lines = {**baselines, "result": self.quality(model)}
            for length, batch in self.long_batches.items():
                self.long_lines[length] = {
                    name.partition(AT)[0]: found
                    for name, found in self.baselines.results.items()
                    if name.endswith(f"{AT}{length}")
                } | {"result": evaluate_rows(model, batch)}
        except NonFiniteError as error:
            raise DivergenceError(
                f"Training diverged: {error} after the last step. The model is not saved. "
                f"{DIVERGENCE_ADVICE}"
            ) from error
        return lines | branch_qualities(model, self.quality, self.log)

    def evaluate_baselines(self) -> None:
        """Evaluate the untrained model with softmax, with its swap, and with the window alone."""
        model = self.model
        spec = getattr(model.config, NAME)
        if BASELINES_DONE in self.baselines.results:
            return
        with original_attention(model):
            self.evaluate_baseline("softmax", is_original=True)
        self.evaluate_baseline("raw swap")
        saved = {n: x.clone() for n, x in model.state_dict().items() if ".attnzoo." in n}
        restore(model)  # swapping would warn that trained extras are lost
        if self.equal is not None and self.equal.saves_memory:
            swap(model, self.equal.spec)
            self.evaluate_baseline("equal window", self.equal)
            restore(model)
        swap(model, "flash", window=self.window)
        self.evaluate_baseline(BASELINES_DONE)
        swap(model, spec)
        model.load_state_dict(saved, strict=False)
        self.shards.to_device(model)

    def evaluate_baseline(
        self, name: str, equal: EqualWindow | None = None, *, model: Any = None, **options: bool
    ) -> None:
        """Evaluate the model, or another, as a baseline, on longer rows too; by all processes."""
        model, evaluate = model or self.model, self.baselines.evaluate
        for length, batch in self.long_batches.items():
            if name != "raw swap" and not is_hidden(equal, length):
                evaluate(f"{name}{AT}{length}", partial(evaluate_rows, model, batch))
        if not is_hidden(equal, self.config.row_length):
            evaluate(name, lambda: self.quality(model, **options))

    def conclude(self, lines: Mapping[str, Any]) -> dict[str, Any]:
        """Return the verdict, the evaluations, and who wins at equal memory, as plain data."""
        equal, length = self.equal, self.config.row_length
        sentence = equal_sentence(lines, equal, length) if not self.is_encoder else ""
        return {
            "verdict": " ".join(filter(None, [self.verdict(lines), sentence])),
            "window": self.window,
            "equal_window": None if equal is None else equal.to_dict(),
            "lines": self.as_dicts(lines),
            "longer": long_results(self.long_lines, equal),
        }

    def tune_softmax(
        self,
        steps: int,
        make_loss: Callable[[Any], Loss],
        before_step: Callable[[int], None] = lambda step: None,
        **options: Any,
    ) -> None:
        """Train the model with softmax as the baseline ``softmax tuned``.

        It takes the same steps as the swapped model, so that the gain from more text does not count
        as a gain of the swap. This stage precedes those of the swapped model.

        Args:
            steps: Number of steps of the swapped model.
            make_loss: Returns the loss, given the model with adapters.
            before_step: Called before each step.
            options: Further arguments of :class:`Stage`.
        """
        load = self.load_softmax_model
        tuned = self.train(load(), "softmax", steps, make_loss, load, before_step, **options)
        with self.shards.running(tuned):
            self.baselines.evaluate("softmax tuned", lambda: self.quality(tuned))

    def keep_best(self, model: nn.Module, stage: Stage) -> BestState | None:
        """Return what keeps the best state of a stage; ``None`` if the last one is kept.

        The best state is neither kept under DeepSpeed, whose optimizer has the weights, nor under
        context parallelism, where a process has a part of each row.
        """
        if self.config.evaluate_every == 0:
            return None
        if self.mesh is not None or self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            self.log(f"{stage.name}: the last state is kept, not the best (DeepSpeed or cp_size)")
            return None
        return self.judge(model, stage)

    def judge(self, model: nn.Module, stage: Stage) -> BestState:
        """Return what evaluates the states of a stage on held-out rows, and keeps the best."""
        rows = self.held_out
        count = min(best_state.ROWS, len(rows))
        chosen = [rows[i * len(rows) // count] for i in range(count)]
        device = self.accelerator.device
        generation = None if self.is_encoder else self.eval_batch.generation
        sharded = self.accelerator.distributed_type == DistributedType.FSDP
        return BestState(
            stage,
            model,
            rows=[{k: x[None].to(device) for k, x in row.items()} for row in chosen],
            generation=None
            if generation is None or stage.name != "distil"  # transfer has no output of its own
            else generation.to(device),
            every=self.config.evaluate_every,
            autocast=self._autocast,
            log=self.log if self.accelerator.is_main_process else lambda text: None,
            rank=self.accelerator.process_index if sharded else 0,
            writes=sharded or self.accelerator.is_main_process,
        )

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        with self.accelerator.autocast(), self.loop.autocast():
            yield

    def train(
        self,
        model: PreTrainedModel,
        name: str,
        steps: int,
        make_loss: Callable[[Any], Loss],
        load_model: Callable[..., PreTrainedModel],
        before_step: Callable[[int], None] = lambda step: None,
        *,
        rate_factor: float = 1.0,
        **options: Any,
    ) -> PreTrainedModel:
        """Train a model for one stage and return it with adapters merged.

        Args:
            model: The model.
            name: Name of the stage.
            steps: Number of steps.
            make_loss: Returns the loss, given the model with adapters.
            load_model: Returns a model of the same architecture, which takes sharded weights;
                ``empty`` says whether it has no data.
            before_step: Called before each step.
            rate_factor: Factor of the learning rates.
            options: Further arguments of :class:`Stage`.
        """
        prepared, groups = self.prepare(model)
        groups = [{**group, "lr": group["lr"] * rate_factor} for group in groups]
        loss = make_loss(prepared)
        stage = Stage(
            name=name, steps=steps, groups=groups, loss=loss, before_step=before_step, **options
        )
        rebuild = partial(load_model, empty=self.shards.enabled)
        trained = self.loop.run(prepared, stage, lambda: self.prepare(rebuild())[0])
        return self.merge_adapters(trained)

    def prepare(self, model: PreTrainedModel) -> tuple[Any, list[dict[str, Any]]]:
        """Return a model, with LoRA adapters for ``train="lora"``, and its parameter groups."""
        config = self.config
        added = list(self.output_added(model).values())
        added_ids = {id(p) for p in self.added(model).values()}
        prepared: Any = model
        if config.train == "lora":
            torch.manual_seed(config.loop.seed)  # the same adapters in a resumed run
            prepared = with_adapters(
                model,
                config.lora_rank,
                self.task,
                alpha=config.lora_alpha,
                target_modules=config.lora_target_modules,
            )
        weights = [
            p
            for name, p in prepared.named_parameters()
            if id(p) not in added_ids and (config.train == "full" or "lora_" in name)
        ]
        groups = parameter_groups(model, added, weights, config.rates)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        return prepared, groups

    def merge_adapters(self, trained: Any) -> PreTrainedModel:
        """Return a trained model with its adapters merged.

        It is on the run's device, or, if frozen weights are narrow, in the memory of the CPU.
        """
        if self.config.train != "lora":
            model: PreTrainedModel = trained
        elif self.is_narrow:
            return self._merged_to_whole(trained)
        else:
            model = merge_shards(trained) if self.shards.enabled else trained.merge_and_unload()
        return self.shards.to_device(model)

    def whole(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a trained model with weights that are not rounded, to evaluate and save it.

        It takes the place of the run's model, whose memory is freed before it needs its own.
        """
        if not self.is_narrow:
            return model
        if model is self.model:  # without adapters
            model = self._merged_to_whole(model)
        self.model = model
        return self.shards.to_device(model)

    @torch.no_grad()
    def _merged_to_whole(self, trained: Any) -> PreTrainedModel:
        """Return the saved model with the adapters and the extras of a trained one.

        The weights that adapters are added to are not those that were rounded, so that rounding
        is no part of the result.
        """
        model = self.load_whole()
        if not swapped_layers(trained):
            restore(model)
        add_adapters(model, trained)
        return model

    def step_callback(self, model: nn.Module, steps: int) -> Callable[[int], None]:
        """Return the ``before_step`` of a stage with so many steps."""
        return decay_window_dropout(model, self.config.window_dropout, self.config.loop.seed, steps)
