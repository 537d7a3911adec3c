"""Puts backends into a model's attention layers, and takes them out again."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from attnzoo.backends.base import AttentionBackend
from attnzoo.errors import SpecError, UnsupportedError, did_you_mean
from attnzoo.integrations import compat
from attnzoo.integrations.attention import NAME, add_hook, layer_backend
from attnzoo.integrations.layers import AttentionLayer, attention_layers, whole_model
from attnzoo.registry import build_backend
from attnzoo.spec import AttentionSpec

_BEFORE = "_attnzoo_before"  # the implementations before the swap, of all configs in order
_WITHIN = "_attnzoo_within"  # of a part with a spec of its own in a model that was swapped whole
FAMILIES = "BERT, CLIP, Gemma, GPT-2, Llama, Mistral, Phi-3, Qwen, T5, ViT, Whisper"


def swap(
    model: nn.Module, attention: str | AttentionSpec | Mapping[str, Any], **options: Any
) -> None:
    """Replace the attention of a model in memory; a swapped model is swapped anew.

    One part of a composite model is swapped as ``swap(model.language_model, "linear")``, or by the
    name that the part has in the config: ``swap(model, {"text_config": "linear"})``. Its spec is
    kept in the part's own config, ``config.text_config.attnzoo``, saved and loaded with it.

    Args:
        model: A transformers model, a part of one, or a wrapper around one. Its own weights stay as
            they are.
        attention: A spec, its plain data, or a backend's name; or a mapping from sub-configs to
            these, as ``attn_implementation`` may be one.
        **options: With a name: ``layers``, ``else_`` and the backend's options, as in
            ``AttentionSpec``.

    Raises:
        SpecError: The spec does not fit the model.
        UnknownBackendError: The spec names an unknown backend.
        ConfigError: An option is wrong.
        UnsupportedError: A backend refuses a layer. In each case the model is left as it was.
    """
    target = whole_model(model)
    if target is None:
        raise SpecError(
            f"{type(model).__name__} is not a transformers model; swap takes a PreTrainedModel"
        )
    by_part = isinstance(attention, Mapping) and not {"backend", "version"} & set(attention)
    if by_part and attention and compat.sub_configs(target.config):
        targets = _targets(target, attention, options)  # type: ignore[arg-type]
    else:
        targets = [(target, read_spec(attention, **options))]
    found = [(part, spec, attention_layers(part)) for part, spec in targets]
    built = [build(part, layers, spec) for part, spec, layers in found]
    for (part, spec, layers), backends in zip(found, built, strict=True):
        _put(part, spec, layers, backends)


def _targets(
    target: PreTrainedModel, attention: Mapping[str, Any], options: Mapping[str, Any]
) -> list[tuple[PreTrainedModel, AttentionSpec]]:
    """Find the parts of a composite model that a mapping from sub-configs names."""
    known = compat.sub_configs(target.config)
    for key in attention:
        if key not in known:
            raise SpecError(
                f"{type(target.config).__name__} has no sub-config {key!r}."
                f"{did_you_mean(str(key), known)} It has {', '.join(known)}."
            )
    found = []
    for key, spec in attention.items():
        parts = compat.parts(target, known[key])
        if not parts:
            raise SpecError(f"No part of {type(target).__name__} is built from config.{key}")
        found += [(part, read_spec(spec, **options)) for part in parts]
    return found


def _put(
    target: PreTrainedModel,
    spec: AttentionSpec,
    layers: list[AttentionLayer],
    backends: list[AttentionBackend],
) -> None:
    """Put backends that were built into a model, whole or part, and note the swap in its config."""
    if target.config._attn_implementation == NAME and not _own_spec(target):
        vars(target)[_WITHIN] = True
    remember(target)
    _detach(target)
    for config in compat.all_configs(target):
        _erase(config)  # a part that had a spec of its own is under this one now
    attach(layers, backends)
    write_config(target.config, spec)
    compat.set_implementation(target, NAME, (layer.module for layer in layers))


def _own_spec(model: PreTrainedModel) -> Any:
    return getattr(model.config, NAME, None)


def remember(target: PreTrainedModel) -> None:
    """Keep with each part of a model which implementations it had before any swap."""
    known = {id(config): name for config, name in _before(target)}
    for part in compat.models(target):
        vars(part)[_BEFORE] = [known[id(config)] for config in compat.all_configs(part)]


def _before(target: PreTrainedModel) -> list[tuple[Any, str]]:
    """Return every config of a model, and its implementation before any swap."""
    known: dict[int, str] = {}
    for part in compat.models(target):
        kept = vars(part).get(_BEFORE, ())
        known |= {id(c): name for c, name in zip(compat.all_configs(part), kept, strict=False)}
    default = target.get_correct_attn_implementation(None)
    configs = compat.all_configs(target)
    return [(c, known.get(id(c), default) if _is_swapped(c) else _name(c)) for c in configs]


def _name(config: Any) -> str:
    name: str = config._attn_implementation
    return name


def _is_swapped(config: Any) -> bool:
    return _name(config) == NAME


def _erase(config: Any) -> None:
    for name in (NAME, "attn_implementation"):
        if name in vars(config):
            delattr(config, name)


def restore(model: nn.Module) -> None:
    """Give a swapped model its own attention back, bit for bit; warns if it was not swapped.

    Raises:
        SpecError: ``model`` is a part of one that was swapped as a whole, whose config says so.
    """
    target = whole_model(model)
    if target is None or not any(map(_is_swapped, compat.all_configs(target))):
        warnings.warn(
            f"{type(model).__name__} is not swapped, so there is nothing to restore", stacklevel=2
        )
        return
    if vars(target).get(_WITHIN) or not any(map(_own_spec, compat.models(target))):
        raise SpecError(
            f"{type(target).__name__} is a part of a model that was swapped as a whole; restore "
            "that model, or swap this part to an exact backend such as 'flash'"
        )
    before = _before(target)
    _detach(target)
    for config, implementation in before:
        _erase(config)
        config._attn_implementation_internal = implementation
    for part in compat.models(target):
        vars(part).pop(_BEFORE, None)
        vars(part).pop(_WITHIN, None)


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Let a swapped model run its own attention for a while, extras in place and at rest.

    Raises:
        SpecError: The model is not swapped.
    """
    target = whole_model(model)
    before = [] if target is None else _before(target)
    swapped = [(config, name) for config, name in before if _is_swapped(config)]
    if not swapped:
        raise SpecError(f"{type(model).__name__} is not swapped: it runs its own attention already")
    try:
        for config, implementation in swapped:
            config._attn_implementation_internal = implementation
        yield
    finally:
        for config, _ in swapped:
            config._attn_implementation_internal = NAME


