r"""Recovery of a student of a stock class, whose teacher is another model, and its plan.

``attnzoo convert --recurrent`` writes a student: the teacher's softmax layers, and recurrent layers
with starting values. Student and teacher are two models of the same depth, size and tokens.
Transfer trains each recurrent layer on the hidden states that the teacher's attention layer gets,
to return what that layer returns; the loss of a layer is its relative error

.. math:: \ell = \frac{\sum_t |o_t - o^*_t|^2}{\sum_t |o^*_t|^2}.

All layers train in one pass, each independently of the errors of the others. Distillation follows,
as for a swap. Source of both stages: Zhang et al., 2024, arXiv:2410.10254 (LoLCATs), and Goldstein
et al., 2025, arXiv:2505.03005 (RADLADS). Other letters: M hidden size, Hkv key heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.corpus import load_tokenizer
from attnzoo.evaluation.equal_memory import EqualWindow, window_of_bytes
from attnzoo.evaluation.rows import Rows
from attnzoo.hf.configs import read_field, set_dropout
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.models.speed_up import speed_up
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.saving.files import empty_model, read_config
from attnzoo.hf.stock.gated_delta_net import (
    FAMILY,
    PART,
    recurrent_layers,
    recurrent_numbers,
    softmax_layer,
    state_bytes,
    student_weights,
)
from attnzoo.training.arguments import refuse_unused
from attnzoo.training.evaluator import CONTROL
from attnzoo.training.plan import Plan, count_exact_layers
from attnzoo.training.planner import Chosen, OnStep, Planner
from attnzoo.training.recovery import Recovery
from attnzoo.training.trainer import LogitDistillationTrainer, TransferTrainer
from attnzoo.training.transfer import relative_error

TRANSFER_RATE = 3e-3


def recurrent_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a student's recurrent layers by layer and name."""
    return {
        f"{number}.{name}": p
        for number, layer in recurrent_layers(model).items()
        for name, p in layer.named_parameters()
    }


class StudentTrainer(LogitDistillationTrainer):
    """Distillation in which ``extras_learning_rate`` is that of recurrent layers."""

    added = staticmethod(recurrent_parameters)

    def is_added(self, name: str) -> bool:
        """Return whether a parameter is that of a recurrent layer."""
        return f".{PART}." in name


class StudentRecovery(Recovery):
    """Recovery of a student of a stock class.

    Args:
        run: The arguments of :class:`~attnzoo.training.recovery.Recovery`; no spec.
        teacher: Folder of the model that the student was converted from.

    Raises:
        AttnzooError: An argument is invalid, or the two models do not match.
    """

    trainer_class = StudentTrainer

    def __init__(self, *run: Any, teacher: Path) -> None:
        self.teacher_path = teacher
        super().__init__(*run)

    def check_arguments(self) -> None:
        """Raise an error for arguments that do not suit a student; load its teacher."""
        require_student_settings(self.args)
        require_pair(self.path, self.teacher_path)
        self.teacher = load_pretrained(AutoModelForCausalLM, self.teacher_path, dtype=torch.float32)
        self.teacher.requires_grad_(False).eval()

    def load(self, **options: Any) -> PreTrainedModel:
        """Return the student, whose recurrent layers run on attnzoo's ops on CPUs."""
        config = read_config(self.path)
        if self.args.disable_dropout:
            set_dropout(config)
        model: Any = load_pretrained(AutoModelForCausalLM, self.path, config=config, **options)
        found: PreTrainedModel = speed_up(model)
        return found

    def evaluate_baselines(self) -> None:
        """Evaluate the teacher, the student before training, and windows in the teacher."""
        teacher, evaluator = self.teacher.to(self.args.device), self.evaluator
        evaluator.window = CONTROL
        length = self.args.target_length or self.args.max_length
        evaluator.equal = equal_window(self.model.config, length, self.dtype.itemsize)
        evaluator.add_original(self.model, teacher)
        evaluator.evaluate("softmax", teacher)
        evaluator.evaluate("raw swap", self.model)
        evaluator.evaluate_windows(teacher)

    def transfer(self, model: Any) -> Any:
        """Train the recurrent layers on the teacher."""
        args = self.args
        if not args.transfer_steps:
            self.log("transfer is skipped: 0 steps")
            return model
        rate = args.transfer_learning_rate or TRANSFER_RATE
        transfer = StudentTransfer(model, self.teacher)
        return self.train(
            TransferTrainer, model, "transfer", rate, self.load_model, transfer=transfer
        )


