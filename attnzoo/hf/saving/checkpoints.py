"""What a config and a checkpoint save of a swap, and what loading them reports."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnzoo.errors import SwapWarning
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import ARCHITECTURE_PREFIX, NAME, TYPE_PREFIX
from attnzoo.hf.saving.rope import add_flat_rope


def saved_implementation(config: Any) -> str | dict[str, Any] | None:
    """Return the ``attn_implementation`` that a config saves; ``None`` if nothing is swapped.

    If only parts of a composite model run a swap, it is a mapping from sub-configs to
    implementations, the form that ``from_pretrained`` accepts.
    """
    own = read_field(config, NAME) is not None and config._attn_implementation == NAME
    parts: dict[str, Any] = {}
    for key in read_field(config, "sub_configs", {}):
        part = read_field(config, key)
        if part is not None:
            parts[key] = saved_implementation(part) or (own and part._attn_implementation)
    parts = {key: value for key, value in parts.items() if value}
    if not own:
        return parts or None
    return NAME if all(value == NAME for value in parts.values()) else {"": NAME, **parts}


def saved_config(config: Any, data: dict[str, Any], *, is_part: bool = False) -> dict[str, Any]:
    """Return what the config.json of a model holds, with the swap that it runs.

    Stock configs do not save ``attn_implementation``, and loaders of other packages ignore it, so
    the file has a type and class names, too, that are known only where attnzoo is imported.
    ``model_type`` of a config in memory is the stock one, which transformers and PEFT look up.

    Args:
        config: The config.
        data: What its stock ``to_diff_dict`` returns, which is changed.
        is_part: Whether it is the config of a part of a model.
    """
    if NAME in data and config._attn_implementation not in (None, NAME):
        del data[NAME]  # set_attn_implementation has disabled the swap
        data.pop("attn_implementation", None)
    elif hasattr(data.get(NAME), "to_dict"):  # an AttentionSpec
        data[NAME] = data[NAME].to_dict(defaults=True)
    implementation = saved_implementation(config)
    if implementation is not None:
        data["attn_implementation"] = implementation
        if not is_part:
            data["model_type"] = TYPE_PREFIX + config.model_type
    if data.get("architectures"):
        prefix = "" if implementation is None else ARCHITECTURE_PREFIX
        data["architectures"] = [prefix + stock_class_name(x) for x in data["architectures"]]
    for key in read_field(config, "sub_configs", {}):
        if isinstance(data.get(key), dict):
            saved_config(read_field(config, key), data[key], is_part=True)
    if not is_part:
        add_flat_rope(config, data)
    return data


def loaded_config(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a config.json with the stock type, and register the classes that it names.

    The names stay in the config, where engines in this process read them. Pipelines, ``transformers
    serve``, TRL and sentence-transformers look them up in the package transformers.
    """
    family = data.get("model_type")
    if not (isinstance(family, str) and family.startswith(TYPE_PREFIX)):
        return data
    data["model_type"] = family.removeprefix(TYPE_PREFIX)
    names = data.get("architectures")
    if not isinstance(names, list):
        return data
    several = [register_class(x) for x in names]
    if any(several):  # an auto class compares the names
        data["architectures"] = [stock_class_name(x) for x in names]
    return data


def register_class(name: Any) -> bool:
    """Let ``transformers.AttnzooX`` be the class ``X``, if there is one.

    Returns:
        Whether an auto class has several classes for the family of ``X``, as that of DeiT.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    stock = stock_class_name(name)
    cls = getattr(transformers, stock, None) if stock != name else None
    if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):  # untrusted
        # of the class of the module: transformers itself makes a second module at times
        setattr(type(transformers), name, cls)
    families = (x for name, x in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES"))
    several = (x for names in families for x in names.values() if isinstance(x, tuple))
    return any(stock in names for names in several)


def is_saved_swap(config: Any) -> bool:
    """Return whether a config was read from the folder of a swap, so that extras are saved too."""
    names = read_field(config, "architectures") or ()
    return any(str(name).startswith(ARCHITECTURE_PREFIX) for name in names)


def stock_class_name(architecture: Any) -> str:
    """Return the name of transformers' class for an entry of ``architectures`` in a config."""
    return str(architecture).removeprefix(ARCHITECTURE_PREFIX)


@contextmanager
def without_disabled_extras(model: Any) -> Iterator[None]:
    """Context manager under which ``save_pretrained`` omits the extras of disabled swaps.

    Warns for a part of a swapped model whose own config has no spec, as that of T5's encoder.
    """
    if _runs_without_spec(model):
        warnings.warn(
            f"this {type(model).__name__} is a part of a swapped model and is saved as a stock "
            "model, because its config has no spec; save the whole model, or swap this part",
            SwapWarning,
            stacklevel=5,
        )
    before = model._keys_to_ignore_on_save
    model._keys_to_ignore_on_save = {*(before or ()), *_disabled_extras(model)}
    try:
        yield
    finally:
        model._keys_to_ignore_on_save = before


def _runs_without_spec(model: Any) -> bool:
    """Return whether a model runs a swap that neither its config nor those of its parts have."""
    config = model.config
    parts = [read_field(config, key) for key in read_field(config, "sub_configs", {})]
    has_spec = any(read_field(x, NAME) is not None for x in (config, *parts))
    runs = config._attn_implementation == NAME
    return runs and not has_spec and any(NAME in x._modules for x in model.modules())


def _disabled_extras(model: Any) -> Iterator[str]:
    """Yield the names of the extras whose spec the saved config omits."""
    saved = {
        layer
        for inner in model.modules()
        if read_field(config := vars(inner).get("config"), NAME) is not None
        and config._attn_implementation == NAME
        for layer in inner.modules()
    }
    for name, module in model.named_modules():
        if NAME in module._modules and module not in saved:
            prefix = f"{name}.{NAME}." if name else f"{NAME}."
            yield from (prefix + key for key in module._modules[NAME].state_dict())


def report_missing_extras(model: Any, info: Any) -> None:
    """Warn if a checkpoint lacks extras that it should have; a new swap has none.

    Args:
        model: A swapped model whose weights were read.
        info: What transformers reports of them, from which extras are removed that need no report.
    """
    from attnzoo.hf.extras import layer_names, warn

    mark = f".{NAME}."
    if any(mark in str(key) for key, *_ in info.mismatched_keys):
        warn(
            "the checkpoint has parameters of backends in other shapes; it may have been saved "
            "under another swap"
        )
    backends = [
        (name, module._modules[NAME])
        for name, module in model.named_modules()
        if NAME in module._modules
    ]
    absent = {key for key in info.missing_keys if mark in key}
    if not absent:
        return
    extras = {
        f"{name}{mark}{key}": (name, id(x))
        for name, backend in backends
        for key, x in backend.state_dict(keep_vars=True).items()
    }
    loaded = {tensor for key, (_, tensor) in extras.items() if key not in absent}  # or shared
    layers = {name for key, (name, tensor) in extras.items() if tensor not in loaded}
    if loaded and layers:
        warn(
            f"the checkpoint lacks weights of the backends of {layer_names(layers)}, which are "
            "initialised as in a new swap; it may have been saved under another swap"
        )
    elif not loaded and not is_saved_swap(model.config):
        info.missing_keys -= absent
