"""Read the fields of a config that may lack them.

Every such read goes through here (tests/test_structure.py): in a config whose layers differ, as
Gemma 4's, even ``getattr(config, name, None)`` raises for the fields in which they do.
Imports nothing of transformers: patches call this module, possibly while it is half loaded.
"""

from __future__ import annotations

from typing import Any

from attnzoo.errors import UnsupportedError


def read_field(config: Any, name: str, default: Any = None) -> Any:
    """Return a field of a config, or ``default`` if the config has no such field.

    Args:
        config: A config of transformers or PEFT, or ``None``.
        name: The field.
        default: What is returned if there is none.
    """
    try:
        return getattr(config, name, default)
    except RuntimeError as error:  # AmbiguousGlobalPerLayerAttributeError
        raise UnsupportedError(
            f"The layers of this {config.model_type} differ in {name!r}, so there is no value "
            "for the whole model; use a model whose layers have the same one"
        ) from error


def layer_config(config: Any, number: int) -> Any:
    """Return the config of layer ``number``, where layers differ, else the config itself."""
    if not getattr(config, "is_heterogeneous", False):
        return config
    layers = config.per_layer_config
    return layers[number] if number < len(layers) else config


def has_field(config: Any, name: str) -> bool:
    """Return whether a config has a field, with one value or with one for each layer."""
    try:
        return hasattr(config, name)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError
        return True


def set_dropout(config: Any, original: Any = None) -> None:
    """Set every dropout of a config, its parts included, to 0, or to that of another config.

    Args:
        config: A config of transformers, which is changed: of a model that is not built yet if
            dropouts become 0, because modules read them when they are built, or in each call.
        original: The config of the same model from which dropouts are restored; 0 when ``None``.
    """
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, name, type(value)(0) if original is None else getattr(original, name))
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            set_dropout(part, None if original is None else getattr(original, name))
