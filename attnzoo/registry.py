"""Backends by name: built-in ones are imported on first use, plugins are found by entry point."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from typing import Any

from attnzoo import backends
from attnzoo.contract.backend import BACKENDS, BUILT_IN_MODULES, AttentionBackend
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.errors import (
    ConfigError,
    UnknownBackendError,
    UnsupportedError,
    did_you_mean,
    short_repr,
)

ENTRY_POINT_GROUP = "attnzoo.backends"
BUILTIN = {  # name -> module, imported on first use; these names are reserved
    module.name: f"{BUILT_IN_MODULES}.{module.name}"
    for module in iter_modules(backends.__path__)
    if not module.ispkg
}


@cache
def _plugins() -> dict[str, list[EntryPoint]]:
    plugins: dict[str, list[EntryPoint]] = {}
    for point in sorted(set(entry_points(group=ENTRY_POINT_GROUP))):
        plugins.setdefault(point.name, []).append(point)
    return plugins


def _load_plugin(name: str) -> None:
    """Import the plugin with the entry point ``name``, which must register that name."""
    point, *others = _plugins()[name]
    rivals = [BUILTIN[name]] if name in BUILTIN else [other.value for other in others]
    if rivals:
        raise ConfigError(
            f"The backend name {name!r} of the plugin {point.value!r} is also that of "
            f"{', '.join(map(repr, rivals))}; uninstall one, or rename it."
        )
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The plugin {point.value!r} for backend {name!r} cannot be imported: {error}."
        ) from error
    if BACKENDS.get(name) is not loaded:
        raise ConfigError(
            f"The plugin {point.value!r} for backend {name!r} does not register this name; "
            f"decorate the class with @attnzoo.register({name!r})."
        )


def available_backends() -> list[str]:
    """Return the names of all backends: built in, registered by import, and installed plugins.

    Example:
        >>> attnzoo.available_backends()[:3]
        ['block_sparse', 'delta', 'flash']
    """
    return sorted({*BUILTIN, *BACKENDS, *_plugins()})


def get_backend(name: str) -> type[AttentionBackend]:
    """Return the backend class called ``name``; its module is imported on first use.

    Raises:
        UnknownBackendError: No backend has this name.
        ConfigError: The plugin of this name cannot be imported or does not register it, or another
            backend has the same name.

    Example:
        >>> attnzoo.get_backend("linear").config_class.__name__
        'LinearConfig'
    """
    if not isinstance(name, str):
        raise UnknownBackendError(
            f"A backend is given by name, got {short_repr(name)} of type {type(name).__name__}."
        )
    if name not in BACKENDS and name in _plugins():
        _load_plugin(name)
    if name not in BACKENDS and name in BUILTIN:
        import_module(BUILTIN[name])
    if name in BACKENDS:
        return BACKENDS[name]
    names = available_backends()
    raise UnknownBackendError(
        f"No attention backend is called {short_repr(name)}.{did_you_mean(name, names)} "
        f"Available: {', '.join(names)}."
    )


def build_backend(
    name: str, options: Mapping[str, Any] | BackendConfig, geometry: Geometry
) -> AttentionBackend:
    """Build the backend ``name`` for one layer.

    Args:
        name: Name of the backend.
        options: Its options, or its config.
        geometry: Shape of the layer.

    Raises:
        UnknownBackendError: No backend has this name.
        ConfigError: An option is invalid.
        UnsupportedError: The backend does not support the layer; the message gives every reason.
    """
    cls = get_backend(name)
    if not isinstance(options, BackendConfig):
        options = cls.config_class.from_options(name, options)
    backend = cls(options, geometry)
    reasons = backend.layer_reasons()
    if reasons:
        exact = "softmax" if name == "flash" else "flash"
        raise UnsupportedError(
            f"Layer {geometry.layer} ({geometry.name}): backend {name!r} cannot serve it: "
            f"{'; '.join(reasons)}. "
            f'Keep such layers exact with "else": "{exact}" in the spec (else_="{exact}" in '
            "Python), or name another backend for them under layers."
        )
    return backend
