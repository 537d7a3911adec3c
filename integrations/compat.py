"""What differs between transformers versions, and what of its insides we touch: all in this file.

Tested with transformers 5.17 to 5.23.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.utils.output_capturing import _active_collector

__all__ = [
    "all_configs",
    "bidirectional_mask_function",
    "calls_attention_interface",
    "can_set_implementation",
    "causal_mask_function",
    "family_uses_interface",
    "function_cells",
    "is_recording",
    "materialise_mask",
    "models",
    "note_recording",
    "parts",
    "reads_name",
    "set_implementation",
    "sub_configs",
    "wants_weights",
    "write_implementation",
]

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name by which modelling files call the interface
_RECORDING = "_attnzoo_recording"


def _forward_code(module: nn.Module) -> Any:
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def calls_attention_interface(module: nn.Module) -> bool:
    """Whether a module's own forward hands queries, keys and values to the attention interface."""
    code = _forward_code(module)
    return code is not None and INTERFACE in code.co_names


def family_uses_interface(family: str) -> bool:
    """Whether modelling code in one of transformers' model folders names the interface."""
    folder = Path(transformers.__file__).parent / "models" / family
    return any(INTERFACE in path.read_text("utf-8") for path in folder.glob("modeling_*.py"))


def reads_name(module: nn.Module, name: str) -> bool:
    """Whether a module's forward mentions ``name`` as an argument or attribute."""
    code = _forward_code(module)
    if code is None:
        return False
    nested = (item for const in code.co_consts if isinstance(const, tuple) for item in const)
    return name in code.co_names or name in code.co_consts or name in nested


def function_cells(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a nested function closes over, by name; mask functions hide parameters there."""
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def materialise_mask(**arguments: Any) -> Tensor:
    """Build the whole mask that a mask function stands for, ``[B, 1, T, S]`` bool."""
    mask = sdpa_mask(**arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    assert mask is not None
    return mask


def wants_weights(kwargs: dict[str, Any]) -> bool:
    """Whether the caller asked for ``output_attentions``; models do not always pass the flag on."""
    if kwargs.get("output_attentions"):
        return True
    if not torch.compiler.is_compiling():
        collected = _active_collector.get()
    else:  # a context variable cannot be traced; while tracing, transformers uses a plain one
        collected = _active_collector.global_var if _active_collector.compiling else None
    return bool(collected) and any("attentions" in key for key in collected)


def all_configs(model: PreTrainedModel) -> list[Any]:
    """Return the configs of a model, of all modules inside it, and theirs, each once, in order."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            found.update((id(inner), inner) for inner in _with_inner(config))
    return list(found.values())


def models(model: nn.Module) -> list[PreTrainedModel]:
    """Return a model and the models inside it, from the outermost inwards."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def sub_configs(config: Any) -> dict[str, Any]:
    """Return the sub-configs that a config holds, by field."""
    found = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
    return {key: inner for key, inner in found.items() if inner is not None}


def parts(model: nn.Module, config: Any) -> list[PreTrainedModel]:
    """Return the outermost models inside ``model`` that were built from a sub-config, or a copy."""
    found: list[PreTrainedModel] = []
    for part in models(model):
        same = part.config is config or type(part.config) is type(config)
        if same and not any(part in set(outer.modules()) for outer in found):
            found.append(part)
    return found


def set_implementation(model: PreTrainedModel, name: str, layers: Iterable[nn.Module]) -> None:
    """Make ``layers``, and the models that make masks for them, run the implementation ``name``.

    Older transformers leave alone what has copied its config, as the halves of T5 have.
    """
    if can_set_implementation(model):  # of a whole whose parts alone go through the interface
        model.set_attn_implementation(name)
    swapped = set(layers)
    for module in model.modules():
        makes_masks = isinstance(module, PreTrainedModel) and not swapped.isdisjoint(
            module.modules()
        )
        if makes_masks or module in swapped:
            config: Any = module.config
            config._attn_implementation_internal = name


def _with_inner(config: Any) -> Iterator[Any]:
    yield config
    for inner in sub_configs(config).values():
        yield from _with_inner(inner)


def write_implementation(name: str) -> None:
    """Let a config that holds a swap write ``attn_implementation`` too, which none does by itself.

    A model sets it as a plain field, but a config that was loaded and is saved again has lost it.
    Where only parts are swapped, it is a mapping by sub-config, the form in which it is asked for:
    a config resets what its sub-configs say.
    """
    to_dict = PreTrainedConfig.to_dict

    def asked(config: Any) -> str | dict[str, Any] | None:
        if getattr(config, name, None) is not None and config._attn_implementation == name:
            return name
        found = {key: asked(inner) for key, inner in sub_configs(config).items()}
        return {key: inner for key, inner in found.items() if inner is not None} or None

    @wraps(to_dict)
    def to_dict_with_implementation(self: PreTrainedConfig) -> dict[str, Any]:
        data, implementation = to_dict(self), asked(self)
        if implementation is not None:
            data["attn_implementation"] = implementation
        return data

    PreTrainedConfig.to_dict = to_dict_with_implementation  # type: ignore[method-assign]


def can_set_implementation(model: PreTrainedModel) -> bool:
    """Whether the model's code goes through the attention interface at all."""
    return bool(model._can_set_attn_implementation())


def note_recording() -> None:
    """Let a cache remember that it records: it tells only the layers that it has at the time."""
    activate = Cache.activate_past_recording

    @wraps(activate)
    def activate_and_note(self: Cache) -> None:
        setattr(self, _RECORDING, True)
        activate(self)  # type: ignore[no-untyped-call]

    Cache.activate_past_recording = activate_and_note  # type: ignore[method-assign]


def is_recording(cache: Cache) -> bool:
    """Whether tokens may be taken back from a cache (assisted decoding)."""
    return bool(getattr(cache, _RECORDING, False))
