"""Functions that run when modules are imported, while other threads import these modules."""

import importlib
import sys
import threading
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder

import pytest

from attnzoo.autoload import after_import

SECONDS = 60  # time limit of a thread
NAME = "zoo_parent.zoo_child"


@pytest.fixture
def found(tmp_path, monkeypatch):
    """What the functions were called with; a package of two modules can be imported."""
    (tmp_path / "zoo_parent").mkdir()
    (tmp_path / "zoo_parent" / "__init__.py").write_text("")
    (tmp_path / "zoo_parent" / "zoo_child.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield []
    for name in (NAME, "zoo_parent"):
        sys.modules.pop(name, None)


class Pausing(MetaPathFinder, Loader):
    """Finder and loader of one module; calls a function at one stage of its import."""

    def __init__(self, stage, function):
        self.stage, self.function = stage, function

    def reach(self, stage):
        if stage == self.stage:
            self.function()

    def find_spec(self, fullname, path, target=None):
        if fullname != NAME:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        self.loader, spec.loader = spec.loader, self
        self.reach("found")
        return spec

    def create_module(self, spec):
        self.reach("created")
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.reach("half loaded")
        self.loader.exec_module(module)
        self.reach("loaded")


def values(found):
    """Return a function that notes the value of a module, which a half loaded one lacks."""
    return {NAME: lambda module: found.append(getattr(module, "value", None))}


@pytest.mark.parametrize("stage", ["found", "created", "half loaded", "loaded"])
def test_another_thread_imports_the_module(found, stage):
    """The other thread has looked for the module before, so it does not meet the new finder."""
    hook = threading.Thread(target=after_import, args=(values(found),))

    def install():
        hook.start()
        hook.join(0.3)  # a hook that waits for nothing has missed the module by now

    sys.meta_path.insert(0, Pausing(stage, install))
    importlib.import_module(NAME)
    hook.join(SECONDS)
    assert not hook.is_alive()
    assert set(found) == {1}


def test_another_thread_fails_to_import_the_module(found, tmp_path):
    """Its error is not ours, and the next import calls the function."""
    file = tmp_path / "zoo_parent" / "zoo_child.py"
    source = file.read_text()
    file.write_text("raise RuntimeError('half')\n")
    errors = []

    def hook_function():
        try:
            after_import(values(found))
        except Exception as error:
            errors.append(error)

    hook = threading.Thread(target=hook_function)

    def install():
        hook.start()
        hook.join(0.3)

    pausing = Pausing("half loaded", install)
    sys.meta_path.insert(0, pausing)
    with pytest.raises(RuntimeError, match="half"):
        importlib.import_module(NAME)
    hook.join(SECONDS)
    assert (errors, found) == ([], [])
    sys.meta_path.remove(pausing)
    file.write_text(source + "# another size, so that no compiled file is taken\n")
    importlib.import_module(NAME)
    assert found == [1]


def test_nothing_is_imported(found):
    after_import(values(found))
    assert "zoo_parent" not in sys.modules
    importlib.import_module("zoo_parent")
    after_import(values(found))
    assert NAME not in sys.modules
    importlib.import_module(NAME)
    assert set(found) == {1}


def test_a_module_that_is_loaded(found):
    importlib.import_module(NAME)
    after_import(values(found))
    assert found == [1]
