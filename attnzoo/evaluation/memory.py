"""Memory of training and decoding: computed without running the model, or measured.

One function makes both, on fake tensors or on real ones. What is computed is for the CPU, whose
implementations run; kernels of a GPU have buffers of their own.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.evaluation.allocations import (
    Allocation,
    AllocationTracker,
    Meter,
    counted,
    fake_model,
    real_meter,
)
from attnzoo.evaluation.decoding import cache_bytes
from attnzoo.evaluation.memory_4bit import in_4_bits
from attnzoo.evaluation.memory_case import LOSSES, NF4, MemoryCase, TrainingLoss
from attnzoo.evaluation.memory_optimizer import (
    measured_optimizer,
    planned_optimizer,
    tensor_bytes,
    trained_parameters,
)
from attnzoo.evaluation.memory_sharding import AccumulatedGradients, GatheredUnits, gather_parts
from attnzoo.evaluation.memory_zero import ZeroBuffers, zero_buffers, zero_partitions
from attnzoo.evaluation.models import max_positions
from attnzoo.hf.adapters.lora import with_adapters
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.names import NAME
from attnzoo.hf.saving.files import model_class, read_config
from attnzoo.hf.seam import cache_argument
from attnzoo.runtime.activation_offload import offload_activations


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of training and of decoding.

    Attributes:
        parameters: Weights and buffers.
        gradients: Of the trained weights.
        optimizer: State of the optimizer.
        activations: Kept by the forward pass for the backward pass, the loss included.
        activations_checkpointed: The same under gradient checkpointing; ``None`` without support.
        backward: The most during forward + backward beyond weights and optimizer; it includes
            gradients.
        backward_checkpointed: The same under gradient checkpointing.
        update: Used by a step of the optimizer for intermediate results.
        prompt: Used by a forward pass without gradients, beyond the weights; of a decoder it
            includes the cache.
        cache: Keys and values, or states, after the prompt; ``None`` if it does not decode.
        step: Used by decoding one token, beyond weights and cache.
        offloaded: Copies of activations in the memory of the CPU, after the forward pass.
        offloaded_checkpointed: The same under gradient checkpointing.
        teacher: Weights of a model that teaches beside the one that is trained.
        whole: Whole weights, which each process holds with the teacher before and after a stage;
            0 if ``parameters`` are whole, or parts of weights at any time.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    activations_checkpointed: int | None
    backward: int
    backward_checkpointed: int | None
    update: int
    prompt: int
    cache: int | None
    step: int | None
    offloaded: int = 0
    offloaded_checkpointed: int | None = None
    teacher: int = 0
    whole: int = 0

    @property
    def training(self) -> int:
        """The most at any time of a training step."""
        return self._training(self.backward)

    @property
    def training_checkpointed(self) -> int | None:
        """The most at any time of a training step under gradient checkpointing."""
        peak = self.backward_checkpointed
        return None if peak is None else self._training(peak)

    def _training(self, backward: int) -> int:
        step = self.parameters + self.optimizer + max(backward, self.gradients + self.update)
        return self.teacher + max(step, self.whole)

    @property
    def inference(self) -> int:
        """The most during a forward pass over the whole input without gradients."""
        return max(self.parameters, self.whole) + self.prompt

    @property
    def decoding(self) -> int | None:
        """The most while one token is decoded after the input."""
        if self.cache is None or self.step is None:
            return None
        return max(self.parameters, self.whole) + self.cache + self.step

    def to_dict(self) -> dict[str, int | None]:
        """Return all fields and totals."""
        totals = {name: getattr(self, name) for name in TOTALS}
        return asdict(self) | totals

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MemoryUse:
        """Return the use that ``to_dict`` describes."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})


TOTALS = ("training", "training_checkpointed", "inference", "decoding")


class BackwardPeaks(NamedTuple):
    """Peaks of forward + backward, one for each part of the backward pass.

    A part ends when a parameter has its gradient. While activations are freed, gradients are
    allocated; so the peak of one part is a polynomial in the length, but the largest is not.
    """

    backward: tuple[int, ...]
    backward_checkpointed: tuple[int, ...] | None


