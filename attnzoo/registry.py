"""From a name to a backend class; modules are imported on first use, and plugins are found by entry point."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from attnzoo.backends.base import BACKENDS, AttentionBackend
from attnzoo.backends.config import Geometry
from attnzoo.errors import ConfigError, UnknownBackendError, UnsupportedError, did_you_mean

ENTRY_POINT_GROUP = "attnzoo.backends"

_BUILTIN = {
    "softmax": "attnzoo.backends.softmax",
    "flash": "attnzoo.backends.flash",
    "linear": "attnzoo.backends.linear",
    "gated_linear": "attnzoo.backends.gated_linear",
}


@cache
def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def available_backends() -> list[str]:
    """Return the names of all backends: built in, registered by import, and installed plugins."""
    return sorted({*_BUILTIN, *BACKENDS, *_plugins()})


def get_backend(name: str) -> type[AttentionBackend]:
    """Return the backend class called ``name``; its module is imported on first use.

    Raises:
        UnknownBackendError: No backend has this name.
        ConfigError: A plugin claims the name but does not register it.
    """
    if not isinstance(name, str):
        raise UnknownBackendError(
            f"A backend is asked for by name, got {name!r} of type {type(name).__name__}."
        )
    if name not in BACKENDS and name in _BUILTIN:
        import_module(_BUILTIN[name])
    if name not in BACKENDS and name in _plugins():
        point = _plugins()[name]
        loaded = point.load()
        if BACKENDS.get(name) is not loaded:
            raise ConfigError(
                f"The plugin {point.value!r} is announced as backend {name!r} but does not register itself "
                f"under that name; decorate the class with @attnzoo.register({name!r})."
            )
    if name in BACKENDS:
        return BACKENDS[name]
    names = available_backends()
    raise UnknownBackendError(
        f"No attention backend is called {name!r}.{did_you_mean(name, names)} Available: {', '.join(names)}."
    )


def build_backend(name: str, options: dict[str, object], geometry: Geometry) -> AttentionBackend:
    """Make the backend ``name`` for one layer.

    Raises:
        UnknownBackendError: No backend has this name.
        ConfigError: An option is wrong.
        UnsupportedError: The backend cannot serve the layer; every reason is given.
    """
    cls = get_backend(name)
    backend = cls(cls.config_class.from_options(name, options), geometry)
    reasons = backend.layer_reasons()
    if reasons:
        raise UnsupportedError(
            f"Layer {geometry.layer} ({geometry.name}): backend {name!r} cannot serve it: {'; '.join(reasons)}. "
            'Keep such layers exact with "else": "flash" in the spec (else_="flash" in Python), or name another '
            "backend for them under layers."
        )
    return backend
