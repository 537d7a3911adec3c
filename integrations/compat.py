"""Differences between transformers versions, and the internals of transformers that we read.

Patches of transformers are in :mod:`attnzoo.integrations.patches`.
Tested with transformers 5.17 to 5.23.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.utils.output_capturing import _active_collector as active_collector

from attnzoo.integrations.patches import NAME, RECORDING

__all__ = [
    "active_collector",
    "all_configs",
    "bidirectional_mask_function",
    "calls_attention_interface",
    "can_set_implementation",
    "causal_mask_function",
    "family_uses_interface",
    "function_cells",
    "is_recording",
    "materialise_mask",
    "pretrained_models",
    "reads_name",
    "set_implementation",
    "sub_configs",
    "submodels",
]

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name of the interface in modelling files


def _forward_code(module: nn.Module) -> Any:
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def calls_attention_interface(module: nn.Module) -> bool:
    """Return whether a module's forward calls the attention interface."""
    code = _forward_code(module)
    return code is not None and INTERFACE in code.co_names


def family_uses_interface(family: str) -> bool:
    """Return whether the modelling code in a model folder of transformers uses the interface."""
    folder = Path(transformers.__file__).parent / "models" / family
    return any(INTERFACE in path.read_text("utf-8") for path in folder.glob("modeling_*.py"))


def reads_name(module: nn.Module, name: str) -> bool:
    """Return whether a module's forward uses ``name`` as an argument or attribute."""
    code = _forward_code(module)
    if code is None:
        return False
    nested = (item for const in code.co_consts if isinstance(const, tuple) for item in const)
    return name in code.co_names or name in code.co_consts or name in nested


def function_cells(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the closure variables of a function by name; mask functions keep parameters there."""
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def materialise_mask(**arguments: Any) -> Tensor:
    """Build the dense mask of a mask function, ``[B, 1, T, S]`` bool."""
    mask = sdpa_mask(**arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    assert mask is not None
    return mask


def all_configs(model: PreTrainedModel) -> list[Any]:
    """Return the configs and sub-configs of a model and its submodules, each once, in order."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            configs.update((id(inner), inner) for inner in _with_sub_configs(config))
    return list(configs.values())


def pretrained_models(model: nn.Module) -> list[PreTrainedModel]:
    """Return all transformers models in ``model``, outermost first."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def sub_configs(config: Any) -> dict[str, Any]:
    """Return the sub-configs of a config by field name."""
    found = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
    return {key: inner for key, inner in found.items() if inner is not None}


def submodels(model: nn.Module, config: Any) -> list[PreTrainedModel]:
    """Return the outermost models in ``model`` that were built from a sub-config, or a copy."""
    outermost: list[PreTrainedModel] = []
    for inner in pretrained_models(model):
        same = inner.config is config or type(inner.config) is type(config)
        if same and not any(inner in set(outer.modules()) for outer in outermost):
            outermost.append(inner)
    return outermost


def set_implementation(model: PreTrainedModel, name: str, layers: Iterable[nn.Module]) -> None:
    """Set the attention implementation of ``layers`` and of the models that create their masks.

    ``set_attn_implementation`` does not reach modules with a copied config (the encoder and decoder
    of T5) in older transformers, nor composite models where only the submodels use the interface.
    """
    if can_set_implementation(model):
        model.set_attn_implementation(name)
    used = {id(config) for config in map(_config_of, model.modules()) if config is not None}
    for config in _with_sub_configs(model.config):
        if id(config) not in used:  # a copy of it is
            config._attn_implementation_internal = name
    for config in _attention_configs(model, layers):
        config._attn_implementation_internal = name


def update_copied_configs(model: PreTrainedModel) -> None:
    """Disable or enable a swap in the configs that swapped modules copied from their model's.

    ``set_attn_implementation`` does not reach them; see :func:`set_implementation`.
    """
    layers = [module for module in model.modules() if NAME in module._modules]
    own = {id(config) for config in _with_sub_configs(model.config)}
    name = model.config._attn_implementation
    for config in _attention_configs(model, layers):
        if id(config) not in own and (config._attn_implementation == NAME) != (name == NAME):
            config._attn_implementation_internal = name


def _config_of(module: nn.Module) -> Any:
    return vars(module).get("config")


def _attention_configs(model: nn.Module, layers: Iterable[nn.Module]) -> list[Any]:
    """Return the configs of attention layers and of the models that create their masks."""
    found = set(layers)
    return [
        _config_of(module)
        for module in model.modules()
        if module in found
        or (isinstance(module, PreTrainedModel) and not found.isdisjoint(module.modules()))
    ]


def complete_class_tables(cls: type) -> None:
    """Let models that select attention classes by implementation be built under ``"attnzoo"``.

    Falcon, GPT-J and SAM's vision encoder look a class up by ``config._attn_implementation``. These
    classes do not use the attention interface, so such layers keep their stock attention.
    """
    for table in _class_tables(cls).values():
        table.setdefault(NAME, table.get("sdpa", table["eager"]))


def class_table_text(model: nn.Module) -> str:
    """Return the tables from which a model selects attention classes, for a message, or ``""``."""
    tables = _class_tables(type(model))
    return f" (its classes come from {', '.join(tables)})" if tables else ""


def _class_tables(cls: type) -> dict[str, dict[str, type]]:
    """Return the tables of attention classes by implementation in a model's modelling files."""
    return {
        name: table
        for base in cls.__mro__
        for name, table in vars(sys.modules.get(base.__module__, object)).items()
        if name.endswith("ATTENTION_CLASSES") and isinstance(table, dict) and "eager" in table
    }


def _with_sub_configs(config: Any) -> Iterator[Any]:
    yield config
    for inner in sub_configs(config).values():
        yield from _with_sub_configs(inner)


def can_set_implementation(model: PreTrainedModel) -> bool:
    """Return whether a model's own modelling code uses the attention interface."""
    return bool(model._can_set_attn_implementation())


def is_recording(cache: Cache) -> bool:
    """Return whether a cache records past tokens to remove them later (assisted decoding)."""
    return bool(getattr(cache, RECORDING, False))
