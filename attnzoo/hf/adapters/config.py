"""The swap in the config of a PEFT adapter.

An adapter is trained for one attention, so its config records the swap, and it loads onto a model
with the same swap only.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.utils.peft_utils import find_adapter_config_file

from attnzoo.errors import SpecError, UnsupportedError, is_deeply_nested
from attnzoo.hf import seam
from attnzoo.hf.configs import read_field
from attnzoo.hf.layers import unwrap_model
from attnzoo.hf.names import NAME
from attnzoo.spec import AttentionSpec

NOT_COMPARED = ("impl", "attention_dropout")  # options of the implementation and of training


def current_swap(model: nn.Module) -> dict[str, Any] | None:
    """Return the spec of a model, or of its sub-configs by name; ``None`` if it is not swapped."""
    target = unwrap_model(model)
    return None if target is None else _config_swap(target.config)


def _config_swap(config: Any) -> dict[str, Any] | None:
    spec: dict[str, Any] | None = read_field(config, NAME)
    if spec is not None and config._attn_implementation == NAME:
        return spec
    found = {key: _config_swap(inner) for key, inner in seam.sub_configs(config).items()}
    return {key: spec for key, spec in found.items() if spec is not None} or None


def _plain(spec: Any) -> Any:
    """Return a recorded spec, or those of sub-configs, validated and without default options."""
    if isinstance(spec, Mapping) and not {"backend", "version"} & set(spec):
        return {key: _plain(inner) for key, inner in spec.items()}
    return None if spec is None else AttentionSpec.from_dict(spec).to_dict()


def _comparable(value: Any) -> Any:
    """Return a spec without the options that do not change what a trained layer computes."""
    if not isinstance(value, Mapping):
        return value
    inner = {key: _comparable(part) for key, part in value.items() if key not in NOT_COMPARED}
    return {key: part for key, part in inner.items() if part != {}}


def record_swap(model: nn.Module, config: Any) -> None:
    """Write the current swap of a model to an adapter's config, which saves it."""
    vars(config)[NAME] = current_swap(model)


def check_swap(model: nn.Module, spec: Any) -> None:
    """Raise if an adapter's config records another swap than that of a model.

    Args:
        model: The model.
        spec: The swap that the config records, or ``None``.

    Raises:
        SpecError: The adapter was trained for another swap.
    """
    if is_deeply_nested(spec):  # of a file
        raise SpecError("The attention that the adapter's config records is nested too deeply")
    recorded, current = _plain(spec), _plain(current_swap(model))
    if recorded is not None and _comparable(recorded) != _comparable(current):
        found = "not swapped" if current is None else f"swapped with {current}"
        raise SpecError(
            f"The adapter was trained under another attention; this model is {found}. Load the "
            "base model alone and, before you load the adapter, swap the model: "
            f"attnzoo.swap(model, {recorded})"
        )


def download_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an adapter's download, among others of a caller."""
    known = inspect.signature(find_adapter_config_file).parameters
    return {key: value for key, value in options.items() if key in known}


def refuse_repeated_prompt(model: Any, prepare: Any) -> None:
    """Raise if PEFT would add the virtual tokens again in every step of a generation.

    Args:
        model: A ``PeftModel``.
        prepare: PEFT's ``prepare_inputs_for_generation``.

    Raises:
        UnsupportedError: PEFT looks for the cache under a name that transformers has renamed.
    """
    is_prompt = model.active_peft_config.is_prompt_learning
    if is_prompt and current_swap(model) is not None and not seam.names_cache(prepare):
        raise UnsupportedError(
            f"generate: {seam.package('peft')} does not find the cache of "
            f"{seam.package('transformers')}, which is called {seam.CACHE_ARGUMENT!r}, and would "
            "add the virtual tokens again in every step, with stock models too; install another "
            "peft or an older transformers, or pass the generated tokens through the model "
            "without a cache"
        )
