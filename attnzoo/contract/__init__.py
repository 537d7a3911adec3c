"""What a backend is: its base class and config, the inputs of a call, masks, sequences and states.

The names below are what a backend of your own needs (docs/extending.md).

Letters of shapes mean the same in every module: B batch, H query heads, Hkv key heads, G = H / Hkv
query heads per key head, T queries (or tokens, where queries and keys are of the same tokens),
S keys, D key size, E value size, F features of a query or key, C tokens of a chunk, M hidden size.
A module that needs others, or one of these for something else, says so.
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
from attnzoo.contract.sequences import Sequences
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
    "Sequences",
    "impl_names",
    "register",
    "register_implementation",
    "select",
]
