"""Documentation of backends and of their options, read from docstrings."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any, get_type_hints

from attnzoo.backends.feature_maps.base import FEATURE_MAPS
from attnzoo.backends.gates.decays import GATES
from attnzoo.contract.config import BackendConfig, format_type
from attnzoo.errors import ConfigError
from attnzoo.registry import get_backend

FLAGS = ("exact", "causal", "bidirectional", "cross_attention", "recurrent")


def backend_docs(name: str) -> dict[str, Any]:
    """Return what is known of a backend, as plain data."""
    backend = get_backend(name)
    config = backend.config_class
    hints, names = get_type_hints(config), [field.name for field in fields(config)]
    accepted = {option: format_type(hints[option]) for option in names}
    texts = _attributes(config)
    registries: Any = {"feature_map": FEATURE_MAPS, "gate": GATES}
    return {
        "name": name,
        "summary": summary(backend),
        "config": summary(config),
        "options": config.default_options(),
        "accepted": accepted | {"impl": " or ".join(map(repr, config.impl_names()))},
        "descriptions": {option: texts.get(option, "") for option in names},
        "choices": {
            option: {
                value: summary(cls)
                for value, cls in registry.items()
                if _is_accepted(config, {option: value})
            }
            for option, registry in registries.items()
            if option in names
        },
        "impls": [n for n in config.impl_names() if n != "auto"],
        **{flag: getattr(backend.capabilities, flag) for flag in FLAGS},  # by default options
    }


def summary(cls: type) -> str:
    """Return the first sentence of a class, and the papers that its docstring names."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    first = _plain(doc.split("\n\n")[0])
    papers = re.findall(r"arXiv:\d{4}\.\d{4,5}", doc)
    papers = [paper for paper in dict.fromkeys(papers) if paper not in first]
    return f"{first.removesuffix('.')} ({', '.join(papers)})" if papers else first


def _attributes(config: type[BackendConfig]) -> dict[str, str]:
    """Return the descriptions in the ``Attributes`` of a class and its bases."""
    found: dict[str, str] = {}
    for cls in config.__mro__:
        _, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \w)", "\n" + attributes.split("\n\n")[0]):
            name, _, text = entry.strip().partition(":")
            found.setdefault(name, _plain(text))
    return found


def _plain(text: str) -> str:
    """Return text of a docstring as one line without markup, LaTeX and roles such as ``:math:``."""
    text = re.sub(r":(?:\w+:)+`~?([^`]*)`", r"\1", text).replace("``", "")
    text = text.replace("\\cdot", "·").replace("\\,", " ")
    text = re.sub(r"\\mathrm\{(\w+)\}", r"\1", text)
    return " ".join(re.sub(r"\\(\w+)", r"\1", text).split())


def _is_accepted(config: type[BackendConfig], options: dict[str, Any]) -> bool:
    """Return whether a config accepts options, the others at their defaults.

    A feature map whose weights may be negative needs ``normalize=False``.
    """
    try:
        config(**options)
    except ConfigError:
        if "normalize" in options or "normalize" not in config.default_options():
            return False
        return _is_accepted(config, {**options, "normalize": False})
    return True
