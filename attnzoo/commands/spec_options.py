"""A spec from the options --attention, --set, --layers and --else."""

from __future__ import annotations

import json
from typing import Any

from attnzoo.errors import SpecError


def spec_of(
    attention: str | None, option: list[str] | None, layers: list[str] | None, else_: str | None
) -> Any:
    """Make a spec of what the command line says."""
    from attnzoo.spec import AttentionSpec

    assert attention is not None
    return AttentionSpec(
        attention,
        layers=dict(_pair(text, "--layers", "0-1=flash") for text in layers or ()),
        else_=else_,
        **{
            name: _value(value)
            for name, value in (_pair(text, "--set", "feature_map=elu+1") for text in option or ())
        },
    )


def _pair(text: str, option: str, example: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise SpecError(f"{option} takes NAME=VALUE, such as {example}; got {text!r}")
    return name.strip(), value.strip()


def _value(text: str) -> Any:
    """Read a value as JSON where it is JSON (numbers, true, null, lists), else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
