"""Flat RoPE fields beside the nested ``rope_parameters`` of a saved config.

transformers 5 saves ``rope_parameters`` alone. Engines that know the fields of transformers 4,
``rope_theta`` and ``rope_scaling``, then use their default of 10,000 without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnzoo.hf.configs import read_field

FIELD = "rope_parameters"
# fields beside ``rope_scaling`` in configs of transformers 4
_BESIDE = ("rope_theta", "partial_rotary_factor")


def add_flat_rope(config: Any, data: dict[str, Any]) -> None:
    """Add the flat fields to the data of a config and of its sub-configs, where they have a form.

    Args:
        config: The config.
        data: What its config.json will hold, which is changed.
    """
    data.update(flat_rope(config))
    for key in read_field(config, "sub_configs", {}):
        part, inner = read_field(config, key), data.get(key)
        if part is not None and isinstance(inner, dict):
            add_flat_rope(part, inner)


def flat_rope(config: Any) -> dict[str, Any]:
    """Return the RoPE of a config as flat fields; empty if layers differ, or there is none."""
    parameters = read_field(config, FIELD)
    kinds = rope_kinds(config)
    if kinds:
        parameters, *others = kinds.values()
        if any(x != parameters for x in others):
            return {}
    if not parameters or parameters.get("rope_theta") is None:
        return {}
    flat = {name: parameters[name] for name in _BESIDE if name in parameters}
    is_scaled = parameters.keys() - {*_BESIDE, "rope_type"} or parameters["rope_type"] != "default"
    if is_scaled and kinds:  # transformers reads rope_scaling in place of the parameters of kinds
        return {}
    if is_scaled:  # and in place of rope_parameters, so all of them
        flat["rope_scaling"] = dict(parameters)
    return flat


def rope_kinds(config: Any) -> dict[str, Any]:
    """Return RoPE parameters by the kind of layer; empty where all layers have the same field."""
    parameters = read_field(config, FIELD) or {}
    is_nested = parameters and all(x is None or isinstance(x, Mapping) for x in parameters.values())
    return dict(parameters) if is_nested else {}


def rope_table(config: Any) -> str:
    """Return the RoPE of each kind of layer in Markdown, or ``""`` if flat fields can hold it."""
    kinds = rope_kinds(config)
    if not kinds or flat_rope(config):
        return ""
    lines = [
        "The kinds of layers have other rotary positions (`rope_parameters` in config.json), which "
        "an engine that reads one `rope_theta` gets wrong:\n",
        "| kind of layer | RoPE |",
        "|---|---|",
    ]
    for kind, parameters in kinds.items():
        text = ", ".join(f"`{k}` {x}" for k, x in (parameters or {}).items())
        lines.append(f"| {kind} | {text or 'none'} |")
    return "\n".join(lines)
