"""Attention transfer and distillation as two trainers of transformers.

Batches, optimizers, schedules, precision, several processes, checkpoints and trackers are
``Trainer``'s. What is added: learning rates by group, checkpoints of what is trained only, a stage
that ends in its best state, a stop at the first number that is not finite, and context parallelism.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, Subset
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from attnzoo.errors import AttnzooError, ConfigError, SpecError
from attnzoo.hf.configs import read_field
from attnzoo.hf.context_parallel import check_model, context_parallel
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.names import NAME
from attnzoo.training.arguments import RecoveryArguments
from attnzoo.training.callbacks import BestState, LossProgress, StageCallback
from attnzoo.training.distil import (
    Loss,
    chunk_of,
    distil_loss,
    hidden_loss,
    hidden_states,
    model_inputs,
    other_teacher,
    predictions,
    softmax_teacher,
)
from attnzoo.training.transfer import Transfer, extras, output_extras, swapped_layers

QUANTIZED = "is_quantized"  # of a model, in transformers
MAX_OVERFLOWS = 40  # in a row; each halves the scale of float16's gradients, which starts at 2^16
WEIGHTS = "model.safetensors"  # of a checkpoint
STATE = "trainer_state.json"  # the file that Trainer writes last into a checkpoint


class DivergenceError(AttnzooError):
    """A loss, a gradient or an output is NaN or infinite."""


class StageRows(Subset[Any]):
    """Training rows in the order of the steps of a stage.

    Stages go on in the rows where the stage before has stopped, epoch after epoch, each in an order
    of its own. Rows that do not fill a step are left out of an epoch, so that the rows of a step
    do not depend on the number of micro-batches and processes.

    Args:
        rows: All rows.
        first: Steps of the stages before.
        steps: Steps of the stage.
        batch: Rows of a step, over all micro-batches and processes.
        seed: Seed of the order.
    """

    def __init__(self, rows: Any, *, first: int, steps: int, batch: int, seed: int) -> None:
        whole = len(rows) // batch * batch or len(rows)
        order: list[int] = []
        for epoch in range(first * batch // whole, -(-(first + steps) * batch // whole)):
            generator = torch.Generator().manual_seed(seed + epoch)
            order += torch.randperm(len(rows), generator=generator)[:whole].tolist()
        start = first * batch % whole
        super().__init__(rows, order[start : start + steps * batch])


class StageTrainer(Trainer):
    """Base of the trainers of recovery: one stage, whose loss is :meth:`stage_loss`.

    All parameters that require a gradient are trained: those of backends with
    ``extras_learning_rate``, the weights of attention layers with ``attention_learning_rate``, all
    others with ``learning_rate``.

    Args:
        model: The model.
        args: Arguments of the stage, which takes ``max_steps`` at ``learning_rate``.
        first: Steps of the stages before, whose rows of ``train_dataset`` are left out.
        best: Keeps the best state; the last one is kept when ``None``.
        callbacks: Further callbacks of a stage.
        kwargs: Further arguments of ``Trainer``.

    Raises:
        ConfigError: ``args`` are others or have no steps, or ``fsdp`` is given, but Accelerate
            ignores it.
    """

    model: Any
    args: Any
    train_dataset: Any
    default_rate = "distil_rate"  # property of the arguments without a learning_rate
    context: Any = nullcontext()  # in which a stage trains
    overflows = 0  # steps in a row that loss scaling has skipped

    def __init__(
        self,
        model: Any,
        args: RecoveryArguments,
        *,
        first: int = 0,
        best: BestState | None = None,
        callbacks: Iterable[StageCallback] = (),
        **kwargs: Any,
    ) -> None:
        args = copy.copy(args)
        args._n_gpu = min(1, args.n_gpu)  # DataParallel would copy the model without its hooks
        args.eval_strategy = "no"  # BestState evaluates
        args.label_names = ["labels"]
        for name in ("eval_steps", "save_steps", "logging_steps"):  # that may be fractions
            every = getattr(args, name) or args.logging_steps
            setattr(args, name, max(1, math.ceil(every * args.max_steps if every < 1 else every)))
        if args.learning_rate is None:
            args.learning_rate = getattr(args, self.default_rate)
        if (rows := kwargs.get("train_dataset")) is not None:
            groups = args.world_size // args.cp_size
            batch = args.train_batch_size * args.gradient_accumulation_steps * groups
            order = {"first": first, "steps": args.max_steps, "batch": batch, "seed": args.seed}
            kwargs["train_dataset"] = StageRows(rows, **order)
            args.train_sampling_strategy = "sequential"
        if args.deepspeed_plugin is not None:  # Accelerate takes one for its first instance only
            AcceleratorState._reset_state()
        use_cache = read_field(model.config, "use_cache")
        quantized = getattr(model, QUANTIZED, False)
        if quantized:  # Trainer wants adapters on one; what backends add is not quantized
            setattr(model, QUANTIZED, False)
        try:
            super().__init__(model, args, **kwargs)
        finally:
            if quantized:
                setattr(model, QUANTIZED, True)
        if use_cache is not None:
            model.config.use_cache = use_cache  # Trainer changes what is saved
        for kind in (PrinterCallback, ProgressCallback):
            self.remove_callback(kind)
        if not args.disable_tqdm:
            self.add_callback(LossProgress())
        if args.fsdp and self.accelerator.distributed_type != DistributedType.FSDP:
            raise ConfigError(
                "fsdp is given, but Accelerate does not shard these processes "
                f"({self.accelerator.distributed_type}, {self.accelerator.num_processes} of them "
                f"on {self.accelerator.device.type}); FSDP needs several processes with GPUs"
            )
        self.mesh = context_mesh(self.accelerator, args.cp_size)
        if self.mesh is not None:
            check_model(model)
        self.best = best
        for callback in (*callbacks, *([] if best is None else [best])):
            callback.trainer = self
            self.add_callback(callback)

    def stage_loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a model on a batch, a scalar."""
        raise NotImplementedError

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ``ConfigError``: stages are evaluated on single rows."""
        raise ConfigError("A stage has no evaluate(); call attnzoo.training.evaluate_rows")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return :meth:`stage_loss`; over all labels of a step if ``num_items_in_batch`` is."""
        processes = self.accelerator.num_processes
        if num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": torch.as_tensor(num_items_in_batch).float()}
        with self.accelerator.autocast():  # of a teacher that is another model, too
            loss = self.stage_loss(model, inputs)
        if num_items_in_batch is not None:
            loss = loss * processes  # whose gradients are averaged
        if processes > 1 and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            # DistributedDataParallel waits for the gradient of every parameter, but a window as
            # wide as the rows gives the linear branch none
            trained = [p for p in self.model.parameters() if p.requires_grad]
            loss = loss + sum((0 * p.float().sum() for p in trained), 0.0)
        return (loss, {}) if return_outputs else loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the optimizer of ``args.optim``, with a group for each rate and decay."""
        if self.optimizer is None:
            model = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(model))
            attention = {id(p) for x in attention_layers(model) for p in x.module.parameters()}
            groups: dict[tuple[float, float], dict[str, Any]] = {}
            for name, p in model.named_parameters():
                if p.requires_grad:
                    rate = self._rate(name, in_attention=id(p) in attention)
                    decay = self.args.weight_decay if name in decayed else 0.0
                    group = groups.setdefault(
                        (rate, decay), {"params": [], "lr": rate, "weight_decay": decay}
                    )
                    group["params"].append(p)
            cls, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = cls(list(groups.values()), **options)
        return self.optimizer

    def _rate(self, name: str, *, in_attention: bool) -> float:
        args: Any = self.args
        if self.is_added(name):
            return float(args.extras_learning_rate)
        if in_attention and args.attention_learning_rate is not None:
            return float(args.attention_learning_rate)
        return float(args.learning_rate)

    def is_added(self, name: str) -> bool:
        """Return whether a parameter is not the original model's, by its name."""
        return f".{NAME}." in name

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave the model in its best state.

        Args:
            resume_from_checkpoint: ``True`` for the last whole checkpoint in ``args.output_dir``,
                if there is one.
            args: Further arguments of ``Trainer.train``.
            kwargs: The same.
        """
        checkpoint = resume_from_checkpoint or None
        if resume_from_checkpoint is True:
            folder = Path(str(self.args.output_dir))
            checkpoint = last_checkpoint(folder, self.accelerator.num_processes)
        if checkpoint is not None and (Path(checkpoint) / WEIGHTS).is_file():  # shards have none
            with safe_open(Path(checkpoint) / WEIGHTS, "pt") as file:
                if {*file.keys()} != {*self._trained()}:
                    raise ConfigError(
                        f"{str(checkpoint)!r} has other parameters than those that this stage "
                        "trains; give another output_dir"
                    )
        if checkpoint is not None and self.best is not None:
            self.best.load(Path(checkpoint))
        with self.context:
            found = super().train(checkpoint and str(checkpoint), *args, **kwargs)
        if self.best is not None:
            self.best.restore()
        # removes Accelerate's autocast from forward: models are evaluated in float32
        self.accelerator.unwrap_model(self.model_wrapped, keep_fp32_wrapper=False)
        return found

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Take a step on a batch, of which this process has a part under context parallelism.

        Raises:
            DivergenceError: The loss is not finite.
        """
        split: Any = nullcontext(inputs)
        if self.mesh is not None:
            split = context_parallel(self.model, self._prepare_inputs(inputs), self.mesh["cp"])
        with split as own:
            loss: Tensor = super().training_step(model, own, num_items_in_batch)
        self._require_finite(loss, "loss")
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        if norm is not None and self.accelerator.scaler is None:
            self._require_finite(norm, "norm of the gradient")
        elif norm is not None:  # the step is skipped if it is infinite
            self.overflows = 0 if math.isfinite(float(norm)) else self.overflows + 1
            if self.overflows == MAX_OVERFLOWS:
                self._require_finite(norm, f"norm of the last {MAX_OVERFLOWS} gradients")
        return norm

    def _require_finite(self, number: Any, what: str) -> None:
        if not math.isfinite(float(number)):
            raise DivergenceError(
                f"Training diverged: the {what} is {float(number)} in step "
                f"{self.state.global_step + 1} of {self.args.output_dir}. The last checkpoint is "
                "kept, and no model is saved. Start again with another --output-dir and a smaller "
                "rate (--transfer-learning-rate for transfer; --learning-rate and "
                "--extras-learning-rate for other stages)"
            )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        count = super()._get_num_items_in_batch(batch_samples, device)
        if count is None or self.mesh is None:
            return count
        return count / self.args.cp_size  # the processes of a group have the same rows

    def get_train_dataloader(self) -> Any:
        """Return the batches, the same for all processes that split rows."""
        if self.mesh is None:
            return super().get_train_dataloader()
        loader: Any = prepare_data_loader(
            DataLoader(
                self.train_dataset,
                batch_size=self.args.per_device_train_batch_size,
                sampler=self._get_train_sampler(),
                collate_fn=self.data_collator,
                drop_last=True,
            ),
            self.accelerator.device,
            put_on_device=True,
            rng_types=list(self.accelerator.rng_types),
            use_seedable_sampler=True,
            torch_device_mesh=self.mesh,
        )
        loader._is_accelerate_prepared = True
        return loader

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.best is not None:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.best.save(Path(str(self.args.output_dir)) / name)
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write what is trained, while training; frozen weights are in the model's folder."""
        if not self.is_in_train:
            super()._save(output_dir, state_dict)
        # shards are written with the optimizer; PEFT would save adapters without what is added
        elif self.args.should_save and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            folder = Path(str(output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            save_file(self._trained(), folder / WEIGHTS, metadata={"format": "pt"})

    def _trained(self) -> dict[str, Tensor]:
        """Return what is trained, by name."""
        trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
        own = self.model.state_dict().items()
        return {n: x.detach().contiguous() for n, x in own if n in trained}

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Say nothing of frozen weights, which a checkpoint does not have."""


class TransferTrainer(StageTrainer):
    """Train what backends add: each layer to softmax's output on softmax's inputs.

    Args:
        model: A swapped model; all its parameters but those of the layers are frozen.
        args: ``transfer_target``, and ``max_steps`` and ``learning_rate`` of the stage;
            ``transfer_rate`` without ``learning_rate``.
        layers: Names of the layers; all with parameters when ``None``.
        transfer: Another :class:`~attnzoo.training.transfer.Transfer`, such as that of a student.
        kwargs: As of :class:`StageTrainer`.
    """

    default_rate = "transfer_rate"

    def __init__(
        self,
        model: Any,
        args: RecoveryArguments,
        *,
        layers: Iterable[str] | None = None,
        transfer: Any = None,
        **kwargs: Any,
    ) -> None:
        check_stage(args)
        target: Any = args.transfer_target
        self.transfer = Transfer(model, layers, target=target) if transfer is None else transfer
        self.context = self.transfer
        trained = {id(p) for p in self.transfer.parameters()}
        for p in model.parameters():
            p.requires_grad_(id(p) in trained)
        super().__init__(model, args, **kwargs)
        self.model_accepts_loss_kwargs = False  # a ratio of sums over a micro-batch

    def _rate(self, name: str, *, in_attention: bool) -> float:
        return float(self.args.learning_rate)

    def stage_loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the mean loss of the layers."""
        state = self.state  # an evaluation compares the same keys each time
        self.transfer.step = state.global_step if model.training else state.max_steps
        return self.transfer.run(model, model_inputs(batch))


class LogitDistillationTrainer(StageTrainer):
    """Train a model, or its adapters, to the predictions of softmax.

    Args:
        model: A swapped model, with adapters for ``train="lora"``.
        args: ``train``, which says what is trained, ``cross_entropy`` and ``hidden_states``.
        teacher: Another model that teaches; the model itself with softmax when ``None``, which is
            a copy if its own weights are trained.
        is_encoder: Whether the last hidden states are compared, in place of predictions.
        log: Called with messages.
        kwargs: As of :class:`StageTrainer`.

    Raises:
        ConfigError: ``train`` does not suit the model.
        SpecError: The model is not swapped, so that it would teach itself what it does.
    """

    added = staticmethod(output_extras)  # parameters that every value of train trains

    def __init__(
        self,
        model: Any,
        args: RecoveryArguments,
        *,
        teacher: Any = None,
        is_encoder: bool = False,
        log: Callable[[str], None] = lambda text: None,
        **kwargs: Any,
    ) -> None:
        check_stage(args)
        self._free(model, args.train)
        no_loss = is_encoder or not args.cross_entropy
        if teacher is None and no_loss and not swapped_layers(model):
            raise SpecError(
                f"{type(model).__name__} is not swapped, so its teacher is the same model; call "
                'attnzoo.swap(model, "linear", ...) first'
            )
        outputs: Any = hidden_states
        if not is_encoder:
            tokens = args.max_length * args.per_device_train_batch_size
            chunk = chunk_of(model, tokens, PartialState(), log)
            outputs = partial(predictions, with_layers=args.hidden_states > 0, chunk=chunk)
        if teacher is not None:
            teach = other_teacher(teacher, outputs)
        else:
            added = {id(p) for p in extras(model).values()}
            weights = [p for p in model.parameters() if p.requires_grad and id(p) not in added]
            teach = softmax_teacher(
                model,
                weights_change=bool(weights) and not hasattr(model, "peft_config"),
                outputs=outputs,
                context_parallel=args.cp_size > 1,
            )
        self.loss: Loss = hidden_loss(teach)
        if not is_encoder:
            terms = {"cross_entropy": args.cross_entropy, "hidden_states": args.hidden_states}
            self.loss = distil_loss(teach, **terms, chunk=chunk)
        super().__init__(model, args, **kwargs)
        self.model_accepts_loss_kwargs = not is_encoder  # divides by the labels of a step

    def _free(self, model: Any, train: str) -> None:
        """Free the parameters that ``train`` names, and freeze the others."""
        own = {id(p) for p in extras(model).values()}
        freed = {id(p) for p in self.added(model).values()}
        adapters = {id(p) for name, p in model.named_parameters() if "lora_" in name}
        if bool(adapters) != (train == "lora"):
            raise ConfigError(
                f"train={train!r} does not suit a model {'with' if adapters else 'without'} "
                "adapters; give 'lora' after peft.get_peft_model, and 'full' or 'extras' otherwise"
            )
        freed |= adapters
        if train == "full":
            freed |= {id(p) for p in model.parameters()} - own
        if not freed:
            raise ConfigError("The backends have no parameters, which train='extras' trains")
        for p in model.parameters():
            p.requires_grad_(id(p) in freed)

    def stage_loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of :func:`~attnzoo.training.distil.distil_loss`."""
        return self.loss(model, batch)


def check_stage(args: Any) -> None:
    """Raise ``ConfigError`` for arguments that are not those of a stage with steps."""
    if not isinstance(args, RecoveryArguments):
        raise ConfigError(f"A stage takes RecoveryArguments, got {type(args).__name__}")
    if args.max_steps < 1:
        raise ConfigError("A stage takes at least one step, and max_steps is 0")


def steps_of(checkpoint: Path) -> int:
    """Return the steps of a checkpoint."""
    return int(json.loads((checkpoint / STATE).read_text("utf-8"))["global_step"])


def last_checkpoint(folder: Path, processes: int = 1) -> Path | None:
    """Return the last checkpoint that is whole, if any.

    ``Trainer`` writes its state last, and each process the state of its random numbers.
    """
    found = []
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            steps = steps_of(path)
        except (OSError, ValueError, KeyError):
            continue  # it was cut short
        if len(list(path.glob("rng_state*.pth"))) >= processes:
            found.append((steps, path))
    return max(found)[1] if found else None


def context_mesh(accelerator: Any, cp_size: int) -> DeviceMesh | None:
    """Return the process mesh with dimensions ``dp_replicate`` and ``cp``, Accelerate's names.

    Accelerate's own ``cp_size`` enables torch's context parallelism, which supports torch's
    attention only.

    Raises:
        ConfigError: Accelerate has a mesh of its own.
    """
    if cp_size == 1:
        return None
    config = accelerator.parallelism_config
    if config is not None and (config.cp_enabled or config.sp_enabled):
        raise ConfigError(
            "Accelerate is launched with its own cp_size or sp_size, which supports torch's "
            "attention only; remove it there and give --cp-size alone"
        )
    shape, names = (accelerator.num_processes // cp_size, cp_size), ("dp_replicate", "cp")
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
