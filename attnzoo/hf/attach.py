"""Build the backends of a spec, and attach them to the layers of a model, or of one being built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.validation import DTYPES
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.attention.call import add_hook, layer_backend
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.extras import layer_names, warn
from attnzoo.hf.layers import AttentionLayer, attention_layers, has_image_mask
from attnzoo.hf.models.rows import update_row_hooks
from attnzoo.hf.names import IN_SWAPPED, NAME
from attnzoo.hf.release_check import require_working_release
from attnzoo.registry import build_backend
from attnzoo.spec import AttentionSpec

FAMILIES = "BERT, CLIP, Gemma, GPT-2, Llama, Mistral, Phi-3, Qwen, T5, ViT, Whisper"


def read_spec(attention: str | AttentionSpec | Mapping[str, Any], **options: Any) -> AttentionSpec:
    """Return the spec that ``swap`` takes as a spec, a mapping, or a name with options."""
    if isinstance(attention, str):
        return AttentionSpec(attention, **options)
    if options:
        raise SpecError(
            f"options ({', '.join(options)}) require a backend's name; a spec has its own options"
        )
    return attention if isinstance(attention, AttentionSpec) else AttentionSpec.from_dict(attention)


def build_backends(
    model: nn.Module, layers: list[AttentionLayer], spec: AttentionSpec
) -> list[AttentionBackend]:
    """Build the backend of every layer; the model does not change if a layer is not supported."""
    if not layers:
        raise SpecError(
            f"{type(model).__name__} has no attention layers that use transformers' attention "
            f"interface{seam.class_table_text(model)}, so nothing can be swapped. Build or load "
            f"it without attn_implementation='attnzoo' and config.attnzoo. Families that can be "
            f"swapped include: {FAMILIES}."
        )
    spec.check_layers((layer.geometry.layer for layer in layers), (layer.name for layer in layers))
    backends, refusals, replaced = [], [], {}
    for layer in layers:
        try:
            backend, reason = _build_backend(model, layer, spec)
            backends.append(backend)
            if reason:
                replaced[layer.name] = reason
        except UnsupportedError as error:
            refusals.append(error)
    if refusals:
        more = len(refusals) - 1
        raise UnsupportedError(
            f"{refusals[0]}" + (f" ({more} more layers likewise.)" if more else "")
        )
    if replaced and len(replaced) == len(layers):
        assert spec.else_ is not None
        warn(
            f'{type(model).__name__} runs {spec.else_.backend!r}, the "else" of the spec, in '
            f"every attention layer ({layer_names(replaced)}). {next(iter(replaced.values()))}"
        )
    _refuse_offloaded(model, layers, backends)
    for number, backend in enumerate(backends):
        backend.share_with(backends[:number])
    return backends


def warn_of_image_masks(
    model: nn.Module,
    layers: list[AttentionLayer],
    backends: list[AttentionBackend],
) -> None:
    """Warn if inputs with images will be refused; text without images runs."""
    names = [
        layer.name
        for layer, backend in zip(layers, backends, strict=True)
        if not backend.capabilities.arbitrary_mask and has_image_mask(model, layer)
    ]
    if names:
        warn(
            f"{type(model).__name__} lets the tokens of an image attend to each other, which the "
            f"backends of {layer_names(names)} do not support: inputs with images will be refused "
            "there. Name an exact backend, such as 'flash', for these layers under layers, or use "
            "text only"
        )


def _build_backend(
    model: nn.Module, layer: AttentionLayer, spec: AttentionSpec
) -> tuple[AttentionBackend, str]:
    """Return the backend of a layer, and why it is the spec's ``"else"``, or ``""``."""
    reason = ""
    entry = spec.for_layer(layer.geometry.layer, layer.name)
    with torch.device(_layer_device(layer.module)):
        try:
            backend = build_backend(entry.backend, entry.config, layer.geometry)
        except UnsupportedError as error:
            if spec.else_ is None:
                raise
            reason = str(error)
            backend = build_backend(spec.else_.backend, spec.else_.config, layer.geometry)
    backend.to(_layer_dtype(model, layer.module))
    return backend.train(layer.module.training), reason


def _layer_device(module: nn.Module) -> torch.device:
    """Return the device of a layer's weights; quantized layers may keep them as buffers."""
    weight = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if weight is None else weight.device


def _refuse_offloaded(
    model: nn.Module, layers: Sequence[AttentionLayer], backends: Sequence[AttentionBackend]
) -> None:
    """Raise if a backend adds tensors to a layer whose weights are loaded by accelerate's hooks."""
    if not any(hasattr(part, "_hf_hook") for part in model.modules()):
        return
    for layer, backend in zip(layers, backends, strict=True):
        has_tensors = any(True for _ in chain(backend.parameters(), backend.buffers()))
        if has_tensors and _layer_device(layer.module).type == "meta":
            raise UnsupportedError(
                f"{layer.name}: backend {backend.name!r} adds weights, and those of the layer are "
                "offloaded, so accelerate would not load them; call attnzoo.swap before the model "
                "is offloaded, or save the swapped model, and load it with a device_map"
            )


