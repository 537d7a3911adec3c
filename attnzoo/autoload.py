"""Runs our set-up when another package is imported: importing attnzoo need not import it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _AfterLoading(Loader):
    """A module's own loader, followed by our function."""

    def __init__(self, loader: Loader, module: str, function: str) -> None:
        self.loader, self.module, self.function = loader, module, function

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        getattr(import_module(self.module), self.function)()


class _Finder(MetaPathFinder):
    """Waits for one module to be imported, wraps its loader, and is gone."""

    def __init__(self, awaited: str, module: str, function: str) -> None:
        self.awaited, self.module, self.function = awaited, module, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.awaited:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterLoading(spec.loader, self.module, self.function)
        return spec


def after_import(awaited: str, module: str, function: str) -> None:
    """Call ``module.function()`` once ``awaited`` is imported, which may be now."""
    if awaited in sys.modules:
        getattr(import_module(module), function)()
    else:
        sys.meta_path.insert(0, _Finder(awaited, module, function))
