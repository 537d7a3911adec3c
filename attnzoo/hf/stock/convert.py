"""Convert a model whose attention layers are all exact to a stock class, and prove it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnzoo.backends.longformer import LongformerBackend
from attnzoo.backends.parts.exact import ExactBackend
from attnzoo.contract.backend import AttentionBackend
from attnzoo.errors import SpecError, UnsupportedError, did_you_mean
from attnzoo.hf import mixins, seam
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.layers import AttentionLayer, attention_layers
from attnzoo.hf.names import NAME, PRUNED
from attnzoo.hf.pretrained import build_model, load_pretrained
from attnzoo.hf.saving.checkpoints import rope_table
from attnzoo.hf.saving.files import model_class, read_config, require_new_folder, save_copy
from attnzoo.hf.stock.classes import (
    ENGINES,
    STOCK_CLASSES,
    StockClass,
    Windows,
    classes_for,
    other_config,
    other_weights,
    stock_class,
)
from attnzoo.hf.stock.gated_delta_net import (
    FAMILY,
    measure_layers,
    parse_recurrent,
    recurrent_layers,
    replaced_outputs,
    sample_tokens,
    student_weights,
)
from attnzoo.hf.swap import original_attention, swap
from attnzoo.hf.unchanged import unchanged_on_error
from attnzoo.spec import AttentionSpec

# -- folders --------------------------------------------------------------------------------------


KEPT = ("license", "license_name", "license_link", "language", "datasets")  # of the source's card
RECURRENT = "recurrent"
EXPERIMENTAL = (
    "**Experimental.** The recurrent layers have starting values, and the model predicts badly "
    "until they are trained: `attnzoo recover NEW --teacher SOURCE`. Sliding windows of equal "
    "memory in the same layers need no training and may predict better: the results of that "
    "command compare the two, and `attnzoo convert --to mellum` writes a model with windows.\n"
)
Layer = int | str | None  # window in tokens, RECURRENT, or None for all keys

# Words, numbers, contractions, indentation and other scripts, which tokenizers split differently
SAMPLE = "It's 12,345.67 dollars\n\n\tif x == 10:  # naïve 你好 мир\n        return  [a_b, 'c']\r\n"


def convert_files(
    path: Path,
    to: str,
    out: Path,
    plan: AttentionSpec | None = None,
    *,
    recurrent: str | None = None,
) -> list[str]:
    """Write a saved model as a stock class, with a model card; see :func:`convert`.

    Returns:
        The attention of each layer, ``"full"``, ``"window 64"`` or ``"recurrent"``.
    """
    require_new_folder(out)
    config = read_config(path)
    if plan is not None and read_field(config, NAME) is not None:
        raise SpecError(
            f"{str(path)!r} holds a swapped model, which has its own plan in config.json; leave "
            "--plan out, or give the original model"
        )
    try:
        model = load_pretrained(model_class(config, path), path, dtype="auto").eval()
    except OSError as error:
        raise SpecError(
            f"The weights in {str(path)!r} cannot be read ({error}); nothing was written."
        ) from error
    converted = convert(model, to, plan, recurrent=recurrent)
    require_same_tokens(path, converted.config)
    save_copy(converted, path, out)
    layers: list[Layer] = list(layer_windows(converted))
    for number in recurrent_layers(converted):
        layers.insert(number, RECURRENT)
    file = path / "README.md"
    text = file.read_text("utf-8", errors="replace") if file.is_file() else ""
    (out / file.name).write_text(card(converted.config, layers, path.name, text), "utf-8")
    return ["full" if x is None else x if isinstance(x, str) else f"window {x}" for x in layers]


def require_same_tokens(source: Path, config: Any) -> None:
    """Raise if ``AutoTokenizer`` reads the source's files otherwise beside another config.

    It chooses the class of a tokenizer by the family in config.json: for some families whatever the
    tokenizer's own files name, as for Qwen 2 in transformers 5.24.
    """
    try:
        tokenizer = load_pretrained(AutoTokenizer, source)
    except (OSError, ValueError, KeyError):
        return  # not every model has one
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            loaded = load_pretrained(AutoTokenizer, folder)
            same = len(loaded) == len(tokenizer) and _tokens(loaded) == _tokens(tokenizer)
            found = type(loaded).__name__
        except (OSError, ValueError, KeyError, TypeError):
            same, found = False, "no tokenizer"
    if not same:
        raise UnsupportedError(
            f"Beside a {config.model_type} model, transformers loads {found} instead of this "
            f"model's {type(tokenizer).__name__}, so its tokens would be others, and nothing was "
            "written. Convert it to another class; attnzoo.convert converts the model alone"
        )


def _tokens(tokenizer: Any) -> list[int]:
    return list(tokenizer(SAMPLE)["input_ids"])


def card(config: Any, layers: Sequence[Layer], source: str, source_card: str = "") -> str:
    """Return the model card of a converted model in Markdown.

    The licence and the language of the card of its source are kept.
    """
    given = ModelCard(source_card).data
    kept = {name: given.get(name) for name in KEPT if given.get(name) is not None}
    head = ModelCardData(library_name="transformers", **kept)
    name = (config.architectures or [config.model_type])[0]
    parts = [
        f"---\n{head.to_yaml()}\n---\n",
        f"# {source}, converted to {name}\n",
        f"Written by `attnzoo convert --to {config.model_type}`, which copied all weights and "
        "trained nothing. The model runs without attnzoo.\n",
        _layers(layers) + "\n",
    ]
    if positions := rope_table(config):
        parts.append(positions + "\n")
    if RECURRENT in layers:
        parts.append(EXPERIMENTAL)
    if any(isinstance(x, int) for x in layers):
        parts.append(_engines(config.model_type))
    return "\n".join(parts)


def _layers(kinds: Sequence[Layer]) -> str:
    """Return the attention of the layers, neighbours with the same one on one line."""
    lines = ["| layers | attention |", "|---|---|"]
    first = 0
    for number, kind in enumerate(kinds):
        if number + 1 == len(kinds) or kinds[number + 1] != kind:
            layers = str(first) if first == number else f"{first}-{number}"
            lines.append(f"| {layers} | {_text(kind)} |")
            first = number + 1
    return "\n".join(lines)


def _text(kind: Layer) -> str:
    if kind is None:
        return "all keys"
    return "Gated DeltaNet, a state" if kind == RECURRENT else f"the latest {kind} keys"


def _engines(family: str) -> str:
    """Return what engines do with the windows of a class."""
    found = stock_class(family).engines
    lines = ["| engine | what it does with the windows |", "|---|---|", "| transformers | right |"]
    for key, label in ENGINES.items():
        lines.append(f"| {label} | {found.get(key, 'not tested')} |")
    return "\n".join(lines) + "\n"


# -- models ---------------------------------------------------------------------------------------


EXACT = "softmax and flash, also with a window, and longformer without global tokens"
CHECKED_TOKENS = 16
# Rounding between implementations of the same sums, in units of the dtype's precision
TOLERANCE = 32


def convert(
    model: PreTrainedModel,
    to: str,
    plan: AttentionSpec | None = None,
    *,
    recurrent: str | None = None,
) -> PreTrainedModel:
    """Return a model of a stock class that computes what a model with exact layers does.

    Weights are copied, and nothing is trained. The result needs no attnzoo. Before it is returned,
    the windows of its layers are compared with those of the model, and its logits with those of the
    model's original attention on tokens that fit into every window.

    Args:
        model: A causal model, swapped or not. It is not changed, unless ``plan`` is given.
        to: The family of the class, ``config.model_type``: the model's own one, or one that can
            hold its weights, such as ``"qwen2"`` for a Llama; docs/serving.md has the table.
        plan: The attention of each layer; the model is swapped to it first.
        recurrent: Layers that become Gated DeltaNet in the class ``"qwen3_5_text"``, such as
            ``"1-2"``. They do not compute softmax: they get starting values, and the model is a
            student to be trained by ``attnzoo recover NEW --teacher DIR``. Experimental.

    Raises:
        UnsupportedError: The class cannot hold the attention of a layer or the weights, or has no
            recurrent layers. The message names a class that can, if there is one.
        SpecError: ``to`` is no family, or the model is quantized or has pruned heads. After any
            error the model is as it was, not swapped to ``plan``.

    Example:
        >>> model = attnzoo.swap(model, "flash", layers={"0-1": "flash:window=64"})
        >>> attnzoo.convert(model, "qwen2").config.layer_types[:3]
        ['sliding_attention', 'sliding_attention', 'full_attention']
    """
    with unchanged_on_error(model):
        if plan is not None:
            swap(model, plan)
        return _convert(model, to, recurrent)


def _convert(model: PreTrainedModel, to: str, recurrent: str | None) -> PreTrainedModel:
    _check(model, to)
    windows = layer_windows(model)
    family = model.config.model_type
    target = stock_class(to)
    numbers = [] if recurrent is None else parse_recurrent(recurrent, model.config)
    _require_class(model, target, windows)
    if numbers and to != FAMILY:
        takes = ", ".join(STOCK_CLASSES[FAMILY].takes)
        raise UnsupportedError(
            f"A {to} model has no recurrent layers. {FAMILY} has them, but takes {takes} only"
        )
    same = to == family
    config = _without_swap(model.config) if same else other_config(model.config, to, numbers)
    _set_windows(config, target, windows)
    state = {k: x for k, x in model.state_dict().items() if f".{NAME}." not in k}
    if same:
        cls: Any = mixins.stock_class(type(model))
        converted = cls._from_config(config, dtype=model.dtype)
    else:
        if to == FAMILY:
            with _softmax(model):
                tokens = sample_tokens(model) if numbers else None
                inputs = measure_layers(model, numbers, tokens)
            state = student_weights(state, model.config, inputs)
        else:
            state = other_weights(state, to, config)
        converted = build_model(AutoModelForCausalLM, config, dtype=model.dtype)
    try:
        converted.load_state_dict(state)
    except RuntimeError as error:
        raise UnsupportedError(
            f"The weights of this {family} do not fit into {type(converted).__name__} ({error}); "
            "convert a model without adapters and without other changes of its layers"
        ) from error
    if model.can_generate():
        converted.generation_config = deepcopy(model.generation_config)
    converted.to(model.device).eval()
    _prove(model, converted, windows)
    return cast(PreTrainedModel, converted.train(model.training))


def layer_windows(model: nn.Module) -> list[int | None]:
    """Return the window of each attention layer in tokens, ``None`` where it sees all keys.

    The window of a swapped layer is the smaller one of its backend's and of the model's.
    """
    layers = attention_layers(model)
    reasons = {}
    windows = []
    for layer in layers:
        backend = _running_backend(model, layer)
        reason = "" if backend is None else _backend_reason(backend)
        if reason:
            reasons[layer.geometry.layer] = reason
        windows.append(_layer_window(layer, backend))
    if reasons:
        lines = "; ".join(f"layer {number}: {reason}" for number, reason in reasons.items())
        raise UnsupportedError(
            f"No stock class holds the attention of {len(reasons)} of {len(layers)} layers "
            f"({lines}). Stock classes hold {EXACT}. Keep the swapped model, which transformers "
            "loads after `import attnzoo`, or convert one whose layers are exact"
        )
    return windows


def _running_backend(model: nn.Module, layer: AttentionLayer) -> AttentionBackend | None:
    """Return the backend that a layer runs, ``None`` if it runs stock attention."""
    config: Any = getattr(layer.module, "config", None) or model.config
    found = layer_backend(layer.module) if config._attn_implementation == NAME else None
    return found if isinstance(found, AttentionBackend) else None


def _backend_reason(backend: AttentionBackend) -> str:
    """Return why no stock class computes what a backend does, or ``""``."""
    config: Any = backend.config
    if isinstance(backend, LongformerBackend):
        pattern = config.window, config.dilation
        if config.num_global or config.global_positions or config.global_projections:
            return "longformer has global tokens"
        if not all(isinstance(x, int) for x in pattern) or config.dilation != 1:
            return "longformer has dilated windows, or one for each head"
    elif not isinstance(backend, ExactBackend):
        return f"{backend.name} is not softmax attention"
    elif config.num_sinks:
        return f"num_sinks={config.num_sinks} keeps the first tokens beside the window"
    if config.window is not None and not backend.geometry.causal:
        return f"window={config.window} is bidirectional"
    return ""


def _layer_window(layer: AttentionLayer, backend: AttentionBackend | None) -> int | None:
    """Return the window of a layer without a reason against it."""
    own = getattr(getattr(backend, "config", None), "window", None)
    windows = [x for x in (own, layer.geometry.window) if isinstance(x, int)]
    return min(windows, default=None)


def _check(model: PreTrainedModel, to: str) -> None:
    """Raise if ``to`` is no family, or the model is not one that any class holds as it is."""
    known = CONFIG_MAPPING.keys()
    if to not in known:
        names = [x.family for x in classes_for(model.config.model_type)]
        raise SpecError(
            f"No model class of transformers is called {to!r}.{did_you_mean(to, known)} Classes "
            f"for this {model.config.model_type}: {', '.join(names)}"
        )
    if read_field(model.config, "quantization_config") is not None:
        raise SpecError("The model is quantized; convert it before it is quantized")
    if read_field(model.config, PRUNED):
        raise SpecError(
            "The model has pruned heads, for which no stock class has a form; convert a model with "
            "all heads"
        )


def _is_causal_lm(model: PreTrainedModel) -> bool:
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _require_class(model: PreTrainedModel, target: StockClass, windows: list[int | None]) -> None:
    """Raise if a class cannot hold the weights of a model, or its windows."""
    family = model.config.model_type
    reason = ""
    if family not in {target.family, *target.takes}:
        reason = f"it does not hold the weights of {family}"
    elif target.family != family and not _is_causal_lm(model):
        reason = f"{type(model).__name__} is no causal language model"
    else:
        reason = _window_reason(target, model, windows)
    if not reason:
        return
    others = [
        x.family
        for x in classes_for(family)
        if x.family != target.family and not _window_reason(x, model, windows)
    ]
    if others and _is_causal_lm(model):
        advice = f"Classes that can: {', '.join(others)}"
    else:
        advice = (
            "No stock class of the table can; keep the swapped model, which transformers loads "
            "after `import attnzoo`"
        )
    raise UnsupportedError(f"{target.family} cannot hold this model: {reason}. {advice}")


def _window_reason(target: StockClass, model: PreTrainedModel, windows: list[int | None]) -> str:
    """Return why a class cannot hold the windows of a model's layers, or ``""``."""
    sizes = {x for x in windows if x is not None}
    same = target.family == model.config.model_type
    own = [layer.geometry.window for layer in attention_layers(model)]
    if same and windows == own:  # whatever the class has: it does not change
        return ""
    if sizes and target.windows is Windows.NONE:
        if any(x is not None for x in own) and target.family not in STOCK_CLASSES:
            return "attnzoo does not know which windows it can have, other than the model's own"
        return "its layers have no windows"
    if not sizes and not same and target.needs_windows:
        return "it is for models with windows, and this one has none"
    if len(sizes) > 1:
        listed = ", ".join(map(str, sorted(sizes)))
        return f"its layers share one window, but the model has windows of {listed} tokens"
    if target.windows is Windows.ALL and sizes and None in windows:
        return "all of its layers have the window, but some layers of the model have none"
    changed = [a is None for a in windows] != [b is None for b in own]
    if same and target.windows is Windows.SAME and changed:
        return "its layers with a window have other positions than those without"
    return ""


