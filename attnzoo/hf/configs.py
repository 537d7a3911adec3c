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

    Raises:
        UnsupportedError: Layers differ in this field; :func:`layer_config` has that of one layer.
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
