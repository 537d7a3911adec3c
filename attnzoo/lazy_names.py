"""Names of a package that are imported on first use; its stub ``__init__.pyi`` lists them.

Type checkers read the stub too, so that every name stands in one place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: Name of the package. Its stub has a line ``from <module> import <name> as <name>``
            for each name, in which the module is the package itself for a submodule.
    """
    namespace = vars(sys.modules[package])
    stub = Path(namespace["__file__"]).with_suffix(".pyi").read_text("utf-8")
    found = re.findall(r"^from (\S+) import \(?\s*(\w+) as \2\b", stub, re.MULTILINE)
    modules = {name: module for module, name in found}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        if module == package:  # a submodule
            return import_module(f"{package}.{name}")
        value = namespace[name] = getattr(import_module(module), name)
        return value

    def names() -> list[str]:
        return sorted({*namespace, *modules})

    return get, names, sorted(modules)