def _layer_dtype(model: nn.Module, layer: nn.Module) -> torch.dtype:
    """Return the dtype in which a layer computes, which its extras take.

    It is the dtype of the layer's weights. That of quantized weights (float8, integers) is a format
    of storage, and adapters and scales beside them are float32, so a layer that has such weights
    takes the dtype of the innermost model around it: of its first module without such weights.
    """
    if own := _weight_dtypes(layer):
        return own[0]
    around = [x for x in seam.pretrained_models(model) if layer in set(x.modules())]
    for outer in reversed(around):  # pretrained_models lists outer models first
        for module in outer.modules():
            if found := _weight_dtypes(module, recurse=False):
                return found[0]
    return torch.get_default_dtype()


def _weight_dtypes(module: nn.Module, *, recurse: bool = True) -> list[torch.dtype]:
    """Return the dtypes of a module's weights; none if it has quantized weights."""
    found = [p.dtype for p in module.parameters(recurse=recurse)]
    return found if DTYPES.issuperset(found) else []


def attach(layers: list[AttentionLayer], backends: list[AttentionBackend]) -> None:
    """Add each backend to its layer as the submodule ``attnzoo``, and register the pre-hook."""
    for layer, backend in zip(layers, backends, strict=True):
        setattr(layer.module, NAME, backend)
        vars(layer.module)["_attnzoo_hook"] = add_hook(layer.module)


def detach(model: nn.Module) -> None:
    """Remove all backends and pre-hooks from a model."""
    for module in model.modules():
        if "_attnzoo_hook" in vars(module):
            vars(module).pop("_attnzoo_hook").remove()
            vars(module).pop("_attnzoo_arguments", None)
            del module.attnzoo
    update_row_hooks(model)


def config_spec(model: PreTrainedModel) -> Any:
    """Return the plain data of the spec in a model's config, or ``None``."""
    return read_field(model.config, NAME)


def write_config(config: Any, spec: AttentionSpec) -> None:
    """Write a spec to a config, which saves it with the values of all options.

    Stock configs do not save ``attn_implementation``. As a plain field it is saved, so that loading
    the model where attnzoo is not installed fails instead of running the wrong attention.
    """
    setattr(config, NAME, spec.to_dict(defaults=True))
    config.attn_implementation = NAME


def attach_when_built(model: PreTrainedModel, outer: Any) -> None:
    """Build and attach the backends of a config's spec; runs when the model has its modules.

    Args:
        model: The model.
        outer: The spec of the model that is being built around it, which may serve its layers.
    """
    data = config_spec(model)
    implementation = model.config._attn_implementation
    if data is None and implementation != NAME:
        if any(has_field(inner, NAME) for inner in seam.sub_configs(model.config).values()):
            update_row_hooks(model)  # for a submodel with a swap of its own
        return
    require_working_release()
    if outer is not None:
        if data in (None, outer):
            return  # the outer model attaches the backends
        vars(model)[IN_SWAPPED] = True
    if data is None:
        raise SpecError(
            "attn_implementation='attnzoo' requires a spec: set config.attnzoo = "
            'attnzoo.AttentionSpec("linear") before the model is built, or load the '
            'model unchanged and call attnzoo.swap(model, "linear"). For one submodel of a '
            'composite model pass attn_implementation={"text_config": "attnzoo"} and set '
            "config.text_config.attnzoo"
        )
    if implementation != NAME:
        _check_disabled(model, data, implementation)
    spec = read_spec(data)
    layers = attention_layers(model)
    rest = [layer for layer in layers if layer_backend(layer.module) is None]
    if rest or not layers:  # submodels with their own specs already have backends
        backends = build_backends(model, rest, spec)
        warn_of_image_masks(model, rest, backends)
        attach(rest, backends)
        update_row_hooks(model)
    if implementation == NAME:
        write_config(model.config, spec)


def _check_disabled(model: PreTrainedModel, spec: Any, implementation: str) -> None:
    """Warn that a model is built with its swap disabled."""
    backend = spec.get("backend") if isinstance(spec, Mapping) else spec
    if seam.is_of_another_package(implementation):
        raise SpecError(
            f"config.attnzoo names backend {backend!r}, but attn_implementation="
            f"{implementation!r}, which another package has registered, would ignore it and run "
            "softmax. vLLM serves a swapped model with the plug-in attnzoo-vllm "
            "(docs/serving.md). To run the model without its swap, delete config.attnzoo"
        )
    warn(
        f"{type(model).__name__} runs attn_implementation={implementation!r}, as requested; the "
        f"swap to {backend!r} in its config is disabled. "
        "model.set_attn_implementation('attnzoo') enables it"
    )