def compute(case: MemoryCase) -> tuple[MemoryUse, BackwardPeaks]:
    """Return the memory of a case, computed on fake tensors, and its parts.

    Raises:
        AttnzooError: The model does not fit the case, or its operations depend on values.
    """
    model, mode = fake_model(lambda: build_model(case))
    with counted(mode) as tracker:
        return _memory_use(model, case, tracker, planned_optimizer)


def measure(case: MemoryCase) -> MemoryUse:
    """Return the memory of a case, measured in this process on the CPU.

    The weights are random, and training changes them.

    Raises:
        AttnzooError: The model does not fit the case.
    """
    in_few_bits = case.load_in_4bit or case.optimizer == "adamw_8bit" or case.teacher_dtype == NF4
    if case.gpus > 1 or in_few_bits:
        raise ConfigError(
            "One process on the CPU is measured, without gpus, load_in_4bit, "
            "optimizer='adamw_8bit' and teacher_dtype='nf4'; leave them out, or compute the memory "
            "only"
        )
    if case.activation_offloading:
        raise ConfigError(
            "activation_offloading moves activations to the memory of the CPU, where those of a "
            "measured run are already; leave it out, or compute the memory only"
        )
    torch.manual_seed(0)
    model = build_model(case)
    return _memory_use(model, case, real_meter, measured_optimizer)[0]


def measured(case: MemoryCase) -> dict[str, Any]:
    """Return what :func:`measure` returns as plain data, for another process."""
    return {"use": measure(case).to_dict()}