def _without_swap(config: Any) -> Any:
    """Return a copy of a config, and of its sub-configs, without their specs."""
    data = config.to_dict()
    for part in (data, *(data.get(key) for key in config.sub_configs)):
        if isinstance(part, dict):
            for name in (NAME, "attn_implementation"):
                part.pop(name, None)
    return type(config).from_dict(data)


def _set_windows(config: Any, target: StockClass, windows: list[int | None]) -> None:
    """Write the windows of the layers to the fields of a class."""
    size = next((x for x in windows if x is not None), None)
    if target.windows is Windows.NONE:
        return
    if target.windows is Windows.ALL:
        config.sliding_window = size
        return
    if size is None and "sliding_attention" not in config.layer_types:
        return
    config.layer_types = ["full_attention" if x is None else "sliding_attention" for x in windows]
    if size is not None:
        config.sliding_window = size
    if has_field(config, "use_sliding_window"):
        config.use_sliding_window = size is not None
    if has_field(config, "max_window_layers"):  # of older readers; vLLM refuses what it cannot run
        config.max_window_layers = next(
            (i for i, x in enumerate(windows) if x is not None), len(windows)
        )


def _prove(model: PreTrainedModel, converted: PreTrainedModel, windows: list[int | None]) -> None:
    """Raise if a converted model has other windows, or other logits within the windows.

    Recurrent layers compute something else: they return the model's own outputs in this check.
    """
    name = type(converted).__name__
    found = layer_windows(converted)
    others = recurrent_layers(converted)
    windows = [x for number, x in enumerate(windows) if number not in others]
    if found != windows:
        raise UnsupportedError(
            f"{name} would have the windows {found} instead of {windows}; report this model's "
            "config.json"
        )
    if not _is_causal_lm(model):
        return  # the same class and the same weights
    length = min(CHECKED_TOKENS, *(x for x in windows if x is not None), CHECKED_TOKENS)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.arange(1, 1 + length, device=model.device)[None] % vocabulary
    with _softmax(model):
        expected = _logits(model, tokens)
        inputs = measure_layers(model, [*recurrent_layers(converted)], tokens)
    with replaced_outputs(converted, inputs):
        error = (_logits(converted, tokens) - expected).abs().max().item()
    limit = TOLERANCE * torch.finfo(model.dtype).eps * expected.abs().max().item()
    if not error <= limit:  # NaN too
        raise UnsupportedError(
            f"{name} computes other logits for this {model.config.model_type}: they differ by "
            f"{error:.2e}, and rounding allows {limit:.2e}. Its config may set positions or "
            "multipliers that are unknown here; report its config.json"
        )


@contextmanager
def _softmax(model: PreTrainedModel) -> Iterator[None]:
    """Context in which a model runs its original attention, in evaluation mode."""
    training = model.training
    is_swapped = any(config._attn_implementation == NAME for config in seam.all_configs(model))
    try:
        model.eval()
        with original_attention(model) if is_swapped else nullcontext():
            yield
    finally:
        model.train(training)


@torch.no_grad()
def _logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return cast(Tensor, model(input_ids=tokens, use_cache=False).logits).float()
