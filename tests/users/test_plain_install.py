"""Commands and public names without the packages of the extras."""

import json
import sys

from tests.processes import run

PROGRAM = r'''
import importlib, json, re, sys, traceback
from importlib.util import find_spec
from pathlib import Path
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions

def plain_install():
    """Return the distributions that attnzoo needs, all the way down, without extras."""
    needed, new = set(), {"attnzoo", "pip", "setuptools"}
    while new:
        name = new.pop()
        needed.add(name)
        try:
            requires = distribution(name).requires or ()
        except PackageNotFoundError:
            continue
        plain = (re.split(r"[^\w.-]", x)[0] for x in requires if "extra ==" not in x)
        new |= {re.sub(r"[-_.]+", "-", x).lower() for x in plain} - needed
    return needed

kept = plain_install()
vendor = Path(find_spec("setuptools").submodule_search_locations[0], "_vendor")
vendored = {path.stem for path in vendor.iterdir()}
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
absent = {
    package for package, names in packages_distributions().items()
    if not any(normal(name) in kept for name in names) and package not in vendored
}
assert {"datasets", "peft", "matplotlib", "lm_eval", "trl"} <= absent, absent

class Without:
    """A finder that does not find the absent packages."""
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

import attnzoo
from typer.testing import CliRunner
from attnzoo.cli import app

for package in ("attnzoo", "attnzoo.ops", "attnzoo.training", "attnzoo.testing"):
    module = importlib.import_module(package)
    for name in module.__all__:
        getattr(module, name)

calls = json.loads(sys.argv[1])
registered = {command.name for command in app.registered_commands}
assert registered == {call[0] for call in calls}, registered ^ {call[0] for call in calls}
found = []
for call in calls:
    result = CliRunner().invoke(app, call)
    if not isinstance(result.exception, attnzoo.errors.AttnzooError | None):
        traceback.print_exception(result.exception)
        print(call, result.output, file=sys.stderr)
    found.append([type(result.exception).__name__, f"{result.output}{result.exception}"])
print("RESULTS", json.dumps(found))
'''


def test_every_command_and_public_name_works_or_names_its_extra(tmp_path):
    data, out = tmp_path / "data.txt", str(tmp_path / "out")
    data.write_text("a line of text\n" * 2000)
    (tmp_path / "script.py").write_text("")
    into = ("embedded", "--data", str(data), "--output-dir", f"{out}-run")
    swapped, window = f"{out}-swap", ("--attention", "flash:window=48")
    train, report = "attnzoo[train]", "attnzoo[report]"
    calls = {
        ("list", "linear"): "",
        ("describe", "embedded"): "",
        ("swap", "embedded", *window, "--output-dir", swapped): "",
        ("convert", "embedded", "--to", "mistral", "--help"): "",
        ("recover", "--help"): "",
        ("finetune", "--help"): "",
        ("plan", "embedded", "--data", str(data)): train,
        ("recover", *into, *window): train,
        ("finetune", *into, *window): train,
        ("evaluate", swapped, "--data", str(data)): train,
        (
            "heads",
            "embedded",
            "--rows",
            "1",
            "--max-length",
            "32",
            "--output-dir",
            f"{out}-heads",
        ): report,
        (
            "inspect",
            "embedded",
            *window,
            "--max-length",
            "16",
            "--output-dir",
            f"{out}-maps",
        ): report,
        ("run", "script.py"): "",
    }
    # they measure for long, and draw by the same function as heads
    calls |= {(name, "--help"): "" for name in ("compare", "demo", "tasks", "memory")}
    calls |= {(name, "--help"): "" for name in ("autoload", "doctor")}
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(calls))]
    done = run(command, cwd=tmp_path, check=True)
    found = json.loads(done.stdout.rpartition("RESULTS ")[2])
    for (call, extra), (error, text) in zip(calls.items(), found, strict=True):
        assert error in ("NoneType", "UnsupportedError", "ConfigError"), (call, text)
        assert extra in text.replace("\n", " "), (call, text)
        assert extra or error == "NoneType", (call, text)