def build_model(case: MemoryCase) -> PreTrainedModel:
    """Build the model of a case with random weights.

    Raises:
        UnsupportedError: It has too few positions, or does not run on token ids alone.
    """
    path = Path(case.path)
    config = read_config(path)
    cls = model_class(config, path)
    if not has_field(config, "vocab_size") or read_field(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{cls.__name__} does not run on token ids alone (it is an encoder-decoder or takes "
            "other inputs), so its memory is unknown; give a decoder or an encoder of text"
        )
    positions = max_positions(path)
    if positions is not None and positions < case.length:
        raise UnsupportedError(
            f"the model has {positions} positions, but the case needs {case.length}; "
            "attnzoo.extend_positions adds positions"
        )
    options: dict[str, Any] = {"dtype": case.compute_dtype}
    if case.spec is not None:
        config.attnzoo = case.spec
    if read_field(config, NAME) is not None:
        options["attn_implementation"] = NAME
    model: PreTrainedModel = cls._from_config(config, **options)
    if case.train == "lora":
        task = "CAUSAL_LM" if model.can_generate() else "FEATURE_EXTRACTION"
        model = with_adapters(model, case.lora_rank, task).base_model.model
    elif case.train == "extras":
        model.requires_grad_(False)
    if case.train != "full":
        for name, parameter in model.named_parameters():
            if f".{NAME}." in name:
                parameter.requires_grad_(True)
    return model


def _memory_use(
    model: PreTrainedModel,
    case: MemoryCase,
    meter: Meter,
    optimizer: Callable[[nn.Module, MemoryCase, Meter], tuple[int, int]],
) -> tuple[MemoryUse, BackwardPeaks]:
    """Run training and decoding under a meter.

    Args:
        model: The model.
        case: The case.
        meter: Measures calls.
        optimizer: Returns the bytes of the optimizer's state and of its intermediate results.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(vocabulary, (case.rows, case.length))
    parameters = tensor_bytes([*model.parameters(), *model.buffers()])
    limit = max_positions(Path(case.path))
    handles = gather_parts(model, case.widening) if case.keeps_parts else []
    prompt, cache, step = _inference(model.eval(), tokens, meter, limit)
    for handle in handles:
        handle.remove()
    trained = trained_parameters(model)
    if not trained:
        raise UnsupportedError(
            f"attention {case.attention!r} adds no parameters, so there is nothing to train with "
            "train='extras'; use train='full'"
        )
    model.train()
    loss = _training_loss(model, tokens, case, meter)
    once = _backward(model, loss.forward, meter, case)
    freed = case.shards or case.zero or case.accumulate > 1
    gradients = tensor_bytes(trained if freed else (x.grad for x in trained))
    state, update = optimizer(model, case, meter)
    again = None
    if model.supports_gradient_checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers renames the method
            model.gradient_checkpointing_enable({"use_reentrant": False})
        again = _backward(model, loss.forward, meter, case)
    use = MemoryUse(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        activations=once.kept,
        activations_checkpointed=again and again.kept,
        backward=once.peak,
        backward_checkpointed=again and again.peak,
        update=update,
        prompt=prompt,
        cache=cache,
        step=step,
        offloaded=once.elsewhere,
        offloaded_checkpointed=again and again.elsewhere,
        teacher=tensor_bytes([] if loss.teacher is None else loss.teacher.parameters())
        - loss.teacher_saved,
    )
    return of_one_gpu(use, BackwardPeaks(once.peaks, again and again.peaks), model, case)


def _training_loss(
    model: PreTrainedModel, tokens: Tensor, case: MemoryCase, meter: Meter
) -> TrainingLoss:
    """Return the loss of a case, under its autocast and its offloading of activations."""
    make = LOSSES.get(case.loss)
    loss = make(model, tokens, case) if make else TrainingLoss(_forward(model, tokens))
    autocast = case.precision == "bf16" and not case.zero  # which casts the weights
    forward = partial(_autocast, loss.forward, autocast)
    if case.activation_offloading and isinstance(meter, AllocationTracker):
        forward = partial(_offloading, forward, model, meter)
    return loss._replace(forward=forward)


def of_one_gpu(
    use: MemoryUse, peaks: BackwardPeaks, model: nn.Module, case: MemoryCase
) -> tuple[MemoryUse, BackwardPeaks]:
    """Return the memory of one GPU, given that of the whole model on its rows.

    Args:
        use: What the whole model uses; under FSDP2 with the buffers of :class:`GatheredUnits`.
        peaks: The parts of its peaks.
        model: The model.
        case: The case.
    """
    if case.load_in_4bit:
        saved, buffer = in_4_bits(
            model, 2 if case.precision == "bf16" else case.kept_dtype.itemsize
        )
        use = replace(use, parameters=use.parameters - saved, prompt=use.prompt + buffer)
        if use.step is not None:
            use = replace(use, step=use.step + buffer)
        use, peaks = _with_more(use, peaks, buffer)
    if case.keeps_parts and case.teacher_dtype != NF4:  # a copy in 4 bits is whole
        use = replace(use, teacher=-(-use.teacher // case.gpus))
    if case.zero:
        held = zero_partitions(model, case)
        use = replace(
            use,
            parameters=held.parameters,
            gradients=held.gradients + held.bucket,
            optimizer=held.optimizer,
            update=held.update,
            whole=case.widening * use.parameters if case.zero == 2 else 0,
        )
        return _with_more(use, peaks, held.gradients + held.bucket if case.zero == 3 else 0)
    if not case.shards:
        buckets = use.gradients if case.gpus > 1 else 0  # DDP's copy, for communication
        use = replace(use, gradients=use.gradients + buckets)
        return _with_more(use, peaks, buckets)

    def part(size: int) -> int:
        return -(-case.widening * size // case.gpus)

    use = replace(
        use,
        parameters=part(use.parameters),
        gradients=part(use.gradients),
        optimizer=part(use.optimizer),
        update=part(use.update),
    )
    return use, peaks


def _with_more(use: MemoryUse, peaks: BackwardPeaks, more: int) -> tuple[MemoryUse, BackwardPeaks]:
    """Return the memory with so many bytes more during forward + backward."""
    again = use.backward_checkpointed
    use = replace(
        use,
        backward=use.backward + more,
        backward_checkpointed=None if again is None else again + more,
    )
    parts = (None if x is None else tuple(n + more for n in x) for x in peaks)
    return use, BackwardPeaks(*parts)  # type: ignore[arg-type]


def _forward(model: PreTrainedModel, tokens: Tensor) -> Callable[[], Tensor]:
    """Return a function that computes the language-model loss, or a sum of the first output."""
    known = inspect.signature(type(model).forward).parameters
    arguments: dict[str, Any] = {"input_ids": tokens}
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "labels" in known and type(model).__name__.endswith(("LMHeadModel", "LM")):
        arguments["labels"] = tokens

    def run() -> Tensor:
        output = model(**arguments)
        loss: Tensor = output.loss if "labels" in arguments else output[0].float().mean()
        return loss

    return run


def _autocast(forward: Callable[[], Tensor], enabled: bool) -> Tensor:
    """Run a forward pass, under autocast if it is enabled."""
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        return forward()


def _offloading(
    forward: Callable[[], Tensor], model: nn.Module, tracker: AllocationTracker
) -> Tensor:
    """Run a forward pass whose activations are in the memory of a CPU, which is counted apart."""

    def allocate(x: Tensor) -> Tensor:
        return tracker.in_other_memory(lambda: torch.empty(x.shape, dtype=x.dtype))

    with offload_activations(model, torch.device("cpu"), allocate=allocate):
        return forward()


def _buffers(
    model: nn.Module, case: MemoryCase
) -> GatheredUnits | ZeroBuffers | AccumulatedGradients | None:
    """Return what allocates the buffers of several processes and micro-batches."""
    if case.zero:
        return zero_buffers(model, case)
    if case.shards:
        return GatheredUnits(model, gpus=case.gpus, wide=case.widening, accumulate=case.accumulate)
    return AccumulatedGradients(model) if case.accumulate > 1 else None


def _backward(
    model: PreTrainedModel, forward: Callable[[], Tensor], meter: Meter, case: MemoryCase
) -> Allocation:
    """Return what a forward pass keeps, and the peaks of forward + backward."""

    def reset() -> None:
        model.zero_grad(set_to_none=True)

    if not isinstance(meter, AllocationTracker):
        saved = meter(forward, reset).kept
        passes = min(case.accumulate, 2)

        def accumulate() -> None:
            for _ in range(passes):
                forward().backward()

        return meter(accumulate, reset)._replace(kept=saved)
    kept: list[int] = []
    elsewhere: list[int] = []
    buffers = _buffers(model, case)
    if isinstance(buffers, ZeroBuffers):
        buffers.prepare(lambda: forward().backward())

    def run() -> None:
        if buffers is not None:
            buffers.start()
        before = meter.current
        loss = forward()
        kept.append(meter.current - before)
        elsewhere.append(meter.elsewhere)
        loss.backward()
        if buffers is not None:
            buffers.end_of_step()

    def start() -> None:
        reset()
        if buffers is not None:
            buffers.reset()

    with _marks(model, meter.mark) if buffers is None else buffers.running(meter.mark):
        return meter(run, start)._replace(kept=kept[-1], elsewhere=elsewhere[-1])


@contextmanager
def _marks(model: nn.Module, mark: Callable[[], None]) -> Iterator[None]:
    """Context in which a function is called when a parameter has its gradient."""
    trained = trained_parameters(model)
    hooks = [x.register_post_accumulate_grad_hook(lambda _: mark()) for x in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _inference(
    model: PreTrainedModel, tokens: Tensor, meter: Meter, limit: int | None
) -> tuple[int, int | None, int | None]:
    """Return the bytes of a prompt, of the cache after it, and of one more token.

    Args:
        model: The model in evaluation mode.
        tokens: The prompt.
        meter: Measures calls.
        limit: Number of positions of the model, ``None`` without a limit.
    """
    known = inspect.signature(type(model).forward).parameters
    if not (model.can_generate() and all(x.geometry.causal for x in attention_layers(model))):
        return meter(lambda: model(input_ids=tokens)).peak, None, None
    arguments: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in known:
        arguments["logits_to_keep"] = 1
    caches: list[DynamicCache] = []
    if limit is not None:
        tokens = tokens[:, : limit - 2]  # a meter may decode two more

    def prompt() -> None:
        caches.append(DynamicCache(config=model.config))
        model(input_ids=tokens, **cache_argument(caches[0]), **arguments)

    used = meter(prompt, caches.clear).peak
    kept = cache_bytes(caches[0])
    one = tokens[:, :1]
    step = meter(lambda: model(input_ids=one, **cache_argument(caches[0]), **arguments)).peak
    return used, kept, step
