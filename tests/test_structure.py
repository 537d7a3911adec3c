"""Rules of the tree beyond the linter: imports, sizes, names, no paths of a machine."""

import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.processes import run

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up: a module imports from its own row and the rows below, never from above.
ROWS = (
    {"autoload", "errors", "lazy_names", "optional_packages"},
    {"runtime"},
    {"contract"},
    {"ops"},
    {"backends"},
    {"registry"},
    {"spec"},
    {"hf"},
    {"testing"},
    # __init__: the public names, resolved on first use, and the version
    {"report", "evaluation", "__init__"},
    {"training", "compare", "tasks"},
    {"commands"},
    {"cli", "__main__"},
)
ROW = {unit: height for height, row in enumerate(ROWS) for unit in row}
# Inside hf, from the bottom up, by the same rule.
HF_ROWS = (
    {"__init__", "names", "configs", "pretrained", "mixins"},
    {"seam"},
    {"layers", "masks", "context_parallel", "logits", "unchanged", "extras"},
    {"cache"},
    {"attention"},
    {"release_check"},
    {"models"},
    {"attach"},
    {"saving"},
    {"adapters"},
    {"heads", "swapped", "lora"},
    {"pruning"},
    {"swap"},
    {"stock"},
    {"describe", "export"},
    {"patches"},  # call all of them, from transformers and PEFT
)
HF_ROW = {unit: height for height, row in enumerate(HF_ROWS) for unit in row}
# What modules below hf may import from outside; torch requires filelock, and the last
# two are imported where they are installed.
CORE_LIBRARIES = {"torch", "einops", "filelock", "fla", "triton", "xformers"}

MAX_FUNCTION_LINES = 60


def python_files(*folders: str) -> list[Path]:
    """Return the source files under some folders of the tree."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import, inside functions and by ``import_module`` too."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                start = "." * node.level + (node.module or "")
                yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called),
                args=[ast.Constant(value=str(name)), *_],
            ) if called in {"import_module", "__import__"}:
                yield node.lineno, name


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return which of some modules each of them imports, inside functions too.

    Args:
        sources: The source of each module by dotted name; a folder's is that of its ``__init__``.
    """
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        for _, imported in imports(ast.parse(source)):
            name = imported
            while name and name not in sources:  # a name in a module
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    return graph


def import_circle(sources: Mapping[str, str]) -> list[str]:
    """Return modules of which each is imported by the next one, the first again at the end."""
    try:
        TopologicalSorter(import_graph(sources)).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def unit_of(dotted: str) -> str:
    """Return the module or folder of attnzoo that a name lies in; public names are __init__'s."""
    unit = dotted.split(".")[1] if "." in dotted else "__init__"
    return unit if unit in ROW else "__init__"


def unit_of_hf(dotted: str) -> str:
    """Return the module or folder of attnzoo.hf that a name lies in."""
    return f"{dotted}.__init__".split(".")[2]


def wrong_imports(module: str, source: str) -> list[str]:
    """Return the imports that are not allowed in a module."""
    own = unit_of(module)
    wrong = []
    for line, name in imports(ast.parse(source)):
        top = name.partition(".")[0]
        if not top:
            wrong.append(f"{module}:{line} imports {name}, a relative name")
        elif top == "attnzoo":
            if ROW[unit_of(name)] > ROW[own]:
                wrong.append(f"{module}:{line} imports {name}, which is above {own}")
            elif unit_of(name) == own == "hf":
                inner = unit_of_hf(module)
                if HF_ROW[unit_of_hf(name)] > HF_ROW[inner]:
                    wrong.append(f"{module}:{line} imports {name}, which is above {inner}")
        elif ROW[own] < ROW["hf"] and not (top in sys.stdlib_module_names or top in CORE_LIBRARIES):
            wrong.append(f"{module}:{line} imports {top}, which only hf and above may")
    return wrong


SHARED = {"parts", "feature_maps", "gates"}  # folders of backends, for all mechanisms