def read_spec(attention: str | AttentionSpec | Mapping[str, Any], **options: Any) -> AttentionSpec:
    """Make a spec of whatever a user calls one."""
    if isinstance(attention, str):
        return AttentionSpec(attention, **options)
    if options:
        raise SpecError(
            f"options ({', '.join(options)}) go with a backend's name; a spec holds its own already"
        )
    return attention if isinstance(attention, AttentionSpec) else AttentionSpec.from_dict(attention)


def build(
    model: nn.Module, layers: list[AttentionLayer], spec: AttentionSpec
) -> list[AttentionBackend]:
    """Make every layer's backend before any is put in place, so that a refusal changes nothing."""
    if not layers:
        raise SpecError(_no_layers(model))
    spec.check_layers((layer.geometry.layer for layer in layers), (layer.name for layer in layers))
    backends, refusals = [], []
    for layer in layers:
        try:
            backends.append(_build_one(layer, spec))
        except UnsupportedError as error:
            refusals.append(error)
    if refusals:
        more = len(refusals) - 1
        raise UnsupportedError(
            f"{refusals[0]}" + (f" ({more} more layers likewise.)" if more else "")
        )
    for number, backend in enumerate(backends):
        backend.share_with(backends[:number])
    return backends


def _build_one(layer: AttentionLayer, spec: AttentionSpec) -> AttentionBackend:
    entry = spec.for_layer(layer.geometry.layer, layer.name)
    weight = next((p for p in layer.module.parameters(recurse=True) if p.is_floating_point()), None)
    with torch.device(weight.device if weight is not None else "cpu"):
        try:
            backend = build_backend(entry.backend, dict(entry.options), layer.geometry)
        except UnsupportedError:
            if spec.else_ is None:
                raise
            backend = build_backend(spec.else_.backend, dict(spec.else_.options), layer.geometry)
    if weight is not None:
        backend.to(weight.dtype)
    return backend.train(layer.module.training)


