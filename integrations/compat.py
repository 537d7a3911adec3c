"""What differs between transformers versions, and what of its insides we touch: all in this one file.

Tested with transformers 5.17 to 5.23.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

__all__ = [
    "bidirectional_mask_function",
    "calls_attention_interface",
    "causal_mask_function",
    "function_cells",
    "reads_name",
    "sdpa_mask",
    "sub_configs",
    "wants_weights",
]

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name by which modelling files call the interface


def _forward_code(module: nn.Module) -> Any:
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def calls_attention_interface(module: nn.Module) -> bool:
    """Whether a module's own forward hands queries, keys and values to the attention interface."""
    code = _forward_code(module)
    return code is not None and INTERFACE in code.co_names


def reads_name(module: nn.Module, name: str) -> bool:
    """Whether a module's forward mentions ``name`` as an argument or attribute."""
    code = _forward_code(module)
    if code is None:
        return False
    nested = (item for const in code.co_consts if isinstance(const, tuple) for item in const)
    return name in code.co_names or name in code.co_consts or name in nested


def function_cells(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a nested function closes over, by name; mask functions hide their parameters there."""
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def wants_weights(kwargs: dict[str, Any]) -> bool:
    """Whether the caller asked for ``output_attentions``; models do not always pass the flag on."""
    if kwargs.get("output_attentions"):
        return True
    if torch.compiler.is_compiling():
        return False
    from transformers.utils.output_capturing import _active_collector

    collected = _active_collector.get()
    return bool(collected) and any("attentions" in key for key in collected)


def sub_configs(config: Any) -> Iterator[Any]:
    """Yield a config and all configs inside it."""
    yield config
    for key in getattr(config, "sub_configs", {}):
        inner = getattr(config, key, None)
        if inner is not None:
            yield from sub_configs(inner)


def can_set_implementation(model: PreTrainedModel) -> bool:
    """Whether the model's code goes through the attention interface at all."""
    return bool(model._can_set_attn_implementation())
