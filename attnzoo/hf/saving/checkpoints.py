"""What a config and a checkpoint save of a swap, and what loading them reports.

Imports nothing of transformers: its patches call this module, possibly while it is half loaded.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from attnzoo.errors import CheckpointMismatchError, SpecError, SwapWarning
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


def saved_config(config: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return the plain data of a config with the swap that its model runs.

    The spec is omitted if another ``attn_implementation`` has disabled the swap.

    Args:
        config: The config.
        data: The return value of its stock ``to_dict``, which is changed.
    """
    if NAME in data and config._attn_implementation not in (None, NAME):
        del data[NAME]
        data.pop("attn_implementation", None)
    elif hasattr(data.get(NAME), "to_dict"):  # an AttentionSpec
        data[NAME] = data[NAME].to_dict(defaults=True)
    implementation = saved_implementation(config)
    if implementation is not None:
        data["attn_implementation"] = implementation
    if data.get("architectures"):
        prefix = "" if implementation is None else ARCHITECTURE_PREFIX
        data["architectures"] = [prefix + stock_class_name(x) for x in data["architectures"]]
    return data


def saved_json(config: Any, text: str) -> str:
    """Return the text of a config.json, with flat RoPE fields and the type that a saved swap has.

    Both are in the file only: transformers reads ``model_type`` of configs in many places.

    Args:
        config: The config.
        text: What its stock ``to_json_string`` returns.
    """
    data = json.loads(text)
    add_flat_rope(config, data)
    if saved_implementation(config) is not None:
        data["model_type"] = TYPE_PREFIX + config.model_type
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def is_saved_swap(config: Any) -> bool:
    """Return whether a config was read from the folder of a swap, which ran when it was saved.

    The config itself may have lost its ``attn_implementation``: ``transformers serve`` passes
    ``attn_implementation=None`` to ``from_pretrained``, which replaces that of the file.
    """
    names = read_field(config, "architectures") or ()
    has_prefix = any(str(name).startswith(ARCHITECTURE_PREFIX) for name in names)
    return has_prefix and read_field(config, NAME) is not None


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


def load(from_pretrained: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the stock ``from_pretrained``; explain errors of swapped models, and report extras.

    Raises:
        CheckpointMismatchError: Weights of a swapped model have other shapes.
        SpecError: A file with weights of a swapped model cannot be read.
    """
    from safetensors import SafetensorError

    if NAME in kwargs:
        raise SpecError(
            f"from_pretrained takes no argument {NAME!r}. Swap the loaded model, "
            f"attnzoo.swap(model, {kwargs[NAME]!r}); or set config.attnzoo, and pass config=config "
            "and attn_implementation='attnzoo'"
        )
    with_info = kwargs.pop("output_loading_info", False)
    try:
        model, info = from_pretrained(cls, *args, output_loading_info=True, **kwargs)
    except (SafetensorError, RuntimeError) as error:
        from attnzoo.hf.saving.files import has_swap

        path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        is_mismatch = isinstance(error, RuntimeError) and "mismatch" in str(error)
        known = isinstance(error, SafetensorError) or is_mismatch
        if not known or not has_swap(path, kwargs.get("config")):
            raise
        raise (CheckpointMismatchError if is_mismatch else SpecError)(
            f"The weights in {str(path)!r} cannot be loaded into {cls.__name__} with the swap "
            f"in its config ({error}). The file may be truncated, or saved under another swap; "
            "nothing was loaded."
        ) from error
    _report_missing_extras(model, info["missing_keys"])
    return (model, info) if with_info else model


def _report_missing_extras(model: Any, missing: Iterable[str]) -> None:
    """Warn if a checkpoint has only a part of the extras; if it has none, the swap is new."""
    absent = {key for key in missing if f".{NAME}." in key}
    if not absent:
        return
    from attnzoo.hf.swap.extras import layer_names, warn

    extras = {
        f"{name}.{NAME}.{key}": (name, id(x))
        for name, module in model.named_modules()
        if NAME in module._modules
        for key, x in module._modules[NAME].state_dict(keep_vars=True).items()
        if key not in module._modules[NAME].optional_buffers
    }
    loaded = {tensor for key, (_, tensor) in extras.items() if key not in absent}  # or shared
    layers = {name for key, (name, tensor) in extras.items() if tensor not in loaded}
    if loaded and layers:
        warn(
            f"the checkpoint lacks weights of the backends of {layer_names(layers)}, which are "
            "initialised as in a new swap; it may have been saved under another swap"
        )