def require_student_settings(config: Any) -> None:
    """Raise for a setting that recovery from another model does not have.

    Raises:
        ConfigError: There is one.
    """
    float32 = "recurrent layers are trained, which need float32"
    unused = {
        "transfer_from": "each student has a transfer of its own",
        "transfer_target": "a recurrent layer of a stock class has no weights of keys",
        "cross_entropy": "the teacher is not tuned on the text",
        "cp_size": "a recurrent layer of a stock class cannot split a row over processes",
    }
    refuse_unused(config, unused | dict.fromkeys(("dtype", "load_in_4bit"), float32))
    if config.train == "lora":
        raise ConfigError(
            "train='lora' has no adapters for the recurrent layers of a stock class; give "
            "'full', or 'extras' to train the recurrent layers alone"
        )
    if config.fsdp or config.deepspeed:
        raise SpecError(
            "FSDP and DeepSpeed do not shard a student and its teacher; use "
            "DistributedDataParallel (torchrun without a sharding config)"
        )


def require_pair(student: Path, teacher: Path) -> None:
    """Raise if a student cannot be trained from a teacher.

    Args:
        student: Folder of the student.
        teacher: Folder of the teacher.

    Raises:
        SpecError: One of them is swapped, the student has no recurrent layers, or they differ in
            vocabulary, depth or size.
    """
    one, other = read_config(student), read_config(teacher)
    for path, config in ((student, one), (teacher, other)):
        if read_field(config, NAME) is not None:
            raise SpecError(
                f"{str(path)!r} is a swap of attnzoo, and --teacher trains students of stock "
                "classes; `attnzoo recover DIR --attention ...` recovers a swap, which is its own "
                "teacher"
            )
    numbers = recurrent_numbers(one)
    if not numbers or one.model_type != FAMILY:
        raise SpecError(
            f"{str(student)!r} holds a {one.model_type} without recurrent layers that a teacher "
            f"could train; `attnzoo convert DIR --to {FAMILY} --recurrent LAYERS` writes one"
        )
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        values = [getattr(x, name, None) for x in (one, other)]
        if values[0] != values[1]:
            raise SpecError(
                f"The student has {name}={values[0]}, and the teacher {values[1]}: give the model "
                "that the student was converted from"
            )
    known = {x.geometry.layer for x in attention_layers(empty_model(teacher))}
    if missing := [n for n in numbers if n not in known]:
        raise SpecError(
            f"The teacher, a {other.model_type}, has no softmax attention in layer {missing[0]}, "
            "which is recurrent in the student; give the model that it was converted from"
        )
    tokenizers = [load_tokenizer(x).get_vocab() for x in (student, teacher)]
    if tokenizers[0] != tokenizers[1]:
        raise SpecError(
            "The tokenizers of student and teacher have other vocabularies; give the model that "
            "the student was converted from"
        )


def equal_window(config: Any, length: int, itemsize: int) -> EqualWindow:
    """Return the window that needs as much memory as a recurrent layer of a student.

    A recurrent layer keeps a float32 state and the latest tokens of its convolution.

    Args:
        config: The student's config.
        length: Tokens of one sequence.
        itemsize: Bytes of a number of the weights' data type.
    """
    state = state_bytes(config, itemsize)
    head_dim = read_field(config, "head_dim") or config.hidden_size // config.num_attention_heads
    token = itemsize * 2 * config.num_key_value_heads * head_dim
    numbers = recurrent_numbers(config)
    full = token * length * (config.num_hidden_layers - len(numbers))
    return EqualWindow(
        length=length,
        windows=dict.fromkeys(numbers, window_of_bytes(state, token * length, length)),
        swap_bytes=full + state * len(numbers),
        exact_bytes=token * length * config.num_hidden_layers,
    )


