"""Efficient attention for Hugging Face transformers: swap it by config, recover, compare.

Importing this package is cheap: names are resolved on first use, and the hooks in transformers are
installed when transformers itself is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnzoo.autoload import after_import

__version__ = "0.1.0"

_PUBLIC = {
    "AttentionBackend": "attnzoo.backends.base",
    "AttentionInputs": "attnzoo.backends.inputs",
    "AttentionMask": "attnzoo.masks",
    "AttentionOutput": "attnzoo.state",
    "AttentionSpec": "attnzoo.spec",
    "BackendConfig": "attnzoo.backends.config",
    "Geometry": "attnzoo.backends.config",
    "available_backends": "attnzoo.registry",
    "context_parallel": "attnzoo.integrations.context_parallel",
    "describe": "attnzoo.integrations.describe",
    "extend_positions": "attnzoo.integrations.positions",
    "get_backend": "attnzoo.registry",
    "register": "attnzoo.backends.base",
    # where our own are registered already, so that one of yours cannot take their names
    "register_feature_map": "attnzoo.backends.feature_map_config",
    "register_gate": "attnzoo.backends.gated_linear",
    "restore": "attnzoo.integrations.convert",
    "swap": "attnzoo.integrations.convert",
}

if TYPE_CHECKING:
    from attnzoo.backends.base import AttentionBackend, register
    from attnzoo.backends.config import BackendConfig, Geometry
    from attnzoo.backends.feature_maps import register_feature_map
    from attnzoo.backends.gates import register_gate
    from attnzoo.backends.inputs import AttentionInputs
    from attnzoo.integrations.context_parallel import context_parallel
    from attnzoo.integrations.convert import restore, swap
    from attnzoo.integrations.describe import describe
    from attnzoo.integrations.positions import extend_positions
    from attnzoo.masks import AttentionMask
    from attnzoo.registry import available_backends, get_backend
    from attnzoo.spec import AttentionSpec
    from attnzoo.state import AttentionOutput

__all__ = [
    "AttentionBackend",
    "AttentionInputs",
    "AttentionMask",
    "AttentionOutput",
    "AttentionSpec",
    "BackendConfig",
    "Geometry",
    "available_backends",
    "context_parallel",
    "describe",
    "extend_positions",
    "get_backend",
    "register",
    "register_feature_map",
    "register_gate",
    "restore",
    "swap",
]


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'attnzoo' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *_PUBLIC})


after_import("transformers.modeling_utils", "attnzoo.integrations.install", "install")
