"""Efficient attention for Hugging Face transformers: swap it by config, recover, compare.

Importing this package is fast: names are imported on first use, and each patch of transformers is
applied when the module that it patches is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnzoo.autoload import after_import
from attnzoo.hf.patches import PATCHES
from attnzoo.hf.peft_patches import PEFT_PATCHES

__version__ = "0.1.0"

_PUBLIC = {
    "AttentionBackend": "attnzoo.contract.backend",
    "AttentionInputs": "attnzoo.contract.inputs",
    "AttentionMask": "attnzoo.contract.masks",
    "AttentionOutput": "attnzoo.contract.states",
    "AttentionSpec": "attnzoo.spec",
    "BackendConfig": "attnzoo.contract.config",
    "FeatureMap": "attnzoo.backends.feature_maps.base",
    "Gate": "attnzoo.backends.gates.base",
    "Geometry": "attnzoo.contract.config",
    "SwapWarning": "attnzoo.errors",
    "available_backends": "attnzoo.registry",
    "check_kernels": "attnzoo.evaluation.kernel_checks",
    "context_parallel": "attnzoo.hf.context_parallel",
    "convert_heads": "attnzoo.hf.grouped_heads",
    "describe": "attnzoo.hf.describe",
    "estimate_memory": "attnzoo.evaluation.memory_fit",
    "extend_positions": "attnzoo.hf.positions",
    "get_backend": "attnzoo.registry",
    "prune_heads": "attnzoo.hf.heads",
    "register": "attnzoo.contract.backend",
    # these modules register the built-in names first, so that they are reserved
    "register_feature_map": "attnzoo.backends.feature_maps.config",
    "register_gate": "attnzoo.backends.gated_linear",
    "restore": "attnzoo.hf.convert",
    "speed_up": "attnzoo.hf.speed_up",
    "swap": "attnzoo.hf.convert",
}

if TYPE_CHECKING:
    from attnzoo.backends.feature_maps.base import FeatureMap, register_feature_map
    from attnzoo.backends.gates.base import Gate, register_gate
    from attnzoo.contract.backend import AttentionBackend, register
    from attnzoo.contract.config import BackendConfig, Geometry
    from attnzoo.contract.inputs import AttentionInputs
    from attnzoo.contract.masks import AttentionMask
    from attnzoo.contract.states import AttentionOutput
    from attnzoo.errors import SwapWarning
    from attnzoo.evaluation.kernel_checks import check_kernels
    from attnzoo.evaluation.memory_fit import estimate_memory
    from attnzoo.hf.context_parallel import context_parallel
    from attnzoo.hf.convert import restore, swap
    from attnzoo.hf.describe import describe
    from attnzoo.hf.grouped_heads import convert_heads
    from attnzoo.hf.heads import prune_heads
    from attnzoo.hf.positions import extend_positions
    from attnzoo.hf.speed_up import speed_up
    from attnzoo.registry import available_backends, get_backend
    from attnzoo.spec import AttentionSpec

__all__ = [
    "AttentionBackend",
    "AttentionInputs",
    "AttentionMask",
    "AttentionOutput",
    "AttentionSpec",
    "BackendConfig",
    "FeatureMap",
    "Gate",
    "Geometry",
    "SwapWarning",
    "available_backends",
    "check_kernels",
    "context_parallel",
    "convert_heads",
    "describe",
    "estimate_memory",
    "extend_positions",
    "get_backend",
    "prune_heads",
    "register",
    "register_feature_map",
    "register_gate",
    "restore",
    "speed_up",
    "swap",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'attnzoo' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*globals(), *_PUBLIC})


after_import({**PATCHES, **PEFT_PATCHES})