class StudentTransfer(ExitStack):
    """Context in which recurrent layers of a student run on the teacher's hidden states.

    They return the teacher's outputs, so that the layers after them get these too, and record
    their own errors.

    Args:
        model: The student.
        teacher: The teacher.
    """

    def __init__(self, model: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.model, self.teacher = model, teacher
        self.step = 0
        self.attended: dict[int, tuple[Tensor, Tensor]] = {}  # input and output, [B, T, M] each
        self.errors: dict[int, Tensor] = {}

    def __enter__(self) -> Self:
        """Register the hooks, which the exit removes."""
        for number, layer in recurrent_layers(self.model).items():
            exact = softmax_layer(self.teacher, number)
            for handle in (
                exact.register_forward_hook(partial(self._keep, number), with_kwargs=True),
                layer.register_forward_pre_hook(partial(self._input, number), with_kwargs=True),
                layer.register_forward_hook(partial(self._output, number)),
            ):
                self.callback(handle.remove)
        return self

    def _keep(self, number: int, layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.attended[number] = (args[0] if args else kwargs["hidden_states"]), output[0]

    def _input(self, number: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        others = {name: x for name, x in kwargs.items() if name != "hidden_states"}
        return (self.attended[number][0], *args[1:]), others

    def _output(self, number: int, layer: Any, args: Any, output: Tensor) -> Tensor:
        exact = self.attended[number][1]
        # not in the backward pass, where gradient checkpointing repeats the forward pass
        if torch._C._current_graph_task_id() == -1:
            self.errors[number] = relative_error(output, exact, None)
        return exact.to(output.dtype)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the recurrent layers."""
        return list(recurrent_parameters(self.model).values())

    def run(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the mean relative error of the recurrent layers in a forward pass."""
        inputs = {**inputs, "logits_to_keep": 1}
        device = inputs["input_ids"].device
        if next(self.teacher.parameters()).device != device:
            self.teacher.to(device)
        self.errors = {}
        with torch.no_grad():
            self.teacher(**inputs)
        model(**inputs)
        return torch.stack(list(self.errors.values())).mean()


# -- plan ------------------------------------------------------------------------------------------
# A student whose layers were transferred, and not yet distilled, has layers that each imitate one
# attention layer of the teacher. Any of them can therefore stand in the teacher. A plan measures
# how the teacher's predictions change, and restores softmax greedily where that reduces the change
# most. Source: arXiv:2512.20569.

RECURRENT = "recurrent"  # the candidate


class StudentPlanner(Planner):
    """Planner of a teacher whose layers a transferred student replaces.

    Args:
        teacher: The teacher; its outputs change only inside of a measurement.
        student: A student of it after transfer.
        rows: As of :class:`Planner`.
        on_step: As of :class:`Planner`.
    """

    def __init__(
        self, teacher: Any, student: nn.Module, rows: Rows, on_step: OnStep = lambda text: None
    ) -> None:
        super().__init__(teacher, rows, on_step)
        self.layers = recurrent_layers(student)

    @contextmanager
    def changed(self, chosen: Chosen) -> Iterator[None]:
        """Context in which attention layers of the teacher return what the student's return."""
        with ExitStack() as stack:
            for number in chosen:

                def replace(
                    own: Any, args: Any, kwargs: Any, output: Any, number: int = number
                ) -> Any:
                    hidden = args[0] if args else kwargs["hidden_states"]
                    return (self.layers[number](hidden), *output[1:])

                layer = softmax_layer(self.model, number)
                stack.callback(layer.register_forward_hook(replace, with_kwargs=True).remove)
            yield


def plan_student(
    path: Path,
    run: Path,
    rows: Rows,
    *,
    keep_softmax: float = 0.25,
    on_step: OnStep = lambda text: None,
) -> Plan:
    """Measure the layers of a transferred student and choose those that stay recurrent.

    Args:
        path: Folder of the teacher.
        run: Folder of the student: a run of ``recover STUDENT --teacher DIR`` with transfer only.
            Its full layers keep softmax.
        rows: Rows to measure on; each document is measured as if it were alone.
        keep_softmax: Fraction or number of layers that keep softmax, of all layers.
        on_step: Called with a description of each measurement.

    Raises:
        SpecError: The models do not match, or the student was distilled.
        ConfigError: The student has fewer recurrent layers, or none would be recurrent.
    """
    require_pair(run, path)
    teacher: Any = load_pretrained(AutoModelForCausalLM, path, dtype=torch.float32)
    student: Any = load_pretrained(AutoModelForCausalLM, run, dtype=torch.float32).eval()
    _require_transfer_only(teacher, student, run)
    planner = StudentPlanner(teacher, speed_up(student), rows, on_step)
    known, depth = sorted(planner.layers), int(teacher.config.num_hidden_layers)
    count = depth - count_exact_layers(keep_softmax, depth)
    if not 1 <= count <= len(known):
        raise ConfigError(
            f"keep_softmax={keep_softmax} leaves {count} of {depth} layers recurrent, but the "
            f"student has transferred {len(known)}; keep at least {depth - len(known)} and at "
            f"most {depth - 1} layers"
        )
    layers = planner.measure(known, [RECURRENT])
    everywhere = dict.fromkeys(known, RECURRENT)
    chosen = planner.restore_softmax(everywhere, lambda rest: len(rest) >= count)
    numbers = ",".join(map(str, chosen))
    return Plan.made(planner, chosen, recurrent=numbers, layers=layers, transfer_from=str(run))


def _require_transfer_only(teacher: Any, student: Any, run: Path) -> None:
    """Raise ``SpecError`` if other weights than those of the recurrent layers were trained."""
    exact = student_weights(teacher.state_dict(), teacher.config, {})
    for name, weight in student.state_dict().items():
        if name in exact and not torch.equal(weight, exact[name]):
            raise SpecError(
                f"{str(run)!r} has other weights than the teacher in {name}, so its recurrent "
                "layers no longer imitate the teacher's; give a run with transfer only: attnzoo "
                "recover STUDENT --teacher DIR --max-steps 0"
            )
