"""Memory of training and decoding, computed without running the model or loading its weights.

The model runs on fake tensors. What is computed is for the CPU, whose implementations run; kernels
of a GPU have buffers of their own. Several GPUs divide weights, gradients and optimizer states.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from attnzoo.errors import ConfigError, UnsupportedError, did_you_mean
from attnzoo.evaluation.allocations import AllocationTracker, counted, fake_model
from attnzoo.evaluation.equal_memory import cache_bytes, longest_window, saved_cache_bytes
from attnzoo.evaluation.models import max_positions, spec_label
from attnzoo.hf.attach import read_spec
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.lora import with_adapters
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import build_model
from attnzoo.hf.saving.files import dtype_name, model_class, read_config, saved_dtype
from attnzoo.hf.seam import cache_argument
from attnzoo.spec import AttentionSpec

OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor", "sgd")
TRAINED = ("full", "lora", "extras")
# NF4 of bitsandbytes: half a byte a weight, a byte a block of 64 weights for its largest value, and
# four bytes for the scale of 256 of these (arXiv:2305.14314)
BYTES_OF_4_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
LORA_RANK = 16  # as in recover
SHORTEST = 1024  # tokens; the shortest of the three lengths from which longer ones follow
MAX_LENGTH = 2**24  # tokens
TOTALS = ("training", "training_checkpointed", "inference", "decoding")


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
    prompt: int
    cache: int | None
    step: int | None

    @property
    def training(self) -> int:
        """The most at any time of forward + backward."""
        return self.parameters + self.optimizer + max(self.peaks)

    @property
    def training_checkpointed(self) -> int | None:
        """The most at any time of forward + backward under gradient checkpointing."""
        peaks = self.peaks_checkpointed
        return None if peaks is None else self.parameters + self.optimizer + max(peaks)

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


@dataclass(frozen=True, kw_only=True)
class MemoryEstimator:
    """Computes the memory of one model and attention at every length.

    Up to four times ``SHORTEST`` tokens, or beyond all windows of the model where these are longer,
    a length is computed. Longer ones follow from three of them: no operation of a layer is more
    than quadratic, so each part is a polynomial of degree two in the length.

    Attributes:
        path: Folder of a saved model; its weights are not needed.
        spec: The attention; ``None`` for that of the model's config.
        batch: Rows.
        dtype: Data type of the weights; ``recover`` and ``finetune`` train in ``"float32"``.
        optimizer: ``"adamw"``, ``"adamw_8bit"`` of bitsandbytes, ``"adafactor"`` of transformers,
            or ``"sgd"`` without momentum.
        train: ``"full"``, ``"extras"`` for the parameters that the backends add, or ``"lora"`` for
            adapters on all linear layers and extras.
        bf16: Whether training runs under autocast.
        load_in_4bit: Whether frozen linear layers have weights of 4 bits (QLoRA).
        gpus: GPUs that have ``batch`` rows together and divide weights, gradients and optimizer
            states, as FSDP2 and ZeRO-3 do; the result is that of one of them. Weights that are
            gathered while a layer runs, and buffers of communication, are not counted.
    """

    path: Path
    spec: AttentionSpec | None = None
    batch: int = 1
    dtype: str = "float32"
    optimizer: str = "adamw"
    train: str = "full"
    bf16: bool = False
    load_in_4bit: bool = False
    gpus: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "gpus"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, known in {"optimizer": OPTIMIZERS, "train": TRAINED}.items():
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
    def attention(self) -> str:
        """Name of the attention in tables."""
        return "as saved" if self.spec is None else spec_label(self.spec)

    @cached_property
    def longest(self) -> int:
        """The longest length in tokens: the model's positions, if it has a table of them."""
        positions = max_positions(self.path)
        return MAX_LENGTH if positions is None else positions

    @cached_property
    def sampled(self) -> tuple[int, int, int]:
        """The lengths from which longer ones follow."""
        with torch.device("meta"):
            window, block = longest_window(self.build(1))
        start = max(1, min(max(SHORTEST, 4 * window, 4 * block), self.longest // 4))
        return start, 2 * start, 4 * start

    def at(self, length: int) -> MemoryUse:
        """Return the memory at a length.

        Raises:
            AttnzooError: The model has fewer positions, or the backend does not support it.
        """
        if not self.sampled[-1] < length <= self.longest:
            return self.compute(length)
        use = self._extrapolate(length)
        if use.cache is None:
            return use
        sizes = saved_cache_bytes(self.path, self.spec, length, getattr(torch, self.dtype))
        return replace(use, cache=self.batch // self.gpus * sum(sizes.values()))

    def _extrapolate(self, length: int) -> MemoryUse:
        """Return the memory at a length, from the polynomials through the sampled lengths."""
        x = length / self.sampled[0]
        weights = ((x - 2) * (x - 4) / 3, (x - 1) * (4 - x) / 2, (x - 1) * (x - 2) / 6)

        def value(samples: Sequence[Any]) -> Any:
            if None in samples:
                return None
            if isinstance(samples[0], tuple):
                return tuple(map(value, zip(*samples, strict=True)))
            return max(0, round(sum(w * y for w, y in zip(weights, samples, strict=True))))

        names = (field.name for field in fields(MemoryUse))
        samples = [self.compute(length) for length in self.sampled]
        found = {name: value([getattr(use, name) for use in samples]) for name in names}
        return MemoryUse(**found)

    def build(self, length: int) -> PreTrainedModel:
        """Build the model with random weights, for rows of a length.

        Raises:
            UnsupportedError: It has too few positions, or does not run on token ids alone.
        """
        config = read_config(self.path)
        cls = model_class(config, self.path)
        if not has_field(config, "vocab_size") or read_field(config, "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{cls.__name__} does not run on token ids alone (it is an encoder-decoder or "
                "takes other inputs), so its memory is unknown; give a decoder or an encoder of "
                "text"
            )
        if length > self.longest:
            raise UnsupportedError(
                f"the model has {self.longest} positions, but the case needs {length}; "
                "attnzoo.extend_positions adds positions"
            )
        options: dict[str, Any] = {"dtype": getattr(torch, self.dtype)}
        if self.spec is not None:
            config.attnzoo = self.spec.to_dict()
        if read_field(config, NAME) is not None:
            options["attn_implementation"] = NAME
        model: PreTrainedModel = build_model(cls, config, **options)
        if self.train == "lora":
            task = "CAUSAL_LM" if model.can_generate() else "FEATURE_EXTRACTION"
            model = with_adapters(model, LORA_RANK, task).base_model.model
        elif self.train == "extras":
            model.requires_grad_(False)
        if self.train != "full":
            for name, parameter in model.named_parameters():
                if f".{NAME}." in name:
                    parameter.requires_grad_(True)
        return model

    def compute(self, length: int) -> MemoryUse:
        """Return the memory at a length, computed for that length on fake tensors.

        Raises:
            AttnzooError: The model does not fit, or its operations depend on values.
        """
        if length < 1:
            raise ConfigError(f"length must be at least 1, got {length}")
        model, mode = fake_model(lambda: self.build(length))
        with counted(mode) as tracker:
            return self._count(model, length, tracker)

    def _count(self, model: PreTrainedModel, length: int, tracker: AllocationTracker) -> MemoryUse:
        """Run decoding and training, and count."""
        vocabulary = int(model.config.get_text_config().vocab_size)
        tokens = torch.randint(vocabulary, (self.batch // self.gpus, length))
        parameters = _bytes([*model.parameters(), *model.buffers()])
        saved, buffer = self._in_4_bits(model)
        prompt, cache, step = inference(model.eval(), tokens, self.longest, tracker.peak_of)
        trained = [x for x in model.parameters() if x.requires_grad]
        if not trained:
            raise UnsupportedError(
                f"attention {self.attention!r} adds no parameters, so there is nothing to train "
                "with train='extras'; use train='full'"
            )
        forward = training_loss(model.train(), tokens, self.bf16)
        kept, peaks = _backward(trained, forward, tracker, self.gpus)
        gradients = _bytes(trained if self.gpus > 1 else (x.grad for x in trained))
        kept_again, peaks_again = None, None
        if enable_checkpointing(model):
            kept_again, peaks_again = _backward(trained, forward, tracker, self.gpus)
        return MemoryUse(
            parameters=-(-(parameters - saved) // self.gpus),
            gradients=-(-gradients // self.gpus),
            optimizer=-(-optimizer_bytes(model, trained, self.optimizer) // self.gpus),
            activations=kept,
            activations_checkpointed=kept_again,
            peaks=tuple(peak + buffer for peak in peaks),
            peaks_checkpointed=peaks_again and tuple(peak + buffer for peak in peaks_again),
            prompt=prompt + buffer,
            cache=cache,
            step=None if step is None else step + buffer,
        )

    def _in_4_bits(self, model: nn.Module) -> tuple[int, int]:
        """Return the bytes that 4-bit weights save, and the buffer of the largest layer that runs.

        The head is not quantized, as in transformers, nor is what a backend adds. A layer's weights
        are computed again in the compute type while it runs.
        """
        if not self.load_in_4bit:
            return 0, 0
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        counts = [
            x.weight.numel()
            for name, x in model.named_modules()
            if isinstance(x, nn.Linear)
            and not (x is head or f".{NAME}." in name or x.weight.requires_grad)
        ]
        size = getattr(torch, self.dtype).itemsize
        saved = size * sum(counts) - round(sum(counts) * BYTES_OF_4_BITS)
        return saved, (2 if self.bf16 else size) * max(counts, default=0)


@torch.no_grad()
def inference(
    model: PreTrainedModel,
    tokens: Tensor,
    longest: int,
    peak_of: Callable[[Callable[[], Any]], int],
) -> tuple[int, int | None, int | None]:
    """Return the bytes of a prompt, of the cache after it, and of one more token."""
    known = inspect.signature(type(model).forward).parameters
    if not (model.can_generate() and all(x.geometry.causal for x in attention_layers(model))):
        return peak_of(lambda: model(input_ids=tokens)), None, None
    cache = DynamicCache(config=model.config)
    arguments: dict[str, Any] = {**cache_argument(cache), "use_cache": True}
    if "logits_to_keep" in known:
        arguments["logits_to_keep"] = 1
    tokens = tokens[:, : longest - 1]  # one more is decoded
    prompt = peak_of(lambda: model(input_ids=tokens, **arguments))
    kept = cache_bytes(*cache.layers)
    return prompt, kept, peak_of(lambda: model(input_ids=tokens[:, :1], **arguments))


def training_loss(model: PreTrainedModel, tokens: Tensor, bf16: bool) -> Callable[[], Tensor]:
    """Return a function that computes the language-model loss, or a mean of the first output."""
    known = inspect.signature(type(model).forward).parameters
    arguments: dict[str, Any] = {"input_ids": tokens}
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "labels" in known and type(model).__name__.endswith(("LMHeadModel", "LM")):
        arguments["labels"] = tokens

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(**arguments)
            loss: Tensor = output.loss if "labels" in arguments else output[0].float().mean()
        return loss

    return forward


def enable_checkpointing(model: PreTrainedModel) -> bool:
    """Enable gradient checkpointing; return whether the model supports it."""
    if model.supports_gradient_checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers renames the method
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.supports_gradient_checkpointing


def _backward(
    trained: Sequence[Tensor], forward: Callable[[], Tensor], tracker: AllocationTracker, gpus: int
) -> tuple[int, tuple[int, ...]]:
    """Return what a forward pass keeps, and the peaks of forward + backward."""
    for x in trained:
        x.grad = None
    before = tracker.peak = tracker.current
    peaks: list[int] = []
    parts: list[Tensor] = []  # of gradients that are divided

    def with_gradient(x: Tensor) -> None:
        peaks.append(tracker.peak - before)
        tracker.peak = tracker.current
        if gpus > 1:
            parts.append(torch.empty(-(-x.numel() // gpus), dtype=x.dtype))
            x.grad = None

    handles = [x.register_post_accumulate_grad_hook(with_gradient) for x in trained]
    loss = forward()
    kept = tracker.current - before
    loss.backward()
    for handle in handles:
        handle.remove()
    return kept, (*peaks, tracker.peak - before)


def optimizer_bytes(model: nn.Module, trained: Iterable[Tensor], optimizer: str) -> int:
    """Return the bytes of the state of an optimizer.

    ``adamw_8bit`` of bitsandbytes has a byte a weight and moment, and a scale of four bytes for 256
    of them (arXiv:2110.02861); those of embeddings and of small tensors are in float32. Adafactor
    keeps a number per row and column of a matrix, and one of each tensor (arXiv:1804.04235).
    """
    embeddings = {id(x.weight) for x in model.modules() if isinstance(x, nn.Embedding)}
    state = 0
    for x in trained:
        count = x.numel()
        if optimizer == "adamw":
            state += 2 * x.nbytes
        elif optimizer == "adafactor":
            rows = count if x.dim() < 2 else count // x.shape[-1] + count // x.shape[-2]
            state += 4 * (rows + 1)
        elif optimizer == "adamw_8bit":
            small = count < 4096 or id(x) in embeddings  # as transformers has it
            state += 8 * count if small else 2 * (count + 4 * -(-count // 256))
    return state


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of tensors; tied ones count once."""
    return sum({id(x): x.nbytes for x in tensors if x is not None}.values())


def estimate_memory(
    model: str | Path,
    attention: str | AttentionSpec | Mapping[str, Any] | None = None,
    *,
    length: int,
    dtype: str | None = None,
    **options: Any,
) -> MemoryUse:
    """Return the bytes that training and decoding use, without running or loading the model.

    Operations are counted on tensors without data, with the implementations that run on a CPU. The
    buffers that one kernel allocates and frees, the memory of the process itself and, on GPUs, the
    context and the fragmentation of the allocator are not part of it.

    Args:
        model: Folder of a saved model; a config.json is enough.
        attention: As in :func:`attnzoo.swap`; ``None`` for the attention of the model's config.
        length: Tokens per row.
        dtype: Data type of the weights, such as ``"float32"``; that of ``from_pretrained`` when
            ``None``.
        options: ``batch``, ``optimizer``, ``train``, ``bf16``, ``load_in_4bit`` and ``gpus`` of
            :class:`MemoryEstimator`.

    Raises:
        AttnzooError: An argument is invalid, or a backend does not support the model.

    Example:
        >>> short, long = (
        ...     attnzoo.estimate_memory(folder, "linear", length=length).cache
        ...     for length in (256, 512)
        ... )
        >>> short == long
        True
    """
    path, spec = Path(model), None if attention is None else read_spec(attention)
    dtype = dtype or dtype_name(saved_dtype(path))
    return MemoryEstimator(path=path, spec=spec, dtype=dtype, **options).at(length)
