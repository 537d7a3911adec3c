"""From a name to a backend class: modules load on first use, plugins are found by entry point."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from attnzoo.backends.base import BACKENDS, BUILTIN, AttentionBackend
from attnzoo.backends.config import Geometry
from attnzoo.errors import ConfigError, UnknownBackendError, UnsupportedError, did_you_mean

ENTRY_POINT_GROUP = "attnzoo.backends"


@cache
def _plugins() -> dict[str, list[EntryPoint]]:
    plugins: dict[str, list[EntryPoint]] = {}
    for point in sorted(set(entry_points(group=ENTRY_POINT_GROUP))):
        plugins.setdefault(point.name, []).append(point)
    return plugins


def _load_plugin(name: str) -> None:
    """Import the plugin that announces ``name``, and see that it registers itself."""
    point, *others = _plugins()[name]
    rivals = [BUILTIN[name]] if name in BUILTIN else [other.value for other in others]
    if rivals:
        raise ConfigError(
            f"The name {name!r} is announced by the plugin {point.value!r} and held by "
            f"{', '.join(map(repr, rivals))}; uninstall one, or have it take another name."
        )
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The plugin {point.value!r}, announced as backend {name!r}, cannot be loaded: {error}."
        ) from error
    if BACKENDS.get(name) is not loaded:
        raise ConfigError(
            f"The plugin {point.value!r} is announced as backend {name!r} but does not register "
            f"itself under that name; decorate the class with @attnzoo.register({name!r})."
        )


def available_backends() -> list[str]:
    """Return the names of all backends: built in, registered by import, and installed plugins."""
    return sorted({*BUILTIN, *BACKENDS, *_plugins()})


def get_backend(name: str) -> type[AttentionBackend]:
    """Return the backend class called ``name``; its module is imported on first use.

    Raises:
        UnknownBackendError: No backend has this name.
        ConfigError: A plugin claims the name but cannot be loaded, does not register it, or
            another holds it.
    """
    if not isinstance(name, str):
        raise UnknownBackendError(
            f"A backend is asked for by name, got {name!r} of type {type(name).__name__}."
        )
    if name not in BACKENDS and name in _plugins():
        _load_plugin(name)
    if name not in BACKENDS and name in BUILTIN:
        import_module(BUILTIN[name])
    if name in BACKENDS:
        return BACKENDS[name]
    names = available_backends()
    raise UnknownBackendError(
        f"No attention backend is called {name!r}.{did_you_mean(name, names)} "
        f"Available: {', '.join(names)}."
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
        exact = "softmax" if name == "flash" else "flash"  # what else the user could take
        raise UnsupportedError(
            f"Layer {geometry.layer} ({geometry.name}): backend {name!r} cannot serve it: "
            f"{'; '.join(reasons)}. "
            f'Keep such layers exact with "else": "{exact}" in the spec (else_="{exact}" in '
            "Python), or name another backend for them under layers."
        )
    return backend
