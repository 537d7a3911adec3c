"""Build specs from the options --attention, --layers and --else.

``--attention`` and the values of ``--layers`` are ``NAME`` or ``NAME:OPTION=VALUE,...``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from attnzoo.errors import ConfigError, SpecError, short_repr

_ATTENTION = typer.Option(
    help="backend of all layers without an exception: NAME or NAME:OPTION=VALUE,..."
)
Attention = Annotated[str, _ATTENTION]
AttentionIfGiven = Annotated[str | None, _ATTENTION]
Layers = Annotated[
    list[str] | None,
    typer.Option(help="exceptions: LAYERS=NAME, such as 0-1,11=flash (repeatable)"),
]
Else = Annotated[
    str | None, typer.Option("--else", help="backend of layers that --attention refuses")
]
Attentions = Annotated[
    list[str] | None, typer.Option(help="all, NAME,NAME or NAME:OPTION=VALUE,... (repeatable)")
]


def spec_of(
    attention: str,
    layers: list[str] | None = None,
    else_: str | None = None,
) -> Any:
    """Return the spec of the command line; like a saved spec, it cannot import code."""
    from attnzoo.spec import AttentionSpec, parse_backend, split_pair

    one_layer = "--layers takes LAYERS=NAME, such as 0-1=flash"
    whole = "--attention takes NAME:OPTION=VALUE,..., such as linear:feature_map=elu+1,window=8"
    backend = parse_backend(attention, whole)
    pairs = dict(split_pair(text, one_layer) for text in layers or ())
    return AttentionSpec.from_dict({**backend, "layers": pairs, "else": else_})


def specs_of(attention: list[str], presets: Callable[[list[str]], list[Any]]) -> list[Any] | None:
    """Return the specs of an ``--attention`` that takes several; ``None`` for ``all``.

    Args:
        attention: Values of the option: names separated by commas, or one name with options.
        presets: Returns the specs of names without options.
    """
    found: list[Any] = []
    for text in attention:
        if ":" in text:
            found.append(spec_of(text))
        elif text == "all":
            return None
        elif names := split(text):
            found += presets(names)
    if not found:
        raise SpecError("--attention names no backend; give all, or names such as linear,reformer")
    return found


def split(text: str) -> list[str]:
    """Return the parts of a list that is separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_object(text: str, option: str) -> dict[str, Any]:
    """Return the JSON object that an option has as its value.

    Raises:
        ConfigError: The text is no JSON object.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{option} takes a JSON object, got {short_repr(text)} ({error})"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{option} takes a JSON object, got {short_repr(text)}")
    return found
