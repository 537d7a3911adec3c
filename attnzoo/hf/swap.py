"""Swap the attention of a model's layers for backends, and restore it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from attnzoo.contract.backend import AttentionBackend
from attnzoo.errors import SpecError, UnsupportedError, did_you_mean
from attnzoo.hf import seam
from attnzoo.hf.adapters import record_swap
from attnzoo.hf.attach import (
    attach,
    build_backends,
    config_spec,
    detach,
    read_spec,
    warn_of_image_masks,
    write_config,
)
from attnzoo.hf.extras import carry_over
from attnzoo.hf.layers import AttentionLayer, attention_layers, unwrap_model
from attnzoo.hf.models.rows import update_row_hooks
from attnzoo.hf.models.speed_up import remove_speed_up
from attnzoo.hf.names import IN_SWAPPED, NAME
from attnzoo.hf.release_check import require_working_release
from attnzoo.hf.swapped import update_classes
from attnzoo.hf.unchanged import unchanged_on_error
from attnzoo.spec import AttentionSpec

# Attribute of models: the implementations of all configs before the swap, in order
_ORIGINAL = "_attnzoo_original"

Model = TypeVar("Model", bound=nn.Module)


def swap(
    model: Model,
    attention: str | AttentionSpec | Mapping[str, Any],
    *,
    keep_extras: bool = False,
    **options: Any,
) -> Model:
    """Replace the attention of a model in memory and return the model.

    Swapping again replaces the earlier swap. A warning names the layers whose trained extras
    (parameters that their backends added) this removes.

    To swap one submodel of a composite model, pass the submodel,
    ``swap(model.language_model, "linear")``, or the name of its sub-config,
    ``swap(model, {"text_config": "linear"})``. The sub-config then holds the spec,
    ``config.text_config.attnzoo``, which is saved and loaded with it.

    Args:
        model: A transformers model, a submodel of one, or a wrapper around one. Its weights do not
            change.
        attention: A spec, its ``to_dict`` form, or the name of a backend; or a mapping from
            sub-configs to these, like ``attn_implementation``.
        keep_extras: Whether layers keep the extras of the earlier swap where the backend and the
            shapes are the same.
        **options: With a name: ``layers``, ``else_`` and the options of the backend, as in
            ``AttentionSpec``.

    Raises:
        SpecError: The spec does not fit the model.
        UnknownBackendError: The spec names an unknown backend.
        ConfigError: An option is wrong.
        UnsupportedError: A backend does not support a layer. After any of these errors the model is
            unchanged.

    Example:
        >>> model = attnzoo.swap(model, "linear", feature_map="hedgehog", layers={"0-1": "flash"})
        >>> [layer.backend for layer in attnzoo.describe(model)]
        ['flash', 'flash', 'linear', 'linear']
    """
    require_working_release()
    target = unwrap_model(model)
    if target is None:
        raise SpecError(
            f"{type(model).__name__} is not a transformers model; swap takes a PreTrainedModel, "
            "such as AutoModelForCausalLM.from_pretrained(...)"
        )
    _refuse_part(target)
    by_config = isinstance(attention, Mapping) and not {"backend", "version"} & set(attention)
    if by_config and attention and seam.sub_configs(target.config):
        specs = _submodel_specs(target, attention, options)  # type: ignore[arg-type]
    else:
        specs = [(target, read_spec(attention, **options))]
    swaps = []
    for submodel, spec in specs:
        layers = attention_layers(submodel)
        swaps.append((submodel, spec, layers, build_backends(submodel, layers, spec)))
    for _, _, layers, backends in swaps:
        warn_of_image_masks(target, layers, backends)
        carry_over(layers, backends, keep=keep_extras)
    with unchanged_on_error(target):
        for submodel, spec, layers, backends in swaps:
            _install(submodel, spec, layers, backends)
        update_row_hooks(target)
        update_classes(target)
    return model


def _refuse_part(target: PreTrainedModel) -> None:
    """Raise for the encoder or decoder of a model that saves no spec for one of them."""
    if seam.is_part_of_pair(target):
        raise UnsupportedError(
            f"{type(target).__name__} is a part of a model whose config cannot name it, so the "
            "swap would not be saved; swap the whole model, and name the layers of the part, or "
            "those that keep their attention, under layers"
        )


def _submodel_specs(
    target: PreTrainedModel, attention: Mapping[str, Any], options: Mapping[str, Any]
) -> list[tuple[PreTrainedModel, AttentionSpec]]:
    """Return the submodels that a mapping from sub-configs selects, with their specs."""
    configs = seam.sub_configs(target.config)
    for key in attention:
        if key not in configs:
            raise SpecError(
                f"{type(target.config).__name__} has no sub-config {key!r}."
                f"{did_you_mean(str(key), configs)} It has {', '.join(configs)}."
            )
    specs = []
    for key, spec in attention.items():
        submodels = seam.submodels(target, configs[key])
        if not submodels:
            raise SpecError(f"No submodel of {type(target).__name__} is built from config.{key}")
        specs += [(submodel, read_spec(spec, **options)) for submodel in submodels]
    return specs


def _install(
    target: PreTrainedModel,
    spec: AttentionSpec,
    layers: list[AttentionLayer],
    backends: list[AttentionBackend],
) -> None:
    """Add backends to a model or submodel, and write the spec to its config."""
    if _is_swapped(target.config) and not config_spec(target):
        vars(target)[IN_SWAPPED] = True
    _save_implementations(target)
    detach(target)
    for config in seam.all_configs(target):
        _clear(config)  # this spec replaces those of submodels
    attach(layers, backends)
    write_config(target.config, spec)
    seam.set_implementation(target, NAME, (layer.module for layer in layers))


def _save_implementations(target: PreTrainedModel) -> None:
    """Store on each model and submodel the implementations of its configs before any swap."""
    original = {id(config): name for config, name in _original_implementations(target)}
    for model in seam.pretrained_models(target):
        vars(model)[_ORIGINAL] = [original[id(config)] for config in seam.all_configs(model)]


def _original_implementations(target: PreTrainedModel) -> list[tuple[Any, str]]:
    """Return every config of a model, and its implementation before any swap."""
    saved: dict[int, str] = {}
    for model in seam.pretrained_models(target):
        names = vars(model).get(_ORIGINAL, ())
        saved |= {id(c): name for c, name in zip(seam.all_configs(model), names, strict=False)}
    default = target.get_correct_attn_implementation(None)
    return [
        (c, saved.get(id(c), default) if _is_swapped(c) else c._attn_implementation)
        for c in seam.all_configs(target)
    ]


def _is_swapped(config: Any) -> bool:
    return bool(config._attn_implementation == NAME)


def _runs_swap(model: PreTrainedModel) -> bool:
    """Return whether any part runs a swap; ``set_attn_implementation`` disables and enables it."""
    return any(map(_is_swapped, seam.all_configs(model)))


def _has_backends(model: PreTrainedModel) -> bool:
    return any(NAME in module._modules for module in model.modules())


def _clear(config: Any) -> None:
    for name in (NAME, "attn_implementation"):
        if name in vars(config):
            delattr(config, name)


def restore(model: nn.Module) -> None:
    """Restore the original attention of a model that is swapped or sped up; else warn.

    Raises:
        SpecError: ``model`` is a submodel of a model that was swapped as a whole.

    Example:
        >>> attnzoo.restore(attnzoo.swap(model, "linear"))
        >>> model.config._attn_implementation
        'sdpa'
    """
    target = unwrap_model(model)
    if target is None or not (_has_backends(target) or _runs_swap(target)):
        if target is not None and remove_speed_up(target):
            return
        warnings.warn(
            f"{type(model).__name__} is not swapped, so there is nothing to restore", stacklevel=2
        )
        return
    specs = map(config_spec, seam.pretrained_models(target))
    if vars(target).get(IN_SWAPPED) or not any(specs):
        raise SpecError(
            f"{type(target).__name__} is a submodel of a model that was swapped as a whole; "
            "restore that model, or swap this submodel to an exact backend such as 'flash'"
        )
    original = _original_implementations(target)
    with unchanged_on_error(target):
        remove_speed_up(target)
        detach(target)
        for config, implementation in original:
            _clear(config)
            config._attn_implementation_internal = implementation
        for inner in seam.pretrained_models(target):
            vars(inner).pop(_ORIGINAL, None)
            vars(inner).pop(IN_SWAPPED, None)
            for adapter in getattr(inner, "peft_config", {}).values():
                record_swap(inner, adapter)
        update_classes(target)


@contextmanager
def original_attention(model: nn.Module) -> Iterator[None]:
    """Context manager under which a swapped model runs its original attention."""
    target = unwrap_model(model)
    original = [] if target is None else _original_implementations(target)
    swapped = [(config, name) for config, name in original if _is_swapped(config)]
    if not swapped:
        raise SpecError(f"{type(model).__name__} is not swapped: it runs its original attention")
    try:
        for config, implementation in swapped:
            config._attn_implementation_internal = implementation
        yield
    finally:
        for config, _ in swapped:
            config._attn_implementation_internal = NAME
