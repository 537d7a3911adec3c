"""Memory of training and decoding: computed without running the model, or measured.

One function makes both, on fake tensors or on real ones. What is computed is for the CPU, whose
implementations run; kernels of a GPU have buffers of their own. Several GPUs divide weights,
gradients and optimizer states.
"""

from __future__ import annotations

import inspect
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from attnzoo.errors import ConfigError, UnsupportedError, did_you_mean
from attnzoo.evaluation.allocations import (
    Allocation,
    AllocationTracker,
    Meter,
    counted,
    fake_model,
    real_meter,
)
from attnzoo.evaluation.decoding import cache_bytes
from attnzoo.evaluation.equal_memory import longest_window, saved_cache_bytes
from attnzoo.evaluation.models import max_positions, spec_label
from attnzoo.hf.adapters.lora import with_adapters
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import explain_load_errors
from attnzoo.hf.saving.dtype import dtype_name, saved_dtype
from attnzoo.hf.saving.files import model_class, read_config
from attnzoo.hf.seam import cache_argument
from attnzoo.hf.swap.backends import read_spec
from attnzoo.report.format import format_bytes
from attnzoo.report.table import Table
from attnzoo.spec import AttentionSpec

OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor", "sgd")
TRAINED = ("full", "lora", "extras")
SHARDED = {  # what GPUs divide
    "ddp": (),
    "zero2": ("gradients", "optimizer"),
    "zero3": ("gradients", "optimizer", "parameters"),
    "fsdp2": ("gradients", "optimizer", "parameters"),
}
# NF4 of bitsandbytes: half a byte a weight, a byte a block of 64 weights for its largest value, and
# four bytes for the scale of 256 of these (arXiv:2305.14314)
BYTES_OF_4_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
LORA_RANK = 16  # as in recover
SHORTEST = 1024  # tokens; the shortest of the three lengths from which longer ones follow
MAX_LENGTH = 2**24  # tokens
ATTEMPTS = 4  # of computing the memory at a length that should fit
TOTALS = ("training", "training_checkpointed", "inference", "decoding")


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One model, attention and size of inputs.

    Attributes:
        path: Folder of a saved model; its weights are not needed.
        spec: Plain data of the attention; ``None`` for that of the model's config.
        dtype: Data type of the weights.
        bf16: Whether training runs under autocast.
        load_in_4bit: Whether frozen linear layers have weights of 4 bits (QLoRA).

    The others are those of :func:`estimate_memory`.
    """

    path: str
    spec: dict[str, Any] | None = None
    length: int = 1024
    batch: int = 1
    dtype: str = "float32"
    optimizer: str = "adamw"
    train: str = "full"
    bf16: bool = False
    load_in_4bit: bool = False
    gpus: int = 1
    sharding: str = "fsdp2"

    def __post_init__(self) -> None:
        for name in ("length", "batch", "gpus"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        choices = {"optimizer": OPTIMIZERS, "train": TRAINED, "sharding": tuple(SHARDED)}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, got {value!r}."
                    f"{did_you_mean(value, known)}"
                )
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(
                "dtype must be a floating-point type of torch, such as float32 or bfloat16, got "
                f"{self.dtype!r}"
            )
        if self.batch % self.gpus:
            raise ConfigError(
                f"batch={self.batch} rows are those of all GPUs, but are not divisible by "
                f"gpus={self.gpus}; give a multiple"
            )
        if self.load_in_4bit and self.train == "full":
            raise ConfigError(
                "load_in_4bit is for frozen weights, but train='full' trains them; use 'lora'"
            )

    @property
    def divided(self) -> tuple[str, ...]:
        """Parts that several GPUs divide."""
        return SHARDED[self.sharding] if self.gpus > 1 else ()

    @property
    def attention(self) -> str:
        """Name of the attention in tables."""
        spec = self.spec
        return "as saved" if spec is None else spec_label(AttentionSpec.from_dict(spec))


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of training and of decoding.

    Attributes:
        parameters: Weights and buffers.
        gradients: Of the trained weights.
        optimizer: State of the optimizer.
        activations: Kept by the forward pass for the backward pass, the loss included.
        activations_checkpointed: The same under gradient checkpointing; ``None`` without support.
        peaks: Of forward + backward beyond weights and optimizer, gradients included, until each
            gradient is known. Each grows with the length as a polynomial, which the largest of
            them does not.
        peaks_checkpointed: The same under gradient checkpointing.
        update: Used by a step of the optimizer for intermediate results.
        prompt: Used by a forward pass without gradients, beyond the weights; of a decoder it
            includes the cache.
        cache: Keys and values, or states, after the prompt; ``None`` if it does not decode.
        step: Used by decoding one token, beyond weights and cache.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    activations_checkpointed: int | None
    peaks: tuple[int, ...]
    peaks_checkpointed: tuple[int, ...] | None
    update: int
    prompt: int
    cache: int | None
    step: int | None

    @property
    def training(self) -> int:
        """The most at any time of a training step."""
        return self._training(self.peaks)

    @property
    def training_checkpointed(self) -> int | None:
        """The most at any time of a training step under gradient checkpointing."""
        peaks = self.peaks_checkpointed
        return None if peaks is None else self._training(peaks)

    def _training(self, peaks: tuple[int, ...]) -> int:
        return self.parameters + self.optimizer + max(*peaks, self.gradients + self.update)

    @property
    def inference(self) -> int:
        """The most during a forward pass over the whole input without gradients."""
        return self.parameters + self.prompt

    @property
    def decoding(self) -> int | None:
        """The most while one token is decoded after the input."""
        if self.cache is None or self.step is None:
            return None
        return self.parameters + self.cache + self.step

    def to_dict(self) -> dict[str, int | None]:
        """Return all numbers and totals."""
        values = {k: x for k, x in asdict(self).items() if not k.startswith("peaks")}
        return values | {name: getattr(self, name) for name in TOTALS}


def compute(case: MemoryCase) -> MemoryUse:
    """Return the memory of a case, computed on fake tensors.

    Raises:
        AttnzooError: The model does not fit the case, or its operations depend on values.
    """
    model, mode = fake_model(lambda: build_model(case))
    with counted(mode) as tracker:
        return _memory_use(model, case, tracker)


def measure(case: MemoryCase) -> dict[str, int | None]:
    """Return the memory of a case on one GPU, measured in this process on the CPU; for tests.

    The optimizer does not run. The weights are random.

    Raises:
        AttnzooError: The model does not fit the case.
    """
    torch.manual_seed(0)
    return _memory_use(build_model(case), case, real_meter).to_dict()


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
    options: dict[str, Any] = {"dtype": getattr(torch, case.dtype)}
    if case.spec is not None:
        config.attnzoo = case.spec
    if read_field(config, NAME) is not None:
        options["attn_implementation"] = NAME
    with explain_load_errors(path):
        model: PreTrainedModel = cls._from_config(config, **options)
    if case.train == "lora":
        task = "CAUSAL_LM" if model.can_generate() else "FEATURE_EXTRACTION"
        model = with_adapters(model, LORA_RANK, task).base_model.model
    elif case.train == "extras":
        model.requires_grad_(False)
    if case.train != "full":
        for name, parameter in model.named_parameters():
            if f".{NAME}." in name:
                parameter.requires_grad_(True)
    return model


def _memory_use(model: PreTrainedModel, case: MemoryCase, meter: Meter) -> MemoryUse:
    """Run training and decoding under a meter."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(vocabulary, (case.batch // case.gpus, case.length))
    parameters = _bytes([*model.parameters(), *model.buffers()])
    saved, buffer = _in_4_bits(model, case)
    prompt, cache, step = _inference(model.eval(), tokens, meter, max_positions(Path(case.path)))
    trained = [x for x in model.parameters() if x.requires_grad]
    if not trained:
        raise UnsupportedError(
            f"attention {case.attention!r} adds no parameters, so there is nothing to train with "
            "train='extras'; use train='full'"
        )
    forward = _training_loss(model.train(), tokens, case)
    once, again = _backward(model, forward, meter, case), None
    gradients = _bytes(trained if case.divided else (x.grad for x in trained))
    state, update = optimizer_bytes(model, trained, case.optimizer)
    if model.supports_gradient_checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers renames the method
            model.gradient_checkpointing_enable({"use_reentrant": False})
        again = _backward(model, forward, meter, case)
    copies = gradients if case.gpus > 1 and case.sharding == "ddp" else 0  # DDP's buckets

    def part(size: int, name: str) -> int:
        return -(-size // case.gpus) if name in case.divided else size

    return MemoryUse(
        parameters=part(parameters - saved, "parameters"),
        gradients=part(gradients, "gradients") + copies,
        optimizer=part(state, "optimizer"),
        activations=once.kept,
        activations_checkpointed=again and again.kept,
        peaks=tuple(peak + buffer + copies for peak in once.peaks),
        peaks_checkpointed=again and tuple(peak + buffer + copies for peak in again.peaks),
        update=part(update, "optimizer"),
        prompt=prompt + buffer,
        cache=cache,
        step=None if step is None else step + buffer,
    )


@torch.no_grad()
def _inference(
    model: PreTrainedModel, tokens: Tensor, meter: Meter, limit: int | None
) -> tuple[int, int | None, int | None]:
    """Return the bytes of a prompt, of the cache after it, and of one more token."""
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


def _training_loss(
    model: PreTrainedModel, tokens: Tensor, case: MemoryCase
) -> Callable[[], Tensor]:
    """Return a function that computes the language-model loss, or a mean of the first output."""
    known = inspect.signature(type(model).forward).parameters
    arguments: dict[str, Any] = {"input_ids": tokens}
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "labels" in known and type(model).__name__.endswith(("LMHeadModel", "LM")):
        arguments["labels"] = tokens

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            output = model(**arguments)
            loss: Tensor = output.loss if "labels" in arguments else output[0].float().mean()
        return loss

    return forward


def _backward(
    model: PreTrainedModel, forward: Callable[[], Tensor], meter: Meter, case: MemoryCase
) -> Allocation:
    """Return what a forward pass keeps, and the peaks of forward + backward."""
    parts: list[Tensor] = []  # of gradients that are divided
    kept: list[int] = []

    def reset() -> None:
        parts.clear()
        model.zero_grad(set_to_none=True)

    if not isinstance(meter, AllocationTracker):
        saved = meter(forward, reset).kept
        return meter(lambda: forward().backward(), reset)._replace(kept=saved)

    def step() -> None:
        before = meter.current
        loss = forward()
        kept.append(meter.current - before)
        loss.backward()

    def with_gradient(x: Tensor) -> None:
        meter.mark()
        if "gradients" in case.divided:
            parts.append(torch.empty(-(-x.numel() // case.gpus), dtype=x.dtype))
            x.grad = None

    trained = (x for x in model.parameters() if x.requires_grad)
    handles = [x.register_post_accumulate_grad_hook(with_gradient) for x in trained]
    found = meter(step, reset)
    for handle in handles:
        handle.remove()
    return found._replace(kept=kept[-1])


def optimizer_bytes(model: nn.Module, trained: Iterable[Tensor], optimizer: str) -> tuple[int, int]:
    """Return the bytes of the state of an optimizer, and of a step's intermediate results.

    ``adamw_8bit`` of bitsandbytes has a byte a weight and moment, and a scale of four bytes for 256
    of them (arXiv:2110.02861); those of embeddings and of small tensors are in float32. Adafactor
    keeps a number per row and column of a matrix, and one of each tensor (arXiv:1804.04235).
    """
    if optimizer == "sgd":
        return 0, 0
    embeddings = {id(x.weight) for x in model.modules() if isinstance(x, nn.Embedding)}
    state = update = before = 0
    for x in trained:
        count, size = x.numel(), x.nbytes
        if optimizer == "adamw":
            state += 2 * size
        elif optimizer == "adafactor":
            rows = count if x.dim() < 2 else count // x.shape[-1] + count // x.shape[-2]
            state += 4 * (rows + 1)
            size = 4 * count
        else:
            small = count < 4096 or id(x) in embeddings  # as transformers has it
            state += 8 * count if small else 2 * (count + 4 * -(-count // 256))
            continue  # its kernels of GPUs update in place
        # a root and a quotient of each weight in turn, beside the quotient of the weight before it;
        # Adafactor also copies weights and gradients to float32
        update = max(update, before + (2 if size == x.nbytes else 4) * size)
        before = size
    return state, update


def _in_4_bits(model: nn.Module, case: MemoryCase) -> tuple[int, int]:
    """Return the bytes that 4-bit weights save, and the buffer of the largest layer that runs.

    The head is not quantized, as in transformers, nor is what a backend adds. A layer's weights are
    computed again in the compute type while it runs.
    """
    if not case.load_in_4bit:
        return 0, 0
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    weights = [
        x.weight
        for name, x in model.named_modules()
        if isinstance(x, nn.Linear) and x is not head and f".{NAME}." not in name
    ]
    counts = [x.numel() for x in weights if not x.requires_grad]
    size = getattr(torch, case.dtype).itemsize
    saved = size * sum(counts) - round(sum(counts) * BYTES_OF_4_BITS)
    return saved, (2 if case.bf16 else size) * max(counts, default=0)


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of tensors; tied ones count once."""
    return sum({id(x): x.nbytes for x in tensors if x is not None}.values())


class MemoryCurve:
    """The memory of a case at every length.

    It is computed up to four times ``SHORTEST`` tokens, or beyond all windows of the model where
    these are longer. From there on each part is a polynomial of degree two in the length, because
    no operation of a layer is more than quadratic, and follows from three lengths.
    """

    def __init__(self, case: MemoryCase) -> None:
        self.case = case
        positions = max_positions(Path(case.path))
        self.longest = MAX_LENGTH if positions is None else positions
        with torch.device("meta"):
            window, block = longest_window(build_model(replace(case, length=1)))
        start = max(1, min(max(SHORTEST, 4 * window, 4 * block), self.longest // 4))
        self.sampled = (start, 2 * start, 4 * start)
        self._computed: dict[int, MemoryUse] = {}

    def at(self, length: int) -> MemoryUse:
        """Return the memory at a length.

        Raises:
            UnsupportedError: The model has fewer positions.
        """
        if not self.sampled[-1] < length <= self.longest:
            return self.computed(length)
        use, case = self.extrapolated(length), self.case
        if use.cache is None:
            return use
        spec = None if case.spec is None else AttentionSpec.from_dict(case.spec)
        sizes = saved_cache_bytes(Path(case.path), spec, length, getattr(torch, case.dtype))
        return replace(use, cache=case.batch // case.gpus * sum(sizes.values()))

    def computed(self, length: int) -> MemoryUse:
        """Return the memory at a length, computed for that length."""
        if length not in self._computed:
            self._computed[length] = compute(replace(self.case, length=length))
        return self._computed[length]

    def extrapolated(self, length: int) -> MemoryUse:
        """Return the memory at a length, from the polynomials through the sampled lengths."""
        x = length / self.sampled[0]
        weights = ((x - 2) * (x - 4) / 3, (x - 1) * (4 - x) / 2, (x - 1) * (x - 2) / 6)

        def value(samples: Sequence[Any]) -> Any:
            if None in samples:
                return None
            if isinstance(samples[0], tuple):
                return tuple(map(value, zip(*samples, strict=True)))
            return max(0, round(sum(w * y for w, y in zip(weights, samples, strict=True))))

        uses = [self.computed(n) for n in self.sampled]
        names = (field.name for field in fields(MemoryUse))
        return MemoryUse(**{name: value([getattr(use, name) for use in uses]) for name in names})

    def longest_that_fits(self, limit: int, total: str) -> int | None:
        """Return the most tokens per row with which a total stays within a limit.

        Args:
            limit: Bytes.
            total: One of ``TOTALS``.

        Returns:
            0 if no length fits, ``longest`` if all do, ``None`` if the model has no such total.
        """
        if getattr(self.extrapolated(self.sampled[0]), total) is None:
            return None
        low = bisect_right(
            range(1, self.longest + 1), limit, key=lambda n: getattr(self.extrapolated(n), total)
        )
        for _ in range(ATTEMPTS):
            used = getattr(self.at(low), total) if low else 0
            if used <= limit:
                return low
            low = min(low - 1, int(0.99 * low * limit / used))
        return 0


def estimate(case: MemoryCase) -> MemoryUse:
    """Return the memory of a case of any length."""
    return MemoryCurve(case).at(case.length)


def estimate_memory(
    model: str | Path,
    attention: str | AttentionSpec | Mapping[str, Any] | None = None,
    *,
    length: int,
    batch: int = 1,
    dtype: str | None = None,
    optimizer: str = "adamw",
    train: str = "full",
    gpus: int = 1,
    sharding: str = "fsdp2",
) -> MemoryUse:
    """Return the bytes that training and decoding use, without running or loading the model.

    Operations are counted on tensors without data, with the implementations that run on a CPU. The
    buffers that one kernel allocates and frees, the memory of the process itself and, on GPUs, the
    context and the fragmentation of the allocator are not part of it.

    Args:
        model: Folder of a saved model; a config.json is enough.
        attention: As in :func:`attnzoo.swap`; ``None`` for the attention of the model's config.
        length: Tokens per row.
        batch: Rows.
        dtype: Data type of the weights, such as ``"float32"``, in which ``recover`` and
            ``finetune`` train; that of ``from_pretrained`` when ``None``.
        optimizer: ``"adamw"``, ``"adamw_8bit"`` of bitsandbytes, ``"adafactor"`` of transformers,
            or ``"sgd"`` without momentum.
        train: ``"full"``, ``"extras"`` for the parameters that the backends add, or ``"lora"`` for
            adapters on all linear layers and extras.
        gpus: GPUs that have ``batch`` rows together; the result is that of one of them.
        sharding: What they divide: ``"fsdp2"`` or ``"zero3"`` of DeepSpeed, weights, gradients and
            optimizer states, ``"zero2"``, gradients and states, or ``"ddp"``, nothing. Weights that
            are gathered while a layer runs, and buffers of communication, are not counted.

    Raises:
        AttnzooError: An argument is invalid, or a backend does not support the model.

    Example:
        >>> at_4k, at_8k = (
        ...     attnzoo.estimate_memory(folder, "linear", length=length).cache
        ...     for length in (4096, 8192)
        ... )
        >>> at_4k == at_8k
        True
    """
    return estimate(
        MemoryCase(
            path=str(model),
            spec=None if attention is None else read_spec(attention).to_dict(),
            length=length,
            batch=batch,
            dtype=dtype or dtype_name(saved_dtype(Path(model))),
            optimizer=optimizer,
            train=train,
            gpus=gpus,
            sharding=sharding,
        )
    )


CAPTION = (
    "Training, prompt and decoding are peaks, weights included; checkpointed: with gradient "
    "checkpointing. Tensors on a CPU: without the process itself, and on a GPU without kernels' "
    "own buffers."
)
COLUMNS = {name: name for name in ("parameters", "gradients", "optimizer", "activations")} | {
    "activations_checkpointed": "checkpointed",
    "training": "training",
    "training_checkpointed": "checkpointed",
    "cache": "cache",
    "inference": "prompt",
    "decoding": "decoding",
}


def memory_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> Table:
    """Return the memory of every attention: ``computed`` of rows that have it, as plain data."""
    body = [
        [row["attention"], *(format_bytes(row["computed"][key]) for key in COLUMNS)]
        for row in rows
        if row.get("computed")
    ]
    columns = ["attention", *COLUMNS.values()]
    return Table(columns=columns, rows=body, title=title, caption=CAPTION)
