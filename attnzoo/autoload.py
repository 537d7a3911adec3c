"""Patch modules of other packages when they are imported, without importing them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Patches that this version of a package has no place for, by module: the reason. Nothing is swapped
# then; an import of the package must not fail because attnzoo is installed.
FAILED_PATCHES: dict[str, str] = {}


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


class _NotLoaded(ImportError):
    """A module is not loaded, and the thread that looks for it does not want to load it."""


class _Thread(threading.local):
    """What one thread does with a finder."""

    def __init__(self) -> None:
        self.searched: set[str] = set()  # names for which it asks the other finders
        self.looking = False  # it wants a module that is loaded, and loads none


class _Finder(MetaPathFinder):
    """Wraps the loaders of some modules.

    It remains in ``sys.meta_path``: other threads may iterate over that list, and a module can be
    looked up without being imported, or be imported again after an error.
    """

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.functions = functions
        self.thread = _Thread()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        thread = self.thread
        if thread.looking:
            raise _NotLoaded(f"{fullname} is not loaded", name=fullname)
        if fullname not in self.functions or fullname in thread.searched:
            return None
        thread.searched.add(fullname)  # another finder may ask all finders, this one among them
        try:
            others = (finder for finder in tuple(sys.meta_path) if finder is not self)
            specs = (finder.find_spec(fullname, path, target) for finder in others)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            thread.searched.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterLoading(spec.loader, self.functions[fullname])
        return spec

    def loaded(self, name: str) -> ModuleType | None:
        """Return a module if it is loaded, or as soon as another thread has loaded it.

        Another thread may have found the module before this finder was there, and not have entered
        it into ``sys.modules`` yet. It holds the module's lock, for which an import waits.
        """
        parent = name.rpartition(".")[0]
        if parent and parent not in sys.modules:  # what looks for the module later asks this finder
            return None
        self.thread.looking = True
        try:
            return import_module(name)
        except (_NotLoaded, ModuleNotFoundError):  # the latter: sys.modules forbids it by None
            return None
        finally:
            self.thread.looking = False


def after_import(functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Call each function with its module as soon as the module is imported, or now if it is.

    A function runs while the import system holds the lock of the module, and may run twice. It must
    not import anything that imports the module, which would deadlock threads.
    """
    finder = _Finder(functions)
    sys.meta_path.insert(0, finder)  # before the loop: threads may import now
    for name, function in functions.items():
        module = finder.loaded(name)
        if module is not None:
            function(module)
