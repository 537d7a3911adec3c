"""The options of each backend that commands try, read from ``AttentionBackend.presets``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attnzoo.registry import get_backend
from attnzoo.spec import AttentionSpec


def preset_options(name: str, *situations: str) -> tuple[Mapping[str, Any], ...]:
    """Return the options of a backend in a situation; the defaults if it has no presets for it.

    Args:
        name: Name of the backend.
        situations: Keys of ``AttentionBackend.presets``; the first with an entry is used.

    Raises:
        UnknownBackendError: No backend has this name.
    """
    presets = get_backend(name).presets
    return next((presets[key] for key in situations if key in presets), ({},))


def preset_specs(names: Iterable[str], *situations: str) -> list[AttentionSpec]:
    """Return a spec for each preset of the given backends.

    Args:
        names: Names of backends.
        situations: As in ``preset_options``.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    return [
        AttentionSpec(name, **options)
        for name in names
        for options in preset_options(name, *situations)
    ]
