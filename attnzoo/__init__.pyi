# The public names; attnzoo/__init__.py reads them from here (attnzoo/lazy_names.py). The modules of
# register_feature_map and register_gate register the built-in names first, which reserves them.
from attnzoo import ops as ops
from attnzoo import testing as testing
from attnzoo import training as training
from attnzoo.backends.feature_maps.base import FeatureMap as FeatureMap
from attnzoo.backends.feature_maps.base import register_feature_map as register_feature_map
from attnzoo.backends.gates.decays import Gate as Gate
from attnzoo.backends.gates.decays import register_gate as register_gate
from attnzoo.contract.backend import AttentionBackend as AttentionBackend
from attnzoo.contract.backend import register as register
from attnzoo.contract.config import BackendConfig as BackendConfig
from attnzoo.contract.config import Geometry as Geometry
from attnzoo.contract.inputs import AttentionInputs as AttentionInputs
from attnzoo.contract.masks import AttentionMask as AttentionMask
from attnzoo.contract.states import AttentionOutput as AttentionOutput
from attnzoo.errors import SwapWarning as SwapWarning
from attnzoo.evaluation.memory import estimate_memory as estimate_memory
from attnzoo.hf.context_parallel import context_parallel as context_parallel
from attnzoo.hf.describe import describe as describe
from attnzoo.hf.models.positions import extend_positions as extend_positions
from attnzoo.hf.models.speed_up import speed_up as speed_up
from attnzoo.hf.pruning import prune_heads as prune_heads
from attnzoo.hf.stock.convert import convert as convert
from attnzoo.hf.swap import restore as restore
from attnzoo.hf.swap import swap as swap
from attnzoo.registry import available_backends as available_backends
from attnzoo.registry import get_backend as get_backend
from attnzoo.spec import AttentionSpec as AttentionSpec

__version__: str