def wrong_sideways_imports(module: str, source: str) -> list[str]:
    """Return the imports within ops, or within backends, that are not allowed.

    Ops import other ops, but not the public functions of their own algorithm, which select among
    them; checks of kernels may. A reference is imported by these public functions alone. A backend
    imports what backends share, and no other backend.
    """
    layer, unit, *inner = (*module.split(".")[1:], "")
    wrong = []
    for line, name in imports(ast.parse(source)):
        parts = name.split(".")
        if parts[:2] == ["attnzoo", "ops"] and "reference" in parts[3:]:
            if module != f"attnzoo.ops.{parts[2]}.api":
                wrong.append(f"{module}:{line} imports {name}, a reference")
        elif layer == "ops" and parts[:4] == ["attnzoo", "ops", unit, "api"]:
            if not inner[-2].startswith("check"):
                wrong.append(f"{module}:{line} imports {name}, which is above it")
        elif layer == "backends" == "".join(parts[1:2]) and parts[2] not in SHARED | {unit}:
            wrong.append(f"{module}:{line} imports {name}, another backend")
    return wrong


def test_ops_and_backends_import_nothing_sideways():
    wrong = []
    for path in python_files("attnzoo"):
        wrong += wrong_sideways_imports(module_name(path), path.read_text("utf-8"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attnzoo.ops.linear.torch", "from attnzoo.ops.linear.api import linear_attention"),
        ("attnzoo.ops.linear.cpu.linear", "from attnzoo.ops.linear import api"),
        ("attnzoo.ops.flash.api", "from attnzoo.ops.softmax.reference import run_reference"),
        ("attnzoo.ops.linear.torch", "from attnzoo.ops.linear.reference import run_reference"),
        ("attnzoo.backends.delta", "from attnzoo.backends.linear import LinearBackend"),
        ("attnzoo.backends.parts.exact", "from attnzoo.backends.flash import FlashBackend"),
    ],
)
def test_a_wrong_sideways_import_is_found(module, source):
    assert len(wrong_sideways_imports(module, source)) == 1


# Expressions for configs of models; those of backends have no fields that raise.
MODEL_CONFIG = re.compile(
    r"(^|[._])config$|get_text_config\(\)$|read_config\(.*\)$|^(source|owner)$"
)
BACKEND_CONFIG = re.compile(r"(backend|entry|layers\[.*\])\.config$")