def attach(layers: list[AttentionLayer], backends: list[AttentionBackend]) -> None:
    """Put each backend into its layer, as the submodule ``attnzoo``, and hook the layer."""
    for layer, backend in zip(layers, backends, strict=True):
        setattr(layer.module, NAME, backend)
        vars(layer.module)["_attnzoo_hook"] = add_hook(layer.module)


def _detach(model: nn.Module) -> None:
    for module in model.modules():
        if "_attnzoo_hook" in vars(module):
            vars(module).pop("_attnzoo_hook").remove()
            vars(module).pop("_attnzoo_call", None)
            del module.attnzoo


def write_config(config: Any, spec: AttentionSpec) -> None:
    """Write the swap into a config so that it is saved.

    ``attn_implementation`` is not saved by itself; as a plain field it is, and then a machine
    without attnzoo fails to load the model instead of running it with the wrong attention.
    """
    setattr(config, NAME, spec.to_dict())
    config.attn_implementation = NAME


def _no_layers(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} has no attention layers that go through transformers' attention "
        f"interface, so nothing can be swapped. Families that do, among others: {FAMILIES}."
    )


# -- when a model is built -----------------------------------------------------------------------


def attach_when_built(model: PreTrainedModel) -> None:
    """Give a model under construction the backends its config asks for; part of ``post_init``."""
    data = getattr(model.config, NAME, None)
    implementation = model.config._attn_implementation
    if data is None and implementation != NAME:
        return
    whole = _enclosing_model(model)
    if whole is not None:
        if data in (None, _own_spec(whole)):
            return  # the whole model does it for this part
        vars(model)[_WITHIN] = True
    if data is None:
        raise SpecError(
            "attn_implementation='attnzoo' needs to know which attention: set config.attnzoo = "
            'attnzoo.AttentionSpec("linear").to_dict() before the model is built, or load the '
            'model as it is and call attnzoo.swap(model, "linear"). For one part of a composite '
            'model pass attn_implementation={"text_config": "attnzoo"} and set '
            "config.text_config.attnzoo"
        )
    if implementation != NAME:
        asked = data.get("backend") if isinstance(data, Mapping) else data
        raise SpecError(
            f"config.attnzoo asks for {asked!r}, but attn_implementation is {implementation!r}; "
            "pass attn_implementation='attnzoo', or delete config.attnzoo to have the model's own "
            "attention"
        )
    spec = read_spec(data)
    layers = attention_layers(model)
    rest = [layer for layer in layers if layer_backend(layer.module) is None]
    if rest or not layers:  # or else all of its parts have specs of their own
        attach(rest, build(model, rest, spec))
    write_config(model.config, spec)


def _enclosing_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a swapped model that is being constructed around ``model``.

    Parts are built before the whole, and only the whole knows all layers; it is found on the call
    stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            other = frame.f_locals.get("self")
            if isinstance(other, PreTrainedModel) and other is not model:
                config = getattr(other, "config", None)
                if getattr(config, NAME, None) is not None:
                    return other
        frame = frame.f_back  # type: ignore[assignment]
    return None


def initialise_backend(backend: AttentionBackend) -> None:
    """Give a backend's missing extras their initial values and keep those that were loaded."""
    tensors = [*backend.named_parameters(), *backend.named_buffers()]
    loaded = {n: x.detach().clone() for n, x in tensors if getattr(x, "_is_hf_initialized", False)}
    backend.reset_parameters()
    with torch.no_grad():
        for name, x in tensors:
            if name in loaded:
                x.copy_(loaded[name])
