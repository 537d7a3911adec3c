"""What a backend is: its base class and config, the inputs of a call, masks and states.

The names below are what a backend of your own needs (docs/extending.md).
"""

from attnzoo.contract.backend import AttentionBackend, register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.implementation import (
    Implementation,
    impl_names,
    register_implementation,
    select,
)
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput, ImplChoice

__all__ = [
    "AttentionBackend",
    "AttentionInputs",
    "AttentionMask",
    "AttentionOutput",
    "BackendConfig",
    "Capabilities",
    "Geometry",
    "ImplChoice",
    "Implementation",
    "impl_names",
    "register",
    "register_implementation",
    "select",
]