def unguarded_reads(name: str, source: str) -> list[str]:
    """Return the reads of a model's config with a default that bypass ``attnzoo.hf.configs``."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[config, _, _]):
                read = ast.unparse(config)
            case ast.Call(func=ast.Name(id="hasattr"), args=[config, _]):
                read = ast.unparse(config)
            case _:
                continue
        if MODEL_CONFIG.search(read) and not BACKEND_CONFIG.search(read):
            wrong.append(f"{name}:{node.lineno} reads {read}; use read_field or has_field")
    return wrong


def test_configs_are_read_with_defaults_in_one_place():
    folders = (f"attnzoo/{x}" for x in ("hf", "compare", "evaluation", "training", "commands"))
    wrong = []
    for path in python_files(*folders):
        if path != ROOT / "attnzoo" / "hf" / "configs.py":
            wrong += unguarded_reads(str(path.relative_to(ROOT)), path.read_text("utf-8"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("getattr(model.config, 'window', None)", 1),
        ("hasattr(text_config, 'window')", 1),
        ("getattr(model.config.get_text_config(), 'window', 0)", 1),
        ("getattr(backend.config, 'window', None)", 0),
        ("getattr(config, 'window')", 0),
        ("read_field(config, 'window')", 0),
    ],
)
def test_an_unguarded_read_is_found(source, count):
    assert len(unguarded_reads("a.py", source)) == count


def test_every_module_has_a_row():
    known = set(ROW)
    found = {module_name(path).split(".")[1] for path in python_files("attnzoo")}
    assert found <= known, f"give {sorted(found - known)} a place in ROWS"
    found = {unit_of_hf(module_name(path)) for path in python_files("attnzoo/hf")}
    assert found == set(HF_ROW), f"HF_ROWS differs in {sorted(found ^ set(HF_ROW))}"


def test_imports_point_one_way():
    wrong = []
    for path in python_files("attnzoo"):
        wrong += wrong_imports(module_name(path), path.read_text("utf-8"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attnzoo.errors", "import attnzoo.ops.linear.api"),
        ("attnzoo.contract.backend", "from attnzoo.ops import linear"),
        (
            "attnzoo.runtime.kernel_calls",
            "def f():\n    from attnzoo.contract.backend import register",
        ),
        ("attnzoo.backends.linear", "from attnzoo import registry"),
        ("attnzoo.backends.linear", "from attnzoo import AttentionSpec"),
        ("attnzoo.registry", "def f():\n    import_module('attnzoo.hf.attention.call')"),
        ("attnzoo.registry", "import importlib\nimportlib.import_module('transformers')"),
        ("attnzoo.spec", "from transformers import PretrainedConfig"),
        ("attnzoo.spec", "import accelerate.utils"),
        ("attnzoo.hf.attention.call", "from attnzoo.testing import RULES"),
        ("attnzoo.hf.attention.call", "from attnzoo.cli import app"),
        ("attnzoo.hf.seam", "from attnzoo.hf.patches import PATCHES"),
        ("attnzoo.hf.cache.state_layer", "def f():\n    from attnzoo.hf.attention import call"),
        ("attnzoo.hf.masks", "import attnzoo.hf.swap"),
        ("attnzoo.backends.linear", "from .base import register"),
    ],
)
def test_a_wrong_import_is_found(module, source):
    assert len(wrong_imports(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attnzoo.runtime.build", "from attnzoo.errors import UnsupportedError\nimport triton"),
        (
            "attnzoo.backends.linear",
            "from attnzoo.ops.linear.api import chunk\nfrom torch import nn",
        ),
        ("attnzoo.registry", "def f(name):\n    return import_module(name)"),
        ("attnzoo.hf.cache.state_layer", "from transformers.cache_utils import Cache"),
        ("attnzoo.hf.patches", "def f():\n    from attnzoo.hf.swap import convert"),
        ("attnzoo.hf.swap", "from attnzoo.hf.extras import warn"),
        ("attnzoo.cli", "from attnzoo import AttentionSpec\nimport rich"),
    ],
)
def test_a_right_import_passes(module, source):
    assert wrong_imports(module, source) == []


def test_no_module_imports_itself_through_others():
    paths = python_files("attnzoo")
    sources = {module_name(x).removesuffix(".__init__"): x.read_text("utf-8") for x in paths}
    circle = import_circle(sources)
    assert not circle, " <- ".join(circle)


@pytest.mark.parametrize(
    "back",
    [
        "from zoo.a import name",
        "def f():\n    from zoo import a",
        "if TYPE_CHECKING:\n    import zoo.a",
        "import_module('zoo.a')",
    ],
)
def test_a_circle_is_found(back):
    sources = {"zoo": "", "zoo.a": "import zoo.b", "zoo.b": "import zoo.c.name", "zoo.c": back}
    assert set(import_circle(sources)) == {"zoo.a", "zoo.b", "zoo.c"}
    assert import_circle(sources | {"zoo.c": "from zoo import d, name"}) == []


@pytest.mark.parametrize("module", ["attnzoo", "attnzoo.cli"])
def test_importing_is_cheap(module):
    heavy = ["torch", "transformers", "numpy", "accelerate", "peft", "matplotlib", "triton"]
    code = f"import sys, {module}; print(*[name for name in {heavy} if name in sys.modules])"
    done = run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert done.stdout.split() == []


def test_public_names_resolve():
    import attnzoo

    assert attnzoo.__all__
    assert set(attnzoo.__all__) <= set(dir(attnzoo))
    missing = [name for name in attnzoo.__all__ if not hasattr(attnzoo, name)]
    assert not missing
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = attnzoo.no_such_name


@pytest.mark.parametrize("name", ["swap", "describe"])
def test_first_use_of_a_public_name(name, fresh_python):
    """In an interpreter that has not imported attnzoo, so that circular imports are detected."""
    done = fresh_python(f"import attnzoo; attnzoo.{name}", cwd=ROOT)
    assert done.returncode == 0, done.stderr


def too_long(path: Path) -> list[str]:
    """Return the functions of a file, and the file itself, that are too long."""
    source = path.read_text("utf-8")
    name = path.relative_to(ROOT)
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
            written = node.end_lineno - body[0].lineno + 1 if node.end_lineno else 0
            lines = written + node.body[0].lineno - node.lineno  # the docstring does not count
            if lines >= MAX_FUNCTION_LINES:
                found.append(f"{name}:{node.lineno} {node.name} has {lines} lines")
    return found


def test_functions_are_short():
    found = []
    for path in python_files("attnzoo", "benchmarks", "integrations"):
        if "triton" not in path.parts:
            found += too_long(path)
    assert not found, "\n".join(found)


def test_only_one_module_loads_what_a_folder_holds():
    """It passes ``trust_remote_code=False``; without it, transformers asks on standard input."""
    loaders = {"from_pretrained", "from_config"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files("attnzoo")
        if path != ROOT / "attnzoo" / "hf" / "pretrained.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in loaders
        # patches read these methods of a class, by vars(cls)["from_pretrained"], and set them
        if isinstance(node.ctx, ast.Load)
    ]
    assert not found


def test_no_name_hides_a_library():
    """A script's own folder comes first on the path: ``types.py`` beside it hides the library's."""
    taken = sys.stdlib_module_names | set(packages_distributions())
    taken |= CORE_LIBRARIES | {"transformers", "accelerate", "peft", "datasets", "jax"}
    # Files of a mechanism carry its name through all layers, and are no scripts.
    layers = [ROOT / "attnzoo" / name for name in ("contract", "ops", "backends", "runtime")]
    found = set()
    for path in python_files("attnzoo", "benchmarks", "integrations"):
        if any(path.is_relative_to(layer) for layer in layers):
            continue
        # integrations/peft/ has the library's name, and hides nothing as long as it is no package
        packages = [x for x in path.parents if (x / "__init__.py").is_file() and x.parent != ROOT]
        for part in (path, *packages):
            if part.stem in taken and part.stem != "__init__":
                found.add(str(part.relative_to(ROOT)))
    assert found <= {"attnzoo/__main__.py"}, sorted(found)


def tracked_files() -> list[Path]:
    """Return what git tracks, or would track on the next ``git add``."""
    listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = run(
            ["git", "-c", "safe.directory=*", *listing],
            cwd=ROOT,
            errors="surrogateescape",
            check=True,
        )
    except (OSError, AssertionError):
        pytest.skip("this tree is not a git checkout, so no list of its files is at hand")
    return [ROOT / name for name in done.stdout.split("\0") if name]


def machine_paths() -> re.Pattern[bytes]:
    """Match the folder this tree lies in, and home folders."""
    here = {ROOT, ROOT.parent} - {Path("/"), Path(tempfile.gettempdir())}
    places = "|".join(re.escape(str(path)) for path in sorted(here, reverse=True))
    homes = r"/(?:root|home/[\w.-]+|Users/[\w.-]+)/"
    return re.compile(rf"(?<![\w.~-])(?:(?:{places})(?![\w-])|{homes})".encode())


def test_no_file_names_a_machine():
    pattern = machine_paths()
    found = []
    for path in tracked_files():
        if path.is_symlink():
            content = os.fsencode(os.readlink(path))
        elif path.is_file():
            content = path.read_bytes()
        else:  # deleted, but still in git's index
            continue
        for match in pattern.finditer(content):
            line = content.count(b"\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line} has {match.group().decode()}")
    assert not found, "\n".join(found)


def test_a_machine_path_is_found():
    pattern = machine_paths()
    assert pattern.search(f"written to {ROOT}/out".encode())
    assert pattern.search(b"cache in /" + b"root/.cache")
    assert pattern.search(b"'/" + b"home/me/model'")
    assert not pattern.search(b"see /usr/bin/chromium and tests/root/x")
