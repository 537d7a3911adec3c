"""Documentation of a backend's options, read from the docstrings of its classes."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any, get_type_hints

from attnzoo.contract.config import BackendConfig, format_type
from attnzoo.errors import ConfigError

_ROLE = re.compile(r":(?:\w+:)+`~?([^`]*)`")  # :math:`...`, :func:`~module.name`
_ARXIV = re.compile(r"arXiv:\d{4}\.\d{4,5}")
_LATEX = {"\\cdot": "·", "\\,": " "}


def plain(text: str) -> str:
    """Return one line of a docstring without markup."""
    text = _ROLE.sub(lambda match: match[1], text).replace("``", "")
    for command, symbol in _LATEX.items():
        text = text.replace(command, symbol)
    text = re.sub(r"\\mathrm\{(\w+)\}", r"\1", text)
    return " ".join(re.sub(r"\\(\w+)", r"\1", text).split())


def summary(cls: type) -> str:
    """Return the first sentence of a class, and the papers that its docstring names."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    first = plain(doc.split("\n\n")[0])
    papers = [paper for paper in dict.fromkeys(_ARXIV.findall(doc)) if paper not in first]
    return f"{first.removesuffix('.')} ({', '.join(papers)})" if papers else first


def option_docs(config: type[BackendConfig]) -> dict[str, str]:
    """Return the description of every option, from the ``Attributes`` of a class and its bases."""
    found: dict[str, str] = {}
    for cls in config.__mro__:
        _, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \w)", "\n" + attributes.split("\n\n")[0]):
            name, colon, text = entry.strip().partition(":")
            if colon:
                found.setdefault(name, plain(text))
    return {field.name: found.get(field.name, "") for field in fields(config)}


def option_types(config: type[BackendConfig]) -> dict[str, str]:
    """Return what every option accepts, as error messages show it."""
    hints = get_type_hints(config)
    accepted = {field.name: format_type(hints[field.name]) for field in fields(config)}
    return accepted | {"impl": " or ".join(map(repr, config.impl_names()))}


def choices(config: type[BackendConfig]) -> dict[str, dict[str, str]]:
    """Return the values of ``feature_map`` and ``gate`` that a config accepts, and summaries."""
    names = {field.name for field in fields(config)}
    found = {}
    if "feature_map" in names:
        from attnzoo.backends.feature_maps.base import FEATURE_MAPS

        found["feature_map"] = {name: summary(cls) for name, cls in FEATURE_MAPS.items()}
    if "gate" in names:
        from attnzoo.backends.gates.base import GATES

        found["gate"] = {name: summary(cls) for name, cls in GATES.items()}
    return {
        option: {name: text for name, text in values.items() if _is_accepted(config, option, name)}
        for option, values in found.items()
    }


def _is_accepted(config: type[BackendConfig], option: str, value: str) -> bool:
    """Return whether a config accepts a value of an option, the others at their defaults.

    A feature map whose weights may be negative needs ``normalize=False``.
    """
    calls: list[dict[str, Any]] = [{option: value}]
    if "normalize" in {field.name for field in fields(config)}:
        calls.append({option: value, "normalize": False})
    for options in calls:
        try:
            config(**options)
        except ConfigError:
            continue
        return True
    return False
