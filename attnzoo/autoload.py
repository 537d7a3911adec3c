"""Call functions when modules of other packages are imported, without importing them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterLoading(Loader):
    """Loader that runs a module's own loader and then calls a function with the module."""

    def __init__(self, loader: Loader, function: Callable[[ModuleType], None]) -> None:
        self.loader, self.function = loader, function

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.function(module)


class _Finder(MetaPathFinder):
    """Wraps the loaders of some modules.

    It remains in ``sys.meta_path``: other threads may iterate over that list, and a module can be
    looked up without being imported, or be imported again after an error.
    """

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.functions = functions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.functions:
            return None
        others = (finder for finder in tuple(sys.meta_path) if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterLoading(spec.loader, self.functions[fullname])
        return spec


def after_import(functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Call each function with its module as soon as the module is imported, or now if it is.

    A function runs while the import system holds the lock of the module, and may run twice. It must
    not import anything that imports the module, which would deadlock threads.
    """
    sys.meta_path.insert(0, _Finder(functions))  # before the loop: threads may import now
    for name, function in functions.items():
        if sys.modules.get(name) is not None:
            function(import_module(name))  # waits if another thread is importing it
